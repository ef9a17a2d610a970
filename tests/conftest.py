"""Eight simulated devices, strict dtypes, and the fixtures of all tests."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
# XLA's threads: more than all that 8 devices of this process wait in at a time.
os.environ["NPROC"] = "64"

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")

import pytest

from support.compiling import fast_compile_env
from support.fixtures import scontrol  # noqa: F401
from support.paths import ROOT
from support.processes import child  # noqa: F401
from support.slurm import cluster as slurm_cluster
from support.watched import family  # noqa: F401


def pytest_configure(config):
  """`make test` compiles quickly; slow proofs and most child processes as users do."""
  if config.option.markexpr == "not slow":
    os.environ.update(fast_compile_env())


@pytest.fixture(autouse=True)
def _in_root(monkeypatch):
  """Commands and configs are named as a user names them, from the root."""
  monkeypatch.chdir(ROOT)


@pytest.fixture(scope="session")
def _cluster():
  if reason := slurm_cluster.unavailable():
    in_ci = os.environ.get("CI", "").lower() in ("1", "true")
    (pytest.fail if in_ci else pytest.skip)(f"no Slurm: {reason}")
  # Runs of one job number use one port, and another worker's cluster is here too.
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
  from support.slurm.job import Job

  job = Job(_cluster, tmp_path_factory.mktemp("whole"))
  job.end("COMPLETED")
  assert job.codes() == [0]
  return job.workdir
