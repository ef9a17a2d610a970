"""Find out whether a step fits, by compiling for chips that need not be present.

This compiles the train step of a config for accelerators by name (see `topologies`), and reads
the memory that the program takes on each of them.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from jaxscale import config as cfg
from jaxscale.errors import EXIT_CRASH, ConfigError
from jaxscale.hlo.memory import Memory, memory_of, out_of_memory
from jaxscale.planning.topologies import Chips, gib


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
    config, devices=chips.devices, datasets=data, memory=chips.chip.limit
  )
  before = time.perf_counter()
  memory = refusal = compiled = None
  try:
    lowered = experiment.lower_train_step()
    if chips.chip.platform == "cpu":  # Devices are simulated, but each would be a process.
      lowered = numbered(lowered, apart=False)
    compiled = lowered.compile()
    memory = memory_of(compiled)
  except RuntimeError as e:
    if "cuDNN not found" in str(e):
      advice = "attention needs cuDNN, which is missing; run pip install nvidia-cudnn-cu12"
      raise ConfigError(f"--chips={chips.name}: {advice}") from None
    if (refusal := out_of_memory(e)) is None:
      problem = str(e).split("\n", 1)[0]
      raise RefusedError(f"--chips={chips.name}: the step does not compile: {problem}") from None
  seconds = time.perf_counter() - before
  mesh, limit = experiment.mesh, chips.chip.limit
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
