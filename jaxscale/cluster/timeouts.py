"""Time limits in seconds for processes that wait for each other, and their defaults."""

from __future__ import annotations

import dataclasses
from typing import Annotated

Seconds = Annotated[float, "in (0, 1000000000]"]  # threads wait for no longer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeouts:
  """Time limits in seconds for processes that wait for each other; `config.Faults` extends it.

  With the first five defaults, a failed process ends the job within a minute. Operations
  that take long in a healthy run have longer limits (NVIDIA's resiliency extension
  recommends 600 s for the start and 420 s for a checkpoint).

  Attributes:
    heartbeat_interval_s: the time in seconds between two heartbeats of a process.
    heartbeat_timeout_s: the time in seconds without a heartbeat after which a process
      counts as stopped or disconnected. Before and during a compilation the limit is
      `startup_timeout_s`, because a process that loads libraries with a thousand others
      from one file system can block its heartbeat thread for minutes.
    hang_timeout_s: the time in seconds after which one step, one batch of an evaluation or
      one comparison of replicas counts as hung; ten times the run's mean step time if that
      is longer.
    grace_s: the time in seconds from SIGTERM until a process exits without saving; keep it
      below Slurm's KillWait (30 by default, slurm.conf(5)).
    stop_before_end_s: the time in seconds before the time limit of a Slurm job at which the
      run saves and stops; at most a quarter of the job's time limit.
    rendezvous_timeout_s: the time in seconds within which all processes must connect, counted
      from the first one.
    startup_timeout_s: the time in seconds that a process may take before the first compilation
      (e.g. to find the data), and again after the run; inf sets no limit, except that a
      process without heartbeats is still limited to the default.
    compile_timeout_s: the time in seconds that a compilation and the two steps after it may take.
    save_timeout_s: the time in seconds that writing a checkpoint may take.
    slow_window_s: the time in seconds over which step times are compared to find slow
      processes.
    jax_initialization_timeout_s: the time in seconds in which JAX's coordinator must start
      listening, and again in which processes must connect to it (JAX's default is 300).
    jax_heartbeat_timeout_s: the time in seconds without a heartbeat after which JAX aborts
      all processes; keep it above `heartbeat_timeout_s`, which reports the cause.
    jax_shutdown_timeout_s: the time in seconds that JAX waits at exit for other processes.
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
