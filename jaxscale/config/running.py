"""Settings of the devices, and of what is evaluated, saved, checked and logged."""

from __future__ import annotations

from typing import Annotated, Literal

from jaxscale.cluster.timeouts import Timeouts
from jaxscale.config.bases import Tracker
from jaxscale.config.bounds import Count, Positive
from jaxscale.config.validation import settings, shown
from jaxscale.errors import ConfigError, invalid
from jaxscale.files import whole_number

MOST_TRACED_STEPS = 100  # in one trace: 40 MB of the digits on eight devices


@settings
class Mesh:
  """The devices as a grid, slowest links first; one axis can be -1: all that is left.

  Attributes:
    replica: groups of devices joined by the slow links (nodes, slices); each has
      other examples.
    data: devices in a group; each has other examples.
    fsdp: devices that have other examples and split the state (Layout.shard).
    stage: parts of the layers, one after another (Layout.schedule).
    model: devices that split each layer, or a sequence (Layout.model).
  """

  replica: int = 1
  data: int = -1
  fsdp: int = 1
  stage: int = 1
  model: int = 1

  def __post_init__(self):
    for name, size in vars(self).items():
      if size < 1 and size != -1:
        raise ConfigError(f"Mesh.{name}={size}: give a number >= 1, or -1 for the rest")
    rest = [f"Mesh.{name}=-1" for name, size in vars(self).items() if size == -1]
    if len(rest) > 1:
      raise ConfigError(f"{' and '.join(rest)}: only one can be the rest")


@settings
class Compilation:
  """Compiled programs, which are kept for the next start (`run/programs.py`).

  Where JAX_COMPILATION_CACHE_DIR is set, or `jax.config` says so, JAX's own settings
  count, and these do not.

  Attributes:
    cache: keep what is compiled, and load what is kept.
    cache_dir: a folder that runs share; None: `compiled/` in the workdir or, where
      others can write to that, in the user's cache.
    cache_gb: the programs longest out of use are deleted above this size.
  """

  cache: bool = True
  cache_dir: str | None = None
  cache_gb: Positive = 2.0


def _check_interval(chosen: Evaluation | Checkpoint) -> None:
  """Refuse an interval in steps beside one in epochs, and one in neither."""
  epochs, steps = chosen.every_epochs, chosen.every_steps
  field = f"{type(chosen).__name__}.every_steps"
  if steps is not None and epochs not in (None, 1.0):  # 1.0: nobody has set it
    why = f"and every_epochs={epochs} are both set"
    raise invalid(field, steps, why, "set one of them to None")
  if steps is None and epochs is None:
    raise invalid(field, steps, "and every_epochs=None leave no interval", "set one")


@settings
class Evaluation:
  """When and how the held-out examples are evaluated, always every one.

  Attributes:
    every_epochs: epochs between evaluations; the last step always has one.
    every_steps: steps between evaluations, instead of `every_epochs`.
    batch_size: examples per step, rounded up to a multiple of the devices.
  """

  every_epochs: Annotated[float | None, "> 0"] = 1.0
  every_steps: Annotated[int | None, ">= 1"] = None
  batch_size: Count = 1000

  def __post_init__(self):
    _check_interval(self)


@settings
class Checkpoint:
  """When checkpoints are written and which are kept.

  Attributes:
    every_epochs: epochs between checkpoints; the last step always has one.
    every_steps: steps between checkpoints, instead of `every_epochs`.
    keep_last: how many of the newest to keep.
    keep_best: how many with the highest accuracy (language models: with the lowest
      loss) to keep as well.
    on_failure: when one cannot be written, e.g. because the disk is full: log it,
      "continue" and try again at the next, or "stop". To stop loses what was
      computed since the last one for certain; to continue loses it only if nobody
      makes room. Either way the run fails if its last one is missing.
    max_wait_s: seconds that training waits, when one is due, for the one before,
      which a slow disk is still writing; then the one that is due is left out. The
      last of a run, and that of a run that is asked to stop, is never left out.
    local: a folder of each node, in RAM ("/dev/shm") or on a disk of its own, for a
      copy of each checkpoint, from which a restart on the same nodes resumes; None:
      there are no copies (docs/reliability.md).
    shared_every: with copies, every so many checkpoints one is written to the workdir;
      the first of each start, the last one, and that of a run that is asked to stop
      always are.
  """

  every_epochs: Annotated[float | None, "> 0"] = 1.0
  every_steps: Annotated[int | None, ">= 1"] = None
  keep_last: Count = 2
  keep_best: Annotated[int, ">= 0"] = 1
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
      why = "checkpoints in between would be nowhere; set Checkpoint.local as well"
      raise ConfigError(f"Checkpoint.shared_every={self.shared_every}: {why}")


@settings
class Checks:
  """What is watched during training.

  Attributes:
    replicas_every_steps: steps between comparisons of all devices' copies of
      parameters and optimizer state, bit for bit; 0: never.
    nan_policy: what follows a step whose loss or gradient is NaN or Inf, which in
      any case changes nothing. "stop": the run ends; "skip": it continues with the
      next batch; "roll_back": it resumes from the last checkpoint and leaves out
      the batches since then (PaLM, arXiv:2204.02311, section
      5.1: spikes come of data and parameters together).
    max_skipped_steps: skips, or roll-backs, that a run may have; one more ends it.
    max_consecutive_skipped_steps: likewise of consecutive steps, or of rolls
      back to the same checkpoint.
  """

  replicas_every_steps: Annotated[int, ">= 0"] = 1000
  nan_policy: Literal["stop", "skip", "roll_back"] = "stop"
  max_skipped_steps: Count = 10
  max_consecutive_skipped_steps: Count = 3


@settings
class Faults(Timeouts):
  """When a run of several processes, or a job, counts as broken, and how it ends.

  Times are in seconds; their defaults are those of `cluster.Timeouts`.

  Attributes:
    max_restarts: how often a job may be requeued.
    max_idle_restarts: how often in a row without a newer checkpoint.
  """

  max_restarts: Annotated[int, ">= 0"] = 100
  max_idle_restarts: Count = 3

  def __post_init__(self):
    silent_s, jax_s = self.heartbeat_timeout_s, self.jax_heartbeat_timeout_s
    if jax_s < (least := 1.2 * silent_s):  # time for the report
      why = f"aborts all before heartbeat_timeout_s={silent_s} reports who is silent"
      raise invalid("Faults.jax_heartbeat_timeout_s", jax_s, why, f"give {least:g}")


@settings
class Log:
  """What is logged during training.

  Attributes:
    every_steps: steps between two records of metrics.
    tensorboard: also write TensorBoard event files.
    trackers: also log to these, e.g. "Wandb,MLflow", each once.
    trust_ratios: also write each layer's trust ratio (LARS, LAMB).
    step_report: before the first step, measure how long a step computes, how long
      it waits for the exchange, and how processes differ; costs two compilations
      and some dozens of steps.
    plot: draw `metrics.png` at the end, which takes about a second.
    profile: steps to trace for XProf, as "100:110", both included; at most 100, as
      traces are large. `jaxscale profile RUN` traces steps of a run that trains.
    profile_processes: the processes that trace them.
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
    names = [type(tracker).__name__ for tracker in self.trackers]
    for name in names:
      if names.count(name) > 1:
        raise ConfigError(f"Log.trackers: {name} is there twice, leave one out")

  def profiled_steps(self) -> tuple[int, int] | None:
    """The first and the last step of `profile`.

    Raises:
      ConfigError: it does not name such steps.
    """
    if self.profile is None:
      return None
    first, last = map(whole_number, self.profile.partition(":")[::2])
    if first is None or last is None:
      hint = "give the first and the last step, as 100:110"
    elif not 1 <= first <= last:
      hint = "steps count from 1, and the last one is not before the first"
    elif last - first >= MOST_TRACED_STEPS:
      hint = f"at most {MOST_TRACED_STEPS} steps, traces are large; give {first}:"
      hint += str(first + MOST_TRACED_STEPS - 1)
    else:
      return first, last
    raise ConfigError(f"Log.profile={shown(self.profile)}: {hint}")
