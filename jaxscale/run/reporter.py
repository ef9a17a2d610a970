"""Output of a run while it trains: terminal, metric files and warnings."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxscale import cluster, data, metrics
from jaxscale.experiment import build
from jaxscale.experiment.phases import examples_at
from jaxscale.metrics.log import LineHandler, logger
from jaxscale.run import tracking
from jaxscale.run.damaged_examples import DamageRecord
from jaxscale.run.efficiency import Efficiency
from jaxscale.training import noise_scale

# Warn if at least this share of the time, over this many seconds, is spent waiting for data.
INPUT_BOUND, INPUT_BOUND_SECONDS = 0.2, 1.0


class Reporter:
  """Reporter of a run to the terminal and its files; only the leader writes."""

  def __init__(
    self,
    experiment: build.Experiment,
    workdir: Path,
    start: int,
    may_write: Callable[[], bool],
    lines: LineHandler,
  ):
    """Resume the records of a run.

    Args:
      experiment: the experiment at the current phase.
      workdir: the run's workdir.
      start: the step that the run resumed from.
      may_write: called before each line of a file; while it returns False, nothing is
        written.
      lines: the log handler, whose lines appear above the progress bar.
    """
    config, total = experiment.config, experiment.derived.total_steps
    self._experiment = experiment  # at the current phase
    self._noise_scale: tuple[float, float, float] | None = None  # scale, low, high
    self.efficiency = Efficiency()
    self._waited = self._window_waited = 0.0
    self._window = time.perf_counter()
    self._warned = self._is_done = False
    self._damage = DamageRecord(workdir, start)
    self._damage.watch("training", experiment.train_data)
    self._damage.watch("held-out", experiment.eval_data)
    self._progress = metrics.Progress(
      total,
      start=start,
      examples=self._examples(start),
      total_examples=self._examples(total),
      quiet=not cluster.is_leader(),
      plain=cluster.is_job(),
    )
    self._lines = lines
    self._writer = None
    if cluster.is_leader():
      self._writer = metrics.MetricWriter(
        workdir,
        start=start,
        tensorboard=config.log.tensorboard,
        trackers=tracking.sources(config, workdir),
        may_write=may_write,
      )

  def __enter__(self):
    self._lines.show = self._progress.log
    return self

  def __exit__(self, error: type[BaseException] | None, *_):
    self._lines.show = None
    self._progress.close()
    if self._writer is not None:
      outcome = "done" if self._is_done else "interrupted"
      self._writer.close("failed" if error else outcome)

  def enter(self, experiment: build.Experiment, step: int) -> None:
    """Report that a phase begins after `step` steps, or that the one before continues."""
    notes = [n for n in experiment.notes if n not in self._experiment.notes]
    self._experiment = experiment
    total, phase = experiment.derived.total_steps, experiment.phase
    self._progress.expect(total, self._examples(total))
    size = f", images of {phase.image_size}" if phase.image_size else ""
    self._damage.watch("training", experiment.train_data)
    if phase.start == step:
      rule, follow = (getattr(experiment.config.phases, n, None) for n in ("when", "follow"))
      why = f": {rule.why}" if rule is not None and rule.decide is None else ""
      before, now = (build.rate_at(experiment, phase.start - n) for n in (1, 0))
      rates = f"(lr from {before:.4g} to {now:.4g}, follow={follow or 'neutral'})"
      text = f"{phase.batch_size:,}{size} {rates}; {total:,} steps in all{why}"
      logger.info(f"step {step}  batch size is now {text}")
      # The first step of the new size: a resumed run does not write its first step's line again.
      self.write(phase.start + 1, "growth", {"batch_size": float(phase.batch_size)})
    for note in notes:
      logger.info(note)

  def trained(self, step: int, values: dict[str, float]) -> None:
    """Log the metrics of a training step."""
    experiment, examples = self._experiment, self._examples(step)
    rate = self._progress.rate(examples)
    perf = {"examples_per_s": rate, "input_wait": self._input_wait()}
    perf["step_s"] = experiment.phase.batch_size / rate
    if cluster.is_leader():  # Only the leader shows it.
      with self.pause():  # The first call traces the model.
        perf |= self.efficiency.measured(experiment, rate)
    self._progress.train(step, values, perf)
    finite = {name: v for name, v in values.items() if math.isfinite(v)}
    ratios = {n: finite.pop(n) for n in list(finite) if n.startswith("trust_ratio/")}
    if "noise_scale" in values:
      ends = values["noise_scale_low"], values["noise_scale_high"]
      self._noise_scale = values["noise_scale"], *ends
      if "noise_scale" in finite:
        finite["critical_batch_size"] = finite["noise_scale"]
    info = experiment.train_data.info
    if isinstance(info, data.TextInfo):
      perf["tokens_per_s"] = rate * info.sequence_length
      # exp of a smoothed loss is not a perplexity; the evaluation's loss is not smoothed.
      if "loss" in finite and not experiment.config.loss.label_smoothing:
        finite |= metrics.perplexity_of(finite["loss"], info.bytes_per_token)
    self.write(step, "train", finite | {"epoch": examples / experiment.derived.num_train})
    if progress := experiment.train_data.progress:
      self.write(step, "data", progress(examples))
    self.write(step, "perf", perf)
    if ratios and self._writer is not None:
      self._writer.write(step, ratios)

  def count_damaged(self) -> int:
    """Return the number of distinct damaged examples; log them if some are new.

    All processes must call it.
    """
    for line in self._damage.collect():
      logger.warning(line)
    return self._damage.count

  def evaluated(
    self, step: int, values: dict[str, float], *, is_new: bool = True, is_last: bool = False
  ) -> None:
    """Log the result of an evaluation.

    Args:
      step: the step before the evaluation.
      values: the metrics by name.
      is_new: True if the evaluation is not recorded yet.
      is_last: True if the run ends with it.
    """
    self.count_damaged()
    if is_new:
      self.write(step, "eval", values)
    self._progress.evaluated(step, values)
    self._is_done = is_last
    if is_last and self._noise_scale:
      logger.info(noise_scale.describe(*self._noise_scale, self._experiment.phase.batch_size))

  def timed(self, batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the same batches, and time the waits for them (`input_wait`)."""
    while True:
      clock = time.perf_counter()
      if (batch := next(batches, None)) is None:
        return
      self._waited += time.perf_counter() - clock
      yield batch

  @contextlib.contextmanager
  def pause(self):
    """Exclude the time inside the block from all rates."""
    clock = time.perf_counter()
    yield
    seconds = time.perf_counter() - clock
    self._progress.pause(seconds)
    self._window += seconds

  def _input_wait(self) -> float:
    """Return the share of the time since the last log that was spent waiting for data.

    With steps in flight the host waits for the device and not for data, unless data
    arrive slower than steps run: only such waits are lost time.
    """
    now = time.perf_counter()
    seconds = max(now - self._window, 1e-9)
    share = (self._waited - self._window_waited) / seconds
    self._window, self._window_waited = now, self._waited
    is_long = seconds > INPUT_BOUND_SECONDS and self._progress.windows > 1
    if share > INPUT_BOUND and is_long and not self._warned:
      self._warned = True
      logger.warning(
        f"input-bound: {share:.0%} of the time is spent waiting for data; increase "
        "input_threads, add CPU cores, or set data.cache=True"
      )
    return share

  def _examples(self, step: int) -> int:
    return examples_at(self._experiment.derived.phases, step)

  def write(self, step: int, prefix: str, values: dict[str, float]) -> None:
    """Write values as PREFIX/NAME to metrics.jsonl, TensorBoard and trackers."""
    if self._writer is not None:
      self._writer.write(step, {f"{prefix}/{k}": v for k, v in values.items()})
