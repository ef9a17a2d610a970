"""Deterministic batches, a function of (seed, step) and nothing else.

Training sees one endless stream: the examples shuffled anew every epoch. A step
uses the next B positions of it and host r of n the r-th of n equal blocks of
those, so the global batch is the same, row for row, for any number of hosts,
and the place to resume from is one integer, the position; the batch size may
change at any.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import numpy as np
from jax.sharding import Mesh

from jaxscale.data.arrays import cast
from jaxscale.data.augment import uniform, uniform_bits
from jaxscale.data.dataset import Batch, Dataset, batch_shapes
from jaxscale.errors import ConfigError, invalid, message_of
from jaxscale.mesh import batch_sharding
from jaxscale.metrics.text import listed


def train_batches(
  dataset: Dataset,
  batch_size: int,
  *,
  seed: int = 0,
  position: int = 0,
  shard: tuple[int, int] = (0, 1),
  num_threads: int | None = None,
) -> Iterator[Batch]:
  """Endless training batches from a position on: this host's rows of each.

  Args:
    dataset: what to draw from.
    batch_size: of the global batch.
    seed: of order and augmentation.
    position: examples of the stream that were used before, over all hosts.
    shard: (index, count) of this host's block, as `mesh.host_shard` gives it.
    num_threads: threads that load batches ahead; None: one per processor core.
  """
  index, count = shard
  rows = batch_size // count
  num_threads = num_threads or max(len(os.sched_getaffinity(0)), 2)

  @functools.lru_cache(maxsize=2)  # threads are in this epoch or the next
  def order(epoch):
    return shuffled(dataset.num_examples, seed, epoch)

  def load(step):
    positions = position + (step * count + index) * rows + np.arange(rows)
    epochs, places = np.divmod(positions, dataset.num_examples)
    indices = np.empty_like(places)
    for epoch in np.unique(epochs):
      here = epochs == epoch
      indices[here] = order(int(epoch))[places[here]]
    drawn = epochs if dataset.draws_by_epoch else positions
    return dataset.load(indices, uniform(seed, drawn, dataset.num_draws))

  return load_ahead(load, num_threads)


def load_ahead(load: Callable[[int], Batch], num_threads: int) -> Iterator[Batch]:
  """What `load` returns for 0, 1, 2, … in this order, by threads that work ahead.

  Args:
    load: called in any thread; what it raises, it raises where its result was due.
    num_threads: each has about two batches that wait for their turn.
  """
  pool = ThreadPoolExecutor(num_threads, "load")
  waiting: deque[Future[Batch]] = deque()
  try:
    for step in itertools.count():
      waiting.append(pool.submit(load, step))
      if len(waiting) > 2 * num_threads:
        yield waiting.popleft().result()
  finally:
    for future in waiting:
      future.cancel()
    pool.shutdown(wait=False)


def check_readable(dataset: Dataset) -> None:
  """Load an example before minutes go into compiling, and compare it with `info`.

  Raises:
    ConfigError: it and those that would take its place cannot be read, or `load`
      returns something else than `info` says.
    OSError: the disk or the network is away.
  """
  field, names = f"{dataset.info.name}: load", batch_shapes(dataset.info, 1)
  try:
    batch = dataset.load(np.zeros(1, np.int64), np.full((1, dataset.num_draws), 0.5))
  except Exception as e:
    if isinstance(e, ConfigError) or getattr(e, "errno", None):  # a disk's
      raise
    why = f"failed with {type(e).__name__}: {message_of(e)}"
    raise invalid(field, ..., why, "have it load example 0") from e
  if not isinstance(batch, dict) or names.keys() != batch.keys():
    keys = sorted(batch) if isinstance(batch, dict) else type(batch).__name__
    fix = f"return a dict of arrays, {listed(map(repr, names))}"
    raise invalid(field, ..., f"returned {keys}", fix)
  for name, (shape, dtype) in names.items():
    array = batch[name]
    if not isinstance(array, np.ndarray | jax.Array):
      why = f"returned {name!r} as {type(array).__name__}"
      raise invalid(field, ..., why, "return arrays")
    if array.shape != shape or _held(array.dtype) != _held(np.dtype(dtype)):
      why = f"returned {name!r} of {array.shape}, {array.dtype} for one example"
      fix = f"return {shape}, {dtype}, or correct the dataset's info"
      raise invalid(field, ..., why, fix)


def _held(dtype: np.dtype) -> np.dtype:
  """Return the dtype of an array on a device: of 32 bits, but with JAX_ENABLE_X64."""
  return np.dtype(jax.dtypes.canonicalize_dtype(dtype))


def shuffled(num_examples: int, seed: int, epoch: int) -> np.ndarray:
  """The order of one epoch: a permutation of 0 … num_examples - 1.

  Sorts by one random key per example. As a whole array it costs 0.1 microseconds per
  example; shuffling index by index, as Grain's `MapDataset.shuffle` does, cost 12
  and starved a step of 5 ms.
  """
  keys = uniform_bits(seed, epoch * num_examples + np.arange(num_examples))
  return np.argsort(keys, kind="stable")


def eval_batches(
  dataset: Dataset, batch_size: int, *, shard: tuple[int, int] = (0, 1)
) -> Iterator[Batch]:
  """Every example once, in order, with a mask: this host's rows.

  The last batch is filled up with copies of example 0 whose "mask" is False,
  so every host has as many batches as the others, all of one shape.

  Args:
    dataset: what to evaluate on.
    batch_size: of the global batch.
    shard: (index, count) of this host's block.
  """
  index, count = shard
  rows = batch_size // count
  for first in range(0, dataset.num_examples, batch_size):
    positions = first + index * rows + np.arange(rows)
    mask = positions < dataset.num_examples
    yield dataset.load(np.where(mask, positions, 0), None) | {"mask": mask}


def to_device(
  batches: Iterable[Batch], mesh: Mesh, *, ahead: int = 2
) -> Iterator[dict[str, jax.Array]]:
  """Global arrays of the batches, rows spread over the mesh, put there early.

  Args:
    batches: this host's rows of each global batch.
    mesh: its axes but `stage` and `model` split the rows.
    ahead: how many batches are on their way while one is used.

  Raises:
    ConfigError: a device's 32 bits do not hold a value of 64.
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
