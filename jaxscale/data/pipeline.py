"""Deterministic batches, a function of only the seed and the step.

Training sees one endless stream, in which the examples are shuffled anew every epoch. A step
uses the next B positions, and host r of n the r-th of n equal blocks of those. So the global
batch is the same, row for row, for any number of hosts. The position is the only integer needed
to resume, and the batch size may change at any position.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import numpy as np
from jax.sharding import Mesh

from jaxscale.data.arrays import cast
from jaxscale.data.augment import uniform, uniform_bits
from jaxscale.data.dataset import Batch, Dataset, Order, batch_shapes
from jaxscale.errors import ConfigError, invalid, message_of
from jaxscale.mesh import batch_sharding
from jaxscale.metrics.text import listed

# Batches of one process that wait to be used. 27,000 images of 224x224 fit, so that only large
# batches on many cores reach it, and a machine with 16 GB of memory can still train.
_AHEAD_BYTES = 4 << 30


def train_batches(
  dataset: Dataset,
  batch_size: int,
  *,
  seed: int = 0,
  position: int = 0,
  shard: tuple[int, int] = (0, 1),
  num_threads: int | None = None,
) -> Iterator[Batch]:
  """Yield this host's rows of training batches without end, from a position in the stream.

  Args:
    dataset: the dataset to draw from.
    batch_size: the size of the global batch.
    seed: the seed of order and augmentation.
    position: the number of examples of the stream that were used before, over all hosts.
    shard: the (index, count) of this host's block, from `mesh.host_shard`.
    num_threads: the number of threads that load ahead; None uses one per CPU core. Each has
      two batches waiting, of together at most 4 GiB; threads share batches that are larger.
  """
  index, count = shard
  rows = batch_size // count
  num_threads = num_threads or max(len(os.sched_getaffinity(0)), 2)
  shapes = batch_shapes(dataset.info, rows).values()
  batch_bytes = sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in shapes)
  ahead = max(min(2 * num_threads, _AHEAD_BYTES // max(batch_bytes, 1)), 1)
  parts = np.array_split(np.arange(rows), min(-(-num_threads // ahead), rows))

  order = dataset.order(seed) if dataset.order else epochs(dataset, seed)

  def load(number):
    step, part = divmod(number, len(parts))
    positions = position + (step * count + index) * rows + parts[part]
    indices, numbers = order(positions)
    return dataset.load(indices, uniform(seed, numbers, dataset.num_draws))

  loaded = load_ahead(load, num_threads, ahead * len(parts))
  return map(_joined, zip(*[loaded] * len(parts), strict=True))


def _joined(parts: Sequence[Batch]) -> Batch:
  """Return the batch of successive rows; it is copied unless there is one part."""
  if len(parts) == 1:
    return parts[0]
  return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def load_ahead(load: Callable[[int], Batch], num_threads: int, ahead: int) -> Iterator[Batch]:
  """Yield `load` of 0, 1, 2, … in order, computed ahead by threads.

  Args:
    load: a function that any thread calls; its error is raised when its result is due.
    num_threads: the number of threads.
    ahead: the number of results that wait or are being computed.
  """
  pool = ThreadPoolExecutor(num_threads, "load")
  waiting: deque[Future[Batch]] = deque()
  try:
    for step in itertools.count():
      waiting.append(pool.submit(load, step))
      if len(waiting) > ahead:
        yield waiting.popleft().result()
  finally:
    for future in waiting:
      future.cancel()
    pool.shutdown(wait=False)


def check_readable(dataset: Dataset) -> None:
  """Load one example and compare it with `info`, before the step is compiled.

  Raises:
    ConfigError: the example and its replacements cannot be read, or `load` returns
      something different from `info`.
    OSError: the disk or the network failed.
  """
  field, names = f"{dataset.info.name}: load", batch_shapes(dataset.info, 1)
  if "mask" in names:
    problem = "is an array of examples, but evaluations mark padding rows by this name"
    raise invalid(f"{dataset.info.name}: 'mask'", ..., problem, "rename it, e.g. to 'weight'")
  try:
    batch = dataset.load(np.zeros(1, np.int64), np.full((1, dataset.num_draws), 0.5))
  except Exception as e:
    if isinstance(e, ConfigError) or getattr(e, "errno", None):  # An error of the disk.
      raise
    problem = f"failed with {type(e).__name__}: {message_of(e)}"
    raise invalid(field, ..., problem, "fix it, so that it can load example 0") from e
  if not isinstance(batch, dict) or names.keys() != batch.keys():
    keys = sorted(batch) if isinstance(batch, dict) else type(batch).__name__
    fix = f"return a dict of arrays, {listed(map(repr, names))}"
    raise invalid(field, ..., f"returned {keys}", fix)
  for name, (shape, dtype) in names.items():
    array = batch[name]
    if not isinstance(array, np.ndarray | jax.Array):
      problem = f"returned {name!r} as {type(array).__name__}"
      raise invalid(field, ..., problem, "return arrays")
    if array.shape != shape or _held(array.dtype) != _held(np.dtype(dtype)):
      problem = f"returned {name!r} of {array.shape}, {array.dtype} for one example"
      fix = f"return {shape}, {dtype}, or fix the dataset's info"
      raise invalid(field, ..., problem, fix)


def _held(dtype: np.dtype) -> np.dtype:
  """Return the dtype of an array on a device: 32 bits, unless JAX_ENABLE_X64 is set."""
  return np.dtype(jax.dtypes.canonicalize_dtype(dtype))


def epochs(
  dataset: Dataset, seed: int, permutation: Callable[[int, int, int], np.ndarray] | None = None
) -> Order:
  """Return the order of a stream of whole epochs, one permutation of all examples after another.

  Args:
    dataset: the dataset whose examples are ordered.
    seed: the seed of the order.
    permutation: (num_examples, seed, epoch) -> the order of an epoch, int [num_examples];
      None uses `shuffled`.

  Example:
    >>> from jaxscale import data
    >>> indices, _ = epochs(data.digits("test"), seed=0)(np.arange(360))
    >>> sorted(indices.tolist()) == list(range(360))
    True
  """
  count, permutation = dataset.num_examples, permutation or shuffled

  @functools.lru_cache(maxsize=2)  # Threads are in this epoch or the next.
  def order(epoch):
    return permutation(count, seed, epoch)

  def at(positions):
    each, places = np.divmod(positions, count)
    indices = np.empty_like(places)
    for epoch in np.unique(each):
      is_in = each == epoch
      indices[is_in] = order(int(epoch))[places[is_in]]
    return indices, each if dataset.draws_by_epoch else positions

  return at


def shuffled(num_examples: int, seed: int, epoch: int) -> np.ndarray:
  """Return the order of one epoch: a permutation of 0 … num_examples - 1.

  The order sorts by one random key per example. As a whole array this costs 0.1 microseconds
  per example; shuffling index by index, as Grain's `MapDataset.shuffle`, cost 12 and starved a
  step of 5 ms.
  """
  keys = uniform_bits(seed, epoch * num_examples + np.arange(num_examples))
  return np.argsort(keys, kind="stable")


def eval_batches(
  dataset: Dataset, batch_size: int, *, shard: tuple[int, int] = (0, 1), num_threads: int = 1
) -> Iterator[Batch]:
  """Yield this host's rows of all examples, once and in order, with a mask.

  The last batch is filled with copies of example 0 whose "mask" is False, so all hosts have the
  same number of batches, all of one shape.

  Args:
    dataset: the dataset to evaluate on.
    batch_size: the size of the global batch.
    shard: the (index, count) of this host's block.
    num_threads: the number of threads that each load a part of a batch; 1 loads it in the
      caller's thread.
  """
  index, count = shard
  rows = batch_size // count
  with ThreadPoolExecutor(num_threads, "load") as pool:
    for first in range(0, dataset.num_examples, batch_size):
      positions = first + index * rows + np.arange(rows)
      mask = positions < dataset.num_examples
      parts = np.array_split(np.where(mask, positions, 0), min(num_threads, rows))
      loaded = [*(pool.map if parts[1:] else map)(lambda part: dataset.load(part, None), parts)]
      yield _joined(loaded) | {"mask": mask}


def to_device(
  batches: Iterable[Batch], mesh: Mesh, *, ahead: int = 2
) -> Iterator[dict[str, jax.Array]]:
  """Put batches on the devices ahead of their use; yield global arrays.

  Args:
    batches: this host's rows of each global batch.
    mesh: the mesh; its axes except `stage` and `model` split the rows.
    ahead: the number of batches to transfer ahead.

  Raises:
    ConfigError: a 64-bit value does not fit the device's 32 bits.
  """
  sharding = batch_sharding(mesh)
  waiting: deque = deque()
  for batch in batches:
    batch = dict(batch)
    for name, array in batch.items():
      if isinstance(array, np.ndarray) and array.dtype.kind in "iuf":
        batch[name] = cast(f"batch[{name!r}]", array, _held(array.dtype))
    waiting.append(jax.make_array_from_process_local_data(sharding, batch))
    if len(waiting) > ahead:
      yield waiting.popleft()
  yield from waiting
