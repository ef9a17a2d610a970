"""Write the end of a run: `summary.json` and `metrics.png`."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import jax

from jaxscale import cluster, metrics
from jaxscale.checkpoint import lock
from jaxscale.checkpoint.manager import UnsavedError
from jaxscale.cluster.environment import is_installed
from jaxscale.metrics.scoring import best_of
from jaxscale.run.run import Run
from jaxscale.training import loss_scale, noise_scale
from jaxscale.training.types import TrainState

_MOST_NUMBERS = 10_000  # Larger arrays are not in summary.json.


def finish(run: Run, state: TrainState) -> dict[str, Any]:
  """Write and return the summary of a run whose checkpoints are closed.

  Raises:
    UnsavedError: the last checkpoint could not be written.
    LockLostError: another run has taken over the workdir.
  """
  run.watch.at(int(state.step), "leaving")
  summary = summarize(run, state)
  is_done = summary["outcome"] == "done"
  run.recorded.result()

  def write():
    metrics.write_json(run.workdir / "summary.json", summary)
    if is_done and run.experiment.config.log.plot and is_installed("matplotlib"):
      metrics.plot_metrics(run.workdir)
      _draw_arrays(run)

  lock.check_for_all(run.lock)
  unsaved = run.checkpoints.unsaved
  # If checkpoints could not be saved, the summary may fail for the same reason.
  with contextlib.suppress(*[OSError] if unsaved else []):
    cluster.on_leader(write, "summary")
  if unsaved:
    raise UnsavedError(unsaved)
  if is_done:
    run.activity.finish()
  run.watch.at(summary["step"], "outside")
  return summary


def _draw_arrays(run: Run) -> None:
  """Draw the arrays of the last evaluation that have a picture."""
  names = getattr(run.experiment.eval_data.info, "class_names", ())
  for metric in run.experiment.metrics.values():
    for name in metric.pictures.keys() & run.arrays.keys():
      metric.pictures[name](run.workdir / f"{name}.png", run.arrays[name], names)


def summarize(run: Run, state: TrainState) -> dict[str, Any]:
  """Return the content of `summary.json`; all processes call it."""
  experiment, done = run.experiment, int(state.step)
  config, phases, target = experiment.config, experiment.derived.phases, run.target()
  names = getattr(experiment.train_data.info, "class_names", ())
  step, seconds = (target.step, target.seconds) if target else (None, None)
  is_done = run.is_over(done) and run.evaluation_at(done) is not None
  before = metrics.read_json(run.workdir / "summary.json")
  if seconds is None and before.get("target_step") == step:  # The run only evaluated again.
    seconds = before.get("target_seconds")
  took = time.monotonic() - run.began
  if run.start == done == before.get("step"):
    took = before.get("seconds", took)
  return {
    "outcome": "done" if is_done else "interrupted",
    "step": done,
    "total_steps": run.total_steps,
    "batch_sizes": {str(phase.start): phase.batch_size for phase in phases if phase.start < done},
    **run.evaluation,
    "evaluation": run.evaluation,
    **{n: x.tolist() for n, x in run.arrays.items() if x.size <= _MOST_NUMBERS},
    **_best(run),
    "target_accuracy": config.target_accuracy,
    "target_loss": config.target_loss,
    "target_step": step,
    "target_seconds": None if seconds is None else round(seconds, 1),
    "stopped_by": run.callbacks.stop_text(),
    **noise_scale.read(state.noise),
    **loss_scale.read(state.loss_scale),
    "damaged_examples": run.reporter.count_damaged(),
    **run.nan_policy.summary(),
    **run.reporter.efficiency.summary(),
    **run.activity.summary(),
    "seconds": round(took, 1),
    "devices": f"{experiment.mesh.size} x {jax.devices()[0].device_kind}",
    "workdir": str(run.workdir),
    **({"class_names": list(names)} if names else {}),
  }


def _best(run: Run) -> dict[str, Any]:
  """Return the best evaluation by `Checkpoint.best_metric`, the earliest of equals."""
  if (name := run.experiment.best_metric) is None:
    return {}
  score, step = best_of(((e.values, e.step) for e in run.evaluations), name)
  value = -score if score is not None and name.startswith("-") else score
  return {"best_metric": name, "best_value": value, "best_step": step}
