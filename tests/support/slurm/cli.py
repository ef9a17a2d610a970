"""`python -m jaxscale` on the cluster of the tests, and its results."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from jaxscale.metrics import read_json_lines
from support.slurm.cluster import SlurmCluster

# In place of Python on the nodes: says where it is, and does as a file says. What it
# is stopped by a signal it writes down, and leaves as a run that has saved does.
STAND_IN = r"""#!/bin/bash
for s in TERM USR1; do trap "echo stopped by $s; exit 85" $s; done
echo "rank $SLURM_PROCID of $SLURM_NTASKS on $SLURMD_NODENAME: $*"
while [ $# -gt 0 ]; do [ "$1" = --workdir ] && workdir=$2; shift; done
mkdir -p "$workdir/checkpoints"
[ "$SLURM_PROCID" = 0 ] &&
  echo '{"step": 3, "train/loss": 0.5, "time": 1}' >>"$workdir/metrics.jsonl"
source "$(dirname "$0")/does"
"""
FOREVER = "while true; do sleep 0.1; done"


class Cli(NamedTuple):
  """Command line on the login node, with a directory of runs.

  Attributes:
    slurm: the cluster.
    runs: the directory, whose name has characters that need quotes.
    python: the stand-in for Python on the nodes.
  """

  slurm: SlurmCluster
  runs: Path
  python: Path

  def __call__(self, verb: str, *argv: str, code: int = 0, **env: str) -> str:
    """Run a verb; return its output, or its error if a code is expected.

    `submit --real` and `sweep --real` train; else the stand-in runs.
    """
    words = [a for a in argv if a != "--real"]
    if verb in ("submit", "sweep", "scaling"):
      words += ["--config=configs/digits.py"]
      words += [f"--python={self.python}"] if "--real" not in argv else []
    command = [sys.executable, "-m", "jaxscale", verb, *words]
    # As from a notebook in a job: what Slurm says of that one must not be minded.
    env = {"SLURM_NTASKS_PER_NODE": "7", "SLURM_MEM_PER_NODE": "1", **env}
    done = self.slurm.run(*command, f"--runs={self.runs}", check=False, **env)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr if code else done.stdout

  def does(self, text: str) -> None:
    """Set the stand-in's behaviour from now on."""
    (self.python.parent / "does").write_text(text)


def make_cli(slurm: SlurmCluster, folder: Path) -> Cli:
  """Return a command line whose runs are in a folder."""
  python = folder / "python"
  python.write_text(STAND_IN)
  python.chmod(0o755)
  return Cli(slurm, folder / "all runs, 100%", python)


@pytest.fixture
def cli(slurm: SlurmCluster, tmp_path: Path) -> Cli:
  """Return the command line, with runs in the test's own folder."""
  return make_cli(slurm, tmp_path)


def states(cli: Cli, *names: str) -> dict[str, tuple[str, list[str]]]:
  """Return the table as {run: (state, the other words of its line)}."""
  lines = [line.split() for line in cli("status", *names).splitlines()[1:]]
  return {words[0]: (words[2], words) for words in lines}


def until(cli: Cli, name: str, state: str, seconds: float = 300) -> list[str]:
  """Wait until a run is in a state; return its line of the table."""
  deadline = time.monotonic() + seconds
  while (now := states(cli, name))[name][0] != state:
    assert time.monotonic() < deadline, (now, cli("logs", name, "--rank=batch"))
    time.sleep(0.1)
  return now[name][1]


def number(cli: Cli, name: str) -> str:
  """Return Slurm's id of the run."""
  return read_json_lines(cli.runs / name / "submissions.jsonl")[-1]["job"]


def events(cli: Cli, name: str, task: int = 0) -> list[dict[str, Any]]:
  """Return the events of a run."""
  return read_json_lines(cli.runs / name / "events" / f"{task}.jsonl")


def ends(cli: Cli, name: str, task: int = 0) -> list[tuple[int, str]]:
  """Return (exit code, next action) of each end."""
  lines = events(cli, name, task)
  return [(e["code"], e["next"]) for e in lines if e["event"] == "end"]


def until_ended(cli: Cli, name: str, tasks: int = 1, seconds: float = 300) -> None:
  """Wait until each task has ended with nothing to follow."""
  deadline = time.monotonic() + seconds
  while not all((e := ends(cli, name, i)) and e[-1][1] == "stop" for i in range(tasks)):
    assert time.monotonic() < deadline, states(cli, name)
    time.sleep(0.1)
