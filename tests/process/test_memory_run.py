"""The memory that a run reports is what its compiled step says, and the process has."""

import json

import pytest

from support.commands import run_python

# 271 MB of parameters, as many of momentum and gradients, and little else.
STEPS = """
import gc
import json
import time
from pathlib import Path
import jax
from jaxscale import config as cfg
from jaxscale.experiment import build
from jaxscale.run import efficiency, train_phases

config = cfg.Config(
  model=cfg.MLP(hidden=(8192, 8192)), data=cfg.Digits(), optimizer=cfg.SGD(lr=0.1),
  schedule=cfg.Cosine(), batch_size=8, epochs=1,
)
experiment = build.experiment(config)
step = experiment.compile_train_step()
batches = train_phases.train_batches(experiment, 0)

def settled_memory():
  # XLA's threads free what a program leaves: wait until nothing changes any more.
  seen = []
  while len(seen) < 5 or len(set(seen[-5:])) > 1:
    assert len(seen) < 1000, f"memory never settles: {seen[-5:]}"
    time.sleep(0.1)
    seen.append(round(efficiency._memory()["memory_gb"], 2))
  return seen[-1]

def train(steps):
  state = jax.block_until_ready(experiment.init_state())
  settled_memory()
  Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
  for _ in range(steps):
    state, metrics = step(state, next(batches))
    jax.block_until_ready(metrics)

train(1)  # all that is loaded and kept
gc.collect()
before = settled_memory()
train(3)
after = efficiency._memory()
program = efficiency.read_program(step).memory / 1e9
print(json.dumps([before, after["peak_memory_gb"], program]))
"""


@pytest.mark.slow
def test_a_cpu_s_memory_is_that_of_the_program():
  done = run_python("-c", STEPS)
  assert done.returncode == 0, done.stderr
  before_gb, peak_gb, program_gb = json.loads(done.stdout.splitlines()[-1])
  assert program_gb > 3 * 4 * (64 * 8192 + 8192**2 + 8192 * 10) / 1e9
  assert peak_gb - before_gb == pytest.approx(program_gb, rel=0.1)
