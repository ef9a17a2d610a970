"""The user's cache: files that are derived from data once, and kept."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from jaxscale.errors import invalid

T = TypeVar("T")


def user_cache() -> Path:
  """Return $XDG_CACHE_HOME/jaxscale, or ~/.cache/jaxscale, or a temporary folder without a home."""
  folder = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
  if (folder := os.path.expanduser(folder)).startswith("~"):
    return Path(_temporary_cache())
  return Path(folder) / "jaxscale"


@functools.cache
def _temporary_cache() -> str:
  """Create a cache for a user without a home, as in a container; it is deleted at exit."""
  folder = tempfile.mkdtemp(prefix="jaxscale-")
  atexit.register(shutil.rmtree, folder, ignore_errors=True)
  line = f"no home directory, so caches are in {folder} until this process ends; set HOME"
  print(f"note: {line}, or XDG_CACHE_HOME", file=sys.stderr)
  return folder


def key_of(identity: object) -> str:
  """Return the name of a file for values that decide its contents."""
  return hashlib.sha256(repr(identity).encode()).hexdigest()[:32]


def kept(
  path: Path, read: Callable[[], T | None], make: Callable[[], T], name: str, work: str, fix: str
) -> T:
  """Return what a file keeps; the first process that lacks it makes it, and the others wait.

  Args:
    path: the file; its folder is created.
    read: a function that returns the kept value, or None if it is missing or damaged.
    make: a function that returns the value and writes the file.
    name: the name of the data, for messages.
    work: a description of the work, such as "tokenizing x"; it is printed.
    fix: the remedy if the folder cannot be written.

  Raises:
    ConfigError: the folder cannot be written.
  """
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    if (value := read()) is None:
      with _locked(path.with_suffix(".lock")):
        if (value := read()) is None:  # Another process may have written it.
          print(f"{work} once into {path}", flush=True)
          value = make()
  except OSError as e:
    problem = f"cannot be kept in {path.parent} ({e.strerror})"
    raise invalid(name, ..., problem, fix) from None
  return value


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
  """Hold a lock file; if the file system has no locks, all processes work at once.

  Each process then writes its own file, and the last one stays.
  """
  with contextlib.ExitStack() as stack:
    # Another user's lock file can be locked but not written to; a link is never followed.
    for access in (os.O_RDWR, os.O_RDONLY):
      with contextlib.suppress(OSError):
        flags = access | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        number = os.open(path, flags, 0o666)
        stack.callback(os.close, number)  # Closing releases the lock.
        fcntl.flock(number, fcntl.LOCK_EX)
        break
    yield
