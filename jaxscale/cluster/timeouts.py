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
    heartbeat_timeout_s: the time in seconds without a heartbeat after which a process is
      reported as stopped or disconnected, and the run ends. Before and during a compilation the
      limit is `startup_timeout_s`, because a process that loads libraries from the same file
      system as a thousand others can block its heartbeat thread for minutes.
    hang_timeout_s: the time in seconds after which one step, one batch of an evaluation or one
      comparison of replicas is reported as hung; the limit is ten times the mean step time of
      the run if that is longer.
    grace_s: the time in seconds after SIGTERM in which a process can save a checkpoint; then it
      exits without one. Keep it below Slurm's KillWait (30 s by default, slurm.conf(5)).
    stop_before_end_s: the time in seconds before the time limit of a Slurm job at which the run
      saves and stops; at most a quarter of the time that the job has left when the run starts.
    rendezvous_timeout_s: the time in seconds that a process waits for the others to connect,
      counted from when it starts to wait.
    startup_timeout_s: the time in seconds that a process may take before the first compilation
      (e.g. to find the data), and again for code that follows the run.
    compile_timeout_s: the time in seconds that a compilation, or each of the two steps after
      it, may take.
    save_timeout_s: the time in seconds that a process may take to write a checkpoint, and again
      to finish the run (summary and plots).
    slow_window_s: the length in seconds of the window over which the processes' host times per
      step are averaged and compared, to report slow processes.
    jax_initialization_timeout_s: the time in seconds that JAX's coordinator may take to start
      to listen. The same limit applies to the connection of all processes to it (300 in JAX by
      default).
    jax_heartbeat_timeout_s: the time in seconds without a heartbeat after which JAX aborts all
      processes; at least 1.2 times `heartbeat_timeout_s`, so that jaxscale reports the cause
      first.
    jax_shutdown_timeout_s: the time in seconds that JAX waits at exit for the other processes.
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
