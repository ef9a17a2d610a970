"""Search for the best layout of a config on chips that need not be present.

    jaxscale plan --config FILE --chips h100-64 --search

The search lists all combinations of mesh, `layout`, `remat` and micro-batches that compute the
same step. It drops those that cannot fit by arithmetic, and compiles the others: the config's own
settings, on several nodes then a layout that splits the state within a node (`fsdp`) and sums
gradients between nodes (`data`), then the others in the order of their estimates (`estimate`).
Each is planned as by `jaxscale plan`, until the time is over or many in a row were no better.
Settings that change rounding (`layout.sum_in`, `exchange`) are not changed, and neither are
`layout.optimizer="host"` and `remat="offload"`, whose time a plan does not include.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from jaxscale import config as cfg
from jaxscale.errors import ConfigError, invalid
from jaxscale.mesh import mesh_shape
from jaxscale.metrics.text import short_time, table
from jaxscale.planning import fits, step_plan, topologies
from jaxscale.planning.estimate import Candidate, Estimate, estimate, shapes_of
from jaxscale.planning.fits import RefusedError
from jaxscale.planning.machine import Machine, Rates, rates_of
from jaxscale.planning.step_plan import Step
from jaxscale.planning.topologies import Chips, gib

_AXES = ("replica", "data", "fsdp", "stage", "model")
_REMATS = ("none", "dots_attention", "dots", "branches", "full")  # from the most kept to the least
_MODELS = ("layers", "layers_and_tokens", "ring", "all_to_all")
_PATIENCE = 15  # A search ends after so many programs in a row that are no better.
# The estimated speed-up by which a variant of a compiled layout precedes a new layout.
_SAME = 1.1


class Row(NamedTuple):
  """Candidate that was compiled.

  Attributes:
    candidate: the settings of the layout.
    step: the planned step; None if the candidate does not fit or compile.
    note: the reason why `step` is None; "" otherwise.
  """

  candidate: Candidate
  step: Step | None
  note: str = ""

  @property
  def seconds(self) -> float:
    """The seconds of a step, infinite without a plan."""
    return self.step.seconds["expected"] if self.step else math.inf


class Search(NamedTuple):
  """Result of a search.

  Attributes:
    config: the config with the best settings.
    rows: the compiled candidates, the best first.
    considered: the number of all candidates.
    too_large: the number of candidates that cannot fit.
    seconds: the seconds of the search.
    ended: the reason why the search ended.
  """

  config: cfg.Config
  rows: tuple[Row, ...]
  considered: int
  too_large: int
  seconds: float
  ended: str


def search(
  config: cfg.Config,
  chips: str | Chips,
  *,
  machine: Machine | None = None,
  minutes: float = 10.0,
  log: Callable[[str], None] = lambda line: None,
) -> Search:
  """Find the layout with the shortest step.

  Args:
    config: the config of the run; its own settings are compiled first.
    chips: a name as in `topologies`, e.g. "h100-64".
    machine: the constants of a site, which replace the chip's.
    minutes: the time after which nothing more is compiled.
    log: a function that is called with a line for every compiled candidate.

  Raises:
    ConfigError: the chips are unknown, or the config does not fit so many.
    RefusedError: no compiled candidate fits.

  Example:
    >>> from jaxscale.config.loading import load_config
    >>> found = search(load_config("configs/llama_7b.py:h100"), "h100-64")
    ...                                                          # doctest: +SKIP
    >>> name_of(found.rows[0].candidate)                         # doctest: +SKIP
    'fsdp 64'
  """
  from jaxscale.experiment import build

  began = time.monotonic()
  chips = topologies.find_chips(chips) if isinstance(chips, str) else chips
  devices, rates = chips.count or len(chips.devices), rates_of(chips.kind, machine)
  if len(chips.devices) < devices:
    problem = f"has more chips than the {len(chips.devices)} simulated devices of a search"
    raise invalid("--chips", chips.name, problem, f"set JAX_NUM_CPU_DEVICES={devices}")
  data = config.data.abstract(config.batch_size)
  limit = fits.limit_of(config, chips)
  options: Any = {"devices": chips.devices, "memory": limit}
  shapes = shapes_of(own := build.experiment(config, datasets=data, **options))
  config = dataclasses.replace(config, layout=dataclasses.replace(config.layout, remat=own.remat))
  first, every = as_given(config, devices), [*candidates(config, devices)]
  estimates = functools.partial(estimate, shapes, batch_size=config.batch_size, rates=rates)
  mesh = dataclasses.replace(first.mesh, replica=1, data=first.mesh.replica * first.mesh.data)
  waiting, too_large = _waiting(every, first._replace(mesh=mesh), estimates, limit)
  hybrid = _take_hybrid(waiting, rates.per_node)
  rows: list[Row] = []
  seconds = operator.attrgetter("seconds")
  ended = "all were compiled"
  for one in itertools.chain([first], hybrid, _in_order(waiting, rows)):
    since_best = len(rows) - 1 - rows.index(min(rows, key=seconds)) if rows else 0
    if rows and time.monotonic() - began > 60 * minutes:
      ended = f"the time limit of --minutes={minutes:g} was reached"
      break
    if since_best >= _PATIENCE and any(row.step for row in rows):
      ended = f"{_PATIENCE} in a row were no better"
      break
    rows.append(row := _planned(config, one, chips, rates))
    took = short_time(row.seconds) if row.step else row.note
    log(f"{name_of(one)}, remat {one.layout.remat}, micro-batches {one.num_microbatches}: {took}")
  ranked = tuple(sorted(rows, key=seconds))
  if ranked[0].step is None:
    raise RefusedError(f"--search: none of {len(rows)} layouts fits; {rows[-1].note}")
  spent, best = time.monotonic() - began, _with(config, ranked[0].candidate)
  return Search(best, ranked, len(every), too_large, spent, ended)


def _family(one: Candidate) -> Candidate:
  """Return the layout of a candidate, without remat and micro-batches."""
  return one._replace(layout=dataclasses.replace(one.layout, remat="full"), num_microbatches=1)


_Waiting = list[tuple[bool, float, Candidate]]  # does not fit by estimate, seconds, candidate


def _waiting(
  every: Iterable[Candidate],
  first: Candidate,
  estimates: Callable[[Candidate], Estimate],
  limit: int,
) -> tuple[_Waiting, int]:
  """Return candidates with their estimates, and the number that cannot fit.

  `first` is left out, as it is compiled anyway. Candidates with too many micro-batches are left
  out: once a candidate needs half of the memory, more parts only send more data and multiply
  smaller matrices. In a pipeline, more parts reduce idle time.
  """
  waiting: _Waiting = []
  small, too_large = set(), 0
  for one in every:
    kind = _family(one), one.layout.remat
    if kind in small and one.mesh.stage == 1:
      continue
    guess = estimates(one)
    if guess.memory < limit / 2:
      small.add(kind)
    if guess.least > limit:
      too_large += 1
    elif one != first:
      waiting.append((guess.memory > limit, guess.seconds, one))
  return waiting, too_large


def _take_hybrid(waiting: _Waiting, per_node: int) -> list[Candidate]:
  """Take out the best candidate that gathers within a node and sums between nodes, by estimate.

  The result is empty if there is only one node, or if no such candidate is likely to fit.
  """
  is_hybrid = [
    one.layout.shard == "fsdp" and one.mesh.fsdp == per_node and one.mesh.data > 1 and not is_large
    for is_large, _, one in waiting
  ]
  best = min(itertools.compress(waiting, is_hybrid), key=operator.itemgetter(1), default=None)
  if best is None:
    return []
  waiting.remove(best)
  return [best[-1]]


def _in_order(waiting: _Waiting, rows: list[Row]) -> Iterator[Candidate]:
  """Yield candidates by estimate, those that probably fit first.

  The caller appends to `rows` after each. Variants of a layout that was compiled come later;
  variants that need at least as much memory as one that did not fit never come.
  """
  times: Counter[Candidate] = Counter()

  def order(guess: tuple[bool, float, Candidate]) -> tuple[bool, float]:
    is_large, seconds, one = guess
    return is_large, seconds * _SAME ** times[_family(one)]

  while waiting:
    best = min(waiting, key=order)
    waiting.remove(best)
    yield (one := best[-1])
    family = _family(one)
    if rows[-1].step:
      times[family] += 1
    else:
      waiting = [w for w in waiting if _family(w[-1]) != family or not keeps_as_much(w[-1], one)]


def keeps_as_much(one: Candidate, other: Candidate) -> bool:
  """Return whether a candidate needs at least the memory of another one of its layout.

  It keeps at least as much for the backward pass, for at least as many rows at a time.
  """
  remat, than = one.layout.remat, other.layout.remat
  keeps = remat == than
  if not keeps and {remat, than} <= {*_REMATS}:
    keeps = _REMATS.index(remat) < _REMATS.index(than)
  return one.num_microbatches <= other.num_microbatches and keeps


def as_given(config: cfg.Config, devices: int) -> Candidate:
  """Return a config's own settings as a candidate.

  Raises:
    ConfigError: the mesh does not fit so many devices.
  """
  mesh = cfg.Mesh(**mesh_shape(devices, **dataclasses.asdict(config.mesh))._asdict())
  layout = config.layout
  if mesh.fsdp == 1:  # Mesh.fsdp=-1 on one device gives 1.
    layout = dataclasses.replace(layout, shard="none")
  return Candidate(mesh, layout, config.accumulate_steps)


def candidates(config: cfg.Config, devices: int) -> Iterator[Candidate]:
  """Yield every layout, `remat` and number of micro-batches that divides the rows."""
  splits = [n for n in range(1, devices + 1) if devices % n == 0]
  of_stacks = splits if config.model.is_stack else [1]
  remats = _REMATS if config.model.is_stack else (config.layout.remat,)
  for model, stage, fsdp in itertools.product(of_stacks, of_stacks, splits):
    data, rest = divmod(devices, model * stage * fsdp)
    rows, odd = divmod(config.batch_size, max(data, 1) * fsdp)
    if rest or odd or data < 1:
      continue
    mesh = cfg.Mesh(data=data, fsdp=fsdp, stage=stage, model=model)
    # BatchNorm's statistics may depend on the micro-batch, so its size does not change.
    keeps = getattr(config.model, "batch_norm", False)
    powers = [2**i for i in range(rows.bit_length()) if 2**i < rows]
    parts = [config.accumulate_steps] if keeps else [*powers, rows]
    for layout in _layouts(config, mesh):
      for remat, n in itertools.product(remats, parts):
        if rows % n == 0:
          yield Candidate(mesh, dataclasses.replace(layout, remat=remat), n)


def _layouts(config: cfg.Config, mesh: cfg.Mesh) -> Iterator[cfg.Layout]:
  """Yield the layouts that split along the axes of a mesh."""
  is_text = config.model.is_stack and config.model.takes_text
  base = dataclasses.replace(config.layout, optimizer="device")
  for shard in ("zero1", "zero2", "fsdp") if mesh.fsdp > 1 else ("none",):
    slow = ["after", *["in_backward"] * (shard in ("zero2", "fsdp") and mesh.data > 1)]
    kinds = (_MODELS if is_text else _MODELS[:1]) if mesh.model > 1 else ["layers"]
    orders = ("gpipe", "1f1b") if mesh.stage > 1 else ("gpipe",)
    for kind, axes, order in itertools.product(kinds, slow, orders):
      settings: dict[str, Any] = {"shard": shard, "slow_axes": axes, "model": kind}
      yield dataclasses.replace(base, **settings, schedule=order)


def _with(config: cfg.Config, one: Candidate) -> cfg.Config:
  """Return the config with a candidate's settings; an axis of -1 remains -1.

  Raises:
    ConfigError: the settings contradict the rest of the config.
  """
  rest = [a for a in _AXES if getattr(config.mesh, a) == -1]
  free = {a: -1 for a in rest if a == "data" or getattr(one.mesh, a) > 1}
  mesh, parts = dataclasses.replace(one.mesh, **free), one.num_microbatches
  return dataclasses.replace(config, layout=one.layout, mesh=mesh, accumulate_steps=parts)


def _planned(config: cfg.Config, one: Candidate, chips: Chips, rates: Rates) -> Row:
  try:
    config = _with(config, one)
    compiled = step_plan.compile_step(config, chips)
  except ConfigError as e:
    return Row(one, None, f"refused: {e}")
  except (RefusedError, RuntimeError) as e:  # raised by the compiler
    line = next(iter(str(e).strip().splitlines()), type(e).__name__)
    return Row(one, None, f"does not compile: {line}")
  step = step_plan.step_on(config, [compiled], rates, compiled.devices, compiled.rows)
  if step.fits:
    return Row(one, step)
  return Row(one, None, f"does not fit: {gib(step.memory)} of {gib(compiled.fit.limit)}")


def name_of(one: Candidate) -> str:
  """Return the name of a candidate's layout.

  Example:
    >>> mesh, layout = cfg.Mesh(data=2, fsdp=4), cfg.Layout(shard="zero1")
    >>> name_of(Candidate(mesh, layout, 1))
    'data 2 x fsdp 4, zero1'
  """
  sizes = [f"{a} {n}" for a in _AXES if (n := getattr(one.mesh, a)) > 1]
  layout = one.layout
  words = [" x ".join(sizes) or "one device"]
  words += [layout.shard] * (layout.shard not in ("none", "fsdp"))
  words += [layout.model.replace("_", " ")] * (layout.model != "layers")
  words += [layout.schedule] * (one.mesh.stage > 1)
  words += ["slow_axes in_backward"] * (layout.slow_axes == "in_backward")
  return ", ".join(words)


def text(search: Search) -> str:
  """Return the table that `jaxscale plan --search` prints before the plan of the best."""
  cells = []
  for one, step, note in search.rows:
    took = (short_time(step.seconds["expected"]), gib(step.memory)) if step else ("–", "–")
    cells.append((name_of(one), one.layout.remat, f"{one.num_microbatches:,}", *took, note))
  head = ("layout", "remat", "micro-batches", "step", "memory", "")
  return (
    f"searched {search.considered:,} layouts in {search.seconds:.0f} s: "
    f"{search.too_large:,} cannot fit, {len(search.rows)} compiled; {search.ended}\n"
    f"{table(head, cells, left=(0, 1, 5))}"
  )
