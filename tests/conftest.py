"""Eight simulated devices, strict dtypes, and the fixtures of all tests."""

import atexit
import gc
import os
import secrets
import shutil
import signal
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
# One cache of compiled programs for all workers and the processes that tests start.
# Of a folder that the user names, the next run of the tests profits too.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
  cache = os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="jaxscale-")
  atexit.register(shutil.rmtree, cache, ignore_errors=True)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.01")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# Of the runs that tests start: nothing is written into the home directory.
os.environ.setdefault("JAXSCALE_SECRET", secrets.token_hex(32))
# What starts the tests in the background may have Ctrl-C ignored, and with it all that
# they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
# What JAX keeps is millions of objects, and looking for cycles among them every 700 new
# ones took a tenth of the time.
gc.set_threshold(50_000, 50, 1000)
# Of GPUs, which are hidden here: `make test-gpu`.
collect_ignore = ["gpu"]
# XLA's threads: more than all that 8 devices of this process wait in at a time.
os.environ["NPROC"] = "64"

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")

import pytest

from support import commands
from support.cases import cases_of_other_parts
from support.compiling import fast_compile_env
from support.fixtures import own_cache, photo, reported, scontrol, shared_groups, umask  # noqa: F401
from support.paths import ROOT
from support.processes import child  # noqa: F401
from support.slurm import cluster as slurm_cluster
from support.two_users import users  # noqa: F401
from support.watched import family  # noqa: F401


def pytest_addoption(parser):
  """`make test-slow PART=2/4`: CI runs a quarter of the slow tests and of their cases."""
  text = "run every Nth slow test, or case of one, beginning with the Kth"
  parser.addoption("--part", metavar="K/N", help=text)


def pytest_configure(config):
  """Compile faster in the sets of the Makefile, in two fifths of the time.

  Tests marked `optimized` compile as users do, and so do processes that tests start, but for
  those of tests/process, which took a quarter longer.
  """
  if "not " in config.option.markexpr:
    os.environ.update(fast_compile_env())


def pytest_collection_modifyitems(config, items):
  """Keep the part asked for, and spread files that wait for processes over those that compute."""
  if part := config.option.part:
    others = cases_of_other_parts(items, *map(int, part.split("/")))
    items[:] = [item for item in items if item not in others]
    config.hook.pytest_deselected(items=list(others))
  files = {}
  for item in items:
    files.setdefault(item.path, []).append(item)
  slurm, processes = ([f for f in files if f.parent.name == name] for name in ("slurm", "process"))
  waiting = slurm + processes
  computing = [f for f in files if f not in set(waiting)]
  # Each file's place among its own kind; the last one waits for nobody.
  place = {
    f: (i + 0.5) / len(kind) * until
    for kind, until in ((waiting, 0.9), (computing, 1.0))
    for i, f in enumerate(kind)
  }
  # The longest begin early: at the end one ran alone for three minutes.
  longest = "test_parity.py", "test_parity_half.py", "test_watch.py"
  place |= {f: 0.1 for f in files if f.name in longest}
  items.sort(key=lambda item: place[item.path])


def pytest_runtest_protocol(item):
  """Before the fixtures of a test, also those of its module."""
  commands.keeps_xla_flags = item.path.parent.name == "process"


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
  """Yield a Slurm cluster of 4 nodes without jobs: one per session, cleared after each test."""
  yield _cluster
  _cluster.clear()


@pytest.fixture(scope="session")
def whole(tmp_path_factory, _cluster):
  """Return the workdir of an undisturbed job on three nodes."""
  from support.slurm.job import Job

  job = Job(_cluster, tmp_path_factory.mktemp("whole"))
  job.end("COMPLETED")
  assert job.codes() == [0]
  return job.workdir
