"""How a command ends: its exit code, and one line for what its user did wrong."""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn, ParamSpec

from jaxscale.settings import ConfigError

EXIT_DONE, EXIT_CRASH, EXIT_USER, EXIT_INTERRUPTED = 0, 1, 2, 130
EXIT_PREEMPTED = 85  # told to stop, and saved: requeue
EXIT_HANG = 86
EXIT_GIVE_UP = 93  # do not requeue: it would only fail again

P = ParamSpec("P")


def one_line_errors(main: Callable[P, int]) -> Callable[P, int]:
  """A `main` whose ConfigErrors become one line on stderr and `EXIT_USER`.

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
    except ConfigError as e:
      print(f"error: {e}", file=sys.stderr)
      return EXIT_USER

  return guarded


def leave(
  main: Callable[[list[str]], int], others: Callable[[], bool] = lambda: False
) -> NoReturn:
  """End the process with the exit code of a command's `main`.

  Args:
    main: of the command.
    others: called after a failure; whether this is one of several processes.
      `cluster.leave_last`.
  """
  code = EXIT_CRASH
  try:
    code = main(sys.argv[1:])
  except BrokenPipeError:  # `--help | head`: whoever read us has enough
    os._exit(EXIT_DONE)
  except Exception:
    traceback.print_exc()
  sys.stdout.flush()
  sys.stderr.flush()
  if code and others():
    # JAX's exit barrier would hold a failed process for 300 s (and with it the
    # whole job), so leave at once; what had to be written is written.
    os._exit(code)
  sys.exit(code)
