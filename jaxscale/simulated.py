"""What XLA's CPU backend wants of programs with collectives on simulated devices.

It runs what a program has independent of each other at the same time, in threads of a
pool that all devices of a process share, and a collective keeps its thread until all
devices have come. Hence two things here and `joining.enough_threads`, measured with
jax 0.10.2. GPUs and TPUs run the collectives of a program in its order, and nothing
here touches their programs.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from typing import Any

import jax
import numpy as np
from jax import lax
from jax._src import distributed
from jax.core import Tracer
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxscale.scaling.parse import Groups, replica_groups


def one_at_a_time(function: Any, mesh: Mesh) -> Any:
  """The jitted or compiled function; on simulated devices it returns when it is done.

  With a few steps dispatched ahead devices wait for different ones, until XLA aborts
  the process after 40 s (200 steps of which nothing was read, 8 devices). What it
  compiles there, at a call or by `.lower(...).compile()`, is `numbered`.
  """
  here = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
  if mesh.size == 1 or here[0].platform != "cpu":
    return function
  compiled: dict[Any, Any] = {}

  def lower(*args):
    return numbered(function.lower(*args))

  if hasattr(function, "as_text"):
    meet(function, mesh)

  def call(*args):
    run, (leaves, structure) = function, jax.tree.flatten(args)
    if any(isinstance(x, Tracer) for x in leaves):
      return function(*args)
    if hasattr(function, "lower"):
      where = (getattr(x, "sharding", None) for x in leaves)
      key = structure, tuple(map(jax.typeof, leaves)), tuple(where)
      if key not in compiled:
        compiled[key] = lower(*args).compile()
        meet(compiled[key], mesh)
      run = compiled[key]
    return jax.block_until_ready(run(*args))

  call.lower = lower  # pyright: ignore
  return call


def numbered(lowered: Any) -> Any:
  """The lowered program, with a number of its own for every collective, in place.

  JAX gives all of them the same, and devices meet by number, kind and group. Those of
  a loop may run at the same time as others before or after it, where neither needs the
  other, and on one device sooner than on another: then each device meets another
  collective, and XLA adds up what does not belong together, or dies (8 devices, the
  step of five models beside each other under ZeRO-2: once in every run).

  Args:
    lowered: `jax.stages.Lowered`. No function with collectives may be called from
      two places of it.
  """
  module = lowered.compiler_ir("stablehlo")
  count = 0

  def visit(op):
    nonlocal count
    if "channel_handle" in op.attributes:
      count += 1
      own = stablehlo.ChannelHandle.get(count, _DEVICE_TO_DEVICE, module.context)
      op.attributes["channel_handle"] = own
    return ir.WalkResult.ADVANCE

  module.operation.walk(visit)
  return lowered


def meet(compiled: Any, mesh: Mesh) -> None:
  """Connect the processes of each of a program's collectives, one group after another.

  Gloo connects a group when a collective first needs it, and a process that waits
  there can hold back another of its collectives, for which a process of that group
  waits elsewhere: four processes, data 2 x model 2, hung in the first step.

  Args:
    compiled: `jax.stages.Compiled`; all processes call this for the same programs.
    mesh: that it is for.
  """
  if jax.process_count() == 1:
    return
  everyone = tuple(range(mesh.size))
  texts = re.findall(
    r"replica_groups=(\{\{[\d,{}]*\}\}|\[[\d,]*\]<=\[[\d,]*\](?:T\([\d,]*\))?)",
    compiled.as_text(),
  )
  found: set[Groups] = {(everyone,)}
  for text in texts:
    found.add(replica_groups(text, mesh.size) or (everyone,))
  # Gloo waits 30 s for the others, who may still be compiling. Named by what it is of:
  # threads may come here in any order.
  name = str(sorted(found))
  _MEETINGS[name] += 1
  client: Any = distributed.global_state.client
  client.wait_at_barrier(f"meet {_MEETINGS[name]} {name}", _WAIT_MS)
  for groups in sorted(found):
    if max(map(len, groups)) > 1:
      _connect(tuple(mesh.devices.flat), groups)


@functools.cache
def _connect(devices: tuple[Any, ...], groups: Groups) -> None:
  """Add up a number of each device in each group, and wait for it."""
  line = Mesh(np.array(devices), ("all",))

  def add(x):
    return lax.psum(x, "all", axis_index_groups=[list(group) for group in groups])

  added = jax.shard_map(
    add, mesh=line, in_specs=P("all"), out_specs=P("all"), check_vma=False
  )
  x = jax.make_array_from_callback(
    (len(devices),), NamedSharding(line, P("all")), lambda _: np.ones(1, np.float32)
  )
  jax.block_until_ready(jax.jit(added)(x))


_MEETINGS: Counter[str] = Counter()
_WAIT_MS = 600_000
_DEVICE_TO_DEVICE = 1  # the type of a channel in StableHLO
