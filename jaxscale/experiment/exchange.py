"""From a Config to the gradient exchange and how often workers agree.

The part of `parts` that is about the network; what it makes are pure functions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from jax.sharding import Mesh

from jaxscale import collectives
from jaxscale import config as cfg
from jaxscale.collectives import Link, Measured
from jaxscale.errors import ConfigError
from jaxscale.exchange import Exchange, plain, planned
from jaxscale.exchange.buckets import best_bucket_bytes, bucketed
from jaxscale.exchange.delayed import delayed, warm_start
from jaxscale.exchange.local import (
  LocalUpdate,
  block_momentum,
  block_steps,
  check_samples,
  diloco,
  local_sgd,
)
from jaxscale.exchange.low_precision import half_precision, int8
from jaxscale.exchange.one_bit import one_bit
from jaxscale.exchange.power_sgd import power_sgd
from jaxscale.exchange.top_k import top_k
from jaxscale.experiment.derive import Derived
from jaxscale.experiment.parts import bn_span
from jaxscale.experiment.phases import Phase, step_at
from jaxscale.mesh import AXES, BN_AXIS


def make_exchange(
  config: cfg.Config,
  derived: Derived,
  sizes: dict[str, int],
  params: Callable[[], Any],
  mesh: Mesh,
) -> tuple[Exchange, list[str]]:
  """How gradients are averaged, and what there is to say about it.

  Args:
    config: whose `exchange` it is.
    derived: for the steps of `plain_epochs`.
    sizes: of the axes that are averaged over.
    params: gives those of a device, or their shapes.
    mesh: that the axes are of.

  Raises:
    ConfigError: it does not fit the devices; the file of links is no such file.
  """
  axes, chosen, notes = tuple(sizes), config.exchange, []
  num_devices = math.prod(sizes.values())
  if not axes:  # gradients are summed in the backward pass
    return plain(axes), []
  try:
    match chosen:
      case cfg.AllReduce():
        made, notes = _all_reduce(chosen, sizes, params, mesh)
      case cfg.Int8():
        made = int8(
          axes, block=chosen.block, bucket_bytes=chosen.bucket_bytes, seed=config.seed
        )
      case cfg.TopK():
        made = top_k(
          axes, num_devices=num_devices, share=chosen.share, per=chosen.per,
          bucket_bytes=chosen.bucket_bytes,
        )  # fmt: skip
      case cfg.PowerSGD():
        made = power_sgd(
          axes, rank=chosen.rank, bucket_bytes=chosen.bucket_bytes, seed=config.seed
        )
      case cfg.OneBit():
        made = one_bit(axes, num_devices=num_devices, bucket_bytes=chosen.bucket_bytes)
  except ConfigError as e:
    raise ConfigError(f"{type(chosen).__name__}.{e}") from None
  plain_epochs = getattr(chosen, "plain_epochs", 0.0)
  if plain_epochs:
    examples = math.ceil(plain_epochs * derived.num_train)
    # The first that a delayed exchange sends are zeros.
    steps = step_at(derived.phases, examples) + chosen.delayed
    made = warm_start(made, axes, steps=steps)
  return delayed(made) if chosen.delayed else made, notes


def _all_reduce(
  chosen: cfg.AllReduce, sizes: dict[str, int], params: Callable[[], Any], mesh: Mesh
) -> tuple[Exchange, list[str]]:
  """By the algorithm asked for, in 32 or 16 bits, in buckets or not."""
  axes = tuple(sizes)
  half = chosen.dtype if isinstance(chosen, cfg.HalfPrecision) else None
  links, measured, source = _links(chosen, sizes)
  planned_for = () if chosen.algorithm == "psum" else params()
  num_bytes = collectives.payload_bytes(planned_for, half)
  if chosen.bucket_bytes is not None:  # of float32, whatever is sent
    num_bytes = min(num_bytes, chosen.bucket_bytes // (2 if half else 1))
  dims = [(axis, int(n)) for axis, _, n in (d.partition(":") for d in chosen.dims)]
  by = collectives.plan(
    sizes, num_bytes, chosen.algorithm, dims=dims or None, links=links,
    measured=measured,
  )  # fmt: skip
  notes = []
  if chosen.algorithm in ("auto", "torus"):
    notes = [f"exchange by {by}, for {num_bytes / 1e6:.3g} MB at once, {source}"]
  if isinstance(chosen, cfg.HalfPrecision):
    options = {"sum_in": chosen.sum_in, "bucket_bytes": chosen.bucket_bytes}
    return half_precision(axes, chosen.dtype, by=by, **options), notes
  bucket_bytes = chosen.bucket_bytes
  if by.algorithm == "psum" and bucket_bytes is None:
    bucket_bytes = best_bucket_bytes(mesh)
  if bucket_bytes is not None:
    reduce = functools.partial(collectives.sum_tree, by=by)
    return bucketed(axes, bucket_bytes=bucket_bytes, reduce=reduce), notes
  return (plain(axes) if by.algorithm == "psum" else planned(by)), notes


def _links(
  chosen: cfg.AllReduce, sizes: dict[str, int]
) -> tuple[dict[str, Link], list[Measured], str]:
  """Links of the mesh's axes, what was measured on such a mesh, and whose they are."""
  if chosen.links is None:
    found, measured = collectives.default_links(AXES), []
    source = "planned by assumed links"
  else:
    try:
      found, measured = collectives.read_measurements(chosen.links)
    except ConfigError as e:
      raise ConfigError(f"links={e}") from None
    measured = collectives.measured_on(sizes, measured)
    source = f"as measured in {chosen.links}" if measured else (
      f"planned by the links of {chosen.links}: no mesh of this shape was measured"
    )  # fmt: skip
  # Neighbours of that axis, where they were not measured apart.
  for axis in (BN_AXIS, "fsdp", "model"):
    if axis in sizes and axis not in found and "data" in found:
      found = found | {axis: found["data"]}
  missing = [axis for axis, n in sizes.items() if n > 1 and axis not in found]
  if missing:
    raise ConfigError(
      f"links={chosen.links}: has no {missing[0]!r}, measure it on the mesh of the "
      f"run: --mesh {'x'.join(str(sizes[a]) for a in AXES)}"
    )
  return {axis: found[axis] for axis in found if axis in sizes}, measured, source


class Agreement(NamedTuple):
  """How workers that train alone agree; as `make_local_train_step` takes it."""

  method: LocalUpdate
  workers: tuple[str, ...] | None


def make_sync(
  config: cfg.Config, derived: Derived, phase: Phase, mesh: Mesh
) -> tuple[Agreement | None, list[str]]:
  """How workers agree in a phase, or None, and what there is to say about it.

  Raises:
    ConfigError: workers are to share BatchNorm statistics, or there are too few
      examples for block momentum.
  """
  sync = config.sync
  if isinstance(sync, cfg.EveryStep):
    return None, []
  alone = None if sync.workers == "device" else ("replica",)
  span = bn_span(config, derived, phase).axis_name or ()
  if span and (alone is None or set(span) & {*alone}):
    raise ConfigError(
      f"{type(config.model).__name__}.bn_span={getattr(config.model, 'bn_span', '')}: "
      "BatchNorm statistics over workers that train alone, make it 'device' or less"
    )
  num_workers = mesh.size if alone is None else mesh.shape["replica"]
  rows = phase.batch_size // num_workers
  match sync:
    case cfg.BlockMomentum():
      every = sync.sync_every_steps or block_steps(rows)
      note = check_samples(derived.num_train, every, rows, num_workers)
      made = block_momentum(
        every, num_workers, momentum=sync.outer_momentum, rate=sync.outer_lr,
        nesterov=sync.nesterov, reset_momentum=sync.reset_momentum,
      )  # fmt: skip
      return Agreement(made, alone), [note] if note else []
    case cfg.DiLoCo():
      made = diloco(
        sync.sync_every_steps, rate=sync.outer_lr, momentum=sync.outer_momentum
      )
      return Agreement(made, alone), []
  return Agreement(local_sgd(sync.sync_every_steps), alone), []
