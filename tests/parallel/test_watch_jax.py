"""The watch around JAX itself: its collectives, its errors and its exit barrier."""

import re
import signal
import socket
import time

import pytest

from support.commands import child_env
from support.processes import line_of
from support.watched import CALM

pytestmark = pytest.mark.slow

TRAIN = """
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_enable_preemption_service", False)  # as `rendezvous.join`
jax.distributed.initialize(f"127.0.0.1:{sys.argv[5]}", n, rank)
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((n,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
rows = NamedSharding(mesh, P("data"))
add = lambda w, x: w + jnp.mean(x @ x.T)
step_fn = jax.jit(add, out_shardings=NamedSharding(mesh, P()))
w_, fault = jnp.zeros(()), sys.argv[6]
for step in range(1, 10**6):
  w.at(step, "input")
  x = jax.make_array_from_process_local_data(rows, np.ones((4, 8), np.float32))
  if step == 100:
    print("up", flush=True)
  if step >= 150 and rank == n - 1:
    if fault == "raise":
      raise ValueError("no such class")
    if fault == "sleep":
      time.sleep(1000)
    if fault == "exit":
      sys.exit(0)
  w.at(step, "step")
  w_ = step_fn(w_, x)
  w_.block_until_ready()
"""


LINES = {
  "kill": r"process 2 on n2 died, last seen in step \d+",
  "kill 0": r"process 0 on n0 died \(.*\), noticed in step \d+",
  "raise": r"process 2 on n2 failed in step 150 \(input\): ValueError: no such",
  "sleep": r"process 2 on n2 hangs in step 150 \(input\) for \d+ s; 2 others wait",
  "stop": r"process 2 on n2 has sent no heartbeat for \d+ s",
  "exit": r"process 2 on n2 exited after step 150 while others continue",
}


@pytest.mark.parametrize("fault", LINES)
def test_all_leave_soon_and_name_the_culprit(family, tmp_path, fault):
  with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
  # Limits that a machine which is busy with other tests keeps in health.
  limits = str(CALM | {"heartbeat_timeout_s": 6, "hang_timeout_s": 9})
  options = {"args": (str(port), fault), "limits": limits, "env": child_env()}
  processes = family(TRAIN, TRAIN, TRAIN, **options)
  assert [line_of(process) for process in processes] == ["up"] * 3
  time.sleep(0.5)
  victim = processes[0 if fault.endswith("0") else 2]
  if fault.startswith("kill"):
    victim.kill()
  if fault == "stop":
    victim.send_signal(signal.SIGSTOP)
  began = time.monotonic()
  others = [p for p in processes if p is not victim]
  errors = [p.communicate(timeout=300)[1] for p in others]
  seconds = time.monotonic() - began
  assert seconds < 200  # JAX's own exit barrier takes 300 s
  assert any(re.search(LINES[fault], error) for error in errors), errors
  assert {p.returncode for p in others} == {86 if fault in ("sleep", "stop") else 1}, errors
  for rank in range(1 if victim is processes[0] else 0, 2):
    assert (tmp_path / "faults" / f"process-{rank}.txt").exists()
