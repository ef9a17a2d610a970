"""Hand-made layouts of the 7B model on 64 H100, and what a search chose.

    jaxscale plan --config configs/llama_7b.py:h100 --chips h100-64 --search
    python benchmarks/search_layouts.py plan.json

Each hand-made layout is compiled and planned as the search plans its own, and compared
with the best that it found. Nothing is run. Needs the compiler of the chips
(docs/plan.md).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from common import report

CONFIG, CHIPS = "configs/llama_7b.py:h100", "h100-64"
# The table in docs/plan.md is of 2026-11-26, when the config's own mesh was fsdp 64.
BASE = {"mesh.replica": "1", "mesh.fsdp": "64", "layout.slow_axes": "after"}
# As docs/parallelism.md has them, on 64 devices; rows per micro-batch so that they fit.
HAND_MADE = {
  "fsdp 64": {},
  "fsdp 64, remat dots": {"layout.remat": "dots", "accumulate_steps": "4"},
  "fsdp 64, remat branches": {"layout.remat": "branches", "accumulate_steps": "2"},
  "data 4 x fsdp 16": {"mesh.data": "4", "mesh.fsdp": "16"},
  "data 8 x fsdp 8": {"mesh.data": "8", "mesh.fsdp": "8"},
  "data 8 x fsdp 8, in the backward": {
    "mesh.data": "8",
    "mesh.fsdp": "8",
    "layout.slow_axes": "in_backward",
  },
  "fsdp 16 x model 4": {"mesh.fsdp": "16", "mesh.model": "4", "accumulate_steps": "4"},
  "fsdp 16 x model 4, sums in bfloat16": {
    "mesh.fsdp": "16",
    "mesh.model": "4",
    "accumulate_steps": "4",
    "layout.sum_in": "dtype",
  },
  "fsdp 16 x model 4, tokens too": {
    "mesh.fsdp": "16",
    "mesh.model": "4",
    "accumulate_steps": "4",
    "layout.model": "layers_and_tokens",
  },
  "fsdp 8 x model 8": {"mesh.fsdp": "8", "mesh.model": "8", "accumulate_steps": "8"},
  "fsdp 32 x stage 2, 1f1b": {
    "mesh.fsdp": "32",
    "mesh.stage": "2",
    "accumulate_steps": "4",
    "layout.schedule": "1f1b",
  },
  "fsdp 32 x stage 2, 1f1b, zero1": {
    "mesh.fsdp": "32",
    "mesh.stage": "2",
    "accumulate_steps": "8",
    "layout.schedule": "1f1b",
    "layout.shard": "zero1",
  },
}


def main(path: str) -> None:
  """Print the table, and write benchmarks/results/search_layouts.json."""
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
  from jaxscale.config.loading import load_config
  from jaxscale.planning import fits, step_plan, topologies
  from jaxscale.planning.machine import rates_of

  chips, rates = topologies.find_chips(CHIPS), rates_of("h100")
  found = json.loads(Path(path).read_text())
  chosen = found["step"]["seconds"]["expected"]
  rows = []
  for name, changes in HAND_MADE.items():
    config = load_config(CONFIG, BASE | changes)
    try:
      made = step_plan.compile_step(config, chips)
    except fits.RefusedError as e:
      rows.append({"layout": name, "overrides": changes, "refused": str(e)})
      continue
    step = step_plan.step_on(config, [made], rates, made.devices, made.rows)
    row = {"layout": name, "overrides": changes, "fits": step.fits}
    row |= {"seconds": step.seconds["expected"], "memory": step.memory}
    rows.append(row)
    slower = step.seconds["expected"] / chosen
    gib = step.memory / 2**30
    note = "" if step.fits else ", does not fit"
    print(
      f"{name}: {step.seconds['expected']:.2f} s, {slower:.2f} of the choice, {gib:.1f} GiB{note}",
      flush=True,
    )
  search = found["search"] | {"seconds_of_step": chosen, "overrides": found["submit"]["overrides"]}
  report("search_layouts", chips=CHIPS, search=search, hand_made=rows)


if __name__ == "__main__":
  main(sys.argv[1])
