"""Steps of two processes on CPUs under SCHED_BATCH and under SCHED_OTHER, in turns.

    python benchmarks/batch_policy.py            (Linux, two cores)

Each process has a core; then both share two. `cluster/cpu_settings.py` sets the policy.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

from common import free_address, report

MARK, PROCS = "@policy ", 2
TURNS, STEPS = 7, 10


def cases() -> dict[str, Any]:
  """Return the configs whose steps are timed, by name."""
  from jaxscale import config as cfg

  images = cfg.Synthetic(num_examples=256, image_size=32)
  common: Any = {"schedule": cfg.Cosine(), "epochs": 100}
  return {
    "mlp plain": cfg.Config(
      model=cfg.MLP(hidden=(768, 512)),
      data=images,
      batch_size=128,
      optimizer=cfg.SGD(lr=0.1),
      **common,
    ),
    "cnn plain": cfg.Config(
      model=cfg.CNN(batch_norm=True),
      data=images,
      batch_size=64,
      optimizer=cfg.SGD(lr=0.1),
      **common,
    ),
    "text fsdp": cfg.Config(
      model=cfg.Transformer(width=128, hidden=384, num_layers=2),
      data=cfg.Text(sequence_length=128),
      batch_size=16,
      optimizer=cfg.AdamW(lr=1e-3),
      layout=cfg.Layout(shard="fsdp"),
      mesh=cfg.Mesh(data=1, fsdp=PROCS),
      **common,
    ),
  }


def stepper(config: Any) -> Callable[[int], float]:
  """Return a function that takes steps and returns the seconds of each, on average."""
  import jax

  from jaxscale import data
  from jaxscale.experiment.build import experiment

  built = experiment(config, devices=jax.devices())
  state, step = built.init_state(), built.compile_train_step()
  rows = built.phase.batch_size
  batch = next(data.train_batches(built.train_data, rows, position=0, seed=0))
  placed: dict[str, Any] = {
    name: jax.make_array_from_callback(
      x.shape, built.abstract_batch()[name].sharding, lambda index, x=x: x[index]
    )
    for name, x in batch.items()
  }

  def some(count: int) -> float:
    nonlocal state
    began = time.perf_counter()
    for _ in range(count):
      state, metrics = step(state, placed)
      jax.block_until_ready(metrics)
    return (time.perf_counter() - began) / count

  some(2)
  return some


def worker(pinned: bool) -> None:
  """Time all cases under both policies, as one of the two processes."""
  from jaxscale import cluster

  if pinned:
    os.sched_setaffinity(0, {int(os.environ["JAXSCALE_PROCESS_ID"])})
  with cluster.open_session():
    for case, config in cases().items():
      some, seconds = stepper(config), {"SCHED_BATCH": [], "SCHED_OTHER": []}
      for turn in range(2 * TURNS):
        name = list(seconds)[turn % 2]
        for thread in map(int, os.listdir("/proc/self/task")):
          os.sched_setscheduler(thread, getattr(os, name), os.sched_param(0))
        some(2)
        seconds[name].append(max(cluster.gather(some(STEPS))))
      found = {"case": case, "pinned": pinned} | seconds
      print("\n" + MARK + json.dumps(found), flush=True)


def measure(pinned: bool) -> list[dict[str, Any]]:
  """Return the measurements of both processes, by case."""
  address = free_address()
  command = [sys.executable, __file__, "--worker", *["--pinned"] * pinned]
  started = []
  for i in range(PROCS):
    env = {
      "JAX_NUM_CPU_DEVICES": "1",
      "NPROC": "1",
      "JAXSCALE_COORDINATOR": address,
      "JAXSCALE_NUM_PROCESSES": str(PROCS),
      "JAXSCALE_PROCESS_ID": str(i),
    }
    started.append(
      subprocess.Popen(command, env=os.environ | env, stdout=subprocess.PIPE, text=True)
    )
  lines = started[0].communicate()[0].splitlines()
  if any([process.wait() for process in started]):
    raise SystemExit("a process failed: see above")
  return [json.loads(x.removeprefix(MARK)) for x in lines if x.startswith(MARK)]


def main() -> None:
  rows = []
  for found in (*measure(True), *measure(False)):
    batch, other = (statistics.median(found.pop(f"SCHED_{x}")) for x in ("BATCH", "OTHER"))
    row = found | {"batch_ms": round(1e3 * batch, 2), "other_ms": round(1e3 * other, 2)}
    rows.append(row | {"ratio": round(other / batch, 2)})
    print(rows[-1], file=sys.stderr)
  report("batch_policy", rows=rows)


if __name__ == "__main__":
  if "--worker" in sys.argv:
    worker("--pinned" in sys.argv)
  else:
    main()
