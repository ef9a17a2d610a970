"""Cost of trackers to the loop, with a network and without.

    python benchmarks/trackers.py

Needs the extras wandb and mlflow. One compiled step of about 5 ms, logged
every tenth time; each tracker in turns with a writer that has none, after it has been
opened, or has begun to try. `rate` is the median over pairs of turns of the rate with
the tracker as a share of that without; `lines` is what metrics.jsonl has of all that
were logged.
"""

from __future__ import annotations

import itertools
import os
import socket
import statistics
import tempfile
import time
from importlib import metadata
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from common import report

from jaxscale import config, data, metrics
from jaxscale.config.bases import TrackerContext
from jaxscale.config.loading import load_config
from jaxscale.experiment import build
from jaxscale.mesh import batch_sharding
from jaxscale.training import loop

STEPS, TURNS, EVERY = 100, 20, 10
OPENING_S = 15.0  # the imports of the slowest, and of one without a route some tries
SETTINGS = {"model.features": "(48, 96)"}
FLUSH_S = 1.0


class Hangs(config.Tracker):
  """Tracker that never returns."""

  def build(self, context: TrackerContext):
    """Sleep for days."""
    time.sleep(1e6)


def trackers(dead: str) -> dict[str, config.Tracker]:
  """Return trackers by name; nothing listens on the address `dead`."""
  return {
    "wandb, offline": config.Wandb(flush_s=FLUSH_S),
    "mlflow, files": config.MLflow(flush_s=FLUSH_S),
    "mlflow, no route": config.MLflow(flush_s=FLUSH_S, uri=dead),
    "one that hangs": Hangs(flush_s=FLUSH_S),
    "wandb online, no route": config.Wandb(flush_s=FLUSH_S, mode="online"),
  }


def writer(folder: Path, tracker: config.Tracker | None) -> metrics.MetricWriter:
  def opened(note):
    assert tracker is not None
    facts = {"seed": 0}, {"commit": None}, note
    return tracker.build(TrackerContext("run-1", "run", folder, *facts))

  sources = [metrics.TrackerSource("it", opened, FLUSH_S)] if tracker else []
  folder.mkdir()
  return metrics.MetricWriter(folder, tensorboard=False, trackers=sources)


def main() -> None:
  experiment = build.experiment(load_config("configs/digits.py", SETTINGS))
  batches = data.train_batches(experiment.train_data, experiment.config.batch_size)
  fixed = jax.device_put(next(batches), batch_sharding(experiment.mesh))
  train_step, state = experiment.train_step, experiment.init_state()
  state, _ = train_step(state, fixed)

  def train(state, to, turn):
    """Return the state after a turn, and the steps per second."""
    callbacks = loop.LoopControl(
      is_logged=lambda step: step % EVERY == 0,
      log=lambda step, values: to.write(turn * STEPS + step, values),
    )
    clock = time.perf_counter()
    feed = itertools.repeat(fixed)
    state, _ = loop.train(state, train_step, feed, callbacks, start=0, total_steps=STEPS)
    jax.block_until_ready(state)
    return state, STEPS / (time.perf_counter() - clock)

  shares, lines = {}, set()
  with socket.socket() as listener, tempfile.TemporaryDirectory() as scratch:
    listener.bind(("127.0.0.1", 0))  # and never listens
    dead = f"http://127.0.0.1:{listener.getsockname()[1]}"
    for i, (name, tracker) in enumerate(trackers(dead).items()):
      if "online" in name:
        os.environ |= {"HTTPS_PROXY": dead, "WANDB_API_KEY": "0" * 40}
      with_it = writer(Path(scratch) / f"{i}-with", tracker)
      without = writer(Path(scratch) / f"{i}-without", None)
      state, _ = train(state, with_it, 0)
      time.sleep(OPENING_S)
      rates = []
      for turn in range(1, TURNS + 1):
        state, alone = train(state, without, turn)
        state, rate = train(state, with_it, turn)
        rates.append(rate / alone)
      with_it.close()
      without.close()
      shares[name] = rates
      lines.add(len(metrics.read_metrics(Path(scratch) / f"{i}-with/metrics.jsonl")))
  report(
    "trackers",
    rate={name: round(statistics.median(r), 3) for name, r in shares.items()},
    turns={name: [round(x, 3) for x in r] for name, r in shares.items()},
    lines=sorted(lines),
    versions={p: metadata.version(p) for p in ("wandb", "mlflow-skinny")},
  )
  os._exit(0)  # wandb's own wait at exit, without a route


if __name__ == "__main__":
  main()
