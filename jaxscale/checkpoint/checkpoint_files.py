"""Write and read the files of one checkpoint, and describe errors in one line.

Orbax's handler writes and reads the arrays; this module does not communicate with other
processes. (Orbax's `Checkpointer` communicates from a background thread: a process that
cannot write, because its disk is full, never reaches the barrier where the others wait.)

A checkpoint is a directory with `state/`, which plain Orbax can also read
(`StandardCheckpointer().restore`), and `manifest.json`, which has the step, the metrics, the
shape, dtype and checksum of every leaf, and a checksum of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import inspect
import json
import logging
import os
import re
import shutil
import sys
import traceback
import zlib
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxscale.checkpoint import write_limit
from jaxscale.checkpoint.checksum import DamagedError, Rows, Shards, is_of
from jaxscale.checkpoint.read_back import check_index, compare, open_untrusted
from jaxscale.errors import ConfigError, lacks_inodes
from jaxscale.files import mismatch, replace_text, require_json, sync, whole_number
from jaxscale.mesh import array_from_parts
from jaxscale.metrics.text import byte_size
from jaxscale.optim.tree_paths import path_name

MANIFEST = "manifest.json"
_STATE = "state"
_SPLIT = {"mesh": {str: int}, "over": [str], "dims": {str: [(str, None)]}}
_LEAF = {"shape": [int], "dtype": str, "checksum": str}
_SHAPE = {"step": int, "metrics": {str: float}, "leaves": {str: _LEAF}, "crc32": int}
# Characters of a path that Orbax or TensorStore misinterpret or reject.
_MISTAKABLE = re.compile(r"[\[\]?*\\\ud800-\udfff]")
# Texts by which TensorStore reports a full disk or quota.
_FULL = ("No space left on device", "Disk quota exceeded", "RESOURCE_EXHAUSTED")


def start_writing(directory: Path, state: Any) -> Callable[[], None]:
  """Copy this process's part of the state off the devices, and begin to write it.

  Args:
    directory: the directory of the checkpoint, which exists.
    state: a tree of `jax.Array`s, which may be donated as soon as this returns.

  Returns:
    A function that waits until the part is on disk, and raises the error if writing failed.
  """
  ocp, path = _orbax()
  limit: Any = write_limit.limit_to_write(state)
  # Compression would save 8 % of the disk for float32 weights, but take about twice the CPU
  # time (docs/reliability.md), which the training steps need meanwhile.
  handler = ocp.PyTreeCheckpointHandler(save_concurrent_gb=limit, use_compression=False)
  small = ocp.SaveArgs(chunk_byte_size=write_limit.CHUNK)
  args = ocp.args.PyTreeSave(state, save_args=jax.tree.map(lambda _: small, state))
  with contextlib.ExitStack() as opened:
    where = path(opened.enter_context(_unmistakable(directory)) / _STATE)
    saving = handler.async_save(where, args=args)

    # A thread of its own is needed because a notebook's thread already runs an event loop.
    with futures.ThreadPoolExecutor(1) as pool:
      parts = pool.submit(asyncio.run, saving).result() or []
    remains = opened.pop_all()

  def wait() -> None:
    # Wait for all writers, also after an error: one that still writes would recreate removed
    # files. The first one is waited for last, so that its error is the one raised.
    with remains as stack:
      for part in parts:
        stack.callback(part.result)

  return wait


def sync_part(directory: Path) -> None:
  """Sync what this process has written to disk, and read its index.

  Raises:
    DamagedError: a file is empty, or the index cannot be read.
  """
  name = f"process_{jax.process_index()}"
  sync_tree(directory / _STATE / f"ocdbt.{name}")
  sync_tree(directory / _STATE / "array_metadatas", name)
  with _unmistakable(directory) as where:
    if (part := where / _STATE / f"ocdbt.{name}").exists():
      check_index(part)


def merge(directory: Path) -> None:
  """Merge the indices of all processes into one; one process calls it."""
  ocp, path = _orbax()
  with _unmistakable(directory) as where:
    ocp.StandardCheckpointHandler().finalize(path(where / _STATE))


def read_back(directory: Path, names: list[str], shards: list[Shards]) -> None:
  """Compare this process's shards with the merged checkpoint, as `read_back.compare`."""
  with _unmistakable(directory) as where:
    compare(where / _STATE, names, shards)


def finish(directory: Path, manifest: dict[str, Any]) -> None:
  """Write the manifest, and sync all files; one process calls it."""
  replace_text(directory / MANIFEST, json.dumps(manifest | {"crc32": _crc32(manifest)}))
  sync_tree(directory)


@contextlib.contextmanager
def _unmistakable(directory: Path) -> Iterator[Path]:
  """Yield a path to the folder that Orbax and TensorStore interpret correctly.

  Orbax passes the whole path to `glob`, which finds no files below `runs/hidden=[8]`, and
  TensorStore treats a backslash as a slash and writes into the wrong folder.
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
  """Return whether `merge` had no effect, as below folders with brackets.

  Until November 2026 such checkpoints were committed; they contain all arrays.
  """
  state = directory / _STATE
  is_missing = not (state / "manifest.ocdbt").exists()
  return is_missing and any(state.glob("ocdbt.process_*"))


def sync_tree(folder: Path, only: str = "") -> None:
  """Sync a folder and all files below it to disk, or only the files of one name.

  TensorStore syncs its own files; Orbax's others would be empty after a power loss.

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
  """Read the manifest that `finish` wrote.

  Raises:
    DamagedError: the manifest is missing or has changed.
  """
  try:
    manifest = require_json(directory / MANIFEST, _SHAPE, "copy it again")
  except ConfigError as e:
    raise DamagedError(f"the manifest is unreadable: {e}") from e
  if manifest.pop("crc32") != _crc32(manifest):
    raise DamagedError("the manifest has changed")
  if mismatch(manifest.get("split"), (_SPLIT, None)):
    raise DamagedError("the manifest does not say how gradients are split")
  if mismatch(manifest.get("rows", {}), {str: [str]}):
    raise DamagedError("the manifest does not say which rows matrices have")
  name = whole_number(directory.name)
  if name is not None and name != manifest["step"]:
    raise DamagedError(f"it is a renamed copy of the checkpoint of step {manifest['step']}")
  return manifest


def load(directory: Path, abstract: Any, rows: Rows | None = None) -> Any:
  """Load arrays, sharded as in `abstract`.

  Args:
    directory: the directory of the checkpoint.
    abstract: a tree of `jax.ShapeDtypeStruct`s with shardings, or a part of it, e.g.
      {"params": …}. Arrays that are smaller on the disk end with zeros, and larger ones are
      truncated.
    rows: arrays whose rows are read in another order, by name: the row in the file of each
      row, or -1 for zeros.

  Raises:
    DamagedError: an array cannot be read.
  """

  def loaded(path: Any, x: Any) -> jax.Array:
    name = path_name(path)
    array = arrays[name]

    def read(ranges: tuple[tuple[int, int], ...]) -> np.ndarray:
      if rows is None or name not in rows:
        return read_range(ranges)
      last = array.shape[0]
      order = [last if row < 0 else row for row in rows[name][slice(*ranges[0])]]
      return np.concatenate([read_range(((row, row + 1), *ranges[1:])) for row in order])

    def read_range(ranges: tuple[tuple[int, int], ...]) -> np.ndarray:
      sizes = zip(ranges, array.shape, strict=True)
      there = tuple(slice(min(a, n), min(b, n)) for (a, b), n in sizes)
      part = np.zeros([b - a for a, b in ranges], x.dtype)
      part[tuple(slice(s.stop - s.start) for s in there)] = array[there].read().result()
      return part

    return array_from_parts(x, read)

  names = [path_name(path) for path, _ in jax.tree.leaves_with_path(abstract)]
  try:
    with _unmistakable(directory) as where:
      arrays = open_untrusted(where / _STATE, names)
      return jax.tree.map_with_path(loaded, abstract)
  except Exception as e:
    raise DamagedError(one_line(e)) from e


def leaf_reader(directory: Path) -> Callable[[str], np.ndarray]:
  """Return a function that reads one leaf by its name in the manifest, whole, to the host.

  Raises:
    DamagedError: the checkpoint cannot be read; the function raises it for a leaf.
  """
  manifest = read_manifest(directory)["leaves"]

  def read(name: str) -> np.ndarray:
    try:
      with _unmistakable(directory) as where:
        array = open_untrusted(where / _STATE, [name])[name]
        shape, dtype = [*array.shape], array.dtype.name
        if (shape, dtype) != (saved := (manifest[name]["shape"], manifest[name]["dtype"])):
          raise ValueError(f"{name} is {dtype}{shape}, but the manifest says {saved}")
        leaf = array.read().result()
    except Exception as e:
      raise DamagedError(one_line(e)) from e
    if not is_of(leaf, manifest[name]["checksum"]):
      raise DamagedError(f"the checksum of {name} does not match")
    return leaf

  return read


def unsaved_message(step: int, lack: str, problem: str, directory: Path, size: int) -> str:
  """Describe in one line why a checkpoint could not be written.

  Args:
    step: the step of the checkpoint.
    lack: the missing resource, from `lack_of`.
    problem: the error as one line.
    directory: the directory of checkpoints, from which the failed one is already removed.
    size: the size of the state in bytes.
  """
  if lack == "inodes":
    problem = f"no inodes (files) are left in {directory}"
  elif lack:
    free = shutil.disk_usage(directory).free
    problem = f"the disk or a quota was full ({byte_size(size)} needed, now "
    if free < size:
      problem = f"the disk is full, {byte_size(size - free)} are missing "
      problem += f"({byte_size(size)} needed, "
    problem += f"{byte_size(free)} free in {directory})"
  return f"checkpoint of step {step} could not be saved: {problem}"


def error_number(error: BaseException) -> int | None:
  """Return the errno of an error, also of one that TensorStore reports as text."""
  if isinstance(error, OSError):
    return error.errno
  if isinstance(error, DamagedError):  # The disk did not keep what was written.
    return errno.EIO
  # TensorStore's errors end like "Input/output error [os_error_code='5']".
  if number := re.search(r"os_error_code='(\d+)'", str(error)):
    return int(number[1])
  return errno.ENOSPC if any(text in str(error) for text in _FULL) else None


def lack_of(error: BaseException, directory: Path) -> str:
  """Return the resource that a disk lacked: "room", "inodes", or "" for neither."""
  if error_number(error) not in (errno.ENOSPC, errno.EDQUOT):
    return ""
  return "inodes" if lacks_inodes(directory) else "room"


def one_line(error: BaseException) -> str:
  """Format an error as one line of at most about 140 characters."""
  text = str(error).strip().splitlines()
  if not isinstance(error, OSError) and "os_error_code" in str(error):
    text = [f"{os.strerror(error_number(error) or 0)}: {text[0]}"]  # The end is cut off below.
  return f"{type(error).__name__}: {text[0][:120] if text else ''}"


def check_same_leaves(path: Path, saved: dict[str, Any], requested: dict[str, Any]):
  """Check that a checkpoint has the leaves of this experiment.

  Args:
    path: the path of the checkpoint, for the message.
    saved: the saved leaves, from `checksum.describe`.
    requested: the requested leaves, from `checksum.describe`.

  Raises:
    ConfigError: a leaf differs. The message has the first one; leaves of the exchange come
      last, as their shapes follow from the model's.
  """
  names = saved.keys() | requested.keys()
  for of_exchange, name in sorted((n.startswith("exchange_state/"), n) for n in names):
    part = "exchange" if of_exchange else "model and optimizer"
    saved_leaf, leaf = saved.get(name), requested.get(name)
    if saved_leaf is None:
      difference = f"it lacks {name} of this run's {part}"
    elif leaf is None:
      difference = f"it has {name}, which is not in this run's {part}"
    elif any(saved_leaf[key] != leaf[key] for key in ("shape", "dtype")):
      old, new = (f"{x['dtype']}{x['shape']}" for x in (saved_leaf, leaf))
      difference = f"{name} is {old} in the checkpoint and {new} now"
    else:
      continue
    remedy = "resume with the exchange it was saved with, or " * of_exchange
    problem = f"saved by a different experiment: {difference}; {remedy}use another workdir"
    raise ConfigError(f"{path}: {problem}")


def _crc32(manifest: dict[str, Any]) -> int:
  return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


@functools.cache
def _orbax() -> tuple[Any, Any]:
  """Import Orbax and its path type when they are first needed.

  The import takes 0.3 s, and a run that starts from the beginning only needs them later.
  """
  import orbax.checkpoint as ocp
  from etils import epath

  for logger in ("absl", "asyncio"):
    logging.getLogger(logger).addFilter(_is_not_raised_too)
  report = sys.unraisablehook
  sys.unraisablehook = lambda error: None if _is_left_over(error) else report(error)
  return ocp, epath.Path


def _is_not_raised_too(record: logging.LogRecord) -> bool:
  """Return False for tracebacks that Orbax's threads log of errors that they also raise."""
  if not record.exc_info:
    return True
  # asyncio's record may have the awaited function only in its traceback.
  lines = traceback.format_exception(*record.exc_info)
  text = "".join([record.pathname, record.getMessage(), *lines])
  return not any(word in text for word in ("orbax", "OCDBT", "tensorstore"))


def _is_left_over(unraisable: Any) -> bool:
  """Return whether an error comes from other reads and writes after one has failed.

  Orbax then closes its event loop: their coroutines end, and TensorStore's threads find no
  loop to report to.
  """
  if inspect.iscoroutine(unraisable.object):
    return "orbax" in unraisable.object.cr_code.co_filename
  error = unraisable.exc_value
  return isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
