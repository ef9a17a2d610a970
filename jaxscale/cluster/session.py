"""Session: the part of one process in a run, from start to end.

`open_session` detects the launcher (`detect`), connects the process to the others
(`rendezvous`), and starts the watch and the signal handlers (`watch`). At the end it waits
for the others, or after an error ends all processes with one line.
"""

import contextlib
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxscale.cluster import cpu_binding, cpu_settings, detect, environment, pod_secret, walltime
from jaxscale.cluster import gpu_settings as gpu
from jaxscale.cluster.group import Group, connect, invalid_value
from jaxscale.cluster.launch import Launch
from jaxscale.cluster.rendezvous import client, handshake, join, network
from jaxscale.cluster.timeouts import Timeouts
from jaxscale.cluster.watch import signals, watch
from jaxscale.cluster.watch.signals import SignalHandlers, StopRequest
from jaxscale.cluster.watch.watch import Watch, failure_of
from jaxscale.cluster.wire import typed
from jaxscale.errors import ConfigError

_jax_is_initialized = False  # whether JAX has joined the other processes
_was_started = False  # whether this process has had an earlier session
_watch: Watch | None = None
_handlers: SignalHandlers | None = None
_cpus_before: set[int] | None = None  # the CPUs before this session bound the process
_walltime_ended: threading.Event | None = None  # ends the thread of `walltime.before_end`


@contextlib.contextmanager
def open_session(
  config: object = None,
  *,
  timeouts: Timeouts | None = None,
  folder: Path | None = None,
  gpu_settings: bool = True,
) -> Iterator[Watch]:
  """Join the run for the duration of the `with` block.

  At the end, the process waits for the others. An error in the block ends all processes
  with one line; if this is the only process, the error is raised. The arguments are those
  of `initialize`.

  Example:
    >>> with open_session() as watch:
    ...   watch.stop.poll()                  # the request to stop, or None
  """
  try:
    _start(config, timeouts, folder, gpu_settings)
    assert _watch is not None
    yield _watch
    mark_saved()  # the deadline after SIGTERM must not end the wait for the others
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
  """Join the other processes of this run, if there are any.

  Call this before the first use of a JAX device. Afterwards signals ask the run to stop; a
  single process keeps its own signal handlers. `open_session` also waits for the others at
  the end.

  Args:
    config: an object that must be equal in all processes: for a `Config` its settings and
      its code are compared, for other objects the `repr`.
    timeouts: the time limits. None uses the defaults with an infinite `startup_timeout_s`,
      because a program that does not call `Watch.at` never reports that it has started.
    folder: the folder for stack traces of processes that a fault ends.
    gpu_settings: whether to set variables for the GPUs (`cluster/gpu_settings.py`).

  Raises:
    ConfigError: environment variables contradict each other, a process is missing or has a
      different config, or a GPU is missing. All processes that can still be reached raise it.
  """
  _start(config, timeouts, folder, gpu_settings)
  if _watch is not None and not _watch.is_watched:
    _end()  # for a notebook, whose kernel outlives every run; see `current_watch`


def _start(
  config: object, timeouts: Timeouts | None, folder: Path | None, gpu_settings: bool
) -> None:
  global _handlers, _watch, _walltime_ended, _was_started
  num_gpus = detect.visible_gpus(os.environ)
  cpu_settings.keep_memory(num_gpus=num_gpus)  # before there are threads
  timeouts = timeouts or Timeouts(startup_timeout_s=math.inf)
  _handlers = SignalHandlers(grace_s=timeouts.grace_s)
  _handlers.attach(signals.leave_before_start)
  launch = detect.detect(os.environ)
  if launch.note and launch.process_id == 0:
    print(launch.note, flush=True)
  secret = None
  if launch.num_processes == 0:  # a TPU pod whose processes only JAX can detect
    launch, secret = _join_by_jax(launch, timeouts, folder and folder.parent)
  is_alone, gpu_ids, error = launch.num_processes == 1, None, ""
  try:
    to_divide = 0 if is_alone else num_gpus
    gpu_ids = detect.local_device_ids(os.environ, to_divide, launch)
    if problem := environment.gpu_problem(os.environ):
      raise ConfigError(problem)
  except ConfigError as e:
    if is_alone:
      raise
    error = str(e)  # the error may concern this host only, but all processes report it
  if gpu_settings:
    choice = gpu.choose_here(launch, num_gpus, gpu_ids)
    gpu.apply(choice)
    for line in gpu.lines(choice) if launch.process_id == 0 else ():
      print(line, flush=True)
  digests = {} if is_alone else handshake.digests_of(config) | gpu.shared()
  options: dict[str, Any] = {"on_cpu": not num_gpus, "error": error, "secret": secret}
  cpus = cpu_binding.find_cpus(num_gpus, gpu_ids, os.environ)
  options |= {"timeout_s": timeouts.rendezvous_timeout_s, "digests": digests, "cpus": cpus.usable}
  group = client.rendezvous(launch, **options)
  if gpu_settings:
    _bind(cpus, group)
  # A batch job of one process is watched too, since no person sees it hang.
  options = {"watch_alone": launch.kind != "single", "age_s": 0.0 if _was_started else _age_s()}
  options |= {"timeouts": timeouts, "folder": folder}
  this_watch = _watch = watch.start(group.links, group.process_id, group.hosts, **options)
  _was_started = True

  def ask(request: StopRequest) -> None:
    # No step is done before the second poll, which may come after a long compilation.
    if is_alone and request.kind == "interrupt" and this_watch.stop.passed < 2:
      signals.leave_before_start(request)
    if not this_watch.is_watched:  # else the monitor prints the line
      again = "; press it again to stop at once" if request.kind == "interrupt" else ""
      print(f"\n{request}: saving after this step{again}", flush=True)
    this_watch.stop.request(request)

  # From now on signals and the end of the job ask all processes to stop.
  _handlers.attach(ask, this_watch.fail)
  if launch.process_id == 0:
    _walltime_ended = walltime.before_end(
      lambda cause: ask(StopRequest(cause)), timeouts.stop_before_end_s
    )
  if not is_alone:
    _join(launch, group, timeouts, gpu_ids)


def _join(
  launch: Launch, group: client.ProcessGroup, timeouts: Timeouts, gpu_ids: Sequence[int] | None
) -> None:
  """Let JAX join the other processes, and exchange values with them from now on."""
  global _jax_is_initialized
  if not _jax_is_initialized:
    join.join(launch, group, timeouts, gpu_ids)
    _jax_is_initialized = True
  join.check_devices(group)
  connect(Group(group.process_id, tuple(group.hosts), group.value_links, patience_s=None))
  cpu_settings.use_batch_policy()


def _bind(cpus: cpu_binding.Cpus, group: client.ProcessGroup) -> None:
  """Bind this process to CPUs, before JAX and the input pipeline start their threads."""
  global _cpus_before
  binding = cpu_binding.choose(cpus, group.share)
  if binding.cpus is not None:
    _cpus_before = os.sched_getaffinity(0)
    cpu_binding.bind(binding.cpus)
  if binding.line and group.process_id == 0:
    print(f"{binding.line}; disable with --config.gpu_settings=False", flush=True)


def _age_s() -> float:
  """Return the seconds since this process started (proc(5)); 0 if unknown."""
  try:
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started_s = int(stat[19]) / os.sysconf("SC_CLK_TCK")  # field 22, since boot
    return max(time.clock_gettime(time.CLOCK_BOOTTIME) - started_s, 0.0)
  except (OSError, AttributeError):
    return 0.0


def _join_by_jax(launch: Launch, timeouts: Timeouts, workdir: Path | None) -> tuple[Launch, bytes]:
  """Join by JAX's own detection; return the launch with process 0's host, and a secret."""
  global _jax_is_initialized
  import jax

  from jaxscale.cluster.host_collectives import gather_openly

  join.join(launch, None, timeouts, None)
  _jax_is_initialized = True
  # Neither is a secret, and a false host cannot prove that it has the secret.
  mine = [f"{launch.job}-{os.urandom(8).hex()}", network.node_name()]
  try:
    job, host = typed(list[str], gather_openly(mine)[0])
    secret = pod_secret.agree(workdir, jax.process_index(), gather_openly)
  except ConfigError:
    raise
  except (TypeError, ValueError) as e:  # others can write to JAX's connections
    raise invalid_value(e) from None
  own = launch._replace(process_id=jax.process_index(), num_processes=jax.process_count())
  return own._replace(host=host, job=job), secret


def _end() -> None:
  """Stop the watch and restore the signal handlers.

  A process of a job keeps its handlers until it exits: the SIGTERM that Slurm sends on a
  requeue must not change the exit code.
  """
  global _watch, _handlers, _walltime_ended, _cpus_before
  cpu_settings.give_memory_back()
  connect(None)
  if _cpus_before is not None:  # a notebook's process lives on
    cpu_binding.bind(_cpus_before)
    _cpus_before = None
  if _walltime_ended is not None:
    _walltime_ended.set()
  if _handlers is not None and not (_watch is not None and _watch.is_watched):
    _handlers.close()
  _watch = _handlers = _walltime_ended = None


@contextlib.contextmanager
def current_watch() -> Iterator[Watch]:
  """Yield the watch of this session, or outside a session a watch that handles only Ctrl-C.

  If JAX has joined several processes without a session, Ctrl-C raises KeyboardInterrupt,
  since the processes cannot agree on a step to stop after.
  """
  if _watch is not None:
    yield _watch
    return
  import jax

  alone = watch.start({}, 0, ["localhost"])
  is_alone = jax.process_count() == 1
  handler = signals.first_interrupt(alone.stop.request) if is_alone else None
  with handler or contextlib.nullcontext():
    yield alone


def is_job() -> bool:
  """Return whether a launcher has started this process; such processes are watched for faults."""
  return _watch is not None and _watch.is_watched


def mark_saved() -> None:
  """Tell the signal handlers that everything is saved, which ends their deadline."""
  if _handlers is not None:
    _handlers.mark_saved()
