"""The lock on a run's workdir: only the newest run that acquired it may write there.

A run acquires the next number (its fencing token) by creating `workdir/lock/NUMBER`,
which only one process can (O_EXCL: atomic on local file systems, on Lustre, and on NFS
since version 3, open(2)), and removes the number before it. It renews its own by
touching it. A run whose file is gone has been replaced and must write nothing more:
touching is a request to the file server, so no stale cache of a directory can hide
that, and clocks are compared on the server's only.

The check alone cannot stop a run that is suspended between it and the write. What
is committed by a rename is safe all the same: the source of the rename carries the
token in its name, and the successor moves every such source away before it reads
what there is (`Checkpoints`). Then the older run's rename finds nothing.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from jaxscale import cluster
from jaxscale.cluster import requeue
from jaxscale.errors import ConfigError, GiveUpError, invalid, unwritable
from jaxscale.files import read_json, whole_number

RENEW_S = 5.0  # between renewals: one request to the file server
EXPIRE_S = 60.0  # a lock not renewed for so long is free: 12 renewals missed
# A later step of the same Slurm job starts because the one before has failed; a node
# that was lost with it must not cost a minute (3 renewals missed).
EXPIRE_SAME_JOB_S = 15.0
_TRIES = 5  # of a process to see the lock of process 0, a second apart


_OWNER = {"host": str, "pid": int, "job": str, "since": float, "process": str}
_LATEST = 1e11  # seconds since the epoch that have a date, of the year 5138


class LockOwner(NamedTuple):
  """A run, as others see it.

  Attributes:
    host: its name.
    pid: of process 0, as numbered on that host.
    job: as `job_of` gives it; "" for none.
    since: when it acquired the lock, seconds since the epoch, by its own clock.
    process: identifies this process among all others, also after a reboot, in
      containers and where numbers are used again; "" where that is unknown.
  """

  host: str
  pid: int
  job: str
  since: float
  process: str

  def __str__(self) -> str:
    job = f", job {self.job}" if self.job else ""
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
    return f"host {self.host}, pid {self.pid}{job}, since {since}"


def job_of(env: Mapping[str, str]) -> str:
  """The Slurm job, step and restart of this process: "slurm-12.0-r1"; "" if none.

  Of an array task it is "slurm-9_3.0-r1" (srun(1), sbatch(1): SLURM_STEP_ID).
  """
  if not (job := requeue.job_name(env)):
    return ""
  step = f".{env['SLURM_STEP_ID']}" if "SLURM_STEP_ID" in env else ""
  return f"slurm-{job}{step}-r{requeue.restarts(env)}"


def is_restart(job: str, before: str) -> bool:
  """Whether `job` is a later restart of the job `before`, which so has ended.

  Example:
    >>> is_restart("slurm-12.0-r1", "slurm-12.3-r0")
    True
    >>> is_restart("slurm-12.1-r0", "slurm-12.0-r0")
    False
  """
  new, old = job_parts(job), job_parts(before)
  return bool(new and old and new[0] == old[0] and new[1] > old[1])


def job_parts(job: str) -> tuple[str, int] | None:
  """The job without its step, and its restart."""
  found = re.fullmatch(r"(.+?)(?:\.\w+)?-r([0-9]{1,18})", job)
  return (found[1], int(found[2])) if found else None


def is_alive(owner: LockOwner) -> bool | None:
  """Whether its process is there; None if that cannot be known from here."""
  here = _identity(os.getpid())
  if not here or not owner.process or owner.host != socket.gethostname():
    return None
  if owner.process.split()[:2] != here.split()[:2]:
    return None  # another machine, another boot, or another container
  found = _identity(owner.pid)
  if found is None:
    try:
      os.kill(owner.pid, 0)
    except (PermissionError, OverflowError):
      return None  # another user's process that /proc does not show (hidepid)
    except OSError:
      return False
  return found == owner.process


def _identity(pid: int) -> str | None:
  """Boot, namespace and start of a process, by proc(5); None if there is none."""
  try:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = os.readlink("/proc/self/ns/pid")
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
  except OSError:
    return None
  # Field 3 is the state and field 22 the start; the split begins at field 3.
  return None if stat[0] in "ZX" else f"{boot} {namespace} {stat[19]}"


class LockLostError(GiveUpError):
  """Another run has taken over the directory; the message says which."""


class WorkdirLock:
  """The right to write into one directory, renewed by a thread.

  Example:
    >>> import tempfile
    >>> with acquire(Path(tempfile.mkdtemp())) as lock:
    ...   lock.check()    # before whatever must not come from two runs
    ...   lock.token
    1
  """

  def __init__(self, path: Path, owner: LockOwner, renew_s: float = RENEW_S):
    """Renew `path`, which `acquire` has created."""
    self.path, self.owner = path, owner
    self.token = int(path.name)
    self.lost: str | None = None  # why, once it is known
    self._released = threading.Event()
    self._thread = threading.Thread(target=self._renew, args=(renew_s,), daemon=True)
    self._thread.start()

  def check(self) -> None:
    """Return if this run still has the lock.

    Raises:
      LockLostError: it has not.
      OSError: the file system does not say.
    """
    if self.lost is None:
      try:
        os.utime(self.path)
      except OSError as e:
        if e.errno not in (errno.ENOENT, errno.ESTALE):
          raise
        self.lost = self._why_lost()
    if self.lost is not None:
      raise LockLostError(self.lost)

  def release(self) -> None:
    """Give up the lock; the next run need not wait."""
    self._released.set()
    self._thread.join()
    with contextlib.suppress(OSError):
      self.path.rename(self.path.with_name(f"{self.path.name}.released"))

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.release()

  def _renew(self, every_s: float) -> None:
    while not self._released.wait(every_s):
      if why_lost(self):  # not where the file server is away: it may come back
        return

  def _why_lost(self) -> str:
    directory = self.path.parent
    why = "the lock of this run was removed, so another may be writing there; this one"
    with contextlib.suppress(OSError):
      name, token = _newest(directory)
      if token > self.token and (owner := _read(directory / name)):
        why = f"another run has taken over ({owner}); this one ({self.owner})"
    return f"{directory.parent}: {why} writes nothing more"


def acquire(
  workdir: Path, job: str = "", *, log=print, renew_s=RENEW_S, expire_s=EXPIRE_S
) -> WorkdirLock:
  """Acquire the lock on the directory for this process, or report who has it.

  A run that is dead is replaced at once where that can be known: on the same
  machine, or where `job` is a restart of the owner's. Elsewhere it is given
  `expire_s` seconds since its last renewal, and replaced if no other comes.

  Args:
    workdir: of the run; it is there.
    job: as `job_of` gives it.
    log: is called with a line about why this waits.
    renew_s: seconds between renewals.
    expire_s: seconds after which a lock that is not renewed is free.

  Raises:
    ConfigError: a run that is alive has the lock, or it cannot be written.
  """
  directory, host, pid = workdir / "lock", socket.gethostname(), os.getpid()
  me = LockOwner(host, pid, job, time.time(), _identity(pid) or "")
  try:
    directory.mkdir(exist_ok=True)
    while True:
      _server_time(directory)  # writing there makes an NFS client forget its cache
      name, token = _newest(directory)
      if name.isdigit() and (owner := _read(directory / name)):
        _wait_until_free(directory / name, owner, me, log, expire_s)
      path = directory / str(token + 1)
      if _create(path, me):
        break
      time.sleep(0.05)  # another process was faster: look who
    for name, number in _tokens(directory):
      if number <= token:
        (directory / name).unlink(missing_ok=True)
  except OSError as e:
    raise unwritable(workdir, e) from None
  return WorkdirLock(path, me, renew_s)


def acquire_for_all(workdir: Path) -> WorkdirLock | None:
  """`acquire` in process 0; None in the others. All must call it.

  Raises:
    ConfigError: in all, as `acquire` in process 0, or because the directory of
      another process is not the same.
  """
  lock, error = None, None
  if cluster.is_leader():
    try:
      lock = acquire(workdir, job_of(os.environ))
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
    why = f"is not shared: {blind[0]}{others} does not see lock/{newest[0]}, which "
    why += f"process 0 on {newest[1]['host']} wrote there"
    raise invalid("--workdir", str(workdir), why, "use a directory that all nodes mount")
  return lock


def _is_seen(directory: Path, name: str, owner: LockOwner) -> bool:
  """Return whether this process's directory has the lock that process 0 created."""
  for attempt in range(_TRIES):
    time.sleep(min(attempt, 1))
    with contextlib.suppress(OSError):
      # Asks the server, so that an NFS client forgets that there was no such directory.
      directory.mkdir(parents=True, exist_ok=True)
      _server_time(directory)
    with contextlib.suppress(OSError):
      if _read(directory / name) == owner:
        return True
  return False


def check_for_all(lock: WorkdirLock | None) -> None:
  """`WorkdirLock.check` in process 0, for all of them; all must call it.

  Raises:
    LockLostError: in all.
  """
  if why := cluster.from_leader(why_lost(lock)):
    raise LockLostError(why)


def running(workdir: Path) -> LockOwner | None:
  """The run that holds the lock of a workdir; None: none that is alive.

  Of a run on another host its last renewal decides, by the server's clock.

  Raises:
    OSError: the directory cannot be written, so nobody knows that clock.
  """
  directory = workdir / "lock"
  if not directory.is_dir():
    return None
  name, _ = _newest(directory)
  owner = _read(directory / name) if name.isdigit() else None
  if owner is None or (is_there := is_alive(owner)) is False:
    return None
  with contextlib.suppress(FileNotFoundError):
    age = _server_time(directory) - (directory / name).stat().st_mtime
    return owner if is_there or age < EXPIRE_S else None
  return None


def why_lost(lock: WorkdirLock | None) -> str | None:
  """What `WorkdirLock.check` raises, if the lock is lost; None: there is no lock."""
  if lock is None:
    return None
  # Of an error of the file system the write itself will say what is wrong.
  with contextlib.suppress(OSError, LockLostError):
    lock.check()
  return lock.lost


def is_held(lock: WorkdirLock | None) -> bool:
  """Whether a file may be written: there is no lock, or it is ours."""
  return why_lost(lock) is None


def _wait_until_free(path: Path, owner: LockOwner, me: LockOwner, log, expire_s: float):
  """Return once the owner of `path` counts as dead.

  Raises:
    ConfigError: it is alive.
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
      return  # it has left, or another one was faster
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
  if other_job and other_job[0].startswith("slurm-"):
    stop = f"scancel {other_job[0].removeprefix('slurm-')}"
  fix = f"wait for its end, end it ({stop}), or use another --workdir"
  raise ConfigError(f"--workdir={workdir}: another run is writing there ({owner}); {fix}")


def _read(path: Path) -> LockOwner | None:
  """Who has or had it; None if it is gone."""
  if not path.exists():
    return None
  owner = read_json(path, _OWNER)
  if not owner or not 0 <= owner["since"] < _LATEST:  # created and not yet written
    return LockOwner("unknown", 0, "", time.time(), "")
  return LockOwner(**{name: owner[name] for name in _OWNER})


def _newest(directory: Path) -> tuple[str, int]:
  """The file of the highest token ever acquired, and the token; "" and 0: none."""
  return max(_tokens(directory), key=lambda t: t[1], default=("", 0))


def _tokens(directory: Path) -> list[tuple[str, int]]:
  names = os.listdir(directory)
  found = [(name, whole_number(name.removesuffix(".released"))) for name in names]
  # Where a number is both held and released, it is held no more.
  return sorted(((n, t) for n, t in found if t is not None), key=lambda t: -len(t[0]))


def _create(path: Path, owner: LockOwner) -> bool:
  """Whether this process was the one to create it."""
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
  path.unlink()  # others have come and gone while this one was slow
  return False


def _server_time(directory: Path) -> float:
  """Now, by the clock that stamps the files of this directory."""
  path = directory / f".clock-{socket.gethostname()}-{os.getpid()}"
  path.touch()
  try:
    return path.stat().st_mtime
  finally:
    path.unlink(missing_ok=True)
