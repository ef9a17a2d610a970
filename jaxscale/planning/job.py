"""Predict a run and its job from the step time: hours, restarts, energy, price, and savings.

With a mean time M between failures of the job, and checkpoints that cost d seconds each, the
interval between checkpoints that loses the least time is about

    tau = sqrt(2 d M)

(Young, 1974, doi:10.1145/361147.361115; Daly, 2006, doi:10.1016/j.future.2004.11.016).
A failure costs half an interval and a start. With a mean time M_host between failures of one
of n hosts, M = M_host / n.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxscale import collectives
from jaxscale.config import Growing
from jaxscale.config.phase_settings import measuring
from jaxscale.experiment.derive import all_sizes, derive
from jaxscale.planning.machine import CORNERS, Corner, Rates, hosts
from jaxscale.planning.step_plan import Step

# Evaluation does only the first of training's three products per layer.
_FORWARD_SHARE = 1 / 3
_Seconds = dict[Corner, float]
_MARGIN = 1.1  # time limit to request, relative to the slowest expected time


class RunLength(NamedTuple):
  """Length of a run.

  Attributes:
    steps: the optimizer steps.
    evaluations: the number of evaluations.
    eval_examples: the examples per evaluation.
    saves: the number of checkpoints.
    state_bytes: the bytes of a checkpoint.
  """

  steps: int
  evaluations: int
  eval_examples: int
  saves: int
  state_bytes: int


class Job(NamedTuple):
  """Predicted cost of a run on a machine.

  Corners are low, expected and high speed, see `machine.Corner`.

  Attributes:
    train: the seconds of steps, by corner.
    evaluate: the seconds of evaluations, by corner.
    save: the seconds that training waits for checkpoints; 0 if the disks' rate is unknown.
    start: the seconds until the first step, by corner.
    restarts: the expected number of restarts after failures; 0 without a failure rate.
    lost: the seconds that all restarts cost.
    interval: the best interval between checkpoints in seconds; None if unknown.
    hours: the hours of the whole run, by corner.
    limit: the time limit to request from the scheduler, in hours.
    chip_hours: the expected chip hours.
    kwh: the energy of the chips in kWh; None without a power in watts.
    price: the price in the site's currency; None without a price.
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
  """Return the length of an experiment's run; None for text, which is not read.

  Args:
    experiment: the `build.Experiment`, at its first phase.
  """
  from jaxscale.data import TextInfo

  derived = experiment.derived
  if isinstance(experiment.train_data.info, TextInfo):
    return None
  size = collectives.payload_bytes(experiment.abstract_state())
  steps = derived.total_steps
  evaluations = -(-steps // derived.eval_every)
  return RunLength(steps, evaluations, derived.num_eval, -(-steps // derived.save_every), size)


def job_of(run: RunLength, step: Step, rates: Rates, train: _Seconds | None = None) -> Job:
  """Predict the time and the cost of a run.

  Args:
    run: the length of the run, from `run_of`.
    step: the planned step on the job's devices.
    rates: the rates of the machine, with those of the site's file.
    train: the seconds of all steps, by corner, if their batch sizes differ; None multiplies.

  Example:
    >>> run = RunLength(14_076, 18, 50_000, 90, 0)
    >>> job = job_of(run, step, rates)                               # doctest: +SKIP
    >>> round(job.hours["expected"], 1)                              # doctest: +SKIP
    2.9
  """
  machine = rates.machine
  train = train or {c: run.steps * step.seconds[c] for c in CORNERS}
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
  chip_hours = step.devices / rates.at("expected")["devices_per_chip"] * hours["expected"]
  kwh = chip_hours * machine.watts / 1000 if machine.watts else None
  cost = _MARGIN * hours["low"], chip_hours, kwh, _price(machine, chip_hours, kwh)
  return Job(train, evaluate, save, start, restarts, lost, interval, hours, *cost)


def _price(machine: Any, chip_hours: float, kwh: float | None) -> float | None:
  of_chips, of_energy = machine.price_chip_hour, machine.price_kwh
  if of_chips is None and (of_energy is None or kwh is None):
    return None
  return chip_hours * (of_chips or 0.0) + (kwh or 0.0) * (of_energy or 0.0)


class Saving(NamedTuple):
  """Steps and time of a growing batch on some devices, beside the constant batch of its start.

  Attributes:
    devices: the number of devices.
    nodes: the number of nodes.
    steps: the number of steps at each batch size.
    constant_steps: the number of steps at the constant batch size.
    seconds: the seconds of all steps, by corner.
    constant_seconds: the expected seconds of all steps at the constant batch size.
  """

  devices: int
  nodes: int
  steps: dict[int, int]
  constant_steps: int
  seconds: dict[Corner, float]
  constant_seconds: float


def steps_by_size(experiment: Any) -> dict[int, int]:
  """Return the steps at each batch size; {} if the batch is constant.

  A rule that measures during the run is planned as if the batch grew at every decision.
  """
  config, derived = experiment.config, experiment.derived
  if measuring(config.phases) and isinstance(config.phases, Growing):
    numbers = derived.num_train, derived.num_eval, derived.num_devices
    derived = derive(config, *numbers, all_sizes(config, derived.num_train))
  steps: dict[int, int] = {}
  for phase in derived.phases:
    steps[phase.batch_size] = steps.get(phase.batch_size, 0) + phase.stop - phase.start
  return steps if len(steps) > 1 else {}


def savings(
  experiment: Any, steps: Sequence[Step], step_on: Callable[[int, int], Step]
) -> tuple[Saving, ...]:
  """Return what the growing batch of an experiment saves; () if its batch is constant.

  Args:
    experiment: the `build.Experiment`.
    steps: the planned steps at its first batch size.
    step_on: a function of devices and rows per device that plans a step.
  """
  by_size, saved = steps_by_size(experiment), []
  for step in steps if by_size else ():
    sized = {b: step_on(step.devices, step.rows * b // step.batch_size) for b in by_size}
    took: _Seconds = {c: sum(n * sized[b].seconds[c] for b, n in by_size.items()) for c in CORNERS}
    constant = math.ceil(experiment.config.epochs * experiment.derived.num_train / step.batch_size)
    whole = constant * step.seconds["expected"]
    saved.append(Saving(step.devices, step.nodes, by_size, constant, took, whole))
  return tuple(saved)
