"""A real Slurm as tests start it, and a run without `jaxscale submit`."""

import shlex
import signal
import sys
from pathlib import Path

import pytest

from support.commands import child_env, train_command
from support.paths import ROOT
from support.processes import popen, wait_until
from support.slurm import hosts as slurm_hosts

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
  with popen(sys.executable, "-c", KILLED, env=env) as runner:
    folder = Path(reported := runner.stdout.readline().strip())
    assert reported, runner.stderr.read()
    before = slurm_hosts.processes(folder)
    runner.send_signal(number)
  assert len(before) > 10
  wait_until(lambda: slurm_hosts.processes(folder) == [], seconds=5)
  wait_until(lambda: not folder.exists(), seconds=5)


def test_a_batch_script_without_srun_is_reported(slurm, tmp_path):
  command = shlex.join(train_command(tmp_path / "run"))
  job = slurm.submit(f"{command} 2>&1", "-N2", "--ntasks-per-node=1", **child_env(1))
  assert slurm.wait_for(job, "FAILED")["ExitCode"] == "2:0"
  (line,) = slurm.output(job).splitlines()
  assert line.startswith("error: SLURM_NTASKS=2: this is the batch script, no step")
  assert "start it with srun" in line
