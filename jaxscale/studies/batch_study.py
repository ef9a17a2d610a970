"""How far can the batch go: the same training at several batch sizes.

    jaxscale batch-study --config FILE --batch-sizes 256,1024,4096

trains to the config's `target_accuracy` at each size, with the same examples to
spend and the learning rate by the config's `lr_scaling`, and shows what it took.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxscale import metrics
from jaxscale.config import AdaptiveBatch, Config
from jaxscale.errors import ConfigError
from jaxscale.metrics.text import entries_table
from jaxscale.studies import trials
from jaxscale.studies.trials import Outcome, Trial, mean_noise_scale


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
    steps: to the target at each.

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
  """S_min and E_min that make (S_min + E_min / B) / S nearest to 1."""
  rows = np.stack([1 / steps, 1 / (sizes * steps)], axis=1)
  return np.linalg.lstsq(rows, np.ones(len(sizes)), rcond=None)[0]


def _is_positive(value: float, scale: np.ndarray) -> bool:
  """Whether a constant is more than the rounding of what it was fitted to."""
  return value > 1e-9 * scale.min()


def make_trials(
  config: Config, batch_sizes: Sequence[int], workdir: Path, *, seeds: int = 1,
  device_batch: int | None = None,
) -> list[Trial]:  # fmt: skip
  """A trial for each batch size and seed, in directories of their own.

  Args:
    config: with a target; its batch size is replaced.
    batch_sizes: examples per step, over all devices.
    workdir: of the study.
    seeds: runs a size.
    device_batch: the most examples a device works on at once; None: the config's
      accumulate_steps for every size.

  Raises:
    ConfigError: no target, or a size that the devices do not divide.
  """
  import jax  # 0.5 s: not for --help or a typo

  phases = config.phases
  if isinstance(phases, AdaptiveBatch) or phases.batch_sizes:
    why = "a study gives each run one batch size, take the batch sizes out of the "
    raise ConfigError(f"Config.phases={type(phases).__name__}: {why}phases")
  made = []
  for size in batch_sizes:
    change: dict[str, Any] = {"batch_size": size}
    if device_batch is not None:
      # What the devices do not divide is refused before anything is run.
      rows = max(size // jax.device_count(), 1)
      change["accumulate_steps"] = micro_batches(rows, device_batch)
    made += trials.make(config, workdir / f"batch-{size}", seeds, **change)
  return made


def micro_batches(rows: int, at_most: int) -> int:
  """The fewest equal parts of a device's rows that have at most `at_most` rows.

  Example:
    >>> micro_batches(96, 20)
    6
  """
  return next(rows // n for n in range(min(rows, at_most), 0, -1) if rows % n == 0)


def summarise(
  config: Config, outcomes: Sequence[Outcome], title: str
) -> dict[str, Any]:
  """The study as JSON: its runs, means over the seeds of a size, the fit, caveats."""
  by_size: dict[int, list[Outcome]] = {}
  for outcome in sorted(outcomes, key=lambda o: o.batch_size):
    by_size.setdefault(outcome.batch_size, []).append(outcome)
  sizes = [_size(runs) for runs in by_size.values()]
  # A size where only the lucky seeds reached would bend the curve.
  points = [s for s in sizes if s["reached"] == s["runs"]]
  fit = fit_steps([s["batch_size"] for s in points], [s["target_step"] for s in points])
  fitted = None if fit is None else fit._asdict()
  if fitted:  # JSON has no infinity; None: there was no limit
    ends = (None if np.isinf(x) else x for x in fitted["b_crit_range"])
    fitted["b_crit_range"] = [*ends]
  return {
    "title": title,
    "target_accuracy": config.target_accuracy,
    "epochs": config.epochs,
    "lr_scaling": config.lr_scaling,
    "sizes": sizes,
    "fit": fitted,
    "notes": _notes(config, sizes, points, fit, mean_noise_scale(outcomes)),
    "runs": [o.as_dict() for o in outcomes],
  }


def _size(runs: Sequence[Outcome]) -> dict[str, Any]:
  """Means over the seeds of one size; of what a target took, over who reached it."""

  def mean(name):
    values = [v for run in runs if (v := getattr(run, name)) is not None]
    return statistics.fmean(values) if values else None

  status = [run.status for run in runs]
  same = ("batch_size", "accumulate_steps", "peak_lr", "eval_every")
  names = (
    "target_step", "target_examples", "target_epochs", "target_seconds", "accuracy",
    "train_accuracy", "gap",
  )  # fmt: skip
  found = {name: getattr(runs[0], name) for name in same} | {"runs": len(runs)}
  found |= {s: status.count(s) for s in ("reached", "missed", "diverged")}
  found |= {name: mean(name) for name in names}
  scale = mean_noise_scale(runs)  # JSON has no infinity
  return found | {"noise_scale": None if scale == math.inf else scale}


def _notes(config, sizes, points, fit: Fit | None, scale: float | None) -> list[str]:
  """What a reader of the numbers has to know."""
  notes = []
  if config.lr_scaling == "none" and len(sizes) > 1:
    notes.append("lr_scaling='none': every size was trained at the same rate")
  if points:
    coarsest = max(s["eval_every"] / s["target_step"] for s in points)
    text = f"steps to target are known to one evaluation, at worst {coarsest:.0%} of "
    notes.append(f"{text}them (evaluation.every_epochs)")
  if fit is None:
    reason = "steps do not bend as S_min (1 + B_crit / B) within these sizes"
    if len(points) < 3:
      reason = f"{len(points)} sizes where every run reached, of the 3 it takes"
    return [*notes, f"no critical batch size: {reason}"]
  low, high = fit.b_crit_range
  curve = f"a curve of two parameters through {fit.num_sizes} points, off by up to "
  curve += f"{fit.error:.0%}, for this target, schedule and rate rule alone"
  best = f"{fit.b_crit:,.0f} (S_min {fit.s_min:,.0f} steps)"
  if is_open := np.isinf(high):
    text = f"at least {low:,.0f}, and no upper limit: there is none when a size is "
    text += f"left out; {best} with all of them, {curve}"
  else:
    text = f"{best}: {low:,.0f} to {high:,.0f} when a size is left out; {curve}"
  notes.append(f"critical batch size {text}")
  if scale is not None:
    text = f"gradient-noise scale {scale:,.3g} examples in the harmonic mean over runs"
    share = f", {scale / fit.b_crit:.2g} of the critical batch size"
    notes.append(text if is_open else text + share)
  return notes


_COLUMNS = {
  "batch": ("batch_size", ","), "rate": ("peak_lr", ".4g"), "reached": ("outcomes", ""),
  "steps": ("target_step", ",.0f"), "epochs": ("target_epochs", ".2f"),
  "seconds": ("target_seconds", ".1f"), "held-out": ("accuracy", ".2%"),
  "gap": ("gap", "+.2%"),
}  # fmt: skip


def table(study: dict[str, Any]) -> str:
  """The study for a terminal: one line per size, then the notes."""
  rows = []
  for size in study["sizes"]:
    failed = [f" ({size[s]} {s})" for s in ("missed", "diverged") if size[s]]
    outcomes = f"{size['reached']}/{size['runs']}{''.join(failed)}"
    rows.append(size | {"outcomes": outcomes})
  title = f"{study['title']}: to {study['target_accuracy']:.2%} in {study['epochs']:g}"
  sizes = entries_table(rows, _COLUMNS)
  return "\n".join([f"{title} epochs at most", sizes, *study["notes"]])


def study(title: str, config: Config, workdir: Path, **sizes: Any) -> trials.Page:
  """Train at each size; returns what process 0 writes and prints at the end.

  Args:
    title: of table and picture.
    config: see `make_trials`, as for `sizes`.
    workdir: of the study.
    sizes: `batch_sizes`, `seeds` and `device_batch`.
  """
  made = make_trials(config, workdir=workdir, **sizes)
  found = summarise(config, trials.run_trials(made), title)

  def page() -> str:
    metrics.write_json(workdir / "study.json", found)
    metrics.plot_study(found, workdir / "study.png")
    return f"{table(found)}\nsee {workdir}/study.png"

  return page
