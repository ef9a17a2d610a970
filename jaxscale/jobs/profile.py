"""Asking a run that trains, here or on other nodes, for a trace of its next steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxscale.checkpoint import lock
from jaxscale.errors import ConfigError, printable
from jaxscale.files import read_json, readable_text
from jaxscale.jobs import folder as folders
from jaxscale.run import trace_request
from jaxscale.run.trace_request import process_file, session_folder

_POLL_S, _CHECK_EVERY = 0.2, 25  # whether the run is alive, every five seconds


def find_workdir(name: str, runs: str, task: int = 0) -> Path:
  """Find the workdir of a run.

  Args:
    name: path of the workdir, or the name or the folder of a run.
    runs: the directory of all runs.
    task: which trial of a sweep.

  Raises:
    ConfigError: there is no such run or trial.
  """
  folder = folders.find(name, runs, workdirs=True)
  if not (folder / "run.json").exists():
    return folder
  spec = folders.read_spec(folder)
  spec.check_task(task)
  return spec.workdir(task)


def trace(
  workdir: Path,
  steps: int = 10,
  processes: Sequence[int] = (0,),
  wait_s: float = 600.0,
  say: Callable[[str], None] = print,
) -> Path:
  """Have a run trace its next steps, and wait until that is written.

  Args:
    workdir: of the run.
    steps: how many.
    processes: which of them trace; each writes a file.
    wait_s: at most so many seconds.
    say: called with a line on what is waited for.

  Returns:
    The folder with a file per process.

  Raises:
    ConfigError: nothing trains there, or no trace came: the line says why.
  """
  if _owner(workdir) is None:
    hint = "start it, or print an earlier trace by --summary"
    raise ConfigError(f"{workdir}: no run trains there; {hint}")
  described = read_json(workdir / "config.json", {"processes": int})
  count = described.get("processes", max(processes) + 1)
  if max(processes) >= count:
    have = f"0 … {count - 1}" if count > 1 else "0, the only one"
    raise ConfigError(f"--processes={max(processes)}: the run has no such, give {have}")
  request = trace_request.make(steps, tuple(processes), wait_s)
  folder = session_folder(workdir, request.name)
  trace_request.write(workdir, request)
  try:
    say(f"{workdir}: asked for a trace of {steps} steps; waiting")
    _wait(workdir, folder, request, wait_s)
  finally:
    trace_request.withdraw(workdir, request)
  return folder


def _wait(workdir: Path, folder: Path, request, wait_s: float) -> None:
  deadline = time.monotonic() + wait_s
  waiting, polls = set(request.processes), 0
  while True:
    is_alive = polls % _CHECK_EVERY or _owner(workdir)  # asked before the last look
    for process in sorted(waiting):
      if why := readable_text(process_file(folder, process, ".error"), 2000):
        raise ConfigError(f"{workdir}: process {process}: {printable(why.strip())}")
    waiting -= {p for p in waiting if process_file(folder, p).exists()}
    if not waiting:
      return
    if not is_alive:
      raise ConfigError(f"{workdir}: the run ended without a trace; start it again")
    if time.monotonic() > deadline:
      late = f"no trace from process {min(waiting)} in {wait_s:.0f} s"
      hint = "it may evaluate, save or compile, or see no file of this host yet"
      raise ConfigError(f"{workdir}: {late}; {hint}: give a longer --timeout")
    time.sleep(_POLL_S)
    polls += 1


def _owner(workdir: Path) -> lock.LockOwner | None:
  try:
    return lock.running(workdir)
  except OSError as e:
    raise ConfigError(f"{workdir}: {e.strerror}; have the owner of the run ask") from None
