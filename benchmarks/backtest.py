"""The plan's seconds against published results, of 2017 to 2026. No hardware.

    pip install libtpu==0.0.51 jax-cuda12-plugin==0.10.2 jax-cuda12-pjrt==0.10.2 \
        nvidia-cudnn-cu12
    python benchmarks/backtest.py             (compiles what is not kept, then compares)
    python benchmarks/backtest.py --kept      (compares what is kept, compiles nothing)
    python benchmarks/backtest.py --table     (Markdown, of results/backtest.json)

Each row of published.py is a rate or an efficiency of a system that is not ours. Our
own model is compiled as near to it as our settings allow, for few devices, and planned
(`jaxscale.planning.step_plan`) on as many as the row has, with the constants of
chips.toml. Systems that send gradients during the backward pass are planned so
("backward"); ours does what its compiler's schedule says. Programs are kept in
runs/backtest/.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}

from backtest_table import summary, tables
from common import report
from published import MODELS, ROWS, Row

from jaxscale.hlo import Memory
from jaxscale.planning.fits import Fit, RefusedError
from jaxscale.planning.machine import rates_of
from jaxscale.planning.step_plan import Compiled, Step, compile_step, step_on
from jaxscale.planning.timeline import Program, Times
from jaxscale.planning.topologies import CHIPS, find_chips, kind_of

ROOT = Path(__file__).parent.parent
KEPT = ROOT / "runs" / "backtest"


def path_of(key: str, rows: int) -> Path:
  return KEPT / f"{key.replace(' ', '_')}_{rows}.json.gz"


def is_kept(key: str) -> bool:
  return all(path_of(key, rows).exists() for rows in MODELS[key][2])


def programs(key: str) -> list[Compiled]:
  """Return the programs of a model: stored ones, or newly compiled ones."""
  make, chips, all_rows = MODELS[key]
  found = []
  for rows in all_rows:
    path = path_of(key, rows)
    if not path.exists():
      chosen = find_chips(chips)
      made = compile_step(make(rows, chosen.count), chosen)
      kept = {
        "text": made.fit.compiled.as_text(),
        "mesh": dict(made.fit.mesh.shape),
        "memory": made.fit.memory,
        "devices": made.devices,
        "seconds": made.fit.seconds,
      }
      KEPT.mkdir(parents=True, exist_ok=True)
      path.write_bytes(gzip.compress(json.dumps(kept).encode()))
      print(f"{path.name}: {made.fit.seconds:.0f} s", file=sys.stderr, flush=True)
    kept = json.loads(gzip.decompress(path.read_bytes()))
    limit = CHIPS[kind_of(chips)].limit
    mesh = SimpleNamespace(shape=kept["mesh"])
    memory = Memory(*kept["memory"])
    fit = Fit(memory, None, limit, kept["seconds"], None, mesh)
    found.append(Compiled(rows, kept["devices"], Program(kept["text"], mesh), fit))
  return found


class SentInBackward(NamedTuple):
  """Program whose collectives hide in the backward pass, as in PyTorch and Horovod."""

  program: Program

  def times(self, rates: Any, transfer: Any) -> Times:
    """See `Program.times`."""
    times = self.program.times(rates, transfer)
    # The backward pass has two of the three products of each layer. Communication of the last
    # layer has nothing to hide behind.
    hidden = 2 / 3 * sum(times.compute.values())
    share = max(1 - hidden / max(sum(times.sent.values()), 1e-300), 0.0)
    return times._replace(exposed={axes: share * s for axes, s in times.sent.items()})


def predict(row: Row, compiled: list[Compiled], devices: int, rows: int) -> Step:
  config = MODELS[row.model][0](rows, devices)
  if row.overlap == "backward":
    compiled = [c._replace(program=SentInBackward(c.program)) for c in compiled]
  return step_on(config, compiled, rates_of(row.chip, row.machine), devices, rows)


def compare(row: Row, compiled: list[Compiled]) -> dict[str, Any]:
  """Return the result's row with the plan's prediction and its error."""
  step = predict(row, compiled, row.devices, row.rows)
  base = predict(row, compiled, row.base, row.base_rows or row.rows)
  found: dict[str, Any] = {
    "name": row.name,
    "chip": row.chip,
    "devices": row.devices,
    "rows": row.rows,
    "overlap": row.overlap,
    "use": row.use,
    "round": row.round,
    "tag": row.tag,
    "source": row.source,
    "differs": row.differs,
    "step_ms": 1e3 * step.seconds["expected"],
    "parts_ms": {name: 1e3 * s for name, s in step.parts.items()},
  }
  if row.rate is not None:
    rates = {c: row.per_example * step.batch_size / s for c, s in step.seconds.items()}
    found |= {"rate": row.rate, "planned_rate": rates["expected"]}
    found |= {"slowest": rates["low"], "fastest": rates["high"]}
    found["rate_error"] = rates["expected"] / row.rate - 1
    found["in_range"] = rates["low"] <= row.rate <= rates["high"]
  if row.efficiency is not None:
    planned = step.rate / base.rate * row.base / row.devices
    found |= {"efficiency": row.efficiency, "planned_efficiency": planned}
    found["efficiency_error"] = planned - row.efficiency
  return found


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--table", action="store_true", help="of what is kept")
  parser.add_argument("--kept", action="store_true", help="compile nothing")
  args = parser.parse_args()
  path = ROOT / "benchmarks" / "results" / "backtest.json"
  if args.table:
    rows = json.loads(path.read_text())["rows"]
  else:
    compiled = {}
    for key in MODELS:
      try:
        if not args.kept or is_kept(key):
          compiled[key] = programs(key)
      except RefusedError as e:
        print(f"{key}: {e}", file=sys.stderr)
    rows = [compare(row, compiled[row.model]) for row in ROWS if row.model in compiled]
    left_out = [row.name for row in ROWS if row.model not in compiled]
    report("backtest", rows=rows, summary=summary(rows), not_compiled=left_out)
  print(*tables(rows).values(), sep="\n\n")


if __name__ == "__main__":
  main()
