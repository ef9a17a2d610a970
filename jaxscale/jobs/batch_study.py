"""How large the batch may be: one config trained to a target at several batch sizes.

    jaxscale batch-study --config FILE --batch-sizes 256,1024,4096
    jaxscale report NAME

A study is a sweep whose trials end once they reach the target of the config, all with
the same examples to spend and the learning rate by the config's `lr_scaling`. Its
report shows what each size took, fits the critical batch size, and writes `study.json`
into the folder of the sweep, which `jaxscale plan` reads.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxscale.config import AdaptiveBatch, Config
from jaxscale.errors import invalid, printable
from jaxscale.files import read_json, whole_number, write_json
from jaxscale.jobs import folder as folders
from jaxscale.jobs import logs
from jaxscale.jobs.measured import NotBegunError, finite
from jaxscale.jobs.spec import JobSpec
from jaxscale.jobs.status import RunStatus, statuses
from jaxscale.metrics import text

FILE = "study.json"  # in the folder of the sweep
_STOPS = {"stop_at_target": "True"}  # in every trial of a study, and what marks one
_NUMBER = (float, None)
_RECORD = dict(
  config=dict(
    accumulate_steps=int, epochs=float, lr_scaling=str, target_accuracy=_NUMBER, target_loss=_NUMBER
  ),
  derived=dict(num_train=int, peak_lr=float, eval_every=int),
)
_MEASURED = "accuracy loss target_seconds noise_scale noise_scale_low noise_scale_high"
_SUMMARY = dict(outcome=str, step=int, target_step=(int, None))


class Fit(NamedTuple):
  """Steps to the target as a function of the batch size B: s_min (1 + b_crit / B).

  Attributes:
    s_min: steps that no batch size goes below.
    b_crit: examples per step at which twice s_min steps and twice the fewest
      examples are needed.
    error: largest relative error of the curve at a size that it was fitted to.
    b_crit_range: smallest and largest b_crit when one size at a time is left out;
      inf where the rest shows no limit.
    num_sizes: sizes it was fitted to.
  """

  s_min: float
  b_crit: float
  error: float
  b_crit_range: tuple[float, float]
  num_sizes: int


def fit_steps(batch_sizes: Sequence[float], steps: Sequence[float]) -> Fit | None:
  """Least squares of the relative error of S = S_min + E_min / B.

  With the examples E = B S it is the hyperbola (S/S_min - 1)(E/E_min - 1) = 1 of
  McCandlish et al. (arXiv:1812.06162, eq. 2.11), whose B_crit = E_min / S_min
  (eq. 2.12).

  Args:
    batch_sizes: examples per step, at least three different ones.
    steps: steps to the target at each size.

  Returns:
    None for fewer than three sizes, or where the curve does not bend as the model
    says: steps fall as fast as the batch grows, or do not fall at all.

  Example:
    >>> fit = fit_steps([100, 200, 400], [1100, 600, 350])
    >>> round(fit.s_min), round(fit.b_crit)
    (100, 1000)
  """
  sizes, measured = np.asarray(batch_sizes, float), np.asarray(steps, float)
  if len(set(sizes)) < 3:
    return None
  s_min, e_min = _line(sizes, measured)
  if not (_is_positive(s_min, measured) and _is_positive(e_min, measured * sizes)):
    return None
  ranges = []
  for i in range(len(sizes)):
    rest = np.delete(measured, i)
    s, e = _line(np.delete(sizes, i), rest)
    ranges.append(max(e / s, 0.0) if _is_positive(s, rest) else np.inf)
  error = np.abs((s_min + e_min / sizes) / measured - 1).max()
  limits = float(min(ranges)), float(max(ranges))
  return Fit(float(s_min), float(e_min / s_min), float(error), limits, len(sizes))


def _line(sizes: np.ndarray, steps: np.ndarray) -> np.ndarray:
  """Return S_min and E_min that make (S_min + E_min / B) / S nearest to 1."""
  rows = np.stack([1 / steps, 1 / (sizes * steps)], axis=1)
  return np.linalg.lstsq(rows, np.ones(len(sizes)), rcond=None)[0]


def _is_positive(value: float, scale: np.ndarray) -> bool:
  """Return whether a constant is more than the rounding of what it was fitted to."""
  return value > 1e-9 * scale.min()


def trials(
  config: Config, batch_sizes: Sequence[int], seeds: int = 1, accumulate_steps: Sequence[int] = ()
) -> list[dict[str, str]]:
  """Return the trials of a study, as `jobs.sweep` takes them.

  Args:
    config: config with a target; its batch size is replaced.
    batch_sizes: examples per step, over all devices.
    seeds: runs of each size, with seeds from the config's on.
    accumulate_steps: micro-batches per step of each size; (): those of the config.

  Raises:
    ConfigError: the config has no target or changes its batch size during the run, or
      there are not as many accumulate_steps as batch sizes.

  Example:
    >>> from jaxscale.config.loading import load_config
    >>> len(trials(load_config("digits"), [64, 256], seeds=3))
    6
  """
  if config.target_accuracy is None and config.target_loss is None:
    fix = "add e.g. --config.target_accuracy=0.9"
    why = "is not set, so that there is nothing to reach"
    raise invalid("Config.target_accuracy", ..., why, fix)
  phases = config.phases
  if isinstance(phases, AdaptiveBatch) or phases.batch_sizes:
    why, name = "changes the batch size during the run", type(phases).__name__
    raise invalid("Config.phases", name, why, "take the batch sizes out of the phases")
  if accumulate_steps and len(accumulate_steps) != len(batch_sizes):
    counts = ",".join(map(str, accumulate_steps))
    why = f"has {len(accumulate_steps)} numbers for {len(batch_sizes)} batch sizes"
    raise invalid("--accumulate-steps", counts, why, "give one for each size")
  settings = [{"batch_size": str(size)} for size in batch_sizes]
  for one, count in zip(settings, accumulate_steps, strict=False):
    one["accumulate_steps"] = str(count)
  numbers = range(config.seed, config.seed + seeds)
  return [one | {"seed": str(n)} | _STOPS for one in settings for n in numbers]


def find(names: Sequence[str], runs: str) -> Path | None:
  """Return the folder of a study, if its name is the only one; else None."""
  for folder in (folders.directory(runs) / names[0], Path(names[0])):
    if len(names) == 1 and (folder / "run.json").is_file():
      return folder.absolute() if _is_study(folders.read_spec(folder)) else None
  return None


def _is_study(spec: JobSpec) -> bool:
  """Return whether the trials of a sweep are those of a study."""

  def is_trial(trial: Mapping[str, str]) -> bool:
    size, seed = (whole_number(trial.get(name, "")) for name in ("batch_size", "seed"))
    return trial.items() >= _STOPS.items() and bool(size) and seed is not None

  return bool(spec.trials) and all(map(is_trial, spec.trials))


def report(folder: Path) -> str:
  """Write `study.json` into the folder of a study; return its table.

  Raises:
    ConfigError: as `read`.
  """
  study = read(folder)
  write_json(folder / FILE, study)
  return f"{table(study)}\n{folder / FILE}"


def read(folder: Path) -> dict[str, Any]:
  """Read a study from its folder: its runs, means over seeds, the fit, and caveats.

  Raises:
    NotBegunError: no trial has begun.
    ConfigError: it is not the folder of a study.
  """
  spec = folders.read_spec(folder)
  if not _is_study(spec):
    raise invalid(spec.name, ..., "is not a batch study", "give the name of one")
  runs, config = [], {}
  for task, status in zip(spec.tasks, statuses([folder]), strict=True):
    record = read_json(spec.workdir(task) / "config.json", _RECORD)
    config = config or record.get("config", {})
    runs.append(_run(spec, task, status, record))
  if not config:
    raise NotBegunError(f"{spec.name}: no trial has begun; see `status {spec.name}`")
  return summarise(spec.name, config, runs)


def _run(spec: JobSpec, task: int, status: RunStatus, record: Mapping[str, Any]) -> dict[str, Any]:
  """Return what came of a trial; None is what is not on record."""
  size, seed = (int(spec.trials[task][name]) for name in ("batch_size", "seed"))
  derived, config = record.get("derived", {}), record.get("config", {})
  summary = read_json(spec.workdir(task) / "summary.json", _SUMMARY)
  if is_done := summary.get("outcome") == "done":
    outcome = "reached" if summary["target_step"] else "missed"
  else:
    outcome, summary = status.state.lower(), {}
  numbers = finite(summary)
  examples = (summary.get("target_step") or 0) * size or None
  num_train = derived.get("num_train")
  row: dict[str, Any] = dict(status=outcome, batch_size=size, seed=seed)
  row["accumulate_steps"] = config.get("accumulate_steps")
  row |= {name: derived.get(name) for name in ("peak_lr", "eval_every")}
  row |= dict(
    steps=summary.get("step", status.step), target_step=summary.get("target_step") or None
  )
  row["target_examples"] = examples
  row["target_epochs"] = examples / num_train if examples and num_train else None
  row |= {name: numbers.get(name) for name in _MEASURED.split()}
  row["note"] = "" if is_done or status.state != "FAILED" else _last_line(spec, task)
  return row


def _last_line(spec: JobSpec, task: int) -> str:
  """Return what a failed trial printed last, such as that its loss is NaN."""
  files = logs.choose(spec, "0", task)
  return logs.failure(spec, task) or "".join(logs.last(files, 1))


def mean_noise_scale(runs: Sequence[Mapping[str, Any]]) -> float | None:
  """Return the harmonic mean, in which an infinite scale counts; None: not measured."""
  scales = [
    run["noise_scale"] or math.inf
    for run in runs
    if run["noise_scale"] is not None or run["noise_scale_low"] is not None
  ]
  shares = sum(1 / scale for scale in scales)
  return (len(scales) / shares if shares else math.inf) if scales else None


def summarise(
  name: str, config: Mapping[str, Any], runs: Sequence[dict[str, Any]]
) -> dict[str, Any]:
  """Return a study as JSON.

  Args:
    name: name of the study.
    config: settings that its runs share, as config.json has them.
    runs: what came of each run.
  """
  by_size: dict[int, list[dict[str, Any]]] = {}
  for run in sorted(runs, key=lambda run: run["batch_size"]):
    by_size.setdefault(run["batch_size"], []).append(run)
  sizes = [_size(each) for each in by_size.values()]
  # A size where only the lucky seeds reached would bend the curve.
  points = [s for s in sizes if s["reached"] == s["runs"]]
  fit = fit_steps([s["batch_size"] for s in points], [s["target_step"] for s in points])
  notes = [*_notes(config, sizes, points), *_fit_notes(fit, len(points), mean_noise_scale(runs))]
  fitted = None if fit is None else fit._asdict()
  if fitted:
    fitted["b_crit_range"] = [_finite(x) for x in fitted["b_crit_range"]]
  names = ("target_accuracy", "target_loss", "epochs", "lr_scaling")
  settings = {name: config[name] for name in names}
  return {"title": name} | settings | dict(sizes=sizes, fit=fitted, notes=notes, runs=list(runs))


def _finite(value: float | None) -> float | None:
  """Return a number for JSON, which has no infinity: None."""
  return None if value == math.inf else value


def _size(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """Return means over the seeds of a size; over those that reached the target."""

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


def _notes(
  config: Mapping[str, Any], sizes: Sequence[Mapping[str, Any]], points: Sequence[Mapping[str, Any]]
) -> list[str]:
  """Return what a reader of the sizes has to know."""
  notes = []
  if config["lr_scaling"] == "none" and len(sizes) > 1:
    notes.append("lr_scaling='none': every size was trained at the same learning rate")
  if shares := [s["eval_every"] / s["target_step"] for s in points if s["eval_every"]]:
    known = f"steps to target are known to one evaluation, at worst {max(shares):.0%} "
    notes.append(f"{known}of them (evaluation.every_epochs)")
  return notes


def _fit_notes(fit: Fit | None, points: int, scale: float | None) -> list[str]:
  """Return what a reader of the critical batch size has to know."""
  if fit is None:
    reason = "steps do not bend as S_min (1 + B_crit / B) within these sizes"
    if points < 3:
      reason = f"{points} sizes where every run reached, of the 3 it takes"
    return [f"no critical batch size: {reason}"]
  low, high = fit.b_crit_range
  best = f"{fit.b_crit:,.0f} (S_min {fit.s_min:,.0f} steps)"
  curve = f"a curve of two parameters through {fit.num_sizes} points, off by up to "
  curve += f"{fit.error:.0%}, for this target, schedule and scaling of the rate alone"
  text = f"{best}: {low:,.0f} to {high:,.0f} when a size is left out"
  if is_open := math.isinf(high):
    text = f"at least {low:,.0f}, and no upper limit: there is none when a size is left out; "
    text += f"{best} with all of them, {curve}"
  notes = [f"critical batch size {text}" + f"; {curve}" * (not is_open)]
  if scale is not None:
    share = f", {scale / fit.b_crit:.2g} of the critical batch size" * (not is_open)
    notes.append(
      f"gradient-noise scale {scale:,.3g} examples in the harmonic mean over runs{share}"
    )
  return notes


_COLUMNS = text.columns(
  """
  batch: batch_size ,; lr: peak_lr .4g; reached: outcomes; steps: target_step ,.0f
  epochs: target_epochs .2f; seconds: target_seconds .1f; accuracy: accuracy .2%; loss: loss .4f
  """
)


def table(study: Mapping[str, Any]) -> str:
  """Return a study for a terminal: a line per size, then notes and failed runs."""
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
