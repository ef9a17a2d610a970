"""Recognize read errors of the system, as opposed to damaged examples.

A damaged example is skipped and counted. But without free file descriptors, or with a network
file system that is unavailable, intact examples are unreadable: skipping these would train on
a part of the data and report them as damaged.
"""

from __future__ import annotations

import errno
import os

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
