"""Where this process runs among others, and how they agree.

`joined` makes this process one of a run, however it was started: by srun or mpirun,
in pods, or by any launcher that sets the JAXSCALE_* variables.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxscale.cluster.barrier import (
  any_process,
  barrier,
  from_leader,
  gather,
  is_leader,
  on_leader,
  sum_over_processes,
)
from jaxscale.cluster.watch.fault_detection import Limits
from jaxscale.errors import ConfigError, said

# A command that only prints its --help needs none of this.
if TYPE_CHECKING:
  from jaxscale.cluster.detect.launched import Launch
  from jaxscale.cluster.watch.signals import Latch
  from jaxscale.cluster.watch.watch import Watch

__all__ = [
  "Limits", "Timeouts", "any_process", "barrier", "from_leader", "gather",
  "initialize", "is_leader", "joined", "on_leader", "saved", "sum_over_processes",
  "watched",
]  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeouts:
  """How long processes wait for each other where nothing watches yet, in seconds.

  Attributes:
    rendezvous_timeout_s: at the start, from the first process that comes to the last.
    initialization_s: for JAX's coordinator to be there, and then once more for JAX's
      own connections (its default is 300).
    heartbeat_s: of silence until JAX aborts everybody; to be longer than our own
      watch takes, which says why. JAX's default.
    shutdown_s: that a process which is done waits at exit for the others. JAX's
      default.
    grace_s: from SIGTERM until a process leaves without a save; Slurm's KillWait,
      from SIGTERM to SIGKILL, is 30 s by default (slurm.conf(5)).
    before_end_s: before the end of a Slurm job, when all stop and save, whether or
      not `--signal` says so, too.
  """

  rendezvous_timeout_s: float = 120.0
  initialization_s: float = 60.0
  heartbeat_s: float = 100.0
  shutdown_s: float = 300.0
  grace_s: float = 25.0
  before_end_s: float = 60.0


_DEFAULTS = Timeouts()
_has_joined = False  # whether JAX knows of others
_watch: Watch | None = None
_latch: Latch | None = None
_ending: threading.Event | None = None  # ends the thread that waits for the job's end


def initialize(
  config: object = None,
  *,
  timeouts: Timeouts = _DEFAULTS,
  limits: Limits | None = None,
  folder: Path | None = None,
) -> None:
  """Join the other processes of this run, if there are any; better by `joined`.

  `detect` finds out who they are, from JAXSCALE_* variables or from the launcher's;
  all meet and compare what they run (`meet`), and begin to watch each other
  (`watch`); then JAX is told everything it would have to guess (`join`). Call it
  before anything asks JAX for devices. From here on signals ask the run to stop; a
  process that is alone keeps its own (`joined` minds them in every case).

  Args:
    config: what all processes have to be given alike; its `repr` is compared.
    timeouts: of the start and of JAX.
    limits: what the watch takes for a fault; None: the defaults, but whoever never
      says by `Watch.at` where it is may do what it likes for as long as it likes.
    folder: for the stacks of processes that a fault ends.

  Raises:
    ConfigError: the variables contradict each other, a process has not come or runs
      something else, a GPU is missing, …: one line, in all processes that can be told.
  """
  _begin(config, timeouts, limits, folder)
  if _watch is not None and not _watch.is_watched:
    _end()  # a notebook, whose kernel outlives every run: see `watched`


def _begin(
  config: object, timeouts: Timeouts, limits: Limits | None, folder: Path | None
) -> None:
  """`initialize`, for a command."""
  global _latch, _watch, _has_joined
  from jaxscale.cluster.detect.detect import detect
  from jaxscale.cluster.rendezvous.network import node_name
  from jaxscale.cluster.watch import signals

  limits = limits or Limits(starting_s=math.inf)
  _latch = signals.Latch(grace_s=timeouts.grace_s)
  _latch.attach(signals.leave_at_once)  # there is nothing to save yet
  launch = detect(os.environ)
  if launch.note and launch.process_id == 0:
    print(launch.note, flush=True)
  if launch.num_processes == 0:  # a TPU pod that only JAX knows
    launch = _joined_by_jax(launch, timeouts)
    _has_joined = True
  if launch.num_processes > 1:
    _meet(launch, config, timeouts, limits, folder)
    return
  from jaxscale.cluster.watch import watch

  # A job that nobody looks at is watched even if it is one process.
  alone = launch.kind != "single"
  _watch = watch.start(
    {}, 0, [node_name()], limits=limits, folder=folder, watch_alone=alone
  )
  _heed(_watch, _latch, launch, timeouts)


def _meet(
  launch: Launch,
  config: object,
  timeouts: Timeouts,
  limits: Limits | None,
  folder: Path | None,
) -> None:
  """What `initialize` does where there are others."""
  global _watch, _has_joined
  from jaxscale.cluster.detect.local_devices import local_device_ids, visible_gpus
  from jaxscale.cluster.rendezvous.client import meet
  from jaxscale.cluster.rendezvous.handshake import digests_of
  from jaxscale.cluster.rendezvous.join import check_devices, join
  from jaxscale.cluster.watch import watch

  num_gpus, ids, trouble = visible_gpus(os.environ), None, ""
  try:
    ids = local_device_ids(os.environ, num_gpus, launch)
  except ConfigError as e:
    trouble = str(e)  # it may be this host's alone: all are to hear of it
  meeting = meet(
    launch,
    timeout_s=timeouts.rendezvous_timeout_s,
    digests=digests_of(config),
    on_cpu=not num_gpus,
    trouble=trouble,
  )
  hosts, rank = meeting.hosts, meeting.process_id
  _watch = watch.start(meeting.links, rank, hosts, limits=limits, folder=folder)
  assert _latch is not None
  _heed(_watch, _latch, launch, timeouts)
  if not _has_joined:
    join(launch, meeting, local_device_ids=ids, **_of_jax(timeouts))
    _has_joined = True
  check_devices(meeting)


def _joined_by_jax(launch: Launch, timeouts: Timeouts) -> Launch:
  """Join where JAX alone knows the others; then all know where they can meet."""
  import jax

  from jaxscale.cluster.rendezvous import network
  from jaxscale.cluster.rendezvous.join import join

  join(launch, None, **_of_jax(timeouts))
  return launch._replace(
    process_id=jax.process_index(),
    num_processes=jax.process_count(),
    host=from_leader(network.node_name()),
    job=from_leader(f"{launch.job}-{os.urandom(8).hex()}"),
  )


def _of_jax(timeouts: Timeouts) -> dict[str, Any]:
  """JAX's own timeouts, as `join` takes them."""
  return {
    "initialization_timeout_s": math.ceil(timeouts.initialization_s),
    "heartbeat_timeout_s": math.ceil(timeouts.heartbeat_s),
    "shutdown_timeout_s": math.ceil(timeouts.shutdown_s),
  }


def _heed(watch: Watch, latch: Latch, launch: Launch, timeouts: Timeouts) -> None:
  """From here on signals, and the end of the job, ask all processes to stop."""
  global _ending
  from jaxscale.cluster.detect import walltime
  from jaxscale.cluster.watch import signals

  def request(reason: str) -> None:
    if not watch.is_watched:  # else its hub says so
      again = "; again to leave at once" if reason == "Ctrl-C" else ""
      print(f"\n{reason}: saving after this step{again}", flush=True)
    watch.stop.request(reason)

  latch.attach(request, watch.fail)
  signals.forbid_notifier()
  if launch.process_id == 0:
    _ending = walltime.stop_before_end(request, timeouts.before_end_s)


@contextlib.contextmanager
def joined(
  config: object = None,
  *,
  timeouts: Timeouts = _DEFAULTS,
  limits: Limits | None = None,
  folder: Path | None = None,
) -> Iterator[Watch]:
  """Inside, this process is one of a run; outside, it has left it in good order.

  An error inside ends all processes with one line; where there are no others, it is
  raised. The arguments are those of `initialize`.

  Example:
    >>> with joined() as watch:
    ...   watch.stop.poll()                  # why to stop, if anybody asked for it
  """
  from jaxscale.cluster.watch.watch import cause_of

  try:
    _begin(config, timeouts, limits, folder)
    assert _watch is not None
    yield _watch
    saved()  # SIGTERM's clock is not to run while others are waited for
    _watch.close()
  except BaseException as e:
    if isinstance(e, SystemExit) and not e.code:  # sys.exit() is no fault
      if _watch is not None:
        _watch.close()
    elif _watch is not None and _watch.is_watched:
      cause, code, follows = cause_of(e)
      if not follows and said(e) is None:
        traceback.print_exc()
        sys.stderr.flush()
      _watch.fail(cause, code, follows, is_said=said(e) is not None)
    raise
  finally:
    _end()


def _end() -> None:
  """Let nothing watch any more, and give the signals back.

  A process of a job is about to end, and keeps them: SIGTERM, which Slurm sends at
  once to what it requeues, must not take away the exit code.
  """
  global _watch, _latch, _ending
  if _ending is not None:
    _ending.set()
  if _latch is not None and not (_watch is not None and _watch.is_watched):
    _latch.close()
  _watch = _latch = _ending = None


@contextlib.contextmanager
def watched() -> Iterator[Watch]:
  """The watch of this run; one that only Ctrl-C stops, if it has not `joined`.

  Of several processes that have met by JAX alone, nobody could stop the others after
  the same step: there a Ctrl-C is Python's.
  """
  if _watch is not None:
    yield _watch
    return
  import jax

  from jaxscale.cluster.watch import signals, watch

  alone = watch.start({}, 0, ["localhost"])
  is_alone = jax.process_count() == 1
  asked = signals.first_interrupt(alone.stop.request) if is_alone else None
  with asked or contextlib.nullcontext():
    yield alone


def saved() -> None:
  """All that can be saved is: nobody need leave without a save any more."""
  if _latch is not None:
    _latch.saved()
