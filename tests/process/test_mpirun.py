"""A run under a real Open MPI: its log, and its end."""

import re
import shutil
import signal
import subprocess

import pytest

from jaxscale import metrics
from support.commands import child_env
from support.processes import killed_at_end, popen, wait_until
from support.tiny_runs import ARGS, checkpoint_names, newest_step

pytestmark = [pytest.mark.slow]
pytestmark += [pytest.mark.skipif(not shutil.which("mpirun"), reason="there is no mpirun")]

# A cluster's own choices: more processes than cores, and a container's user.
MPI = dict(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
MPI |= dict(JAXSCALE_MPI_OPTIONS="--oversubscribe")


def test_ctrl_c_of_mpirun_saves_and_its_log_is_plain_lines(tmp_path):
  """Expect a saved checkpoint, though mpirun kills within a second and uses pseudo-terminals."""
  workdir = tmp_path / "run"
  args = ["--config=configs/digits.py", f"--workdir={workdir}", *ARGS]
  command = "bash", "launch/mpi.sbatch", *args, "--config.epochs=700"
  env = child_env(**MPI)
  with killed_at_end(popen(*command, env=env, stderr=subprocess.STDOUT)) as process:
    wait_until(lambda: newest_step(workdir), process)
    process.send_signal(signal.SIGINT)
    log, _ = process.communicate(timeout=300)
  summary = metrics.read_json(workdir / "summary.json")
  assert summary["outcome"] == "interrupted", log
  names = checkpoint_names(workdir)
  assert str(summary["step"]) in names and not any("tmp" in n for n in names), log
  assert f"saved step {summary['step']}; to resume: " in log
  assert "\r" not in log and "\x1b" not in log
  assert len(re.findall(r"^step ", log, re.M)) < 100
