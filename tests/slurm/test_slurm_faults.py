"""Runs under Slurm of which a process or a node fails.

Most rows of docs/reliability.md's table are measured here (`fault_table`).
"""

import re
import time

import pytest

from jaxscale.cluster.timeouts import Timeouts
from support.fault_table import measured
from support.slurm.job import AT, NODES, SLACK, Job, error_of
from support.tiny_runs import assert_same_run, newest_step

pytestmark = pytest.mark.slow

# JAX itself would end the run then, and not say why. Ours takes 51 s at most, most of them a limit.
JAX_S = Timeouts.jax_heartbeat_timeout_s

RAISED = r"failed in step 60 \(input\): RuntimeError: no such"
HANGS = r"hangs in step 60 \(input\) for \d+ s; 2 others"
# What is done (`faulty_train`), to which process; its exit code, and the line.
ENDS = {
  "SIGKILL of a process": ("kill", 1, 137, r"died, last seen in step \d+"),
  "SIGKILL of process 0, JAX's coordinator": ("kill", 0, 137, r"died \(.*\), noticed in step \d+"),
  "SIGKILL in the middle of a save": ("kill in save", 1, 137, "died"),
  "an exception in one process": ("raise", 1, 1, RAISED),
  "one process sleeps for ever": ("sleep", 1, 86, HANGS),
  "SIGSTOP of one process": (
    "stop",
    1,
    86,
    r"has sent no heartbeat for \d+ s, last seen in step \d+",
  ),
  "one process holds the Python GIL forever": ("hold", 1, 86, r"has sent no heartbeat for \d+ s"),
}


@pytest.mark.parametrize("what", ENDS)
def test_a_fault_ends_the_job_and_is_named(slurm, whole, tmp_path, what):
  """With the limits that a user has; then the same command resumes."""
  fault, rank, code, line = ENDS[what]
  job = Job(slurm, tmp_path, fault, rank)
  job.end("FAILED")
  reported, saved = job.reported(), newest_step(job.workdir)
  assert re.search(f"process {rank} on n{rank + 1} {line}", error_of(reported))
  assert job.seconds() < JAX_S
  assert AT - SLACK <= saved <= AT
  assert job.codes() == [code]
  living = {f"process-{r}.txt" for r in range(NODES)} - {f"process-{rank}.txt"}
  assert living <= {p.name for p in (job.workdir / "faults").iterdir()}
  measured(what, job.seconds(), code, error_of(reported), AT - saved)
  again = Job(slurm, tmp_path)
  again.end("COMPLETED")
  assert f"resuming from the checkpoint of step {saved}" in again.reported()
  assert_same_run(job.workdir, whole)


def test_a_node_that_dies_ends_the_job_or_requeues_it(slurm, whole, tmp_path):
  """Slurm requeues a job whose node failed; ours has ended before it notices."""
  job = Job(slurm, tmp_path, "wait", 1)
  job.has_trained()
  began, saved = time.time(), newest_step(job.workdir)
  slurm.kill_node("n2")
  job.until(lambda: "process 1 on n2 died" in job.reported())
  seconds = time.time() - began
  line, kept = error_of(job.reported()), newest_step(job.workdir)
  slurm.start_node("n2")
  state = job.end("COMPLETED", "FAILED", "NODE_FAIL")["JobState"]
  lost = int(re.findall(r"in step (\d+)", line)[0]) - kept
  measured("a node dies: slurmd and tasks killed", seconds, state, line, max(lost, 0))
  if state != "COMPLETED":
    job = Job(slurm, tmp_path)
    job.end("COMPLETED")
  assert seconds < JAX_S and newest_step(job.workdir) > saved
  assert_same_run(job.workdir, whole)


def test_a_slow_process_is_named_and_lives(slurm, whole, tmp_path):
  limits = "--config.faults.slow_window_s=2", "--config.epochs=20"
  job = Job(slurm, tmp_path, "slow", 2, *limits)
  job.end("COMPLETED")
  (line, *_) = re.findall(r"process 2 on n3 is slow at step \d+: .*", job.reported())
  own, others = map(
    int, re.findall(r"needs (\d+) ms before each step, the median (\d+) ms", line)[0]
  )
  assert own >= 45 and own > others
  assert job.codes() == [0] and "error" not in job.reported()
  measured("a slow process", None, 0, line)


def test_a_job_that_makes_no_progress_is_given_up(slurm, tmp_path):
  """Requeued from outside again and again, it leaves with 93 before it trains."""
  job = Job(slurm, tmp_path, "kill,kill,kill,kill", 0, "--config.faults.max_idle_restarts=1")
  # All are killed at one step. The first leaves a checkpoint; the second none, or the
  # one that the first had not finished, and then the third none.
  for start in (1, 2, 3, 4):
    job.until(lambda start=start: len(job.codes()) == start)
    if job.codes()[-1] == 93:
      break
    job.end("FAILED")
    slurm.run("scontrol", "requeue", job.id)
  assert job.codes() in ([137, 137, 93], [137, 137, 137, 93])
  assert "error: 1 restart without progress, still at step" in job.reported()
