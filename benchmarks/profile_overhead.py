"""Cost of traces: a run without a trace against a run that is being traced.

    python benchmarks/profile_overhead.py

The loop runs the same compiled step, in turns: without a tracer, as `training.loop` has
it; with the tracer of a run of which no trace is asked, which looks for a request once
a second; and with all of its steps traced. Each turn waits for the device at its end,
and the writing of the trace is timed apart. `ratio` and `ratio_traced` are medians over
turns; `host_us` is what the tracer's calls take per step, timed alone. All is processor
time of the process, so that other load on the machine counts little.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from common import report

from jaxscale import data
from jaxscale.config import Log
from jaxscale.config.loading import load_config
from jaxscale.experiment import build
from jaxscale.mesh import batch_sharding
from jaxscale.run.tracer import Tracer
from jaxscale.training import loop

STEPS, TURNS, CALLS = 50, 60, 20_000
SETTINGS = {"model.features": "(48, 96)"}


def main() -> None:
  experiment = build.experiment(load_config("configs/digits.py", SETTINGS))
  state, train_step = experiment.init_state(), experiment.train_step
  batches = data.train_batches(experiment.train_data, experiment.config.batch_size)
  fixed = jax.device_put(next(batches), batch_sharding(experiment.mesh))
  seconds: dict[str, list[float]] = {"bare": [], "idle": [], "traced": []}
  writing, sizes = [], []

  def turn(name: str, callbacks: loop.LoopControl) -> None:
    nonlocal state
    clock = time.process_time()
    state, _ = loop.train(
      state, train_step, itertools.repeat(fixed), callbacks, start=0, total_steps=STEPS
    )
    jax.block_until_ready(state)
    seconds[name].append(time.process_time() - clock)

  for _ in range(TURNS + 1):
    turn("bare", loop.LoopControl())
    for name in ("idle", "traced"):
      profile = f"1:{STEPS}" if name == "traced" else None
      with tempfile.TemporaryDirectory() as scratch:
        tracer = Tracer(Path(scratch), Log(profile=profile))
        turn(name, callbacks_of(tracer))
        clock = time.process_time()
        tracer.finish()
        writing.append(time.process_time() - clock)
        files = Path(scratch).rglob("*.xplane.pb")
        sizes += [path.stat().st_size for path in files]

  def pairs(name: str) -> list[float]:  # the first turn warms up
    turns = zip(seconds[name][1:], seconds["bare"][1:], strict=True)
    return [with_it / bare for with_it, bare in turns]

  def ratio(name: str) -> float:
    return round(statistics.median(pairs(name)), 4)

  report(
    "profile_overhead",
    ratio=ratio("idle"),
    ratio_traced=ratio("traced"),
    spread=round(statistics.quantiles(pairs("idle"))[2] - ratio("idle"), 4),
    host_us=round(host_us(), 3),
    write_s=round(statistics.median(writing[3::2]), 3),
    mb_per_step=round(statistics.median(sizes) / STEPS / 1e6, 3),
    step_ms=round(1e3 * statistics.median(seconds["bare"]) / STEPS, 2),
    steps=STEPS,
    turns=TURNS,
  )


def callbacks_of(tracer: Tracer) -> loop.LoopControl:
  return loop.LoopControl(at=tracer.at, is_traced=tracer.is_due, trace=tracer.turn)


def host_us() -> float:
  """Return the microseconds of the tracer's three calls in an untraced step, the best of five."""
  found = []
  with tempfile.TemporaryDirectory() as scratch:
    tracer = Tracer(Path(scratch), Log())
    for _ in range(5):
      clock = time.process_time()
      for step in range(1, CALLS + 1):
        tracer.is_due(step)
        tracer.at(step, "input")
        tracer.at(step, "step")
      found.append(time.process_time() - clock)
  return 1e6 * min(found) / CALLS


if __name__ == "__main__":
  main()
