"""Slurm: the launch, the job, its times and its requeue, by variables and `scontrol`.

The variables are those of srun(1) and sbatch(1), "OUTPUT ENVIRONMENT VARIABLES". Their
values in each case were recorded on a real Slurm (tests/data/cluster). Three cases need
care. A script submitted from inside a step inherits that step's variables. The interactive
step of salloc has the job's SLURM_NTASKS but one task. With `--distribution=arbitrary` rank
0 may not run on the first node of the list.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from jaxscale.cluster.launch import LOOPBACK, Env, Job, Launch, number
from jaxscale.cluster.schedulers.nodelist import MOST_HOSTS, expand, quoted
from jaxscale.errors import ConfigError
from jaxscale.files import output_of, readable_text, whole_number

PREFIX: str = "SLURM_"
CANCEL: str = "scancel"
# Variables of --ntasks-per-gpu: srun(1), and the one that Slurm 22.05 sets.
GPU_SHARING: tuple[str, ...] = ("SLURM_NTASKS_PER_GPU", "SLURM_NTASKS_PER_TRES")

_INTERACTIVE = "4294967290"  # SLURM_INTERACTIVE_STEP, 0xfffffffa, of slurm.h
_PTY = "started by srun --pty: set JAXSCALE_NUM_PROCESSES=1 in an interactive shell, where no "
_PTY += "other rank will start"
_REQUEUE_S = 30.0
# A controller that restarts is back within seconds. Slurm may kill this process earlier,
# KillWait after its SIGTERM.
_ASK_S, _PAUSE_S = 60.0, 5.0
# Signals that Slurm or a terminal sends to all processes of a job.
_TO_THE_JOB = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
_COUNT = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?", re.ASCII)


def job(env: Env) -> Job | None:
  """Return the job of this process; None outside of a job.

  The ID of an array task is JOB_TASK: the number of the array alone requeues all tasks.

  Example:
    >>> job({"SLURM_JOB_ID": "1207", "SLURM_RESTART_COUNT": "2"})
    Job(scheduler='slurm', id='1207', restarts=2, step='')
    >>> job({"SLURM_JOB_ID": "1207", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "7"}).id
    '12_7'
  """
  array, task = env.get("SLURM_ARRAY_JOB_ID"), env.get("SLURM_ARRAY_TASK_ID")
  own = env.get("SLURM_JOB_ID") or env.get("SLURM_JOBID")
  if not (name := f"{array}_{task}" if array and task else own):
    return None
  return Job("slurm", name, number(env, "SLURM_RESTART_COUNT") or 0, env.get("SLURM_STEP_ID", ""))


def detect(env: Env) -> Launch | None:
  """Identify this process in a Slurm job; None outside of a job.

  Raises:
    ConfigError: this is the batch script of a job with several tasks, which srun must
      start, or the variables contradict each other.
  """
  if not (job_id := env.get("SLURM_JOB_ID") or env.get("SLURM_JOBID")):
    return None
  restarts = number(env, "SLURM_RESTART_COUNT") or 0
  again = f"-r{restarts}" if restarts else ""
  if _is_task_of_step(env):
    step = env.get("SLURM_STEP_ID") or env.get("SLURM_STEPID") or "0"
    launch = _task(env, f"slurm-{job_id}.{step}{again}", restarts)
    if launch.num_processes > 1 and "SLURM_PTY_PORT" in env and os.isatty(0):
      return launch._replace(note=_PTY)
    return launch
  tasks = _tasks_of_job(env)
  alone = Launch("slurm", 0, 1, None, 0, 1, f"slurm-{job_id}{again}", restarts)
  if tasks == 1:
    return alone
  if "SLURM_PROCID" in env and env.get("SLURM_STEP_ID") != _INTERACTIVE:
    names = ("SLURM_NTASKS", "SLURM_TASKS_PER_NODE", "SLURM_PROCID")
    named = next(name for name in names if name in env)
    problem = f"this is the batch script, not a step of job {job_id}"
    fix = "start it with srun (or set JAXSCALE_NUM_PROCESSES=1 to run one process)"
    raise ConfigError(f"{named}={env[named]}: {problem}; {fix}")
  wanted = f"; srun would start {tasks}" if tasks else ""
  note = f"runs as one process: this shell in Slurm job {job_id} is not a step{wanted}"
  return alone._replace(note=note)


def hosts(env: Env) -> list[str] | None:
  """Return the hosts of the job."""
  nodes = env.get("SLURM_JOB_NODELIST")
  return hostnames(nodes) if nodes else None


def hostnames(text: str) -> list[str]:
  """Return the host names of a node list by `scontrol`, or else by `nodelist.expand`.

  Raises:
    ConfigError: the list is empty or malformed.

  Example:
    >>> hostnames("n7,n9")
    ['n7', 'n9']
  """
  if "[" in text:
    # The timeout is for scontrol without a configuration file, which searches the network.
    names = (_scontrol("show", "hostnames", text, timeout_s=2.0) or "").split()
    # Slurm 22.05 returns the host "n]" for "n[1-2".
    if names and not any("[" in n or "]" in n for n in names):
      return names
  return expand(text)


def node_name(env: Env) -> str | None:
  """Return Slurm's name of this host."""
  return env.get("SLURMD_NODENAME")


def node_address(env: Env, node: str) -> str | None:
  """Return the address that Slurm uses for a node (NodeAddr, scontrol(1)), or None.

  This is for clusters whose node names do not resolve.
  """
  if "SLURM_JOB_ID" not in env:
    return None
  shown = _scontrol("--oneliner", "show", "node", node, timeout_s=5.0)
  match = re.search(r"\bNodeAddr=(\S+)", shown or "")
  return match[1] if match else None


def has_own_gpus(env: Env, num_visible: int) -> bool | None:
  """Return whether the visible GPUs were selected for this process only; None if unknown."""
  # The variable may also have the form "a100:2".
  per_task = re.search(r"\b(\d{1,9})$", env.get("SLURM_GPUS_PER_TASK", ""))
  is_shared = num_visible == 1 and any(map(env.get, GPU_SHARING))
  if is_shared or (per_task and num_visible <= int(per_task[1])):
    return True
  node = number(env, "SLURM_GPUS_ON_NODE")
  return None if node is None else num_visible < node


def end_time(env: Env, is_near: bool = False) -> float | None:
  """Return the end of the job in seconds since 1970; None if unlimited or unknown.

  SLURM_JOB_END_TIME has the end as of the job's start (sbatch(1), "output environment
  variables"; Slurm 22.05 does not set it yet). Without it, and near the end, `scontrol` is
  called, which knows of later changes. Only one process of a large run should do that.
  """
  at_start = None if is_near else whole_number(env.get("SLURM_JOB_END_TIME", ""))
  if at_start is not None:
    return float(at_start)
  return parse_time(_shown(env.get("SLURM_JOB_ID")), "EndTime")


def queue_times(env: Env) -> tuple[float, float] | None:
  """Return the last times at which the job was queued and at which it started.

  A requeue sets a new SubmitTime (scontrol(1)). The result is None in all steps but the
  first one of a job, since the job has then done other work before.
  """
  if env.get("SLURM_STEP_ID") != "0":
    return None
  shown = _shown(env.get("SLURM_JOB_ID"))
  queued, started = (parse_time(shown, name) for name in ("SubmitTime", "StartTime"))
  return None if queued is None or started is None else (queued, started)


def ending_state(job: Job) -> str | None:
  """Return the state of a job that a user or Slurm is ending; None if it may resume.

  `scontrol requeue` would revive a cancelled job, which is COMPLETING or CANCELLED while
  its processes save. A job at its time limit is also COMPLETING, but has
  Reason=TimeLimit and may resume (measured with Slurm 22.05).
  """
  states = re.findall(r"\bJobState=(\w+) Reason=(\w+)", _shown(job.id))
  if any(state == "RUNNING" or problem == "TimeLimit" for state, problem in states):
    return None
  return states[0][0].lower() if states else None


def requeue(job: Job) -> str | None:
  """Run `scontrol requeue`, and retry while Slurm's controller is down.

  Slurm then sends SIGTERM to the remaining processes of the job at once.

  Returns:
    The error; None if the job is requeued.
  """
  ends_s = time.monotonic() + _ASK_S
  while error := _requeue(job):
    if _scontrol("ping") is not None or shutil.which("scontrol") is None:
      return error  # the controller answers, so the error is its refusal
    if time.monotonic() > ends_s:
      return f"Slurm's controller does not answer ({error})"
    line = f"job {job.id} is saved; Slurm's controller does not answer, retrying the requeue"
    print(line, flush=True)
    time.sleep(_PAUSE_S)
  return None


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
    raise ConfigError(f"tasks per node {quoted(text)} are invalid; write them as in '2(x3),1'")
  return [tasks for tasks, nodes in counts for _ in range(nodes)]


def parse_time(shown: str, name: str) -> float | None:
  """Parse a time in the output of `scontrol show job`, in the local time zone.

  Example:
    >>> parse_time("StartTime=Unknown EndTime=Unknown Deadline=N/A", "EndTime")
    >>> shown = "   StartTime=… EndTime=2026-03-01T12:00:00 Deadline=N/A"
    >>> time.strftime("%H:%M", time.localtime(parse_time(shown, "EndTime")))
    '12:00'
  """
  match = re.search(rf"\b{name}=(\d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\d)", shown)
  with contextlib.suppress(ValueError, OverflowError):  # the date does not exist
    return time.mktime(time.strptime(match[1], "%Y-%m-%dT%H:%M:%S")) if match else None
  return None


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


def _task(env: Env, job: str, restarts: int) -> Launch:
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
  nodes = tuple(hostnames(env["SLURM_STEP_NODELIST"]))
  first = None
  if count > 1:
    first = LOOPBACK if len(nodes) == 1 else _host_of_rank_0(env, nodes)
  own = rank, count, first, local, local_size, job, restarts
  return Launch("slurm", *own, nodes=nodes)


def _host_of_rank_0(env: Env, nodes: tuple[str, ...]) -> str:
  if not env.get("SLURM_DISTRIBUTION", "").startswith("arbitrary"):
    return nodes[0]  # block, cyclic and plane put rank 0 on the first node (srun(1))
  path = env.get("SLURM_HOSTFILE") or "not set"
  if names := readable_text(Path(path)).split():
    return hostnames(names[0])[0]
  problem = f"SLURM_HOSTFILE={path} does not have the host of rank 0"
  raise ConfigError(f"SLURM_DISTRIBUTION=arbitrary: {problem}; set JAXSCALE_COORDINATOR=host:port")


def _requeue(job: Job) -> str | None:
  """Run `scontrol requeue`; return its error, or None if the job is requeued."""
  # Slurm answers a requeue with SIGTERM to all processes of the job, including this
  # scontrol, which waits for its answer. It inherits the signal mask of this thread
  # (sigprocmask(2)). A new session is for clusters that signal process groups
  # (slurm.conf(5), proctrack/pgid).
  mask = signal.pthread_sigmask(signal.SIG_BLOCK, _TO_THE_JOB)
  try:
    options: Any = {"capture_output": True, "text": True, "start_new_session": True}
    done = subprocess.run(["scontrol", "requeue", job.id], timeout=_REQUEUE_S, **options)
  except OSError as e:
    return f"scontrol: {e.strerror}"
  except subprocess.TimeoutExpired:
    return f"scontrol: no answer within {_REQUEUE_S:.0f} s"
  finally:
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
  code = done.returncode
  if code == 0 or done.stderr.strip():
    return " ".join(done.stderr.split()) if code else None
  # A signal ended scontrol before it could print a result.
  if _was_requeued(job):
    return None
  how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
  return f"scontrol: {how}; see `scontrol show job {job.id}`"


def _was_requeued(job: Job) -> bool:
  """Return whether Slurm has requeued the job: it waits again, or has one more restart."""
  shown = _shown(job.id)
  counts = re.findall(r"\bRestarts=(\d{1,9})\b", shown)
  waits = re.search(r"\bJobState=(PENDING|REQUEUE\w*)\b", shown)
  return waits is not None or any(int(count) > job.restarts for count in counts)


def _shown(job: str | None) -> str:
  """Return the output of `scontrol show job`, or ""."""
  return (_scontrol("show", "job", job) or "") if job else ""


def _scontrol(*args: str, timeout_s: float = 10.0) -> str | None:
  """Run `scontrol` and return its output; None if it is missing or fails.

  Without the timeout it would wait minutes for a controller that is down (MessageTimeout).
  """
  # Overrides the user's time format, which the callers could not parse (scontrol(1)).
  return output_of("scontrol", *args, timeout_s=timeout_s, SLURM_TIME_FORMAT="standard")
