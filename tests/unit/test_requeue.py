"""The end of a job, and its next start: what Slurm is asked, and what it answers."""

import queue
import signal
import threading
import time
import types

import pytest

from jaxscale.cluster import requeue, walltime
from jaxscale.cluster.launch import Job
from jaxscale.cluster.schedulers import SCHEDULERS, current_job, slurm
from jaxscale.cluster.watch.signals import StopRequest

JOB = Job("slurm", "12")


@pytest.fixture
def utc(monkeypatch):
  monkeypatch.setenv("TZ", "UTC")
  time.tzset()
  yield
  monkeypatch.undo()
  time.tzset()


def test_the_end_of_the_job(scontrol, utc):
  asked = scontrol("echo '   StartTime=2026-03-01T11:00:00 EndTime=2026-03-01T12:00:00'")
  assert slurm.end_time({"SLURM_JOB_END_TIME": "1772366400"}) == 1772366400.0
  assert not asked.exists()
  assert slurm.end_time({"SLURM_JOB_ID": "12"}) == 1772366400.0
  assert asked.read_text() == "show job 12\n"
  both = {"SLURM_JOB_ID": "12", "SLURM_JOB_END_TIME": "1"}
  assert slurm.end_time(both, is_near=True) == 1772366400.0
  assert slurm.end_time({}) is None  # no job
  scontrol("exit 1")
  assert slurm.end_time({"SLURM_JOB_ID": "12"}) is None
  assert slurm.parse_time("EndTime=Unknown", "EndTime") is None


def test_when_the_job_was_queued_and_started(scontrol, utc):
  asked = scontrol(
    "echo '   SubmitTime=2026-03-01T11:00:00 EligibleTime=2026-03-01T11:02:00'; "
    "echo '   StartTime=2026-03-01T12:00:00 EndTime=Unknown Deadline=N/A'"
  )
  step = {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0"}
  assert slurm.queue_times(step) == (1772362800.0, 1772366400.0)
  for unknown in ({}, {"SLURM_JOB_ID": "12"}, step | {"SLURM_STEP_ID": "1"}):
    assert slurm.queue_times(unknown) is None
  assert asked.read_text() == "show job 12\n"
  scontrol("echo SubmitTime=2026-03-01T11:00:00 StartTime=Unknown")
  assert slurm.queue_times(step) is None


@pytest.fixture
def before_end(monkeypatch):
  """Return a function that gives the seconds until a stop is asked for, and its reason.

  The clock moves only while the program waits.
  """
  now = [0.0]

  def wait(seconds):
    now[0] += seconds
    return False

  def run(keep_s, *, end, again):
    now[0], asked = 0.0, []
    walltime.before_end(
      lambda why: asked.append((now[0], why)), keep_s, lambda is_near: again if is_near else end
    )
    return asked

  def thread(target, **_):
    return types.SimpleNamespace(start=target)

  fake = types.SimpleNamespace(Event=lambda: types.SimpleNamespace(wait=wait), Thread=thread)
  monkeypatch.setattr(walltime, "time", types.SimpleNamespace(time=lambda: now[0]))
  monkeypatch.setattr(walltime, "threading", fake)
  return run


def test_a_stop_is_asked_for_before_the_end(before_end):
  assert before_end(60.0, end=600.0, again=None) == [(540.0, "walltime: 60 s are left")]
  # Of so short a job it is a quarter that is kept.
  assert before_end(60.0, end=100.0, again=None) == [(75.0, "walltime: 25 s are left")]
  # An end in the past, as after a late answer, leaves no time; it is not "-0 s".
  assert before_end(60.0, end=-0.25, again=None) == [(0.0, "walltime: 0 s are left")]


def test_a_job_that_was_made_longer_has_the_whole_time_to_save(before_end):
  """An extended job gets more than a short job's quarter."""
  assert before_end(60.0, end=40.0, again=400.0) == [(340.0, "walltime: 60 s are left")]


def test_an_end_that_was_moved_is_waited_for(before_end):
  assert before_end(10.0, end=50.0, again=80.0) == [(70.0, "walltime: 10 s are left")]
  assert before_end(10.0, end=None, again=None) == []  # no limit


def test_a_run_that_is_over_is_not_asked_to_stop():
  asked = []
  walltime.before_end(asked.append, 10.0, lambda is_near: time.time() + 100.0).set()
  for thread in threading.enumerate():
    if thread.name == "walltime":
      thread.join(300)
      assert not thread.is_alive()
  assert asked == []


def test_requeue_asks_slurm_for_the_job_or_the_arrays_task(scontrol):
  asked = scontrol("")
  array = {"SLURM_ARRAY_JOB_ID": "1200", "SLURM_ARRAY_TASK_ID": "7"}
  for env in ({"SLURM_JOB_ID": "12"}, {"SLURM_JOB_ID": "1207"} | array):
    env |= {"SLURM_RESTART_COUNT": "2"}
    code, line = requeue.requeue(current_job(env), limit=3, remedy="resume it")
    assert code == 85 and line.endswith("is requeued, restart 3")
  lines = ["show job 12", "requeue 12", "show job 1200_7", "requeue 1200_7"]
  assert asked.read_text().splitlines() == lines
  done = requeue.requeue(JOB._replace(restarts=3), limit=3, remedy="resume it")
  assert done == (93, "job 12 is not requeued: it was requeued 3 times (limit 3); resume it")
  assert asked.read_text().count("\n") == 4
  assert current_job({}) is None


@pytest.mark.parametrize(
  "state", [f"{s} Reason=None" for s in ("COMPLETING", "CANCELLED", "RUNNING")]
)
def test_what_somebody_cancelled_is_not_revived(scontrol, state):
  asked = scontrol(f'[ $1 = show ] && echo "   JobState={state} Dependency=(null)"; true')
  code, line = requeue.requeue(JOB, limit=3, remedy="resume it")
  assert code == 85
  if state.startswith("RUNNING"):
    assert line == "job 12 is requeued, restart 1"
  else:
    assert line.startswith("job 12 is not requeued: it is already ")
    assert asked.read_text() == "show job 12\n"


def test_a_controller_that_is_down_is_asked_again(scontrol, monkeypatch, capsys):
  monkeypatch.setattr(slurm, "_PAUSE_S", 0.0)
  down = "echo 'Unexpected message received for job 12' >&2; exit 1"
  count = 'grep -c requeue "$(dirname "$0")/../asked"'
  asked = scontrol(f'[ "$({count})" -gt 2 ] || {{ {down}; }}')
  assert requeue.requeue(JOB, limit=3, remedy="resume it") == (85, "job 12 is requeued, restart 1")
  assert asked.read_text().count("requeue 12") == 3
  reported = "job 12 is saved; Slurm's controller does not answer, retrying the requeue\n"
  assert capsys.readouterr().out == 2 * reported
  monkeypatch.setattr(slurm, "_ASK_S", 0.0)
  scontrol(down)
  line = "job 12 is not requeued: Slurm's controller does not answer (Unexpected "
  line += "message received for job 12); resume it"
  assert requeue.requeue(JOB, limit=3, remedy="resume it") == (85, line)


def test_a_requeue_that_slurm_refuses_says_why(scontrol, monkeypatch, tmp_path):
  scontrol("[ $1 = ping ] || { echo 'Requested operation is presently disabled' >&2; exit 1; }")
  line = "job 12 is not requeued: Requested operation is presently disabled; resume it"
  assert requeue.requeue(JOB, limit=3, remedy="resume it") == (85, line)
  monkeypatch.setenv("PATH", str(tmp_path / "empty"))
  assert "scontrol: No such file" in requeue.requeue(JOB, limit=3, remedy="resume it")[1]


@pytest.mark.parametrize("name", ["TERM", "INT", "USR1", "KILL"])
@pytest.mark.parametrize("after", ["COMPLETING Restarts=1", "RUNNING", ""])
def test_the_requeue_signals_also_who_asks_for_it(scontrol, name, after, tmp_path):
  """Slurm takes it, and ends all of the job before scontrol can say so."""
  sent = tmp_path / "sent"
  shows = f'echo "JobState={after}"' if after else "exit 1"
  scontrol(f"""
    [ $1 = ping ] && exit
    if [ $1 = show ]; then
      [ -e {sent} ] || {{ echo "JobState=RUNNING Reason=None Restarts=0"; exit; }}
      {shows}; exit
    fi
    touch {sent}; kill -{name} $$; exit 0""")
  done = requeue.requeue(JOB, limit=3, remedy="resume it")
  if name != "KILL" or "Restarts=1" in after:
    assert done == (85, "job 12 is requeued, restart 1")
  else:
    line = "scontrol: ended by SIGKILL; see `scontrol show job 12`; resume it"
    assert done == (85, f"job 12 is not requeued: {line}")
  assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()  # ours are as before


def test_a_scheduler_of_another_kind_is_one_entry(monkeypatch):
  end = time.time() + 0.2
  lsf = types.SimpleNamespace(
    job=lambda env: Job("lsf", env["LSB_JOBID"]) if "LSB_JOBID" in env else None,
    end_time=lambda env, is_near: end,
    ending_state=lambda job: None,
    requeue=lambda job: "no brequeue here",
  )
  monkeypatch.setitem(SCHEDULERS, "lsf", lsf)
  monkeypatch.delenv("SLURM_JOB_ID", raising=False)
  job = current_job({"LSB_JOBID": "9"})
  assert str(job) == "lsf-9-r0"
  line = "job 9 is not requeued: no brequeue here; resume it"
  assert requeue.requeue(job, limit=3, remedy="resume it") == (85, line)
  asked = queue.Queue()
  walltime.before_end(asked.put, 60.0)
  assert asked.get(timeout=200).startswith("walltime: ")


def test_a_loop_without_progress_is_given_up(tmp_path):
  def starts(job, first, steps):
    return [
      requeue.count_start(tmp_path, Job("slurm", job, first + n), step)
      for n, step in enumerate(steps)
    ]

  # Progress in between, however little, begins anew; losing a checkpoint is none.
  assert starts("7", 0, [0, 0, 10, 10, 11, 9, 11]) == [0, 1, 0, 1, 0, 1, 2]
  assert starts("7", 7, [11]) == [3]
  assert requeue.loop_error(2, 11, limit=3) is None
  refusal = requeue.loop_error(3, 11, limit=3)
  assert refusal and "3 restarts without progress, still at step 11" in refusal
  # Submitted again, by somebody who has looked; a note that is damaged counts none.
  assert starts("8", 0, [11, 11]) == [0, 1]
  (tmp_path / "restarts.json").write_text("{")
  assert starts("8", 2, [11, 11]) == [0, 1]


def test_exit_codes_tell_a_user_from_a_batch_system():
  # The kind decides, not the words: "Ctrl-C" may be part of a cause.
  assert StopRequest("SIGINT at process 3 on n4", "interrupt").exit_code == 130
  assert StopRequest("Ctrl-C at process 3 on n4", "preemption").exit_code == 85
  assert StopRequest("walltime: 60 s are left at process 0 on n1").exit_code == 85
