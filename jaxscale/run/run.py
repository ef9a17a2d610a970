"""State and decisions of a run, from claiming the workdir to the summary."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxscale import cluster, metrics
from jaxscale.checkpoint.lock import WorkdirLock
from jaxscale.checkpoint.manager import Checkpoints
from jaxscale.cluster.watch.watch import Watch
from jaxscale.errors import invalid
from jaxscale.experiment import build
from jaxscale.metrics.log import LineHandler
from jaxscale.run import provenance
from jaxscale.run import workdir as workdirs
from jaxscale.run.activity import ActivityRecord
from jaxscale.run.callbacks import Callbacks
from jaxscale.run.nan_policy import NanPolicy
from jaxscale.run.programs import Programs
from jaxscale.run.reporter import Reporter
from jaxscale.run.step_compiler import in_background
from jaxscale.run.tracer import Tracer
from jaxscale.training.loop import Values
from jaxscale.training.metrics import separate


class Evaluation(NamedTuple):
  """Result of an evaluation.

  Attributes:
    step: the step before the evaluation.
    values: the metrics by name.
    seconds: the seconds since training began; None if the run was resumed since.
  """

  step: int
  values: Values
  seconds: float | None = None


@dataclasses.dataclass
class Run:
  """State of a run from its beginning to its end, and the decisions that follow from it.

  All processes have the same evaluations, so all make the same decisions.

  Attributes:
    workdir: the run's workdir.
    experiment: the experiment at the current phase.
    lock: the lock on the workdir; None in all but process 0.
    checkpoints: the checkpoints of the run.
    watch: the watch, which records progress and decides when all processes stop.
    nan_policy: the policy after a skipped step.
    activity: the activity record.
    tracer: the tracer of this process.
    programs: the cache of compiled programs.
    lines: the log handler.
    callbacks: the user's callbacks, which may stop the run.
    began: the time of the beginning on `time.monotonic`, which clock changes do not move.
    reporter: the reporter of this run.
    start: the step that the run resumed from.
    evaluations: all evaluations so far, with those of earlier starts.
    evaluation: the metrics of the newest evaluation of this start; empty if there is none.
    arrays: the arrays of this evaluation by name, such as the confusion matrix.
  """

  workdir: Path
  experiment: build.Experiment
  lock: WorkdirLock | None
  checkpoints: Checkpoints
  watch: Watch
  nan_policy: NanPolicy
  activity: ActivityRecord
  tracer: Tracer
  programs: Programs
  lines: LineHandler
  began: float
  callbacks: Callbacks = dataclasses.field(default_factory=lambda: Callbacks(()))
  reporter: Reporter = dataclasses.field(init=False)
  start: int = 0
  evaluations: list[Evaluation] = dataclasses.field(default_factory=list)
  evaluation: Values = dataclasses.field(default_factory=dict)
  arrays: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
  recorded: Future[None] = dataclasses.field(init=False)
  _since: float = 0.0  # the start of training on time.perf_counter
  _asked: tuple[int, bool] = (-1, False)  # a step, and whether the run stops after it

  @property
  def total_steps(self) -> int:
    """The number of steps of the whole run."""
    return self.experiment.derived.total_steps

  def record_start(self) -> None:
    """Append this start to starts.jsonl in the background, as git may take a while."""
    experiment = self.experiment
    accepted = [x for x in experiment.notes if x.startswith(workdirs.ACCEPTED)]
    devices = workdirs.devices_of(experiment)

    def record():
      with contextlib.suppress(OSError):  # A full disk must not end the run.
        if cluster.is_leader():
          provenance.record_start(self.workdir, devices, accepted)

    self.recorded = in_background(record)

  def start_from(self, step: int) -> None:
    """Load the records up to this step, from which the run resumes; all processes call it."""
    self.start, self._since, self._asked = step, time.perf_counter(), (-1, False)
    lines = metrics.read_metrics(self.workdir / "metrics.jsonl") if step else []
    lines = [x for x in lines if "eval/loss" in x and x["step"] <= step]
    self.evaluations, self.evaluation = [], {}
    for line in cluster.from_leader(lines):
      values = {n[5:]: v for n, v in line.items() if n.startswith("eval/")}
      self.evaluations.append(Evaluation(line["step"], values))
    self.nan_policy.start_from(step)
    self.activity.resumes(step)

  def add_evaluation(self, step: int, values: Values) -> bool:
    """Record an evaluation; return False if a finished run repeats one."""
    self.evaluation = values
    if is_new := self.evaluation_at(step) is None:
      seconds = time.perf_counter() - self._since if self.start == 0 else None
      self.evaluations.append(Evaluation(step, values, seconds))
    return is_new

  def evaluation_at(self, step: int) -> Values | None:
    """Return the metrics of the evaluation after this step; None if there is none."""
    return next((e.values for e in self.evaluations if e.step == step), None)

  def target(self) -> Evaluation | None:
    """Return the first evaluation that reached the target; None if none did."""
    config = self.experiment.config
    targets = config.target_accuracy, config.target_loss
    return next((e for e in self.evaluations if metrics.is_reached(e.values, *targets)), None)

  def separate(self, found: dict[str, Any]) -> Values:
    """Return the numbers of an evaluation, and keep its arrays.

    Raises:
      ConfigError: the evaluation does not report `Checkpoint.best_metric`.
    """
    values, self.arrays = separate(found, self.experiment.eval_data.info)
    best = self.experiment.best_metric
    known = [n for n in {**found, **values} if n not in self.arrays]
    if best is not None and best.removeprefix("-") not in known:
      problem, fix = "is not reported by evaluations", f"use one of {', '.join(known)}"
      raise invalid("Checkpoint.best_metric", best, problem, fix)
    return values

  def stops_at_target(self) -> bool:
    """Return whether the run ends because its target is reached."""
    return self.experiment.config.stop_at_target and self.target() is not None

  def ends_early(self) -> bool:
    """Return whether the run ends because of its target or of a callback."""
    return self.callbacks.stopped is not None or self.stops_at_target()

  def is_over(self, step: int) -> bool:
    """Return whether nothing is left to train after this step."""
    return step == self.total_steps or self.ends_early()

  def should_stop(self, step: int) -> bool:
    """Return whether the run ends after this step: by a request, its target or a callback."""
    if self._asked[0] != step:  # Processes agree on a stop once per step.
      self._asked = step, self.watch.stop.poll() is not None
    return self._asked[1] or self.ends_early()
