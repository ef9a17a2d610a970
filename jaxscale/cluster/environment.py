"""Checks of JAX's environment: variables, and GPUs that JAX would silently not use."""

from __future__ import annotations

import glob
import importlib.util
import os
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from jaxscale.cluster.detect.fabric import nvidia_models
from jaxscale.cluster.detect.local_devices import HIDING, may_open, visible_gpus
from jaxscale.errors import ConfigError
from jaxscale.files import readable_text, whole_number

# Platforms without a plugin, and aliases of platforms (jax/_src/xla_bridge.py, jax 0.10).
_BUILT_IN, _ALIASES = ("cpu", "tpu"), {"gpu": ("cuda", "rocm")}
_INSTALL = {"cuda": "install jaxscale[cuda12] or [cuda13]", "rocm": "install jaxscale[rocm]"}
_ON_PURPOSE = "or set JAX_PLATFORMS=cpu to use the CPU on purpose"
# PCI vendor, and the first digits of the classes of its GPUs for computing.
_COMPUTING = {"cuda": ("NVIDIA", "0x10de", "0x0302"), "rocm": ("AMD", "0x1002", "0x0380", "0x1200")}
_TRUE = ("y", "yes", "t", "true", "on", "1")  # jax/_src/config.py


def check_environment(env: Mapping[str, str]) -> None:
  """Refuse environment variables that JAX cannot use.

  Args:
    env: the environment variables of the process.

  Raises:
    ConfigError: JAX_PLATFORMS has a platform that is not installed, JAX_NUM_CPU_DEVICES is
      not a number of devices, or JAX_DISABLE_JIT is set.

  Example:
    >>> check_environment({"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"})
    >>> check_environment({"JAX_NUM_CPU_DEVICES": "0"})
    Traceback (most recent call last):
      ...
    jaxscale.errors.ConfigError: JAX_NUM_CPU_DEVICES=0: give a whole number >= 1
  """
  count = env.get("JAX_NUM_CPU_DEVICES", "1")
  if not whole_number(count):
    raise ConfigError(f"JAX_NUM_CPU_DEVICES={count}: give a whole number >= 1")
  if (value := env.get("JAX_DISABLE_JIT", "")).lower() in _TRUE:
    advice = "jaxscale runs compiled steps only; unset it"
    raise ConfigError(f"JAX_DISABLE_JIT={value}: {advice}")
  for name in filter(None, env.get("JAX_PLATFORMS", "").split(",")):
    if problem := _missing(name, env):
      raise ConfigError(f"JAX_PLATFORMS={name}: {problem}, or unset it")


def _missing(name: str, env: Mapping[str, str]) -> str | None:
  """Return what a platform lacks on this machine, with a remedy; None if there is none."""
  if name == "cpu":
    return None  # every installation has it
  known = {*_BUILT_IN, *_plugins()}
  if name == "tpu" and not (env.get("TPU_LIBRARY_PATH") or is_installed("libtpu")):
    return "libtpu is not installed; install jaxscale[tpu]"
  if name in known or known.intersection(_ALIASES.get(name, ())):
    return None
  if name in ("cuda", "rocm", "gpu"):
    return f"JAX's plugin for it is not installed; {_INSTALL['rocm' if name == 'rocm' else 'cuda']}"
  return f"no such platform; give one of {', '.join(sorted(known))}"


def gpu_problem(env: Mapping[str, str], root: str = "/", *, has_failed: bool = False) -> str:
  """Return why JAX does not use the GPUs of this machine or those asked for; "" if it may.

  JAX itself falls back to the CPU, silently if JAX_PLATFORMS is cuda,cpu or unset.

  Args:
    env: the environment variables.
    root: the root of the file system, for tests.
    has_failed: whether JAX has already started, on the CPU.
  """
  asked = platforms(env).partition(",")[0]
  hidden = [name for name in HIDING if name in env and not visible_gpus(env)]
  kind, found = _computing_gpus(root)
  kind = asked if asked in ("cuda", "rocm") else kind
  if asked not in ("", "cuda", "rocm", "gpu") or (not asked and (hidden or not found)):
    return ""
  files = glob.glob(os.path.join(root, "dev", "kfd" if kind == "rocm" else "nvidia[0-9]*"))
  if kind not in _plugins():
    problem = f"JAX's plugin for it is not installed; {_INSTALL[kind]}"
  elif hidden:
    problem = f"{hidden[0]}={env[hidden[0]]} hides all GPUs; unset it"
  elif not files and not os.path.exists(os.path.join(root, "dev/dxg")):
    problem = "its device files are missing; load its driver, or start the container with GPUs"
  elif files and not any(map(may_open, files)):
    problem = f"this process may not open {files[0]}; request GPUs, e.g. by --gpus-per-node"
  elif has_failed:
    problem = f"its driver did not start; see `python -c 'import jax; jax.devices(\"{kind}\")'`"
  else:
    return ""
  setting = f", JAX_PLATFORMS={platforms(env)}" if asked else ""
  where = f"GPU: {found or 'none'} on this machine{setting}"
  return f"{where}, but JAX would use the CPU: {problem}, {_ON_PURPOSE}"


def platforms(env: Mapping[str, str]) -> str:
  """Return the platforms that JAX was told to use, by `jax.config` or by the variable."""
  config = getattr(sys.modules.get("jax"), "config", None)
  return getattr(config, "jax_platforms", None) or env.get("JAX_PLATFORMS", "")


def refuse_fallback(env: Mapping[str, str] = os.environ, root: str = "/") -> None:
  """Start JAX's backend, and refuse a CPU where a GPU was asked for or is in the machine.

  Raises:
    ConfigError: JAX uses the CPU; the line has the cause.
  """
  import jax

  try:
    is_cpu = jax.default_backend() == "cpu"
  except (RuntimeError, AssertionError) as e:  # AssertionError without a text: jax 0.11.2
    raise ConfigError(gpu_problem(env, root, has_failed=True) or f"{e}") from e
  if is_cpu and (problem := gpu_problem(env, root, has_failed=True)):
    raise ConfigError(problem)


def _computing_gpus(root: str) -> tuple[str, str]:
  """Return the plugin and a description of the GPUs in a machine; ("cuda", "") without any.

  GPUs count if NVIDIA's driver has them, or by their PCI class if they are for computing
  (3D controllers of NVIDIA, display controllers and accelerators of AMD). A GPU for a screen
  is of the class 0x0300, which AMD's processors have, too.
  """
  patterns = ("dev/nvidia[0-9]*", "proc/driver/nvidia/gpus/*", "sys/bus/pci/devices/*")
  *driven, devices = (glob.glob(os.path.join(root, pattern)) for pattern in patterns)
  if count := max(map(len, driven)):
    return "cuda", f"{count} x {', '.join(nvidia_models(root)) or 'NVIDIA GPU'}"
  ids = [[readable_text(Path(d, n)).strip() for n in ("vendor", "class")] for d in devices]
  for kind, (maker, vendor, *classes) in _COMPUTING.items():
    if count := sum(v == vendor and c[:6] in classes for v, c in ids):
      return kind, f"{count} x {maker} GPU"
  return "cuda", ""


def has_gpu_plugin() -> bool:
  """Return whether JAX's plugin for GPUs is installed."""
  return bool({"cuda", "rocm"} & _plugins())


def _plugins() -> set[str]:
  """Return the platforms of the installed plugins, by name (jax_plugins.xla_cuda12, …)."""
  names = [point.name for point in metadata.entry_points(group="jax_plugins")]
  kinds = {kind for kind in ("cuda", "rocm") if any(kind in name for name in names)}
  return kinds | {*names}


def is_installed(module: str) -> bool:
  """Return whether a module can be imported, without importing it."""
  if module in sys.modules:
    return True
  try:
    spec = importlib.util.find_spec(module)
  except ModuleNotFoundError:  # The parent package `a` of `a.b` is missing.
    return False
  # W&B leaves a plain folder of its name in the working directory, which has no file to load.
  return spec is not None and spec.origin is not None
