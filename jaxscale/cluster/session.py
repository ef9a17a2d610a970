"""One process's part in a run, from start to end.

`open_session` finds out how this process was started (`detect`), lets it find the
others (`rendezvous`), starts to watch them and handles signals (`watch`), and at the
end leaves in good order, or ends all processes with one line.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxscale.cluster.barrier import from_leader
from jaxscale.cluster.timeouts import Timeouts
from jaxscale.errors import ConfigError

# A command that only prints its --help needs none of this.
if TYPE_CHECKING:
  from jaxscale.cluster.detect.launch import Launch
  from jaxscale.cluster.gpu_settings import Choice
  from jaxscale.cluster.watch.signals import SignalHandlers
  from jaxscale.cluster.watch.watch import Watch

_jax_is_initialized = False  # whether JAX knows of the other processes
_was_started = False  # whether this is not the first session of this process
_watch: Watch | None = None
_handlers: SignalHandlers | None = None
_walltime_ended: threading.Event | None = None  # ends the thread that waits for it


@contextlib.contextmanager
def open_session(
  config: object = None,
  *,
  timeouts: Timeouts | None = None,
  folder: Path | None = None,
  gpu_settings: bool = True,
) -> Iterator[Watch]:
  """Inside, this process is one of a run; outside, it has left it in good order.

  An error inside ends all processes with one line; where there are no others, it is
  raised. The arguments are those of `initialize`.

  Example:
    >>> with open_session() as watch:
    ...   watch.stop.poll()                  # why to stop, if anybody asked for it
  """
  from jaxscale.cluster.watch.watch import failure_of

  try:
    _start(config, timeouts, folder, gpu_settings)
    assert _watch is not None
    yield _watch
    mark_saved()  # SIGTERM's clock must not run while others are waited for
    _watch.close()
  except BaseException as e:
    if isinstance(e, SystemExit) and not e.code:  # sys.exit() is not a fault
      if _watch is not None:
        _watch.close()
    elif _watch is not None and _watch.is_watched:
      failure = failure_of(e)
      if not failure.is_consequence and not failure.is_user_error:
        traceback.print_exc()
        sys.stderr.flush()
      _watch.fail(*failure)
    raise
  finally:
    _end()


def initialize(
  config: object = None,
  *,
  timeouts: Timeouts | None = None,
  folder: Path | None = None,
  gpu_settings: bool = True,
) -> None:
  """Join the other processes of this run, if any; `open_session` also ends well.

  Call it before anything asks JAX for devices. From here on signals ask the run to
  stop; a process that is alone keeps its own.

  Args:
    config: what all processes must be given alike: the settings and own code of a
      `Config` are compared, of anything else the `repr`.
    timeouts: None: the defaults, but a program that never notes by `Watch.at` where
      it is may stay there for as long as it likes.
    folder: for the stacks of processes that a fault ends.
    gpu_settings: choose variables for the GPUs here (`cluster/gpu_settings.py`).

  Raises:
    ConfigError: the variables contradict each other, a process is missing or runs
      something else, a GPU is missing, …: one line, in all processes that can get it.
  """
  _start(config, timeouts, folder, gpu_settings)
  if _watch is not None and not _watch.is_watched:
    _end()  # a notebook, whose kernel outlives every run: see `current_watch`


def _start(
  config: object, timeouts: Timeouts | None, folder: Path | None, gpu_settings: bool
) -> None:
  global _handlers, _watch, _walltime_ended, _jax_is_initialized, _was_started
  from jaxscale.cluster import cpu_settings, detect
  from jaxscale.cluster import gpu_settings as gpu
  from jaxscale.cluster.detect import walltime
  from jaxscale.cluster.rendezvous import client, handshake, join
  from jaxscale.cluster.watch import signals, watch
  from jaxscale.cluster.watch.stop_consensus import StopRequest

  num_gpus = detect.visible_gpus(os.environ)
  cpu_settings.keep_memory(num_gpus=num_gpus)  # before there are threads
  timeouts = timeouts or Timeouts(startup_timeout_s=math.inf)
  _handlers = signals.SignalHandlers(grace_s=timeouts.grace_s)
  _handlers.attach(signals.leave_before_start)
  launch = detect.detect(os.environ)
  if launch.note and launch.process_id == 0:
    print(launch.note, flush=True)
  secret = None
  if launch.num_processes == 0:  # a TPU pod that only JAX knows
    launch = _join_by_jax(launch, timeouts)
    secret = bytes.fromhex(from_leader(secrets.token_hex(32)))
  is_alone, gpu_ids, error = launch.num_processes == 1, None, ""
  try:
    to_divide = 0 if is_alone else num_gpus
    gpu_ids = detect.local_device_ids(os.environ, to_divide, launch)
  except ConfigError as e:
    error = str(e)  # it may be this host's alone: all are to know it
  if gpu_settings:
    _set_variables(gpu.choose_here(launch, num_gpus, gpu_ids), launch)
  digests = {} if is_alone else handshake.digests_of(config) | gpu.shared()
  options: dict[str, Any] = {"on_cpu": not num_gpus, "error": error, "secret": secret}
  options |= {"timeout_s": timeouts.rendezvous_timeout_s, "digests": digests}
  group = client.rendezvous(launch, **options)
  # A job that nobody looks at is watched even if it is one process.
  options = {"watch_alone": launch.kind != "single", "age_s": 0.0 if _was_started else _age_s()}
  options |= {"timeouts": timeouts, "folder": folder}
  this_watch = _watch = watch.start(group.links, group.process_id, group.hosts, **options)
  _was_started = True

  def ask(request: StopRequest) -> None:
    # Nothing is trained before a second poll, which may be a long compilation away.
    if is_alone and request.kind == "interrupt" and this_watch.stop.passed < 2:
      signals.leave_before_start(request)
    if not this_watch.is_watched:  # else its monitor prints it
      again = "; again to leave at once" if request.kind == "interrupt" else ""
      print(f"\n{request}: saving after this step{again}", flush=True)
    this_watch.stop.request(request)

  # From here on signals, and the end of the job, ask all processes to stop.
  _handlers.attach(ask, this_watch.fail)
  signals.disable_xla_notifier()
  if launch.process_id == 0:
    _walltime_ended = walltime.before_end(
      lambda cause: ask(StopRequest(cause)), timeouts.stop_before_end_s
    )
  if not is_alone:
    if not _jax_is_initialized:
      join.join(launch, group, timeouts, local_device_ids=gpu_ids)
      _jax_is_initialized = True
    join.check_devices(group)
    cpu_settings.use_batch_policy()


def _set_variables(choice: Choice, launch: Launch) -> None:
  """Set what fits this process's GPUs; process 0 prints it."""
  from jaxscale.cluster import gpu_settings

  gpu_settings.apply(choice)
  for line in gpu_settings.lines(choice) if launch.process_id == 0 else ():
    print(line, flush=True)


def _age_s() -> float:
  """Seconds since this process started, by proc(5); 0 where that does not say it."""
  try:
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started_s = int(stat[19]) / os.sysconf("SC_CLK_TCK")  # field 22, since boot
    return max(time.clock_gettime(time.CLOCK_BOOTTIME) - started_s, 0.0)
  except (OSError, AttributeError):
    return 0.0


def _join_by_jax(launch: Launch, timeouts: Timeouts) -> Launch:
  """Join where JAX alone knows the others; then all know where to connect."""
  global _jax_is_initialized
  import jax

  from jaxscale.cluster.rendezvous import join, network

  join.join(launch, None, timeouts)
  _jax_is_initialized = True
  own = launch._replace(process_id=jax.process_index(), num_processes=jax.process_count())
  job = from_leader(f"{launch.job}-{os.urandom(8).hex()}")
  return own._replace(host=from_leader(network.node_name()), job=job)


def _end() -> None:
  """Stop watching, and restore the signals.

  A process of a job is about to end, and keeps its handlers: SIGTERM, which Slurm
  sends at once to what it requeues, must not take away the exit code.
  """
  global _watch, _handlers, _walltime_ended
  from jaxscale.cluster import cpu_settings

  cpu_settings.give_memory_back()
  if _walltime_ended is not None:
    _walltime_ended.set()
  if _handlers is not None and not (_watch is not None and _watch.is_watched):
    _handlers.close()
  _watch = _handlers = _walltime_ended = None


@contextlib.contextmanager
def current_watch() -> Iterator[Watch]:
  """The watch of this session; without one, a watch that only Ctrl-C stops.

  Of several processes that JAX alone has joined, nobody could stop the others after
  the same step: there a Ctrl-C is Python's.
  """
  if _watch is not None:
    yield _watch
    return
  import jax

  from jaxscale.cluster.watch import signals, watch

  alone = watch.start({}, 0, ["localhost"])
  is_alone = jax.process_count() == 1
  handler = signals.first_interrupt(alone.stop.request) if is_alone else None
  with handler or contextlib.nullcontext():
    yield alone


def is_job() -> bool:
  """Whether a launcher has started this process, which is then watched."""
  return _watch is not None and _watch.is_watched


def mark_saved() -> None:
  """All that can be saved is: no process leaves without a save any more."""
  if _handlers is not None:
    _handlers.mark_saved()
