"""Settings of how gradients cross the network, and how often."""

from __future__ import annotations

from typing import Annotated, Literal

from jaxscale.config.bounds import Count, Fraction, NonNegative, Positive
from jaxscale.config.validation import settings
from jaxscale.errors import ConfigError

_BUCKET = 25 * 2**20  # PyTorch's DistributedDataParallel's, arXiv:2006.15704


@settings
class AllReduce:
  """The mean of whole gradients, exact but for rounding.

  Attributes:
    algorithm: "psum" (XLA's own), "ring", "torus", "hierarchical",
      "halving_doubling", or "auto": what is fastest by `links`.
    dims: of "torus", as "data:4", fastest links first; (): the planner's.
    links: file of `python -m jaxscale.cli.bench --json FILE`; None: links
      are assumed.
    bucket_bytes: gradients travel in flat buckets of this size; None: as tensors,
      or for "psum" between processes on CPUs in buckets of 25 MiB.
    delayed: apply the mean of the step before, so that the exchange can hide.
  """

  algorithm: Literal[
    "psum", "ring", "torus", "hierarchical", "halving_doubling", "auto"
  ] = "psum"
  dims: tuple[str, ...] = ()
  links: str | None = None
  bucket_bytes: Annotated[int | None, ">= 4"] = None
  delayed: bool = False

  def __post_init__(self):
    name = type(self).__name__
    if self.dims and self.algorithm != "torus":
      raise ConfigError(
        f"{name}.dims={self.dims}: {self.algorithm!r} has none, set algorithm='torus'"
      )
    for dim in self.dims:
      axis, _, size = dim.partition(":")
      if not (axis and size.isdecimal()):
        raise ConfigError(f"{name}.dims={self.dims}: give axis:size, as 'data:4'")


@settings
class HalfPrecision(AllReduce):
  """The mean of gradients that travel in 16 bits.

  Attributes:
    dtype: "bfloat16", or "float16", scaled to its range bucket by bucket.
    sum_in: "float32", or "payload": whatever the backend adds them in.
    bucket_bytes: of gradients that travel together.
  """

  dtype: Literal["bfloat16", "float16"] = "bfloat16"
  sum_in: Literal["float32", "payload"] = "float32"
  bucket_bytes: Annotated[int, ">= 4"] = _BUCKET


@settings
class Compressed:
  """What compressed exchanges share.

  Attributes:
    bucket_bytes: of gradients that travel together.
    delayed: apply the mean of the step before, so that the exchange can hide.
  """

  bucket_bytes: Count = _BUCKET
  delayed: bool = False


@settings
class Int8(Compressed):
  """The mean of gradients in 8 bits, a scale a block, rounded stochastically.

  Attributes:
    block: elements that share a scale.
  """

  block: Count = 256


@settings
class OneBit(Compressed):
  """CNTK's 1-bit SGD: a bit an element, two means a column, error feedback.

  Attributes:
    plain_epochs: epochs of whole gradients before.
  """

  plain_epochs: NonNegative = 0.0


@settings
class TopK(OneBit):
  """The largest elements alone, with error feedback (arXiv:1809.07599).

  Attributes:
    share: of the elements that a device sends, below 1 / devices.
    per: what the largest are chosen from, each "tensor" or "bucket".
  """

  share: Annotated[float, "in (0, 1)"] = 0.01
  per: Literal["tensor", "bucket"] = "tensor"


@settings
class PowerSGD(OneBit):
  """Gradients of low rank, with error feedback (arXiv:1905.13727).

  Attributes:
    rank: of what is sent of a matrix.
  """

  rank: Count = 4


@settings
class EveryStep:
  """All devices take every step together."""


@settings
class LocalSGD:
  """Workers train alone and meet at their mean (arXiv:1805.09767).

  The learning rate is then a worker's own, and so is the batch that it fits:
  batch_size / workers.

  Attributes:
    sync_every_steps: steps from one meeting to the next.
    workers: who trains alone: each "device", or each "replica" of the mesh.
  """

  sync_every_steps: Count
  workers: Literal["device", "replica"] = "device"


@settings
class DiLoCo(LocalSGD):
  """Workers train alone; Nesterov momentum on their way (arXiv:2311.08105).

  Attributes:
    outer_lr: of the outer step.
    outer_momentum: of the outer step.
  """

  sync_every_steps: Count = 500
  outer_lr: Positive = 0.7
  outer_momentum: Fraction = 0.9


@settings
class BlockMomentum(LocalSGD):
  """Workers train alone; their way is filtered, as in CNTK (BMUF, ICASSP 2016).

  Attributes:
    sync_every_steps: steps from one meeting to the next; None: CNTK's, 120,000 examples of
      a worker.
    outer_lr: of the mean way of the workers.
    outer_momentum: of the filter; None: CNTK's 1 - 1/workers.
    nesterov: look ahead by the filter's next step.
    reset_momentum: empty the workers' own momentum when they meet.
  """

  sync_every_steps: Annotated[int | None, ">= 1"] = None  # pyright: ignore
  outer_lr: Positive = 1.0
  outer_momentum: Annotated[float | None, "in [0, 1)"] = None
  nesterov: bool = True
  reset_momentum: bool = True
