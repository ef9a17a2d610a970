"""Where this process runs among others, and how they agree.

`initialize` joins the processes of one run: those that `srun` started, or
those that the JAXSCALE_* variables describe (any other launcher, and tests).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

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


def from_leader(value: Any) -> Any:
  """The leader's value, in every process; all must call it.

  What a process has read from a file system may be older than what another has:
  where it decides what is done next, the leader's reading is everybody's.

  Args:
    value: anything that JSON has; lists come back for tuples.
  """
  if jax.process_count() == 1:
    return value
  from jax.experimental.multihost_utils import broadcast_one_to_all

  text = np.frombuffer(json.dumps(value if is_leader() else None).encode(), np.uint8)
  length = int(broadcast_one_to_all(np.int32(len(text))))
  sent = text if is_leader() else np.zeros(length, np.uint8)
  return json.loads(broadcast_one_to_all(sent).tobytes())


def gather(value: Any) -> list[Any]:
  """The values of all processes, in their order, in each; all must call it.

  Args:
    value: anything that JSON has, and small.
  """
  if jax.process_count() == 1:
    return [value]
  from jax.experimental.multihost_utils import process_allgather

  text = json.dumps(value).encode()
  longest = int(process_allgather(np.int32(len(text))).max())
  padded = np.frombuffer(text.ljust(longest), np.uint8)  # JSON minds no spaces
  return [json.loads(row.tobytes()) for row in process_allgather(padded)]


def on_leader(function: Callable[[], None], name: str) -> None:
  """Run `function` in the leader only, and let the others wait for it.

  Raises:
    OSError: in all of them, if the leader's file system failed.
  """
  failed = None
  if is_leader():
    try:
      function()
    except OSError as e:
      failed = e.errno, e.strerror, str(e.filename)
  barrier(name)
  if failed := from_leader(failed):
    raise OSError(*failed)
