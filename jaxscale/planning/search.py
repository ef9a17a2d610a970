"""The best layout of a config on chips that are not here: pruned, compiled, ranked.

    jaxscale plan --config FILE --chips h100-64 --search [--rank chip-hours]

Every layout that the settings offer is considered (`candidates`). What does not divide
is refused by the same checks that refuse a run, what cannot fit by arithmetic, and the
others are compiled, the best by estimate (`estimate`) first, until the rest is no
better even where estimates were furthest off, or the minutes are over. What is compiled
is planned as `jaxscale plan` does, and that decides. Each layout keeps the reason for
what became of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxscale import config as cfg
from jaxscale.config.loading import override
from jaxscale.errors import ConfigError
from jaxscale.planning import candidates, step_plan, topologies
from jaxscale.planning.candidates import REMATS, Candidate
from jaxscale.planning.estimate import Estimate, Facts, estimate, facts_of
from jaxscale.planning.fits import RefusedError
from jaxscale.planning.goal import UNKNOWN_STEPS, Goal
from jaxscale.planning.machine import Machine, Rates, rates_of
from jaxscale.planning.step_plan import Step
from jaxscale.planning.topologies import Chips, gib

_LAYOUTS_SHARE = (
  0.6  # of the minutes for one of each layout; then the best ones' others
)
_FINALISTS = 6  # layouts whose other variants are compiled
# Compiled steps, from which on estimates are trusted as far as their lowest ratio.
_TRUSTED = 8
# Exchanges that keep nothing between steps.
_STATELESS = ("AllReduce", "HalfPrecision", "Int8")
Say = Callable[[str], None]


class Compiled(NamedTuple):
  """A candidate that was compiled and planned.

  Attributes:
    candidate: that it is.
    step: as planned; None: it does not fit, or does not compile.
    hours: or chip-hours, what is ranked by.
    guess: what was estimated of that.
    reason: what there is to say, in a line.
    chosen: by the search; or else it was given.
  """

  candidate: Candidate
  step: Step | None
  hours: float
  guess: float
  reason: str
  chosen: bool


class Considered:
  """A layout, and what became of it.

  Attributes:
    family: the layout.
    state: "refused", "estimated" or "compiled".
    reason: for it, in a line.
    waiting: its candidates that may fit, the best first, with estimates.
    compiled: those that were compiled.
  """

  def __init__(self, family: Candidate, state: str, reason: str):
    self.family, self.state, self.reason = family, state, reason
    self.waiting: list[tuple[float, Estimate, Candidate]] = []
    self.compiled: list[Compiled] = []

  @property
  def has_chosen(self) -> bool:
    """Whether one that fits was compiled for its estimate, and not as it was given."""
    return any(c.step and c.chosen for c in self.compiled)

  @property
  def best(self) -> Compiled | None:
    """Of those that were compiled and fit."""
    good = [c for c in self.compiled if c.step]
    return min(good, key=lambda c: c.hours) if good else None


class Search(NamedTuple):
  """What a search found.

  Attributes:
    goal: that it ranked by.
    layouts: all that were considered, the best first.
    best: the candidate to run.
    config: of it.
    chips: that it is for.
    seconds: that the search took.
    candidates: with remat and micro-batches, how many there were.
    steps: at the config's batch size, that hours are of.
    ended: why it ended, in a line.
  """

  goal: Goal
  layouts: tuple[Considered, ...]
  best: Compiled
  config: cfg.Config
  chips: Chips
  seconds: float
  candidates: int
  steps: int
  ended: str


def search(
  config: cfg.Config,
  chips: str | Chips,
  *,
  machine: Machine | None = None,
  nodes: Sequence[int] = (),
  batch_sizes: Sequence[int] = (),
  exchanges: Sequence[cfg.Exchange] = (),
  goal: Goal | None = None,
  minutes: float = 10.0,
  also: Sequence[Mapping[str, str]] = (),
  say: Say = lambda line: None,
) -> Search:
  """Find the layout with which a run takes least.

  Args:
    config: of the run; its own settings are compiled first.
    chips: a name as in `topologies`, "h100-64" say.
    machine: constants of a site, in place of the chip's.
    nodes: numbers of nodes to choose from; (): those of `chips`.
    batch_sizes: to choose from, for a goal with a target; (): the config's.
    exchanges: to choose from; (): the config's, and gradients in 16 bits.
    goal: what is to be least; None: the time.
    minutes: after which no more is compiled.
    also: overrides of layouts that are compiled whatever is estimated of them.
    say: is called with a line of every layout that is compiled.

  Raises:
    ConfigError: unknown chips, or batch sizes without a target.
    RefusedError: nothing that was compiled fits.

  Example:
    >>> from jaxscale.config.loading import load_config
    >>> found = search(load_config("configs/llama_7b.py:h100"), "h100-64")
    ...                                                          # doctest: +SKIP
    >>> found.best.candidate.name, found.best.candidate.variant  # doctest: +SKIP
    ('fsdp 64', 'remat dots, 4 micro-batches')
  """
  goal = goal or Goal()
  if batch_sizes and goal.rank != "target":
    why = "a larger batch is not better for its throughput alone; give --rank target"
    raise ConfigError(f"--batch-sizes: {why}")
  found = topologies.find_chips(chips) if isinstance(chips, str) else chips
  run = _Search(config, rates_of(found.kind, machine), goal, minutes, say)
  run.add_chips(found, nodes)
  run.compile_given(also)
  run.consider(batch_sizes or (config.batch_size,), exchanges or _exchanges(config))
  run.compile_best()
  return run.result()


def _exchanges(config: cfg.Config) -> list[cfg.Exchange]:
  """The config's own, and half the bytes of it."""
  made = [config.exchange]
  half = cfg.Exchange.built_in()["HalfPrecision"]()
  return made + [half] * (type(config.exchange).__name__ == "AllReduce")


class _Search:
  """A search that is under way."""

  def __init__(
    self, config: cfg.Config, rates: Rates, goal: Goal, minutes: float, say: Say
  ):
    self.config, self.rates, self.goal, self.say = config, rates, goal, say
    self.began, self.limit_s = time.monotonic(), 60 * minutes
    self.chips: dict[int, Chips] = {}
    self.facts: dict[Any, Facts | ConfigError] = {}
    self.layouts: dict[Candidate, Considered] = {}
    self.count, self.longest, self.ended = 0, 0.0, ""
    self.base_steps = 0

  def add_chips(self, chips: Chips, nodes: Sequence[int]) -> None:
    """The numbers of devices to choose from."""
    if nodes:
      for n in nodes:
        name = step_plan.sized(chips, n * self.rates.per_node)
        if name is None:
          raise ConfigError(f"--nodes={n}: {chips.kind} does not come in so many")
        found = topologies.find_chips(name)
        self.chips[found.count or len(found.devices)] = found
    else:
      self.chips[chips.count or len(chips.devices)] = chips
    for devices, found in self.chips.items():
      if len(found.devices) < devices:
        why = f"a search has no more than the {len(found.devices)} that are simulated"
        raise ConfigError(f"--chips={found.name}: {why}; set JAX_NUM_CPU_DEVICES")

  def compile_given(self, also: Sequence[Mapping[str, str]]) -> None:
    """The config's own layout, and those that the caller wants compiled."""
    for i, changes in enumerate([{}, *also]):
      made = override(self.config, changes) if changes else self.config
      for devices in self.chips:
        try:
          one = candidates.as_given(made, devices)
        except ConfigError as e:
          self.say(f"{'also' if i else 'as given'}: refused: {e}")
          continue
        layout = self._layout(one.family, "compiled", "")
        self._compile(layout, one, None, "as given" if i == 0 else "asked for")

  def _layout(self, family: Candidate, state: str, reason: str) -> Considered:
    return self.layouts.setdefault(family, Considered(family, state, reason))

  def consider(
    self, batch_sizes: Sequence[int], exchanges: Sequence[cfg.Exchange]
  ) -> None:
    """Every layout: refused, or estimated."""
    for devices, size in ((d, b) for d in self.chips for b in batch_sizes):
      for family in candidates.families(self.config, devices, size, exchanges):
        self._consider(family)

  def _consider(self, family: Candidate) -> None:
    layout = self._layout(family, "refused", "")
    found = candidates.variants(self.config, family)
    if not found:
      layout.reason = f"{family.batch_size:,} rows do not divide over its devices"
      return
    facts = self._facts(found[0])
    if isinstance(facts, ConfigError):
      layout.reason = layout.reason or str(facts)
      return
    self.count += len(found)
    limit = self.chips[family.devices].chip.limit
    done = {c.candidate for c in layout.compiled}
    guesses = self._guesses(facts, found, limit)
    least = min(guess.least for guess, _ in guesses)
    if least > limit:
      text = f"cannot fit: at least {gib(least)} of {gib(limit)}"
      layout.reason = layout.reason or text
      return
    fitting = [
      (self._measure(one, guess.seconds), guess, one)
      for guess, one in guesses
      if guess.least <= limit and one not in done
    ]
    # What is likely to be too large comes behind what is not.
    layout.waiting = sorted(fitting, key=lambda f: _likely(f[1], limit, f[0]))
    if not layout.compiled and fitting:
      hours, guess, one = layout.waiting[0]
      layout.state = "estimated"
      layout.reason = f"{self._shown(hours)}, {gib(guess.memory)}: {one.variant}"

  def _guesses(
    self, facts: Facts, found: Sequence[Candidate], limit: int
  ) -> list[tuple[Estimate, Candidate]]:
    """Estimates of a layout's candidates, but for those with too many micro-batches.

    Where one needs half of the memory, more parts of it only send more and multiply
    smaller matrices; a pipeline idles less with more of them.
    """
    guesses, small = [], set()
    for one in found:
      remat = one.layout.remat
      if remat in small and one.mesh.stage == 1:
        continue
      guess = estimate(facts, one, self.rates)
      guesses.append((guess, one))
      if guess.memory < limit / 2:
        small.add(remat)
    return guesses

  def _facts(self, one: Candidate) -> Facts | ConfigError:
    """Shapes of a layout, or why it is refused: by what would refuse the run."""
    from jaxscale.experiment import build

    layout, exchange = one.layout, type(one.exchange).__name__
    keeps = exchange if exchange not in _STATELESS else ""
    key = one.devices, one.batch_size, one.mesh, layout.shard, layout.model, keeps
    if key not in self.facts:
      try:
        config = one.config(self.config)
        data = config.data.abstract(config.batch_size)
        devices = self.chips[one.devices].devices
        self.facts[key] = facts_of(
          build.experiment(config, devices=devices, datasets=data)
        )
      except ConfigError as e:
        self.facts[key] = e
    return self.facts[key]

  def _measure(self, one: Candidate, seconds: float) -> float:
    """What a candidate is ranked by."""
    steps = self.goal.steps(
      one.batch_size, self.config.batch_size, self.base_steps or UNKNOWN_STEPS
    )
    return self.goal.measure(steps, seconds, one.devices / self.rates.devices_per_chip)

  def _shown(self, hours: float) -> str:
    return f"{hours:.4g} {self.goal.title}"

  def compile_best(self) -> None:
    """The best layouts by estimate, and then the others of the best of these."""
    waiting = [x for x in self.layouts.values() if x.waiting]
    self._compile_all(self._first_of_each(waiting), _LAYOUTS_SHARE)
    done = [x for x in self.layouts.values() if x.best]
    done.sort(key=lambda x: x.best.hours if x.best else 0.0)
    if done:
      self._compile_all(self._others(done[:_FINALISTS]), 1.0)

  def _first_of_each(self, layouts: list[Considered]) -> Iterator[Considered]:
    """One layout after another, by estimate; again where one was too large."""
    while layouts := [x for x in layouts if x.waiting and not x.has_chosen]:
      yield min(layouts, key=self._order)

  def _others(self, layouts: list[Considered]) -> Iterator[Considered]:
    while layouts := [x for x in layouts if x.waiting]:
      yield min(layouts, key=self._order)

  def _order(self, layout: Considered) -> tuple[bool, float]:
    hours, guess, one = layout.waiting[0]
    ratios = self._ratios(one)
    corrected = hours * (sum(ratios) / len(ratios) if ratios else 1.0)
    return _likely(guess, self.chips[one.devices].chip.limit, corrected)

  def _ratios(self, one: Candidate) -> list[float]:
    """Planned by estimated, of what was compiled of the same kind."""

    def kind(x: Candidate) -> tuple[str, bool]:
      return x.layout.model if x.mesh.model > 1 else "", x.mesh.stage > 1

    return [
      c.hours / c.guess
      for x in self.layouts.values()
      for c in x.compiled
      if c.step and c.guess and kind(c.candidate) == kind(one)
    ]

  def _compile_all(self, order: Iterator[Considered], share: float) -> None:
    """Compiles until nothing better is expected, or the time is over."""
    for layout in order:
      if self._is_worse(layout):
        self.ended = "nothing that is left is estimated to be better"
        return
      spent = time.monotonic() - self.began
      if spent + self.longest > share * self.limit_s:
        self.ended = f"its {self.limit_s / 60:g} minutes were over"
        return
      _, guess, one = layout.waiting.pop(0)
      self._compile(layout, one, guess, "")

  def _is_worse(self, layout: Considered) -> bool:
    """Whether an estimate, were it as far off as any was, is above the best."""
    good = [c for x in self.layouts.values() for c in x.compiled if c.step and c.guess]
    if len(good) < _TRUSTED:
      return False
    hours, _, one = layout.waiting[0]
    ratio = min(self._ratios(one) or (c.hours / c.guess for c in good))
    return hours * ratio >= min(c.hours for c in good)

  def _compile(
    self, layout: Considered, one: Candidate, guess: Estimate | None, note: str
  ) -> None:
    began = time.monotonic()
    step, reason = self._planned(one)
    hours = self._measure(one, step.seconds["expected"]) if step else float("inf")
    if guess is None and step:
      facts = self._facts(one)
      guess = estimate(facts, one, self.rates) if isinstance(facts, Facts) else None
    guessed = self._measure(one, guess.seconds) if guess else 0.0
    reason = f"{reason}{f' ({note})' * bool(note)}"
    layout.compiled.append(Compiled(one, step, hours, guessed, reason, not note))
    if step is None:
      layout.waiting = [w for w in layout.waiting if not _keeps_as_much(w[2], one)]
    shown = layout.best or layout.compiled[-1]
    layout.state = "compiled"
    layout.reason = f"{shown.reason}: {shown.candidate.variant}"
    self.longest = max(self.longest, time.monotonic() - began)
    self.say(f"{self._title(one)}; {one.variant}: {reason}")

  def _title(self, one: Candidate) -> str:
    several = len({x.devices for x in self.layouts}) > 1 or len(self.chips) > 1
    size = f"{one.devices} devices, " * several
    batch = f"batch {one.batch_size:,}, " * (one.batch_size != self.config.batch_size)
    return f"{size}{batch}{one.name}"

  def _planned(self, one: Candidate) -> tuple[Step | None, str]:
    """The step of a candidate, as `make_plan` has it, and a line about it."""
    chips = self.chips[one.devices]
    try:
      config = one.config(self.config)
      made = step_plan.compile_step(config, chips)
    except ConfigError as e:
      return None, f"refused: {e}"
    except (RefusedError, RuntimeError) as e:  # of the compiler
      lines = str(e).strip().splitlines()
      return None, f"does not compile: {lines[0] if lines else type(e).__name__}"
    if not self.base_steps:
      self.base_steps = self._steps(made.experiment)
    step = step_plan.step_on(config, [made], self.rates, one.devices, made.rows)
    used = f"{gib(step.memory)} of {gib(made.fit.limit)}"
    if not step.fits:
      return None, f"does not fit: {used}"
    hours = self._measure(one, step.seconds["expected"])
    return step, f"{self._shown(hours)}, {step.seconds['expected']:.4g} s, {used}"

  def _steps(self, experiment: Any) -> int:
    """Steps of the run at the config's batch size."""
    from jaxscale.planning.job import run_of

    run = run_of(experiment)
    if run is None:
      return UNKNOWN_STEPS
    size = experiment.phase.batch_size
    return max(round(run.steps * size / self.config.batch_size), 1)

  def result(self) -> Search:
    """What was found.

    Raises:
      RefusedError: nothing that was compiled fits.
    """
    layouts = sorted(self.layouts.values(), key=self._rank)
    best = layouts[0].best if layouts else None
    if best is None:
      reasons = [c.reason for x in layouts for c in x.compiled]
      why = reasons[-1] if reasons else layouts[0].reason if layouts else "no layout"
      raise RefusedError(f"--search: no layout of {len(layouts)} fits; the last: {why}")
    one = best.candidate
    return Search(
      self.goal, tuple(layouts), best, one.config(self.config), self.chips[one.devices],
      time.monotonic() - self.began, self.count, self.base_steps,
      self.ended or "all were compiled",
    )  # fmt: skip

  def _rank(self, layout: Considered) -> tuple[int, float]:
    if best := layout.best:
      return 0, best.hours
    if layout.state == "compiled":
      return 1, 0.0
    if not layout.waiting:
      return 4, 0.0
    is_large, order = self._order(layout)
    return 2 + is_large, order


def _likely(guess: Estimate, limit: int, hours: float) -> tuple[bool, float]:
  """An order: what is likely to fit by hours, and then the rest by memory."""
  is_large = guess.memory > limit
  return is_large, guess.memory if is_large else hours


def _keeps_as_much(one: Candidate, other: Candidate) -> bool:
  """Whether a candidate needs at least the memory of another of its layout.

  More is kept for the backward pass, of as many rows or more at a time.
  """
  remat, than = one.layout.remat, other.layout.remat
  keeps = remat == than
  if not keeps and {remat, than} <= {*REMATS}:
    keeps = REMATS.index(remat) < REMATS.index(than)
  return one.micros <= other.micros and keeps
