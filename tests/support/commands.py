"""Commands, run as users run them."""

import os
import re
import subprocess
import sys

from support.paths import ROOT

keeps_xla_flags = False  # whether processes compile as fast as the tests; see conftest.py


def child_env(num_devices: int = 1, **extra: str) -> dict[str, str]:
  """Return the environment of a user's process, with simulated devices."""
  # `plan`, if a test of this process has called it, has switched JAX's cache off.
  dropped = "SLURM_", "PYTHONDONTWRITEBYTECODE", "JAX_ENABLE_COMPILATION_CACHE"
  dropped += () if keeps_xla_flags else ("XLA_FLAGS",)
  env = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
  # What another process is just writing into JAX's cache is compiled instead.
  warnings = "error,ignore:Error reading persistent compilation:UserWarning"
  usual = dict(JAX_NUM_CPU_DEVICES=str(num_devices), PYTHONUNBUFFERED="1", PYTHONWARNINGS=warnings)
  return env | usual | extra


def run(*command, num_devices=1, cwd=ROOT, timeout=300, **env) -> subprocess.CompletedProcess[str]:
  """Run a command to its end; `env` is added to `child_env`."""
  options = dict(env=child_env(num_devices, **env), cwd=cwd, timeout=timeout)
  return subprocess.run([*map(str, command)], capture_output=True, text=True, **options)


def run_python(*words, **options) -> subprocess.CompletedProcess[str]:
  """Run Python with these words; `options` are those of `run`."""
  return run(sys.executable, *words, **options)


def jaxscale(*words, **options) -> subprocess.CompletedProcess[str]:
  """Run a command of ours; `options` are those of `run`."""
  return run_python("-m", "jaxscale", *words, **options)


def train_command(workdir, *args: str, config: str = "configs/digits.py"):
  """Return the command line of a run."""
  head = [sys.executable, "-m", "jaxscale.train", "--config", config]
  return [*head, "--workdir", str(workdir), *args]


def run_train(workdir, *args: str, config="configs/digits.py", num_devices=1, **env):
  """Run the command line to its end, as a user would."""
  return run(*train_command(workdir, *args, config=config), num_devices=num_devices, **env)


def trained(workdir, *args: str, **options) -> str:
  """Run the command line to its end, which must be good; return what it printed."""
  done = run_train(workdir, *args, **options)
  assert done.returncode == 0, done.stderr
  return done.stdout


def own_lines(out: str) -> list[str]:
  """Return the lines that a process wrote to stdout, without those of Gloo's threads."""
  pieces = r"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\."
  pieces += r"|Expected number of connected peer ranks is : \d+"
  lines = (re.sub(pieces, "", line).strip() for line in out.splitlines())
  return [line for line in lines if line]


def error_line(done: subprocess.CompletedProcess[str], code: int) -> str:
  """Check that a command failed with this exit code and one line on stderr; return the line."""
  assert done.returncode == code, done.stderr
  line = done.stderr.removesuffix("\n")
  assert line.startswith("error: ") and "\n" not in line, done.stderr
  return line
