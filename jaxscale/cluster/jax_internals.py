"""Private names of JAX, and the behaviour with a version that lacks them.

JAX 0.10 to 0.12 has all of them (tests/unit/test_jax_internals.py checks the installed
version).

| name | used for | without it |
|---|---|---|
| `jax._src.distributed.global_state` | processes wait while process 0 compiles | each compiles |
| `jax._src.cache_key._hash_accelerator_config` | one cached program for equal CPUs | each compiles |
| `_wrapped_callback` in `jax/_src/callback.py` | report a hang in a callback of the model | the hang report has the process only |
| `jax._src.config._check_vma` | TPU's kernels of attention in a step | an error of JAX in steps on TPUs |
| `.mat` and `.manual_axis_type` of array types | axes that a value varies over | an error with the JAX version to install |
"""  # noqa: E501

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from types import CodeType
from typing import Any

from jaxscale.errors import invalid

SOURCE = os.path.join("jax", "_src", "")  # part of the path of JAX's own files
CALLBACK = "_wrapped_callback"  # runs every host callback of a program
# (module, attribute)
_STATE = "jax._src.distributed", "global_state"
_DEVICE_HASH = "jax._src.cache_key", "_hash_accelerator_config"
_AXES_CHECK = "jax._src.config", "_check_vma"


def coordination_client() -> Any:
  """Return JAX's connection to process 0; None if JAX has none or lacks the name."""
  return getattr(_find(*_STATE), "client", None)


@contextlib.contextmanager
def devices_hashed_as(content: bytes) -> Iterator[None]:
  """Replace the devices by `content` in the cache key of compiled programs.

  JAX's key has a fingerprint of the devices, which differs between processes on CPUs.
  If JAX lacks the name, the key stays unchanged.
  """
  original = _find(*_DEVICE_HASH)
  if original is None:
    yield
    return
  module, name = importlib.import_module(_DEVICE_HASH[0]), _DEVICE_HASH[1]
  setattr(module, name, lambda hashed, devices: hashed.update(content))
  try:
    yield
  finally:
    setattr(module, name, original)


def runs_callback(code: CodeType) -> bool:
  """Return whether the code is JAX's function that runs a host callback."""
  return code.co_name == CALLBACK and is_jax(code)


def is_jax(code: CodeType) -> bool:
  """Return whether the code belongs to JAX."""
  return SOURCE in code.co_filename


def varying_axes(array_type: Any) -> frozenset[str]:
  """Return the mesh axes over which values of a type may differ.

  Args:
    array_type: a result of `jax.typeof`, or a `jax.ShapeDtypeStruct`.

  Raises:
    ConfigError: the installed JAX lacks the attribute.
  """
  kind = _manual_axis_type(array_type)
  return frozenset() if kind is None else frozenset(kind.varying)


def with_varying_axes(array_type: Any, axes: frozenset[str]) -> Any:
  """Return the type of values that may differ over these mesh axes only."""
  kind = _manual_axis_type(array_type)
  return array_type.update(manual_axis_type=kind.update(varying=axes))


def without_axes_check() -> contextlib.AbstractContextManager[Any]:
  """Return a context in which `jax.shard_map` does not check over which axes values vary.

  Kernels of Pallas that do not declare it can be traced in it. If JAX lacks the name, the check
  stays.
  """
  check = _find(*_AXES_CHECK)
  return contextlib.nullcontext() if check is None else check(False)


def _find(module: str, name: str) -> Any:
  """Return an attribute of a module; None if the module or the attribute is missing."""
  with contextlib.suppress(ImportError):
    return getattr(importlib.import_module(module), name, None)
  return None


def _manual_axis_type(array_type: Any) -> Any:
  for name in ("mat", "manual_axis_type"):
    if hasattr(array_type, name):
      return getattr(array_type, name)
  import jax

  problem = "does not report the mesh axes over which a value varies"
  raise invalid("jax", jax.__version__, problem, "install jax>=0.10,<0.13")
