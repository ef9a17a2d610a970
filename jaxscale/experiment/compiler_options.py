"""Options of XLA's compiler for the train and evaluation step.

JAX passes options with a program (`jax.jit(..., compiler_options=...)`), where an unknown name
is an error that can be reported, while XLA aborts the process at an unknown flag in XLA_FLAGS.
Names come and go with versions of XLA, so they are checked by compiling a tiny program, before
data are read. compiler_presets.toml has the sets of options that vendors recommend for their
GPUs, with sources; their speed is untested.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from jaxscale.config import Config
from jaxscale.errors import invalid

Options = dict[str, bool | int | float | str]
# By Config.dtype. By default XLA computes products of FP8 in Triton fusions; without those they
# are cuBLASLt's FP8 calls (compiled for an H100).
_FOR_DTYPE: dict[str, Options] = {"float8": {"xla_gpu_enable_triton_gemm": False}}


@functools.cache
def presets() -> dict[str, dict[str, Any]]:
  """Return the options of every preset by name, and under "renamed" new names and values."""
  file = Path(__file__).with_name("compiler_presets.toml")
  return {"none": {}} | tomllib.loads(file.read_text("utf-8"))


def compiler_options(
  config: Config, devices: Sequence[Any] | None = None
) -> tuple[Options, tuple[str, ...]]:
  """Return the options to compile the steps of a config with, and notes for the user.

  Args:
    config: the config of the run; CPUs get only its `compiler_options`.
    devices: the devices to compile for; None means those of this process.

  Raises:
    ConfigError: the compiler refuses a name or a value of `Config.compiler_options`.

  Example:
    >>> from jaxscale.config.loading import load_config
    >>> changes = {"compiler_options.xla_backend_optimization_level": "2"}
    >>> compiler_options(load_config("configs/digits.py", changes))
    ({'xla_backend_optimization_level': 2}, ())
  """
  device = (devices or jax.local_devices())[0]
  given, preset, renamed = config.compiler_options, config.compiler_preset, presets()["renamed"]
  field = f"Config.compiler_preset={preset!r}"
  if device.platform == "cpu":
    options, notes = {**given}, (f"{field}: not used on CPUs",) * (preset != "none")
  else:
    options, notes = presets()[preset] | _FOR_DTYPE.get(config.dtype, {}) | given, ()
  compiler = f"the compiler of jax {jax.__version__}"
  while options and (refused := _refused(options, device)):
    name, problem = refused
    if name in given or name not in options:
      field = "Config.compiler_options" + f".{name}" * (name in given)
      fix = "use {}={!r}".format(*renamed[name]) if name in renamed else "correct or remove it"
      raise invalid(field, given.get(name, given), f"is refused by {compiler}: {problem}", fix)
    del options[name]
    if name in renamed:
      options.setdefault(*renamed[name])
    else:
      notes += (f"{field}: {name} is left out, which {compiler} refuses: {problem}",)
  return options, notes


def _refused(options: Options, device: Any) -> tuple[str, str] | None:
  """Return the first option that the compiler of a device refuses, and its message."""
  number = jax.ShapeDtypeStruct((), "float32", sharding=SingleDeviceSharding(device))
  try:
    jax.jit(lambda x: x + 1, compiler_options=options).lower(number).compile()
  except (TypeError, ValueError) as e:  # JAX itself takes a few options, such as an effort.
    return "", str(e)
  except RuntimeError as e:
    # "INVALID_ARGUMENT: No such compile option: 'NAME'", or "While setting option NAME, ..."
    found = re.match(r"INVALID_ARGUMENT: (.*option:? '?(\w+).*)", str(e))
    if found is None:
      raise
    return found[2], found[1].rstrip(".")
  return None
