"""`Launch`: who this process is in a run; `Host`: what a detector may ask."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from jaxscale.errors import ConfigError
from jaxscale.files import whole_number

LOOPBACK = "127.0.0.1"

Env = Mapping[str, str]


class Launch(NamedTuple):
  """What the launcher says.

  Example:
    >>> Launch("slurm", 1, 4, "n1", 1, 2, "slurm-17.0").process_id
    1
  """

  kind: str  # "single", "explicit", "slurm", "openmpi", … "kubernetes", "tpu"
  process_id: int = 0
  num_processes: int = 1  # 0: only JAX can find out (a TPU pod)
  host: str | None = None  # of process 0; None: there is nobody else, or see above
  local_id: int | None = None  # among the processes of this node; None: not known
  local_size: int | None = None
  job: str = "single"  # the same in all processes of one run, and in no other
  restarts: int = 0  # how often the scheduler has started this job again
  note: str = ""  # what a person should know, one line
  port: int | None = None  # where process 0 has to listen
  nodes: tuple[str, ...] = ()  # the hosts of the run, where the launcher lists them


class Host(NamedTuple):
  """The environment of this process, and questions that a detector may ask.

  Attributes:
    env: the environment variables.
    expand: makes host names of Slurm's short form of a node list.
    fqdn: the full name of this host.
    at_terminal: whether a terminal is our standard input.
    ask_mpi: the host name of rank 0, by MPI; all ranks must ask.
    has_tpu: whether this host has TPU chips.
  """

  env: Env
  expand: Callable[[str], list[str]]
  fqdn: Callable[[], str]
  at_terminal: Callable[[], bool]
  ask_mpi: Callable[[Launch], str | None]
  has_tpu: Callable[[Env], bool]


def number(env: Env, name: str) -> int | None:
  """The whole number in a variable, None where it is not set.

  Raises:
    ConfigError: it is set to something else.

  Example:
    >>> number({"SLURM_PROCID": "3"}, "SLURM_PROCID")
    3
  """
  text = env.get(name, "").strip()
  found = whole_number(text)
  if text and found is None:
    raise ConfigError(f"{name}={text:.40}: give a whole number")
  return found
