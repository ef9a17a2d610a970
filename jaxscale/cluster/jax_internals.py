"""Names of JAX that are not public, and what happens where a version lacks them.

JAX 0.10 to 0.12 has all of these (tests/unit/test_jax_internals.py asks the installed one).

| name | used for | without it |
|---|---|---|
| `jax._src.distributed.global_state` | processes wait while the leader compiles | each compiles |
| `jax._src.cache_key._hash_accelerator_config` | one cached program for equal CPUs | each compiles |
| `_wrapped_callback` in `jax/_src/callback.py` | a hang in a callback of the model | the hang names the process alone |
| `.mat` and `.manual_axis_type` of array types | axes that a value varies over | an error that names the JAX to install |
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
_ABSENT = object()


def coordination_client() -> Any:
  """JAX's connection to process 0; None where there is none, or no name for it."""
  return getattr(_find(*_STATE), "client", None)


@contextlib.contextmanager
def devices_hashed_as(content: bytes) -> Iterator[None]:
  """Inside, the key of a compiled program has `content` in place of its devices.

  JAX's key has a fingerprint of the devices, and that of CPUs differs between
  processes. Without the name nothing is replaced.
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
  """Whether it is the function in which JAX runs a host callback."""
  return code.co_name == CALLBACK and is_jax(code)


def is_jax(code: CodeType) -> bool:
  """Whether it is code of JAX itself."""
  return SOURCE in code.co_filename


def varying_axes(array_type: Any) -> frozenset[str]:
  """The mesh axes over which values of a type may differ.

  Args:
    array_type: of `jax.typeof`, or a `jax.ShapeDtypeStruct`.

  Raises:
    ConfigError: JAX has another name for it.
  """
  kind = _manual_axis_type(array_type)
  return frozenset() if kind is None else frozenset(kind.varying)


def with_varying_axes(array_type: Any, axes: frozenset[str]) -> Any:
  """The type of values that may differ over these mesh axes alone."""
  kind = _manual_axis_type(array_type)
  return array_type.update(manual_axis_type=kind.update(varying=axes))


def _find(module: str, name: str) -> Any:
  """An attribute of a module; None where either has vanished."""
  with contextlib.suppress(ImportError):
    return getattr(importlib.import_module(module), name, None)
  return None


def _manual_axis_type(array_type: Any) -> Any:
  for name in ("mat", "manual_axis_type"):
    if (kind := getattr(array_type, name, _ABSENT)) is not _ABSENT:
      return kind
  import jax

  why = "does not tell over which mesh axes a value varies"
  raise invalid("jax", jax.__version__, why, "install jax>=0.10,<0.13")
