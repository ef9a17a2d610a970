"""Workarounds for collectives on simulated devices of XLA's CPU backend.

The backend runs independent parts of a program in parallel, in a thread pool that all
devices of a process share, and a collective occupies its thread until all devices have
arrived. The two functions of this module and `run.session.set_cpu_threads` prevent hangs
and crashes; they were measured with jax 0.10.2. GPUs and TPUs run the collectives of a
program in order, and their programs are not changed.
"""

from typing import Any

import jax
from jax.core import Tracer
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.sharding import Mesh


def one_at_a_time(function: Any, mesh: Mesh) -> Any:
  """Make a jitted or compiled function wait for its results on simulated devices.

  If a few steps are dispatched ahead, devices wait for different steps until XLA aborts
  the process after 40 s (seen with 8 devices after 200 steps without reading results).
  Programs that it compiles there, at a call or by `.lower(...).compile()`, are `numbered`.
  On other devices the function is returned unchanged.
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
  for name in ("as_text", "memory_analysis"):  # methods of `jax.stages.Compiled`
    if hasattr(function, name):
      setattr(call, name, getattr(function, name))
  return call


def numbered(lowered: Any, *, apart: bool = True) -> Any:
  """Give every collective of a lowered program a unique channel number, in place.

  JAX gives all collectives the same number, and devices match collectives by number, kind
  and group. If a collective in a loop is independent of one before or after it, devices
  may run them in different orders. XLA then combines values that do not belong together,
  or crashes (once per run for the step of five models in parallel under ZeRO-2 on 8
  devices).

  Args:
    lowered: `jax.stages.Lowered`. No function with collectives may be called from two
      places in it.
    apart: False gives all collectives the same number, as in a process with one device,
      so that repeated gathers of the same array are merged.
  """
  module = lowered.compiler_ir("stablehlo")
  count = 0

  def visit(op: Any):
    nonlocal count
    if "channel_handle" in op.attributes:
      count = count + 1 if apart else 1
      own = stablehlo.ChannelHandle.get(count, 1, module.context)  # 1: device to device
      op.attributes["channel_handle"] = own
    return ir.WalkResult.ADVANCE

  module.operation.walk(visit)
  return lowered
