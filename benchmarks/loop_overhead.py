"""Overhead of the loop: jaxscale's loop against a bare loop of the same step.

    python benchmarks/loop_overhead.py

All run the same compiled step of about 5 ms, in turns, and wait for the
device at the end of a turn. The bare loop calls it on one batch that is on the
device already. `ratio` is that of our loop on the same batch: it reads and
checks every step's metrics and writes the log files. `ratio_with_input` is that
of our loop drawing, augmenting and transferring a new batch each step, on the
cores that the step computes on too. Both are medians over turns.
"""

from __future__ import annotations

import functools
import itertools
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from common import report

from jaxscale import data, metrics
from jaxscale.config.loading import load_config
from jaxscale.experiment import build
from jaxscale.mesh import batch_sharding
from jaxscale.training import loop

STEPS, TURNS = 100, 40
SETTINGS = {"model.features": "(48, 96)"}


def main() -> None:
  experiment = build.experiment(load_config("configs/digits.py", SETTINGS))
  config, mesh = experiment.config, experiment.mesh
  state = experiment.init_state()
  train_step = experiment.train_step
  batches = data.train_batches(experiment.train_data, config.batch_size)
  fixed = jax.device_put(next(batches), batch_sharding(mesh))
  state, _ = train_step(state, fixed)

  def bare(state):
    for _ in range(STEPS):
      state, _ = train_step(state, fixed)
    return jax.block_until_ready(state)

  rows = config.batch_size
  progress = metrics.Progress(STEPS, total_examples=STEPS * rows, quiet=True)

  def ours(state, feed, writer):
    def log(step, values):
      rate = progress.rate(step * rows)
      perf = {"examples_per_s": rate, "step_s": rows / rate}
      progress.train(step, values, perf)
      writer.write(step, values | perf)

    callbacks = loop.LoopControl(is_logged=lambda step: step % config.log.every_steps == 0, log=log)
    state, _ = loop.train(state, train_step, feed, callbacks, start=0, total_steps=STEPS)
    return jax.block_until_ready(state)

  feeds = {"ratio": itertools.repeat(fixed), "ratio_with_input": data.to_device(batches, mesh)}
  ratios, steps_ms = {name: [] for name in feeds}, []
  with tempfile.TemporaryDirectory() as scratch:
    writer = metrics.MetricWriter(Path(scratch))
    for turn in range(TURNS + 1):
      for name, feed in feeds.items():
        seconds = []
        for run in (bare, functools.partial(ours, feed=feed, writer=writer)):
          clock = time.perf_counter()
          state = run(state)
          seconds.append(time.perf_counter() - clock)
        if turn:  # the first warms up caches and imports
          ratios[name].append(seconds[1] / seconds[0])
          steps_ms.append(1000 * seconds[0] / STEPS)
    writer.close()
  report(
    "loop_overhead",
    **{name: round(statistics.median(values), 4) for name, values in ratios.items()},
    turns={name: [round(r, 3) for r in values] for name, values in ratios.items()},
    bare_step_ms=round(statistics.median(steps_ms), 2),
    steps=STEPS,
  )


if __name__ == "__main__":
  main()
