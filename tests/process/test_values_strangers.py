"""Programs of another user cannot read or change what processes decide together."""

import json
import sys
import threading

import pytest

from support import strangers
from support.commands import own_lines
from support.processes import ended, killed_at_end, listening, start_group
from support.two_users import needs_root

attack = pytest.fixture(strangers.starter)
root = pytest.fixture(needs_root, autouse=True)
MARK = "words-of-the-run"

DECIDE = f"""
import sys, time
from jaxscale import cluster
def main():
  with cluster.open_session():
    import jax
    for turn in range(200):
      value = [turn, {MARK!r}]
      assert cluster.from_leader(value) == value, turn
      assert cluster.gather([jax.process_index(), *value]) == [[i, *value] for i in range(2)], turn
      cluster.barrier(f"{{turn}}")
      time.sleep(0.005)
    print("agreed", flush=True)
  return 0
from jaxscale.errors import one_line_errors
sys.exit(one_line_errors(main)())
"""


def end_under_attack(processes, stranger):
  """Tell the stranger every port of the processes; return their ends, and what it has heard."""
  seen: set[tuple[str, int]] = set()
  has_ended = threading.Event()

  def tell():
    while not has_ended.wait(0.002):
      for place in listening([process.pid for process in processes]) - seen:
        seen.add(place)
        stranger.stdin.write(f"{place[0]} {place[1]}\n")
        stranger.stdin.flush()

  teller = threading.Thread(target=tell)
  teller.start()
  with killed_at_end(*processes):
    ends = ended(processes)
  has_ended.set()
  teller.join()
  assert len(seen) >= 2  # the rendezvous and others
  stranger.stdin.close()
  stranger.stdin = None
  return ends, "".join(json.loads(stranger.communicate(timeout=240)[0]))


def test_what_processes_decide_is_neither_read_nor_changed(attack):
  stranger = attack("peer")
  ends, heard = end_under_attack(start_group([sys.executable, "-c", DECIDE]), stranger)
  assert MARK not in heard
  for out, err, code in ends:
    assert code == 0 and own_lines(out) == ["agreed"], err
    assert "Error" not in err


TRAIN = "-m jaxscale train --config configs/digits.py --config.log.every_steps=1 --workdir".split()


@pytest.mark.slow
def test_what_a_training_run_decides_is_neither_read_nor_changed(attack, tmp_path):
  """Gloo is open: its peer may end the run, which is one line, but decides nothing."""
  stranger = attack("peer")
  command = [sys.executable, *TRAIN, str(tmp_path / "run")]
  ends, heard = end_under_attack(start_group(command), stranger)
  # Words of what `from_leader`, `gather` and `barrier` send.
  words = str(tmp_path), "from leader", "gather", "barrier", "lock", "versions", "forged"
  assert not [word for word in words if word in heard]
  codes = {code for _, _, code in ends}
  assert codes in ({0}, {1})
  for _, err, code in ends:
    assert "JSONDecodeError" not in err and "UnicodeDecodeError" not in err
    assert "Traceback" not in err or code == 0, err
  errors = [line for line in ends[0][1].splitlines() if line.startswith("error: ")]
  assert len(errors) == (codes == {1}), ends[0][1]
