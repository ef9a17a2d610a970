"""The processes of a run: how each is started, finds the others, and stops with them.

`detect` finds out where a process runs, `rendezvous` connects the processes before JAX
is asked for anything, `watch` finds faults and agrees on a step to stop after,
`session` is one process's part from start to end, `barrier` what all decide together
once JAX knows them. Nothing here knows a `Config`, a model or a checkpoint.
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
