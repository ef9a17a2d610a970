"""Checkpoints: saved in the background, committed by one rename, verified by checksums.

A killed run leaves whole checkpoints or none. The manifest reveals changed bytes and
truncated or missing files. A damaged checkpoint is renamed to `<step>.damaged`, never
deleted, and the previous one is used.

Processes agree only at points that all reach, in the main thread. A process whose disk is
full reports it there, and none waits for it. Only process 0 commits, and only while it holds
the lock on the workdir (lock.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import shutil
import time
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

import jax

from jaxscale import cluster
from jaxscale.checkpoint import checkpoint_files, checksum, reshard
from jaxscale.checkpoint import directory as checkpoint_dir
from jaxscale.checkpoint.checksum import DamagedError
from jaxscale.checkpoint.lock import LockLostError, WorkdirLock, check_for_all, lost_reason
from jaxscale.checkpoint.node_copies import LocalCopies, forget
from jaxscale.checkpoint.restore import restore_step
from jaxscale.errors import EXIT_CRASH, ConfigError, NonFiniteError, disk_advice
from jaxscale.files import expand, sync
from jaxscale.metrics import score
from jaxscale.metrics.log import logger
from jaxscale.optim.matrices import saved_rows
from jaxscale.parallel.layout_exchange import Split
from jaxscale.training.types import TrainState


class UnsavedError(Exception):
  """A checkpoint could not be written; the message says why."""

  exit_code = EXIT_CRASH


@dataclasses.dataclass
class _Save:
  """Save in progress.

  Attributes:
    step: the step of the state.
    size: the size of the state in bytes.
    directory: the temporary directory that is written to.
    manifest: the manifest of the checkpoint; checksums are added last.
    work: this process's part of the current phase.
    phases: the functions of the phases that follow.
    sums: this process's part of the checksums, once it is computed; None once they are in
      the manifest.
  """

  step: int
  size: int
  directory: Path
  manifest: dict[str, Any]
  work: futures.Future[None] = dataclasses.field(default_factory=futures.Future)
  phases: list[Callable[[], None]] = dataclasses.field(default_factory=list)
  sums: dict[int, tuple[int, int]] | None = dataclasses.field(default_factory=dict)

  def add_checksums(self) -> None:
    """Complete the manifest with checksums; all processes call it.

    Raises:
      NonFiniteError: in all processes, if the state has NaN or Inf in any.
    """
    leaves = self.manifest["leaves"]
    try:
      checksum.with_checksums(leaves, self.sums or {})
    except FloatingPointError as e:  # A delayed exchange may hold NaN that was not sent yet.
      raise NonFiniteError(self.step, str(e)) from None
    self.sums = None


class Checkpoints(contextlib.AbstractContextManager["Checkpoints"]):
  """Checkpoints of one run; every process must create it and make the same calls.

  Example:
    >>> with Checkpoints("runs/x/checkpoints") as checkpoints:
    ...   state = checkpoints.restore(abstract) or init()
    ...   checkpoints.save(state, {"accuracy": 0.9})   # doctest: +SKIP
  """

  def __init__(
    self,
    directory: str | Path,
    *,
    keep_last: int = 2,
    keep_best: int = 1,
    best_metric: str | None = None,
    on_failure: str = "stop",
    max_wait_s: float = math.inf,
    local: str | Path | None = None,
    shared_every: int = 1,
    lock: WorkdirLock | None = None,
    split: Split | None = None,
  ):
    """Open a directory of checkpoints, which the first save creates.

    Args:
      directory: the directory with one subdirectory per step.
      keep_last: the number of newest checkpoints to keep.
      keep_best: the number of checkpoints with the best `metrics.score` to keep in addition.
      best_metric: the metric that `metrics.score` ranks by, from `metrics.signed`.
      on_failure: the action if a disk fails in a save: "stop" raises, "continue" logs.
      max_wait_s: the seconds that a save waits for the previous one before it is skipped.
      local: a folder on each node for additional copies (node_copies.py).
      shared_every: with local copies, the number of saves per save to `directory`.
      lock: the lock on the workdir, in process 0; None if no other run may write there.
      split: how exchanged gradients are split
        (`parallel.layout_exchange.exchange_split`).
    """
    path = Path(expand(directory)).absolute()
    # Tensorstore refuses "..". Other paths keep their symlinks, so that errors show them.
    self.directory = path.resolve() if ".." in path.parts else path
    self.identity: dict[str, Any] | None = None  # of data and code, for manifests
    self.host_state: Callable[[], dict[str, Any] | None] = lambda: None  # for manifests
    self.restored: dict[str, Any] | None = None  # the host state of the restored checkpoint
    self.unsaved: str | None = None  # the reason, if the newest save failed
    self._keep, self._best_metric = (keep_last, keep_best), best_metric
    self._stops = on_failure == "stop"
    self._max_wait_s = max_wait_s
    self._lock = lock
    self._split = split
    self._scores: dict[int, float | None] = {}
    self._saving: _Save | None = None
    self._shared_every, self._until_shared = shared_every, 0
    self._local: LocalCopies | None = None
    if local is not None:
      self._local = LocalCopies(Path(local), self.directory, lock, split)
    self._pool = futures.ThreadPoolExecutor(1, "checkpoint")
    self._is_clean = False
    self._failed: list[Path] = []
    if lock is not None:
      self._remove_partial()

  def __exit__(self, error: type | None, *_):
    saved = None
    try:
      if error is None:
        self.wait()
        if self._local:
          saved = cluster.from_leader(max(self._known_steps() or (), default=None))
    finally:
      self._pool.shutdown(wait=True)
      self._remove_failed()
      if self._local:
        self._local.close(saved)

  def steps(self) -> list[int]:
    """Return the steps that have a committed checkpoint on disk, oldest first."""
    return checkpoint_dir.steps(self.directory)

  def newest(self) -> int:
    """Return the step that `restore` would load, or 0; all processes must call it."""
    shared = cluster.from_leader(max(self.steps(), default=0))
    return (self._local and self._local.newest(shared)) or shared

  def _known_steps(self) -> list[int] | None:
    """Return the committed steps; None if the disk fails, which the caller reports."""
    with contextlib.suppress(ConfigError, OSError):
      return self.steps()
    return None

  def save(
    self, state: TrainState, metrics: dict[str, float] | None = None, *, is_needed: bool = True
  ) -> None:
    """Start writing the state; return once it is copied off the devices.

    A step that is already saved is skipped. Checksums are computed during the write, which
    also finds NaN and Inf in the state: then no checkpoint is made.

    With local copies, the first save of a start and then every `shared_every`-th one goes
    to the shared directory. If the previous one is still being written when it is due,
    training does not wait: the next save goes to the shared directory instead.

    Args:
      state: the state to save, which may be donated as soon as this returns.
      metrics: the metrics of an evaluation at this step; `metrics.score` ranks the best.
      is_needed: True saves to the shared directory, and waits for the previous save.
        False skips the save, and logs it, if a slow disk has not finished the previous one
        within `max_wait_s`.

    Raises:
      NonFiniteError, UnsavedError, LockLostError: the previous save failed, as for `poll`.
      UnsavedError: the state cannot be written.
      LockLostError: another run has taken over the directory.
    """
    within_s = math.inf if is_needed else self._max_wait_s
    has_copy = False
    if self._local:
      has_copy = self._local.save(reshard.without_empty(state), within_s, self.host_state())
      self._until_shared -= 1
    if has_copy and self._until_shared >= 0 and not is_needed:
      return
    if has_copy and not is_needed:
      within_s = 0
    if self._finish(within_s):
      self._until_shared = self._shared_every - 1
      self._start(state, metrics)
    elif not has_copy and cluster.is_leader():
      assert self._saving is not None
      line = f"skipping the checkpoint of step {state.step}: the one of step"
      line += f" {self._saving.step} is still being written"
      logger.warning(f"{line} after {self._max_wait_s:g} s")

  def _start(self, state: TrainState, metrics: dict[str, float] | None) -> None:
    """Start a save to the shared directory, if none is in progress."""
    if (save := self._begin(state, metrics)) is None:
      return
    is_alone = jax.process_count() == 1
    try:
      written = checkpoint_files.start_writing(save.directory, reshard.without_empty(state))
      shards = checksum.own_shards(state)
    except Exception as e:
      save.work.set_exception(e)
    else:

      def write():
        try:
          save.sums = checksum.sum_shards(shards)
        finally:
          written()
        checkpoint_files.sync_part(save.directory)
        if is_alone:
          save.add_checksums()
          for phase in phases:
            phase()

      def read_back():
        checkpoint_files.read_back(save.directory, [*save.manifest["leaves"]], shards)
        shards.clear()  # Frees memory that only the shards keep.

      phases = [functools.partial(self._merge, save), read_back]
      phases.append(functools.partial(self._commit, save))
      save.phases = [] if is_alone else [*phases]
      save.work = self._pool.submit(write)
    self._saving = save
    if self._local and self._local.step == save.step:
      self._local.reports_nan = False

  def _begin(self, state: TrainState, metrics: dict[str, float] | None) -> _Save | None:
    """Begin a save with its directory; None if the step is saved, or if that failed."""
    step, error = int(state.step), None
    token = self._lock.token if self._lock is not None else 0
    lost, is_there = lost_reason(self._lock), step in (self._known_steps() or ())
    if cluster.is_leader() and not lost and not is_there:
      try:
        self._make_directory(step, token)
      except Exception as e:
        error = e
    mine = lost, is_there, token, error is not None
    lost, is_there, token, has_failed = cluster.from_leader(mine)
    if lost:
      raise LockLostError(lost)
    if is_there:
      return None
    manifest = {"step": step, "metrics": metrics or {}}
    manifest |= {"leaves": checksum.describe(state)}
    if rows := saved_rows(state):
      manifest["rows"] = rows
    if self.identity is not None:
      manifest["identity"] = self.identity
    if (host_state := self.host_state()) is not None:
      manifest["callbacks"] = host_state
    if self._split is not None and jax.tree.leaves(state.exchange_state):
      manifest["split"] = self._split._asdict()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    partial = checkpoint_dir.partial_path(self.directory, step, token)
    save = _Save(step, size, partial, manifest)
    return None if has_failed and not self._agree(save, error) else save

  def _make_directory(self, step: int, token: int) -> None:
    """Create the directory that all processes write this step to; one process calls it."""
    if self._lock is not None:
      self._lock.check()
    self.directory.mkdir(parents=True, exist_ok=True)
    self._remove_partial()
    self._remove_failed()
    checkpoint_dir.partial_path(self.directory, step, token).mkdir()

  def poll(self) -> None:
    """Advance the save in progress without waiting for it.

    All processes must call it, and often: once all processes have
    written a save, several calls are needed until it is committed.

    Raises:
      NonFiniteError: the state has NaN or Inf.
      UnsavedError: the state could not be written, and `on_failure` is "stop".
      LockLostError: another run has taken over the directory.
    """
    lost = None if self._lock is None else self._lock.lost
    if cluster.any_process(lost is not None):
      raise LockLostError(cluster.from_leader(lost))
    if self._local:
      self._local.advance()
    if self._saving is not None:
      self._advance(self._saving)

  def wait(self) -> None:
    """Wait until the save is committed; raise as `poll`."""
    if self._local:
      self._local.finish()
    self._finish(math.inf)

  def _finish(self, within_s: float) -> bool:
    """Wait at most `within_s` seconds; return whether the save is committed."""
    until = time.monotonic() + within_s
    while (save := self._saving) is not None:
      left = None if within_s == math.inf else max(until - time.monotonic(), 0)
      futures.wait([save.work], left)
      if not self._advance(save):
        return False
    return True

  def _advance(self, save: _Save) -> bool:
    """Enter the next phase; return False if a process has not finished the current one."""
    if cluster.any_process(not save.work.done()):
      return False
    self._saving = None
    try:
      error = save.work.exception()
      if isinstance(error, NonFiniteError):  # Found by a process that runs alone.
        raise error
      if not self._agree(save, error) or not save.phases:
        return True
      if save.sums is not None:
        save.add_checksums()
    except NonFiniteError:
      self._discard(save)
      if self._local:
        self._local.reports_nan = False  # One report is enough.
      raise
    save.work = self._pool.submit(save.phases.pop(0))
    self._saving = save
    return True

  def _agree(self, save: _Save, error: BaseException | None) -> bool:
    """Return whether all processes succeeded; else undo the save, and log or raise the error."""
    mine = None
    if error is not None:
      number = checkpoint_files.error_number(error)
      of_disk = isinstance(error, OSError) or number is not None
      # Look now, as removing the written files frees inodes.
      folder = next(p for p in save.directory.parents if p.exists())
      lack, advice = checkpoint_files.lack_of(error, folder), disk_advice(number, folder)
      mine = [jax.process_index(), of_disk, lack, advice, checkpoint_files.one_line(error)]
    failures = [f for f in cluster.gather(mine) if f]
    if not failures:
      if not save.phases:
        self.unsaved = None
      return True
    self._until_shared = 0  # The next save tries again.
    # A successor moves away the files that this run was writing, which causes the error.
    check_for_all(self._lock)
    process, of_disk, lack, advice, problem = failures[0]
    line = None
    self._discard(save)
    if cluster.is_leader():
      parent = self.directory if self.directory.exists() else self.directory.parent
      line = checkpoint_files.unsaved_message(save.step, lack, problem, parent, save.size)
      if jax.process_count() > 1:
        line += f", in process {process}"
    line = str(cluster.from_leader(line))
    kept = cluster.from_leader(self._known_steps())
    newest = f"step {kept[-1]}" if kept else "unknown" if kept is None else "none"
    line += f"; the newest checkpoint: {newest}"
    self.unsaved = f"{line}; {advice}"
    if self._stops or not of_disk:
      raise UnsavedError(self.unsaved)
    if cluster.is_leader():
      logger.warning(f"{line}; training continues")
    return False

  def _discard(self, save: _Save) -> None:
    """Delete the files of a save that failed."""
    if cluster.is_leader():
      self._failed.append(save.directory)
      self._remove_failed()

  def _remove_failed(self) -> None:
    """Delete failed saves; called at each save, as a failed one may still write for a while."""
    for directory in self._failed:
      shutil.rmtree(directory, ignore_errors=True)

  def _merge(self, save: _Save) -> None:
    if cluster.is_leader():
      checkpoint_files.merge(save.directory)

  def _commit(self, save: _Save) -> None:
    """Commit what all processes have written, then delete checkpoints that are not kept."""
    if not cluster.is_leader():
      return
    checkpoint_files.finish(save.directory, save.manifest)
    with contextlib.suppress(FileNotFoundError):  # The metrics up to this step must be on disk.
      sync(self.directory.parent / "metrics.jsonl")
    if self._lock is not None:
      self._lock.check()
    # From here on a successor may have taken over, but it cannot have missed this step: it
    # first renames the source of this rename (`remove_partial`).
    try:
      save.directory.rename(self.directory / str(save.step))
    except FileNotFoundError:
      if self._lock is not None:
        self._lock.check()
      raise
    # A folder's entry is in its parent, and a new run's parents are new as well.
    for folder in (self.directory, *self.directory.parents[:2]):
      sync(folder)
    self._scores[save.step] = score(save.manifest["metrics"], self._best_metric)
    checkpoint_dir.prune(self.directory, *self._keep, self._scores, self._best_metric)

  def _remove_partial(self) -> None:
    """Remove partial checkpoints, once, before anything is restored."""
    if cluster.is_leader() and not self._is_clean and self.directory.exists():
      self._is_clean = True
      checkpoint_dir.remove_partial(self.directory)

  def restore(
    self, abstract: TrainState, resize: reshard.Resize | None = None
  ) -> TrainState | None:
    """Load the newest intact state, sharded as requested; None if there is none.

    It loads local copies if all processes have a copy of the same step, which is newer
    than the shared checkpoints. Otherwise it loads a shared checkpoint.

    Args:
      abstract: the shapes, dtypes and shardings (`state.abstract_state`), on any mesh.
      resize: `Exchange.resize`, for a state that was saved on a different number of
        devices. On the same number, the state is restored bit for bit.

    Raises:
      ConfigError: the checkpoint belongs to another model, optimizer or exchange; or to
        other devices or another layout and cannot be converted; or all checkpoints are
        damaged.
    """
    steps, self.restored = cluster.from_leader(self.steps()), None
    if self._local:
      target = reshard.without_empty(abstract)
      copy = self._local.restore(max(steps, default=0), target)
      if copy is not None:
        self.restored = self._local.restored
        return reshard.with_empty(copy, abstract)
    if self._lock is not None:
      forget(self.directory)
    for step in reversed(steps):
      try:
        path = self.directory / str(step)
        state, self.restored = restore_step(path, abstract, resize, self._split)
        return state
      except DamagedError as damage:
        older = [s for s in steps if s < step]
        if cluster.is_leader():
          then = f"resuming from {older[-1]}" if older else "and there is no older one"
          what = f"checkpoint {step} is damaged ({damage}); renamed it to {step}.damaged"
          logger.warning(f"{what}, {then}")
        rename = functools.partial(checkpoint_dir.mark_damaged, self.directory, step)
        cluster.on_leader(rename, f"rename checkpoint {step}")
    if cluster.from_leader(checkpoint_dir.has_damaged(self.directory)):
      problem = "all checkpoints are damaged; use another --workdir to start anew"
      raise ConfigError(f"{self.directory}: {problem}")
    return None
