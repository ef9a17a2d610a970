"""Recognize read errors of the system, and replace damaged examples.

A damaged example is skipped and counted. But without free file descriptors, or with a network
file system that is unavailable, intact examples are unreadable: skipping these would train on
a part of the data and report them as damaged.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import TypeVar

from jaxscale.errors import ConfigError

_MAX_UNREADABLE = 1000  # More unreadable examples in a row indicate a wrong path.

T = TypeVar("T")

# Limits of the process or the machine; errors of disks or mounts; errors of the network.
_NAMES = """EMFILE ENFILE ENOMEM ENOBUFS EIO EREMOTEIO ESTALE ENODEV
  ENOTCONN ECONNREFUSED ECONNRESET ECONNABORTED ESHUTDOWN EPIPE ETIMEDOUT EHOSTDOWN EHOSTUNREACH
  ENETDOWN ENETUNREACH ENETRESET ENOLINK ECOMM""".split()
_SYSTEM = frozenset(getattr(errno, n) for n in _NAMES if hasattr(errno, n))


def raise_if_system_error(error: Exception, name: str) -> None:
  """Raise an error that is not due to the example itself, with the example's name.

  Args:
    error: the error of a read. A reader in C++ gives no errno, so its error is recognized by
      the system's message in its text.
    name: the name of the example.

  Raises:
    OSError: descriptors or memory are exhausted, or a disk or the network failed.

  Example:
    >>> raise_if_system_error(FileNotFoundError(errno.ENOENT, "gone"), "a/1.JPEG")
  """
  if isinstance(error, OSError):
    number = error.errno
  else:
    number = next((n for n in _SYSTEM if os.strerror(n) in str(error)), None)
  if number is not None and number in _SYSTEM:
    hint = "raise `ulimit -n`" if number == errno.EMFILE else "fix it and resume"
    text = f"{os.strerror(number)}: a system error, not a damaged example; {hint}"
    raise OSError(number, text, name) from error


def next_readable(
  source: str,
  index: int,
  count: int,
  read: Callable[[int], T | None],
  after: Callable[[int], int],
  first: Callable[[], str],
) -> T:
  """Return the next readable example after a damaged one, wrapping around at the end.

  Args:
    source: the name of the dataset, for the error.
    index: the index of the damaged example.
    count: the number of examples.
    read: a function of an index that returns the example, or None if it is damaged.
    after: a function of a damaged index that returns the next one to try, up to `count`.
    first: a function that returns the name of the damaged example, for the error.

  Raises:
    ConfigError: too many examples in a row are damaged.

  Example:
    >>> next_readable("five", 3, 5, [7, 8, 9, None, None].__getitem__, (1).__add__, str)
    7
  """
  tries, other, passed = 0, index, 0
  while tries < _MAX_UNREADABLE and passed < count - 1:
    following = after(other)
    tries, passed, other = tries + 1, passed + following - other, following % count
    if passed < count and (example := read(other)) is not None:
      return example
  problem = f"{max(passed, tries) + 1:,} examples in a row cannot be read, the first is {first()}"
  raise ConfigError(f"{source}: {problem}; copy them again, or check --config.data")
