"""Launch detection: the rank of a process, the number of processes, and process 0's host.

`detect` reads environment variables only: JAXSCALE_*, or those of the launcher that
started this process. It uses neither the network nor JAX, whose own detection is wrong in
several of these cases (tests/unit/test_detect_jax.py).

A new launcher is a module in this package with one function, and an entry in `LAUNCHERS`,
whose order matters. With variables X_… of a launcher "x":

    def detect(env: Env) -> Launch | None:
      rank, size = (number(env, name) for name in ("X_RANK", "X_SIZE"))
      if rank is None or size is None:
        return None  # a different launcher started this process
      nodes = tuple(env["X_HOSTS"].split())
      job = f"x-{env['X_JOB']}"
      return Launch("x", rank, size, host=nodes[0], job=job, nodes=nodes)

If a launch on several nodes has no `host`, it is found by MPI or from the host list of
Slurm or PBS (`mpi.with_host_of_rank_0`). LSF's jsrun sets JSM_NAMESPACE_RANK and, for
Spectrum MPI, Open MPI's variables, so a module for jsrun must come before mpi.
"""

from __future__ import annotations

import os
import re

from jaxscale.cluster import schedulers
from jaxscale.cluster.detect import batch, mpi, pods, torchrun
from jaxscale.cluster.detect.local_devices import local_device_ids, visible_gpus
from jaxscale.cluster.launch import LOOPBACK, Env, Launch, number
from jaxscale.errors import ConfigError

__all__ = ["LAUNCHERS", "Launch", "detect", "local_device_ids", "visible_gpus"]

# The variables of several launchers can be set at once, so the order matters. The agent
# of torchrun may run under srun or mpirun. Inside a Slurm job mpirun starts its daemons
# by srun, so Slurm's variables describe the daemons. A TPU pod is also a Kubernetes pod.
# A script, or Kubeflow in pods, may set torchrun's variables without torchrun. The last
# entry is a scheduler's script without a launcher.
LAUNCHERS = torchrun.detect_agent, mpi.detect, batch.detect_flux, schedulers.detect
LAUNCHERS += pods.detect_tpu, torchrun.detect, pods.detect_kubernetes, batch.detect_script
COORDINATOR = "JAXSCALE_COORDINATOR"  # host:port of process 0, or LOCAL
LOCAL = "local"  # all processes are on this machine (cluster/local_launch.py)
COUNT = "JAXSCALE_NUM_PROCESSES"
INDEX = "JAXSCALE_PROCESS_ID"
JOB = "JAXSCALE_JOB"  # name of the run, if the launcher sets none


def detect(env: Env = os.environ) -> Launch:
  """Identify this process among those of its run.

  JAXSCALE_COORDINATOR, JAXSCALE_NUM_PROCESSES and JAXSCALE_PROCESS_ID together override
  any launcher; the coordinator `local` stands for this machine, with a port that follows
  from the run's secret. JAXSCALE_NUM_PROCESSES=1 alone starts a run of one process.
  JAXSCALE_COORDINATOR alone only sets the host and port of process 0.

  Args:
    env: the environment variables.

  Raises:
    ConfigError: the variables are incomplete or contradict each other, or the processes
      must be started by a launcher.

  Example:
    >>> env = {"JAXSCALE_COORDINATOR": "n1:7000", "JAXSCALE_PROCESS_ID": "1"}
    >>> launch = detect({**env, "JAXSCALE_NUM_PROCESSES": "2"})
    >>> launch.kind, launch.process_id, launch.num_processes, launch.host
    ('explicit', 1, 2, 'n1')
  """
  values = {name: env.get(name) for name in (COORDINATOR, COUNT, INDEX)}
  if all(values.values()):
    launch = _explicit(env)
  elif values == {COORDINATOR: None, COUNT: "1", INDEX: None}:
    launch = Launch("single", local_id=0, local_size=1)
  elif launch := next(filter(None, (launcher(env) for launcher in LAUNCHERS)), None):
    launch = _checked(env, launch)
    if launch.num_processes > 1 and launch.host is None:
      launch = mpi.with_host_of_rank_0(env, launch)
  elif any(values.values()):
    missing = ", ".join(name for name, value in values.items() if not value)
    fix = f"set all of {COORDINATOR}, {COUNT} and {INDEX}, or none"
    raise ConfigError(f"{missing}: not set, but the others are; {fix}")
  elif pods.on_cloud_tpu(env):
    launch = Launch("tpu", 0, 0, job="tpu")
  else:
    launch = Launch("single", local_id=0, local_size=1)
  return launch._replace(job=env.get(JOB) or launch.job)


def _explicit(env: Env) -> Launch:
  count, index = env[COUNT], env[INDEX]
  are_numbers = re.fullmatch(r"\d{1,9} \d{1,9}", f"{index} {count}", re.ASCII)
  if not are_numbers or int(index) >= int(count):
    raise ConfigError(f"{INDEX}={index}, {COUNT}={count}: give an ID from 0 to n-1 for n processes")
  if env[COORDINATOR] == LOCAL:
    rank, size = int(index), int(count)
    return Launch(LOCAL, rank, size, LOOPBACK if size > 1 else None, rank, size, job=LOCAL)
  name, port = _address(env)
  job = f"jaxscale-{name}:{port}"
  launch = Launch("explicit", int(index), int(count), name, job=job, port=port)
  if launch.num_processes == 1:
    return launch._replace(host=None, local_id=0, local_size=1)
  # If the ranks equal those of a launcher, the launcher knows which processes share a node.
  try:
    same = mpi.detect(env) or schedulers.detect(env)
  except ConfigError:
    return launch
  if same and same[1:3] == launch[1:3]:
    return same._replace(kind="explicit", host=name, job=job, port=port, note="")
  return launch


def _checked(env: Env, launch: Launch) -> Launch:
  """Combine the launcher's values with the user's, and refuse contradictions."""
  values = {COUNT: (launch.num_processes, INDEX), INDEX: (launch.process_id, COUNT)}
  for name, (value, other) in values.items():
    if (given := number(env, name)) is not None and given != value:
      fix = f"unset it, or set {COORDINATOR} and {other} too"
      raise ConfigError(f"{name}={given}: {launch.kind} has set {value}; {fix}")
  if (index := launch.process_id) >= (count := launch.num_processes):  # Kubernetes only
    problem = f"={count}: this is pod {index} of the Job" if count else ": not set"
    hint = "" if count else " (Kubernetes has no variable for it)"
    raise ConfigError(f"{COUNT}{problem}; set it to the Job's number of completions{hint}")
  if count == 1:
    return launch._replace(host=None)
  if env.get(COORDINATOR):
    host, port = _address(env)
    return launch._replace(host=host, port=port, note="")
  if launch.kind == "kubernetes" and launch.host is None:
    fix = "set the Job's subdomain to a headless service, or the variable to host:port of pod 0"
    raise ConfigError(f"{COORDINATOR}: not set, and this pod has no subdomain; {fix}")
  return launch


def _address(env: Env) -> tuple[str, int]:
  """Parse the host and port in the variable, with brackets around an IPv6 address."""
  text = env[COORDINATOR]
  match = re.fullmatch(r"(\[[0-9A-Fa-f:.%\w]+\]|[^\s:\[\]]+):(\d{1,5})", text)
  if not match or not 0 < int(match[2]) < 65536:
    raise ConfigError(f"{COORDINATOR}={text}: give host:port")
  return match[1].strip("[]"), int(match[2])
