"""The output of the processes of a run, whole or as it comes."""

from __future__ import annotations

import itertools
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxscale.errors import EXIT_DONE, ConfigError
from jaxscale.files import whole_number
from jaxscale.jobs import folder as folders
from jaxscale.jobs.spec import JobSpec

_POLL_S, _ASK_EVERY = 0.5, 10  # Slurm is not asked twice a second


def choose(spec: JobSpec, rank: str, task: int = 0) -> list[tuple[str, Path]]:
  """(label, file) of the output of processes; the files may not exist yet.

  Args:
    spec: the run.
    rank: a number, "all", or "batch" for the output of the script itself.
    task: index of the trial of a sweep.

  Raises:
    ConfigError: there is no such rank or trial, or nothing was submitted.
  """
  spec.check_task(task)
  if not (job := folders.last_job(spec.folder, task)):
    raise ConfigError(f"{spec.name}: was never submitted; `resume {spec.name}` does")
  if rank == "all":
    width, ranks = len(str(spec.processes - 1)), range(spec.processes)
    return [(f"{r:>{width}}: ", spec.log_file(job, task, r)) for r in ranks]
  paths = [spec.log_file(job, task, rank)]
  if rank == "batch":  # of the trial, and of the supervisor of all trials here
    paths.append(Path(spec.folder, "logs", f"{job}.batch.out"))
  elif (number := whole_number(rank)) is None or number >= spec.processes:
    raise ConfigError(f"--rank={rank}: give 0 … {spec.processes - 1}, all or batch")
  return [("", path) for path in dict.fromkeys(paths)]


def last(files: list[tuple[str, Path]], count: int | None) -> Iterator[str]:
  """The last `count` lines of each file with its label; None: all lines."""
  for label, path in files:
    if path.exists():
      with path.open(errors="replace") as file:
        yield from (label + line.rstrip("\n") for line in deque(file, count))


def failure(spec: JobSpec, task: int) -> str | None:
  """The script's line about the process that failed before process 0 knew of it.

  None if the last start of the trial has not ended so.
  """
  job = folders.last_job(spec.folder, task)
  if folders.last_event(spec, job, task).get("code") in (None, EXIT_DONE):
    return None
  line = None
  for text in last([("", spec.log_file(job, task, "batch"))], None):
    if re.match(r"error: process \d+ failed first ", text):
      line = text
    elif re.match(r"exit code \d+: restarted from ", text):
      line = None
  return line


def follow(files: list[tuple[str, Path]], ended: Callable[[], bool]) -> Iterator[str]:
  """Lines as they come, until the run has ended and all is read.

  Args:
    files: as from `choose`.
    ended: whether nothing more will come; asked every tenth time.
  """
  offsets = {path: 0 for _, path in files}
  rests = {path: b"" for _, path in files}
  for reads in itertools.count():
    over = reads % _ASK_EVERY == 0 and ended()  # asked before the files are read
    for label, path in files:
      if not path.exists():
        continue
      with path.open("rb") as file:
        file.seek(offsets[path])
        chunk = file.read()
      offsets[path] += len(chunk)
      *lines, rests[path] = (rests[path] + chunk).split(b"\n")
      if over and rests[path]:
        lines.append(rests[path])
      yield from (label + line.decode(errors="replace") for line in lines)
    if over:
      return
    time.sleep(_POLL_S)
