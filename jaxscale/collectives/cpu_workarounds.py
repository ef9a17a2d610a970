"""Workarounds for XLA's CPU backend, with collectives on simulated devices.

It runs what a program has independent of each other at the same time, in threads of a
pool that all devices of a process share, and a collective keeps its thread until all
devices have come. Hence two things here and `run.session.set_cpu_threads`, measured
with jax 0.10.2. GPUs and TPUs run the collectives of a program in its order, and
nothing here touches their programs.
"""

from typing import Any

import jax
from jax.core import Tracer
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.sharding import Mesh


def one_at_a_time(function: Any, mesh: Mesh) -> Any:
  """The jitted or compiled function; on simulated devices it returns when it is done.

  With a few steps dispatched ahead devices wait for different ones, until XLA aborts
  the process after 40 s (200 steps of which nothing was read, 8 devices). What it
  compiles there, at a call or by `.lower(...).compile()`, is `numbered`.
  """
  here = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
  if len(here) == 1 or here[0].platform != "cpu":
    return function
  compiled: dict[Any, Any] = {}

  def lower(*args: Any):
    return numbered(function.lower(*args))

  def call(*args: Any):
    run, (leaves, structure) = function, jax.tree.flatten(args)
    if any(isinstance(x, Tracer) for x in leaves):
      return function(*args)
    if hasattr(function, "lower"):
      where = (getattr(x, "sharding", None) for x in leaves)
      key = structure, tuple(map(jax.typeof, leaves)), tuple(where)
      if key not in compiled:
        compiled[key] = lower(*args).compile()
      run = compiled[key]
    return jax.block_until_ready(run(*args))

  call.lower = lower  # pyright: ignore
  for name in ("as_text", "memory_analysis"):  # of `jax.stages.Compiled`
    if hasattr(function, name):
      setattr(call, name, getattr(function, name))
  return call


def numbered(lowered: Any, *, apart: bool = True) -> Any:
  """The lowered program, with a number of its own for every collective, in place.

  JAX gives all of them the same, and devices rendezvous by number, kind and group.
  Those of a loop may run at the same time as others before or after it, where neither
  needs the other, and on one device sooner than on another: then each device joins
  another collective, and XLA adds up what does not belong together, or dies (8 devices,
  the step of five models side by side under ZeRO-2: once in every run).

  Args:
    lowered: `jax.stages.Lowered`. No function with collectives may be called from
      two places of it.
    apart: False: the same number for all, as a process with one device has it. What is
      gathered twice is then gathered once.
  """
  module = lowered.compiler_ir("stablehlo")
  count = 0

  def visit(op: Any):
    nonlocal count
    if "channel_handle" in op.attributes:
      count = count + 1 if apart else 1
      own = stablehlo.ChannelHandle.get(count, 1, module.context)  # device to device
      op.attributes["channel_handle"] = own
    return ir.WalkResult.ADVANCE

  module.operation.walk(visit)
  return lowered
