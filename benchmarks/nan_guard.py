"""Cost of skipping steps with NaN or Inf: a healthy step with and without the check.

    python benchmarks/nan_guard.py

The same step of one device, about 20 ms on one core, compiled with `skip_bad_steps` and
without, in turns. What is compared is processor time of one thread, which other
work on the machine disturbs less than the clock. `ratio` is the median over turns;
`copies` counts those in the compiled programs, `temp_mb` is what they need next to
their arguments.
"""

from __future__ import annotations

import os
import statistics
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"

import jax
import numpy as np
from common import report

from jaxscale import models, optim
from jaxscale.exchange import plain
from jaxscale.exchange.buckets import bucketed
from jaxscale.exchange.one_bit import one_bit
from jaxscale.mesh import batch_sharding, make_mesh
from jaxscale.training import losses
from jaxscale.training.state import init_state
from jaxscale.training.step import make_train_step
from jaxscale.training.types import StepOptions

STEPS, TURNS = 3, 40
AXES = ("replica", "data")
RATE = optim.warmup_cosine(0.05, 10, 10_000)
CASES = {
  "CNN, SGD": ("cnn", optim.sgd(RATE), plain(AXES)),
  "CNN, AdamW, buckets": ("cnn", optim.adamw(RATE), bucketed(AXES)),
  "MLP, LARS": ("mlp", optim.lars(RATE), plain(AXES)),
  "CNN, SGD, 1-bit": ("cnn", optim.sgd(RATE), one_bit(AXES, num_devices=1)),
}


def model(name: str) -> tuple[models.ModelFns, int]:
  """Return a model of the digits, and the number of rows that take about 20 ms."""
  if name == "cnn":
    module, rows = models.CNNModule(num_classes=10, features=(24, 48)), 448
  else:
    module, rows = models.MLPModule(num_classes=10, hidden=(512, 512)), 768
  return models.functions(module, (8, 8, 1)), rows


def main() -> None:
  mesh = make_mesh(devices=jax.devices()[:1])
  results = {}
  for case, (name, tx, exchange) in CASES.items():
    fns, rows = model(name)
    loss = losses.classification_loss(fns.apply)
    rng = np.random.default_rng(0)
    batch = {
      "image": rng.integers(0, 17, (rows, 8, 8, 1)).astype(np.uint8),
      "label": rng.integers(0, 10, rows).astype(np.int32),
    }
    batch = jax.device_put(batch, batch_sharding(mesh))
    runs, programs = {}, {}
    for skips in (False, True):
      state = init_state(fns.init, tx, mesh, exchange)
      step = (
        make_train_step(loss, tx, mesh, exchange, options=StepOptions(skip_bad_steps=skips))
        .lower(state, batch)
        .compile()
      )  # pyright: ignore
      runs[skips], programs[skips] = (step, state), step
    seconds = {False: [], True: []}
    for turn in range(TURNS + 1):
      for skips in ((False, True), (True, False))[turn % 2]:
        step, state = runs[skips]
        clock = time.process_time()
        for _ in range(STEPS):
          state, _ = step(state, batch)
        jax.block_until_ready(state)
        spent = time.process_time() - clock
        runs[skips] = step, state
        if turn:  # the first warms up
          seconds[skips].append(spent / STEPS)
    ratios = [b / a for a, b in zip(*seconds.values(), strict=True)]
    results[case] = {
      "ratio": round(statistics.median(ratios), 4),
      "ratio_of_least": round(min(seconds[True]) / min(seconds[False]), 4),
      "step_ms": round(1000 * statistics.median(seconds[False]), 2),
      "parameters": sum(x.size for x in jax.tree.leaves(state.params)),
      "copies": [p.as_text().count(" copy(") for p in programs.values()],
      "temp_mb": [
        round(p.memory_analysis().temp_size_in_bytes / 1e6, 3) for p in programs.values()
      ],
    }
    print(case, results[case], file=sys.stderr, flush=True)
  report("nan_guard", cases=results, steps=STEPS, turns=TURNS)


if __name__ == "__main__":
  main()
