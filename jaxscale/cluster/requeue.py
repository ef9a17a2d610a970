"""Resuming later in the same job: `scontrol requeue`, and when not to.

A job that is preempted is resumed as often as it makes progress. One that crashes
at the same place every time would be requeued for ever; as NVIDIA's resiliency
extension does, we count starts in a row that found no newer checkpoint.
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
# A controller that restarts is back within seconds. Slurm may kill this process sooner,
# KillWait after its SIGTERM.
_ASK_S, _PAUSE_S = 60.0, 5.0
# What a job is signalled with as a whole, by Slurm or from a terminal.
_TO_THE_JOB = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class Requeued(NamedTuple):
  """The outcome of a requeue: the exit code, and a line for the user."""

  code: int
  line: str


def job_name(env: Mapping[str, str] = os.environ) -> str | None:
  """The job as `scontrol requeue` takes it; None outside of one.

  An array's task is JOB_TASK: the number of the array alone requeues all tasks.

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
  """How often this job was requeued before (SLURM_RESTART_COUNT, sbatch(1))."""
  count = env.get("SLURM_RESTART_COUNT", "")
  return whole_number(count) or 0


def requeue(job: str | None, restarts: int, limit: int) -> Requeued:
  """Ask Slurm to run this job again; only one process should, at its very end.

  Slurm ends what is left of the job at once, with SIGTERM.

  Args:
    job: as `job_name` gives it; None: there is no Slurm job.
    restarts: how often it was requeued before.
    limit: more are not asked for.
  """
  code = EXIT_PREEMPTED
  if job is None:
    line = "saved; start it again to resume"
  elif restarts >= limit:
    code = EXIT_GIVE_UP
    line = f"job {job} was requeued {restarts} times, and not again (limit {limit})"
  elif state := ending_state(run_scontrol("show", "job", job) or ""):
    line = f"job {job} is {state} already: not requeued by this run"
  elif error := _requeue_or_wait(job, restarts):
    line = f"job {job} is saved, not requeued: {error}"
  else:
    line = f"job {job} is requeued, restart {restarts + 1}"
  return Requeued(code, line)


def _requeue_or_wait(job: str, restarts: int) -> str | None:
  """`_requeue`, asked again while Slurm's controller is down; None: it is requeued."""
  ends_s = time.monotonic() + _ASK_S
  while error := _requeue(job, restarts):
    if run_scontrol("ping") is not None or shutil.which("scontrol") is None:
      return error  # it answers: that is its refusal
    if time.monotonic() > ends_s:
      return f"Slurm's controller does not answer ({error}); submit it again to resume"
    line = f"job {job} is saved; Slurm's controller does not answer, it is asked again"
    print(line, flush=True)
    time.sleep(_PAUSE_S)
  return None


def _requeue(job: str, restarts: int) -> str | None:
  """The error of `scontrol requeue`; None: the job is requeued."""
  # Slurm's answer to a requeue is SIGTERM to all of the job, so also to the scontrol
  # that waits for its answer. A new process has the mask of the thread that starts it
  # (sigprocmask(2)); a session of its own is for clusters that signal process groups
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
  # It was ended before it could print a result.
  if was_requeued(run_scontrol("show", "job", job) or "", restarts):
    return None
  how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
  return f"scontrol: {how}; see `scontrol show job {job}`"


def was_requeued(shown: str, restarts: int) -> bool:
  """Whether Slurm has taken a requeue: it waits again, or counts one more start.

  Args:
    shown: what `scontrol show job` prints.
    restarts: how often it was requeued before.

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
  """The state of a job that somebody, or Slurm, is ending; None: it may resume.

  `scontrol requeue` would revive what was cancelled: that is COMPLETING, or CANCELLED,
  while its processes save; so is what has reached its time limit, but says so, and is
  to resume (measured with Slurm 22.05).

  Args:
    shown: what `scontrol show job` prints.

  Example:
    >>> ending_state("JobId=7 JobState=RUNNING Reason=None Dependency=(null)")
    >>> ending_state("JobId=7 JobState=COMPLETING Reason=TimeLimit")
    >>> ending_state("JobId=7 JobState=CANCELLED Reason=None")
    'cancelled'
  """
  states = re.findall(r"\bJobState=(\w+) Reason=(\w+)", shown)
  if any(state == "RUNNING" or why == "TimeLimit" for state, why in states):
    return None
  return states[0][0].lower() if states else None


def count_start(workdir: Path, job: str | None, restarts: int, step: int) -> int:
  """Record that the job starts at this step; how many restarts in a row found no more.

  Only one process may call it, before training. Another job starts at 0: somebody
  has looked at it.

  Args:
    workdir: of the run; `restarts.json` is kept there.
    job: as `job_name` gives it.
    restarts: how often it was requeued before.
    step: of the newest checkpoint; 0: there is none.

  Example:
    >>> import tempfile
    >>> workdir = Path(tempfile.mkdtemp())
    >>> [count_start(workdir, "7", n, step) for n, step in enumerate([0, 40, 40, 40])]
    [0, 0, 1, 2]
  """
  path = workdir / "restarts.json"
  idle, newest = 0, step
  # No file before the first start; a damaged one counts as none.
  shape = dict.fromkeys(("step", "idle", "restarts"), int) | {"job": (str, None)}
  before = read_json(path, shape)
  if before and before["job"] == job and before["restarts"] < restarts:
    # A checkpoint that turns out to be damaged makes a step smaller: no progress.
    last = before["step"]
    newest, idle = max(step, last), before["idle"] + 1 if step <= last else 0
  write_json(path, {"job": job, "restarts": restarts, "idle": idle, "step": newest})
  return idle


def loop_error(idle: int, step: int, limit: int) -> str | None:
  """Why this job must not be restarted, for exit code 93; None: it may.

  Args:
    idle: what `count_start` returns.
    step: of the newest checkpoint.
    limit: so many restarts in a row without progress are the last.
  """
  if idle < limit:
    return None
  what = f"{idle} restart{'s' if idle > 1 else ''} without progress, still at step {step}"
  fix = "see the first error of each try, then submit it again"
  return f"{what}: not requeued again; {fix}"
