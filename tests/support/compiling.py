"""Compilation in half the time, where the program's speed does not matter."""

import functools
import os
from typing import Any

import jax

# One core alone: the others have other tests to run.
_FAST: dict[str, Any] = dict(xla_backend_optimization_level=0, xla_cpu_use_fusion_emitters=False)
_FAST |= dict(xla_cpu_parallel_codegen_split_count=1, xla_llvm_disable_expensive_passes=True)


def fast_compile_env() -> dict[str, str]:
  """Return environment variables that halve compile time, if JAX knows the flags.

  An unknown flag ends the process, and jax 0.12 no longer knows the second one.
  """
  if jax.__version_info__ >= (0, 11):
    return {}
  flags = [f"--{name}={str(value).lower()}" for name, value in _FAST.items()]
  return {"XLA_FLAGS": " ".join([os.environ.get("XLA_FLAGS", ""), *flags])}


@functools.cache
def fast_compile_options() -> dict[str, Any]:
  """Return compiler options that reduce compile time to a third: they disable fusions.

  jax 0.12 no longer has the second option, and needs twice the time.
  """
  try:
    jax.jit(lambda x: x).lower(1).compile(compiler_options=_FAST)
  except jax.errors.JaxRuntimeError:
    return {k: v for k, v in _FAST.items() if "emitters" not in k}
  return _FAST
