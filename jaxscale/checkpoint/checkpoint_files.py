"""The files of one checkpoint: written, read, and the errors of both in one line.

Orbax's handler writes and reads the arrays; nothing here talks to another process.
(Its `Checkpointer` does, from a background thread: a process that cannot write,
because its disk is full, never comes to the barrier where the others wait.)

A checkpoint is a directory with `state/`, which plain Orbax reads as well
(`StandardCheckpointer().restore`), and `manifest.json`: step, metrics, and shape,
dtype and checksum of every leaf, with a checksum of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import gc
import inspect
import json
import logging
import os
import re
import shutil
import sys
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxscale.checkpoint import write_limit
from jaxscale.checkpoint.checksum import DamagedError, Shards, is_of
from jaxscale.checkpoint.read_back import check_complete, stored_sums
from jaxscale.errors import ConfigError, lacks_inodes
from jaxscale.files import mismatch, require_json, sync, whole_number
from jaxscale.metrics.text import byte_size
from jaxscale.optim.tree_paths import path_name

MANIFEST = "manifest.json"
_STATE = "state"
_SPLIT = {"mesh": {str: int}, "over": [str], "dims": {str: [(str, None)]}}
_LEAF = {"shape": [int], "dtype": str, "checksum": str}
_SHAPE = {"step": int, "metrics": {str: float}, "leaves": {str: _LEAF}, "crc32": int}
# Characters of a path that Orbax or TensorStore take for something else, or refuse.
_MISTAKABLE = re.compile(r"[\[\]?*\\\ud800-\udfff]")
# How a full disk or quota looks when it comes through TensorStore, as text.
_FULL = ("No space left on device", "Disk quota exceeded", "RESOURCE_EXHAUSTED")


def start_writing(directory: Path, state: Any) -> Callable[[], None]:
  """Copy this process's part off the devices, and begin to write it.

  Args:
    directory: of the checkpoint; it is there.
    state: of `jax.Array`s; may be donated as soon as this returns.

  Returns:
    What waits until the part is on disk, and raises what went wrong.
  """
  ocp, path = _orbax()
  limit: Any = write_limit.limit_to_write(state)
  # Compressed, weights in float32 take 8 % less of the disk and about twice the
  # processor (docs/reliability.md), which the steps meanwhile need.
  handler = ocp.PyTreeCheckpointHandler(save_concurrent_gb=limit, use_compression=False)
  small = ocp.SaveArgs(chunk_byte_size=write_limit.CHUNK)
  args = ocp.args.PyTreeSave(state, save_args=jax.tree.map(lambda _: small, state))
  with contextlib.ExitStack() as opened:
    where = path(opened.enter_context(_unmistakable(directory)) / _STATE)
    saving = handler.async_save(where, args=args)

    # In a thread of its own: a notebook's has a loop that runs already.
    with futures.ThreadPoolExecutor(1) as pool:
      parts = pool.submit(asyncio.run, saving).result() or []
    remains = opened.pop_all()

  def wait() -> None:
    # For all of them, also after an error: one that still writes restores what is
    # removed. The first of them is waited for last, so that its error is raised.
    with remains as stack:
      for part in parts:
        stack.callback(part.result)

  return wait


def read_back(
  directory: Path, manifest: dict[str, Any], shards: list[Shards], sums: dict[int, tuple[int, int]]
) -> dict[int, int]:
  """Have the disk keep what this process has written, and sum it as it is there.

  Args:
    directory: of the checkpoint.
    manifest: with shape and dtype of each array.
    shards: as of `read_back.stored_sums`.
    sums: as of `read_back.stored_sums`.

  Raises:
    DamagedError: the disk has something else, or a file is empty.
  """
  state, name = directory / _STATE, f"process_{jax.process_index()}"
  sync_tree(state / f"ocdbt.{name}")
  sync_tree(state / "array_metadatas", name)
  with _unmistakable(directory) as where:
    return stored_sums(where / _STATE, manifest["leaves"], shards, sums)


def finish(directory: Path, manifest: dict[str, Any]) -> None:
  """Make one checkpoint of the parts of all processes; one process calls it."""
  merge(directory)
  with _unmistakable(directory) as where:
    check_complete(where / _STATE, manifest["leaves"])
  (directory / MANIFEST).write_text(json.dumps(manifest | {"crc32": _crc32(manifest)}))
  sync_tree(directory)


def merge(directory: Path) -> None:
  """Make one index of those of all processes."""
  ocp, path = _orbax()
  with _unmistakable(directory) as where:
    ocp.StandardCheckpointHandler().finalize(path(where / _STATE))


@contextlib.contextmanager
def _unmistakable(directory: Path) -> Iterator[Path]:
  """Path to a folder that Orbax and TensorStore do not take for another.

  Orbax looks for files by `glob` of a whole path, so that `runs/hidden=[8]` has none,
  and TensorStore takes a backslash for a slash: it writes into the wrong folder.
  """
  if not _MISTAKABLE.search(str(directory)):
    yield directory
    return
  number = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
  try:
    yield Path(f"/proc/self/fd/{number}")
  finally:
    os.close(number)


def is_unmerged(directory: Path) -> bool:
  """Return whether `merge` never did its work, as below folders with brackets.

  Until November 2026 such checkpoints were committed; they have all of the arrays.
  """
  state = directory / _STATE
  is_missing = not (state / "manifest.ocdbt").exists()
  return is_missing and any(state.glob("ocdbt.process_*"))


def sync_tree(folder: Path, only: str = "") -> None:
  """Have the disk keep a folder with all files below it, or only those of one name.

  TensorStore syncs its own; Orbax's others would be empty after a loss of power.

  Raises:
    DamagedError: a file is empty.
  """
  for parent, _, names in os.walk(folder, topdown=False):
    for path in (Path(parent, name) for name in names if only in ("", name)):
      if not path.stat().st_size:
        raise DamagedError(f"{path.name} is empty")
      sync(path)
    sync(Path(parent))


def read_manifest(directory: Path) -> dict[str, Any]:
  """What `finish` wrote.

  Raises:
    DamagedError: it is gone or is not what was written.
  """
  try:
    manifest = require_json(directory / MANIFEST, _SHAPE, "copy it again")
  except ConfigError as e:
    raise DamagedError(f"its manifest is unreadable: {e}") from e
  if manifest.pop("crc32") != _crc32(manifest):
    raise DamagedError("its manifest has changed")
  if mismatch(manifest.get("split"), (_SPLIT, None)):
    raise DamagedError("its manifest has no split of gradients")
  name = whole_number(directory.name)
  if name is not None and name != manifest["step"]:
    raise DamagedError(f"a copy, or another name, of that of step {manifest['step']}")
  return manifest


def load(directory: Path, abstract: Any, *, pad=False, partial=False) -> Any:
  """The arrays, sharded as in `abstract`.

  Args:
    directory: of the checkpoint.
    abstract: a tree of `jax.ShapeDtypeStruct`s with shardings.
    pad: fill with zeros where an array is smaller than asked for, and cut off where
      it is larger.
    partial: `abstract` is a part of the tree, e.g. {"params": …}; no more is read.

  Raises:
    DamagedError: something cannot be read.
  """
  ocp, path = _orbax()
  handler, args = ocp.StandardCheckpointHandler, ocp.args.StandardRestore
  options: dict[str, Any] = {"strict": not pad}
  if partial:
    handler, args = ocp.PyTreeCheckpointHandler, ocp.args.PyTreeRestore
    restore_args = ocp.checkpoint_utils.construct_restore_args(abstract)
    options = {"restore_args": restore_args, "partial_restore": True}
  # Where one read fails, others end unfinished, and Python warns of each.
  with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
    try:
      with _unmistakable(directory) as plain:
        where = path(plain / _STATE)
        limit: Any = write_limit.limit_to_read(abstract, _chunks(ocp, where))
        reader = handler(restore_concurrent_gb=limit)
        return reader.restore(where, args=args(abstract, **options))
    except Exception as e:
      problem = one_line(e)
    gc.collect()
  raise DamagedError(problem)


def _chunks(ocp: Any, where: Any) -> dict[str, tuple[int, ...]]:
  """Shape of the chunks of each array of a checkpoint, by path."""
  tree = ocp.StandardCheckpointHandler().metadata(where)
  found = jax.tree_util.tree_leaves_with_path(getattr(tree, "tree", tree))
  return {path_name(path): tuple(x.storage.chunk_shape) for path, x in found}


def leaf_reader(directory: Path) -> Callable[[str], np.ndarray]:
  """A function that reads one leaf by its name in the manifest, whole, onto the host.

  Raises:
    DamagedError: it cannot be read; of a leaf: when that is asked for.
  """
  ocp, path = _orbax()
  handler = ocp.PyTreeCheckpointHandler()
  manifest = read_manifest(directory)["leaves"]
  try:
    with _unmistakable(directory) as where:
      tree: Any = handler.metadata(path(where / _STATE))
    flat, structure = jax.tree_util.tree_flatten_with_path(getattr(tree, "tree", tree))
  except Exception as e:
    raise DamagedError(one_line(e)) from e
  names = [path_name(p) for p, _ in flat]
  to_host = ocp.RestoreArgs(restore_type=np.ndarray)
  restore_args = jax.tree.unflatten(structure, [to_host] * len(names))

  def read(name: str) -> np.ndarray:
    wanted = [np.zeros(()) if n == name else ocp.PLACEHOLDER for n in names]
    item = jax.tree.unflatten(structure, wanted)
    args = ocp.args.PyTreeRestore(item=item, restore_args=restore_args)
    try:
      with _unmistakable(directory) as where:
        restored = handler.restore(path(where / _STATE), args=args)
    except Exception as e:
      raise DamagedError(one_line(e)) from e
    (leaf,) = (x for x in jax.tree.leaves(restored) if x is not ocp.PLACEHOLDER)
    if not is_of(leaf, manifest[name]["checksum"]):
      raise DamagedError(f"the checksum of {name} does not match")
    return leaf

  return read


def why_unsaved(step: int, lack: str, why: str, directory: Path, size: int) -> str:
  """One line of why a checkpoint could not be written.

  Args:
    step: of the checkpoint.
    lack: of what (`lack_of`).
    why: what was raised, as one line.
    directory: of the checkpoints; what was written there is removed by now.
    size: bytes of the state.
  """
  if lack == "inodes":
    why = f"no inodes (files) were left in {directory}"
  elif lack:
    free = shutil.disk_usage(directory).free
    why = f"the disk or a quota was full ({byte_size(size)} needed, now "
    if free < size:
      why = f"the disk is full, {byte_size(size - free)} are missing "
      why += f"({byte_size(size)} needed, "
    why += f"{byte_size(free)} free in {directory})"
  return f"checkpoint of step {step} could not be saved: {why}"


def is_of_disk(error: BaseException) -> bool:
  """Whether a disk or its server failed, and not the program."""
  return isinstance(error, OSError) or error_number(error) is not None


def error_number(error: BaseException) -> int | None:
  """The system's number of an error, also of one that TensorStore gives as text."""
  if isinstance(error, OSError):
    return error.errno
  if isinstance(error, DamagedError):  # it has not kept what it was given
    return errno.EIO
  # TensorStore's errors end like "Input/output error [os_error_code='5']".
  if number := re.search(r"os_error_code='(\d+)'", str(error)):
    return int(number[1])
  return errno.ENOSPC if any(text in str(error) for text in _FULL) else None


def lack_of(error: BaseException, directory: Path) -> str:
  """Name what a disk lacked, "room" or "inodes"; "": neither was missing."""
  if error_number(error) not in (errno.ENOSPC, errno.EDQUOT):
    return ""
  return "inodes" if lacks_inodes(directory) else "room"


def one_line(error: BaseException) -> str:
  """An error as one line of at most some 140 characters."""
  text = str(error).strip().splitlines()
  if not isinstance(error, OSError) and "os_error_code" in str(error):
    text = [f"{os.strerror(error_number(error) or 0)}: {text[0]}"]  # its end is cut off
  return f"{type(error).__name__}: {text[0][:120] if text else ''}"


def check_same_leaves(path: Path, saved: dict[str, Any], wanted: dict[str, Any]):
  """Refuse a checkpoint whose leaves are not those of this experiment.

  Args:
    path: for the message.
    saved: `checksum.describe` of what is there.
    wanted: the same of what is asked for.

  Raises:
    ConfigError: names the first that differs, those of the exchange last: its
      state has the shapes of the model, which is named first.
  """
  names = saved.keys() | wanted.keys()
  for of_exchange, name in sorted((n.startswith("exchange_state/"), n) for n in names):
    part = "exchange" if of_exchange else "model and optimizer"
    there, here = saved.get(name), wanted.get(name)
    if there is None:
      difference = f"it has no {name}, which this {part} needs"
    elif here is None:
      difference = f"it has {name}, which this {part} does not keep"
    elif any(there[key] != here[key] for key in ("shape", "dtype")):
      old, new = (f"{x['dtype']}{x['shape']}" for x in (there, here))
      difference = f"{name} is {old} there and {new} here"
    else:
      continue
    remedy = "resume with the exchange it was saved with, or " * of_exchange
    why = f"a checkpoint of another experiment, {difference}; {remedy}use another --workdir"
    raise ConfigError(f"{path}: {why}")


def _crc32(manifest: dict[str, Any]) -> int:
  return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


@functools.cache
def _orbax() -> tuple[Any, Any]:
  """Orbax and its path type, when they are first needed.

  The import takes 0.3 s, and a run that starts anew saves only later.
  """
  import orbax.checkpoint as ocp
  from etils import epath

  for logger in ("absl", "asyncio"):
    logging.getLogger(logger).addFilter(_is_not_raised_too)
  report = sys.unraisablehook
  sys.unraisablehook = lambda error: None if _is_left_over(error) else report(error)
  return ocp, epath.Path


def _is_not_raised_too(record: logging.LogRecord) -> bool:
  """Drops the tracebacks that Orbax's threads log of errors they also raise."""
  if not record.exc_info:
    return True
  # asyncio's record names what was awaited, or only its traceback does.
  lines = traceback.format_exception(*record.exc_info)
  text = "".join([record.pathname, record.getMessage(), *lines])
  return not any(word in text for word in ("orbax", "OCDBT", "tensorstore"))


def _is_left_over(unraisable: Any) -> bool:
  """Whether it is of the other reads and writes, after one of them has failed.

  Orbax closes its event loop then: their coroutines end, and TensorStore's threads
  find no loop to report to.
  """
  if inspect.iscoroutine(unraisable.object):
    return "orbax" in unraisable.object.cr_code.co_filename
  error = unraisable.exc_value
  return isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
