"""Bytes, collectives and step times of optimizers under every layout.

    python benchmarks/matrix_optimizers.py                  (bytes, as compiled)
    python benchmarks/matrix_optimizers.py --time           (two processes, in turns)
    python benchmarks/matrix_optimizers.py --table          (Markdown)
    python benchmarks/matrix_optimizers.py --before FOLDER  (also of another checkout)

Compiles the train step of configs/text.py for 8 simulated devices, and reads from the
program the bytes that a device sends in a step, its collectives and its FLOPs; nothing is
run. Rows are kept in benchmarks/results/matrix_optimizers.json, and what is there is not
compiled again. `--before` gives rows of a checkout before matrices were dealt out, for
Muon.

With `--time`, two processes with a device each, joined by gloo over the loopback, train
configs/text.py under FSDP, all optimizers and checkouts in turns; a time is the median over
turns of the wall seconds per step of process 0. The processes share the cores of one machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
from common import free_address, report
from turns import Side

HERE = Path(__file__)
ROOT = HERE.parent.parent
RESULTS = HERE.parent / "results" / "matrix_optimizers.json"
FSDP = {"mesh.data": "1", "layout.shard": "fsdp"}
LAYOUTS = {
  "data 8": {"mesh.data": "8"},
  "zero1 8": FSDP | {"mesh.fsdp": "8", "layout.shard": "zero1"},
  "zero2 8": FSDP | {"mesh.fsdp": "8", "layout.shard": "zero2"},
  "fsdp 8": FSDP | {"mesh.fsdp": "8"},
  "replica 2 x fsdp 4": FSDP | {"mesh.replica": "2", "mesh.fsdp": "4"},
  "fsdp 2 x model 4": FSDP | {"mesh.fsdp": "2", "mesh.model": "4"},
  "fsdp 4 x stage 2": FSDP | {"mesh.fsdp": "4", "mesh.stage": "2", "accumulate_steps": "2"},
}
OPTIMIZERS = ("AdamW", "LARS", "LAMB", "Muon", "SOAP")
STEPS, TURNS = 10, 7


def child(what: str, request: dict[str, Any]) -> None:
  """Do one part of the work in a process of its own; print or serve its answer."""
  if what == "compile":
    print("@row " + json.dumps(compiled(**request)))
  else:
    train(request)


def config_of(optimizer: str, fields: dict[str, str]) -> Any:
  from jaxscale.config.loading import load_config

  return load_config(str(ROOT / "configs/text.py"), {"optimizer": optimizer} | fields)


def compiled(optimizer: str, fields: dict[str, str]) -> dict[str, Any]:
  """Return what a device sends and computes in a step."""
  from jaxscale import hlo
  from jaxscale.experiment import build

  config = config_of(optimizer, fields)
  experiment = build.experiment(config, datasets=config.data.abstract(config.batch_size))
  program = experiment.lower_train_step(experiment.abstract_state()).compile()
  found = [c for c in hlo.collectives(program, experiment.mesh) if c.wire_bytes]
  kinds: dict[str, int] = {}
  for c in found:
    kinds[c.kind] = kinds.get(c.kind, 0) + c.times
  sent = sum(c.times * c.wire_bytes for c in found)
  flops = hlo.cost.program_flops(program.as_text())
  return {"sent_mb": round(sent / 1e6, 3), "collectives": kinds, "gflop": round(flops / 1e9, 3)}


def train(request: dict[str, Any]) -> None:
  """Serve steps of one process of two, joined with the other."""
  import jax
  import turns

  from jaxscale import cluster

  cluster.initialize()
  from jaxscale.experiment import build

  fields = FSDP | {"mesh.fsdp": "2"}
  config = config_of(request["optimizer"], fields)
  experiment = build.experiment(config, datasets=config.data.abstract(config.batch_size))
  state = experiment.init_state()
  abstract = experiment.abstract_batch()

  def ones(x: Any) -> Any:
    whole = np.ones(x.shape, x.dtype)
    return jax.make_array_from_callback(x.shape, x.sharding, lambda index: whole[index])

  batch = jax.tree.map(ones, abstract)

  def steps(count: int) -> float:
    nonlocal state

    def step():
      nonlocal state
      state, _ = experiment.train_step(state, batch)

    return turns.seconds_of(step, lambda: jax.block_until_ready(state), count)[1]

  steps(2)
  turns.serve({"steps": steps}, "ready")


def run_child(what: str, request: dict[str, Any], folder: Path, **env: str) -> tuple[Any, Any]:
  """Return the command and the environment of a child that uses a checkout's package."""
  command = [sys.executable, str(HERE), "--child", what, json.dumps(request)]
  return command, os.environ | {"PYTHONPATH": str(folder)} | env


def bytes_of(folder: Path, request: dict[str, Any]) -> dict[str, Any] | None:
  command, env = run_child("compile", request, folder, JAX_NUM_CPU_DEVICES="8")
  done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
  rows = [x for x in done.stdout.splitlines() if x.startswith("@row ")]
  if not rows:
    print((done.stderr.strip().splitlines() or ["no answer"])[-1], file=sys.stderr)
    return None
  return json.loads(rows[0].removeprefix("@row "))


def times_of(sides: dict[str, tuple[str, Path]]) -> dict[str, float]:
  """Return the median milliseconds of a step by name, in turns."""
  pairs: dict[str, list[Side]] = {}
  try:
    for name, (optimizer, folder) in sides.items():
      address = free_address()
      for rank in range(2):
        joined = {
          "JAX_NUM_CPU_DEVICES": "1",
          "JAXSCALE_COORDINATOR": address,
          "JAXSCALE_NUM_PROCESSES": "2",
          "JAXSCALE_PROCESS_ID": str(rank),
        }
        command, env = run_child("train", {"optimizer": optimizer}, folder, **joined)
        pairs.setdefault(name, []).append(Side(command, env=env))
      for side in pairs[name]:
        side.wait_ready(300)
    took: dict[str, list[float]] = {name: [] for name in pairs}
    for _ in range(TURNS):
      for name, (first, second) in pairs.items():
        second.send("steps", STEPS)
        took[name].append(first.ask("steps", STEPS, timeout_s=300))
        second.answer(300)
    return {name: round(1e3 * statistics.median(x), 1) for name, x in took.items()}
  finally:
    for side in (side for pair in pairs.values() for side in pair):
      side.close()


def table(kept: dict[str, Any]) -> str:
  names = [n for n in (*OPTIMIZERS, "Muon before") if n in kept["rows"]]
  lines = [f"| layout | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
  for layout in LAYOUTS:
    cells = [kept["rows"][n].get(layout) for n in names]
    shown = [f"{c['sent_mb']:.2f}, {sum(c['collectives'].values())}" if c else "" for c in cells]
    lines.append(f"| {layout} | {' | '.join(shown)} |")
  return "\n".join(lines)


def main() -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
  parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
  parser.add_argument("--time", action="store_true", help="time two processes in turns")
  parser.add_argument("--table", action="store_true", help="print the kept rows as Markdown")
  parser.add_argument("--before", type=Path, help="checkout in which matrices are not dealt out")
  args = parser.parse_args()
  if args.child:
    return child(args.child[0], json.loads(args.child[1]))
  kept: Any = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": {}}
  kept = {"rows": kept["rows"], "ms_two_processes": kept.get("ms_two_processes", {})}
  if args.table:
    return print(table(kept))
  sides = {name: (name, ROOT) for name in OPTIMIZERS}
  if args.before:
    sides["Muon before"] = "Muon", args.before
  if args.time:
    chosen = {n: s for n, s in sides.items() if n in ("AdamW", "Muon", "SOAP", "Muon before")}
    report("matrix_optimizers", **kept | {"ms_two_processes": times_of(chosen)})
    return None
  for name, (optimizer, folder) in sides.items():
    rows = kept["rows"].setdefault(name, {})
    for layout in (x for x in LAYOUTS if x not in rows):
      row = bytes_of(folder, {"optimizer": optimizer, "fields": LAYOUTS[layout]})
      if row is not None:
        rows[layout] = row
        report("matrix_optimizers", show=False, **kept)
        print(name, layout, row, flush=True)
  return None


if __name__ == "__main__":
  main()
