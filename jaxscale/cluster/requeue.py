"""Requeue of a Slurm job by `scontrol requeue`, and the limits on it.

A preempted job resumes as long as it makes progress. A job that always crashes at the
same step would be requeued forever. So, as in NVIDIA's resiliency extension, consecutive
starts without a newer checkpoint are counted.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxscale.cluster.detect.scontrol import run_scontrol
from jaxscale.errors import EXIT_GIVE_UP, EXIT_PREEMPTED
from jaxscale.files import read_json, whole_number, write_json

_SCONTROL_S = 30.0
# A controller that restarts is back within seconds. Slurm may kill this process earlier,
# KillWait after its SIGTERM.
_ASK_S, _PAUSE_S = 60.0, 5.0
# Signals that Slurm or a terminal sends to all processes of a job.
_TO_THE_JOB = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class Requeued(NamedTuple):
  """The outcome of a requeue: the exit code, and a line for the user."""

  code: int
  line: str


def job_name(env: Mapping[str, str] = os.environ) -> str | None:
  """Return the job ID for `scontrol requeue`; None outside of a job.

  The ID of an array task is JOB_TASK: the number of the array alone requeues all tasks.

  Example:
    >>> job_name({"SLURM_JOB_ID": "1207"})
    '1207'
    >>> array = {"SLURM_ARRAY_JOB_ID": "1200", "SLURM_ARRAY_TASK_ID": "7"}
    >>> job_name({"SLURM_JOB_ID": "1207", **array})
    '1200_7'
  """
  array, task = env.get("SLURM_ARRAY_JOB_ID"), env.get("SLURM_ARRAY_TASK_ID")
  return f"{array}_{task}" if array and task else env.get("SLURM_JOB_ID") or None


def restarts(env: Mapping[str, str] = os.environ) -> int:
  """Return how often this job was requeued (SLURM_RESTART_COUNT, sbatch(1))."""
  count = env.get("SLURM_RESTART_COUNT", "")
  return whole_number(count) or 0


def requeue(job: str, restarts: int, limit: int, remedy: str) -> Requeued:
  """Ask Slurm to requeue this job; only one process should, as its last action.

  Slurm then sends SIGTERM to the remaining processes of the job at once.

  Args:
    job: the job ID from `job_name`.
    restarts: the number of earlier requeues.
    limit: the largest number of requeues.
    remedy: how to resume without a requeue, the end of the line that reports it.
  """
  code = EXIT_PREEMPTED
  if restarts >= limit:
    code, why = EXIT_GIVE_UP, f"it was requeued {restarts} times (limit {limit})"
  elif state := ending_state(run_scontrol("show", "job", job) or ""):
    why = f"it is already {state}"
  elif not (why := _requeue_or_wait(job, restarts)):
    return Requeued(code, f"job {job} is requeued, restart {restarts + 1}")
  return Requeued(code, f"job {job} is not requeued: {why}; {remedy}")


def _requeue_or_wait(job: str, restarts: int) -> str | None:
  """Call `_requeue`, and retry while Slurm's controller is down; None if it is requeued."""
  ends_s = time.monotonic() + _ASK_S
  while error := _requeue(job, restarts):
    if run_scontrol("ping") is not None or shutil.which("scontrol") is None:
      return error  # the controller answers, so the error is its refusal
    if time.monotonic() > ends_s:
      return f"Slurm's controller does not answer ({error})"
    line = f"job {job} is saved; Slurm's controller does not answer, retrying the requeue"
    print(line, flush=True)
    time.sleep(_PAUSE_S)
  return None


def _requeue(job: str, restarts: int) -> str | None:
  """Run `scontrol requeue`; return its error, or None if the job is requeued."""
  # Slurm answers a requeue with SIGTERM to all processes of the job, including this
  # scontrol, which waits for its answer. It inherits the signal mask of this thread
  # (sigprocmask(2)). A new session is for clusters that signal process groups
  # (slurm.conf(5), proctrack/pgid).
  mask = signal.pthread_sigmask(signal.SIG_BLOCK, _TO_THE_JOB)
  try:
    options: Any = {"capture_output": True, "text": True, "start_new_session": True}
    done = subprocess.run(["scontrol", "requeue", job], timeout=_SCONTROL_S, **options)
  except OSError as e:
    return f"scontrol: {e.strerror}"
  except subprocess.TimeoutExpired:
    return f"scontrol: no answer within {_SCONTROL_S:.0f} s"
  finally:
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
  code = done.returncode
  if code == 0 or done.stderr.strip():
    return " ".join(done.stderr.split()) if code else None
  # A signal ended scontrol before it could print a result.
  if was_requeued(run_scontrol("show", "job", job) or "", restarts):
    return None
  how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
  return f"scontrol: {how}; see `scontrol show job {job}`"


def was_requeued(shown: str, restarts: int) -> bool:
  """Return whether Slurm has requeued a job: it waits again, or has one more restart.

  Args:
    shown: the output of `scontrol show job`.
    restarts: the number of earlier requeues.

  Example:
    >>> was_requeued("JobId=7 JobState=COMPLETING Reason=None Restarts=1", 0)
    True
    >>> was_requeued("JobId=7 JobState=RUNNING Reason=None Restarts=1", 1)
    False
  """
  counts = re.findall(r"\bRestarts=(\d{1,9})\b", shown)
  waits = re.search(r"\bJobState=(PENDING|REQUEUE\w*)\b", shown)
  return waits is not None or any(int(count) > restarts for count in counts)


def ending_state(shown: str) -> str | None:
  """Return the state of a job that a user or Slurm is ending; None if it may resume.

  `scontrol requeue` would revive a cancelled job, which is COMPLETING or CANCELLED while
  its processes save. A job at its time limit is also COMPLETING, but has
  Reason=TimeLimit and may resume (measured with Slurm 22.05).

  Args:
    shown: the output of `scontrol show job`.

  Example:
    >>> ending_state("JobId=7 JobState=RUNNING Reason=None Dependency=(null)")
    >>> ending_state("JobId=7 JobState=COMPLETING Reason=TimeLimit")
    >>> ending_state("JobId=7 JobState=CANCELLED Reason=None")
    'cancelled'
  """
  states = re.findall(r"\bJobState=(\w+) Reason=(\w+)", shown)
  if any(state == "RUNNING" or problem == "TimeLimit" for state, problem in states):
    return None
  return states[0][0].lower() if states else None


def count_start(workdir: Path, job: str | None, restarts: int, step: int) -> int:
  """Record a start of the job; return the number of consecutive starts without progress.

  Only one process may call this, before training. A new job starts at 0, since a person
  has submitted it.

  Args:
    workdir: the workdir of the run, which holds `restarts.json`.
    job: the job ID from `job_name`.
    restarts: the number of earlier requeues.
    step: the step of the newest checkpoint; 0 if there is none.

  Example:
    >>> import tempfile
    >>> workdir = Path(tempfile.mkdtemp())
    >>> [count_start(workdir, "7", n, step) for n, step in enumerate([0, 40, 40, 40])]
    [0, 0, 1, 2]
  """
  path = workdir / "restarts.json"
  idle, newest = 0, step
  # The first start finds no file, and a damaged one is ignored.
  shape = dict.fromkeys(("step", "idle", "restarts"), int) | {"job": (str, None)}
  before = read_json(path, shape)
  if before and before["job"] == job and before["restarts"] < restarts:
    # The step decreases if the newest checkpoint was damaged, which is no progress.
    last = before["step"]
    newest, idle = max(step, last), before["idle"] + 1 if step <= last else 0
  write_json(path, {"job": job, "restarts": restarts, "idle": idle, "step": newest})
  return idle


def loop_error(idle: int, step: int, limit: int) -> str | None:
  """Return the error of a job that must not restart (exit code 93); None if it may.

  Args:
    idle: the result of `count_start`.
    step: the step of the newest checkpoint.
    limit: the number of consecutive restarts without progress that ends the job.
  """
  if idle < limit:
    return None
  what = f"{idle} restart{'s' if idle > 1 else ''} without progress, still at step {step}"
  fix = "see the first error of each attempt, then submit the job again"
  return f"{what}: not requeued again; {fix}"
