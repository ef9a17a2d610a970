"""How a command ends: its exit code, and one line for what its user did wrong."""

from __future__ import annotations

import errno
import functools
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NamedTuple, NoReturn, ParamSpec

EXIT_DONE, EXIT_CRASH, EXIT_USER, EXIT_INTERRUPTED = 0, 1, 2, 130
EXIT_PREEMPTED = 85  # asked to stop, and saved: requeue
EXIT_HANG = 86
EXIT_GIVE_UP = 93  # do not requeue: it would only fail again
# Of a run that was asked to stop, and saved, by `StopRequest.kind`.
EXIT_OF_STOP = {"preemption": EXIT_PREEMPTED, "interrupt": EXIT_INTERRUPTED}

# What a disk or its server does, and not a fault of the program.
_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE)
DISK_ADVICE = "make room, and start it again: it resumes from its newest checkpoint"

P = ParamSpec("P")


class ConfigError(ValueError):
  """An invalid setting; its message of one line names field, value and remedy."""


class GiveUpError(Exception):
  """A restart would only fail again; the message says why."""

  exit_code = EXIT_GIVE_UP


class UserMessage(NamedTuple):
  """One line about an error for the user, and the exit code."""

  line: str
  code: int


def user_message(error: BaseException) -> UserMessage | None:
  """The line for an error that is not the program's; None: it needs a traceback.

  Those are ConfigErrors, what disks do, and errors with an `exit_code`, whose
  `advice`, if there is one, ends the line.

  Example:
    >>> user_message(ConfigError("--sizes=x: give whole numbers"))
    UserMessage(line='--sizes=x: give whole numbers', code=2)
    >>> user_message(KeyError("x"))
  """
  if isinstance(error, ConfigError):
    return UserMessage(str(error), EXIT_USER)
  if code := getattr(error, "exit_code", None):
    advice = getattr(error, "advice", "")
    return UserMessage(f"{error}; {advice}" if advice else str(error), code)
  if isinstance(error, OSError) and error.errno in _OF_DISKS:
    where = f"{error.filename}: " if error.filename else ""
    return UserMessage(f"{where}{error.strerror}; {DISK_ADVICE}", EXIT_CRASH)
  return None


def one_line_errors(main: Callable[P, int]) -> Callable[P, int]:
  """A `main` whose errors of its user become one line on stderr and a code.

  Example:
    >>> @one_line_errors
    ... def main():
    ...   raise ConfigError("--sizes=x: give whole numbers")
    >>> main()
    2
  """

  @functools.wraps(main)
  def guarded(*args: P.args, **kwargs: P.kwargs) -> int:
    try:
      return main(*args, **kwargs)
    except Exception as e:
      if (message := user_message(e)) is None:
        raise
      print(f"error: {message.line}", file=sys.stderr)
      return message.code

  return guarded


def leave(main: Callable[[list[str]], int]) -> NoReturn:
  """End the process with the exit code of a command's `main`.

  One of several processes that fails is ended by `cluster.open_session` before.
  """
  code = EXIT_CRASH
  try:
    code = main(sys.argv[1:])
  except BrokenPipeError:  # `--help | head`: the reader has enough
    os._exit(EXIT_DONE)
  except Exception:
    traceback.print_exc()
  sys.stdout.flush()
  sys.stderr.flush()
  # Slurm sends SIGTERM to what is left of a job as soon as one process has ended or
  # the job is requeued: that must not take the exit code away. (Python gives its own
  # handlers back to the system before it has ended; what is ignored stays ignored.)
  for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, signal.SIG_IGN)
  sys.exit(code)
