"""Where this process runs among others, and how they agree.

`initialize` joins the processes of one run: those that `srun` started, or
those that the JAXSCALE_* variables describe (any other launcher, and tests).
"""

from __future__ import annotations

import os
from collections.abc import Callable

import jax
import numpy as np

from jaxscale.settings import ConfigError

_VARIABLES = (
  "JAXSCALE_COORDINATOR",  # host:port of process 0
  "JAXSCALE_NUM_PROCESSES",
  "JAXSCALE_PROCESS_ID",
)


def initialize() -> None:
  """Join the other processes of this run, if there are any.

  Reads JAXSCALE_COORDINATOR, JAXSCALE_NUM_PROCESSES and JAXSCALE_PROCESS_ID,
  else Slurm's variables inside a step of several tasks; without either this
  is a run of one process. Call it before anything asks JAX for devices.

  Raises:
    ConfigError: the variables are incomplete or contradict each other. (What
      goes wrong later, inside JAX's own `initialize`, ends the process.)
  """
  given = [os.environ.get(name) for name in _VARIABLES]
  if any(given):
    if not all(given):
      missing = [n for n, v in zip(_VARIABLES, given, strict=True) if not v]
      raise ConfigError(f"{', '.join(missing)}: not set, but the others are")
    coordinator, count, index = map(str, given)
    if not (count.isdigit() and index.isdigit() and int(index) < int(count)):
      raise ConfigError(
        f"JAXSCALE_PROCESS_ID={index}, JAXSCALE_NUM_PROCESSES={count}: give "
        "0 … n-1 of n"
      )
    if ":" not in coordinator:
      raise ConfigError(f"JAXSCALE_COORDINATOR={coordinator}: give host:port")
    if int(count) > 1:
      jax.distributed.initialize(coordinator, int(count), int(index))
  elif int(os.environ.get("SLURM_NTASKS", "1")) > 1:
    if "SLURM_STEP_NODELIST" not in os.environ:
      if "SLURM_PROCID" in os.environ and "SLURM_JOB_ID" in os.environ:
        raise ConfigError(
          f"SLURM_NTASKS={os.environ['SLURM_NTASKS']}: this is no step of the "
          "job, start it with srun"
        )
      return
    # One process a device is the layout JAX's own detection is right for.
    jax.distributed.initialize()


def is_leader() -> bool:
  """Whether this process writes what the run writes once."""
  return jax.process_index() == 0


def barrier(name: str) -> None:
  """Wait until every process is here."""
  if jax.process_count() > 1:
    from jax.experimental import multihost_utils

    multihost_utils.sync_global_devices(name)


def any_process(flag: bool) -> bool:
  """Whether the flag is set in any process; all must call this together."""
  if jax.process_count() == 1:
    return flag
  from jax.experimental import multihost_utils

  return bool(multihost_utils.process_allgather(np.array(flag)).any())


def sum_over_processes(values: np.ndarray) -> np.ndarray:
  """Sum of every process's uint64 values, modulo 2^64; all must call it."""
  if jax.process_count() == 1:
    return values
  from jax.experimental import multihost_utils

  # As uint32 halves: without x64, JAX would cut uint64 down to them.
  halves = multihost_utils.process_allgather(values.view(np.uint32))
  return np.ascontiguousarray(halves).view(np.uint64).sum(axis=0, dtype=np.uint64)


def on_leader(function: Callable[[], None], name: str) -> None:
  """Run `function` in the leader only, and let the others wait for it."""
  if is_leader():
    function()
  barrier(name)
