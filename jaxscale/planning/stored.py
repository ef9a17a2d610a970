"""A plan that lies in a run's workdir, plan.json: read again, without JAX.

It is what `jaxscale plan` wrote. A run is compared with it only where both have the
same step: the same chip, the same settings of what sets the step, and a number of
devices and a batch that were planned.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxscale.config.record import flat
from jaxscale.config.validation import shown
from jaxscale.errors import ConfigError, printable
from jaxscale.files import mismatch, read_json, require_json, write_json
from jaxscale.metrics import text
from jaxscale.metrics.chips import peak_flops
from jaxscale.planning.machine import CORNERS, Corner, chip_kind
from jaxscale.planning.topologies import CHIPS, kind_of

FILE = "plan.json"
_REMEDY = "write it anew with `jaxscale plan`"
_CORNERS = dict.fromkeys(CORNERS, float)
_STEP = {
  "devices": int, "nodes": int, "batch_size": int, "rows": int, "seconds": _CORNERS,
  "parts": {str: float}, "sent": {str: float}, "memory": float, "fits": bool,
}  # fmt: skip
_JOB = {
  "train": _CORNERS, "evaluate": _CORNERS, "save": float, "start": _CORNERS,
  "lost": float, "hours": _CORNERS,
}  # fmt: skip
_RUN = {"steps": int, "evaluations": int, "saves": int, "state_bytes": int}
_SENT = {"collective": str, "axes": str, "times": int, "bytes": float}
SHAPE = {
  "chips": str, "calibrated": bool, "mfu": float, "config": {"class": str},
  "step": _STEP, "strong": [_STEP], "weak": [_STEP], "sent": [_SENT],
  "run": (None, _RUN), "job": (None, _JOB), "constants": {}, "machine": {},
}  # fmt: skip

# Settings that do not set the seconds of a step, the first word of their names; the
# batch is compared with the numbers of devices.
_FREE = {
  "batch_size", "epochs", "steps", "seed", "schedule", "evaluation", "checkpoint",
  "checks", "faults", "log", "compilation", "input_threads", "init_from", "init_head",
  "gpu_settings", "lr_scaling", "lr_reference_batch_size", "layer_decay",
  "layer_order", "target_accuracy", "target_loss", "stop_at_target",
}  # fmt: skip
# Of what these are, the class alone sets it: an optimizer's rates do not.
_CLASS_ALONE = ("optimizer", "loss", "data")
# Data that stands for other data, and is planned with its name.
_STANDS_FOR_ANY = "Synthetic"


class PlannedStep(NamedTuple):
  """The step on so many devices, as `step_plan.Step`."""

  devices: int
  nodes: int
  batch_size: int
  rows: int
  seconds: Mapping[Corner, float]
  parts: Mapping[str, float]
  sent: Mapping[str, float]
  memory: float
  fits: bool

  def rate(self, corner: Corner = "expected") -> float:
    """Examples a second."""
    return self.batch_size / self.seconds[corner]


class StoredPlan(NamedTuple):
  """A plan as its file has it.

  Attributes:
    chips: that were asked for, "h100-256" say.
    calibrated: whether the site's own rates were given.
    config: of the run that was planned, as JSON.
    step: on those chips.
    strong: the same batch on other numbers of devices.
    weak: the same rows of a device on them.
    sent: bytes of a device and step, by collective and axes.
    mfu: of the peak in bfloat16.
    run: what it is made of; None: not known.
    job: what it takes; None likewise.
    constants: values of the chip and its links, by name.
    has_tables: whether kernels were planned by a calibration's tables of rates.
  """

  chips: str
  calibrated: bool
  config: dict[str, Any]
  step: PlannedStep
  strong: tuple[PlannedStep, ...]
  weak: tuple[PlannedStep, ...]
  sent: tuple[dict[str, Any], ...]
  mfu: float
  run: dict[str, int] | None
  job: dict[str, Any] | None
  constants: dict[str, float]
  has_tables: bool

  def on(self, devices: int, batch_size: int) -> PlannedStep | None:
    """The step on so many devices with that batch; None: it was not planned."""
    for step in (self.step, *self.strong, *self.weak):
      if (step.devices, step.batch_size) == (devices, batch_size):
        return step
    return None


def read_plan(path: Path) -> StoredPlan:
  """The plan in a file.

  Raises:
    ConfigError: it is missing, damaged, or no plan.
  """
  table = require_json(path, SHAPE, _REMEDY)
  # Those that are one number; a table of rates is for the planner alone.
  constants = {
    name: c["value"]
    for name, c in table["constants"].items()
    if mismatch(c, {"value": float}) is None
  }
  steps = [table["step"], *table["strong"], *table["weak"]]
  why = next(filter(None, map(_impossible, _numbers(table, steps, constants))), None)
  if why := why or _odd_name(table, steps):
    raise ConfigError(f"{path}: {why}; {_REMEDY}")
  step, *others = (PlannedStep(**{n: s[n] for n in _STEP}) for s in steps)
  strong, machine = len(table["strong"]), table["machine"]
  return StoredPlan(
    step=step, strong=tuple(others[:strong]), weak=tuple(others[strong:]),
    sent=tuple(table["sent"]),
    constants=constants,
    has_tables=bool(machine.get("tables") or machine.get("loops")),
    **{n: table[n] for n in ("chips", "calibrated", "config", "mfu", "run", "job")},
  )  # fmt: skip


def _numbers(
  table: dict, steps: list[dict], constants: dict[str, float]
) -> Iterator[tuple[str, float, float]]:
  """(name, value, smallest that it may be) of all numbers that are divided by."""
  for step in steps:
    yield from (("seconds", s, 1e-12) for s in step["seconds"].values())
    yield from ((f"parts.{n}", s, 0) for n, s in step["parts"].items())
    yield from ((f"sent.{n}", s, 0) for n, s in step["sent"].items())
    yield from ((n, step[n], 1) for n in ("devices", "nodes", "batch_size", "rows"))
    yield "memory", step["memory"], 0
  yield "mfu", table["mfu"], 0
  yield from (("sent.bytes", x["bytes"], 0) for x in table["sent"])
  yield from ((f"run.{n}", x, 0) for n, x in flat({"": table["run"] or {}}).items())
  job = {n: (table["job"] or {}).get(n, 0.0) for n in _JOB}
  yield from ((f"job{n}", x, 0) for n, x in flat({"": job}).items() if x is not None)
  yield from ((n, value, 0) for n, value in constants.items())


def _odd_name(table: dict, steps: list[dict]) -> str | None:
  """A name that no plan has; they are shown, and are not to be anything else."""
  names = [table["chips"], *table["constants"], *(x["axes"] for x in table["sent"])]
  names += [name for step in steps for name in (*step["parts"], *step["sent"])]
  odd = (n for n in names if not re.fullmatch(r"[\w +.-]{1,80}", n, re.ASCII))
  return next((f"{printable(repr(name)):.40} is no name in it" for name in odd), None)


def _impossible(number: tuple[str, float, float]) -> str | None:
  name, value, least = number
  is_number = isinstance(value, int | float) and least <= value < 1e30
  return None if is_number and math.isfinite(value) else f"{name} is {value!r:.40}"


def load_plan(path: Path) -> dict[str, Any]:
  """A plan as its file has it, to be stored with a run.

  Raises:
    ConfigError: as `read_plan`.
  """
  read_plan(path)
  return read_json(path)


def store(plan: Mapping[str, Any], workdir: Path) -> None:
  """Put a plan into a run's workdir, which is made if need be.

  Args:
    plan: as in its file, or of `plan.as_json`.
    workdir: of the run.
  """
  workdir.mkdir(parents=True, exist_ok=True)
  write_json(workdir / FILE, plan)


class Match(NamedTuple):
  """A plan and a run, if they are of the same step.

  Attributes:
    plan: that there is.
    step: of the run's devices and batch; None: it cannot be compared.
    why: it cannot be, one line; "" where it can.
    is_whole: whether the run is also as long, and evaluates and saves as often.
  """

  plan: StoredPlan | None
  step: PlannedStep | None
  why: str = ""
  is_whole: bool = False


def match(
  plan: StoredPlan,
  config: Mapping[str, Any],
  *,
  devices: int,
  batch_size: int,
  kind: str = "",
  steps: int | None = None,
) -> Match:
  """The step of a plan that a run takes, or why it has none.

  Args:
    plan: of `read_plan`.
    config: of the run, as in config.json.
    devices: of the run.
    batch_size: examples of its steps.
    kind: of its devices, as `jax.Device.device_kind`; "": not known.
    steps: of the whole run; None: not known.

  Example:
    >>> found = match(plan, described["config"], devices=8, batch_size=128)
    ...                                                            # doctest: +SKIP
    >>> found.step.seconds["expected"], found.why                  # doctest: +SKIP
    (0.012, '')
  """
  if kind and (other := _other_chip(plan.chips, kind)):
    return Match(plan, None, f"the plan is of {printable(other)}, the run is on {kind}")
  if found := _differences(plan.config, config):
    (name, (old, new)), *_ = found.items()
    what = f"{name} is {shown(old)} there and {shown(new)} in the run"
    return Match(plan, None, printable(f"the plan is of another config: {what}"))
  step = plan.on(devices, batch_size)
  if step is None:
    here = f"batch {batch_size:,} on {text.plural(devices, 'device')}"
    return Match(plan, None, f"the plan has no {here}")
  same = (_rest(plan.config, name) == _rest(config, name) for name in _LENGTH)
  is_whole = step == plan.step and all(same) and plan.job is not None
  if steps is not None and plan.run is not None:
    is_whole = is_whole and steps == plan.run["steps"]
  return Match(plan, step, "", is_whole)


_LENGTH = ("epochs", "steps", "evaluation", "checkpoint")


def _rest(config: Mapping[str, Any], name: str) -> Any:
  found = config.get(name)
  names = "every_epochs", "every_steps"
  names += ("batch_size",) * (name == "evaluation")
  return [found.get(n) for n in names] if isinstance(found, Mapping) else found


def _other_chip(chips: str, kind: str) -> str | None:
  """What the plan is of, if the run's devices are of another kind."""
  try:
    chip = kind_of(chips)
  except ConfigError:
    return chips
  if CHIPS[chip].platform == "cpu":
    return None if "cpu" in kind.lower() else chip
  planned = chip_kind(chip)
  is_same = planned in kind or peak_flops(planned) == (peak_flops(kind) or -1.0)
  return None if is_same else planned


def _differences(
  planned: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
  """Settings of the step that are not the same: both values, by dotted name."""
  old, new = _of_step(planned), _of_step(config)
  found = {n: (old.get(n), new.get(n)) for n in {**old, **new}}
  differ = {n: pair for n, pair in found.items() if pair[0] != pair[1]}
  if _STANDS_FOR_ANY in differ.get("data.class", ()):
    del differ["data.class"]
  return differ


def _of_step(config: Mapping[str, Any]) -> dict[str, Any]:
  """Settings that set the seconds of a step."""
  found = {}
  for name, value in flat(config).items():
    first, _, rest = name.partition(".")
    if first in _FREE or (first in _CLASS_ALONE and rest != "class"):
      continue
    found[name] = value
  return found


_DERIVED = {"num_devices": int, "total_steps": int}
_DERIVED |= {"phases": [{"batch_size": int, "image_size": (int, None)}]}


def of_workdir(
  workdir: Path, described: Mapping[str, Any], file: Path | None = None
) -> Match | None:
  """The plan of a run; None: it has none.

  Args:
    workdir: of the run.
    described: its config.json.
    file: of the plan; None: plan.json in the workdir.
  """
  if not os.path.lexists(path := file or workdir / FILE):
    return None
  try:
    plan = read_plan(path)
  except ConfigError as e:
    return Match(None, None, printable(str(e)).removeprefix(f"{workdir}/{FILE}: "))
  shape = {"config": {"phases": {"class": str}}, "derived": _DERIVED}
  if why := mismatch(dict(described), shape):
    return Match(plan, None, f"the run's config.json cannot be read: {printable(why)}")
  derived, config = described["derived"], described["config"]
  sizes = {(x["batch_size"], x["image_size"]) for x in derived["phases"]}
  if len(sizes) != 1 or config["phases"]["class"] == "AdaptiveBatch":
    return Match(plan, None, "batch or image size changes during the run")
  kind = described.get("device_kind")
  return match(
    plan, config, devices=derived["num_devices"], batch_size=sizes.pop()[0],
    kind=kind if isinstance(kind, str) else "", steps=derived["total_steps"],
  )  # fmt: skip


def not_compared(why: str) -> str:
  """The line of a plan that a run is not compared with."""
  return f"{FILE}: {why}; nothing is compared with it"


def expectation(found: Match) -> str:
  """One line at the start of a run: what was planned, or why that is of no use.

  Example:
    >>> expectation(Match(None, None, "the plan has no batch 8 on 1 device"))
    'plan.json: the plan has no batch 8 on 1 device; nothing is compared with it'
  """
  if found.step is None or found.plan is None:
    return not_compared(found.why)
  slow, mean, fast = (text.short_time(found.step.seconds[c]) for c in CORNERS)
  line = f"planned: {mean} per step ({fast} to {slow})"
  if found.is_whole and found.plan.job:
    hours = found.plan.job["hours"]
    slow, mean, fast = (text.duration(3600 * hours[c]) for c in CORNERS)
    line += f", {mean} in all ({fast} to {slow})"
  return line
