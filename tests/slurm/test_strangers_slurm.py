"""A user who attacks jobs on their nodes, from before their start to their end."""

import re
import sys

import pytest

from jaxscale.cluster.rendezvous import network
from support import strangers
from support.commands import child_env, train_command
from support.rendezvous import key_of, ports_of
from support.tiny_runs import ARGS, assert_same_run

attack = pytest.fixture(strangers.starter)

STARTS = 2
ON = ("-N2", "-n2", "-wn1,n2")
# The second process comes late: until then the first one listens.
LATE = 'sleep $((6 * SLURM_PROCID)); exec "$@"'
START = """
import os, time
from jaxscale.cluster import detect
from jaxscale.cluster.rendezvous.client import rendezvous
launch = detect.detect(os.environ)
time.sleep(2 * launch.process_id)
began = time.monotonic()
links = rendezvous(launch).links.values()
print("took", time.monotonic() - began)
for link in links:
  link.send("all are here")
  assert link.receive(10) == "all are here"
"""


@pytest.fixture
def besiege(slurm, attack):
  """Starts all attacks at once on the next jobs of two nodes, one by one or not."""
  address = slurm.run("getent", "ahostsv4", "n1").stdout.split()[0]

  def begin(jobs=1, seconds=180):
    """Strangers are there before the jobs: the ids of these are easy to guess."""
    last = slurm.run("srun", "-n1", "bash", "-c", "echo $SLURM_JOB_ID").stdout
    runs = [f"slurm-{int(last) + 1 + i}.0" for i in range(jobs)]
    free = []
    for ports in map(ports_of, runs):
      attack("squat", ports, address, seconds)
      attack("relay", ports[1:], address, seconds)
      free += ports[2:]
    for run in runs:  # where JAX's coordinator will be
      free += network.ports_of(f"{key_of(run).hex()}/coordinator")
    return [attack(name, free, address, seconds) for name in ("siege", "hunt")]

  return begin


def start(slurm):
  """What two processes print that connect; with the seconds that process 1 took."""
  done = slurm.run("srun", *ON, sys.executable, "-c", START, **child_env(1))
  return done.stdout + done.stderr


@pytest.mark.slow
def test_jobs_under_attack_start(slurm, besiege):
  alone = start(slurm)
  assert "refused" not in alone and "passed" not in alone, alone
  besieging = besiege(STARTS)
  squatted = rf"ports passed over.* \d+ \(uid {strangers.NOBODY}\), \d+ \(uid"
  for _ in range(STARTS):
    print(log := start(slurm))
    assert re.search(squatted, log), log
    assert re.search(r"connections refused.*: \d{3,} from 127\.", log), log
  assert all(stranger.poll() is None for stranger in besieging)  # to the end


def train(slurm, workdir):
  """What a run on two nodes printed."""
  args = train_command(workdir, *ARGS)
  done = slurm.run("srun", *ON, "bash", "-c", LATE, "late", *args, timeout=180,
                   **child_env(1))  # fmt: skip
  return done.stdout + done.stderr


@pytest.mark.slow
def test_a_job_under_attack_is_the_job_without(slurm, besiege, tmp_path):
  assert "refused" not in train(slurm, tmp_path / "alone")
  besieging = besiege()
  attacked = train(slurm, tmp_path / "attacked")
  assert "connections refused that lack this run's secret: " in attacked
  assert_same_run(tmp_path / "attacked", tmp_path / "alone")
  assert all(stranger.poll() is None for stranger in besieging)  # to the end
