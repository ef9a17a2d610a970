"""Whose fault it is that an example cannot be read: its own, or the system's.

A damaged example is passed over and counted. A process without descriptors, or a
network file system that is away, makes whole examples unreadable: to pass over
those would be to train on less than what is there, and to say it is damage.
"""

from __future__ import annotations

import errno
import os

_NAMES = (
  "EMFILE", "ENFILE", "ENOMEM", "ENOBUFS",  # the process or the machine is full
  "EIO", "EREMOTEIO", "ESTALE", "ENODEV",  # the disk or the mount
  "ENOTCONN", "ECONNREFUSED", "ECONNRESET", "ECONNABORTED", "ESHUTDOWN", "EPIPE",
  "ETIMEDOUT", "EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN", "ENETUNREACH", "ENETRESET",
  "ENOLINK", "ECOMM",
)  # fmt: skip
_SYSTEM = frozenset(getattr(errno, n) for n in _NAMES if hasattr(errno, n))


def raise_if_systems(error: Exception, name: str) -> None:
  """Raise, with the example's name, what says nothing about the example itself.

  Args:
    error: met while reading. Readers in C++ give no number: theirs is known by
      the system's words for it.
    name: of the example.

  Raises:
    OSError: descriptors or memory have run out, or disk or network are away.

  Example:
    >>> raise_if_systems(FileNotFoundError(errno.ENOENT, "gone"), "a/1.JPEG")
  """
  number = error.errno if isinstance(error, OSError) else _number(str(error))
  if number is not None and number in _SYSTEM:
    hint = "raise `ulimit -n`" if number == errno.EMFILE else "see to it and go on"
    text = f"{os.strerror(number)}: not passed over as damage, {hint}"
    raise OSError(number, text, name) from error


def _number(text: str) -> int | None:
  return next((n for n in _SYSTEM if os.strerror(n) in text), None)
