"""Processes of a run: launch detection, rendezvous, fault detection and a common stop.

`detect` identifies the launcher and the rank, `rendezvous` connects the processes before
the first use of JAX, and `watch` finds faults and agrees on a step to stop after.
`session` combines them for one process, and `barrier` has the collectives of host values.
This package does not use `Config`, models or checkpoints.
"""

from jaxscale.cluster.barrier import (
  any_process,
  barrier,
  from_leader,
  gather,
  is_leader,
  leader_first,
  on_leader,
  sum_over_processes,
)
from jaxscale.cluster.session import current_watch, initialize, is_job, mark_saved, open_session
from jaxscale.cluster.timeouts import Timeouts

__all__ = ["Timeouts", "any_process", "barrier", "current_watch", "from_leader", "gather"]
__all__ += ["initialize", "is_job", "is_leader", "leader_first", "mark_saved", "on_leader"]
__all__ += ["open_session", "sum_over_processes"]
