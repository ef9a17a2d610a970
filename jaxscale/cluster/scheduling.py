"""How Linux shares cores among the threads of a process that computes on them.

Gloo, which carries JAX's collectives between CPUs, has a thread for its sockets. Under
the usual policy, SCHED_OTHER, that thread preempts the one that computes whenever it
is woken, and then polls until the next tick of the scheduler. Where a process has a
single core, each collective so takes a tick, 4 ms at 250 Hz. Under SCHED_BATCH a thread
that is woken waits until the other gives way (sched(7)): 0.1 to 0.3 ms, by
`benchmarks/batch_scheduling.py` (Linux 6.18, jax 0.10.2).
"""

from __future__ import annotations

import contextlib
import os


def use_batch_policy() -> None:
  """Put a process that trains on CPUs, with all of its threads, under SCHED_BATCH.

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
