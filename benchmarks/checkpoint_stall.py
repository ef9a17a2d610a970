"""Delay that a save adds to the steps after it.

    python benchmarks/checkpoint_stall.py [--processes 2] [--to shared local]
    python benchmarks/checkpoint_stall.py --against CHECKOUT [--directory DIR]

An MLP is trained in stretches of some steps, in turns without a save and with one
after the first step. The state is parameters and momentum in float32. A save is to the
shared checkpoints, or only to copies on the node (`checkpoint.local`); both folders are
in `--directory`.

`call_s` is the time in `Checkpoints.save`, where the loop stands still. `stall_s` is by
how much the stretch with the save took longer than the one without (median and
quartiles). `processor_s` is by how much all processes together computed longer, which
other work on the machine disturbs less. `…_steps` are the same in steps. `written_s` is
how long after the call a process had written its part; `late` counts the stretches that
ended before. Steps, copy, checksums and writing share the cores of one machine here:
where hosts have cores to spare, only the call and the copy remain.

With `--against`, a save from its call to its commit is compared with that of another
checkout, in turns, while nothing is trained: `wall` and `processor` are the quartiles
of the ratio, turn by turn.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import free_address, report
from turns import Side, serve

ROOT = Path(__file__).parent.parent
MARK = "@stall "
# Width and number of hidden layers, by megabytes of state.
SIZES = {100: (1024, 12), 1000: (2048, 30)}


def trainer(width: int, layers: int, rows: int, directory: Path, *, to_local: bool) -> Any:
  """Return a function that trains a stretch of steps, and the bytes of the state."""
  import jax
  import numpy as np

  from jaxscale import models, optim
  from jaxscale.checkpoint.manager import Checkpoints
  from jaxscale.exchange import plain
  from jaxscale.mesh import batch_sharding, make_mesh
  from jaxscale.training import loop, losses
  from jaxscale.training.state import init_state
  from jaxscale.training.step import make_train_step

  mesh = make_mesh()
  module = models.MLPModule(num_classes=10, hidden=(width,) * layers)
  fns = models.functions(module, (8, 8, 1))
  tx, exchange = optim.sgd(1e-3), plain(mesh.axis_names)
  rng = np.random.default_rng(0)
  batch = jax.tree.map(
    lambda x: jax.make_array_from_process_local_data(batch_sharding(mesh), x),
    {
      "image": rng.integers(0, 17, (rows // mesh.size, 8, 8, 1)).astype(np.uint8),
      "label": rng.integers(0, 10, rows // mesh.size).astype(np.int32),
    },
  )
  state = init_state(fns.init, tx, mesh, exchange)
  loss = losses.classification_loss(fns.apply)
  train_step = make_train_step(loss, tx, mesh, exchange)
  copies = {"local": directory, "shared_every": sys.maxsize} if to_local else {}
  shared = directory / "shared"
  checkpoints = Checkpoints(shared, keep_last=1, keep_best=0, **copies)
  done = 0

  def train(steps: int, with_save: bool) -> dict[str, float]:
    nonlocal state, done
    found, first = {"call": 0.0, "written": 0.0}, done + 1
    began, used = time.perf_counter(), time.process_time()

    def save(step, state):
      before = time.perf_counter()
      checkpoints.save(state, is_needed=not to_local)
      ended = time.perf_counter()
      found["call"] = ended - before

      def written(_):
        found["written"] = time.perf_counter() - ended

      saving, copies = checkpoints._saving, checkpoints._local
      work = copies._work if copies else saving.work if saving else None
      assert work is not None
      work.add_done_callback(written)

    def is_saved(step):
      return with_save and step == first

    hooks = [loop.Hook(is_saved, save)]
    options = {"start": done, "total_steps": done + steps}
    feed = itertools.repeat(batch)
    state, done = loop.train(state, train_step, feed, loop.LoopControl(), hooks, **options)
    found["wall"] = time.perf_counter() - began
    found["processor"] = time.process_time() - used
    at_end = dict(found)
    checkpoints.wait()  # nothing is left of it for a stretch without
    return at_end

  size = sum(x.nbytes for x in jax.tree.leaves(state))
  return train, size


def saver(mb: int, directory: Path) -> None:
  """Save on request and answer with the time, as one side of a comparison."""
  import jax
  import numpy as np

  from jaxscale import models, optim
  from jaxscale.checkpoint.manager import Checkpoints
  from jaxscale.exchange import plain
  from jaxscale.mesh import make_mesh
  from jaxscale.training.state import init_state

  mesh, (width, layers) = make_mesh(), SIZES[mb]
  module = models.MLPModule(num_classes=10, hidden=(width,) * layers)
  fns, exchange = models.functions(module, (8, 8, 1)), plain(mesh.axis_names)
  state = jax.block_until_ready(init_state(fns.init, optim.sgd(1e-3), mesh, exchange))
  checkpoints, steps = (Checkpoints(directory, keep_last=1, keep_best=0), itertools.count(1))

  def save() -> tuple[float, float]:
    numbered = state._replace(step=jax.numpy.asarray(next(steps), np.int32))
    began, used = time.perf_counter(), time.process_time()
    checkpoints.save(numbered)
    checkpoints.wait()
    return time.perf_counter() - began, time.process_time() - used

  serve({"save": save}, sum(x.nbytes for x in jax.tree.leaves(state)))


def compare(asked: argparse.Namespace, mb: int) -> dict[str, Any]:
  """Compare the cost of a save with that of another checkout, in turns."""
  took: list[list[tuple[float, float]]] = [[], []]
  with tempfile.TemporaryDirectory(dir=asked.directory) as folder:
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    sides = [
      Side(
        [sys.executable, __file__, "--mb", str(mb), "--side", f"{folder}/{i}"],
        env=env | {"PYTHONPATH": str(checkout)},
      )
      for i, checkout in enumerate((ROOT, asked.against.resolve()))
    ]
    size, _ = [side.wait_ready(600) for side in sides]
    for turn in range(-2, asked.turns):  # the first ones import, and find their memory
      for i in (0, 1) if turn % 2 else (1, 0):
        seconds = sides[i].ask("save", timeout_s=600)
        if turn >= 0:
          took[i].append(seconds)
    for side in sides:
      side.close()
  row: dict[str, Any] = {"state_mb": round(size / 1e6)}
  for i, name in enumerate(("wall", "processor")):
    ours, theirs = ([t[i] for t in side] for side in took)
    row[name] = quartiles([a / b for a, b in zip(ours, theirs, strict=True)])
    row[f"{name}_s"] = [round(statistics.median(x), 3) for x in (ours, theirs)]
  print(row, file=sys.stderr, flush=True)
  return row


def work(asked: argparse.Namespace) -> None:
  """Train in turns, as one process of the run."""
  from jaxscale import cluster

  cluster.initialize()
  (to,) = asked.to
  where = asked.directory
  train, size = trainer(*SIZES[asked.mb], asked.rows, where, to_local=to == "local")
  for with_save in (False, True, True, True):  # compiles, imports, and finds its memory
    train(3, with_save)
  turns = []
  for turn in range(asked.turns):
    order = (False, True) if turn % 2 else (True, False)
    took = {with_save: train(asked.steps, with_save) for with_save in order}
    plain = {f"plain_{name}": took[False][name] for name in ("wall", "processor")}
    turns.append(took[True] | plain)
  print(MARK + json.dumps({"turns": turns, "size": size}), flush=True)


def measure(asked: argparse.Namespace, mb: int, to: str) -> dict[str, Any]:
  """Return the row of the table for a size of the state and a target of the save."""
  processes = asked.processes
  with tempfile.TemporaryDirectory(dir=asked.directory) as folder:
    command = [sys.executable, __file__, "--mb", str(mb), "--directory", folder]
    command += ["--rows", str(asked.rows), "--turns", str(asked.turns)]
    command += ["--to", to]
    command += ["--steps", str(asked.steps if mb >= 1000 else 3 * asked.steps)]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    group = {"JAXSCALE_COORDINATOR": free_address()}
    group |= {"JAXSCALE_NUM_PROCESSES": str(processes)}
    ranks = [group | {"JAXSCALE_PROCESS_ID": str(i)} for i in range(processes)]
    started = [
      subprocess.Popen(command, env=env | rank, text=True, stdout=subprocess.PIPE)
      for rank in (ranks if processes > 1 else [{}])
    ]
    out = [process.communicate()[0] for process in started]
  lines = [next(x for x in o.splitlines() if x.startswith(MARK)) for o in out]
  every = [json.loads(line.removeprefix(MARK)) for line in lines]
  turns, steps = every[0]["turns"], int(command[-1])
  # Processor time is that of all processes, wall time that of the first.
  used = [
    {name: sum(t[name] for t in of_all) for name in ("processor", "plain_processor")}
    for of_all in zip(*(x["turns"] for x in every), strict=True)
  ]
  step_s = statistics.median(t["plain_wall"] for t in turns) / steps
  step_used = statistics.median(u["plain_processor"] for u in used) / steps
  stalls = [t["wall"] - t["plain_wall"] for t in turns]
  more = [u["processor"] - u["plain_processor"] for u in used]
  row = {
    "state_mb": round(every[0]["size"] / 1e6),
    "to": to,
    "processes": processes,
    "steps": steps,
    "step_s": round(step_s, 3),
    "call_s": round(statistics.median(t["call"] for t in turns), 3),
    "stall_s": quartiles(stalls),
    "stall_steps": quartiles([s / step_s for s in stalls]),
    "processor_s": quartiles(more),
    "processor_steps": quartiles([m / step_used for m in more]),
    "written_s": round(statistics.median(t["written"] for t in turns), 2),
    "late": sum(not t["written"] for t in turns),
  }
  print(row, file=sys.stderr, flush=True)
  return row


def quartiles(values: Sequence[float]) -> list[float]:
  return [round(q, 2) for q in statistics.quantiles(values, n=4)]


def main() -> None:
  parser = argparse.ArgumentParser(description="What a save costs the steps after it.")
  parser.add_argument("--rows", type=int, default=64, help="of a batch")
  parser.add_argument("--turns", type=int, default=9)
  parser.add_argument("--steps", type=int, default=10, help="of a stretch, at 1 GB")
  parser.add_argument("--directory", type=Path, help="where checkpoints are written")
  parser.add_argument("--processes", type=int, default=1)
  parser.add_argument("--sizes", type=int, nargs="+", choices=SIZES, default=[*SIZES])
  places = "shared", "local"
  parser.add_argument("--to", nargs="+", choices=places, default=places)
  parser.add_argument("--against", type=Path, help="another checkout")
  parser.add_argument("--mb", type=int, choices=SIZES, help=argparse.SUPPRESS)
  parser.add_argument("--side", type=Path, help=argparse.SUPPRESS)
  asked = parser.parse_args()
  if asked.side:
    saver(asked.mb, asked.side)
    return
  if asked.mb:
    work(asked)
    return
  if asked.against:
    rows = [compare(asked, mb) for mb in asked.sizes]
    report("checkpoint_cost", rows=rows, turns=asked.turns)
    return
  rows = [measure(asked, mb, to) for mb in asked.sizes for to in asked.to]
  name = "checkpoint_stall" + f"_{asked.processes}" * (asked.processes > 1)
  report(name, rows=rows, batch=asked.rows, turns=asked.turns)


if __name__ == "__main__":
  main()
