"""A user who attacks jobs on their nodes, from before their start to their end."""

import re

import pytest

from jaxscale.cluster.rendezvous import network
from support import strangers
from support.commands import child_env, train_command
from support.rendezvous import key_of, ports_of
from support.tiny_runs import ARGS, assert_same_run

attack = pytest.fixture(strangers.starter)

ON = ("-N2", "-n2", "-wn1,n2")
# The second process comes late: until then the first one listens.
LATE = 'sleep $((6 * SLURM_PROCID)); exec "$@"'


@pytest.fixture
def besiege(slurm, attack):
  """Return a function that starts all attacks at once on the next job of two nodes."""
  address = slurm.run("getent", "ahostsv4", "n1").stdout.split()[0]

  def begin(seconds=600):
    """Strangers are there before the job, whose id is easy to guess."""
    last = slurm.run("srun", "-n1", "bash", "-c", "echo $SLURM_JOB_ID").stdout
    run = f"slurm-{int(last) + 1}.0"
    ports = ports_of(run)
    attack("squat", ports, address, seconds)
    attack("relay", ports[1:], address, seconds)
    # Among them the ports where JAX's coordinator will be.
    free = [*ports[2:], *network.ports_of(f"{key_of(run).hex()}/coordinator")]
    return [attack(name, free, address, seconds) for name in ("siege", "hunt")]

  return begin


def train(slurm, workdir):
  """Train on two nodes; return what was printed."""
  args = train_command(workdir, *ARGS)
  done = slurm.run("srun", *ON, "bash", "-c", LATE, "late", *args, timeout=300, **child_env(1))
  return done.stdout + done.stderr


@pytest.mark.slow
def test_a_job_under_attack_is_the_job_without(slurm, besiege, tmp_path):
  assert "refused" not in train(slurm, tmp_path / "alone")
  besieging = besiege()
  attacked = train(slurm, tmp_path / "attacked")
  squatted = rf"skipped ports.* \d+ \(uid {strangers.NOBODY}\), \d+ \(uid"
  assert re.search(squatted, attacked), attacked
  assert "refused connections without this run's secret: " in attacked
  assert_same_run(tmp_path / "attacked", tmp_path / "alone")
  assert all(stranger.poll() is None for stranger in besieging)  # to the end
