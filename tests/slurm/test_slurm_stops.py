"""Runs under Slurm that are asked to stop, and resume."""

import os
import re
import shlex
import signal
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxscale.metrics import read_json
from jaxscale.run.goodput import goodput, read_activities
from jaxscale.training.loop import IN_FLIGHT
from support.commands import child_env
from support.fault_table import measured
from support.faulty_train import LATE_S
from support.processes import killed_at_end, wait_until
from support.slurm.job import AT, CONFIG, Job, error_or_stop
from support.tiny_runs import assert_same_run, final_state, newest_step, record

pytestmark = pytest.mark.slow

PREEMPTIONS = {
  "SIGTERM to one process": ("term", None),
  "SIGUSR1 to one process": ("usr1", None),
  "SIGUSR1 to all": ("wait", ["scancel", "--signal=USR1"]),
  "SIGTERM to all": ("wait", ["scancel", "--signal=TERM"]),
  "scontrol requeue": ("wait", ["scontrol", "requeue"]),
}


@pytest.mark.parametrize("how", PREEMPTIONS)
def test_a_preempted_job_saves_and_is_requeued(slurm, whole, tmp_path, how):
  fault, command = PREEMPTIONS[how]
  job = Job(slurm, tmp_path, fault, 1)
  since = None
  if command:
    job.has_trained()
    since = time.time()
    slurm.run(*command, job.id)
  job.until(lambda: "saved step" in job.reported())
  seconds, codes = job.stopped(since)
  job.end("COMPLETED")
  (step,) = re.findall(r"saved step (\d+)", job.reported())
  assert f"resuming from the checkpoint of step {step}" in job.reported()
  assert int(step) <= AT + IN_FLIGHT  # no step is begun after it
  assert codes == {85} and job.codes()[-1] == 0
  assert_same_run(job.workdir, whole)
  measured(how, seconds, 85, error_or_stop(job.reported()))


def test_three_preemptions_of_one_job_change_no_bit(slurm, whole, tmp_path):
  job = Job(slurm, tmp_path, "usr1,wait@80,wait@100", 2)
  for number, kind in enumerate(("SIGTERM to all", "scontrol requeue"), 1):
    job.has_resumed(number)
    slurm.run(*(PREEMPTIONS[kind][1] or ()), job.id)
  job.end("COMPLETED")
  assert job.reported().count("resuming from") == 3
  assert_same_run(job.workdir, whole)


def test_two_preemptions_and_a_crash_change_no_bit_and_are_all_accounted_for(
  slurm, whole, tmp_path
):
  """Goodput, against what Slurm and this test know, and when files were written."""
  job = Job(slurm, tmp_path, "kill late,wait@80,wait@100", 1)
  jobs = [job.end("FAILED")]
  first = newest_step(job.workdir)
  files = (job.workdir / "checkpoints" / str(first)).rglob("*")
  saved = min(path.stat().st_mtime for path in files if path.is_file())
  ends = [float(job.note.read_text()) + LATE_S]
  slurm.run("scontrol", "requeue", job.id)
  job.has_resumed(1)
  jobs.append(slurm.job(job.id))
  slurm.run("scancel", "--signal=TERM", job.id)
  job.has_resumed(2)
  jobs.append(slurm.job(job.id))
  slurm.run("scontrol", "requeue", job.id)
  jobs.append(job.end("COMPLETED"))
  ends += [float(Path(f"{job.note}.{i}.0").read_text().split()[0]) for i in (1, 2, 3)]
  assert_same_run(job.workdir, whole)
  queued = [when(known["SubmitTime"]) for known in jobs]
  starts = [when(known["StartTime"]) for known in jobs]
  firsts = [float(Path(f"{job.note}.{i}.first").read_text()) for i in range(4)]
  wanted = {
    "queue": sum(starts) - sum(queued),
    "start-up": sum(firsts) - sum(starts),
    "down": sum(queued[1:]) - sum(ends[:-1]),
    "lost": ends[0] - saved,
  }
  wanted["all else"] = sum(ends) - sum(firsts) - wanted["lost"]
  found = goodput(read_activities(job.workdir))
  assert found is not None
  assert sum(found.seconds.values()) == pytest.approx(ends[-1] - queued[0], rel=0.01)
  seconds = {name: found.seconds[name] for name in wanted if name != "all else"}
  seconds["all else"] = found.wall_s - sum(seconds.values())
  # Below 1 s where it was measured (docs/launch.md); some files are written late here, on a
  # slow machine by as much as its start-up is longer.
  assert seconds == pytest.approx(wanted, abs=max(4.0, wanted["start-up"] / 4))
  summary = read_json(job.workdir / "summary.json")["goodput_seconds"]
  for name in ("training", "lost"):
    assert found.seconds[name] == pytest.approx(summary[name], abs=0.01) and summary[name]


def when(text):
  """Slurm's time, in seconds since 1970."""
  return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))


@pytest.mark.parametrize("end", ["known", "moved"])
def test_the_end_of_its_time_is_met_saved(slurm, tmp_path, end):
  """Known at the start: it stops before; brought forward: SIGTERM says so."""
  sbatch = ["--time=1"] if end == "known" else []
  job = Job(slurm, tmp_path, "nothing", 0, "--config.epochs=4000", sbatch=sbatch)
  if end == "known":
    has_trained_before_its_end(slurm, job)
  else:
    job.has_trained()
    slurm.end_at(job.id, 5)  # Slurm looks every 30 s whose time is over
  job.until(lambda: "all processes save and stop" in job.reported())
  (why,) = re.findall(r"(.+) at process \d on n\d: all processes save and stop", job.reported())
  assert "s are left" in why if end == "known" else why == "SIGTERM"
  seconds, codes = job.stopped(time.time())
  assert codes == {85}
  measured(f"walltime, its end {end}", seconds, 85, error_or_stop(job.reported()))
  job.until(lambda: "is requeued, restart 1" in job.reported())
  job.until(lambda: "resuming from" in job.reported())
  slurm.run("scancel", job.id)


def has_trained_before_its_end(slurm, job):
  """Wait until it has trained; a slow machine gets more time, as an operator may give it."""
  job.end("RUNNING")
  for _ in range(15):
    moved = time.monotonic()
    job.until(lambda m=moved: is_trained(job) or time.monotonic() - m > 20)
    if is_trained(job):
      return
    slurm.end_at(job.id, 60)
  raise AssertionError(job.reported())


def is_trained(job):
  return newest_step(job.workdir) >= 30


def test_what_is_cancelled_saves_and_stays_away(slurm, tmp_path):
  job = Job(slurm, tmp_path, "nothing", 0, "--config.epochs=4000")
  job.has_trained()
  began = time.time()
  slurm.run("scancel", job.id)
  job.end("CANCELLED")
  job.until(lambda: "saved step" in job.reported())
  seconds, codes = job.stopped(began)
  assert codes == {85} and "is not requeued: it is already " in job.reported()
  measured("scancel", seconds, 85, error_or_stop(job.reported()))
  time.sleep(2)
  assert slurm.job(job.id)["JobState"] == "CANCELLED"


@pytest.mark.parametrize("options", [["--disable-status"], []])
def test_ctrl_c_on_srun_saves(slurm, tmp_path, options):
  """By default srun keeps the first Ctrl-C to itself, and kills after the second."""
  out, err, workdir = (tmp_path / name for name in ("out", "err", "run"))
  command = ["srun", *options, "--nodes=2", "--ntasks-per-node=1", sys.executable]
  command += ["-m", "jaxscale.train", *CONFIG, "--config.epochs=4000"]
  words = shlex.join([*command, "--workdir", str(workdir)])
  process = slurm.start("bash", "-c", f"exec {words} >{out} 2>{err}", **child_env(1))
  with killed_at_end(process):
    wait_until(lambda: newest_step(workdir) >= 30, process, 300)
    began, sent = time.time(), 0
    while process.poll() is None:
      assert time.time() - began < 300
      # A second one counts within a second of the first: else srun asks again.
      if sent <= err.read_text().count("one more within 1 sec"):
        os.kill(process.pid, signal.SIGINT)
        sent += 1
      time.sleep(0.02)
  reported, seconds = out.read_text() + err.read_text(), time.time() - began
  stops = [line for line in reported.splitlines() if "all processes save and stop" in line]
  if options:
    assert sent == 1 and "Ctrl-C at process" in stops[0]
    assert process.returncode == 130 and "saved step" in reported
    measured("Ctrl-C on srun --disable-status", seconds, 130, stops[0])
  else:  # srun's SIGKILL may be faster than their line
    assert sent >= 2 and process.returncode != 0 and newest_step(workdir) >= 30
    if stops:
      lost = "since the last save"
      measured("Ctrl-C twice on srun", seconds, process.returncode, stops[0], lost)


def test_fewer_nodes_resume_where_more_have_stopped(slurm, whole, tmp_path):
  job = Job(slurm, tmp_path, "usr1", 1, "--config.faults.max_restarts=0")
  job.end("FAILED")
  assert job.codes() == [93]
  assert "is not requeued: it was requeued 0 times (limit 0)" in job.reported()
  again = Job(slurm, tmp_path, nodes=1)
  again.end("COMPLETED")
  assert "resuming from the checkpoint of step" in again.reported()
  leaves = (jax.tree.leaves(final_state(w).params) for w in (job.workdir, whole))
  for a, b in zip(*leaves, strict=True):
    assert (np.abs(a - b) <= 1e-5 * np.maximum(np.abs(b), 1e-2)).all()
  assert [r["step"] for r in record(job.workdir)] == [r["step"] for r in record(whole)]
