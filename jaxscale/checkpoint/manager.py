"""Checkpoints: saved in the background, committed by one rename, trusted by checksum.

A killed run leaves whole checkpoints or none. Flipped bytes, cut and missing files
are found by the manifest; a damaged checkpoint is set aside as `<step>.damaged`,
never deleted, and the one before is used.

Processes agree only where all of them are, in the main thread: one whose disk is
full says so there, and none waits for it. Only process 0 commits, and only while it
holds the lease of the directory (lease.py).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxscale import cluster
from jaxscale.checkpoint import checksum, files, reshard
from jaxscale.checkpoint import directory as checkpoint_dir
from jaxscale.checkpoint.files import DamagedError, one_line
from jaxscale.checkpoint.lock import Lease, LostError, check_for_all, why_lost
from jaxscale.errors import DISK_ADVICE, EXIT_CRASH, ConfigError
from jaxscale.metrics import score
from jaxscale.parallel.layout_exchange import Split
from jaxscale.training.state import TrainState


class UnsavedError(Exception):
  """A checkpoint could not be written; the message says why."""

  exit_code = EXIT_CRASH
  advice = DISK_ADVICE


class _Save(NamedTuple):
  """A save that is under way.

  Attributes:
    step: of the state.
    size: bytes of it.
    directory: where it is written to.
    manifest: what will be said of it.
    work: what this process does for it.
    is_last: whether it is done when every process has done its work.
  """

  step: int
  size: int
  directory: Path
  manifest: dict[str, Any]
  work: futures.Future[None]
  is_last: bool


class Checkpoints:
  """The checkpoints of one run; every process makes and calls it alike.

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
    on_failure: str = "stop",
    lease: Lease | None = None,
    split: Split | None = None,
    say: Callable[[str], None] = print,
  ):
    """Open a directory of checkpoints; it is made by the first save.

    Args:
      directory: one subdirectory a step.
      keep_last: how many of the newest stay.
      keep_best: how many with the best `metrics.score` stay as well.
      on_failure: of a disk in a save: "stop" raises it, "continue" says it and
        goes on.
      lease: of process 0, where several runs may meet in the directory.
      split: how gradients are split that are exchanged
        (`parallel.layout_exchange.exchange_split`).
      say: where process 0 tells what happens.
    """
    self.directory = Path(directory).absolute()
    self.say = say
    self.unsaved: str | None = None  # why the newest save failed, if it did
    self._keep = keep_last, keep_best
    self._stops = on_failure == "stop"
    self._lease = lease
    self._split = split
    self._scores: dict[int, float | None] = {}
    self._saving: _Save | None = None
    self._pool = futures.ThreadPoolExecutor(1, "checkpoint")
    self._is_swept = False
    self._failed: list[Path] = []
    if lease is not None:
      self._sweep()

  def __enter__(self):
    return self

  def __exit__(self, error: type | None, *_):
    try:
      if error is None:
        self.wait()
    finally:
      self._pool.shutdown(wait=True)
      self._remove_failed()

  def steps(self) -> list[int]:
    """Steps that have a committed checkpoint, oldest first; asks the disk."""
    return checkpoint_dir.steps(self.directory)

  def save(self, state: TrainState, metrics: dict[str, float] | None = None) -> None:
    """Start writing the state; returns once it is copied off the devices.

    A step that is saved already is left alone. Waits for the save before.

    Args:
      state: what to save; it may be donated as soon as this returns.
      metrics: of an evaluation at this step; `metrics.score` ranks the best.

    Raises:
      FloatingPointError: the state holds NaN or Inf; nothing is written.
      UnsavedError: it cannot be written, or the save before was not ("stop").
      LostError: another run has taken over the directory.
    """
    self.wait()
    step = int(state.step)
    token = self._lease.token if self._lease is not None else 0
    lost, is_there, token = cluster.from_leader(
      [why_lost(self._lease), step in self.steps(), token]
    )
    if lost:
      raise LostError(lost)
    if is_there:
      return
    manifest = {"step": step, "metrics": metrics or {}}
    manifest |= {"leaves": checksum.manifest(state)}
    save = _Save(
      step,
      files.state_bytes(state),
      checkpoint_dir.under_way(self.directory, step, token),
      manifest | reshard.split_as_json(state, self._split),
      futures.Future(),
      is_last=False,
    )
    save.work.set_result(None)
    if not self._agree(save, self._on_leader(lambda: self._begin(save))):
      return
    is_alone = jax.process_count() == 1
    try:
      written = files.start_writing(save.directory, reshard.as_saved(state))
    except Exception as e:
      save = save._replace(work=futures.Future())
      save.work.set_exception(e)
    else:

      def write(save=save):
        written()
        if is_alone:
          self._commit(save)

      save = save._replace(work=self._pool.submit(write), is_last=is_alone)
    self._saving = save

  def poll(self) -> None:
    """Look after the save that is under way, without waiting for it.

    All processes must call it, and often: each turn takes a save one phase further,
    from written by all to committed.

    Raises:
      UnsavedError: it could not be written ("stop").
      LostError: another run has taken over the directory.
    """
    lost = None if self._lease is None else self._lease.lost
    if cluster.any_process(lost is not None):
      raise LostError(cluster.from_leader(lost))
    if self._saving is not None:
      self._advance(self._saving)

  def wait(self) -> None:
    """Until what was saved is committed; raises as `poll` does."""
    while self._saving is not None:
      futures.wait([self._saving.work])
      self._advance(self._saving)

  def _advance(self, save: _Save) -> None:
    """One phase further, if every process has done its part of this one."""
    if cluster.any_process(not save.work.done()):
      return
    self._saving = None
    if not self._agree(save, save.work.exception()) or save.is_last:
      return
    work = self._pool.submit(self._commit, save) if cluster.is_leader() else save.work
    self._saving = save._replace(work=work, is_last=True)

  def _agree(self, save: _Save, error: BaseException | None) -> bool:
    """Whether no process has failed at this save; the failure is dealt with."""
    told = None
    if error is not None:
      kind = files.is_of_disk(error), files.is_full(error)
      told = [jax.process_index(), *kind, one_line(error)]
    found = [f for f in cluster.gather(told) if f]
    if not found:
      if save.is_last:
        self.unsaved = None
      return True
    # A successor moves away what this run was writing: then that is the cause.
    check_for_all(self._lease)
    self._fail(save, found)
    return False

  def _fail(self, save: _Save, found: list[list[Any]]) -> None:
    """Undo a save, and say or raise why it failed."""
    process, of_disk, full, text = found[0]
    line = None
    if cluster.is_leader():
      self._failed.append(save.directory)
      self._remove_failed()
      parent = self.directory if self.directory.exists() else self.directory.parent
      line = files.why_unsaved(save.step, full, text, parent, save.size)
      if jax.process_count() > 1:
        line += f", says process {process}"
    line = str(cluster.from_leader(line))
    kept = cluster.from_leader(self.steps())
    line += f"; the newest that is: {f'step {kept[-1]}' if kept else 'none'}"
    self.unsaved = line
    if self._stops or not of_disk:
      raise UnsavedError(line)
    if cluster.is_leader():
      self.say(f"{line}; going on")

  def _begin(self, save: _Save) -> None:
    """Make room for a save."""
    if self._lease is not None:
      self._lease.check()
    self.directory.mkdir(parents=True, exist_ok=True)
    self._sweep()
    self._remove_failed()
    save.directory.mkdir()

  def _remove_failed(self) -> None:
    """Again at each save: one that failed may have written on for a while."""
    for directory in self._failed:
      shutil.rmtree(directory, ignore_errors=True)

  def _commit(self, save: _Save) -> None:
    """Make the checkpoint of what all have written, then delete those to go."""
    files.finish(save.directory, save.manifest)
    if self._lease is not None:
      self._lease.check()
    # From here on a successor may have taken over, but not have seen this step
    # missing: it moves the source of this rename away first (`checkpoint_dir.sweep`).
    try:
      save.directory.rename(self.directory / str(save.step))
    except FileNotFoundError:
      if self._lease is not None:
        self._lease.check()
      raise
    self._scores[save.step] = score(save.manifest["metrics"])
    checkpoint_dir.prune(self.directory, *self._keep, self._scores)

  def _sweep(self) -> None:
    """Once, before anything there is read to be gone on with."""
    if cluster.is_leader() and not self._is_swept and self.directory.exists():
      self._is_swept = True
      checkpoint_dir.sweep(self.directory)

  def restore(
    self, abstract: TrainState, resize: reshard.Resize | None = None
  ) -> TrainState | None:
    """The newest intact state, laid out as asked for; None if there is none.

    Args:
      abstract: shapes, dtypes and shardings (`state.abstract_state`); any mesh.
      resize: `Exchange.resize`, for a state that was saved on another number of
        devices. Not called on as many, where the state is the one that was saved
        bit for bit.

    Raises:
      ConfigError: it belongs to another model, optimizer or exchange, or to other
        devices or another layout and cannot be carried over, or every checkpoint
        there is damaged.
    """
    steps = cluster.from_leader(self.steps())
    for step in reversed(steps):
      try:
        return self._restore_step(step, abstract, resize)
      except DamagedError as damage:
        older = [s for s in steps if s < step]
        if cluster.is_leader():
          self.say(
            f"checkpoint {step} is damaged ({damage}); set aside as {step}.damaged, "
            + (f"going on from {older[-1]}" if older else "and there is no older one")
          )
        cluster.on_leader(
          lambda step=step: checkpoint_dir.set_aside(self.directory, step),
          f"set aside {step}",
        )
    if cluster.from_leader(checkpoint_dir.has_damaged(self.directory)):
      raise ConfigError(
        f"{self.directory}: every checkpoint is damaged; use another --workdir "
        "to start anew"
      )
    return None

  def _restore_step(
    self, step: int, abstract: TrainState, resize: reshard.Resize | None
  ) -> TrainState:
    path = self.directory / str(step)
    manifest, problem = cluster.from_leader(_manifest_of(path))
    if problem:
      raise DamagedError(problem)
    leaves = manifest["leaves"]
    other = reshard.other(manifest, abstract, resize, self._split)
    saved = other.saved if other else abstract
    files.check_same_leaves(path, leaves, checksum.describe(saved))
    if other and other.carry is None:
      raise reshard.refusal(path, other)
    state, problem = None, None
    try:
      wanted = reshard.to_load(other, abstract) if other else abstract
      wanted = reshard.as_saved(wanted)
      state = files.load(path, wanted, pad=other is not None)
    except (DamagedError, OSError) as e:
      problem = str(e)
    # What one process cannot read, none may go on with.
    if problems := [p for p in cluster.gather(problem) if p]:
      raise DamagedError(problems[0])
    try:
      found = checksum.manifest(state, reshard.as_saved(saved))
    except FloatingPointError as e:
      raise DamagedError(one_line(e)) from e
    for name, leaf in found.items():
      if leaf["checksum"] != leaves[name]["checksum"]:
        raise DamagedError(f"the checksum of {name} does not match")
    assert state is not None
    if not jax.tree.leaves(abstract.exchange_state):
      state = state._replace(exchange_state=abstract.exchange_state)
    if other:
      state = reshard.carried_state(other, state, abstract)
      if cluster.is_leader():
        self.say(f"checkpoint {step}: {reshard.story(other)}")
    return state

  def _on_leader(self, function: Callable[[], None]) -> Exception | None:
    """What went wrong when process 0 called it; None elsewhere."""
    if cluster.is_leader():
      try:
        function()
      except Exception as e:
        return e
    return None


def _manifest_of(path: Path) -> tuple[dict[str, Any] | None, str | None]:
  """The manifest, or why it cannot be trusted."""
  try:
    return files.read_manifest(path), None
  except DamagedError as damage:
    return None, str(damage)
