"""A real Slurm: recordings of its environments, and runs without `jaxscale submit`."""

import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.commands import child_env, train_command
from support.paths import ROOT
from support.slurm import environments as slurm_environments
from support.slurm import hosts as slurm_hosts
from support.slurm.cli import wait_until

QUICK = ["--config.epochs=3", "--config.model=MLP", "--config.model.hidden=(64,)"]


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


def test_a_batch_script_without_srun_is_reported(slurm, tmp_path):
  command = shlex.join(train_command(tmp_path / "run", *QUICK))
  job = slurm.submit(f"{command} 2>&1", "-N2", "--ntasks-per-node=1", **child_env(1))
  assert slurm.wait_for(job, "FAILED")["ExitCode"] == "2:0"
  (line,) = slurm.output(job).splitlines()
  assert line.startswith("error: SLURM_NTASKS=2: this is the batch script, no step")
  assert "start it with srun" in line
