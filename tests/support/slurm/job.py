"""Run of `faulty_train` as a job of the tests' cluster, and its results."""

import re
import shlex
import sys
import time

from support.commands import child_env
from support.tiny_runs import ARGS, newest_step

NODES = 3
# Small and often saved, but long enough to have a fault at step 60.
CONFIG = ["--config", "configs/digits.py", *ARGS, "--config.batch_size=120"]
CONFIG += ["--config.log.every_steps=5", "--config.checkpoint.every_epochs=0.5"]
EPOCHS = 10  # 119 steps
AT = 60
SLACK = 12  # steps between two saves, of which one may be under way


class Job:
  """Run of `faulty_train` as a job of the cluster; of several starts, `fault` lists the faults."""

  def __init__(self, slurm, tmp_path, fault="nothing", rank=1, *args, nodes=NODES, sbatch=()):
    self.slurm, self.workdir = slurm, tmp_path / "run"
    self.note, self.folder = tmp_path / "note", tmp_path
    tmp_path.mkdir(exist_ok=True)
    srun = ["srun", "--kill-on-bad-exit=1", "--open-mode=append", f"--output={tmp_path}/%t.out"]
    faulty = ["tests/support/faulty_train.py", fault, str(rank), str(AT), str(self.note)]
    train = [*CONFIG, f"--config.epochs={EPOCHS}", "--workdir", str(self.workdir), *args]
    # A run that waits for the test is no fault.
    train += ["--config.faults.hang_timeout_s=300"] if "wait" in fault else []
    script = (
      f"{shlex.join([*srun, sys.executable, *faulty, *train])}; code=$?\n"
      f"date +%s.%N > {tmp_path}/end; echo $code >> {tmp_path}/codes; exit $code"
    )
    options = f"--nodes={nodes}", "--ntasks-per-node=1", "--requeue", *sbatch
    self.id = slurm.submit(script, *options, **child_env(1))

  def reported(self):
    """Return the output of all processes, process 0's first."""
    return "\n".join(p.read_text() for p in sorted(self.folder.glob("[0-9].out")))

  def has_trained(self, step=30):
    """Wait until the run has saved a checkpoint at or after a step."""
    self.until(lambda: newest_step(self.workdir) >= step)

  def has_resumed(self, times):
    """Wait until the run has resumed so often, and has saved a checkpoint since."""
    resumed = r"resuming from the checkpoint of step (\d+)"
    self.until(lambda: len(re.findall(resumed, self.reported())) == times)
    step = int(re.findall(resumed, self.reported())[-1])
    self.until(lambda: newest_step(self.workdir) > step)

  def until(self, condition, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
      assert time.monotonic() < deadline, f"waited too long\n{self.reported()[-2000:]}"
      time.sleep(0.05)

  def end(self, *states, seconds=300):
    return self.slurm.wait_for(self.id, *states, seconds=seconds)

  def codes(self):
    """Return the exit codes of srun, one per start."""
    path = self.folder / "codes"
    return [int(line) for line in path.read_text().split()] if path.exists() else []

  def seconds(self):
    """Return the seconds from the fault to the end of the job's last step."""
    return float((self.folder / "end").read_text()) - float(self.note.read_text())

  def stopped(self, since=None, restart=0, nodes=NODES):
    """Return the seconds from a signal to the end of all processes, and their exit codes."""
    ends = [self.folder / f"note.{restart}.{rank}" for rank in range(nodes)]
    self.until(lambda: all(path.exists() and path.read_text() for path in ends))
    times, codes = zip(*(path.read_text().split() for path in ends), strict=True)
    began = float(self.note.read_text()) if since is None else since
    return max(map(float, times)) - began, {int(code) for code in codes}


def error_of(reported):
  lines = [line for line in reported.splitlines() if line.startswith("error: ")]
  assert lines, reported[-2000:]
  return lines[0]


def error_or_stop(reported):
  return next(line for line in reported.splitlines() if "all processes save and stop" in line)
