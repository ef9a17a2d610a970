"""Tests of what only an accelerator shows: `make test-gpu`, on all GPUs there are.

They are run with this conftest alone (`--confcutdir`), which leaves JAX the GPUs that
tests/conftest.py hides. Without a GPU they are skipped, and with JAXSCALE_GPU_TESTS=gpu, as
`make test-gpu` sets it, they fail. JAXSCALE_GPU_TESTS=cpu runs them on two simulated devices of
the CPU, to test their code: it says nothing of GPUs.
"""

import os
import tempfile

from support.compiling import fast_compile_env

DRY_RUN = os.environ.get("JAXSCALE_GPU_TESTS") == "cpu"
if DRY_RUN:
  os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
  os.environ |= fast_compile_env()
else:
  # Next to the tests, their child processes use the GPU.
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Of runs that tests start: nothing is written into the home directory.
os.environ.setdefault("JAXSCALE_SECRET", os.urandom(32).hex())
os.environ.setdefault("XDG_CACHE_HOME", tempfile.mkdtemp(prefix="jaxscale-"))

import jax
import pytest

from support.paths import ROOT

jax.config.update("jax_numpy_dtype_promotion", "strict")


def pytest_collection_modifyitems(items):
  """All are marked; what GPUs' libraries warn of is no error of ours."""
  missing = not DRY_RUN and jax.default_backend() != "gpu"
  if missing and os.environ.get("JAXSCALE_GPU_TESTS"):
    pytest.exit("JAXSCALE_GPU_TESTS=gpu: JAX finds no GPU", returncode=pytest.ExitCode.TESTS_FAILED)
  for item in items:
    item.add_marker(pytest.mark.gpu)
    item.add_marker(pytest.mark.filterwarnings("default"))
    if missing:
      item.add_marker(pytest.mark.skip(reason="JAX finds no GPU"))


@pytest.fixture(autouse=True)
def _in_root(monkeypatch):
  monkeypatch.chdir(ROOT)


@pytest.fixture(scope="session")
def dry_run():
  """Return True where the devices are those of a CPU."""
  return DRY_RUN
