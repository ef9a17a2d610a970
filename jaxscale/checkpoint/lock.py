"""Lock on a run's workdir: only the newest run that acquired it may write there.

A run acquires the next number (its fencing token) by creating `workdir/lock/NUMBER`, which
only one process can do (O_EXCL is atomic on local file systems, on Lustre, and on NFS since
version 3, see open(2)), and removes the previous number. The run renews its lock by touching
the file. A run whose file is gone has been replaced and must not write any more. Touching is
a request to the file server, so a stale directory cache cannot hide this, and only the
server's clock matters.

The check alone cannot stop a run that is suspended between the check and the write. Commits
by rename are safe nevertheless: the name of the source has the token, and the successor
moves every such source away before it lists the checkpoints (`Checkpoints`). The rename of
the older run then finds no source.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import socket
import stat
import threading
import time
from pathlib import Path
from typing import NamedTuple

from jaxscale import cluster
from jaxscale.cluster import schedulers
from jaxscale.cluster.rendezvous.network import namespace
from jaxscale.errors import ConfigError, GiveUpError, invalid, printable, unwritable
from jaxscale.files import read_json, whole_number
from jaxscale.owners import user_name

RENEW_S = 5.0  # between renewals, each of which is one request to the file server
EXPIRE_S = 60.0  # A lock without renewal for so long is free: 12 renewals were missed.
# A later step of the same job starts because the previous one failed, maybe with its
# node. It should not wait a minute, so 3 missed renewals are enough.
EXPIRE_SAME_JOB_S = 15.0
_TRIES = 5  # a second apart, for other processes to see the lock of process 0


_OWNER = {"host": str, "pid": int, "job": str, "since": float, "process": str}
_LATEST = 1e11  # seconds since 1970; later times have no date in Python (year 5138)


class LockOwner(NamedTuple):
  """Owner of a lock, as other runs see it.

  Attributes:
    host: the host name.
    pid: the process id of process 0 on that host.
    job: the scheduler's job with its step and restart, such as "slurm-12.0-r1"; "" without a job.
    since: the time of acquiring the lock, in seconds since 1970 by the owner's clock.
    process: a unique id of the process, also across reboots, containers and reused process
      ids; "" if it is unknown.
  """

  host: str
  pid: int
  job: str
  since: float
  process: str

  def __str__(self) -> str:
    job = f", job {self.job}" if self.job else ""
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
    return printable(f"host {self.host}, pid {self.pid}{job}, since {since}")


def is_restart(job: str, before: str) -> bool:
  """Return whether `job` is a later restart of the job `before`, which has then ended.

  Example:
    >>> is_restart("slurm-12.0-r1", "slurm-12.3-r0")
    True
    >>> is_restart("slurm-12.1-r0", "slurm-12.0-r0")
    False
  """
  new, old = job_parts(job), job_parts(before)
  return bool(new and old and new[0] == old[0] and new[1] > old[1])


def job_parts(job: str) -> tuple[str, int] | None:
  """Return the job without its step, and its restart count."""
  match = re.fullmatch(r"(.+?)(?:\.\w+)?-r([0-9]{1,18})", job)
  return (match[1], int(match[2])) if match else None


def is_alive(owner: LockOwner) -> bool | None:
  """Return whether the owner's process is alive; None if this host cannot know."""
  here = _identity(os.getpid())
  if not here or not owner.process or owner.host != socket.gethostname():
    return None
  if owner.process.split()[:2] != here.split()[:2]:
    return None  # on another machine, after another boot, or in another container
  identity = _identity(owner.pid)
  if identity is None:
    try:
      os.kill(owner.pid, 0)
    except (PermissionError, OverflowError):
      return None  # /proc may hide the processes of other users (hidepid).
    except OSError:
      return False
  return identity == owner.process


def _identity(pid: int) -> str | None:
  """Return boot, namespace and start time of a process, see proc(5); None if it is gone."""
  try:
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
  except OSError:
    return None
  # After the split, index 0 is field 3, the state, and index 19 is field 22, the start time.
  return None if stat[0] in "ZX" else f"{namespace('pid')} {stat[19]}"


class LockLostError(GiveUpError):
  """The workdir was taken over by another run, which the message identifies."""


class WorkdirLock(contextlib.AbstractContextManager["WorkdirLock"]):
  """Right to write to a workdir, renewed by a thread.

  Example:
    >>> import tempfile
    >>> with acquire(Path(tempfile.mkdtemp())) as lock:
    ...   lock.check()    # before any write that must come from only one run
    ...   lock.token
    1
  """

  def __init__(self, path: Path, owner: LockOwner, renew_s: float = RENEW_S):
    """Hold the lock file `path`, which `acquire` has created."""
    self.path, self.owner = path, owner
    self.token = int(path.name)
    self.lost: str | None = None  # the reason, once the lock is known to be lost
    self._released = threading.Event()
    self._thread = threading.Thread(target=self._renew, args=(renew_s,), daemon=True)
    self._thread.start()

  def check(self) -> None:
    """Check that this run still has the lock.

    Raises:
      LockLostError: the run has lost the lock.
      OSError: the file system does not answer.
    """
    if self.lost is None:
      try:
        os.utime(self.path, follow_symlinks=False)
      except OSError as e:
        if e.errno not in (errno.ENOENT, errno.ESTALE):
          raise
        self.lost = self._why_lost()
    if self.lost is not None:
      raise LockLostError(self.lost)

  def release(self) -> None:
    """Release the lock, so that the next run need not wait."""
    self._released.set()
    self._thread.join()
    with contextlib.suppress(OSError):
      self.path.rename(self.path.with_name(f"{self.path.name}.released"))

  def __exit__(self, *_):
    self.release()

  def _renew(self, every_s: float) -> None:
    while not self._released.wait(every_s):
      if lost_reason(self):  # An unreachable file server may come back.
        return

  def _why_lost(self) -> str:
    directory = self.path.parent
    problem = "the lock of this run was removed, so another run may be writing; this run"
    with contextlib.suppress(OSError):
      name, token = _newest(directory)
      if token > self.token and (owner := _read(directory / name)):
        problem = f"another run has taken over ({owner}); this run ({self.owner})"
    return f"{directory.parent}: {problem} stops writing"


def acquire(
  workdir: Path, job: str = "", *, log=print, renew_s=RENEW_S, expire_s=EXPIRE_S
) -> WorkdirLock:
  """Acquire the lock on a workdir for this process, or report its owner.

  A run that is known to be dead is replaced at once: on the same machine, or if `job` is a
  restart of the owner's job. Otherwise the owner's lock expires `expire_s` seconds after its
  last renewal, unless it is renewed again.

  Args:
    workdir: the run's workdir, which exists.
    job: the job of this process, as in `LockOwner`.
    log: a function that is called with a line about the reason to wait.
    renew_s: the seconds between renewals.
    expire_s: the seconds without renewal after which a lock is free.

  Raises:
    ConfigError: a live run has the lock, or the lock cannot be written, or any user could
      write to it.
  """
  directory, host, pid = workdir / "lock", socket.gethostname(), os.getpid()
  me = LockOwner(host, pid, job, time.time(), _identity(pid) or "")
  try:
    directory.mkdir(exist_ok=True)
    _check(directory)
    while True:
      _server_time(directory)  # A write makes an NFS client drop its directory cache.
      name, token = _newest(directory)
      if name.isdigit() and (owner := _read(directory / name)):
        _wait_until_free(directory / name, owner, me, log, expire_s)
      path = directory / str(token + 1)
      if _create(path, me):
        break
      time.sleep(0.05)  # Another process was faster; check its lock.
    for name, number in _tokens(directory):
      if number <= token:
        (directory / name).unlink(missing_ok=True)
  except OSError as e:
    raise unwritable(workdir, e) from None
  return WorkdirLock(path, me, renew_s)


def acquire_for_all(workdir: Path) -> WorkdirLock | None:
  """Call `acquire` in process 0 and return None in the others; all must call it.

  Raises:
    ConfigError: in all processes, if `acquire` fails in process 0, or if another process
      has a different directory at this path.
  """
  lock, error = None, None
  if cluster.is_leader():
    try:
      lock = acquire(workdir, str(schedulers.current_job() or ""))
    except ConfigError as e:
      error = str(e)
  mine = lock and (lock.path.name, lock.owner._asdict())
  error, newest = cluster.from_leader([error, mine])
  if error:
    raise ConfigError(error)
  is_seen = _is_seen(workdir / "lock", newest[0], LockOwner(**newest[1]))
  hosts = cluster.gather("" if is_seen else socket.gethostname())
  if blind := [f"process {i} on {host}" for i, host in enumerate(hosts) if host]:
    if lock:
      lock.release()
    others = f" and {len(blind) - 1} more" if len(blind) > 1 else ""
    problem = f"is not shared: {blind[0]}{others} does not see lock/{newest[0]}, which "
    problem += f"process 0 on {newest[1]['host']} wrote"
    raise invalid("--workdir", str(workdir), problem, "use a directory that all nodes mount")
  return lock


def _is_seen(directory: Path, name: str, owner: LockOwner) -> bool:
  """Return whether this process's directory has the lock that process 0 created."""
  for attempt in range(_TRIES):
    time.sleep(min(attempt, 1))
    with contextlib.suppress(OSError):
      # This request makes an NFS client forget that the directory did not exist.
      directory.mkdir(parents=True, exist_ok=True)
      _server_time(directory)
    with contextlib.suppress(OSError):
      if _read(directory / name) == owner:
        return True
  return False


def check_for_all(lock: WorkdirLock | None) -> None:
  """Call `WorkdirLock.check` in process 0; all processes must call it.

  Raises:
    LockLostError: in all processes, if the lock is lost.
  """
  if problem := cluster.from_leader(lost_reason(lock)):
    raise LockLostError(problem)


def running(workdir: Path) -> LockOwner | None:
  """Return the live run that holds the lock of a workdir; None if there is none.

  A run on another host counts as alive by its last renewal, on the server's clock.

  Raises:
    ConfigError: any user could write to the lock.
    OSError: the directory cannot be written, so the server's clock is unknown.
  """
  directory = workdir / "lock"
  if not directory.is_dir():
    return None
  _check(directory)
  name, _ = _newest(directory)
  owner = _read(directory / name) if name.isdigit() else None
  if owner is None or (is_there := is_alive(owner)) is False:
    return None
  with contextlib.suppress(FileNotFoundError):
    age = _server_time(directory) - (directory / name).stat().st_mtime
    return owner if is_there or age < EXPIRE_S else None
  return None


def lost_reason(lock: WorkdirLock | None) -> str | None:
  """Return the message of `WorkdirLock.check` if the lock is lost; None if it is held."""
  if lock is None:
    return None
  # If the file system fails, the write itself will report the error.
  with contextlib.suppress(OSError, LockLostError):
    lock.check()
  return lock.lost


def is_held(lock: WorkdirLock | None) -> bool:
  """Return whether files may be written: there is no lock, or this run holds it."""
  return lost_reason(lock) is None


def _wait_until_free(path: Path, owner: LockOwner, me: LockOwner, log, expire_s: float):
  """Return once the owner of `path` counts as dead.

  Raises:
    ConfigError: the owner is alive.
  """
  is_there = is_alive(owner)
  if is_restart(me.job, owner.job) or is_there is False:
    return
  workdir, other_job = path.parent.parent, job_parts(owner.job)
  if other_job and job_parts(me.job) == other_job and me.job != owner.job:
    expire_s = min(expire_s, EXPIRE_SAME_JOB_S)
  seen: float | None = None
  while True:
    try:
      renewed = path.stat().st_mtime
      age = _server_time(path.parent) - renewed
    except FileNotFoundError:
      return  # The owner has released it, or another run was faster.
    if age >= expire_s:
      return
    if is_there or (seen is not None and renewed > seen):
      break
    if seen is None:
      seen = renewed
      wait = f"waiting up to {expire_s - age:.0f} s for it to be renewed again"
      log(f"{workdir}: locked by {owner}, last renewed {age:.0f} s ago; {wait}")
    time.sleep(min(1.0, expire_s / 20))
  stop = f"kill {owner.pid} on {owner.host}"
  scheduler, _, job = (other_job or ("", 0))[0].partition("-")
  if scheduler in schedulers.SCHEDULERS:
    stop = f"{schedulers.SCHEDULERS[scheduler].CANCEL} {job}"
  fix = f"wait until it ends, stop it ({stop}), or use another --workdir"
  raise ConfigError(f"--workdir={workdir}: another run is writing to it ({owner}); {fix}")


def _read(path: Path) -> LockOwner | None:
  """Return the owner in a lock file; None if the file is gone."""
  if not path.exists():
    return None
  owner = read_json(path, _OWNER)
  if not owner or not 0 <= owner["since"] < _LATEST:  # The file may not be written yet.
    return LockOwner("unknown", 0, "", time.time(), "")
  return LockOwner(**{name: owner[name] for name in _OWNER})


def _newest(directory: Path) -> tuple[str, int]:
  """Return the file of the highest token ever acquired, and the token; "" and 0 if none."""
  return max(_tokens(directory), key=lambda t: t[1], default=("", 0))


def _tokens(directory: Path) -> list[tuple[str, int]]:
  names = os.listdir(directory)
  tokens = [(name, whole_number(name.removesuffix(".released"))) for name in names]
  # If a number is both held and released, it is released.
  return sorted(((n, t) for n, t in tokens if t is not None), key=lambda t: -len(t[0]))


def _create(path: Path, owner: LockOwner) -> bool:
  """Create a lock file; return False if another process already did."""
  try:
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
  except FileExistsError:
    return False
  try:
    with open(descriptor, "w") as file:
      json.dump(owner._asdict(), file)
  except OSError:
    path.unlink()
    raise
  if _newest(path.parent)[0] == path.name:
    return True
  path.unlink()  # A later lock exists, as this process was slow.
  return False


def _check(directory: Path) -> None:
  """Raise ConfigError if another user prepared the directory so that anybody can write to it."""
  status = directory.lstat()
  is_open = stat.S_ISLNK(status.st_mode) or status.st_mode & stat.S_IWOTH
  if is_open and status.st_uid not in (os.geteuid(), 0):
    owner = user_name(status.st_uid)
    problem = f"belongs to another user ({owner}) and is a link or open to all"
    raise invalid(str(directory), ..., problem, "remove it, or use another --workdir")


def _server_time(directory: Path) -> float:
  """Return the current time by the clock that stamps files in this directory."""
  # Nobody can have prepared a link of this name, and O_EXCL would not follow it.
  path = directory / f".clock-{secrets.token_hex(8)}"
  number = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
  try:
    return os.fstat(number).st_mtime
  finally:
    os.close(number)
    path.unlink(missing_ok=True)
