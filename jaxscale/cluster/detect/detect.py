"""Says who I am, how many we are, and on which host process 0 is.

`detect` answers from the environment variables alone: JAXSCALE_*, or those of the
launcher that started this process. It asks nobody on the network and never JAX,
whose own detection is wrong in several of these cases (tests/unit/test_detect_jax.py).

Several can be present at once, so the order matters: what the user says; mpirun,
which inside a Slurm job starts its daemons by srun, so that Slurm's variables are
those of the daemon; Slurm; a TPU pod, which is also a pod of Kubernetes; Kubernetes.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Mapping

from jaxscale.cluster.detect import mpi, nodelist, pods, slurm
from jaxscale.cluster.detect.launched import Launch as Launch
from jaxscale.cluster.detect.launched import number
from jaxscale.errors import ConfigError

COORDINATOR = "JAXSCALE_COORDINATOR"  # host:port of process 0
COUNT = "JAXSCALE_NUM_PROCESSES"
INDEX = "JAXSCALE_PROCESS_ID"
JOB = "JAXSCALE_JOB"  # a name of the run, where the launcher gives it none

Env = Mapping[str, str]


def detect(
  env: Env = os.environ,
  *,
  expand: slurm.Expand = nodelist.hostnames,
  fqdn: Callable[[], str] = socket.getfqdn,
  ask_mpi: Callable[[Launch], str | None] = mpi.ask_mpi4py,
  has_tpu: Callable[[Env], bool] = pods.on_cloud_tpu,
  at_terminal: Callable[[], bool] = lambda: os.isatty(0),
) -> Launch:
  """Who this process is among those of its run.

  JAXSCALE_COORDINATOR, JAXSCALE_NUM_PROCESSES and JAXSCALE_PROCESS_ID together
  overrule any launcher; JAXSCALE_NUM_PROCESSES=1 alone makes this one process;
  JAXSCALE_COORDINATOR alone says only where process 0 is.

  Args:
    env: the environment variables.
    expand: makes host names of a node list.
    fqdn: the full name of this host; only asked in a pod of Kubernetes.
    ask_mpi: rank 0's host name, by MPI; asked when mpirun spans several nodes.
    has_tpu: whether this host has TPU chips; asked when nothing else is found.
    at_terminal: whether a terminal is our standard input; for a note only.

  Raises:
    ConfigError: the variables are incomplete or contradict each other, or
      describe processes that something else must start; the line says what.

  Example:
    >>> env = {"JAXSCALE_COORDINATOR": "n1:7000", "JAXSCALE_PROCESS_ID": "1"}
    >>> launch = detect({**env, "JAXSCALE_NUM_PROCESSES": "2"})
    >>> launch.kind, launch.process_id, launch.num_processes, launch.host
    ('explicit', 1, 2, 'n1')
  """
  given = [env.get(name) for name in (COORDINATOR, COUNT, INDEX)]
  if all(given):
    return _explicit(env, expand)
  if given == [None, "1", None]:
    return Launch("single", local_id=0, local_size=1, job=_named(env, "single"))
  found = _started(env, expand, fqdn, at_terminal)
  if found is None and any(given):
    names = (COORDINATOR, COUNT, INDEX)
    missing = [n for n, v in zip(names, given, strict=True) if not v]
    raise ConfigError(f"{', '.join(missing)}: not set, but the others are")
  if found is None and has_tpu(env):
    return Launch("tpu", 0, 0, job=_named(env, "tpu"))
  if found is None:
    return Launch("single", local_id=0, local_size=1, job=_named(env, "single"))
  found = _settled(env, found._replace(job=_named(env, found.job)))
  if found.num_processes > 1 and found.host is None:
    return mpi.host_of_rank_0(env, found, expand, ask_mpi)
  return found


def _started(
  env: Env,
  expand: slurm.Expand,
  fqdn: Callable[[], str],
  at_terminal: Callable[[], bool],
) -> Launch | None:
  return (
    mpi.launch(env)
    or slurm.launch(env, expand, at_terminal())
    or pods.tpu(env)
    or pods.kubernetes(env, fqdn)
  )


def _explicit(env: Env, expand: slurm.Expand) -> Launch:
  count, index = env[COUNT], env[INDEX]
  if not (_is_number(count) and _is_number(index) and int(index) < int(count)):
    raise ConfigError(f"{INDEX}={index}, {COUNT}={count}: give 0 … n-1 of n")
  host, port = _address(env)
  found = Launch(
    "explicit", int(index), int(count), host, port=port,
    job=_named(env, f"jaxscale-{host}:{port}"),
  )  # fmt: skip
  if found.num_processes == 1:
    return found._replace(host=None, local_id=0, local_size=1)
  # Ranks may be a launcher's, written out by hand: it knows who shares this node.
  try:
    same = mpi.launch(env) or slurm.launch(env, expand)
  except ConfigError:
    return found
  if same and same[1:3] == found[1:3]:
    found = found._replace(
      local_id=same.local_id, local_size=same.local_size, nodes=same.nodes,
      restarts=same.restarts,
    )  # fmt: skip
  return found


def _settled(env: Env, found: Launch) -> Launch:
  """What the launcher said, with what the user adds, unless they disagree."""
  if (said := number(env, COUNT)) is not None and said != found.num_processes:
    raise ConfigError(
      f"{COUNT}={said}: {found.kind} says {found.num_processes}; unset it, or set "
      f"{COORDINATOR} and {INDEX} too"
    )
  if (said := number(env, INDEX)) is not None and said != found.process_id:
    raise ConfigError(
      f"{INDEX}={said}: {found.kind} says {found.process_id}; unset it, or set "
      f"{COORDINATOR} and {COUNT} too"
    )
  if found.num_processes == 0:  # Kubernetes only
    raise ConfigError(
      f"{COUNT}: not set; set it to the Job's number of completions (Kubernetes has "
      "no variable for it)"
    )
  if found.process_id >= found.num_processes:
    raise ConfigError(
      f"{COUNT}={found.num_processes}: this is pod {found.process_id} of the Job; "
      "set it to the Job's number of completions"
    )
  if found.num_processes == 1:
    return found._replace(host=None)
  if env.get(COORDINATOR):
    host, port = _address(env)
    return found._replace(host=host, port=port, note="")
  if found.kind == "kubernetes" and found.host is None:
    raise ConfigError(
      f"{COORDINATOR}: not set, and this pod has no subdomain: name a headless "
      "service as the Job's subdomain, or set it to host:port of pod 0"
    )
  return found


def _address(env: Env) -> tuple[str, int]:
  """Host and port of the variable, an IPv6 address in brackets."""
  text = env[COORDINATOR]
  match = re.fullmatch(r"(\[[0-9A-Fa-f:.%\w]+\]|[^\s:\[\]]+):(\d{1,5})", text)
  if not match or not 0 < int(match[2]) < 65536:
    raise ConfigError(f"{COORDINATOR}={text}: give host:port")
  return match[1].strip("[]"), int(match[2])


def _named(env: Env, job: str) -> str:
  return env.get(JOB) or job


def _is_number(text: str) -> bool:
  return text.isascii() and text.isdigit()
