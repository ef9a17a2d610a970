"""Who may write into a run's directory: one run, the newest that took it.

A run takes the next number (its token) by creating `workdir/lease/NUMBER`, which
only one process can (O_EXCL: atomic on local file systems, on Lustre, and on NFS
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
from collections.abc import Callable
from pathlib import Path

from jaxscale import cluster
from jaxscale.checkpoint.lock_owner import (
  Holder,
  is_restart,
  job_parts,
  lives,
  this_process,
)
from jaxscale.errors import ConfigError, GiveUpError

RENEW_S = 5.0  # between renewals: one request to the file server
LAPSE_S = 60.0  # a lease not renewed for so long is free: 12 renewals missed
# A later step of the same Slurm job asks because the one before has failed; a node
# that was lost with it must not cost a minute (3 renewals missed).
LAPSE_SAME_JOB_S = 15.0


class LostError(GiveUpError):
  """Another run has taken over the directory; the message says which."""


class Lease:
  """The right to write into one directory, renewed by a thread.

  Example:
    >>> lease = take(Path("runs/x"))                        # doctest: +SKIP
    >>> lease.check()    # before whatever must not come from two runs
    >>> lease.release()
  """

  def __init__(self, path: Path, holder: Holder, renew_s: float = RENEW_S):
    """Hold `path`, which `take` has created."""
    self.path, self.holder = path, holder
    self.token = int(path.name)
    self.lost: str | None = None  # why, once it is known
    self._left = threading.Event()
    self._thread = threading.Thread(target=self._renew, args=(renew_s,), daemon=True)
    self._thread.start()

  def check(self) -> None:
    """Return if this run still holds the directory.

    Raises:
      LostError: it does not.
      OSError: the file system does not say.
    """
    if self.lost is None:
      try:
        os.utime(self.path)
      except OSError as e:
        if e.errno not in (errno.ENOENT, errno.ESTALE):
          raise
        self.lost = self._why()
    if self.lost is not None:
      raise LostError(self.lost)

  def release(self) -> None:
    """Let go of the directory; the next run need not wait."""
    self._left.set()
    self._thread.join()
    with contextlib.suppress(OSError):
      self.path.rename(self.path.with_name(f"{self.path.name}.left"))

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.release()

  def _renew(self, every_s: float) -> None:
    while not self._left.wait(every_s):
      try:
        self.check()
      except LostError:
        return
      except OSError:
        continue  # the file server may come back; `check` tells before a commit

  def _why(self) -> str:
    workdir = self.path.parent.parent
    newer = None
    with contextlib.suppress(OSError):
      name, token = _last(self.path.parent)
      newer = _read(self.path.parent / name) if token > self.token else None
    if newer is None:
      return (
        f"{workdir}: the lease of this run was removed, so another may be writing "
        "there; this one writes nothing more"
      )
    return (
      f"{workdir}: another run has taken over ({newer}); this one "
      f"({self.holder}) writes nothing more"
    )


def take(
  workdir: Path,
  job: str = "",
  *,
  say: Callable[[str], None] = print,
  renew_s: float = RENEW_S,
  lapse_s: float = LAPSE_S,
) -> Lease:
  """Take the directory for this process, or say who has it.

  A run that is dead is replaced at once where that can be known: on the same
  machine, or where `job` is a restart of the holder's. Elsewhere it is given
  `lapse_s` seconds since its last renewal, and replaced if no other comes.

  Args:
    workdir: of the run; it is there.
    job: as `holder.job_of` gives it.
    say: is told why this waits.
    renew_s: seconds between renewals.
    lapse_s: seconds after which a lease that is not renewed is free.

  Raises:
    ConfigError: a run that lives holds it, or it cannot be written.
  """
  directory, me = workdir / "lease", this_process(job)
  try:
    directory.mkdir(exist_ok=True)
    while True:
      token, before = _newest(directory)
      if before is not None:
        _outlive(directory / str(token), before, me, say, lapse_s)
      path = directory / str(token + 1)
      if _create(path, me):
        break
      time.sleep(0.05)  # somebody else was faster: look who
    for name, number in _tokens(directory):
      if number < token + 1:
        (directory / name).unlink(missing_ok=True)
  except OSError as e:
    raise ConfigError(
      f"--workdir={workdir}: cannot be written ({e.strerror}), use another one"
    ) from None
  return Lease(path, me, renew_s)


def take_for_all(workdir: Path, job: str = "") -> Lease | None:
  """`take` in process 0; None in the others, which are told if it fails.

  All must call it.

  Raises:
    ConfigError: in all, as `take` in process 0.
  """
  lease, refusal = None, None
  if cluster.is_leader():
    try:
      lease = take(workdir, job)
    except ConfigError as e:
      refusal = str(e)
  if refusal := cluster.from_leader(refusal):
    raise ConfigError(refusal)
  return lease


def check_for_all(lease: Lease | None) -> None:
  """`Lease.check` in process 0, for all of them; all must call it.

  Raises:
    LostError: in all.
  """
  if why := cluster.from_leader(why_lost(lease)):
    raise LostError(why)


def _outlive(
  path: Path, before: Holder, me: Holder, say: Callable[[str], None], lapse_s: float
) -> None:
  """Return once the holder of `path` counts as dead.

  Raises:
    ConfigError: it lives.
  """
  if is_restart(me.job, before.job):
    return
  is_there = lives(before)
  if is_there is False:
    return
  mine, others = job_parts(me.job), job_parts(before.job)
  if mine and mine == others and me.job != before.job:
    lapse_s = min(lapse_s, LAPSE_SAME_JOB_S)
  seen: float | None = None
  while True:
    try:
      renewed, now = path.stat().st_mtime, _server_time(path.parent)
    except FileNotFoundError:
      return  # it has left, or another one was faster
    age = now - renewed
    if age >= lapse_s:
      return
    if is_there or (seen is not None and renewed > seen):
      break
    if seen is None:
      seen = renewed
      say(
        f"{path.parent.parent}: held by {before}, last seen {age:.0f} s ago; waiting "
        f"up to {lapse_s - age:.0f} s for it to be seen again"
      )
    time.sleep(min(1.0, lapse_s / 20))
  stop = f"kill {before.pid} on {before.host}"
  if others and others[0].startswith("slurm-"):
    stop = f"scancel {others[0].removeprefix('slurm-')}"
  raise ConfigError(
    f"--workdir={path.parent.parent}: another run is writing there ({before}); wait "
    f"for its end, end it ({stop}), or use another --workdir"
  )


def _newest(directory: Path) -> tuple[int, Holder | None]:
  """The highest token ever taken there, and who holds it, if somebody does."""
  _server_time(directory)  # writing there makes an NFS client forget what it knew
  name, token = _last(directory)
  if not name.isdigit():
    return token, None
  return token, _read(directory / name)


def _read(path: Path) -> Holder | None:
  """Who holds or held it; None if it is gone."""
  try:
    return Holder(**json.loads(path.read_text()))
  except FileNotFoundError:
    return None
  except (ValueError, TypeError):  # created and not yet written
    return Holder("unknown", 0, "", time.time(), "")


def _last(directory: Path) -> tuple[str, int]:
  """The file of the highest token, and the token; "" and 0 if there is none."""
  return max(_tokens(directory), key=lambda t: t[1], default=("", 0))


def _tokens(directory: Path) -> list[tuple[str, int]]:
  found = [(n, re.fullmatch(r"(\d+)(\.left)?", n)) for n in os.listdir(directory)]
  # Where a number is both held and left, it is held no more.
  return sorted(((n, int(m[1])) for n, m in found if m), key=lambda t: len(t[0]))[::-1]


def _create(path: Path, holder: Holder) -> bool:
  """Whether this process was the one to create it."""
  try:
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
  except FileExistsError:
    return False
  try:
    with open(descriptor, "w") as file:
      json.dump(holder._asdict(), file)
  except OSError:
    path.unlink()
    raise
  if (
    _last(path.parent)[0] != path.name
  ):  # others have come and gone while this one was slow
    path.unlink()
    return False
  return True


def _server_time(directory: Path) -> float:
  """Now, by the clock that stamps the files of this directory."""
  path = directory / f".clock-{socket.gethostname()}-{os.getpid()}"
  path.touch()
  try:
    return path.stat().st_mtime
  finally:
    path.unlink(missing_ok=True)


def held(lease: Lease | None) -> bool:
  """Whether a file may be written: there is no lease to mind, or it is ours."""
  return why_lost(lease) is None


def why_lost(lease: Lease | None) -> str | None:
  """What `Lease.check` raises, if the lease is lost."""
  if lease is not None:
    try:
      lease.check()
    except LostError as e:
      return str(e)
    except OSError:
      return None  # the write itself will say what is wrong
  return None
