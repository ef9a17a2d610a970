"""Leaving at once, wherever the main thread is, with the stacks of all threads.

`os._exit` runs no exit handlers: JAX's own would wait 300 s for processes that
are gone (`jax_shutdown_timeout`, measured). faulthandler writes the stacks of
all threads from C, and its timer needs no GIL: it is the last resort of a process
whose main thread holds the GIL for ever, which no Python thread can end.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import traceback
from pathlib import Path
from typing import NoReturn

from jaxscale.cluster import jax_internals

_STDERR = 2  # the descriptor: a notebook's sys.stderr has none
# Writing stacks to a dead file system must not keep a process that has to go. At a load
# of twenty a core, 0.8 s were too few, and the exit code was lost.
_DUMP_S = 5.0
_FLUSH_S = 0.1


def print_line(line: str) -> None:
  """One line to stderr, past Python's buffers and their locks."""
  with contextlib.suppress(OSError):  # nobody reads us any more
    # In one write, so that the lines of many processes stay whole.
    os.write(_STDERR, (line + "\n").encode(errors="replace"))


def note(folder: Path | None) -> str:
  """The end of a fault's line: where the stacks are."""
  return f"; stacks in {folder}" if folder else ""


def leave(code: int, folder: Path | None, rank: int, line: str) -> NoReturn:
  """End this process within seconds, from any thread.

  Args:
    code: the exit code. (1 where the folder's file system does not answer.)
    folder: for the stacks of all threads; None: they are not written.
    rank: of this process.
    line: why, to head the stacks.
  """
  faulthandler.dump_traceback_later(_DUMP_S, exit=True, file=_STDERR)
  if folder is not None:
    path = folder / f"process-{rank}.txt"
    try:
      folder.mkdir(parents=True, exist_ok=True)
      path.unlink(missing_ok=True)
      with path.open("x") as file:  # through no link that somebody else has put there
        file.write(line + "\n\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
    except OSError as e:
      print_line(f"{path}: stacks cannot be written ({e.strerror})")
  flush()
  os._exit(code)


def find_callback() -> str:
  """Return which function JAX has called on the host, in whatever thread; "": none.

  A host callback of a model, such as `jax.pure_callback`, that does not return makes
  all processes wait in a step.
  """
  for frame in sys._current_frames().values():
    outermost = ""  # inside of what is looked at, and not JAX's own
    for inner, line in traceback.walk_stack(frame):
      code = inner.f_code
      if jax_internals.runs_callback(code) and outermost:
        return f"a callback of the model ({outermost})"
      if not jax_internals.is_jax(code):
        outermost = f"{code.co_name} in {code.co_filename}:{line}"
  return ""


def flush() -> None:
  """Write out what was printed, unless a thread that is stuck holds a lock on it."""

  def flush_all() -> None:
    for stream in (sys.stdout, sys.stderr):
      with contextlib.suppress(OSError, ValueError, AttributeError):
        stream.flush()

  flushing = threading.Thread(target=flush_all, daemon=True)
  flushing.start()
  flushing.join(_FLUSH_S)


def arm(seconds: float) -> None:
  """End this process, stacks on stderr, if this is not called again in time.

  Args:
    seconds: without another call, because no Python thread could run.
  """
  faulthandler.dump_traceback_later(seconds, exit=True, file=_STDERR)


def disarm() -> None:
  """Undo `arm`."""
  faulthandler.cancel_dump_traceback_later()
