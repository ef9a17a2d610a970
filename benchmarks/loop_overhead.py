"""What the loop costs: jaxscale's loop against a bare loop of the same step.

    python benchmarks/loop_overhead.py

Both run the same compiled step of about 5 ms, in turns, and wait for the
device at the end of a turn. The bare loop calls it on one batch that is there
already; ours draws, augments and transfers a new batch each step, looks at
every step's metrics and writes the log files. `ratio` is the median over turns.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from common import report

from jaxscale import build, data, loop, metrics
from jaxscale.mesh import batch_sharding
from jaxscale.overrides import load_config
from jaxscale.state import init_state

STEPS, TURNS = 200, 9
SETTINGS = {"model.features": "(48, 96)"}


def main() -> None:
  experiment = build.experiment(load_config("configs/digits.py", SETTINGS))
  config, mesh = experiment.config, experiment.mesh
  parts = experiment.model.init, experiment.tx, mesh, experiment.exchange
  state = init_state(*parts, average=True)
  train_step = experiment.train_step
  batches = data.train_batches(experiment.train_data, config.batch_size)
  fixed = jax.device_put(next(batches), batch_sharding(mesh))
  state, _ = train_step(state, fixed)

  def bare(state):
    for _ in range(STEPS):
      state, _ = train_step(state, fixed)
    return jax.block_until_ready(state)

  def ours(state, workdir):
    progress = metrics.Progress(STEPS, config.batch_size, quiet=True)
    writer = metrics.MetricWriter(workdir)

    def log(step, values):
      rate = progress.train(step, values)
      writer.write(step, values | {"examples_per_s": rate})

    events = loop.Events(
      is_logged=lambda step: step % config.log.every_steps == 0,
      is_evaluated=lambda step: False,
      is_saved=lambda step: False,
      log=log,
      evaluate=lambda step, state: {},
      save=lambda step, state, values: None,
      should_stop=lambda step: False,
    )
    state, _ = loop.train(state, train_step, feed, events, start=0, total_steps=STEPS)
    writer.close()
    return jax.block_until_ready(state)

  feed = data.to_device(batches, mesh)
  ratios, steps_ms = [], []
  with tempfile.TemporaryDirectory() as scratch:
    for turn in range(TURNS + 1):
      clock = time.perf_counter()
      state = bare(state)
      bare_s = time.perf_counter() - clock
      folder = Path(scratch, str(turn))
      folder.mkdir()
      clock = time.perf_counter()
      state = ours(state, folder)
      ours_s = time.perf_counter() - clock
      if turn:  # the first warms up caches and imports
        ratios.append(ours_s / bare_s)
        steps_ms.append(1000 * bare_s / STEPS)
  report(
    "loop_overhead",
    ratio=round(statistics.median(ratios), 4),
    ratios=[round(r, 4) for r in ratios],
    bare_step_ms=round(statistics.median(steps_ms), 2),
    steps=STEPS,
  )


if __name__ == "__main__":
  main()
