"""A real Slurm: the cluster that tests start, and runs on it as they are today."""

import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jaxscale.metrics import read_json_lines
from support.commands import child_env, run_train, train_command
from support.paths import ROOT
from support.slurm import cluster as slurm_cluster
from support.slurm import environments as slurm_environments
from support.slurm import hosts as slurm_hosts

QUICK = ["--config.epochs=3", "--config.model=MLP", "--config.model.hidden=(64,)"]


def wait_until(condition, seconds=30):
  deadline = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < deadline, "waited too long"
    time.sleep(0.02)


def tasks(slurm, *srun, program="import socket; print(socket.gethostname())"):
  """What each task of a step printed, sorted."""
  done = slurm.run("srun", *srun, sys.executable, "-c", program)
  return sorted(done.stdout.splitlines())


# The cluster.


def test_nodes_have_names_that_resolve(slurm):
  program = (
    "import socket; print(socket.gethostname(), *("
    "socket.gethostbyname(name) for name in ['n1', 'n2', socket.gethostname()]))"
  )
  assert tasks(slurm, "-N4", program=program) == [
    f"n{i} {slurm.net}.11 {slurm.net}.12 {slurm.net}.{10 + i}" for i in range(1, 5)
  ]
  assert "n1" not in Path("/etc/hosts").read_text().split()


def test_two_tasks_a_node_fit_whatever_the_machine_has(slurm):
  assert tasks(slurm, "-N4", "--ntasks-per-node=2") == [
    "n1", "n1", "n2", "n2", "n3", "n3", "n4", "n4",
  ]  # fmt: skip


def test_several_jobs_run_on_one_node(slurm):
  jobs = [slurm.submit("sleep 60", "--nodelist=n1") for _ in range(3)]
  for job in jobs[:2]:
    assert slurm.wait_for(job, "RUNNING")["NodeList"] == "n1"
  assert slurm.wait_for(jobs[2], "PENDING")["JobState"] == "PENDING"  # two CPUs
  assert sorted(slurm.queue()) == sorted(jobs)


def test_nothing_of_a_job_around_us_reaches_the_cluster(slurm, monkeypatch):
  for name in ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURMD_NODENAME", "SBATCH_PARTITION"):
    monkeypatch.setenv(name, "7")
  assert tasks(slurm, "-N1") == ["n1"]
  assert set(slurm.environment()) & {"SLURM_NTASKS", "SBATCH_PARTITION"} == set()


def test_a_job_says_how_it_ended(slurm):
  good, bad = slurm.submit("echo fine"), slurm.submit("exit 3")
  assert slurm.wait_for(good)["JobState"] == "COMPLETED"
  assert slurm.output(good) == "fine\n"
  assert slurm.wait_for(bad, "FAILED")["ExitCode"] == "3:0"
  wait_until(lambda: {good, bad} <= {job["JobID"] for job in slurm.finished()})
  ends = {job["JobID"]: job["State"] for job in slurm.finished()}
  assert (ends[good], ends[bad]) == ("COMPLETED", "FAILED")
  with pytest.raises(AssertionError, match="is FAILED, not COMPLETED"):
    slurm.wait_for(bad, "COMPLETED")


def test_an_array_runs_two_at_a_time(slurm):
  job = slurm.submit("echo task $SLURM_ARRAY_TASK_ID; sleep 0.5", "--array=0-3%2")
  most, names = 0, [f"{job}_{i}" for i in range(4)]
  while queue := slurm.queue():
    most = max(most, sum(state == "RUNNING" for state in queue.values()))
  assert most == 2
  assert [slurm.output(name) for name in names] == [f"task {i}\n" for i in range(4)]


def test_a_job_is_signalled_by_name_and_at_its_limit(slurm):
  script = "trap 'echo told; exit 0' USR1\necho up\nwhile :; do sleep 0.1; done"
  job = slurm.submit(script)
  slurm.wait_for(job, "RUNNING")
  wait_until(lambda: slurm.output(job) == "up\n")  # the trap is set
  slurm.run("scancel", "--batch", "--signal=USR1", job)
  slurm.wait_for(job, "COMPLETED")
  assert slurm.output(job) == "up\ntold\n"


@pytest.mark.slow
def test_a_time_limit_ends_a_job_and_a_signal_comes_before(slurm):
  script = "trap 'echo told' USR1\nwhile :; do sleep 0.1; done"
  job = slurm.submit(script, "--signal=B:USR1@10", "--time=5")
  slurm.wait_for(job, "RUNNING")
  slurm.end_at(job, 45)  # signals too wait for Slurm's next look
  slurm.wait_for(job, "TIMEOUT", seconds=100)
  assert slurm.output(job).startswith("told\n")


@pytest.mark.slow
def test_a_requeued_job_starts_again_and_knows_it(slurm):
  job = slurm.submit("echo ${SLURM_RESTART_COUNT:-0}; sleep 60", "--open-mode=append")
  slurm.wait_for(job, "RUNNING")
  wait_until(lambda: slurm.output(job) == "0\n")
  slurm.run("scontrol", "requeue", job)
  slurm.wait_for(job, "PENDING")
  assert slurm.wait_for(job, "RUNNING")["Restarts"] == "1"
  wait_until(lambda: slurm.output(job).endswith("1\n"))


@pytest.mark.slow
def test_a_dead_node_is_noticed_and_its_job_resumes_elsewhere(slurm):
  lost = slurm.submit("srun sleep 60", "-N3", "--nodelist=n3", "--exclude=n4")
  # Without that node, in the same allocation: --no-kill.
  script = "srun -N3 sleep 60; echo $?; srun -N2 --exclude=n3 hostname; sleep 60"
  kept = slurm.submit(script, "-N3", "--no-kill", "--nodelist=n3", "--exclude=n4")
  for job in (lost, kept):
    assert slurm.wait_for(job, "RUNNING")["NodeList"] == "n[1-3]"
  wait_until(lambda: len(slurm.processes("n3")) == 5)  # slurmd, two steps, two tasks
  slurm.kill_node("n3")
  assert slurm.processes("n3") == []
  assert slurm.processes("n2") != []
  wait_until(lambda: slurm.job(lost)["Restarts"] == "1", seconds=60)
  wait_until(lambda: {"n1", "n2"} <= set(slurm.output(kept).split("\n")), seconds=60)
  assert slurm.job(kept)["JobState"] == "RUNNING"
  slurm.start_node("n3")
  shown = ("sinfo", "-N", "-h", "-o", "%N %T")
  wait_until(lambda: "n3 down" not in slurm.run(*shown).stdout)


def test_commands_run_on_a_node_as_by_ssh(slurm):
  here = slurm.run("hostname", host="n2")
  assert here.stdout == "n2\n"
  assert slurm.run("pwd", host="n2").stdout == f"{ROOT}\n"
  with pytest.raises(AssertionError, match=r"false: exit status 1"):
    slurm.run("false")
  with pytest.raises(TimeoutError, match=r"after 0.1 s"):
    slurm.run("sleep", "10", timeout=0.1)


KILLED = """
import time
from support.slurm.cluster import SlurmCluster
with SlurmCluster(nodes=2, cpus=4) as slurm:
  steps = [slurm.start("srun", "-N2", "setsid", "sleep", "600") for _ in range(2)]
  slurm.submit("env -i setsid sleep 600 & wait")
  deadline = time.monotonic() + 30
  # slurmd, two steps, two tasks; on n1 also a script, its step and its sleep.
  while len(slurm.processes("n2")) < 5 or len(slurm.processes("n1")) < 8:
    assert time.monotonic() < deadline
    time.sleep(0.05)
  print(slurm.folder, flush=True)
  time.sleep(60)
"""


def test_a_folder_too_deep_for_sockets_is_refused(tmp_path):
  deep = tmp_path / ("x" * 80)
  deep.mkdir()
  with pytest.raises(ValueError, match="too long a path"):
    slurm_cluster.SlurmCluster(parent=deep)
  assert list(deep.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_when_the_runner_ends(number):
  env = child_env(PYTHONPATH=str(ROOT / "tests"))
  command = [sys.executable, "-c", KILLED]
  with subprocess.Popen(
    command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
  ) as runner:
    assert runner.stdout is not None and runner.stderr is not None
    folder = Path(reported := runner.stdout.readline().strip())
    assert reported, runner.stderr.read()
    before = slurm_hosts.processes(folder)
    runner.send_signal(number)
  assert len(before) > 10
  wait_until(lambda: slurm_hosts.processes(folder) == [], 5)
  wait_until(lambda: not folder.exists(), 5)


def test_recorded_environments_are_what_slurm_gives(slurm):
  """The names, and the values that are not of chance."""
  del slurm  # for the skip
  for case in ("srun_2_nodes_4_tasks", "sbatch_body", "gpus_per_task"):
    path = slurm_environments.RECORDED / f"{case}.json"
    now, then = slurm_environments.record(case), json.loads(path.read_text())
    if now["slurm"] == then["slurm"]:
      assert now == then
    for task, known in zip(now["tasks"], then["tasks"], strict=True):
      for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_JOB_ID"):
        assert task["env"][name] == known["env"][name]
      assert "SLURM_STEP_ID" in known["env"] or case == "sbatch_body"


def test_every_launch_has_its_recording():
  files = {path.stem for path in slurm_environments.RECORDED.glob("*.json")}
  assert files == set(slurm_environments.CASES)


# jaxscale on it.


@pytest.mark.slow
def test_digits_on_two_nodes_are_digits_on_one(slurm, tmp_path):
  args = (*QUICK, "--config.log.every_steps=1")
  alone = run_train(tmp_path / "one", *args, num_devices=2)
  assert alone.returncode == 0, alone.stderr
  command = train_command(tmp_path / "two", *args)
  slurm.run("srun", "-N2", "-n2", *command, timeout=600, **child_env(1))
  one, two = (
    {
      (line["step"], name): value
      for line in read_json_lines(tmp_path / run / "metrics.jsonl")
      for name, value in line.items()
      if "loss" in name
    }
    for run in ("one", "two")
  )
  assert one.keys() == two.keys() and len(one) > 5
  np.testing.assert_allclose(list(one.values()), list(two.values()), rtol=1e-5)


def test_a_batch_script_without_srun_is_reported(slurm, tmp_path):
  command = shlex.join(train_command(tmp_path / "run", *QUICK))
  job = slurm.submit(f"{command} 2>&1", "-N2", "--ntasks-per-node=1", **child_env(1))
  assert slurm.wait_for(job, "FAILED")["ExitCode"] == "2:0"
  (line,) = slurm.output(job).splitlines()
  assert line.startswith("error: SLURM_NTASKS=2: this is the batch script, no step")
  assert "start it with srun" in line
