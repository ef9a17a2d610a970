"""Loss of configs/text.py with Muon, by the coefficients and the dtype of Newton-Schulz.

    python benchmarks/newton_schulz.py [--seeds 3] [--steps 150]
    python benchmarks/newton_schulz.py --table                  (Markdown)

Trains each variant on one CPU device from the same seeds, one run at a time, and keeps the
validation loss in benchmarks/results/newton_schulz.json; a run that is there is not repeated.
The learning rate is the same for all and was not tuned.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import report

HERE = Path(__file__)
ROOT = HERE.parent.parent
RESULTS = HERE.parent / "results" / "newton_schulz.json"
VARIANTS = [(n, d) for n in ("jordan", "you", "polar_express") for d in ("float32", "bfloat16")]
LR = 3e-3


def validation_loss(coeffs: str, dtype: str, steps: int, seed: int) -> float:
  """Train once, and return the validation loss in nats per byte."""
  fields = {"optimizer": "Muon", "optimizer.lr": LR, "optimizer.ns_coeffs": coeffs}
  fields |= {"optimizer.ns_dtype": dtype, "steps": steps, "epochs": None, "seed": seed}
  fields |= {"evaluation.every_epochs": 99, "checkpoint.every_epochs": 99}
  # Otherwise XLA on CPUs leaves out casts to bfloat16 and back, and computes in float32.
  fields |= {"compiler_options.xla_allow_excess_precision": False}
  options = [f"--config.{name}={value}" for name, value in fields.items()]
  with tempfile.TemporaryDirectory() as folder:
    command = [sys.executable, "-m", "jaxscale.train", "--config", str(ROOT / "configs/text.py")]
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
      [*command, *options, "--workdir", f"{folder}/run"],
      env=env,
      capture_output=True,
      text=True,
      check=False,
    )
    if done.returncode:
      raise SystemExit(done.stderr or done.stdout)
    return json.loads(Path(folder, "run", "summary.json").read_text())["evaluation"]["loss"]


def table(rows: dict[str, Any]) -> str:
  lines = ["| coefficients | dtype | validation loss |", "|---|---|---|"]
  for coeffs, dtype in VARIANTS:
    found = [loss for key, loss in rows.items() if key.startswith(f"{coeffs}, {dtype}, ")]
    if found:
      spread = f" ± {statistics.stdev(found):.3f}" if len(found) > 1 else ""
      lines.append(f"| {coeffs} | {dtype} | {statistics.fmean(found):.3f}{spread} |")
  return "\n".join(lines)


def main() -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
  parser.add_argument("--seeds", type=int, default=3)
  parser.add_argument("--steps", type=int, default=150)
  parser.add_argument("--table", action="store_true", help="print the kept rows as Markdown")
  args = parser.parse_args()
  rows = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else {}
  for seed in () if args.table else range(args.seeds):
    for coeffs, dtype in VARIANTS:
      key = f"{coeffs}, {dtype}, {args.steps} steps, seed {seed}"
      if key not in rows:
        rows[key] = round(validation_loss(coeffs, dtype, args.steps, seed), 4)
        report("newton_schulz", rows=rows, learning_rate=LR)
  print(table(rows))


if __name__ == "__main__":
  main()
