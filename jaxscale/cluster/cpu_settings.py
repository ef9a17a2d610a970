"""Linux settings for CPU training: malloc retention and SCHED_BATCH.

`benchmarks/cpu_steps.py --before` and `benchmarks/batch_policy.py` measure their effect
(Linux 6.18, glibc 2.36, jax 0.10.2). Neither overrides a setting of the user.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import re
import sys
from collections.abc import Mapping

from jaxscale.cluster import environment
from jaxscale.files import whole_number

# malloc.h of glibc.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
_keeps = False  # whether `keep_memory` was applied in this process


def simulated_devices(env: Mapping[str, str] = os.environ) -> int:
  """Return the number of CPU devices that the variables request for this process.

  Example:
    >>> simulated_devices({"JAX_NUM_CPU_DEVICES": "8"}), simulated_devices({})
    (8, 1)
  """
  flags = env.get("XLA_FLAGS", "")
  forced = re.findall(r"--xla_force_host_platform_device_count=(\d+)", flags)
  counts = [*forced, env.get("JAX_NUM_CPU_DEVICES", "")]
  return max((whole_number(n) or 1 for n in counts), default=1)


def keep_memory(env: Mapping[str, str] = os.environ, *, num_gpus: int = 0) -> bool:
  """Let glibc keep freed memory for the next step; call this before threads start.

  Otherwise the memory of a step's temporaries and results goes back to the system and
  returns page by page, which takes a tenth to a quarter of the step. Only one arena is
  used, since the arenas of threads return large blocks in any case (mallopt(3)). Several
  simulated devices would wait for each other at this arena, so a process with several
  devices is left unchanged.

  Args:
    env: the environment variables.
    num_gpus: the number of visible GPUs.

  Returns:
    True if glibc was set. False on accelerators, with a malloc variable set by the user,
    and with a different C library.
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
  """Return whether the only device of this process will be a CPU."""
  config = getattr(sys.modules.get("jax"), "config", None)  # if it was imported
  asked = environment.platforms(env).partition(",")[0]
  if asked != "cpu" and (num_gpus or importlib.util.find_spec("libtpu")):
    return False
  return max(simulated_devices(env), getattr(config, "jax_num_cpu_devices", 1)) < 2


def give_memory_back() -> None:
  """Return free memory to the system after a run, as a notebook's process lives on."""
  if _keeps:
    ctypes.CDLL(None).malloc_trim(0)


def use_batch_policy() -> None:
  """Set the policy SCHED_BATCH for all threads of a process that trains on CPUs.

  Gloo, which runs JAX's collectives between CPUs, has a thread for its sockets. Under the
  default policy, SCHED_OTHER, this thread preempts the computing thread whenever it wakes
  up, and polls until the next tick of the scheduler. With a single core each collective
  then takes a tick, 4 ms at 250 Hz. Under SCHED_BATCH a thread that wakes up waits until
  the other one yields (sched(7)), and a collective takes 0.1 to 0.3 ms.

  Nothing changes on accelerators, under a policy that the user has set (chrt(1)), if the
  system forbids it, and on systems other than Linux.
  """
  import jax

  if jax.default_backend() != "cpu" or not hasattr(os, "SCHED_BATCH"):
    return
  with contextlib.suppress(OSError):
    for thread in map(int, os.listdir("/proc/self/task")):
      # The thread may have ended by now.
      with contextlib.suppress(ProcessLookupError):
        if os.sched_getscheduler(thread) == os.SCHED_OTHER:
          os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
