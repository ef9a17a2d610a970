"""Read errors of the system, which are not those of one example.

A damaged example is skipped and counted. A process without file descriptors, or a
network file system that is away, makes whole examples unreadable: to skip those
would be to train on a part of the data and to report them as damaged.
"""

from __future__ import annotations

import errno
import os

# The process or the machine is full; the disk or the mount; and the network to it.
_NAMES = """EMFILE ENFILE ENOMEM ENOBUFS EIO EREMOTEIO ESTALE ENODEV
  ENOTCONN ECONNREFUSED ECONNRESET ECONNABORTED ESHUTDOWN EPIPE ETIMEDOUT EHOSTDOWN EHOSTUNREACH
  ENETDOWN ENETUNREACH ENETRESET ENOLINK ECOMM""".split()
_SYSTEM = frozenset(getattr(errno, n) for n in _NAMES if hasattr(errno, n))


def raise_if_system_error(error: Exception, name: str) -> None:
  """Raise, with the example's name, an error that is not the example's own.

  Args:
    error: raised by a read. A reader in C++ gives no errno: its error is recognized
      by the system's message in the text.
    name: of the example.

  Raises:
    OSError: descriptors or memory have run out, or disk or network are away.

  Example:
    >>> raise_if_system_error(FileNotFoundError(errno.ENOENT, "gone"), "a/1.JPEG")
  """
  if isinstance(error, OSError):
    number = error.errno
  else:
    number = next((n for n in _SYSTEM if os.strerror(n) in str(error)), None)
  if number is not None and number in _SYSTEM:
    hint = "raise `ulimit -n`" if number == errno.EMFILE else "fix it and resume"
    text = f"{os.strerror(number)}: not skipped as a damaged example, {hint}"
    raise OSError(number, text, name) from error
