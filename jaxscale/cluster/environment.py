"""Variables that JAX answers with a traceback: checked before it is asked."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from importlib import metadata

from jaxscale.errors import ConfigError
from jaxscale.files import whole_number

# jax/_src/xla_bridge.py, jax 0.10: what there is without a plugin, and other names.
_BUILT_IN, _ALIASES = ("cpu", "tpu"), {"gpu": ("cuda", "rocm")}
_TRUE = ("y", "yes", "t", "true", "on", "1")  # jax/_src/config.py


def check_environment(env: Mapping[str, str]) -> None:
  """Refuse what JAX would be given in vain.

  Args:
    env: variables of the process.

  Raises:
    ConfigError: JAX_PLATFORMS names what this installation has not,
      JAX_NUM_CPU_DEVICES does not count devices, or JAX_DISABLE_JIT is set.

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
    advice = "steps are compiled before they run; unset it"
    raise ConfigError(f"JAX_DISABLE_JIT={value}: {advice}")
  for name in filter(None, env.get("JAX_PLATFORMS", "").split(",")):
    if problem := _missing(name, env):
      raise ConfigError(f"JAX_PLATFORMS={name}: {problem}, or unset it")


def _missing(name: str, env: Mapping[str, str]) -> str | None:
  """What a platform lacks here, and what to do; None: JAX can be asked."""
  if name == "cpu":
    return None  # which needs no look at what is installed
  known = {*_BUILT_IN, *_plugins()}
  if name == "tpu" and not (env.get("TPU_LIBRARY_PATH") or _is_installed("libtpu")):
    return "libtpu is not installed; install jaxscale[tpu]"
  if name in known or known.intersection(_ALIASES.get(name, ())):
    return None
  if name in ("cuda", "rocm", "gpu"):
    return "JAX has no plugin for it here; install jaxscale[cuda12] or [cuda13]"
  return f"no such platform; give one of {', '.join(sorted(known))}"


def has_gpu_plugin() -> bool:
  """Whether JAX can use GPUs with what is installed."""
  return bool({"cuda", "rocm"} & _plugins())


def _plugins() -> set[str]:
  """Platforms of JAX's plugins: jax_plugins.xla_cuda12 and the like, by their names."""
  names = [point.name for point in metadata.entry_points(group="jax_plugins")]
  kinds = {kind for kind in ("cuda", "rocm") if any(kind in name for name in names)}
  return kinds | {*names}


def _is_installed(module: str) -> bool:
  return module in sys.modules or importlib.util.find_spec(module) is not None
