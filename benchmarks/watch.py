"""Cost of the watch: steps of a watched run against those of an unwatched one.

    python benchmarks/watch.py [--procs 4] [--turns 41] [--steps 50]

Two runs of the same processes and the same data-parallel step stand side by side:
one has joined by `cluster.open_session` (heartbeats, stop consensus, signals,
the lock, and the loop's notes of where it is), the other by JAX alone, with a loop
that notes nothing. They train in turns, one waits while the other trains. `wall` is
the ratio of their times, turn by turn; `processor` that of the processor time that all
processes took, which other work on the machine disturbs less. Where all cores are
busy, as here, one comes to the other.

Both are as noisy as the machine. So the parts are measured, too: `notes_us` is what the
loop's notes and the question whether to stop take of a step, `idle_processor` the
processor seconds a second of all processes that train nothing, watched and not, and
`direct` the share of a step that both come to.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from pathlib import Path
from typing import Any

from common import report

MARK = "@"
IDLE_S = 10.0
ROWS, HIDDEN = 2048, (256, 256)  # a step of about 20 ms, four processes on two cores


def worker(kind: str, steps: int, workdir: Path) -> None:
  """Join, compile, then train on each line of stdin and print the time."""
  from jaxscale import cluster
  from jaxscale.checkpoint import lock

  with contextlib.ExitStack() as stack:
    if kind == "watched":
      watch = stack.enter_context(cluster.open_session(folder=workdir / "faults"))
    else:
      watch = None
      join_plainly()
    import jax

    if watch and jax.process_index() == 0:
      stack.enter_context(lock.acquire(workdir))
    train = trainer(watch, steps)
    train()
    answer({})
    for line in sys.stdin:
      if line == "idle\n":
        answer(idle(watch))
        continue
      clock, cpu = time.perf_counter(), time.process_time()
      train()
      answer({"wall": time.perf_counter() - clock, "cpu": time.process_time() - cpu})


def idle(watch: Any) -> dict[str, float]:
  """Return the time of the watch's threads without training, and of the loop's notes."""
  cpu = time.process_time()
  time.sleep(IDLE_S)
  taken = (time.process_time() - cpu) / IDLE_S

  def note() -> None:
    watch.at(1, "input")
    watch.at(1, "step")
    watch.stop.poll()

  notes = min(timeit.repeat(note, number=10_000, repeat=5)) / 1e4 if watch else 0.0
  return {"wall": notes, "cpu": taken}


def join_plainly() -> None:
  """Join the other processes with JAX alone."""
  import jax

  jax.distributed.initialize(
    os.environ["JAXSCALE_COORDINATOR"],
    int(os.environ["JAXSCALE_NUM_PROCESSES"]),
    int(os.environ["JAXSCALE_PROCESS_ID"]),
  )


def trainer(watch: Any, steps: int) -> Any:
  """Return a function that trains a stretch of steps."""
  import jax
  import numpy as np

  from jaxscale import models, optim
  from jaxscale.exchange.buckets import bucketed
  from jaxscale.mesh import batch_sharding, make_mesh
  from jaxscale.training import loop, losses
  from jaxscale.training.state import init_state
  from jaxscale.training.step import make_train_step
  from jaxscale.training.types import StepOptions

  mesh, rate = make_mesh(), optim.warmup_cosine(0.05, 10, 10_000)
  fns = models.functions(models.MLPModule(num_classes=10, hidden=HIDDEN), (8, 8, 1))
  tx, exchange = optim.sgd(rate), bucketed(tuple(mesh.axis_names))
  loss = losses.classification_loss(fns.apply)
  rng, rows = np.random.default_rng(0), ROWS // mesh.size
  batch = jax.tree.map(
    lambda x: jax.make_array_from_process_local_data(batch_sharding(mesh), x),
    {
      "image": rng.integers(0, 17, (rows, 8, 8, 1)).astype(np.uint8),
      "label": rng.integers(0, 10, rows).astype(np.int32),
    },
  )
  state = init_state(fns.init, tx, mesh, exchange)
  options = StepOptions(skip_bad_steps=True)
  step = make_train_step(loss, tx, mesh, exchange, options=options)
  done = 0

  def should_stop(_: int) -> bool:
    return watch.stop.poll() is not None

  callbacks = loop.LoopControl()
  if watch:
    callbacks = loop.LoopControl(should_stop=should_stop, at=watch.at)

  def train() -> None:
    nonlocal state, done
    batches = itertools.repeat(batch)
    total = done + steps
    state, done = loop.train(state, step, batches, callbacks, start=done, total_steps=total)
    jax.block_until_ready(state)

  return train


def answer(value: Any) -> None:
  print(MARK + json.dumps(value), flush=True)


@contextlib.contextmanager
def group(kind: str, asked: argparse.Namespace, workdir: Path):
  """Return the processes of one run once they have compiled."""
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    port = s.getsockname()[1]
  started = []
  try:
    for i in range(asked.procs):
      env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
        "JAXSCALE_COORDINATOR": f"127.0.0.1:{port}",
        "JAXSCALE_NUM_PROCESSES": str(asked.procs),
        "JAXSCALE_PROCESS_ID": str(i),
      }
      command = [sys.executable, __file__, "--worker", kind, "--steps"]
      command += [str(asked.steps), "--workdir", str(workdir)]
      pipe = subprocess.PIPE
      started.append(subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True))
    read(started)
    yield started
  finally:
    for process in reversed(started):  # the coordinator after those who watch it
      process.kill()
      process.wait()


def read(started: list[Any]) -> list[dict[str, float]]:
  """Return the next answer of each process."""
  found = []
  for process in started:
    line = next((x for x in process.stdout if x.startswith(MARK)), None)
    if line is None:
      raise SystemExit(f"a process ended with {process.wait()}: see above")
    found.append(json.loads(line.removeprefix(MARK)))
  return found


def turn_of(started: list[Any], what: str = "go") -> tuple[float, float]:
  """Return the wall seconds of a turn, and the processor seconds of all processes."""
  for process in started:
    process.stdin.write(what + "\n")
    process.stdin.flush()
  reported = read(started)
  return max(s["wall"] for s in reported), sum(s["cpu"] for s in reported)


def quartiles(values: list[float]) -> list[float]:
  return [round(q, 4) for q in statistics.quantiles(values, n=4)]


def main() -> None:
  parser = argparse.ArgumentParser(description="What it costs to be watched.")
  parser.add_argument("--procs", type=int, default=4)
  parser.add_argument("--turns", type=int, default=41)
  parser.add_argument("--steps", type=int, default=50)
  parser.add_argument("--worker", help=argparse.SUPPRESS)
  parser.add_argument("--workdir", type=Path, help=argparse.SUPPRESS)
  asked = parser.parse_args()
  if asked.worker:
    worker(asked.worker, asked.steps, asked.workdir)
    return
  with (
    tempfile.TemporaryDirectory() as workdir,
    group("plain", asked, Path(workdir)) as plain,
    group("watched", asked, Path(workdir)) as watched,
  ):
    times: dict[str, list[tuple[float, float]]] = {"plain": [], "watched": []}
    runs = {"plain": plain, "watched": watched}
    for turn in range(asked.turns + 1):
      for kind in list(runs)[:: 1 if turn % 2 else -1]:
        seconds = turn_of(runs[kind])
        if turn:  # the first warms up
          times[kind].append(seconds)
    (notes, ours), (_, theirs) = (turn_of(runs[k], "idle") for k in ("watched", "plain"))
  step_s = statistics.median(w for w, _ in times["plain"]) / asked.steps
  # Threads of all processes share the cores with all of their steps.
  share = (ours - theirs) / (os.cpu_count() or 1) + notes / step_s
  pairs = list(zip(times["watched"], times["plain"], strict=True))
  report(
    "watch",
    procs=asked.procs,
    turns=asked.turns,
    steps=asked.steps,
    step_ms=round(1e3 * step_s, 2),
    notes_us=round(1e6 * notes, 2),
    idle_processor=[round(ours, 5), round(theirs, 5)],
    direct=round(share, 5),
    wall=quartiles([a[0] / b[0] for a, b in pairs]),
    processor=quartiles([a[1] / b[1] for a, b in pairs]),
  )


if __name__ == "__main__":
  main()
