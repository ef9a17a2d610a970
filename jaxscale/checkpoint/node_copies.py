"""Local copies of the state in a folder on each node, which are quick to write.

Each process writes the data of its devices to a file of its own (node_file.py), and renames
the file when it is whole. It keeps at most two files: the newest that all processes have
completed, and the previous one, which the next copy overwrites.

`local.json`, in the directory of shared checkpoints, records the valid copy: the random id
of the start that wrote the files, and the step that all processes have. Process 0 writes it
while it holds the lock. So files of another run, or of an older start that was suspended,
are never restored. Copies that a start did not use are not restored later either, as it
deletes the record.

Copies are optional: if a file is missing, damaged or from different devices, the run resumes
from the shared checkpoint, and if the folder is full, it only saves shared checkpoints.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import secrets
import socket
import time
from concurrent import futures
from io import BufferedReader
from pathlib import Path
from typing import Any

import jax

from jaxscale import cluster
from jaxscale.checkpoint import checkpoint_files, node_file
from jaxscale.checkpoint.checksum import DamagedError
from jaxscale.checkpoint.lock import WorkdirLock, check_for_all
from jaxscale.errors import NonFiniteError
from jaxscale.files import read_json, whole_number, write_json
from jaxscale.metrics.log import logger
from jaxscale.optim.matrices import saved_rows
from jaxscale.owners import unsafe_owner
from jaxscale.parallel.layout_exchange import Split

RECORD = "local.json"
_RECORD = {"run": str, "step": int}


class LocalCopies:
  """Local copies of one run on this node; every process must make the same calls."""

  def __init__(self, folder: Path, directory: Path, lock: WorkdirLock | None, split: Split | None):
    """Set up the copies that belong to a directory of shared checkpoints.

    Args:
      folder: a folder on each node, in which the run's own folder is created.
      directory: the directory of shared checkpoints.
      lock: the lock on the workdir, in process 0.
      split: how gradients are split, as for `Checkpoints`.
    """
    name = hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:16]
    self.folder = folder / f"jaxscale-{os.geteuid()}-{name}"
    self.step = 0  # the step of the newest state that was, or is being, copied
    self.restored: dict[str, Any] | None = None  # the host state of the restored copy
    self.reports_nan = True  # False if a save of the same state reports NaN.
    self._record, self._lock = directory / RECORD, lock
    self._split = None if split is None else json.loads(json.dumps(split._asdict()))
    self._run = ""
    self._is_off = False
    self._whole: Path | None = None  # the newest copy that all processes have
    self._next: Path | None = None  # the copy being written
    self._spare: Path | None = None  # a file to overwrite
    self._pool = futures.ThreadPoolExecutor(1, "local copy")
    self._work: futures.Future[None] | None = None
    self._is_last = False  # whether the copy is done when the work is

  def save(self, state: Any, within_s: float, host_state: Any = None) -> bool:
    """Begin to copy a state; return whether a copy exists or is being written.

    Args:
      state: a tree of `jax.Array`s, which may be donated as soon as this returns.
      within_s: the seconds to wait for the previous copy; after these, this one is skipped.
      host_state: the state of callbacks, as JSON.

    Raises:
      NonFiniteError, LockLostError: the previous copy failed, as for `advance`.
    """
    if self._is_off or not self.finish(within_s) or self._is_off:
      return False
    if (step := int(state.step)) == self.step:
      return True
    if not self._run:
      self._run = cluster.from_leader(secrets.token_hex(16))
    self.step, self.reports_nan = step, True
    self._is_last = jax.process_count() == 1
    footer = {"run": self._run, "step": step, "split": self._split}
    footer |= {"rows": saved_rows(state)}
    footer |= {"callbacks": host_state} if host_state is not None else {}
    footer |= {"process": jax.process_index(), "processes": jax.process_count()}
    try:
      shards = node_file.held_shards(state)
    except Exception as e:
      self._work = futures.Future()
      self._work.set_exception(e)
    else:
      self._work = self._pool.submit(self._write, footer, shards)
    return True

  def _write(self, footer: dict[str, Any], shards: list[node_file.Shard]) -> None:
    """Write this process's file; runs in a thread."""
    self._open_folder()
    name = f"{footer['process']}-{footer['run']}"
    scratch = self.folder / f"{name}.tmp"
    if self._spare is not None:  # Overwriting allocated pages takes half of the time.
      with contextlib.suppress(FileNotFoundError):
        self._spare.rename(scratch)
    self._next = self._spare = scratch
    node_file.write_copy(scratch, footer, shards)
    shards.clear()  # Frees memory that only the shards keep.
    self._next = self.folder / f"{name}-{footer['step']}"
    scratch.rename(self._next)
    if self._is_last:
      self._commit()

  def _open_folder(self) -> None:
    """Create the folder, and delete this process's files of other starts."""
    if self._spare is not None:
      return
    self.folder.mkdir(mode=0o700, exist_ok=True)
    if who := unsafe_owner(self.folder, is_folder=True):
      raise OSError(None, who)
    self.folder.chmod(0o700)
    for path in self.folder.iterdir():
      process = whole_number(path.name.partition("-")[0])
      is_mine = process == jax.process_index() or (process or 0) >= jax.process_count()
      if is_mine and path != self._whole:
        _delete(path)

  def _commit(self) -> None:
    """Record the copy that all processes have; runs in a thread of process 0."""
    if self._lock is not None:
      self._lock.check()
    self._record.parent.mkdir(parents=True, exist_ok=True)
    write_json(self._record, {"run": self._run, "step": self.step})

  def advance(self) -> bool:
    """Enter the next phase; return False if a process has not finished the current one.

    All processes call it.

    Raises:
      NonFiniteError: the state has NaN or Inf, and no shared save reports it.
      LockLostError: another run has taken over.
    """
    if self._work is None:
      return True
    if cluster.any_process(not self._work.done()):
      return False
    work, self._work = self._work, None
    if not self._agree(work.exception()):
      return True
    if self._is_last:
      self._whole, self._spare = self._next, self._whole or self._spare
      return True
    self._is_last = True
    self._work = self._pool.submit(self._commit) if cluster.is_leader() else work
    return True

  def _agree(self, error: BaseException | None) -> bool:
    """Return whether all processes succeeded; else disable copies and log the cause."""
    mine = None
    if error is not None:
      of_state = isinstance(error, FloatingPointError)
      problem = error.strerror if isinstance(error, OSError) else None
      problem = str(error) if of_state else problem or checkpoint_files.one_line(error)
      mine = [of_state, f"{problem}, in {_this_process()}"]
    failures = [f for f in cluster.gather(mine) if f]
    if not failures:
      return True
    check_for_all(self._lock)
    of_state, problem = max(failures)
    if of_state:
      if self.reports_nan:
        raise NonFiniteError(self.step, problem.rpartition(", in process")[0])
      return False
    self._is_off = True
    _delete(self._next)
    if cluster.is_leader():
      logger.warning(f"local copies are disabled: {problem}; all saves go to the shared disk")
    return False

  def finish(self, within_s: float = math.inf) -> bool:
    """Wait at most `within_s` seconds; return whether the copy is complete and recorded."""
    until = time.monotonic() + within_s
    while self._work is not None:
      left = None if within_s == math.inf else max(until - time.monotonic(), 0)
      futures.wait([self._work], left)
      if not self.advance():
        return False
    return True

  def newest(self, shared: int) -> int | None:
    """Return the step of the copy that all processes have, if it is newer than the shared one.

    All processes call it.

    Args:
      shared: the step of the newest shared checkpoint; 0 if there is none, and then no
        copy is used, as nothing shows that it belongs to the same experiment.
    """
    record = self._newer_record(shared)
    return record["step"] if record and not _first(self._read(record)[1]) else None

  def _newer_record(self, shared: int) -> dict[str, Any]:
    """Return the record of a copy newer than the shared checkpoint; empty without one."""
    record = read_json(self._record, _RECORD) if cluster.is_leader() else None
    record = cluster.from_leader(record)
    return record if record and 0 < shared < record["step"] else {}

  def _read(self, record: dict[str, Any], abstract: Any = None) -> tuple[Any, str | None]:
    """Return the state in this process's file, and the reason if the file cannot be used.

    Without `abstract` only the footer is read, and the state is None.
    """
    try:
      with node_file.open_copy(self._path(record)) as file:
        footer = self._footer(file, record)
        if abstract is None:
          return None, None
        is_same = footer.get("split") == self._split
        if not is_same or footer.get("rows", {}) != saved_rows(abstract):
          raise DamagedError("it has a different layout")
        self.restored = footer.get("callbacks")
        return node_file.read_state(file, footer["leaves"], abstract), None
    except (DamagedError, OSError) as e:
      return None, _reason(e)

  def restore(self, shared: int, abstract: Any) -> Any:
    """Load the state of `newest`; None if no copy is usable, which is logged.

    All processes call it.

    Args:
      shared: the step of the newest shared checkpoint, as for `newest`.
      abstract: a tree of `jax.ShapeDtypeStruct`s with shardings.
    """
    if not (record := self._newer_record(shared)):
      return None
    state, problem = self._read(record, abstract)
    if not (problem := _first(problem)):
      self._whole, self.step = self._path(record), record["step"]
      return state
    if cluster.is_leader():
      logger.warning(f"the local copy of step {record['step']} cannot be used: {problem}")
    return None

  def _footer(self, file: BufferedReader, record: dict[str, Any]) -> dict[str, Any]:
    """Return the footer of this process's file, after checking the file's length."""
    footer = node_file.read_footer(file)
    own = {"process": jax.process_index(), "processes": jax.process_count()}
    if any(footer[key] != value for key, value in (record | own).items()):
      raise DamagedError("it belongs to a different run or step")
    return footer

  def _path(self, record: dict[str, Any]) -> Path:
    # The record is text that anybody may have written, so the run may be any string.
    name = f"{jax.process_index()}-{record['run']}-{record['step']}"
    return self.folder / Path(name.replace("\0", "")).name

  def close(self, saved: int | None) -> None:
    """End the thread; delete the copies if the run no longer needs them.

    Args:
      saved: the step of the newest shared checkpoint if the run succeeded; None keeps the
        copies.
    """
    self._pool.shutdown(wait=True)
    if saved is None or saved < self.step:
      return
    _delete(self._whole, self._next, self._spare)
    with contextlib.suppress(OSError):  # Another process still has files in it.
      self.folder.rmdir()
    if cluster.is_leader():
      forget(self._record.parent)


def forget(directory: Path) -> None:
  """Delete the record in a directory of checkpoints, so that its copies are not used."""
  _delete(directory / RECORD)


def _delete(*paths: Path | None) -> None:
  for path in filter(None, paths):
    with contextlib.suppress(OSError):
      path.unlink()


def _first(problem: str | None) -> str:
  """Return the first problem of any process with its process and host; "" if there is none."""
  problems = cluster.gather(problem and f"{problem} ({_this_process()})")
  return next(filter(None, problems), "")


def _this_process() -> str:
  return f"process {jax.process_index()} on {socket.gethostname()}"


def _reason(error: Exception) -> str:
  if isinstance(error, FileNotFoundError):
    return "the file does not exist"
  return getattr(error, "strerror", None) or str(error)
