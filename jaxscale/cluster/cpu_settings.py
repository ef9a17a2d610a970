"""What a process that trains on CPUs asks of the system: its memory and its scheduler.

Measured by `benchmarks/cpu_steps.py --before` and `benchmarks/batch_policy.py` (Linux
6.18, glibc 2.36, jax 0.10.2). Neither takes the place of what the user has set.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import re
import sys
from collections.abc import Mapping

from jaxscale.files import whole_number

# malloc.h of glibc.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
_keeps = False  # whether this process does


def simulated_devices(env: Mapping[str, str] = os.environ) -> int:
  """How many devices the variables make of this process's cores.

  Example:
    >>> simulated_devices({"JAX_NUM_CPU_DEVICES": "8"}), simulated_devices({})
    (8, 1)
  """
  flags = env.get("XLA_FLAGS", "")
  forced = re.findall(r"--xla_force_host_platform_device_count=(\d+)", flags)
  counts = [*forced, env.get("JAX_NUM_CPU_DEVICES", "")]
  return max((whole_number(n) or 1 for n in counts), default=1)


def keep_memory(env: Mapping[str, str] = os.environ, *, num_gpus: int = 0) -> bool:
  """Let glibc keep what arrays free, for the next step; before there are threads.

  A step's temporaries and results otherwise go back to the system and come again page
  by page, which takes a tenth to a quarter of its time. One arena: those of threads
  give large blocks back whatever is set (mallopt(3)). Several devices would wait for
  each other at it, so a process that simulates them stays as it is.

  Args:
    env: the environment variables.
    num_gpus: that are visible.

  Returns:
    Whether it was done: not on accelerators, where the user has set a variable of
    malloc, and with another C library.
  """
  global _keeps
  if not _is_single_cpu(env, num_gpus):
    return False
  if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in env):
    return False
  mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
  values = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_ARENA_MAX, 1))
  _keeps = mallopt is not None and all([mallopt(*each) for each in values])
  return _keeps


def _is_single_cpu(env: Mapping[str, str], num_gpus: int) -> bool:
  """Whether the only device of this process will be a CPU."""
  config = getattr(sys.modules.get("jax"), "config", None)  # if it was imported
  platforms = getattr(config, "jax_platforms", None) or env.get("JAX_PLATFORMS", "")
  asked = platforms.partition(",")[0]
  if asked != "cpu" and (num_gpus or importlib.util.find_spec("libtpu")):
    return False
  return max(simulated_devices(env), getattr(config, "jax_num_cpu_devices", 1)) < 2


def give_memory_back() -> None:
  """Return what is free to the system, once nothing trains: a notebook lives on."""
  if _keeps:
    ctypes.CDLL(None).malloc_trim(0)


def use_batch_policy() -> None:
  """Put a process that trains on CPUs, with all of its threads, under SCHED_BATCH.

  Gloo, which carries JAX's collectives between CPUs, has a thread for its sockets.
  Under the usual policy, SCHED_OTHER, that thread preempts the one that computes
  whenever it is woken, and polls until the next tick of the scheduler: with a single
  core each collective takes a tick, 4 ms at 250 Hz. Under SCHED_BATCH a thread that
  is woken waits until the other gives way (sched(7)): 0.1 to 0.3 ms.

  Nothing happens on accelerators, where the user chose another policy than the usual
  one (chrt(1)), where the system forbids it, and on systems other than Linux.
  """
  import jax

  if jax.default_backend() != "cpu" or not hasattr(os, "SCHED_BATCH"):
    return
  with contextlib.suppress(OSError):
    for thread in map(int, os.listdir("/proc/self/task")):
      # One may have ended by now.
      with contextlib.suppress(ProcessLookupError):
        if os.sched_getscheduler(thread) == os.SCHED_OTHER:
          os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
