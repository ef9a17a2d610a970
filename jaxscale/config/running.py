"""Settings of the mesh, compilation, evaluation, checkpoints, checks, faults and logs."""

from __future__ import annotations

from typing import Annotated, Literal

from jaxscale.cluster.timeouts import Timeouts
from jaxscale.config.bases import Tracker
from jaxscale.config.bounds import Count, Positive, check_distinct
from jaxscale.config.validation import settings, shown
from jaxscale.errors import ConfigError, invalid
from jaxscale.files import whole_number

MOST_TRACED_STEPS = 100  # A trace of 100 steps of digits on eight devices takes 40 MB.


@settings
class Mesh:
  """Mesh of devices: axes from the slowest links to the fastest; -1 uses all remaining devices.

  Attributes:
    replica: the number of groups of devices between which links are slowest (e.g. nodes or TPU
      slices); each group processes different examples.
    data: the number of devices per replica group that process different examples; -1 uses all
      remaining devices.
    fsdp: the number of devices over which layout.shard splits the training state; each
      processes different examples.
    stage: the number of pipeline stages; layout.schedule orders their work.
    model: the number of devices that split each layer or sequence (see layout.model).
  """

  replica: int = 1
  data: int = -1
  fsdp: int = 1
  stage: int = 1
  model: int = 1

  def __post_init__(self):
    for name, size in vars(self).items():
      if size < 1 and size != -1:
        raise ConfigError(f"Mesh.{name}={size}: give a number >= 1, or -1 for all other devices")
    rest = [f"Mesh.{name}=-1" for name, size in vars(self).items() if size == -1]
    if len(rest) > 1:
      raise ConfigError(f"{' and '.join(rest)}: only one can be -1; give the others a size")


@settings
class Compilation:
  """Cache of compiled programs, which makes the next start faster.

  JAX's own settings take precedence: JAX_COMPILATION_CACHE_DIR or the same option of
  `jax.config`.

  Attributes:
    cache: whether to store compiled programs and load stored ones.
    cache_dir: the directory of the cache, which runs can share; None uses `compiled/` in the
      workdir, or ~/.cache/jaxscale/compiled if other users can write to the workdir.
    cache_gb: the size limit of the cache in GB; each start deletes the least recently used
      programs above the limit.
  """

  cache: bool = True
  cache_dir: str | None = None
  cache_gb: Positive = 2.0


@settings
class Evaluation:
  """Interval and batch size of evaluations; each covers all validation examples.

  Attributes:
    every_epochs: the number of epochs between evaluations; None uses `every_steps`. The
      last step is always evaluated.
    every_steps: the number of steps between evaluations; None uses `every_epochs`.
    batch_size: the number of examples per evaluation step, rounded up to a multiple of
      the number of devices.
  """

  every_epochs: Annotated[float | None, "> 0"] = 1.0
  every_steps: Annotated[int | None, ">= 1"] = None
  batch_size: Count = 1000

  def __post_init__(self):
    _check_interval(self)


@settings
class Checkpoint:
  """Interval, number and location of checkpoints.

  Attributes:
    every_epochs: the number of epochs between checkpoints; None uses `every_steps`. The
      last step is always saved.
    every_steps: the number of steps between checkpoints; None uses `every_epochs`.
    keep_last: the number of newest checkpoints to keep.
    keep_best: the number of best checkpoints, by `best_metric`, to keep in addition to the
      newest `keep_last`; 0 keeps only those.
    best_metric: the validation metric that decides which checkpoint is best, e.g. "val/f1" or
      "f1"; None uses the accuracy, or the loss if there is none (language models: always the
      loss). The highest value is best; the lowest for losses, errors, perplexities, metrics that
      say so, and with a minus sign ("-val/distance").
    on_failure: the reaction if a checkpoint cannot be written, e.g. because the disk is full;
      "continue" logs it and tries again at the next interval, "stop" ends the run. In either
      case a run fails if its last checkpoint cannot be written.
    max_wait_s: the time in seconds that training waits for the previous checkpoint to be
      written; after that the new checkpoint is skipped. The last checkpoint of a run and
      the checkpoint of a stopped run are never skipped.
    local: the absolute path of a directory on each node, in RAM (e.g. "/dev/shm") or on a local
      disk, for additional copies of checkpoints; a restart on the same nodes resumes from them.
      None makes no copies (docs/reliability.md).
    shared_every: the number of checkpoints in `local` per checkpoint in the workdir; with 10,
      only every tenth is also written to the workdir. The first checkpoint of each start, the
      last of the run, and that of a stopped run are always written to the workdir.
  """

  every_epochs: Annotated[float | None, "> 0"] = 1.0
  every_steps: Annotated[int | None, ">= 1"] = None
  keep_last: Count = 2
  keep_best: Annotated[int, ">= 0"] = 1
  best_metric: str | None = None
  on_failure: Literal["continue", "stop"] = "continue"
  max_wait_s: Annotated[float, "in [0, 1000000000]"] = 10.0
  local: str | None = None
  shared_every: Count = 1

  def __post_init__(self):
    _check_interval(self)
    if self.local is not None and not self.local.startswith("/"):
      hint = "give an absolute path, the same on every node, e.g. /dev/shm"
      raise ConfigError(f"Checkpoint.local={shown(self.local)}: {hint}")
    if self.local is None and self.shared_every > 1:
      problem = "needs local copies for the checkpoints in between; set Checkpoint.local as well"
      raise ConfigError(f"Checkpoint.shared_every={self.shared_every}: {problem}")


def _check_interval(chosen: Evaluation | Checkpoint) -> None:
  """Refuse an interval in both steps and epochs, and no interval."""
  epochs, steps = chosen.every_epochs, chosen.every_steps
  field = f"{type(chosen).__name__}.every_steps"
  if steps is not None and epochs not in (None, 1.0):  # 1.0 is the default.
    problem = f"and every_epochs={epochs} are both set"
    raise invalid(field, steps, problem, "set one of them to None")
  if steps is None and epochs is None:
    raise invalid(field, steps, "and every_epochs=None leave no interval", "set one")


@settings
class Checks:
  """Comparison of the devices' copies of the state, and the reaction to NaN and Inf.

  Attributes:
    replicas_every_steps: the number of steps between bitwise comparisons of all devices' copies
      of parameters and optimizer state; 0 disables the comparison.
    nan_policy: the reaction to a step with a NaN or Inf in the loss or gradient; the parameters
      are never updated by such a step. "stop" ends the run, "skip" continues with the next
      batch, "roll_back" resumes from the last checkpoint and skips the batches since then
      (PaLM, arXiv:2204.02311, section 5.1).
    max_skipped_steps: the largest number of skipped steps (nan_policy="skip") or rollbacks
      ("roll_back") in a run; one more ends the run.
    max_consecutive_skipped_steps: the largest number of consecutive skipped steps, or of
      rollbacks to the same checkpoint; one more ends the run.
  """

  replicas_every_steps: Annotated[int, ">= 0"] = 1000
  nan_policy: Literal["stop", "skip", "roll_back"] = "stop"
  max_skipped_steps: Count = 10
  max_consecutive_skipped_steps: Count = 3


@settings
class Faults(Timeouts):
  """Timeouts that detect failed and hung processes, and limits on restarts.

  Times are in seconds; `cluster.Timeouts` has their defaults.

  Attributes:
    max_restarts: the largest number of times that a job requeues itself; 0 disables requeueing.
      Jobs of `jaxscale submit` use its --requeue instead.
    max_idle_restarts: the number of consecutive restarts without a newer checkpoint after which
      a job ends with exit code 93.
  """

  max_restarts: Annotated[int, ">= 0"] = 100
  max_idle_restarts: Count = 3

  def __post_init__(self):
    silent_s, jax_s = self.heartbeat_timeout_s, self.jax_heartbeat_timeout_s
    if jax_s < (least := 1.2 * silent_s):  # Leaves time for the report.
      problem = f"lets JAX abort before heartbeat_timeout_s={silent_s} reports the lost process"
      raise invalid("Faults.jax_heartbeat_timeout_s", jax_s, problem, f"give {least:g} or more")


@settings
class Log:
  """Metrics, trackers and profiles.

  Attributes:
    every_steps: the number of steps between two records of training metrics.
    tensorboard: whether to also write TensorBoard event files.
    trackers: the experiment trackers that receive the metrics, e.g. "Wandb,MLflow"; () uses
      none.
    trust_ratios: whether to log each layer's trust ratio (LARS and LAMB).
    step_report: whether to measure, before the first step, the time that a step computes, the
      time that the exchange adds, and the differences between processes; costs two compilations
      and dozens of steps.
    plot: whether to draw `metrics.png` at the end of the run, which takes about a second.
    profile: the range of steps to trace for XProf, e.g. "100:110", both included, at most 100
      steps; None traces no steps. `jaxscale profile RUN` traces steps of a running run.
    profile_processes: the indices of the processes that trace the steps in `profile`.
  """

  every_steps: Count = 50
  tensorboard: bool = True
  trackers: tuple[Tracker, ...] = ()
  trust_ratios: bool = False
  step_report: bool = False
  plot: bool = True
  profile: str | None = None
  profile_processes: Annotated[tuple[int, ...], ">= 0"] = (0,)

  def __post_init__(self):
    self.profiled_steps()
    check_distinct("Log.trackers", self.trackers)

  def profiled_steps(self) -> tuple[int, int] | None:
    """Return the first and the last step of `profile`, or None.

    Raises:
      ConfigError: `profile` is not a valid range of steps.
    """
    if self.profile is None:
      return None
    first, last = map(whole_number, self.profile.partition(":")[::2])
    if first is None or last is None:
      hint = "give the first and the last step, as 100:110"
    elif not 1 <= first <= last:
      hint = "steps count from 1, and the last step must not be before the first"
    elif last - first >= MOST_TRACED_STEPS:
      hint = f"at most {MOST_TRACED_STEPS} steps, traces are large; give {first}:"
      hint += str(first + MOST_TRACED_STEPS - 1)
    else:
      return first, last
    raise ConfigError(f"Log.profile={shown(self.profile)}: {hint}")
