"""Eight simulated devices, strict dtypes, and steps compiled once a session."""

import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["NPROC"] = "64"  # threads for all that 8 devices wait in (joining.py)

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")

import numpy as np
import optax
import pytest
import slurm_cluster

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _in_root(monkeypatch):
  """Commands and configs are named as a user names them, from the root."""
  monkeypatch.chdir(ROOT)


@pytest.fixture(scope="session")
def _cluster():
  if reason := slurm_cluster.unavailable():
    in_ci = os.environ.get("CI", "").lower() in ("1", "true")
    (pytest.fail if in_ci else pytest.skip)(f"no Slurm: {reason}")
  # Runs of one job number meet at one port, and another worker's cluster is here too.
  first = os.getpid() * 1000 % 60_000_000 + 1
  with slurm_cluster.SlurmCluster(extra=f"FirstJobId={first}") as cluster:
    yield cluster


@pytest.fixture
def slurm(_cluster):
  """A Slurm cluster of 4 nodes without jobs: one a session, tidied after a test."""
  yield _cluster
  _cluster.clear()


@pytest.fixture(scope="session")
def whole(tmp_path_factory, _cluster):
  """The workdir of a job on three nodes that nothing ever happened to."""
  from slurm_job import Job

  job = Job(_cluster, tmp_path_factory.mktemp("whole"))
  job.end("COMPLETED")
  assert job.codes() == [0]
  return job.workdir


_QUICKLY: dict[str, Any] = {
  "xla_backend_optimization_level": 0,
  "xla_cpu_use_fusion_emitters": False,
}


def quick_flags() -> dict[str, str]:
  """The environment of processes that compile in half the time, where JAX can.

  An unknown flag ends the process, and jax 0.12 no longer knows the second one.
  """
  if jax.__version_info__ >= (0, 11):
    return {}
  flags = [f"--{name}={str(value).lower()}" for name, value in _QUICKLY.items()]
  return {"XLA_FLAGS": " ".join([os.environ.get("XLA_FLAGS", ""), *flags])}


def pytest_configure(config):
  """`make test` compiles quickly; slow proofs and most child processes as users do."""
  if config.option.markexpr == "not slow":
    os.environ.update(quick_flags())


def child_env(num_devices: int = 1, **extra: str) -> dict[str, str]:
  """The environment of a process as a user has it, on simulated devices."""
  dropped = ("SLURM_", "XLA_FLAGS")
  env = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
  return env | {
    "JAX_NUM_CPU_DEVICES": str(num_devices),
    "PYTHONUNBUFFERED": "1",
    "PYTHONWARNINGS": "error",
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


def quick(values: Iterable, *names) -> list:
  """Parameters of which `make test` takes only the named; the others are slow."""
  values = list(values)
  assert set(names) <= set(values), f"no such parameters: {set(names) - set(values)}"
  return [v if v in names else pytest.param(v, marks=pytest.mark.slow) for v in values]


@functools.cache
def quickly() -> dict[str, Any]:
  """Compiler options: to compile is what takes time here, a third without fusions.

  jax 0.12 no longer has that option, and needs twice the time.
  """
  try:
    jax.jit(lambda x: x).lower(1).compile(compiler_options=_QUICKLY)
  except jax.errors.JaxRuntimeError:
    return {"xla_backend_optimization_level": 0}
  return _QUICKLY


def own_lines(out: str) -> list[str]:
  """What a process wrote to stdout itself: Gloo's threads write there in pieces."""
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


def digits_batch(n: int, seed: int = 0) -> dict[str, np.ndarray]:
  """`n` rows that look like digits."""
  rng = np.random.default_rng(seed)
  return {
    "image": rng.integers(0, 17, (n, 8, 8, 1)).astype(np.uint8),
    "label": rng.integers(0, 10, n).astype(np.int32),
  }


def optimize(tx, params, grads):
  """Parameters after every step of an optimizer, and its last state."""
  state, out = tx.init(params), []
  for g in grads:
    updates, state = tx.update(g, state, params)
    params = optax.apply_updates(params, updates)
    out.append(params)
  return out, state


def optimize64(tx, params, grads):
  """The last parameters in float64, as numpy arrays."""
  with jax.enable_x64(True):
    params, *grads = jax.tree.map(jax.numpy.array, [params, *grads])
    return jax.tree.map(np.asarray, optimize(tx, params, grads)[0][-1])
