"""Mixture of datasets: a stream whose source is known at each position, in closed form.

Weights are rounded to fractions of `_PERIOD`, so that the sources repeat with a period. Within
a period their order is that of the chairman assignment (R. Tijdeman, "The chairman assignment
problem", Discrete Mathematics 32 (1980), pp. 323-330): after any number n of examples, each of
k sources with share w has given n w examples, to within 1 - 1 / (2 k - 2). A position therefore
gives its source, and its position in that source's own stream, by a table and a division. The
position stays the one integer of a resume, for any batch size and any number of hosts.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxscale.data.dataset import Batch, DamagedExamples, Dataset, Order, TextInfo, facts_of
from jaxscale.data.pipeline import epochs
from jaxscale.errors import invalid
from jaxscale.metrics.text import listed

_PERIOD = 10_000  # the longest period; weights are rounded to this fraction of the examples
_APART = 40  # bits; sources use different numbers for their draws, up to 10^12 of each


class Stretch(NamedTuple):
  """Positions with the same weights.

  Attributes:
    start: the first position.
    counts: the examples of each source in a period, int [sources].
    table: the source of each position of a period, int [period].
    ranks: the number of earlier examples of that source in the period, int [period].
    before: the examples of each source before the stretch, int [sources].
  """

  start: int
  counts: np.ndarray
  table: np.ndarray
  ranks: np.ndarray
  before: np.ndarray

  def given(self, position: int) -> np.ndarray:
    """Return the number of examples of each source before a position of the stretch."""
    periods, rest = divmod(position - self.start, len(self.table))
    in_rest = np.bincount(self.table[:rest], minlength=len(self.counts))
    return self.before + periods * self.counts + in_rest


def mix(
  sources: Mapping[str, Dataset],
  weights: Mapping[str, Sequence[float]],
  changes_at: Sequence[int] = (),
) -> Dataset:
  """Return a dataset that takes the examples of its training from several.

  Each source keeps its own shuffled epochs. Evaluations see all examples of all sources, one
  source after another.

  Args:
    sources: the datasets by name.
    weights: the shares of each source: before the first position of `changes_at`, from it on,
      and so on. They are divided by their sum.
    changes_at: the positions, in examples of the stream, at which the weights change.

  Raises:
    ConfigError: the sources have different shapes, vocabularies or classes; or a weight is
      less than one example in 10,000.

  Example:
    >>> from jaxscale import data
    >>> both = mix({"a": data.digits("train"), "b": data.digits("test")}, {"a": [2], "b": [1]})
    >>> both.num_examples, both.progress(3)["a/examples"]
    (1797, 2)
  """
  names, parts = [*sources], [*sources.values()]
  notes = [note for part in parts for note in part.notes]
  stretches: list[Stretch] = []
  for i, start in enumerate((0, *changes_at)):
    counts = rounded({name: weights[name][i] for name in names}, notes)
    table = np.array(chairmen(tuple(counts)))
    ranks = np.zeros_like(table)
    for k in range(len(parts)):
      ranks[table == k] = np.arange(counts[k])
    before = stretches[-1].given(start) if stretches else np.zeros_like(counts)
    stretches.append(Stretch(start, counts, table, ranks, before))
  firsts = np.cumsum([0, *(part.num_examples for part in parts)])

  def progress(position: int) -> dict[str, float]:
    stretch = [s for s in stretches if s.start <= position][-1]
    result = {}
    for name, part, given in zip(names, parts, stretch.given(position).tolist(), strict=True):
      result |= {f"{name}/examples": given, f"{name}/epoch": given / part.num_examples}
    return result

  def name(index: int) -> str:
    k = int(np.searchsorted(firsts, index, "right")) - 1
    own = index - int(firsts[k])
    name_of = parts[k].name or str
    return f"{names[k]}: {name_of(own)}"

  damaged = DamagedExamples() if any(part.damaged is not None for part in parts) else None

  def load(indices: np.ndarray, draws: np.ndarray | None) -> Batch:
    source = np.searchsorted(firsts, indices, "right") - 1
    batch: dict[str, np.ndarray] = {}
    for k in np.unique(source):
      part, rows = parts[k], np.flatnonzero(source == k)
      own = None if draws is None else draws[rows, : part.num_draws]
      for key, array in part.load(indices[rows] - firsts[k], own).items():
        if key not in batch:
          batch[key] = np.empty((len(indices), *array.shape[1:]), array.dtype)
        batch[key][rows] = array
      if part.damaged is not None and damaged is not None:
        part.damaged.copy_to(damaged, int(firsts[k]), f"{names[k]}: ")
    return batch

  return Dataset(
    _info(sources),
    int(firsts[-1]),
    load,
    max(part.num_draws for part in parts),
    damaged,
    notes=tuple(notes),
    identity=lambda: {name: facts_of(part) for name, part in sources.items()},
    name=name if any(part.name for part in parts) else None,
    order=functools.partial(_order, names, parts, firsts, stretches),
    progress=progress,
    parts=tuple(parts),
  )


def rounded(weights: Mapping[str, float], notes: list[str]) -> np.ndarray:
  """Return the examples of each source in the shortest period, by largest remainders.

  Args:
    weights: the weights by source.
    notes: a list to which a line is added if rounding changes the weights.

  Raises:
    ConfigError: a weight above 0 would become 0.

  Example:
    >>> rounded({"web": 0.7, "code": 0.3}, []).tolist()
    [7, 3]
  """
  total = math.fsum(weights.values())
  exact = np.array([_PERIOD * weight / total for weight in weights.values()])
  # Sums of decimal fractions miss a whole number by some units in the last place.
  exact = np.where(np.abs(exact - exact.round()) < 1e-6, exact.round(), exact)
  counts = np.floor(exact).astype(np.int64)
  missing = _PERIOD - int(counts.sum())
  counts[np.argsort(counts - exact, kind="stable")[:missing]] += 1
  for name, count in zip(weights, counts, strict=True):
    if weights[name] and not count:
      problem = f"of {total:g} is less than one example in {_PERIOD:,}"
      raise invalid(f"Mixture.weights.{name}", weights[name], problem, "raise it or use 0")
  if (changed := counts != exact).any():
    pairs = zip(np.array([*weights])[changed], counts[changed] / _PERIOD, strict=True)
    shares = listed(f"{name} {share:g}" for name, share in pairs)
    notes.append(f"Mixture.weights: shares are rounded to 1/{_PERIOD:,}: {shares}")
  return counts // np.gcd.reduce(counts)


@functools.lru_cache(maxsize=64)
def chairmen(counts: tuple[int, ...]) -> tuple[int, ...]:
  """Return the source of each position of a period, by Tijdeman's chairman assignment.

  Position n goes to the source with the earliest deadline, (1 - 1 / (2 k - 2) - surplus) / w,
  among those with a surplus of at least 1 / (2 k - 2), where the surplus is n w less the
  examples that the source gave before.

  Args:
    counts: the examples of each of k sources in a period; their shares w are these divided by
      their sum.

  Example:
    >>> chairmen((2, 1))
    (0, 1, 0)
  """
  period, bound = sum(counts), 2 * len(counts) - 2
  if bound == 0:
    return (0,) * period
  given = [0] * len(counts)
  table = []
  for n in range(1, period + 1):
    # Integers, as if multiplied by `period` and `bound`, so that there is no rounding.
    surplus = [bound * (n * c - period * g) for c, g in zip(counts, given, strict=True)]
    due = [k for k, x in enumerate(surplus) if counts[k] and x >= period]
    latest = (bound - 1) * period
    table.append(min(due, key=lambda k: (latest - surplus[k]) / counts[k]))
    given[table[-1]] += 1
  return tuple(table)


def _order(
  names: list[str], parts: list[Dataset], firsts: np.ndarray, stretches: list[Stretch], seed: int
) -> Order:
  """Return the order of a mixture; each source has a seed of its own, from its name."""
  orders: list[Order] = []
  for name, part in zip(names, parts, strict=True):
    own = int.from_bytes(hashlib.sha256(json.dumps([seed, name]).encode()).digest()[:4])
    orders.append(part.order(own) if part.order else epochs(part, own))
  starts = np.array([stretch.start for stretch in stretches])

  def at(positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    source, place = np.empty_like(positions), np.empty_like(positions)
    which = np.searchsorted(starts, positions, "right") - 1
    for i in np.unique(which):
      stretch, is_in = stretches[i], which == i
      periods, rest = np.divmod(positions[is_in] - stretch.start, len(stretch.table))
      k = source[is_in] = stretch.table[rest]
      place[is_in] = stretch.before[k] + periods * stretch.counts[k] + stretch.ranks[rest]
    indices, numbers = np.empty_like(positions), np.empty_like(positions)
    for k in np.unique(source):
      is_in = source == k
      indices[is_in], numbers[is_in] = orders[k](place[is_in])
    return indices + firsts[source], numbers + (source << _APART)

  return at


def _info(sources: Mapping[str, Dataset]) -> Any:
  """Return the common description of the sources.

  Raises:
    ConfigError: two sources differ in more than their names.
  """
  (first, one), *others = ((name, part.info) for name, part in sources.items())
  for name, info in others:
    if type(info) is not type(one):
      problem = f"is {_kind(info)}, but {first!r} is {_kind(one)}"
      raise invalid(f"Mixture.sources.{name}", ..., problem, "use sources of one kind")
    for field, value in info._asdict().items():
      if field not in ("name", "bytes_per_token") and value != getattr(one, field):
        problem = f"has {field}={value!r}, but {first!r} has {getattr(one, field)!r}"
        raise invalid(f"Mixture.sources.{name}", ..., problem, "give all sources the same")
  sizes = {getattr(part.info, "bytes_per_token", None) for part in sources.values()}
  # The share of a source, and with it the average, may change.
  if isinstance(one, TextInfo) and len(sizes) > 1:
    one = one._replace(bytes_per_token=None)
  return one._replace(name=f"Mixture({', '.join(sources)})")


def _kind(info: Any) -> str:
  return "text" if isinstance(info, TextInfo) else "no text"
