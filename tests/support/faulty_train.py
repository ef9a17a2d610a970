"""`python -m jaxscale.train` in which one process has a fault, for tests.

    python tests/support/faulty_train.py FAULT RANK STEP NOTE [arguments of the command]

Process RANK does FAULT before step STEP, on the first start of a job, and writes the
time into the file NOTE. What it patches is where batches come from, and where a
checkpoint is written. A process that ends by itself writes the time, and its exit
code, into NOTE.RESTART.RANK; process 0 the time of its first batch into
NOTE.RESTART.first.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxscale import train
from jaxscale.checkpoint import checkpoint_files
from jaxscale.errors import leave
from jaxscale.run import train_phases

LATE_S = 4.0


def rank() -> int:
  """Return the rank of this process, as its launcher set it."""
  return int(os.environ.get("JAXSCALE_PROCESS_ID") or os.environ["SLURM_PROCID"])


def signalled(number: int) -> Callable[[], None]:
  """Send a signal to this process; SIGSTOP needs a moment to stop every thread."""
  return lambda: (os.kill(os.getpid(), number), time.sleep(0.1))[1]


def failed() -> None:
  """Raise an error that the program does not expect."""
  raise RuntimeError("no such class")


KILLED = signalled(signal.SIGKILL)
FAULTS: dict[str, Callable[[], object]] = {
  "nothing": lambda: None,
  "kill late": lambda: (time.sleep(LATE_S), KILLED()),
  **dict.fromkeys(["kill", "kill in save", "kill always"], KILLED),  # always: on later starts, too
  "stop": signalled(signal.SIGSTOP),
  "term": signalled(signal.SIGTERM),
  "usr1": signalled(signal.SIGUSR1),
  "raise": failed,
  "sleep": lambda: time.sleep(10_000),
  # A library that waits and keeps the interpreter's lock.
  "hold": lambda: ctypes.PyDLL(None).sleep(10_000),
}


def main(argv: list[str]) -> int:
  """Train with the fault; return the exit code."""
  fault, who, at, note, *rest = argv
  restart = os.environ.get("SLURM_RESTART_COUNT", "0")
  if rank() == int(who) and (restart == "0" or fault.endswith("always")):
    patch(fault, int(at), Path(note))
  if rank() == 0:
    mark_first(Path(f"{note}.{restart}.first"))
  code = train.main(rest)
  Path(f"{note}.{restart}.{rank()}").write_text(f"{time.time()} {code}")
  return code


def mark_first(path: Path) -> None:
  """Write the time of the first request for batches into a file."""
  batches = train_phases.train_batches

  def train_batches(*args: Any) -> Iterator[Any]:
    if not path.exists():
      path.write_text(repr(time.time()))
    return batches(*args)

  train_phases.train_batches = train_batches


def patch(fault: str, at: int, note: Path) -> None:
  """Make the fault happen in this process."""
  batches, begin = train_phases.train_batches, checkpoint_files.start_writing

  def happens() -> None:
    note.write_text(repr(time.time()))
    FAULTS[fault]()

  def train_batches(experiment: Any, done: int) -> Iterator[Any]:
    for step, batch in enumerate(batches(experiment, done), done + 1):
      if fault == "slow":
        time.sleep(0.05)
      elif step == at:
        happens()
      yield batch

  def start_writing(directory: Path, state: Any) -> Callable[[], None]:
    written = begin(directory, state)
    if int(state.step) >= at:
      happens()
    return written

  if fault == "kill in save":
    checkpoint_files.start_writing = start_writing
  else:
    train_phases.train_batches = train_batches


if __name__ == "__main__":
  leave(main)
