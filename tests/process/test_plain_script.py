"""`launch/plain.py`: a script that calls `jax.distributed.initialize` itself."""

import sys

import pytest

from support.commands import child_env, own_lines, run_python
from support.processes import free_port, killed_at_end, popen


def check(out, processes):
  first, *_, last = own_lines(out)
  assert first == f"processes: {processes}, devices: {processes}"
  assert float(last.removeprefix("validation accuracy ")) > 0.95


def test_one_process_trains():
  done = run_python("launch/plain.py")
  assert done.returncode == 0, done.stderr
  check(done.stdout, 1)


@pytest.mark.slow
def test_two_processes_connect_and_train():
  job = dict(JAX_COORDINATOR_ADDRESS=f"127.0.0.1:{free_port()}", NUM_PROCESSES="2")
  command = sys.executable, "launch/plain.py"
  both = [popen(*command, env=child_env(1, PROCESS_ID=str(i), **job)) for i in range(2)]
  with killed_at_end(*both):
    (out, _), (other, err) = (process.communicate(timeout=240) for process in both)
  check(out, 2)
  assert own_lines(other) == [] and both[1].returncode == 0, err
