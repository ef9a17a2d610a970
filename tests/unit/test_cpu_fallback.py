"""A CPU in place of a GPU is refused, with the cause, on machines that are folders of files."""

import os
import sys

import pytest

from jaxscale.cluster import environment
from jaxscale.cluster.environment import gpu_problem, refuse_fallback
from support.errors import config_error

BUS = "0000:1b:00.0"
DRIVER = {f"proc/driver/nvidia/gpus/{BUS}/information": "Model: \t NVIDIA H100 80GB HBM3\n"}
DEVICE = {"dev/nvidia0": ""}


def pci(vendor, kind):
  folder = f"sys/bus/pci/devices/{BUS}"
  return {f"{folder}/vendor": f"{vendor}\n", f"{folder}/class": f"{kind}\n"}


PLUGIN = "JAX's plugin for it is not installed; install jaxscale[cuda12] or [cuda13]"
FILES = "its device files are missing; load its driver, or start the container with GPUs"
START = "its driver did not start; see `python -c 'import jax; jax.devices(\"cuda\")'`"
H100 = "1 x NVIDIA H100 80GB HBM3 on this machine"
CASES = [
  # files, plugins, variables, whether JAX has started on the CPU: what is found, the problem
  (DRIVER | DEVICE, "", {}, False, H100, PLUGIN),
  (DEVICE, "", {}, False, "1 x NVIDIA GPU on this machine", PLUGIN),  # a sandbox without /proc
  (DRIVER, "cuda", {}, False, H100, FILES),
  (DRIVER | DEVICE, "cuda", {}, False, None, None),  # JAX has yet to start
  (DRIVER | DEVICE, "cuda", {}, True, H100, START),
  (pci("0x10de", "0x030200"), "cuda", {}, False, "1 x NVIDIA GPU on this machine", FILES),
  (pci("0x10de", "0x030000"), "cuda", {}, True, None, None),  # a screen, without NVIDIA's driver
  (pci("0x1002", "0x038000"), "", {}, False, "1 x AMD GPU on this machine", None),
  (pci("0x1002", "0x120000"), "rocm", {}, False, "1 x AMD GPU on this machine", FILES),
  (pci("0x1002", "0x030000"), "", {}, True, None, None),  # a laptop's processor
  ({}, "", {}, True, None, None),
  # What the user has set
  (DRIVER | DEVICE, "", {"JAX_PLATFORMS": "cpu"}, True, None, None),
  (DRIVER | DEVICE, "cuda", {"JAX_PLATFORMS": "cpu,cuda"}, True, None, None),
  (DRIVER | DEVICE, "", {"CUDA_VISIBLE_DEVICES": ""}, True, None, None),
  (DRIVER | DEVICE, "cuda", {"CUDA_VISIBLE_DEVICES": "0"}, True, H100, START),
  ({}, "cuda", {"JAX_PLATFORMS": "rocm"}, False, "none on this machine, JAX_PLATFORMS=rocm", None),
  ({}, "cuda", {"JAX_PLATFORMS": "cuda,cpu"}, True, "none on this machine", FILES),
  (
    DRIVER | DEVICE,
    "cuda",
    {"JAX_PLATFORMS": "cuda", "CUDA_VISIBLE_DEVICES": ""},
    False,
    f"{H100}, JAX_PLATFORMS=cuda",
    "CUDA_VISIBLE_DEVICES= hides all GPUs; unset it",
  ),
]


@pytest.fixture
def machine(tmp_path, monkeypatch):
  """Return a function that makes a machine; JAX's own config is not read."""

  def make(files, plugins):
    for name, content in files.items():
      path = tmp_path / name
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_text(content)
    monkeypatch.setattr(environment, "_plugins", lambda: {plugins})
    monkeypatch.setitem(sys.modules, "jax", None)
    return str(tmp_path)

  return make


@pytest.mark.parametrize("files, plugins, env, has_failed, found, problem", CASES)
def test_causes(machine, files, plugins, env, has_failed, found, problem):
  line = gpu_problem(env, machine(files, plugins), has_failed=has_failed)
  if found is None:
    assert line == ""
    return
  assert line.startswith(f"GPU: {found}")
  assert line.endswith(", or set JAX_PLATFORMS=cpu to use the CPU on purpose")
  assert (problem or "install jaxscale[rocm]") in line


@pytest.mark.skipif(os.geteuid() == 0, reason="root may open all files")
def test_a_device_that_may_not_be_opened(machine):
  root = machine(DRIVER | DEVICE, "cuda")
  os.chmod(f"{root}/dev/nvidia0", 0)
  assert "request GPUs, e.g. by --gpus-per-node" in gpu_problem({}, root)


def test_jax_on_the_cpu_of_a_machine_with_gpus_is_refused(machine, monkeypatch):
  import jax

  root = machine(DRIVER | DEVICE, "cuda")
  monkeypatch.setitem(sys.modules, "jax", jax)
  refuse_fallback({}, root)  # the tests' jax_platforms=cpu is on purpose
  monkeypatch.setattr(environment, "platforms", lambda env: "cuda,cpu")
  with config_error(f"GPU: {H100}, JAX_PLATFORMS=cuda,cpu, but JAX would use the CPU: its driver"):
    refuse_fallback({}, root)

  def fail():
    raise AssertionError

  monkeypatch.setattr(jax, "default_backend", fail)
  with config_error("its driver did not start"):
    refuse_fallback({}, root)
