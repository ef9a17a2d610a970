"""Immediate exit from any thread, with the stacks of all threads in a file.

`os._exit` runs no exit handlers: JAX's own would wait 300 s for processes that are gone
(`jax_shutdown_timeout`, measured). faulthandler writes the stacks of all threads from C,
and its timer needs no GIL: it ends a process whose main thread holds the GIL forever,
which no Python thread can do.
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
# Writing stacks to a dead file system must not keep a process alive. At a load of twenty
# per core, 0.8 s were too short, and the exit code was lost.
_DUMP_S = 5.0
_FLUSH_S = 0.1
# Held by the thread that ends this process. A second one, such as that of an error which the
# same fault has caused, would remove its file, and the process may end before it writes its own.
_LEAVING = threading.RLock()


def print_line(line: str) -> None:
  """Write a line to stderr without Python's buffers and their locks."""
  with contextlib.suppress(OSError):  # nobody reads stderr any more
    # One write keeps the lines of many processes apart.
    os.write(_STDERR, (line + "\n").encode(errors="replace"))


def note(folder: Path | None) -> str:
  """Return the end of the line about a fault: the folder of the stacks."""
  return f"; stacks in {folder}" if folder else ""


def leave(code: int, folder: Path | None, rank: int, line: str) -> NoReturn:
  """End this process within seconds, from any thread; the first one writes the stacks.

  Args:
    code: the exit code; the process exits with 1 if the folder's file system hangs.
    folder: the folder for the stacks of all threads; None writes none.
    rank: the rank of this process.
    line: the first line of the file, which says why the process ends.
  """
  _LEAVING.acquire()
  faulthandler.dump_traceback_later(_DUMP_S, exit=True, file=_STDERR)
  if folder is not None:
    path = folder / f"process-{rank}.txt"
    try:
      folder.mkdir(parents=True, exist_ok=True)
      path.unlink(missing_ok=True)
      with path.open("x") as file:  # "x" follows no link that another user has created
        file.write(line + "\n\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
    except OSError as e:
      print_line(f"{path}: cannot write stacks ({e.strerror})")
  flush()
  os._exit(code)


def find_callback() -> str:
  """Return the host function that JAX is calling in any thread; "" if there is none.

  A host callback of a model, such as `jax.pure_callback`, that does not return makes all
  processes wait in a step.
  """
  for frame in sys._current_frames().values():
    outermost = ""  # the outermost frame so far that is not JAX's own
    for inner, line in traceback.walk_stack(frame):
      code = inner.f_code
      if jax_internals.runs_callback(code) and outermost:
        return f"a callback of the model ({outermost})"
      if not jax_internals.is_jax(code):
        outermost = f"{code.co_name} in {code.co_filename}:{line}"
  return ""


def flush() -> None:
  """Flush stdout and stderr, unless a blocked thread holds a lock on them."""

  def flush_all() -> None:
    for stream in (sys.stdout, sys.stderr):
      with contextlib.suppress(OSError, ValueError, AttributeError):
        stream.flush()

  flushing = threading.Thread(target=flush_all, daemon=True)
  flushing.start()
  flushing.join(_FLUSH_S)


def arm(seconds: float) -> None:
  """Exit with stacks on stderr unless `arm` is called again in time.

  Args:
    seconds: the time limit; no call comes if no Python thread can run.
  """
  faulthandler.dump_traceback_later(seconds, exit=True, file=_STDERR)


def disarm() -> None:
  """Cancel the exit that `arm` has scheduled."""
  faulthandler.cancel_dump_traceback_later()
