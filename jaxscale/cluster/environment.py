"""Checks of JAX's environment variables, which JAX itself answers with a traceback."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from importlib import metadata

from jaxscale.errors import ConfigError
from jaxscale.files import whole_number

# Platforms without a plugin, and aliases of platforms (jax/_src/xla_bridge.py, jax 0.10).
_BUILT_IN, _ALIASES = ("cpu", "tpu"), {"gpu": ("cuda", "rocm")}
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
    return "JAX's plugin for it is not installed; install jaxscale[cuda12], [cuda13] or [rocm]"
  return f"no such platform; give one of {', '.join(sorted(known))}"


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
