"""`Launch`: the rank of a process; `Job`: its job; `number`: a variable that a launcher sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from jaxscale.errors import ConfigError
from jaxscale.files import whole_number

LOOPBACK = "127.0.0.1"

Env = Mapping[str, str]


class Launch(NamedTuple):
  """The rank of a process and the other values from its launcher.

  Example:
    >>> Launch("slurm", 1, 4, "n1", 1, 2, "slurm-17.0").process_id
    1
  """

  kind: str  # "single", "explicit", "slurm", "openmpi", … "kubernetes", "tpu"
  process_id: int = 0
  num_processes: int = 1  # 0: only JAX can detect the number (a TPU pod)
  host: str | None = None  # of process 0; None: it is the only process, or see above
  local_id: int | None = None  # rank within this node; None: unknown
  local_size: int | None = None  # number of processes on this node; None: unknown
  job: str = "single"  # equal in all processes of a run, and different in other runs
  restarts: int = 0  # number of restarts by the scheduler
  note: str = ""  # one line for the user
  port: int | None = None  # port on which process 0 must listen
  nodes: tuple[str, ...] = ()  # hosts of the run, if the launcher lists them


class Job(NamedTuple):
  """A scheduler's job, as one of its processes sees it.

  Attributes:
    scheduler: the name of the scheduler in `schedulers.SCHEDULERS`.
    id: the ID by which the scheduler requeues or cancels the job.
    restarts: the number of restarts by the scheduler.
    step: the job's step; "" without steps.

  Example:
    >>> str(Job("slurm", "12", restarts=1, step="0"))
    'slurm-12.0-r1'
  """

  scheduler: str
  id: str
  restarts: int = 0
  step: str = ""

  def __str__(self) -> str:
    return f"{self.scheduler}-{self.id}{self.step and '.'}{self.step}-r{self.restarts}"


def number(env: Env, name: str) -> int | None:
  """Return the whole number in a variable; None if it is not set.

  Raises:
    ConfigError: the variable is not a whole number.

  Example:
    >>> number({"SLURM_PROCID": "3"}, "SLURM_PROCID")
    3
  """
  text = env.get(name, "").strip()
  value = whole_number(text)
  if text and value is None:
    raise ConfigError(f"{name}={text:.40}: not a whole number; correct or unset it")
  return value
