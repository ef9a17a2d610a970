"""What a layout does: every parameter, every collective, the memory of a device.

Read from the compiled step, before any example is: what the compiler made of it, not
what was meant.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import jax

from jaxscale import build
from jaxscale.parallel.pipeline import bubble
from jaxscale.paths import path_name
from jaxscale.scaling import hlo


def describe(experiment: build.Experiment) -> str:
  """The page that `--describe` prints; compiles the train step.

  Args:
    experiment: at the stage that it is about.

  Example:
    >>> print(describe(build.experiment(config)))            # doctest: +SKIP
  """
  state = experiment.abstract_state()
  compiled: Any = experiment.lower_train_step(state).compile()
  parts = [
    _head(experiment),
    _parameters(state.params),
    _state(state),
    _memory(compiled),
    "collectives of one step, of one device:\n"
    + hlo.summary(hlo.collectives(compiled, experiment.mesh)),
  ]
  return "\n\n".join(part for part in parts if part)


def _head(experiment: build.Experiment) -> str:
  config, mesh, stage = experiment.config, experiment.mesh, experiment.stage
  grid = " x ".join(f"{axis} {n}" for axis, n in mesh.shape.items())
  layout = config.layout
  lines = [
    f"{mesh.size} x {mesh.devices.flat[0].device_kind} as {grid}",
    f"split along fsdp: {layout.shard}",
  ]
  if "model" in mesh.axis_names:
    lines.append(f"split along model: {layout.model.replace('_', ' ')}")
  if "stage" in mesh.axis_names:
    stages, micros = mesh.shape["stage"], stage.accumulate_steps
    idle = bubble(layout.schedule, stages, micros)
    lines.append(
      f"pipeline: {layout.schedule}, {stages} stages, {micros} micro-batches; "
      f"{idle:.0%} of a step a stage is idle"
    )
  lines.append(f"remat: {layout.remat}")
  return "\n".join(lines)


def _parameters(params: Any) -> str:
  """A line for each parameter, and their sum."""
  rows = [("parameter", "shape", "dtype", "split", "MB/device")]
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    rows.append(
      (
        path_name(path),
        "x".join(map(str, leaf.shape)) or "-",
        str(leaf.dtype),
        _spec(leaf),
        f"{_bytes(leaf) / 1e6:.3f}",
      )
    )
  leaves = jax.tree.leaves(params)
  count = sum(math.prod(x.shape) for x in leaves)
  total = sum(map(_bytes, leaves)) / 1e6
  rows.append((f"{count:,} in all", "", "", "", f"{total:,.3f}"))
  return _table(rows)


def _state(state: Any) -> str:
  """Bytes of each part of the state on one device."""
  rows = [("state", "MB/device")]
  for name, part in state._asdict().items():
    if size := sum(map(_bytes, jax.tree.leaves(part))):
      rows.append((name.replace("_", " "), f"{size / 1e6:,.3f}"))
  return _table(rows)


def _memory(compiled: Any) -> str:
  """What the compiler says of a device's memory, where it does."""
  found = compiled.memory_analysis()
  if found is None:
    return ""
  alias = found.alias_size_in_bytes
  arguments, outputs = found.argument_size_in_bytes, found.output_size_in_bytes
  temporary = found.temp_size_in_bytes
  peak = arguments + outputs - alias + temporary
  return (
    f"memory of one device in a step: {peak / 1e6:,.1f} MB "
    f"(state and batch {arguments / 1e6:,.1f}, temporary {temporary / 1e6:,.1f}, new "
    f"{(outputs - alias) / 1e6:,.1f})"
  )


def _spec(leaf: Any) -> str:
  """The axes of each dim, as "fsdp, -, model"."""
  dims = [*leaf.sharding.spec, *[None] * leaf.ndim][: leaf.ndim]
  names = ["+".join(a) if isinstance(a, tuple) else a or "-" for a in dims]
  return ", ".join(names) if any(dims) else "whole"


def _bytes(leaf: Any) -> int:
  """That one device has of an array."""
  shard = leaf.sharding.shard_shape(leaf.shape)
  return math.prod(shard) * leaf.dtype.itemsize


def _table(rows: Iterable[tuple[str, ...]]) -> str:
  """Columns that line up, the last one to the right."""
  rows = list(rows)
  widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
  lines = []
  for row in rows:
    cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
    cells[-1] = row[-1].rjust(widths[-1])
    lines.append("  ".join(cells).rstrip())
  return "\n".join(lines)
