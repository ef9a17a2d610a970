"""A run and its job, from the seconds of a step: hours, restarts, energy, price.

With a mean time M between failures of the job, and checkpoints that cost d seconds
each, the interval between them that loses least is about

    tau = sqrt(2 d M)

(Young, 1974, doi:10.1145/361147.361115; Daly, 2006, doi:10.1016/j.future.2004.11.016).
A failure costs half an interval, and a start. With M_host the time between failures of
one of n hosts, M = M_host / n.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

from jaxscale.errors import invalid
from jaxscale.files import require_json
from jaxscale.planning.machine import CORNERS, Corner, Rates, hosts
from jaxscale.planning.step_plan import Step

# Of training's three products a layer, evaluation has the first.
_FORWARD_SHARE = 1 / 3
_Seconds = dict[Corner, float]
_MARGIN = 1.1  # of the time limit to ask for, above the slowest that is expected


class RunLength(NamedTuple):
  """What a run is made of.

  Attributes:
    steps: optimizer steps.
    evaluations: in the run.
    eval_examples: of one evaluation.
    saves: checkpoints.
    state_bytes: of one.
  """

  steps: int
  evaluations: int
  eval_examples: int
  saves: int
  state_bytes: int


class Job(NamedTuple):
  """What a run takes on a machine.

  Attributes:
    train: seconds of steps, by corner.
    evaluate: seconds of evaluations, by corner.
    save: seconds that training waits for checkpoints; 0: unknown rate of the disks.
    start: seconds until the first step, by corner.
    restarts: that failures make expected; 0: no rate of failures is given.
    lost: seconds that they cost, in all.
    interval: seconds between checkpoints that lose least; None: not known.
    hours: of the whole, by corner.
    limit: hours to ask the scheduler for.
    chip_hours: as expected.
    kwh: of the chips; None: no watts are given.
    price: in the site's currency; None: none is given.
  """

  train: dict[Corner, float]
  evaluate: dict[Corner, float]
  save: float
  start: dict[Corner, float]
  restarts: float
  lost: float
  interval: float | None
  hours: dict[Corner, float]
  limit: float
  chip_hours: float
  kwh: float | None
  price: float | None


def run_of(experiment: Any) -> RunLength | None:
  """The run of an experiment; None: its text is not here, and nobody knows how long.

  Args:
    experiment: `build.Experiment`, at its first phase.
  """
  import jax

  from jaxscale.data import TextInfo

  derived = experiment.derived
  if isinstance(experiment.train_data.info, TextInfo):
    return None
  state = experiment.abstract_state()
  leaves = [x for x in jax.tree.leaves(state) if hasattr(x.dtype, "itemsize")]
  size = sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)
  steps = derived.total_steps
  evaluations = -(-steps // derived.eval_every)
  return RunLength(steps, evaluations, derived.num_eval, -(-steps // derived.save_every), size)


def target_steps(study: str | Path, batch_size: int) -> float:
  """Return the steps to a study's target at a batch size.

  S = S_min (1 + B_crit / B), arXiv:1812.06162, equations 2.7 and 2.11.

  Args:
    study: the study.json of a `jaxscale batch-study`.
    batch_size: examples of a step.

  Raises:
    ConfigError: the file is not one, or has no fit.
  """
  remedy = "give the study.json of a `jaxscale batch-study`"
  shape = {"sizes": [{}], "fit": ({"s_min": float, "b_crit": float}, None)}
  fit = require_json(Path(study), shape, remedy)["fit"]
  if fit is None:
    why = "has no critical batch size"
    raise invalid("--study", study, why, "train more sizes with `jaxscale batch-study`")
  return fit["s_min"] * (1 + fit["b_crit"] / batch_size)


def job_of(run: RunLength, step: Step, rates: Rates) -> Job:
  """What a run takes, and costs.

  Args:
    run: of `run_of`.
    step: on the devices of the job.
    rates: of the machine, and what the site's file adds to them.

  Example:
    >>> run = RunLength(14_076, 18, 50_000, 90, 0)
    >>> job = job_of(run, step, rates)                               # doctest: +SKIP
    >>> round(job.hours["expected"], 1)                              # doctest: +SKIP
    2.9
  """
  machine = rates.machine
  train: _Seconds = {c: run.steps * step.seconds[c] for c in CORNERS}
  share = _FORWARD_SHARE * run.evaluations * run.eval_examples / step.batch_size
  evaluate: _Seconds = {c: share * step.seconds[c] for c in CORNERS}
  one_save = run.state_bytes / machine.save_rate if machine.save_rate else 0.0
  save = run.saves * one_save
  start: _Seconds = {c: rates.at(c)["start"] for c in CORNERS}
  seconds: _Seconds = {c: start[c] + train[c] + evaluate[c] + save for c in CORNERS}
  interval, restarts, lost = None, 0.0, 0.0
  if machine.mtbf_hours:
    mtbf = 3600 * machine.mtbf_hours / hosts(step.devices, rates.at("expected"))
    interval = math.sqrt(2 * one_save * mtbf) if one_save else None
    between = interval or train["expected"] / max(run.saves, 1)
    restarts = seconds["expected"] / mtbf
    lost = restarts * (between / 2 + start["expected"])
  hours: _Seconds = {c: (s + lost) / 3600 for c, s in seconds.items()}
  chip_hours = step.devices / rates.devices_per_chip * hours["expected"]
  kwh = chip_hours * machine.watts / 1000 if machine.watts else None
  limit = _MARGIN * hours["low"]
  price = _price(machine, chip_hours, kwh)
  return Job(
    train, evaluate, save, start, restarts, lost, interval, hours, limit, chip_hours, kwh, price
  )


def _price(machine: Any, chip_hours: float, kwh: float | None) -> float | None:
  of_chips, of_energy = machine.price_chip_hour, machine.price_kwh
  if of_chips is None and (of_energy is None or kwh is None):
    return None
  return chip_hours * (of_chips or 0.0) + (kwh or 0.0) * (of_energy or 0.0)
