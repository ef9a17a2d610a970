"""The executor `slurm`: calls of sbatch, squeue and scancel, with parsed output."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxscale.errors import ConfigError
from jaxscale.files import whole_number
from jaxscale.jobs import slurm_script
from jaxscale.jobs.spec import JobSpec, QueueEntry

SCRIPT: str = "job.sbatch"
render = slurm_script.render
# Variables that describe the cluster. All other SLURM_ variables describe the job of this
# process (such as a notebook's), and sbatch would read them as options.
_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_TIME_FORMAT")
# Fields of squeue(1), --Format; a colon sets the width, since long values are truncated.
_FIELDS = ("JobArrayID", "State", "NumNodes", "TimeLeft", "RestartCnt", "Reason", "TimeLimit")
_WIDTH = 128
# Errors of Slurm 22.05 if its commands are installed and there is no cluster.
_NO_CLUSTER = ("Could not establish a configuration source", "Unable to contact slurm controller")
_ELSEWHERE = {"sbatch": "submit on a Slurm cluster, or use --executor local"}


def is_available() -> bool:
  """Return whether this machine can submit to Slurm."""
  return shutil.which("sbatch") is not None


def submit(spec: JobSpec, tasks: Sequence[int] | None, after: Path | None) -> str:
  """Queue the script of a run; `after` is ignored, since Slurm has its own queue.

  Raises:
    ConfigError: Slurm refuses the job; the error has Slurm's message.
  """
  only = (f"--array={slurm_script.array([*tasks], spec.at_most)}",) if tasks else ()
  printed = _slurm("sbatch", "--parsable", *only, str(Path(spec.folder, SCRIPT)))
  return printed.strip().splitlines()[-1].partition(";")[0]


def queue(runs: Mapping[str, JobSpec]) -> dict[str, QueueEntry]:
  """Return all jobs of this user that Slurm knows, including those of `runs`, by number.

  Slurm forgets a job MinJobAge seconds after its end, slurm.conf(5).

  Raises:
    ConfigError: Slurm does not answer.
  """
  if not runs or not is_available():
    return {}
  form = "--Format=" + ",".join(f"{name}:{_WIDTH}" for name in _FIELDS)
  text = _slurm("squeue", "--me", "--array", "--noheader", "--states=all", form)
  return dict(map(parse_line, filter(str.strip, text.splitlines())))


def parse_line(line: str) -> tuple[str, QueueEntry]:
  """Parse a line of squeue, which has columns of a fixed width."""
  cells = [line[i * _WIDTH : (i + 1) * _WIDTH].strip() for i in range(len(_FIELDS))]
  job, state, nodes, left, restarts, reason, limit = cells
  number, again = whole_number(nodes) or 0, whole_number(restarts) or 0
  left = "" if limit == "UNLIMITED" else left  # else Slurm shows the rest of a year
  return job, QueueEntry(state, number, left, again, reason)


def cancel(spec: JobSpec, job: str) -> None:
  """End a job, queued or running: SIGTERM, and SIGKILL after Slurm's KillWait.

  Raises:
    ConfigError: Slurm refuses the cancellation.
  """
  _slurm("scancel", job)


def _slurm(*command: str) -> str:
  """Run a command and return its output; its errors become a ConfigError of one line."""
  ours = os.environ.items()
  advice = _ELSEWHERE.get(command[0], "run this on a Slurm cluster")
  env = {k: v for k, v in ours if not k.startswith("SLURM_") or k in _KEPT}
  try:
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
    if done.returncode == 0:
      return done.stdout
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    message = "; ".join(dict.fromkeys(x.partition("error: ")[2] or x for x in lines))
    if any(words in message for words in _NO_CLUSTER):
      message = f"cannot reach Slurm ({message}); {advice}"
  except FileNotFoundError:
    message = f"not found; {advice}"
  except subprocess.TimeoutExpired:
    message = "Slurm has not answered within 60 s; try again later"
  raise ConfigError(f"{command[0]}: {message}")
