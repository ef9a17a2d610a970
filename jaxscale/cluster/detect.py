"""Who this process is among those of its run."""

from __future__ import annotations

from typing import NamedTuple


class Launch(NamedTuple):
  """What the launcher has said.

  kind: "single", "given", "slurm", "mpi", "kubernetes" or "tpu".
  host: name of the host of process 0, or name:port; None is this one.
  job: the same in all processes of one step, another in every other step.
  """

  kind: str
  process_id: int
  num_processes: int
  host: str | None
  local_id: int
  local_size: int
  job: str
  restarts: int = 0
  note: str = ""
