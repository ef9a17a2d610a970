"""Settings of the gradient exchange and of the synchronization of workers.

The default of `Config.exchange` is `AllReduce()`: `lax.psum` of every tensor (`base.plain`),
or between processes on CPUs of buckets (`exchange.buckets.best_bucket_bytes`). If a layout shards
gradients, each device exchanges its own shard (parallel/layout_exchange.py). The default of
`Config.sync` is `EveryStep()`.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any, Literal

from jaxscale import collectives, exchange
from jaxscale.config.bases import Exchange, ExchangeContext, Sync, SyncContext
from jaxscale.config.bounds import Count, Fraction, NonNegative, Positive
from jaxscale.errors import invalid

# The names for --config.exchange= (HOMES in config/choice.py lists this module).
__all__ = ["AllReduce", "BlockMomentum", "DiLoCo", "EveryStep", "HalfPrecision", "Int8"]
__all__ += ["LocalSGD", "OneBit", "SyncEASGD", "TwoBit"]

_BUCKET = 25 * 2**20  # `buckets.BUCKET_BYTES`, whose module imports JAX.


class AllReduce(Exchange):
  """Mean of uncompressed gradients, exact up to rounding; the default.

  Attributes:
    algorithm: the all-reduce algorithm; "psum" (XLA's), "ring", "torus", "hierarchical" or
      "halving_doubling".
    dims: the dimensions of algorithm "torus" as AXIS:SIZE, fastest links first, e.g. ("data:4",
      "replica:2"); () chooses them for assumed link speeds. `jaxscale bench` prints the best
      ones for measured links.
    bucket_bytes: the size in bytes of the buckets in which gradients are sent, counted as
      float32; None sends each tensor separately, except that "psum" between processes on CPUs
      uses buckets of 25 MiB.
  """

  algorithm: Literal["psum", "ring", "torus", "hierarchical", "halving_doubling"] = "psum"
  dims: tuple[str, ...] = ()
  bucket_bytes: Annotated[int | None, ">= 4"] = None

  averages_exactly = True

  @property
  def sends_whole(self) -> bool:  # A subclass that overrides `build` may not.
    return type(self).build is AllReduce.build

  @property
  def is_plain(self) -> bool:
    is_psum = self.algorithm == "psum" and self.bucket_bytes is None and not self.dims
    return self.sends_whole and is_psum and not self.delayed

  def __post_init__(self):
    for dim in self.dims:
      axis, _, size = dim.partition(":")
      if not (axis and size.isdecimal()):
        field = f"{type(self).__name__}.dims"
        raise invalid(field, self.dims, "is invalid", "give axis:size, as 'data:4'")

  def build(self, context: ExchangeContext) -> exchange.Exchange:
    by, size = self.plan(context), self.bucket_bytes
    if by.algorithm == "psum" and size is None:
      size = exchange.buckets.best_bucket_bytes(context.mesh)
    if size is not None:
      reduce = functools.partial(collectives.sum_tree, by=by)
      return exchange.buckets.bucketed(context.axes, bucket_bytes=size, reduce=reduce)
    return exchange.plain(context.axes) if by.algorithm == "psum" else exchange.planned(by)

  def plan(self, context: ExchangeContext, payload: Any = None) -> collectives.Plan:
    """Return the plan of the all-reduce; `payload` is the dtype that is sent.

    Raises:
      ConfigError: `dims` do not fit the devices.
    """
    num_bytes, is_planned = 0, self.algorithm == "torus" and not self.dims
    if is_planned:
      num_bytes = collectives.payload_bytes(context.params(), payload)
      if self.bucket_bytes is not None:  # The setting counts bytes of float32.
        num_bytes = min(num_bytes, self.bucket_bytes // (2 if payload else 1))
    dims = [(axis, int(n)) for axis, _, n in (d.partition(":") for d in self.dims)]
    by = collectives.plan(context.sizes, num_bytes, self.algorithm, dims=dims or None)
    if is_planned:
      size = f"{num_bytes / 1e6:.3g} MB"
      context.note(f"exchange: {by}, planned for messages of {size} on assumed links")
    return by


class HalfPrecision(AllReduce):
  """Mean of gradients that are sent in 16 bits.

  Attributes:
    dtype: the type in which gradients are sent; "bfloat16", or "float16", for which each bucket
      is scaled into the range of float16.
    sum_in: the type in which gradients are added; "float32", or "payload", for the type in
      which the backend adds arrays of `dtype`.
    bucket_bytes: the size in bytes of the buckets in which gradients are sent, counted as
      float32.
  """

  dtype: Literal["bfloat16", "float16"] = "bfloat16"
  sum_in: Literal["float32", "payload"] = "float32"
  bucket_bytes: Annotated[int, ">= 4"] = _BUCKET

  def build(self, context: ExchangeContext) -> exchange.Exchange:
    by, sums, size = self.plan(context, self.dtype), self.sum_in, self.bucket_bytes
    return exchange.half_precision(context.axes, self.dtype, by=by, sum_in=sums, bucket_bytes=size)


class Compressed(Exchange):
  """Base of compressed exchanges.

  Attributes:
    bucket_bytes: the size in bytes of the buckets in which gradients are sent, counted as
      float32.
  """

  bucket_bytes: Count = _BUCKET


class Int8(Compressed):
  """Mean of gradients in 8 bits, with one scale per block and stochastic rounding.

  Attributes:
    block: the number of gradient elements that share one scale.
  """

  block: Count = 256

  def build(self, context: ExchangeContext) -> exchange.Exchange:
    size, seed = self.bucket_bytes, context.seed
    return exchange.int8(context.axes, block=self.block, bucket_bytes=size, seed=seed)


class OneBit(Compressed):
  """CNTK's 1-bit SGD: one bit per element and two means per column, with error feedback.

  Attributes:
    plain_epochs: the number of epochs with uncompressed gradients at the start of the run;
      0 compresses from the first step.
  """

  plain_epochs: NonNegative = 0.0

  _bits = 1

  def build(self, context: ExchangeContext) -> exchange.Exchange:
    options: Any = {"num_devices": context.num_devices, "bucket_bytes": self.bucket_bytes}
    return exchange.one_bit.one_bit(context.axes, **options, bits=self._bits)


class TwoBit(OneBit):
  """Two bits per element and four means per column, with error feedback, as for MuLoCo.

  Attributes:
    plain_epochs: the number of epochs with uncompressed gradients at the start of the run;
      0 compresses from the first step.
  """

  _bits = 2


class EveryStep(Sync):
  """Synchronous training: all devices take every step together, with averaged gradients."""

  is_local_sgd = False

  def build(self, context: SyncContext) -> exchange.local_updates.LocalUpdate | None:
    return None


class LocalSGD(Sync):
  """Workers that take local steps and average their parameters (arXiv:1805.09767).

  The learning rate is that of one worker, whose batch is batch_size / workers.

  Attributes:
    sync_every_steps: the number of steps between synchronizations.
    workers: the devices that form a worker; "device" (each device is one) or "replica" (all
      devices with the same index on mesh axis replica are one).
    worker_steps: the number of steps between synchronizations that each worker takes, for
      workers on slower devices, e.g. (50, 50, 50, 10); it skips the examples of the others.
      Metrics are then means of all steps between two synchronizations. () takes all steps.
  """

  sync_every_steps: Count
  workers: Literal["device", "replica"] = "device"
  worker_steps: Annotated[tuple[int, ...], ">= 1"] = ()

  def build(self, context: SyncContext) -> exchange.local_updates.LocalUpdate:
    return self._with_steps(exchange.local_updates.local_sgd(self.sync_every_steps), context)

  def _with_steps(self, method: exchange.local_updates.LocalUpdate, context: SyncContext):
    """Return the method with `worker_steps`.

    Raises:
      ConfigError: they do not fit the workers and steps.
    """
    steps, every, count = self.worker_steps, method.every, context.num_workers
    if not steps:
      return method
    field = f"{type(self).__name__}.worker_steps"
    if len(steps) != count:
      problem = f"has {len(steps)} numbers for {count} workers"
      raise invalid(field, steps, problem, "give one number per worker")
    if max(steps) != every:
      problem = f"has at most {max(steps)} steps, but workers synchronize every {every}"
      raise invalid(field, steps, problem, f"give {every} for the fastest workers, and no more")
    share = 1 - sum(steps) / (count * every)
    text = f"{field}={steps}: {share:.1%} of the examples are not trained on, and metrics are the "
    context.note(f"{text}loss and gradient norm of all steps between two synchronizations")
    return method._replace(worker_steps=steps)


class DiLoCo(LocalSGD):
  """DiLoCo: Nesterov momentum on the averaged pseudo-gradient (arXiv:2311.08105).

  Attributes:
    outer_lr: the learning rate of the outer optimizer, which updates the parameters at each
      synchronization.
    outer_momentum: the momentum of the outer optimizer.
    fragments: the number of parts of the parameters that are exchanged at different steps, each
      every `sync_every_steps` (Streaming DiLoCo, arXiv:2501.18512); 1 exchanges all at once.
    delay_steps: the number of steps after which workers take over the result of an exchange,
      which runs beside the first of them; 0 waits for it between two steps.
    mixing: the share of its own parameters that a worker keeps when it takes over a result.
  """

  sync_every_steps: Count = 500
  outer_lr: Positive = 0.7
  outer_momentum: Fraction = 0.9
  fragments: Count = 1
  delay_steps: Annotated[int, ">= 0"] = 0
  mixing: Fraction = 0.0

  def __post_init__(self):
    every, name = self.sync_every_steps, type(self).__name__
    if self.fragments > every:
      problem = f"do not fit in sync_every_steps={every}, one to a step"
      raise invalid(f"{name}.fragments", self.fragments, problem, f"use {every} or less")
    if self.delay_steps >= every:
      problem = f"is not less than sync_every_steps={every}, when the next exchange begins"
      raise invalid(f"{name}.delay_steps", self.delay_steps, problem, f"use {every - 1} or less")
    if self.mixing and not self.delay_steps:
      problem = "has no effect without a delay, as workers have not moved on"
      raise invalid(f"{name}.mixing", self.mixing, problem, "set delay_steps to 1 or more")

  def build(self, context: SyncContext) -> exchange.local_updates.LocalUpdate:
    options: Any = {"rate": self.outer_lr, "momentum": self.outer_momentum}
    method = exchange.local_updates.diloco(self.sync_every_steps, **options)
    streams = {"fragments": self.fragments, "delay": self.delay_steps, "mixing": self.mixing}
    return self._with_steps(method._replace(**streams), context)


class BlockMomentum(LocalSGD):
  """Momentum on the averaged pseudo-gradient, as in CNTK (BMUF, ICASSP 2016).

  Attributes:
    sync_every_steps: the number of steps between synchronizations; None synchronizes after
      120,000 examples per worker, as CNTK does.
    outer_lr: the learning rate of the outer optimizer, which updates the parameters at each
      synchronization.
    outer_momentum: the momentum of the outer optimizer; None uses 1 - 1 / number of workers, as
      CNTK does.
    nesterov: whether to use Nesterov momentum in the outer optimizer.
    reset_momentum: whether to set the momentum of the workers' optimizers to 0 at each
      synchronization.
  """

  sync_every_steps: Annotated[int | None, ">= 1"] = None  # pyright: ignore
  outer_lr: Positive = 1.0
  outer_momentum: Annotated[float | None, "in [0, 1)"] = None
  nesterov: bool = True
  reset_momentum: bool = True

  def build(self, context: SyncContext) -> exchange.local_updates.LocalUpdate:
    every = self.sync_every_steps or exchange.local_updates.block_steps(context.worker_batch)
    given = context.num_train, every, context.worker_batch, context.num_workers
    if note := exchange.local_updates.check_samples(*given):
      context.note(note)
    options: Any = {"momentum": self.outer_momentum, "rate": self.outer_lr}
    options |= {"nesterov": self.nesterov, "reset_momentum": self.reset_momentum}
    method = exchange.local_updates.block_momentum(every, context.num_workers, **options)
    return self._with_steps(method, context)


class SyncEASGD(LocalSGD):
  """Workers that are pulled towards their moving average (Sync EASGD, arXiv:1708.02983).

  Workers keep parameters of their own. Evaluations and checkpoints use the moving average.

  Attributes:
    sync_every_steps: the number of steps between synchronizations.
    moving_rate: the share of the distance to the workers' mean by which the moving average
      moves at each synchronization; a worker moves towards the average by moving_rate / workers
      of its own distance.
  """

  sync_every_steps: Count = 1
  moving_rate: Fraction = 0.9

  def build(self, context: SyncContext) -> exchange.local_updates.LocalUpdate:
    every, workers, rate = self.sync_every_steps, context.num_workers, self.moving_rate
    method = exchange.local_updates.elastic_averaging(every, workers, rate=rate)
    return self._with_steps(method, context)
