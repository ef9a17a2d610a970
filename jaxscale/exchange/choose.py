"""What `AllReduce` and `HalfPrecision` build: the all-reduce that settings choose.

Where a layout splits gradients (ZeRO-2, FSDP), the sum along fsdp is not here but in
the backward pass of parallel/fsdp_gather.py.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from jaxscale import collectives
from jaxscale.collectives import Link, Measured
from jaxscale.errors import ConfigError
from jaxscale.exchange.base import Exchange, plain, planned
from jaxscale.exchange.buckets import BUCKET_BYTES, best_bucket_bytes, bucketed
from jaxscale.exchange.low_precision import half_precision
from jaxscale.mesh import AXES, BN_AXIS

if TYPE_CHECKING:
  from jaxscale.config.bases import ExchangeContext
  from jaxscale.exchange.settings import AllReduce


def all_reduce(chosen: AllReduce, context: ExchangeContext) -> Exchange:
  """By the algorithm asked for, in 32 or 16 bits, in buckets or not.

  Raises:
    ConfigError: the algorithm does not fit the devices, or the file of links is none.
  """
  axes, bucket_bytes = context.axes, chosen.bucket_bytes
  half = getattr(chosen, "dtype", None)  # of HalfPrecision
  links, measured, source = _links(chosen.links, context.sizes)
  planned_for = () if chosen.algorithm == "psum" else context.params()
  num_bytes = collectives.payload_bytes(planned_for, half)
  if bucket_bytes is not None:  # of float32, whatever is sent
    num_bytes = min(num_bytes, bucket_bytes // (2 if half else 1))
  dims = [(axis, int(n)) for axis, _, n in (d.partition(":") for d in chosen.dims)]
  by = collectives.plan(
    context.sizes, num_bytes, chosen.algorithm, dims=dims or None, links=links,
    measured=measured,
  )  # fmt: skip
  if chosen.algorithm in ("auto", "torus"):
    context.note(f"exchange by {by}, for {num_bytes / 1e6:.3g} MB at once, {source}")
  if half is not None:
    own: Any = chosen
    size = chosen.bucket_bytes or BUCKET_BYTES
    return half_precision(axes, half, by=by, sum_in=own.sum_in, bucket_bytes=size)
  if by.algorithm == "psum" and bucket_bytes is None:
    bucket_bytes = best_bucket_bytes(context.mesh)
  if bucket_bytes is not None:
    reduce = functools.partial(collectives.sum_tree, by=by)
    return bucketed(axes, bucket_bytes=bucket_bytes, reduce=reduce)
  return plain(axes) if by.algorithm == "psum" else planned(by)


def _links(
  file: str | None, sizes: dict[str, int]
) -> tuple[dict[str, Link], list[Measured], str]:
  """Links of the mesh's axes, what was measured on such a mesh, and whose they are."""
  if file is None:
    found, measured = collectives.default_links(AXES), []
    source = "planned by assumed links"
  else:
    try:
      found, measured = collectives.read_measurements(file)
    except ConfigError as e:
      raise ConfigError(f"links={e}") from None
    measured = collectives.measured_on(sizes, measured)
    source = f"as measured in {file}" if measured else (
      f"planned by the links of {file}: no mesh of this shape was measured"
    )  # fmt: skip
  # Neighbours of that axis, where they were not measured apart.
  for axis in (BN_AXIS, "fsdp", "model"):
    if axis in sizes and axis not in found and "data" in found:
      found = found | {axis: found["data"]}
  if missing := [axis for axis, n in sizes.items() if n > 1 and axis not in found]:
    raise ConfigError(
      f"links={file}: has no {missing[0]!r}, measure it on the mesh of the "
      f"run: --mesh {'x'.join(str(sizes[a]) for a in AXES)}"
    )
  return {axis: found[axis] for axis in found if axis in sizes}, measured, source
