"""Describe a layout: every parameter, every collective, and the memory of a device.

All values are read from the compiled step, so they show the compiler's result and not the
intent. No example is needed.
"""

from __future__ import annotations

import math
from typing import Any

import jax

from jaxscale import hlo
from jaxscale.experiment import build
from jaxscale.experiment import make_layout as layout_parts
from jaxscale.metrics.text import table
from jaxscale.optim.tree_paths import path_name
from jaxscale.parallel.placement import HOST


def describe(experiment: build.Experiment) -> str:
  """Return the page that `jaxscale describe` prints; compiles the train step.

  Args:
    experiment: the experiment at the phase to describe.

  Example:
    >>> print(describe(build.experiment(config)))            # doctest: +SKIP
  """
  state = experiment.abstract_state()
  compiled: Any = experiment.lower_train_step(state).compile()
  sent = hlo.summary(hlo.collectives(compiled, experiment.mesh))
  parts = [_head(experiment), _parameters(state.params), _factors(experiment), _state(state)]
  parts += [_memory(compiled), f"collectives of one step, of one device:\n{sent}"]
  dtype = experiment.config.dtype
  # The collectives of a CPU differ from those of an accelerator.
  if experiment.mesh.devices.flat[0].platform == "cpu" and dtype != "float32":
    parts.append(f"XLA on CPU sends {dtype} as float32: accelerators send half the bytes of those")
  return "\n\n".join(part for part in parts if part)


def _head(experiment: build.Experiment) -> str:
  config, mesh = experiment.config, experiment.mesh
  grid = " x ".join(f"{axis} {n}" for axis, n in mesh.shape.items())
  layout = config.layout
  lines = [
    f"{mesh.size} x {mesh.devices.flat[0].device_kind} as {grid}",
    f"layout.shard (along fsdp): {layout_parts.shard_on(config, mesh)}",
  ]
  if "model" in mesh.axis_names:
    lines.append(f"layout.model (along model): {layout.model}")
  again = ", and each stage again from its input" * ("stage" in mesh.axis_names)
  lines += [f"layout.remat: {experiment.remat}{again}", *experiment.dealt_out, *experiment.notes]
  return "\n".join(lines)


def _parameters(params: Any) -> str:
  """Return one line per parameter, and their sum."""
  rows = []
  for path, leaf in jax.tree.leaves_with_path(params):
    dims = [*leaf.sharding.spec, *[None] * leaf.ndim][: leaf.ndim]
    names = ["+".join(a) if isinstance(a, tuple) else a or "-" for a in dims]
    split = ", ".join(names) if any(dims) else "whole"
    shape = "x".join(map(str, leaf.shape)) or "-"
    size = f"{_bytes(leaf) / 1e6:.3f}"
    rows.append((path_name(path), shape, str(leaf.dtype), split, size))
  leaves = jax.tree.leaves(params)
  count = sum(math.prod(x.shape) for x in leaves)
  total = sum(map(_bytes, leaves)) / 1e6
  rows.append((f"{count:,} parameters", "", "", "", f"{total:,.3f}"))
  return table(("parameter", "shape", "dtype", "split", "MB/device"), rows, left=range(4))


def _factors(experiment: build.Experiment) -> str:
  """Return the factors of the parametrization, one line per parameter that has some; or ""."""
  config, rows = experiment.config, []
  for path, f in experiment.factors.items():
    values = f.stored(config.optimizer.update_rule)
    rows += [(path, f.kind, *(f"{x:.4g}" for x in values))] if {*values} != {1} else []
  head = (f"{type(config.parametrization).__name__}: factors of", "kind", "init", "lr", "decay")
  return table((*head, "eps"), rows, left=(0, 1)) if experiment.factors else ""


def _state(state: Any) -> str:
  """Return the bytes of each part of the state on one device, and on the host."""
  rows = []
  for name, part in state._asdict().items():
    leaves = jax.tree.leaves(part)
    on_host = sum(_bytes(x) for x in leaves if x.sharding.memory_kind == HOST)
    for where, size in (("", sum(map(_bytes, leaves)) - on_host), (", on the host", on_host)):
      if size:
        rows.append((name.replace("_", " ") + where, f"{size / 1e6:,.3f}"))
  return table(("state", "MB/device"), rows)


def _memory(compiled: Any) -> str:
  """Return the memory of a device by the compiler; "" if it does not report memory."""
  if compiled.memory_analysis() is None:
    return ""
  m = hlo.memory_of(compiled)
  host = f"; {m.host / 1e6:,.1f} MB on the host" if m.host else ""
  parts = f"state and batch {m.arguments / 1e6:,.1f}, temporary "
  parts += f"{m.temporaries / 1e6:,.1f}, outputs {(m.outputs - m.aliased) / 1e6:,.1f}"
  return f"memory of one device in a step: {m.total / 1e6:,.1f} MB ({parts}){host}"


def _bytes(leaf: Any) -> int:
  """Return the bytes of an array on one device."""
  return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
