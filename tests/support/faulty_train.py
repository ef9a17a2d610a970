"""`python -m jaxscale.train` in which one process has a fault, for tests.

    python tests/support/faulty_train.py FAULTS RANK STEP NOTE [arguments of the command]

FAULTS has one fault for each start of a job, with commas between them; none follow on
later starts. Process RANK does it before step STEP, or another one (`wait@80`), and
writes the time into the file NOTE. What it patches is where batches come from, where a
checkpoint is written, and where a process learns that all are to stop. A process that
ends by itself writes the time, and its exit code, into NOTE.RESTART.RANK; process 0 the
time of its first batch into NOTE.RESTART.first.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxscale import train
from jaxscale.checkpoint import checkpoint_files
from jaxscale.cluster.watch.stop_consensus import StopConsensus
from jaxscale.errors import leave
from jaxscale.run import train_phases

LATE_S = 4.0
ASKED = threading.Event()  # this process knows that all are to stop


def rank() -> int:
  """Return the rank of this process, as its launcher set it."""
  return int(os.environ.get("JAXSCALE_PROCESS_ID") or os.environ["SLURM_PROCID"])


def signalled(number: int, then: Callable[[], object]) -> Callable[[], object]:
  """Return a function that sends a signal to this process, and waits for its effect."""
  return lambda: (os.kill(os.getpid(), number), then())


def failed() -> None:
  """Raise an error that the program does not expect."""
  raise RuntimeError("no such class")


# Of a process that stops at once: it needs a moment to stop every thread.
KILLED, STOPPED = (signalled(n, lambda: time.sleep(0.1)) for n in (signal.SIGKILL, signal.SIGSTOP))
FAULTS: dict[str, Callable[[], object]] = {
  "nothing": lambda: None,
  "kill late": lambda: (time.sleep(LATE_S), KILLED()),
  **dict.fromkeys(["kill", "kill in save"], KILLED),
  "stop": STOPPED,
  # The others wait for this process in the step: however fast it is, the run does not end.
  "wait": ASKED.wait,
  "term": signalled(signal.SIGTERM, ASKED.wait),
  "usr1": signalled(signal.SIGUSR1, ASKED.wait),
  "raise": failed,
  "sleep": lambda: time.sleep(10_000),
  # A library that waits and keeps the interpreter's lock.
  "hold": lambda: ctypes.PyDLL(None).sleep(10_000),
}


def main(argv: list[str]) -> int:
  """Train with the fault; return the exit code."""
  faults, who, at, note, *rest = argv
  restart = os.environ.get("SLURM_RESTART_COUNT", "0")
  ours = faults.split(",")[int(restart) :]
  if rank() == int(who) and ours:
    fault, _, step = ours[0].partition("@")
    patch(fault, int(step or at), Path(note))
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
  hold = StopConsensus.hold

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

  def hold_and_tell(self: StopConsensus) -> int:
    passed = hold(self)
    ASKED.set()
    return passed

  StopConsensus.hold = hold_and_tell
  if fault == "kill in save":
    checkpoint_files.start_writing = start_writing
  else:
    train_phases.train_batches = train_batches


if __name__ == "__main__":
  leave(main)
