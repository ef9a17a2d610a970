"""List the files below a directory, by the same rules for every reader of folders."""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxscale.data.dataset import file_identity, names_identity
from jaxscale.errors import invalid
from jaxscale.metrics.text import few, plural

# Files and folders that macOS, Windows and NFS add to a user's folders.
_LITTER = {".ds_store", "__macosx", "thumbs.db", "ehthumbs.db", "desktop.ini"}
_LITTER_STARTS = ("._", ".nfs")
_MAX_FILES = 1024  # files whose contents are hashed together; of more the names count as well


class Tree(NamedTuple):
  """Files below a directory, without hidden ones.

  Attributes:
    files: the relative paths, sorted by folder, then by name (by code point).
    folders: the modification time of each folder that was read, by path.
    left_out: the number of skipped entries by kind.
  """

  files: list[str]
  folders: dict[str, int]
  left_out: Counter[str]


def is_visible(name: str) -> bool:
  """Return whether a name is neither hidden nor created by an operating system.

  Example:
    >>> [is_visible(name) for name in ("a.jpg", "._a.jpg", "Thumbs.db")]
    [True, False, False]
  """
  return name[0] != "." and name.lower() not in _LITTER


def tree(root: str, is_file: Callable[[str], bool] = lambda name: False) -> Tree:
  """List the files below a directory; links to folders are followed.

  Args:
    root: the directory.
    is_file: a function of a link's name; if it returns True, the link counts as a file
      without a request to the file system for its target.

  Raises:
    ConfigError: a folder cannot be read.
  """
  listing = Tree([], {}, Counter())

  def visit(inner: str, above: frozenset[tuple[int, int]]) -> None:
    path = os.path.join(root, inner) if inner else root
    status = os.stat(path)
    if (identity := (status.st_dev, status.st_ino)) in above:
      return  # It is a link to a folder that contains it.
    listing.folders[path] = status.st_mtime_ns
    with os.scandir(path) as entries:
      for entry in entries:
        name = os.path.join(inner, entry.name)
        if not is_visible(entry.name):
          litter = entry.name.lower() in _LITTER
          if not litter and not entry.name.startswith(_LITTER_STARTS):
            listing.left_out["hidden"] += 1
        elif is_folder(entry, follow_symlinks=not is_file(entry.name)):
          visit(name, above | {identity})
        elif entry.is_file(follow_symlinks=False) or entry.is_symlink():
          listing.files.append(name)
        else:
          listing.left_out["device or pipe"] += 1

  try:
    visit("", frozenset())
  except PermissionError as e:
    raise invalid(str(e.filename), ..., "cannot be read", "change its permissions") from None
  listing.files.sort(key=os.path.split)
  return listing


def is_folder(entry: os.DirEntry[str], *, follow_symlinks: bool = True) -> bool:
  """Return whether an entry is a folder or a link to one."""
  try:
    return entry.is_dir(follow_symlinks=follow_symlinks)
  except OSError:  # A link to itself counts as an unreadable file.
    return False


def kinds(files: Iterable[str]) -> Counter[str]:
  """Count files by their extension.

  Example:
    >>> kinds(["a/x.TXT", "y.txt", "LICENSE"])
    Counter({'.txt': 2, 'without an ending': 1})
  """
  endings = (os.path.splitext(file)[1].lower() for file in files)
  return Counter(ending or "without an ending" for ending in endings)


def left_out_note(where: object, counts: Counter[str], taken: str) -> tuple[str, ...]:
  """Return a note on the files that a reader of a folder skips, if there are any.

  Args:
    where: the folder.
    counts: the number of skipped files by kind.
    taken: a description of the files that the reader takes.
  """
  if not counts:
    return ()
  ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
  named = few(f"{count:,} {kind}" for kind, count in ordered)
  return (f"{where}: skipping {plural(counts.total(), 'file')} ({named}); {taken}",)


def matching_paths(path: str, suffixes: Sequence[str], *, is_one: bool = False) -> list[Path]:
  """Return the files of a path in the order of their names.

  Args:
    path: a file, a folder of files, or a pattern such as "data/train-*.parquet".
    suffixes: the extensions of the files of a folder.
    is_one: whether a folder counts as one file.

  Raises:
    ConfigError: there is no such file.
  """
  if os.path.isfile(path) or (is_one and os.path.isdir(path)):
    return [Path(path)]
  if os.path.isdir(path):
    names = tree(path).files
    files = [Path(path, name) for name in names if name.lower().endswith((*suffixes,))]
    problem = f"has no files that end in {' or '.join(suffixes)}"
  else:
    files = [Path(name) for name in sorted(glob.glob(path))]
    problem = "matches no file" if glob.has_magic(path) else "does not exist"
  if not files:
    raise invalid("path", path, problem, "correct it")
  return files


def paths_identity(paths: Sequence[Path]) -> Mapping[str, Any]:
  """Return the identity of files in order, and of all files below folders."""
  names = [(path, name) for path in paths for name in (_below(path) if path.is_dir() else [""])]
  files = [path / name for path, name in names]
  if len(files) <= _MAX_FILES:
    return file_identity(files)
  return names_identity(np.array([os.fsencode(name) for _, name in names]), lambda i: str(files[i]))


def _below(folder: Path) -> list[str]:
  found = (Path(inner, name) for inner, _, names in os.walk(folder) for name in names)
  return sorted(str(path.relative_to(folder)) for path in found)
