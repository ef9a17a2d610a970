"""Choice of the remat policy by the memory of the devices."""

from __future__ import annotations

from typing import Any

import jax
import optax

from jaxscale import cluster
from jaxscale import config as cfg
from jaxscale.experiment.frozen import trainable
from jaxscale.mesh import on_cpu
from jaxscale.models import Stack
from jaxscale.parallel.specs import Layout
from jaxscale.parallel.stored import POLICIES, step_bytes


def device_memory() -> int | None:
  """Return the bytes that JAX may use on any device of all processes; None if unknown.

  All processes must call this, since they must choose the same policy.
  """
  stats = [device.memory_stats() or {} for device in jax.local_devices()]
  return min(cluster.gather(min(s.get("bytes_limit", 0) for s in stats))) or None


def choose(
  config: cfg.Config,
  model: Any,
  layout: Layout | None,
  tx: optax.GradientTransformation,
  batch: Any,
  rows: int,
  memory: int | None,
) -> tuple[str, list[str]]:
  """Return the remat policy of a phase, and a note on the choice.

  It is the one of `Layout.remat`. If this is None, it is the first of `POLICIES` whose step
  fits the memory by `step_bytes`; "none" on CPUs, for models that are not stacks, and where
  the memory is unknown.

  Args:
    config: the config of the run.
    model: the model from `model.make_model`.
    layout: the layout from `make_layout`.
    tx: the optimizer.
    batch: shapes of a batch with one row per device.
    rows: number of rows in a device's micro-batch.
    memory: the bytes that a program may take on a device; None means unknown.
  """
  if config.layout.remat is not None:
    return config.layout.remat, []
  if not isinstance(model, Stack) or layout is None or on_cpu(layout.mesh):
    return "none", []
  if memory is None:
    return "none", ["remat: none, because the devices do not report their memory"]
  stages = layout.mesh.shape.get("stage", 1)
  held = (stages > 1) * config.accumulate_steps
  if config.layout.schedule == "1f1b":
    held = min(held, 2 * stages - 1)
  needs = step_bytes(model, layout, tx, batch, rows, trainable=trainable(config), held=held)
  # If layers gather their parameters, "none" needs more memory and no less time.
  names = POLICIES[1:] if layout.shard in ("zero2", "fsdp") else POLICIES
  chosen = next((name for name in names if needs[name] <= memory), names[-1])
  others = f", none {_gib(needs['none'])}" * (chosen != "none")
  line = f"remat: {chosen} (a step needs about {_gib(needs[chosen])} of {_gib(memory)}{others})"
  return chosen, [line]


def _gib(num_bytes: float) -> str:
  return f"{num_bytes / 2**30:.1f} GiB"
