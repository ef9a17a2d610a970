"""What a run under Slurm does when a process, a node or somebody ends it.

Each line of docs/reliability.md's table that says "Slurm" is a test here. With
JAXSCALE_FAULT_TABLE=FILE what was measured is added to FILE, a JSON line a fault.
"""

import json
import os
import re
import shlex
import signal
import sys
import time

import numpy as np
import pytest
from conftest import child_env
from test_process import ARGS, assert_same_run, final_state, newest_step, record

pytestmark = pytest.mark.slow

NODES = 3
# Small and often saved, but long enough to be met by a fault at step 60.
CONFIG = (
  "--config", "configs/digits.py", *ARGS, "--config.batch_size=120",
  "--config.log.every_steps=5", "--config.checkpoint.every_epochs=0.5",
)  # fmt: skip
EPOCHS, STEPS = 10, 119
AT = 60
SLACK = 12  # steps between two saves, of which one may be under way


class Job:
  """A run of `faulty_train` as a job of the cluster."""

  def __init__(
    self, slurm, tmp_path, fault="nothing", rank=1, *args, nodes=NODES, sbatch=()
  ):
    self.slurm, self.workdir = slurm, tmp_path / "run"
    self.note, self.folder = tmp_path / "note", tmp_path
    tmp_path.mkdir(exist_ok=True)
    command = [
      sys.executable, "tests/faulty_train.py", fault, str(rank), str(AT),
      str(self.note), *CONFIG, f"--config.epochs={EPOCHS}",
      "--workdir", str(self.workdir), *args,
    ]  # fmt: skip
    out = f"--output={tmp_path}/%t.out"
    srun = ["srun", "--kill-on-bad-exit=1", "--open-mode=append", out, *command]
    self.id = slurm.submit(
      f"{shlex.join(srun)}; code=$?; date +%s.%N > {tmp_path}/end\n"
      f"echo $code >> {tmp_path}/codes; exit $code",
      f"--nodes={nodes}", "--ntasks-per-node=1", "--requeue", *sbatch,
      **child_env(1),
    )  # fmt: skip

  def said(self):
    """What all processes have written, process 0's first."""
    return "\n".join(p.read_text() for p in sorted(self.folder.glob("[0-9].out")))

  def has_trained(self, step=30):
    """Wait until the run has saved a checkpoint at, or after, a step."""
    self.until(lambda: newest_step(self.workdir) >= step)

  def until(self, condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
      assert time.monotonic() < deadline, f"waited too long\n{self.said()}"
      time.sleep(0.05)

  def end(self, *states, seconds=150):
    return self.slurm.wait_for(self.id, *states, seconds=seconds)

  def codes(self):
    """Exit codes of srun, one a start."""
    return [int(line) for line in (self.folder / "codes").read_text().split()]

  def seconds(self):
    """From the fault to the end of the last step of the job."""
    return float((self.folder / "end").read_text()) - float(self.note.read_text())

  def stopped(self, since=None, restart=0, nodes=NODES):
    """Seconds from a signal to the end of all processes, and their exit codes."""
    ends = [self.folder / f"note.{restart}.{rank}" for rank in range(nodes)]
    self.until(lambda: all(path.exists() and path.read_text() for path in ends))
    times, codes = zip(*(path.read_text().split() for path in ends), strict=True)
    began = float(self.note.read_text()) if since is None else since
    return max(map(float, times)) - began, {int(code) for code in codes}


def measured(fault, seconds, lost, code, line):
  """Add a line to the table, if one is asked for."""
  if path := os.environ.get("JAXSCALE_FAULT_TABLE"):
    row = dict(fault=fault, seconds=round(seconds, 1), lost=lost, code=code, line=line)
    with open(path, "a") as file:
      file.write(json.dumps(row) + "\n")


def error_of(said):
  lines = [line for line in said.splitlines() if line.startswith("error: ")]
  assert lines, said
  return lines[0]


def error_or_stop(said):
  return next(line for line in said.splitlines() if "all stop together" in line)


ENDS = {
  "kill": (1, 137, r"process 1 on n2 died, last seen in step \d+"),
  "kill the coordinator": (0, 137, r"process 0 on n1 died, seen in step \d+"),
  "kill in save": (1, 137, r"process 1 on n2 died"),
  "raise": (
    1,
    1,
    r"process 1 on n2 failed in step 60 \(input\): RuntimeError: no such",
  ),
  "sleep": (1, 86, r"process 1 on n2 hangs in step 60 \(input\) for \d+ s; 2 others"),
  "stop": (1, 86, r"process 1 on n2 is silent for \d+ s, last in step \d+"),
  "hold": (1, 86, r"process 1 on n2 is silent for \d+ s"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, _cluster):
  """The run that nothing ever happened to, on three nodes."""
  job = Job(_cluster, tmp_path_factory.mktemp("whole"))
  job.end("COMPLETED")
  assert job.codes() == [0]
  return job.workdir


@pytest.mark.parametrize("fault", ENDS)
def test_a_fault_ends_the_job_and_is_named(slurm, whole, tmp_path, fault):
  """With the limits that a user has; then the same command goes on."""
  rank, code, line = ENDS[fault]
  job = Job(slurm, tmp_path, fault.partition(" the")[0], rank)
  job.end("FAILED")
  said, saved = job.said(), newest_step(job.workdir)
  assert re.search(line, error_of(said)), said
  assert job.seconds() < 60
  assert AT - SLACK <= saved <= AT
  assert job.codes() == [code]
  living = {f"process-{r}.txt" for r in range(NODES)} - {f"process-{rank}.txt"}
  assert living <= {p.name for p in (job.workdir / "faults").iterdir()}
  measured(fault, job.seconds(), AT - saved, code, error_of(said))
  again = Job(slurm, tmp_path)
  again.end("COMPLETED")
  assert f"going on from the checkpoint of step {saved}" in again.said()
  assert_same_run(job.workdir, whole)


def test_a_node_that_dies_ends_the_job_or_requeues_it(slurm, whole, tmp_path):
  """Slurm requeues a job whose node failed; ours has ended before it notices."""
  job = Job(slurm, tmp_path)
  job.has_trained()
  began, saved = time.time(), newest_step(job.workdir)
  slurm.kill_node("n2")
  job.until(lambda: "process 1 on n2 died" in job.said(), 60)
  seconds = time.time() - began
  line = error_of(job.said())
  slurm.start_node("n2")
  job.end("COMPLETED", "FAILED", "NODE_FAIL")
  measured("node dead", seconds, "since the last save", None, line)
  if slurm.job(job.id)["JobState"] != "COMPLETED":
    job = Job(slurm, tmp_path)
    job.end("COMPLETED")
  assert seconds < 60 and newest_step(job.workdir) > saved
  assert_same_run(job.workdir, whole)


def test_a_slow_process_is_named_and_lives(slurm, whole, tmp_path):
  limits = "--config.faults.slow_window_s=2", "--config.epochs=20"
  job = Job(slurm, tmp_path, "slow", 2, *limits)
  job.end("COMPLETED")
  (line, *_) = re.findall(r"process 2 on n3 is slow at step \d+: .*", job.said())
  assert re.search(r"[45]\d ms of its host before each step", line)
  assert job.codes() == [0] and "error" not in job.said()
  measured("slow", 0, 0, 0, line)


PREEMPTIONS = {
  "SIGTERM to one process": ("term", None),
  "SIGUSR1 to one process": ("usr1", None),
  "SIGUSR1 to all": ("nothing", ["scancel", "--signal=USR1"]),
  "SIGTERM to all": ("nothing", ["scancel", "--signal=TERM"]),
  "scontrol requeue": ("nothing", ["scontrol", "requeue"]),
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
  job.until(lambda: "saved step" in job.said())
  seconds, codes = job.stopped(since)
  job.end("COMPLETED")
  (step,) = re.findall(r"saved step (\d+)", job.said())
  assert f"going on from the checkpoint of step {step}" in job.said()
  assert seconds < 60 and codes == {85} and job.codes()[-1] == 0
  assert_same_run(job.workdir, whole)
  measured(how, seconds, 0, 85, error_or_stop(job.said()))


def test_three_preemptions_change_no_bit(slurm, whole, tmp_path):
  """Each of another kind; the last is the end of the job's time."""
  job = Job(slurm, tmp_path, "usr1", 2)
  said = r"saved step (\d+)"
  job.until(lambda: len(re.findall(said, job.said())) == 1)
  job.until(lambda: "going on from" in job.said())
  first = newest_step(job.workdir)
  job.until(lambda: newest_step(job.workdir) > first)
  slurm.run("scancel", "--signal=TERM", job.id)
  job.until(lambda: job.said().count("going on from") == 2)
  second = newest_step(job.workdir)
  slurm.run("scontrol", "requeue", job.id)
  job.end("COMPLETED")
  assert second < STEPS and job.said().count("going on from") == 3
  assert_same_run(job.workdir, whole)


@pytest.mark.parametrize("end", ["known", "moved"])
def test_the_end_of_its_time_is_met_saved(slurm, tmp_path, end):
  """Known at the start: it stops before; brought forward: SIGTERM says so."""
  job = Job(slurm, tmp_path, "nothing", 0, "--config.epochs=4000",
            sbatch=["--time=1"] if end == "known" else [])  # fmt: skip
  job.has_trained()
  if end == "moved":
    slurm.end_at(job.id, 5)  # Slurm looks every 30 s whose time is over
  job.until(lambda: "all stop together" in job.said(), 90)
  (why,) = re.findall(r"(.+) at process \d on n\d: all stop together", job.said())
  assert "s are left" in why if end == "known" else why == "SIGTERM"
  seconds, codes = job.stopped(time.time())
  assert codes == {85}
  measured(f"walltime, its end {end}", seconds, 0, 85, why)
  job.until(lambda: "is requeued, restart 1" in job.said(), 30)
  job.until(lambda: "going on from" in job.said())
  slurm.run("scancel", job.id)


def test_what_is_cancelled_saves_and_stays_away(slurm, tmp_path):
  job = Job(slurm, tmp_path, "nothing", 0, "--config.epochs=4000")
  job.has_trained()
  began = time.time()
  slurm.run("scancel", job.id)
  job.end("CANCELLED", seconds=30)
  job.until(lambda: "saved step" in job.said(), 10)
  seconds, codes = job.stopped(began)
  assert codes == {85} and "not requeued by this run" in job.said()
  measured("scancel", seconds, 0, 85, error_or_stop(job.said()))
  time.sleep(2)
  assert slurm.job(job.id)["JobState"] == "CANCELLED"


@pytest.mark.parametrize("options", [["--disable-status"], []])
def test_ctrl_c_on_srun_saves(slurm, tmp_path, options):
  """By default srun keeps the first Ctrl-C to itself, and kills after the second."""
  command = ["srun", *options, "--nodes=2", "--ntasks-per-node=1", sys.executable]
  command += ["-m", "jaxscale.train", *CONFIG, "--config.epochs=4000"]
  process = slurm.start(*command, "--workdir", str(tmp_path / "run"), **child_env(1))
  try:
    deadline = time.monotonic() + 120
    while newest_step(tmp_path / "run") < 30:
      assert process.poll() is None and time.monotonic() < deadline
      time.sleep(0.05)
    began = time.time()
    for _ in range(1 if options else 2):
      os.kill(process.pid, signal.SIGINT)
      time.sleep(0.1)
    out, err = process.communicate(timeout=60)
  finally:
    if process.poll() is None:
      process.kill()
      process.communicate()
  measured(f"Ctrl-C {options}", time.time() - began, 0, process.returncode, err[-200:])
  assert "Ctrl-C at process" in out + err
  if options:
    assert process.returncode == 130 and "saved step" in out


def test_fewer_nodes_go_on_where_more_have_stopped(slurm, whole, tmp_path):
  job = Job(slurm, tmp_path, "usr1", 1, "--config.faults.restarts=0")
  job.end("FAILED")
  assert job.codes() == [93] and "not again (limit 0)" in job.said()
  again = Job(slurm, tmp_path, nodes=1)
  again.end("COMPLETED")
  assert "going on from the checkpoint of step" in again.said()
  for a, b in zip(
    *(np.concatenate([np.ravel(x) for x in _leaves(w)]) for w in (job.workdir, whole)),
    strict=True,
  ):
    assert abs(a - b) <= 1e-5 * max(abs(b), 1e-2)
  assert [r["step"] for r in record(job.workdir)] == [r["step"] for r in record(whole)]


def _leaves(workdir):
  import jax

  return jax.tree.leaves(final_state(workdir).params)


def test_a_job_that_makes_no_progress_is_given_up(slurm, tmp_path):
  """Requeued from outside again and again, it leaves with 93 before it trains."""
  job = Job(slurm, tmp_path, "nothing", 0, "--config.checkpoint.every_epochs=4000",
            "--config.epochs=4000", "--config.faults.idle_restarts=1")  # fmt: skip
  job.until(lambda: "step" in job.said())
  # As after the death of a node: nothing is saved.
  slurm.run("scancel", "--signal=KILL", job.id)
  job.end("FAILED", "PENDING", "RUNNING", "COMPLETED")
  slurm.run("scontrol", "requeue", job.id, check=False)
  job.until(lambda: "1 restarts without progress" in job.said())
  job.end("FAILED")
  assert job.codes()[-1] == 93
