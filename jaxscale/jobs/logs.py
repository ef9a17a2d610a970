"""Output of the processes of a run, from files or followed live."""

from __future__ import annotations

import itertools
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxscale.errors import EXIT_DONE, ConfigError, printable
from jaxscale.files import open_regular, whole_number
from jaxscale.jobs import folder as folders
from jaxscale.jobs.spec import JobSpec

_POLL_S, _ASK_EVERY = 0.5, 10  # seconds between reads; Slurm is asked at every tenth
_LONGEST = 1 << 20  # bytes of a line; the rest is shown as another one


def choose(spec: JobSpec, rank: str, task: int = 0) -> list[tuple[str, Path]]:
  """Return (label, file) for the output of processes; files may not exist yet.

  Args:
    spec: the run.
    rank: a rank, "all", or "batch" for the output of the script.
    task: the index of the trial of a sweep.

  Raises:
    ConfigError: the rank or the trial does not exist, or the run was never submitted.
  """
  spec.check_task(task)
  if not (job := folders.last_job(spec.folder, task)):
    raise ConfigError(f"{spec.name}: was never submitted; run `jaxscale resume {spec.name}`")
  if rank == "all":
    width, ranks = len(str(spec.processes - 1)), range(spec.processes)
    return [(f"{r:>{width}}: ", spec.log_file(job, task, r)) for r in ranks]
  paths = [spec.log_file(job, task, rank)]
  if rank == "batch":  # a trial's script; the local executor also has a supervisor's file
    paths.append(Path(spec.folder, "logs", f"{job}.batch.out"))
  elif (number := whole_number(rank)) is None or number >= spec.processes:
    raise ConfigError(f"--rank={rank}: give 0 … {spec.processes - 1}, all or batch")
  return [("", path) for path in dict.fromkeys(paths)]


def last(files: list[tuple[str, Path]], count: int | None) -> Iterator[str]:
  """Yield the last `count` lines of each file with its label; None means all lines."""
  for label, path in files:
    if path.exists():
      with folders.one_line(path, "remove it"), open_regular(path) as file:
        lines = iter(lambda: file.readline(_LONGEST), b"")
        yield from (label + _shown(line) for line in (deque(lines, count) if count else lines))


def _shown(line: bytes) -> str:
  """Return a line without what a terminal would execute; others may have written it."""
  return printable(line.decode(errors="replace").rstrip("\n"), keep="\t")


def failure(spec: JobSpec, task: int) -> str | None:
  """Return the script's line about a process that failed before process 0 noticed.

  Return None if the last start of the trial has not ended in this way.
  """
  job = folders.last_job(spec.folder, task)
  if folders.last_event(spec, job, task).get("code") in (None, EXIT_DONE):
    return None
  pattern = r"error: process \d+ failed first |exit code \d+: restarted from "
  lines = last([("", spec.log_file(job, task, "batch"))], None)
  line = ([x for x in lines if re.match(pattern, x)] or [""])[-1]
  return line if line.startswith("error") else None


def follow(files: list[tuple[str, Path]], ended: Callable[[], bool]) -> Iterator[str]:
  """Yield lines as they are written, until the run has ended and all are read.

  Args:
    files: the result of `choose`.
    ended: a function that returns True once the run has ended; called every tenth time.
  """
  offsets = {path: 0 for _, path in files}
  rests = {path: b"" for _, path in files}
  for reads in itertools.count():
    over = reads % _ASK_EVERY == 0 and ended()  # before the read, to miss no last line
    for label, path in files:
      if not path.exists():
        continue
      with folders.one_line(path, "remove it"), open_regular(path) as file:
        file.seek(offsets[path])
        for part in iter(lambda: file.readline(_LONGEST), b""):
          offsets[path] += len(part)
          rests[path] += part
          if part.endswith(b"\n") or len(rests[path]) >= _LONGEST:
            yield label + _shown(rests[path])
            rests[path] = b""
      if over and rests[path]:
        yield label + _shown(rests[path])
    if over:
      return
    time.sleep(_POLL_S)
