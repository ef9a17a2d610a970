"""Launch detection in a Slurm job, by the variables of srun, sbatch and salloc.

The variables are those of srun(1), "OUTPUT ENVIRONMENT VARIABLES". Their values in each
case were recorded on a real Slurm (tests/data/cluster). Three cases need care. A script
submitted from inside a step inherits that step's variables. The interactive step of salloc
has the job's SLURM_NTASKS but one task. With `--distribution=arbitrary` rank 0 may not run
on the first node of the list.
"""

from __future__ import annotations

import re
from pathlib import Path

from jaxscale.cluster.detect.launch import LOOPBACK, Env, Host, Launch, number
from jaxscale.cluster.detect.nodelist import MOST_HOSTS
from jaxscale.cluster.detect.scontrol import run_scontrol
from jaxscale.errors import ConfigError
from jaxscale.files import readable_text

_INTERACTIVE = "4294967290"  # SLURM_INTERACTIVE_STEP, 0xfffffffa, of slurm.h
_PTY = "started by srun --pty: set JAXSCALE_NUM_PROCESSES=1 in an interactive shell, where no "
_PTY += "other rank will start"
_COUNT = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?", re.ASCII)


def tasks_per_node(text: str) -> list[int]:
  """Parse Slurm's short form of the number of tasks on each node.

  Raises:
    ConfigError: the text does not have this form.

  Example:
    >>> tasks_per_node("2(x3),1")
    [2, 2, 2, 1]
  """
  matches = [_COUNT.fullmatch(piece.strip()) for piece in text.split(",")]
  counts = [(int(m[1]), int(m[2] or 1)) for m in matches if m]
  if None in matches or sum(nodes for _, nodes in counts) > MOST_HOSTS:
    shown = text if len(text) <= 60 else text[:57] + "…"
    raise ConfigError(f"tasks per node {shown!r}: not in Slurm's form, '2(x3),1'")
  return [tasks for tasks, nodes in counts for _ in range(nodes)]


def detect(host: Host) -> Launch | None:
  """Identify this process in a Slurm job; None outside of a job.

  Raises:
    ConfigError: this is the batch script of a job with several tasks, which srun must
      start, or the variables contradict each other.
  """
  env = host.env
  if not (job := env.get("SLURM_JOB_ID") or env.get("SLURM_JOBID")):
    return None
  restarts = number(env, "SLURM_RESTART_COUNT") or 0
  again = f"-r{restarts}" if restarts else ""
  if _is_task_of_step(env):
    step = env.get("SLURM_STEP_ID") or env.get("SLURM_STEPID") or "0"
    launch = _task(host, f"slurm-{job}.{step}{again}", restarts)
    if launch.num_processes > 1 and "SLURM_PTY_PORT" in env and host.at_terminal():
      return launch._replace(note=_PTY)
    return launch
  tasks = _tasks_of_job(env)
  alone = Launch("slurm", 0, 1, None, 0, 1, f"slurm-{job}{again}", restarts)
  if tasks == 1:
    return alone
  if "SLURM_PROCID" in env and env.get("SLURM_STEP_ID") != _INTERACTIVE:
    names = ("SLURM_NTASKS", "SLURM_TASKS_PER_NODE", "SLURM_PROCID")
    named = next(name for name in names if name in env)
    problem = f"this is the batch script, not a step of job {job}"
    fix = "start it with srun (or set JAXSCALE_NUM_PROCESSES=1 to run one process)"
    raise ConfigError(f"{named}={env[named]}: {problem}; {fix}")
  wanted = f"; srun would start {tasks}" if tasks else ""
  note = f"runs as one process: this shell in Slurm job {job} is not a step{wanted}"
  return alone._replace(note=note)


def node_address(node: str) -> str | None:
  """Return the address that Slurm uses for a node (NodeAddr, scontrol(1)), or None.

  This is for clusters whose node names do not resolve.
  """
  shown = run_scontrol("--oneliner", "show", "node", node, timeout_s=5.0)
  match = re.search(r"\bNodeAddr=(\S+)", shown or "")
  return match[1] if match else None


def _is_task_of_step(env: Env) -> bool:
  """Return whether srun has started this process, or a shell around it."""
  if not (env.get("SLURM_STEP_NODELIST") and env.get("SLURM_PROCID")):
    return False
  # A script submitted from inside a step inherits SLURM_STEP_* of that step, but has its
  # own SLURM_TASKS_PER_NODE. The two also differ in salloc's interactive step, while srun
  # sets them to the same value.
  mine, steps = env.get("SLURM_TASKS_PER_NODE"), env.get("SLURM_STEP_TASKS_PER_NODE")
  if mine and steps:
    return tasks_per_node(mine) == tasks_per_node(steps)
  return _tasks_of_step(env) is not None


def _tasks_of_step(env: Env) -> int | None:
  # SLURM_NTASKS may be that of the job, as under the daemons of MPICH's mpirun.
  names = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
  return next((n for name in names if (n := number(env, name)) is not None), None)


def _tasks_of_job(env: Env) -> int:
  """Return the number of tasks that a step of this job would have; 0 if unknown."""
  if (count := number(env, "SLURM_NTASKS")) is not None:
    return count
  if text := env.get("SLURM_TASKS_PER_NODE"):
    return sum(tasks_per_node(text))
  return number(env, "SLURM_JOB_NUM_NODES") or 0


def _task(host: Host, job: str, restarts: int) -> Launch:
  env = host.env
  rank, count = number(env, "SLURM_PROCID"), _tasks_of_step(env)
  per_node = tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE") or "0")
  count = count or sum(per_node)
  if rank is None or rank >= count:
    problem = "not a rank of this step; start it with srun, or unset the SLURM_ variables"
    raise ConfigError(f"SLURM_PROCID={rank} of SLURM_STEP_NUM_TASKS={count}: {problem}")
  node, local = number(env, "SLURM_NODEID"), number(env, "SLURM_LOCALID")
  local_size = 1 if count == 1 else number(env, "SLURM_NTASKS_PER_NODE")
  if node is not None and node < len(per_node) and per_node[node]:
    local_size = per_node[node]
  nodes = tuple(host.expand(env["SLURM_STEP_NODELIST"]))
  first = None
  if count > 1:
    first = LOOPBACK if len(nodes) == 1 else _host_of_rank_0(host, nodes)
  own = rank, count, first, local, local_size, job, restarts
  return Launch("slurm", *own, nodes=nodes)


def _host_of_rank_0(host: Host, nodes: tuple[str, ...]) -> str:
  env = host.env
  if not env.get("SLURM_DISTRIBUTION", "").startswith("arbitrary"):
    return nodes[0]  # block, cyclic and plane put rank 0 on the first node (srun(1))
  path = env.get("SLURM_HOSTFILE") or "not set"
  if names := readable_text(Path(path)).split():
    return host.expand(names[0])[0]
  problem = f"SLURM_HOSTFILE={path} does not have the host of rank 0"
  raise ConfigError(f"SLURM_DISTRIBUTION=arbitrary: {problem}; set JAXSCALE_COORDINATOR=host:port")
