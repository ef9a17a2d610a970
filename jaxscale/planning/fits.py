"""Find out whether a step fits, by compiling for chips that need not be present.

This compiles the train step of a config for accelerators by name (see `topologies`), and reads
the memory that the program takes on each of them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from jaxscale import config as cfg
from jaxscale.cluster import gpu_settings
from jaxscale.errors import EXIT_CRASH, ConfigError
from jaxscale.hlo.memory import Memory, memory_of, out_of_memory
from jaxscale.planning.topologies import Chips, compiler, gib, num_hosts


class Fit(NamedTuple):
  """Compiler's result for one program.

  Attributes:
    memory: the bytes per device; None if compilation was refused.
    refusal: the compiler's message if it refused.
    limit: the bytes that a program may take on a device.
    seconds: the time to compile.
    compiled: the program, `jax.stages.Compiled`; None if compilation was refused.
    mesh: the mesh that it is compiled for.
    experiment: the experiment of the step, `build.Experiment`.
  """

  memory: Memory | None
  refusal: str | None
  limit: int
  seconds: float
  compiled: Any
  mesh: Any
  experiment: Any = None

  @property
  def is_good(self) -> bool:
    """True if the program fits the memory."""
    return self.memory is not None and self.memory.total <= self.limit


class RefusedError(Exception):
  """The compiler refuses a step, because the chip has too little memory for it."""

  exit_code = EXIT_CRASH


def settings_of(config: cfg.Config, chips: Chips) -> gpu_settings.Choice:
  """Return the variables that a run of a config would set on some GPUs; none on other chips."""
  if chips.chip.platform != "cuda" or not config.gpu_settings:
    return gpu_settings.Choice()
  hardware = gpu_settings.Hardware(1, has_nodes=num_hosts(chips.name) > 1)
  return gpu_settings.choose(hardware, gpu_settings.own())


def limit_of(config: cfg.Config, chips: Chips) -> int:
  """Return the bytes that a program may take on a device in a run of a config.

  Raises:
    ConfigError: the fraction of a GPU's memory that the user has set is invalid.
  """
  if chips.chip.platform != "cuda":
    return chips.chip.limit
  return int(chips.chip.memory * gpu_settings.memory_fraction(settings_of(config, chips)))


@contextlib.contextmanager
def _level_of(config: cfg.Config, chips: Chips) -> Iterator[None]:
  """Compile at the optimization level of a run."""
  import jax

  name = gpu_settings.LEVEL.lower()
  before = getattr(jax.config, name)
  jax.config.update(name, settings_of(config, chips).values.get(gpu_settings.LEVEL, before))
  try:
    yield
  finally:
    jax.config.update(name, before)


def compile_for(config: cfg.Config, chips: Chips) -> Fit:
  """Compile the train step of a config for chips that need not be present.

  Args:
    config: the config of the run; text data are not read.
    chips: the chips, from `planning.topologies.find_chips`.

  Raises:
    ConfigError: the config does not fit such devices, whatever their memory.

  Example:
    >>> fit = compile_for(config, find_chips("v5e-16"))            # doctest: +SKIP
    >>> fit.memory.total, fit.is_good                          # doctest: +SKIP
    (6054109184, True)
    >>> print(hlo.summary(hlo.collectives(fit.compiled, fit.mesh)))  # doctest: +SKIP
  """
  # Import JAX only after the platform is known.
  from jaxscale.collectives.cpu_workarounds import numbered
  from jaxscale.experiment import build

  data = config.data.abstract(config.batch_size)
  experiment = build.experiment(
    config, devices=chips.devices, datasets=data, memory=limit_of(config, chips)
  )
  before = time.perf_counter()
  memory = refusal = compiled = None
  try:
    lowered = experiment.lower_train_step()
    if chips.chip.platform == "cpu":  # Devices are simulated, but each would be a process.
      lowered = numbered(lowered, apart=False)
    with _level_of(config, chips):
      compiled = lowered.compile()
    memory = memory_of(compiled)
  except RuntimeError as e:
    if "cuDNN not found" in str(e):
      suffix = "13" if "cuda13" in compiler("cuda") else "12"
      advice = f"attention needs cuDNN, which is missing; run pip install nvidia-cudnn-cu{suffix}"
      raise ConfigError(f"--chips={chips.name}: {advice}") from None
    if (refusal := out_of_memory(e)) is None:
      problem = str(e).split("\n", 1)[0]
      raise RefusedError(f"--chips={chips.name}: the step does not compile: {problem}") from None
  seconds = time.perf_counter() - before
  mesh, limit = experiment.mesh, limit_of(config, chips)
  return Fit(memory, refusal, limit, seconds, compiled, mesh, experiment)


def line(fit: Fit, chips: Chips) -> str:
  """Describe a candidate in one line: whether it fits, its memory, and the limit."""
  result = "fits" if fit.is_good else "does not fit"
  took = f"{fit.seconds:.0f} s to compile"
  if fit.memory is None:
    return f"{result} in {gib(fit.limit)}: {fit.refusal} ({took})"
  m = fit.memory
  host = f", {gib(m.host)} on the host" if m.host else ""
  jax_takes = " that JAX takes" if chips.chip.platform == "cuda" else ""
  parts = f"{gib(m.arguments)} state and batch, {gib(m.temporaries)} temporaries{host}"
  return f"{result}: {gib(m.total)} of {gib(fit.limit)}{jax_takes} ({parts}; {took})"
