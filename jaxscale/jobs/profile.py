"""Request for a trace of the next steps of a training run, on any nodes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxscale.checkpoint import lock
from jaxscale.errors import ConfigError, printable
from jaxscale.files import read_json, readable_text
from jaxscale.jobs import folder as folders
from jaxscale.run import trace_request
from jaxscale.run.trace_request import process_file, session_folder

_POLL_S, _CHECK_EVERY = 0.2, 25  # every five seconds, check that the run is alive


def find_workdir(name: str, runs: str, task: int = 0) -> Path:
  """Find the workdir of a run.

  Args:
    name: the path of the workdir, or the name or folder of a run.
    runs: the directory of all runs.
    task: the index of the trial of a sweep.

  Raises:
    ConfigError: the run or the trial does not exist.
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
  log: Callable[[str], None] = print,
  *,
  trust: bool = False,
) -> Path:
  """Request a trace of the next steps of a run, and wait until it is written.

  Args:
    workdir: the workdir of the run.
    steps: the number of steps.
    processes: the ranks that trace; each writes a file.
    wait_s: the largest number of seconds to wait.
    log: a function that prints a line about the wait.
    trust: whether to write into a workdir of another user.

  Returns:
    The folder with a file per process.

  Raises:
    ConfigError: no run is training in the workdir, no trace was written, or the workdir
      belongs to another user.
  """
  if not trust:
    folders.require_own(workdir, "have its owner trace it, or write to it as you by --trust")
  if _owner(workdir) is None:
    raise ConfigError(f"{workdir}: no run is training in this workdir; start one")
  described = read_json(workdir / "config.json", {"processes": int})
  count = described.get("processes", max(processes) + 1)
  if max(processes) >= count:
    have = f"0 … {count - 1}" if count > 1 else "0, the only process"
    raise ConfigError(f"--processes={max(processes)}: out of range for this run; give {have}")
  request = trace_request.make(steps, tuple(processes), wait_s)
  folder = session_folder(workdir, request.name)
  trace_request.write(workdir, request)
  try:
    log(f"{workdir}: requested a trace of {steps} steps; waiting")
    _wait(workdir, folder, request, wait_s)
  finally:
    trace_request.withdraw(workdir, request)
  return folder


def _wait(workdir: Path, folder: Path, request, wait_s: float) -> None:
  deadline = time.monotonic() + wait_s
  waiting = set(request.processes)
  for polls in itertools.count():
    is_alive = polls % _CHECK_EVERY or _owner(workdir)  # before the last look at the files
    for process in sorted(waiting):
      if problem := readable_text(process_file(folder, process, ".error"), 2000):
        raise ConfigError(f"{workdir}: process {process}: {printable(problem.strip())}")
    waiting -= {p for p in waiting if process_file(folder, p).exists()}
    if not waiting:
      return
    if not is_alive:
      raise ConfigError(f"{workdir}: the run ended without a trace; resume it and try again")
    if time.monotonic() > deadline:
      late = f"no trace from process {min(waiting)} in {wait_s:.0f} s"
      hint = "it may be evaluating, saving or compiling, or not see this host's files yet"
      raise ConfigError(f"{workdir}: {late}; {hint}: use a longer --timeout")
    time.sleep(_POLL_S)


def _owner(workdir: Path) -> lock.LockOwner | None:
  with folders.one_line(workdir, "ask the owner of the run to do this"):
    return lock.running(workdir)
