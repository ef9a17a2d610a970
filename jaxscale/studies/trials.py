"""Trials: runs to a target accuracy, each in its own directory and done once.

What `batch_study` and `time_to_accuracy` share. A trial is one call of `fit`; what
came of it is kept as `outcome.json` in its directory, so that a study which was
killed resumes where it was. That a run diverges or misses is an outcome too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

from jaxscale import cluster, metrics
from jaxscale.cluster.watch.stop_consensus import StopRequested
from jaxscale.config import Config
from jaxscale.errors import EXIT_DONE, EXIT_INTERRUPTED, ConfigError
from jaxscale.run.session import open_session, report_stop

Page = Callable[[], str]  # writes the files of a study, and returns its text


class Trial(NamedTuple):
  """A run to be done, and where."""

  config: Config
  workdir: Path


class Outcome(NamedTuple):
  """What came of a trial.

  Attributes:
    status: "reached", "missed" or "diverged".
    batch_size: examples per step.
    seed: of the run.
    accumulate_steps: micro-batches per step.
    peak_lr: learning rate after the warm-up.
    target: accuracy to reach.
    num_train: examples of an epoch.
    eval_every: steps between evaluations: `target_step` is known no better.
    steps: steps done; where it diverged, the step of the NaN or Inf.
    target_step: the first evaluated step that reached the target, or None.
    target_examples: examples seen until then.
    target_seconds: until then, from the start of the run; None where it missed,
      or where the run was interrupted and did not keep the time.
    accuracy: held-out, after the last step; None if it diverged.
    train_accuracy: of the training examples as they are stored, without
      augmentation, by the same parameters; None if it diverged.
    noise_scale: gradient-noise scale in examples; None where it is infinite, or was
      not measured.
    noise_scale_low: lower end of its interval; None where it was not measured.
    noise_scale_high: upper end; None where it is infinite, or was not measured.
    note: why it diverged.
  """

  status: str
  batch_size: int
  seed: int
  accumulate_steps: int
  peak_lr: float
  target: float
  num_train: int
  eval_every: int
  steps: int
  target_step: int | None = None
  target_examples: int | None = None
  target_seconds: float | None = None
  accuracy: float | None = None
  train_accuracy: float | None = None
  noise_scale: float | None = None
  noise_scale_low: float | None = None
  noise_scale_high: float | None = None
  note: str = ""

  @property
  def target_epochs(self) -> float | None:
    """Passes over the training examples until the target."""
    seen = self.target_examples
    return None if seen is None else seen / self.num_train

  @property
  def gap(self) -> float | None:
    """Generalisation gap: accuracy on the training less on the held-out examples."""
    if self.accuracy is None or self.train_accuracy is None:
      return None
    return self.train_accuracy - self.accuracy

  def as_dict(self) -> dict[str, Any]:
    """As JSON, what follows from it included."""
    return self._asdict() | {"target_epochs": self.target_epochs, "gap": self.gap}


def mean_noise_scale(outcomes: Sequence[Outcome]) -> float | None:
  """Return the harmonic mean, in which an infinite scale counts; None: not measured."""
  measured = [o for o in outcomes if (o.noise_scale, o.noise_scale_low) != (None, None)]
  shares = [1 / o.noise_scale if o.noise_scale else 0.0 for o in measured]
  return (len(shares) / sum(shares) if any(shares) else math.inf) if measured else None


class Interrupted(Exception):
  """A trial was asked to stop and has saved its state."""


def prepare(config: Config, **changes: Any) -> Config:
  """The config of a trial: some fields replaced, over once it reached its target.

  Raises:
    ConfigError: there is no target, or a value is impossible.
  """
  if config.target_accuracy is None:
    advice = "nothing to reach, add e.g. --config.target_accuracy=0.9"
    raise ConfigError(f"Config.target_accuracy=None: {advice}")
  return dataclasses.replace(config, **changes, stop_at_target=True)


def make(config: Config, workdir: Path, seeds: int, **changes: Any) -> list[Trial]:
  """One trial per seed, from the config's on, each in `workdir`/seed-N."""
  numbers = range(config.seed, config.seed + seeds)
  configs = {seed: prepare(config, seed=seed, **changes) for seed in numbers}
  return [Trial(one, workdir / f"seed-{seed}") for seed, one in configs.items()]


def check(trials: Sequence[Trial]) -> None:
  """Refuse what cannot run before anything is run.

  Raises:
    ConfigError: the one line of the first trial that does not fit data, devices
      or its directory.
  """
  from jaxscale.run.workdir import experiment_in

  seen = set()
  for trial in trials:
    config = trial.config
    # Seeds do not matter to what fits, and some data take long to open.
    if (alike := dataclasses.replace(config, seed=0)) not in seen:
      experiment_in(trial.workdir, config)
      seen.add(alike)
    if trial.workdir.exists() and not trial.workdir.is_dir():
      raise ConfigError(f"--workdir={trial.workdir}: a file, use another one")


def run_trials(trials: Sequence[Trial]) -> list[Outcome]:
  """The outcome of every trial; those done before are read, not repeated.

  Raises:
    ConfigError: a trial cannot run, or its directory holds another experiment.
    Interrupted: all were asked to stop; the same call resumes.
  """
  known = [finished(trial) for trial in trials]
  check([t for t, outcome in zip(trials, known, strict=True) if outcome is None])
  outcomes = []
  for i, (trial, outcome) in enumerate(zip(trials, known, strict=True), 1):
    if cluster.is_leader():
      state = "done before" if outcome else "running"
      text = f"batch {trial.config.batch_size:,}, seed {trial.config.seed}, {state}"
      print(f"== {i} of {len(trials)}: {text} ({trial.workdir})", flush=True)
    outcomes.append(outcome or run_trial(trial))
  return outcomes


def finished(trial: Trial) -> Outcome | None:
  """What a trial left when it was done, if that was with the same settings."""
  path = trial.workdir / "outcome.json"
  shape: dict[str, Any] = {
    n: get_args(t) or t for n, t in get_type_hints(Outcome).items()
  }
  saved = cluster.from_leader(metrics.read_json(path, shape | {"config": str}))
  if saved.get("config") != repr(trial.config):
    return None
  return Outcome(**{name: saved[name] for name in Outcome._fields if name in saved})


def run_trial(trial: Trial) -> Outcome:
  """Train, or resume; see what came of it, and keep that.

  Raises:
    ConfigError: as `fit` does.
    Interrupted: all were asked to stop; the state is saved.
  """
  from jaxscale.run.fit import fit
  from jaxscale.run.workdir import experiment_in
  from jaxscale.training.loop import NonFiniteError

  config, experiment = trial.config, experiment_in(trial.workdir, trial.config)
  names = ("batch_size", "seed", "accumulate_steps")
  common = {name: getattr(config, name) for name in names}
  names = ("peak_lr", "num_train", "eval_every")
  common |= {name: getattr(experiment.derived, name) for name in names}
  common["target"] = config.target_accuracy
  try:
    state, summary = fit(config, trial.workdir)
  except NonFiniteError as e:
    outcome = Outcome("diverged", **common, steps=e.step, note=str(e))
  else:
    if summary["outcome"] == "interrupted":
      raise Interrupted
    step = summary["target_step"]
    outcome = Outcome(
      "missed" if step is None else "reached",
      **common,
      steps=summary["step"],
      target_step=step,
      target_examples=None if step is None else _examples(experiment, trial, step),
      target_seconds=summary["target_seconds"],
      accuracy=summary["accuracy"],
      train_accuracy=accuracy_on(experiment, state, experiment.train_data),
      noise_scale=summary.get("noise_scale"),
      noise_scale_low=summary.get("noise_scale_low"),
      noise_scale_high=summary.get("noise_scale_high"),
    )
  kept = outcome.as_dict() | {"config": repr(config)}
  cluster.on_leader(
    lambda: metrics.write_json(trial.workdir / "outcome.json", kept), "outcome"
  )
  return outcome


def _examples(experiment: Any, trial: Trial, step: int) -> int:
  """Examples seen after a step, also where the batch grew on the way."""
  from jaxscale.experiment import build
  from jaxscale.experiment.phases import examples_at
  from jaxscale.run import adaptive_batch

  if chosen := cluster.from_leader(adaptive_batch.read_chosen(trial.workdir)):
    experiment = build.with_sizes(experiment, chosen)
  return examples_at(experiment.derived.phases, step)


def accuracy_on(experiment: Any, state: Any, dataset: Any) -> float:
  """Accuracy on every example of a dataset, each once and not augmented.

  Args:
    experiment: whose `eval_step`, mesh and evaluation batch size are used.
    state: what to evaluate: the averages where the run keeps them.
    dataset: training or held-out examples.

  Raises:
    Interrupted: all were asked to stop.
  """
  from jaxscale import data
  from jaxscale.mesh import host_shard
  from jaxscale.run import callbacks
  from jaxscale.training import loop

  mesh = experiment.mesh
  batches = data.eval_batches(
    dataset, experiment.derived.eval_batch_size, shard=host_shard(mesh)
  )
  params, model_state = state.evaluated()
  with cluster.current_watch() as watch:
    on_devices = callbacks.until_stopped(batches, mesh, watch, int(state.step))
    try:
      values = loop.evaluate(experiment.eval_step, params, model_state, on_devices)
    except StopRequested:
      raise Interrupted from None
    watch.at(int(state.step), "outside")
  return values["accuracy"]


def run_study(
  study: Callable[[], Page], config: Config, workdir: Path, interrupted: str
) -> int:
  """Run a study on all processes, and print its page on process 0.

  Args:
    study: trains, and returns the page.
    config: of the study.
    workdir: of the study.
    interrupted: printed where it was asked to stop, or stopped by Ctrl-C.

  Returns:
    The exit code.
  """
  try:
    with open_session(config, workdir) as watch:
      try:
        page = study()
      except Interrupted:
        return report_stop(config, watch.stop.agreed, interrupted)
      cluster.on_leader(lambda: print(page()), "study")
    return EXIT_DONE
  except KeyboardInterrupt:
    print(interrupted)
    return EXIT_INTERRUPTED
