"""`Launch`: who this process is among those of a run, however it was started."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from jaxscale.errors import ConfigError

LOOPBACK = "127.0.0.1"


class Launch(NamedTuple):
  """What the launcher says; `jaxscale.cluster.detect.detect` fills it in.

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
  port: int | None = None  # where process 0 was told to listen
  nodes: tuple[str, ...] = ()  # the hosts of the run, where the launcher lists them


def number(env: Mapping[str, str], name: str) -> int | None:
  """The whole number in a variable, None where it is not set.

  Raises:
    ConfigError: it is set to something else.

  Example:
    >>> number({"SLURM_PROCID": "3"}, "SLURM_PROCID")
    3
  """
  text = env.get(name, "").strip()
  if not text:
    return None
  if not (text.isascii() and text.isdigit()):
    raise ConfigError(f"{name}={text}: give a whole number")
  return int(text)
