"""Batch study: train one config to a target at several batch sizes.

    jaxscale batch-study --config FILE --batch-sizes 256,1024,4096
    jaxscale report NAME

A study is a sweep whose trials end at the target of the config. All trials have the same
budget of examples, and the learning rate follows the config's `lr_scaling`. The report
shows the steps of each size and fits the critical batch size. It writes `study.json`, which
`jaxscale plan` reads, into the folder of the sweep.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxscale.config import Config, Phases
from jaxscale.errors import invalid, printable
from jaxscale.files import read_json, whole_number, write_json
from jaxscale.jobs import folder as folders
from jaxscale.jobs import logs
from jaxscale.jobs.measured import NotBegunError, finite
from jaxscale.jobs.spec import JobSpec
from jaxscale.jobs.status import RunStatus, statuses
from jaxscale.metrics import text

FILE = "study.json"  # in the folder of the sweep
_STOPS = {"stop_at_target": "True"}  # set in every trial, and identifies a study
_NUMBER = (float, None)
_RECORD = dict(
  config=dict(
    accumulate_steps=int, epochs=float, lr_scaling=str, target_accuracy=_NUMBER, target_loss=_NUMBER
  ),
  derived=dict(num_train=int, peak_lr=float, eval_every=int),
)
_MEASURED = "accuracy loss target_seconds noise_scale noise_scale_low noise_scale_high"
_SUMMARY = dict(outcome=str, step=int, target_step=(int, None))
_Rows = Sequence[Mapping[str, Any]]  # results of runs or of sizes


class Fit(NamedTuple):
  """Steps to the target as a function of the batch size B: s_min (1 + b_crit / B).

  Attributes:
    s_min: the smallest number of steps, in the limit of large batches.
    b_crit: the batch size that needs twice s_min steps and twice the smallest number of
      examples.
    error: the largest relative error of the curve at a fitted size.
    b_crit_range: the smallest and largest b_crit with one size left out at a time; inf if
      the other sizes show no limit.
    num_sizes: the number of fitted sizes.
  """

  s_min: float
  b_crit: float
  error: float
  b_crit_range: tuple[float, float]
  num_sizes: int


def fit_steps(batch_sizes: Sequence[float], steps: Sequence[float]) -> Fit | None:
  """Fit S = S_min + E_min / B by least squares of the relative error.

  With E = B S examples, the curve is the hyperbola (S/S_min - 1)(E/E_min - 1) = 1 of
  McCandlish et al. (arXiv:1812.06162, eq. 2.11), with B_crit = E_min / S_min (eq. 2.12).

  Args:
    batch_sizes: the examples per step, at least three different numbers.
    steps: the steps to the target at each size.

  Returns:
    The fit; None for fewer than three sizes, or if the steps do not follow the curve: they
    fall as fast as the batch grows, or do not fall at all.

  Example:
    >>> fit = fit_steps([100, 200, 400], [1100, 600, 350])
    >>> round(fit.s_min), round(fit.b_crit)
    (100, 1000)
  """
  sizes, measured = np.asarray(batch_sizes, float), np.asarray(steps, float)
  if len(set(sizes)) < 3:
    return None
  s_min, b_crit = _line(sizes, measured)
  if not 0 < b_crit < math.inf:
    return None
  others = (np.delete(np.stack([sizes, measured]), i, axis=1) for i in range(len(sizes)))
  ranges = [_line(*rest)[1] for rest in others]
  error = np.abs(s_min * (1 + b_crit / sizes) / measured - 1).max()
  return Fit(s_min, b_crit, float(error), (min(ranges), max(ranges)), len(sizes))


def _line(sizes: np.ndarray, steps: np.ndarray) -> tuple[float, float]:
  """Return the S_min and B_crit for which S_min (1 + B_crit / B) / S is nearest to 1.

  A constant within the rounding error of the data is zero: B_crit is then 0 or infinite.
  """
  rows = np.stack([1 / steps, 1 / (sizes * steps)], axis=1)
  s_min, e_min = np.linalg.lstsq(rows, np.ones(len(sizes)), rcond=None)[0]
  if s_min <= 1e-9 * steps.min():
    return 0.0, math.inf
  return float(s_min), float(e_min / s_min) if e_min > 1e-9 * (steps * sizes).min() else 0.0


def trials(
  config: Config, batch_sizes: Sequence[int], seeds: int = 1, accumulate_steps: Sequence[int] = ()
) -> list[dict[str, str]]:
  """Return the trials of a study for `jobs.sweep`.

  Args:
    config: the config, with a target; its batch size is replaced.
    batch_sizes: the examples per step, over all devices.
    seeds: the number of runs per size; the first has the config's seed.
    accumulate_steps: the micro-batches per step of each size; () keeps the config's.

  Raises:
    ConfigError: the config has no target or changes its batch size during the run, or the
      numbers of accumulate_steps and of batch sizes differ.

  Example:
    >>> from jaxscale.config.loading import load_config
    >>> len(trials(load_config("digits"), [64, 256], seeds=3))
    6
  """
  if config.target_accuracy is None and config.target_loss is None:
    fix = "set e.g. --config.target_accuracy=0.9"
    problem = "is not set, and a batch study needs a target"
    raise invalid("Config.target_accuracy", ..., problem, fix)
  phases = config.phases
  if not isinstance(phases, Phases) or phases.batch_sizes:
    problem, name = "changes the batch size during the run", type(phases).__name__
    raise invalid("Config.phases", name, problem, "remove the batch sizes from the phases")
  if accumulate_steps and len(accumulate_steps) != len(batch_sizes):
    counts = ",".join(map(str, accumulate_steps))
    problem = f"has {len(accumulate_steps)} numbers for {len(batch_sizes)} batch sizes"
    raise invalid("--accumulate-steps", counts, problem, "give one number per size")
  settings = [{"batch_size": str(size)} for size in batch_sizes]
  for one, count in zip(settings, accumulate_steps, strict=False):
    one["accumulate_steps"] = str(count)
  numbers = range(config.seed, config.seed + seeds)
  return [one | {"seed": str(n)} | _STOPS for one in settings for n in numbers]


def find(names: Sequence[str], runs: str) -> Path | None:
  """Return the folder of a study if its name is the only one given; else None."""
  folder = folders.locate(names[0], runs, "run.json") if len(names) == 1 else None
  return folder.absolute() if folder and _is_study(folders.read_spec(folder)) else None


def _is_study(spec: JobSpec) -> bool:
  """Return whether a sweep is a batch study, by the settings of its trials."""

  def is_trial(trial: Mapping[str, str]) -> bool:
    size, seed = (whole_number(trial.get(name, "")) for name in ("batch_size", "seed"))
    return trial.items() >= _STOPS.items() and bool(size) and seed is not None

  return bool(spec.trials) and all(map(is_trial, spec.trials))


def report(folder: Path) -> str:
  """Write `study.json` into the folder of a study; return its table.

  Raises:
    ConfigError: the folder is not that of a study with results.
  """
  study = read(folder)
  write_json(folder / FILE, study)
  return f"{table(study)}\n{folder / FILE}"


def read(folder: Path) -> dict[str, Any]:
  """Read a study from its folder: its runs, means over seeds, the fit, and notes.

  Raises:
    NotBegunError: no trial has started.
    ConfigError: the folder is not that of a study.
  """
  spec = folders.read_spec(folder)
  if not _is_study(spec):
    raise invalid(spec.name, ..., "is not a batch study", "give the name of a batch study")
  runs, config = [], {}
  for task, status in zip(spec.tasks, statuses([folder]), strict=True):
    record = read_json(spec.workdir(task) / "config.json", _RECORD)
    config = config or record.get("config", {})
    runs.append(_run(spec, task, status, record))
  if not config:
    raise NotBegunError(f"{spec.name}: no trial has started; see `jaxscale status {spec.name}`")
  return summarise(spec.name, config, runs)


def _run(spec: JobSpec, task: int, status: RunStatus, record: Mapping[str, Any]) -> dict[str, Any]:
  """Return the results of a trial; values without a record are None."""
  size, seed = (int(spec.trials[task][name]) for name in ("batch_size", "seed"))
  derived, config = record.get("derived", {}), record.get("config", {})
  summary = read_json(spec.workdir(task) / "summary.json", _SUMMARY)
  if is_done := summary.get("outcome") == "done":
    outcome = "reached" if summary["target_step"] else "missed"
  else:
    outcome, summary = status.state.lower(), {}
  target = summary.get("target_step") or None
  examples, num_train = target and target * size, derived.get("num_train")
  row: dict[str, Any] = dict(status=outcome, batch_size=size, seed=seed)
  row["accumulate_steps"] = config.get("accumulate_steps")
  row |= {name: derived.get(name) for name in ("peak_lr", "eval_every")}
  row["steps"] = summary.get("step", status.step)
  row |= dict(target_step=target, target_examples=examples)
  row["target_epochs"] = examples / num_train if examples and num_train else None
  row |= {name: finite(summary).get(name) for name in _MEASURED.split()}
  row["note"] = "" if is_done or status.state != "FAILED" else _last_line(spec, task)
  return row


def _last_line(spec: JobSpec, task: int) -> str:
  """Return the last line of a failed trial, such as an error about a NaN loss."""
  files = logs.choose(spec, "0", task)
  return logs.failure(spec, task) or "".join(logs.last(files, 1))


def mean_noise_scale(runs: _Rows) -> float | None:
  """Return the harmonic mean, which includes infinite scales; None if none was measured."""
  scales = [
    run["noise_scale"] or math.inf
    for run in runs
    if run["noise_scale"] is not None or run["noise_scale_low"] is not None
  ]
  shares = sum(1 / scale for scale in scales)
  return (len(scales) / shares if shares else math.inf) if scales else None


def summarise(name: str, config: Mapping[str, Any], runs: _Rows) -> dict[str, Any]:
  """Return a study as JSON values.

  Args:
    name: the name of the study.
    config: the settings that its runs share, from config.json.
    runs: the results of each run.
  """
  by_size = text.grouped((run["batch_size"], run) for run in runs)
  sizes = [_size(by_size[batch_size]) for batch_size in sorted(by_size)]
  # A size at which only some seeds reached the target would bias the curve.
  points = [s for s in sizes if s["reached"] == s["runs"]]
  fit = fit_steps([s["batch_size"] for s in points], [s["target_step"] for s in points])
  notes = [*_notes(config, sizes, points), *_fit_notes(fit, len(points), mean_noise_scale(runs))]
  fitted = fit and fit._asdict() | {"b_crit_range": [*map(_finite, fit.b_crit_range)]}
  names = ("target_accuracy", "target_loss", "epochs", "lr_scaling")
  settings = {name: config[name] for name in names}
  return {"title": name} | settings | dict(sizes=sizes, fit=fitted, notes=notes, runs=list(runs))


def _finite(value: float | None) -> float | None:
  """Return a number for JSON, with None for infinity."""
  return None if value == math.inf else value


def _size(runs: _Rows) -> dict[str, Any]:
  """Return means over the seeds of a size that have a value."""

  def mean(name: str) -> float | None:
    values = [run[name] for run in runs if run[name] is not None]
    return statistics.fmean(values) if values else None

  shared = ("batch_size", "accumulate_steps", "peak_lr", "eval_every")
  means = ("target_step", "target_examples", "target_epochs", "target_seconds", "accuracy", "loss")
  status = [run["status"] for run in runs]
  return {
    **{name: next((r[name] for r in runs if r[name]), None) for name in shared},
    "runs": len(runs),
    **{name: status.count(name) for name in ("reached", "missed")},
    **{name: mean(name) for name in means},
    "noise_scale": _finite(mean_noise_scale(runs)),
  }


def _notes(config: Mapping[str, Any], sizes: _Rows, points: _Rows) -> list[str]:
  """Return notes on the sizes and their steps."""
  notes = []
  if config["lr_scaling"] == "none" and len(sizes) > 1:
    notes.append("lr_scaling='none': every size was trained at the same learning rate")
  if shares := [s["eval_every"] / s["target_step"] for s in points if s["eval_every"]]:
    known = "the resolution of steps to target is one evaluation (evaluation.every_epochs), "
    notes.append(f"{known}at worst {max(shares):.0%} of them")
  return notes


def _fit_notes(fit: Fit | None, points: int, scale: float | None) -> list[str]:
  """Return notes on the critical batch size."""
  if fit is None:
    reason = "the steps do not follow S_min (1 + B_crit / B) at these sizes"
    if points < 3:
      reason = f"every run reached the target at {points} sizes, and 3 are needed"
    return [f"no critical batch size: {reason}"]
  low, high = fit.b_crit_range
  best = f"{fit.b_crit:,.0f} (S_min {fit.s_min:,.0f} steps)"
  curve = f"a curve of two parameters through {fit.num_sizes} points, off by up to "
  curve += f"{fit.error:.0%}, valid only for this target, schedule and lr_scaling"
  text = f"{best}: {low:,.0f} to {high:,.0f} when a size is left out"
  if is_open := math.isinf(high):
    text = f"at least {low:,.0f}, without an upper limit when a size is left out; "
    text += f"{best} with all sizes, {curve}"
  notes = [f"critical batch size {text}" + f"; {curve}" * (not is_open)]
  if scale is not None:
    share = f", {scale / fit.b_crit:.2g} of the critical batch size" * (not is_open)
    mean = f"gradient-noise scale {scale:,.3g} examples in the harmonic mean over runs"
    notes.append(f"{mean}{share}")
  return notes


_COLUMNS = text.columns(
  """
  batch: batch_size ,; lr: peak_lr .4g; reached: outcomes; steps: target_step ,.0f
  epochs: target_epochs .2f; seconds: target_seconds .1f; accuracy: accuracy .2%; loss: loss .4f
  """
)


def table(study: Mapping[str, Any]) -> str:
  """Return a study as text: a line per size, then notes and failed runs."""
  goal = f"{study['target_accuracy'] or 0:.2%}"
  if study["target_loss"] is not None:
    goal = f"loss {study['target_loss']:g}"
  rows = []
  for size in study["sizes"]:
    runs = [r["status"] for r in study["runs"] if r["batch_size"] == size["batch_size"]]
    others = [s for s in dict.fromkeys(runs) if s != "reached"]
    failed = "".join(f" ({runs.count(s)} {s})" for s in others)
    row = size | {"outcomes": f"{size['reached']}/{size['runs']}{failed}"}
    rows.append([text.cell(row[key], form) for key, form in _COLUMNS.values()])
  notes = [*study["notes"]]
  for run in filter(lambda run: run["note"], study["runs"]):
    notes.append(printable(f"batch {run['batch_size']:,}, seed {run['seed']}: {run['note']}"))
  title = f"{study['title']}: to {goal} in {study['epochs']:g} epochs at most"
  return "\n".join([title, text.table([*_COLUMNS], rows, left=()), *notes])
