"""Commands run as a user runs them."""

import os
import re
import subprocess
import sys

from support.paths import ROOT


def child_env(num_devices: int = 1, **extra: str) -> dict[str, str]:
  """The environment of a process as a user has it, on simulated devices."""
  dropped = ("SLURM_", "XLA_FLAGS", "PYTHONDONTWRITEBYTECODE")
  env = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
  return env | {
    "JAX_NUM_CPU_DEVICES": str(num_devices),
    "PYTHONUNBUFFERED": "1",
    # What another process is just writing into JAX's cache is compiled instead.
    "PYTHONWARNINGS": "error,ignore:Error reading persistent compilation:UserWarning",
    **extra,
  }


def train_command(workdir, *args: str, config: str = "configs/digits.py"):
  """The command line of a run."""
  head = [sys.executable, "-m", "jaxscale.train", "--config", config]
  return [*head, "--workdir", str(workdir), *args]


def run_train(workdir, *args: str, config="configs/digits.py", num_devices=1, **env):
  """Run the command line to its end, as a user would."""
  return subprocess.run(
    train_command(workdir, *args, config=config),
    env=child_env(num_devices, **env),
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=300,
  )


def trained(workdir, *args: str, **options) -> str:
  """Run the command line to its end, which must be good; return what it printed."""
  done = run_train(workdir, *args, **options)
  assert done.returncode == 0, done.stderr
  return done.stdout


def own_lines(out: str) -> list[str]:
  """Return what a process itself wrote to stdout, where Gloo's threads write, too."""
  pieces = r"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\."
  pieces += r"|Expected number of connected peer ranks is : \d+"
  lines = (re.sub(pieces, "", line).strip() for line in out.splitlines())
  return [line for line in lines if line]


def error_line(done: subprocess.CompletedProcess[str], code: int) -> str:
  """The one line that a command which failed with this exit code wrote to stderr."""
  assert done.returncode == code, done.stderr
  line = done.stderr.removesuffix("\n")
  assert line.startswith("error: ") and "\n" not in line, done.stderr
  return line
