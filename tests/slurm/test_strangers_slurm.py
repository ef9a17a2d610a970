"""A user who attacks jobs on their nodes, from before their start to their end."""

import itertools
import re
import sys

import pytest

from jaxscale.cluster.rendezvous import network
from jaxscale.metrics import read_json_lines
from support import strangers
from support.commands import child_env, train_command
from support.rendezvous import key_of, ports_of
from support.tiny_runs import ARGS, assert_same_run

attack = pytest.fixture(strangers.starter)

STARTS = 4  # 15 seconds
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


def start_s(slurm):
  """The seconds that a process 1 needed until all were connected, and the log."""
  done = slurm.run("srun", *ON, sys.executable, "-c", START, **child_env(1))
  return min(map(float, re.findall("took (.*)", done.stdout))), done.stderr


@pytest.mark.slow
def test_starts_under_attack_take_no_longer(slurm, besiege):
  alone = [start_s(slurm) for _ in range(STARTS)]
  assert not any("refused" in log or "passed" in log for _, log in alone), alone
  besieging = besiege(STARTS)
  attacked = [start_s(slurm) for _ in range(STARTS)]
  print(alone, attacked, sep="\n")
  assert max(s for s, _ in attacked) < max(s for s, _ in alone) + 1
  squatted = rf"ports passed over.* \d+ \(uid {strangers.NOBODY}\), \d+ \(uid"
  for _, log in attacked:
    assert re.search(squatted, log), log
    assert re.search(r"connections refused.*: \d{3,} from 127\.", log), log
  assert all(stranger.poll() is None for stranger in besieging)  # to the end


def train(slurm, workdir):
  """A run on two nodes: what it printed, and the longest pause between log lines."""
  args = train_command(workdir, *ARGS)
  done = slurm.run("srun", *ON, "bash", "-c", LATE, "late", *args, timeout=180,
                   **child_env(1))  # fmt: skip
  times = [line["time"] for line in read_json_lines(workdir / "metrics.jsonl")]
  pause_s = max(b - a for a, b in itertools.pairwise(times))
  return done.stdout + done.stderr, pause_s


@pytest.mark.slow
def test_a_job_under_attack_is_the_job_without(slurm, besiege, tmp_path):
  alone, pause_s = train(slurm, tmp_path / "alone")
  assert "refused" not in alone
  besieging = besiege()
  attacked, longest_s = train(slurm, tmp_path / "attacked")
  print(attacked, pause_s, longest_s)
  assert "connections refused that lack this run's secret: " in attacked
  assert longest_s < pause_s + 1
  assert_same_run(tmp_path / "attacked", tmp_path / "alone")
  assert all(stranger.poll() is None for stranger in besieging)  # to the end
