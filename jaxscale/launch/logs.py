"""What the processes of a run printed, whole or as it comes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxscale.errors import ConfigError
from jaxscale.launch import folder as folders
from jaxscale.launch.local import log_file
from jaxscale.launch.spec import Run

_POLL_S, _ASK_EVERY = 0.5, 10  # Slurm is not to be asked twice a second


def choose(run: Run, rank: str, task: int = 0) -> list[tuple[str, Path]]:
  """(label, file) of what is to be read; the files may not be there yet.

  Args:
    run: whose output.
    rank: a number, "all", or "batch" for what the script itself printed.
    task: of a sweep.

  Raises:
    ConfigError: there is no such rank or trial, or nothing was submitted.
  """
  job = folders.last_job(Path(run.folder))
  if job is None:
    raise ConfigError(f"{run.name}: was never submitted; `resume {run.name}` does")
  if task not in run.tasks:
    raise ConfigError(f"--task={task}: give 0 … {len(run.tasks) - 1}")
  if rank == "batch":
    if run.executor == "local":  # one supervisor for all trials
      return [("", Path(run.folder, "logs", f"{job}.batch.out"))]
    return [("", log_file(run, job, task, rank))]
  if rank == "all":
    ranks = range(run.processes)
  elif rank.isdecimal() and int(rank) < run.processes:
    return [("", log_file(run, job, task, int(rank)))]
  else:
    raise ConfigError(f"--rank={rank}: give 0 … {run.processes - 1}, all or batch")
  width = len(str(run.processes - 1))
  return [(f"{r:>{width}}: ", log_file(run, job, task, r)) for r in ranks]


def last(files: list[tuple[str, Path]], count: int | None) -> Iterator[str]:
  """Lines of files, each with its label; `count` of each, None: all."""
  for label, path in files:
    if not path.exists():
      continue
    with path.open(errors="replace") as file:
      for line in deque(file, count):
        yield label + line.rstrip("\n")


def follow(
  files: list[tuple[str, Path]], ended: Callable[[], bool], every_s: float = _POLL_S
) -> Iterator[str]:
  """Lines as they come, until the run has ended and all is read.

  Args:
    files: as from `choose`.
    ended: whether nothing more will come; asked every tenth time.
    every_s: seconds between looks.
  """
  looks = 0
  offsets = {path: 0 for _, path in files}
  rests = {path: b"" for _, path in files}
  while True:
    over = looks % _ASK_EVERY == 0 and ended()  # asked before what is read
    looks += 1
    for label, path in files:
      chunk = _from(path, offsets[path])
      offsets[path] += len(chunk)
      *lines, rests[path] = (rests[path] + chunk).split(b"\n")
      if over and rests[path]:
        lines.append(rests[path])
      for line in lines:
        yield label + line.decode(errors="replace")
    if over:
      return
    time.sleep(every_s)


def _from(path: Path, offset: int) -> bytes:
  try:
    with path.open("rb") as file:
      file.seek(offset)
      return file.read()
  except OSError:
    return b""
