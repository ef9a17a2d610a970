"""Slurm's commands: submit, ask, cancel. What they print becomes plain values."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jaxscale.errors import ConfigError
from jaxscale.launch.render import array
from jaxscale.launch.spec import Run

# Variables that point to the cluster; all others that begin with SLURM_ describe the
# job that we may be in (a notebook), and sbatch would take them for what is wanted.
_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_TIME_FORMAT")
# Fields of squeue(1), --Format; a colon sets the width, or long ones are cut.
_FIELDS = ("JobArrayID", "State", "NumNodes", "TimeLeft", "RestartCnt", "Reason")
_WIDTH = 128
# What Slurm 22.05 says where its commands are and no cluster is.
_NO_CLUSTER = (
  "Could not establish a configuration source", "Unable to contact slurm controller"
)  # fmt: skip


class Queued(NamedTuple):
  """What Slurm says of a job, or of one task of an array.

  Attributes:
    state: as Slurm has it: PENDING, RUNNING, COMPLETED, …
    nodes: given to it, or asked for.
    time_left: until the limit, as Slurm writes it.
    restarts: how often it was requeued.
    reason: why it waits.
  """

  state: str
  nodes: int
  time_left: str
  restarts: int
  reason: str


def is_here() -> bool:
  """Whether this machine can submit."""
  return shutil.which("sbatch") is not None


def submit(run: Run, tasks: Sequence[int] | None = None) -> str:
  """Hand the run's script to Slurm; returns the number of the job.

  Args:
    run: whose folder holds job.sbatch.
    tasks: of a sweep, those to run; None: all.

  Raises:
    ConfigError: Slurm refuses it; its own words.
  """
  only = [f"--array={array(list(tasks), run.at_most)}"] if tasks is not None else []
  script = str(Path(run.folder, "job.sbatch"))
  printed = _slurm("sbatch", "--parsable", *only, script)
  return printed.strip().splitlines()[-1].partition(";")[0]


def queue() -> dict[str, Queued]:
  """All jobs of this user that Slurm knows, also those that ended some minutes ago.

  Returns:
    By number: "123", and "123_4" for task 4 of an array. (Slurm forgets a job
    MinJobAge seconds after its end, slurm.conf(5).)

  Raises:
    ConfigError: Slurm does not answer.
  """
  layout = ",".join(f"{name}:{_WIDTH}" for name in _FIELDS)
  text = _slurm("squeue", "--me", "--array", "--noheader", "--states=all",
                f"--Format={layout}")  # fmt: skip
  return dict(map(parse_line, filter(str.strip, text.splitlines())))


def parse_line(line: str) -> tuple[str, Queued]:
  """A line of squeue, in columns of a fixed width."""
  cells = [line[i * _WIDTH : (i + 1) * _WIDTH].strip() for i in range(len(_FIELDS))]
  job, state, nodes, left, restarts, reason = cells
  number = int(nodes) if nodes.isdecimal() else 0
  return job, Queued(state, number, left, int(restarts or 0), reason)


def cancel(jobs: Sequence[str]) -> None:
  """End jobs, queued or running: SIGTERM, and SIGKILL after Slurm's KillWait.

  Raises:
    ConfigError: Slurm refuses.
  """
  _slurm("scancel", *jobs)


def _slurm(*command: str) -> str:
  """What a command prints; its first complaint becomes an error of one line."""
  env = {
    k: v for k, v in os.environ.items() if not k.startswith("SLURM_") or k in _KEPT
  }
  try:
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
  except FileNotFoundError:
    raise ConfigError(
      f"{command[0]}: not found; submit where Slurm is, or with --executor local"
    ) from None
  except subprocess.TimeoutExpired:
    raise ConfigError(f"{command[0]}: Slurm has not answered in 60 s") from None
  if done.returncode:
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    said = "; ".join(
      dict.fromkeys(line.partition("error: ")[2] or line for line in lines)
    )
    if any(word in said for word in _NO_CLUSTER):
      said = f"reaches no Slurm ({said}); go where it is, or give --executor local"
    raise ConfigError(f"{command[0]}: {said}")
  return done.stdout
