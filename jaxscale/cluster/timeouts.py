"""Timeouts of all waits between processes, in seconds, with their defaults."""

from __future__ import annotations

import dataclasses
from typing import Annotated

Seconds = Annotated[float, "in (0, 1000000000]"]  # threads wait for no longer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeouts:
  """Limits of the waits between processes, in seconds; `config.Faults` extends it.

  The first five limits guarantee that a fault ends all processes within a minute. Long
  phases of a healthy run have longer limits (NVIDIA's resiliency extension recommends 600
  for the start and 420 for a checkpoint).

  Attributes:
    heartbeat_interval_s: between two heartbeats of a process.
    heartbeat_timeout_s: without a heartbeat, until a process counts as stopped or cut
      off. Before and in a compilation a process that runs may keep Python's lock for
      `startup_timeout_s`: libraries that a thousand processes load at once from one
      file system take minutes.
    hang_timeout_s: in one step, one batch of an evaluation, or one comparison of
      replicas, or in ten mean steps of this run, whichever is longer, until a process
      hangs.
    grace_s: from SIGTERM until a process leaves without a save (Slurm's KillWait,
      after which it kills, is 30 by default, slurm.conf(5)).
    stop_before_end_s: before the end of a Slurm job, to save; of a short job at most a
      quarter of it.
    rendezvous_timeout_s: at the start, from the first process that connects to the
      last.
    startup_timeout_s: before the first compilation, as for the data to be found, and
      after the run; inf: no limit, but for silence the default.
    compile_timeout_s: in a compilation, and in the first two steps after it.
    save_timeout_s: in a save.
    slow_window_s: over which slow processes are looked for.
    jax_initialization_timeout_s: for JAX's coordinator to listen, and as long again
      for its connections (JAX's default is 300).
    jax_heartbeat_timeout_s: of silence until JAX aborts all; longer than
      `heartbeat_timeout_s`, which reports why.
    jax_shutdown_timeout_s: that JAX waits at exit for the others.
  """

  heartbeat_interval_s: Seconds = 1.0
  heartbeat_timeout_s: Seconds = 30.0
  hang_timeout_s: Seconds = 50.0
  grace_s: Seconds = 25.0
  stop_before_end_s: Annotated[float, "in [0, 1000000000]"] = 60.0
  rendezvous_timeout_s: Seconds = 120.0
  startup_timeout_s: Seconds = 600.0
  compile_timeout_s: Seconds = 3600.0
  save_timeout_s: Seconds = 600.0
  slow_window_s: Seconds = 30.0
  jax_initialization_timeout_s: Seconds = 60.0
  jax_heartbeat_timeout_s: Seconds = 100.0
  jax_shutdown_timeout_s: Seconds = 300.0
