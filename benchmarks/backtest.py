"""The plan's seconds against published results, of 2017 to 2025. No hardware.

    pip install libtpu==0.0.51 jax-cuda12-plugin==0.10.2 jax-cuda12-pjrt==0.10.2 \
        nvidia-cudnn-cu12
    python benchmarks/backtest.py             (compiles what is not kept, then compares)
    python benchmarks/backtest.py --kept      (compares what is kept, compiles nothing)
    python benchmarks/backtest.py --table     (Markdown, of results/backtest.json)

Each row is a published rate, or a published efficiency, of a system that is not ours.
Our own model is compiled as near to it as our settings allow, for few devices, and
planned (`jaxscale.planning.step_plan`) on as many as the row has. Constants are those
of chips.toml; what a row gives in addition is the machine that its source describes.

Rows marked "choose" are those that constants in chips.toml were chosen on; the others
were predicted with what had come of that, and no row has constants of its own. Systems
that send gradients during the backward pass are planned so ("backward"); ours does what
its compiler's schedule says. Programs are kept in runs/backtest/.

`tag`: "read" in the source that is named; "recalled": numbers of the source that are
from memory, and could not be checked here. Machines whose links are recalled say so.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}

from common import report

from jaxscale import config as cfg
from jaxscale.planning.fits import Fit
from jaxscale.planning.machine import Machine, rates_of
from jaxscale.planning.step_plan import Compiled, Step, compile_step, step_on
from jaxscale.planning.timeline import Program
from jaxscale.planning.topologies import CHIPS, Memory, find_chips

ROOT = Path(__file__).parent.parent
KEPT = ROOT / "runs" / "backtest"
IMAGENET = cfg.Synthetic(num_examples=1_281_167, image_size=224, num_classes=1000)


SGD = cfg.SGD(lr=0.1, momentum=0.9, weight_decay=1e-4)


class Row(NamedTuple):
  """A published result.

  Attributes:
    name: of the system.
    model: a key of `MODELS`.
    chip: a name in chips.toml.
    devices: as JAX counts them.
    rows: of a device, examples.
    rate: examples/s of all devices, or tokens/s of language models; None: not given.
    efficiency: against `base` devices; None: not given.
    base: devices that the efficiency is relative to.
    overlap: "backward" where gradients are sent during the backward pass.
    use: "choose" or "held-out".
    tag: "read" or "recalled".
    source: of the numbers.
    machine: what is known of the machine.
    per_example: what `rate` counts in an example, tokens say.
  """

  name: str
  model: str
  chip: str
  devices: int
  rows: int
  rate: float | None
  efficiency: float | None
  base: int
  overlap: Any
  use: str
  tag: str
  source: str
  machine: Machine | None = None
  per_example: int = 1


def images(model: Any, dtype: Any, data: Any = IMAGENET):
  """Makes a config of so many rows on so many devices."""

  def make(rows: int, devices: int) -> cfg.Config:
    return cfg.Config(
      model=model, data=data, optimizer=SGD, batch_size=rows * devices, epochs=1,
      dtype=dtype,
    )  # fmt: skip

  return make


def llama(rows: int, devices: int) -> cfg.Config:
  """Llama 3.1 8B with fully sharded parameters."""
  return cfg.Config(
    model=cfg.Transformer(
      num_layers=32, width=4096, num_heads=32, num_kv_heads=8, hidden=14_336
    ),
    data=cfg.TextFiles(path="c4", vocab_size=128_256, sequence_length=8192),
    optimizer=cfg.AdamW(lr=3e-4), batch_size=rows * devices, epochs=1, dtype="bfloat16",
    mesh=cfg.Mesh(data=1, fsdp=-1), layout=cfg.Layout(shard="fsdp", remat="dots"),
  )  # fmt: skip


IMAGENET_22K = cfg.Synthetic(num_examples=7_500_000, image_size=224, num_classes=21_841)
ALEXNET = cfg.Synthetic(num_examples=1_281_167, image_size=227, num_classes=1000)
# Key: (config of rows and devices, chips to compile for, rows of the programs).
MODELS: dict[str, tuple[Any, str, tuple[int, ...]]] = {
  "resnet50 float32": (images(cfg.ResNet(depth=50), "float32"), "h100-16", (32, 128)),
  "resnet50 bfloat16": (images(cfg.ResNet(depth=50), "bfloat16"), "h100-16", (64, 192)),
  "resnet101 float32": (images(cfg.ResNet(depth=101), "float32"), "h100-16", (64,)),
  "resnet101 22k": (
    images(cfg.ResNet(depth=101), "float32", IMAGENET_22K), "h100-16", (20,)
  ),
  "llama 8B on 8": (llama, "h100-8", (2,)),
  "llama 8B on 128": (llama, "h100-128", (2,)),
  "resnet50 v3": (images(cfg.ResNet(depth=50), "bfloat16"), "v3-16", (8, 16)),
  "resnet50 v4": (images(cfg.ResNet(depth=50), "bfloat16"), "v4-16", (8,)),
  "resnet50 knl": (images(cfg.ResNet(depth=50), "float32"), "knl-8", (16, 64)),
  "alexnet knl": (
    images(cfg.AlexNet(batch_norm=True), "float32", ALEXNET),
    "knl-8", (64,),
  ),
}  # fmt: skip

NVIDIA = "NVIDIA/DeepLearningExamples, MxNet/Classification/RN50v1.5/README.md"
TITAN = "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
MLPERF = "mlcommons/training_results_{}, log of the run"
# Grand Teton: HBM2e, 2.4 TB/s, 400 Gb/s a GPU; 500 W of the 700 that the peak is at.
TETON = Machine(bandwidth=2.4e12)
ABCI = Machine(per_node=4, network_link=6.25e9)  # recalled: 2 x 100 Gb/s for 4 GPUs
MINSKY = Machine(per_node=4, network_link=3.125e9)  # recalled: 100 Gb/s for 4 GPUs
BIG_BASIN = Machine(per_node=8, network_link=0.78e9)  # recalled: 50 Gb/s for 8 GPUs
UBER = Machine(
  per_node=4, network_link=0.78e9, node_link=12e9
)  # 25 Gb/s; PCIe recalled
MN1 = Machine(
  per_node=8, network_link=1.75e9, node_link=12e9
)  # 2 x 56 Gb/s; PCIe recalled
DGX2 = Machine(per_node=16)
EPOCH = 1_281_167


def nvidia(name, model, chip, devices, rows, rate, efficiency, use, machine=None):
  return Row(
    name, model, chip, devices, rows, rate, efficiency, 1, "backward", use, "read",
    NVIDIA, machine,
  )  # fmt: skip


TF = "tensorflow.org/performance/benchmarks (2017), synthetic, batch 64 a GPU"
F32, BF16 = "resnet50 float32", "resnet50 bfloat16"
ROWS = [
  # One node: rates, and the efficiency inside it.
  Row("TensorFlow, P100", F32, "p100", 1, 64, 219, None, 1, "backward", "choose",
      "read", TF),
  Row("TensorFlow, DGX-1 P100", F32, "p100", 8, 64, 1734, 0.99, 1, "backward",
      "held-out", "read", TF),
  nvidia("MXNet, V100 float32", F32, "v100", 1, 96, 384, None, "choose"),
  nvidia("MXNet, DGX-1 V100 float32", F32, "v100", 8, 96, 3005, 0.978, "held-out"),
  nvidia("MXNet, V100 float16", BF16, "v100", 1, 192, 1376, None, "choose"),
  nvidia("MXNet, DGX-1 V100 float16", BF16, "v100", 8, 192, 10723, 0.974, "held-out"),
  nvidia("MXNet, DGX-2 V100 float16", BF16, "v100", 16, 256, 21484, 0.90, "held-out",
         DGX2),
  nvidia("MXNet, DGX-2 V100 float32", F32, "v100", 16, 128, 6338, 0.95, "held-out",
         DGX2),
  nvidia("MXNet, A100 float16", BF16, "a100", 1, 256, 2180, None, "choose"),
  nvidia("MXNet, DGX A100 float16", BF16, "a100", 8, 256, 16925, 0.97, "held-out"),
  nvidia("MXNet, A100 TF32", F32, "a100", 1, 256, 1022, None, "held-out"),
  nvidia("MXNet, DGX A100 TF32", F32, "a100", 8, 256, 8001, 0.978, "choose"),
  # Many nodes.
  Row("Goyal et al.", F32, "p100", 256, 32, 90 * EPOCH / 3600, 0.90, 8, "backward",
      "choose", "read", "arXiv:1706.02677, abstract: 90 epochs in an hour, 90 %",
      BIG_BASIN),
  Row("IBM DDL, Caffe", F32, "p100", 256, 32, None, 0.95, 4, "schedule", "held-out",
      "read", "IBM's announcement, 2017 (batch recalled)", MINSKY),
  Row("IBM DDL, Torch", F32, "p100", 256, 32, 90 * EPOCH / 3000, None, 4, "schedule",
      "held-out", "read", "arXiv:1708.02188, abstract: 90 epochs, 50 minutes", MINSKY),
  Row("IBM DDL, 22k classes", "resnet101 22k", "p100", 256, 20, None, 0.857, 4,
      "schedule", "choose", "read",
      "IBM Systems blog: 16 days to 7 hours (batch recalled)", MINSKY),
  Row("Horovod, 16 GPUs", "resnet101 float32", "p100", 16, 64, 1656.82, None, 1,
      "backward", "choose", "read", "horovod/horovod, docs/benchmarks.rst", UBER),
  Row("Horovod, 512 GPUs", "resnet101 float32", "p100", 512, 64, None, 0.90, 1,
      "backward", "held-out", "read", "horovod/horovod, docs/benchmarks.rst", UBER),
  Row("ChainerMN", F32, "p100", 128, 32, None, 0.90, 1, "backward", "held-out", "read",
      "arXiv:1710.11351, abstract (batch and links recalled)", MN1),
  Row("Akiba et al.", F32, "p100", 1024, 32, 90 * EPOCH / 900, None, 1, "backward",
      "choose", "read", "arXiv:1711.04325, abstract: 90 epochs in 15 minutes", MN1),
  Row("Mikami et al.", BF16, "v100", 2176, 16, 90 * EPOCH / 224, None, 1, "backward",
      "held-out", "read",
      "arXiv:1811.05233, abstract: 90 epochs in 224 s (batches of 34K and more)", ABCI),
  Row("Yamazaki et al.", BF16, "v100", 2048, 40, 1.73e6, None, 1, "backward",
      "held-out", "read", "arXiv:1903.12650, abstract", ABCI),
  Row("You et al., 512 KNL", "resnet50 knl", "knl", 512, 64, 90 * EPOCH / 3600, None, 1,
      "schedule", "choose", "read", "arXiv:1709.05011, press: 90 epochs in 60 minutes"),
  Row("You et al., 2,048 KNL", "resnet50 knl", "knl", 2048, 16, 90 * EPOCH / 1200, None,
      1, "schedule", "held-out", "read",
      "arXiv:1709.05011, abstract: 90 epochs in 20 minutes"),
  Row("You et al., AlexNet", "alexnet knl", "knl", 512, 64, 100 * EPOCH / 1440, None, 1,
      "schedule", "held-out", "read",
      "arXiv:1709.05011, press: 100 epochs in 24 minutes"),
  # TPUs: what a device is of v3 is a core.
  Row("Ying et al., v3", "resnet50 v3", "v3", 2048, 16, 1.05e6, None, 1, "schedule",
      "choose", "read", "arXiv:1811.06992, abstract: above 1.05 million images/s"),
  Row("MLPerf v0.7 JAX, v3", "resnet50 v3", "v3", 8192, 8, 4.5e6, None, 1, "schedule",
      "held-out", "read", MLPERF.format("v0.7"), Machine(per_node=8192)),
  Row("MLPerf v2.0, v4", "resnet50 v4", "v4", 4096, 8, 60 * EPOCH / 11.77, None, 1,
      "schedule", "held-out", "read", MLPERF.format("v2.0")),
  # Language models: tokens a second.
  Row("torchtitan 8B, 8 H100", "llama 8B on 8", "h100", 8, 2, 8 * 6667, None, 1,
      "schedule", "choose", "read", TITAN, TETON, 8192),
  Row("torchtitan 8B, 128 H100", "llama 8B on 128", "h100", 128, 2, 128 * 6514, 0.977,
      8, "schedule", "held-out", "read", TITAN, TETON, 8192),
]  # fmt: skip


def path_of(key: str, rows: int) -> Path:
  return KEPT / f"{key.replace(' ', '_')}_{rows}.json.gz"


def is_kept(key: str) -> bool:
  return all(path_of(key, rows).exists() for rows in MODELS[key][2])


def programs(key: str) -> list[Compiled]:
  """The programs of a model, compiled or kept."""
  make, chips, all_rows = MODELS[key]
  found = []
  for rows in all_rows:
    path = path_of(key, rows)
    if not path.exists():
      chosen = find_chips(chips)
      made = compile_step(make(rows, chosen.count), chosen)
      kept = {
        "text": made.fit.compiled.as_text(), "mesh": dict(made.fit.mesh.shape),
        "memory": made.fit.memory, "devices": made.devices,
        "seconds": made.fit.seconds,
      }  # fmt: skip
      KEPT.mkdir(parents=True, exist_ok=True)
      path.write_bytes(gzip.compress(json.dumps(kept).encode()))
      print(f"{path.name}: {made.fit.seconds:.0f} s", file=sys.stderr, flush=True)
    kept = json.loads(gzip.decompress(path.read_bytes()))
    limit = CHIPS[chips.split("-")[0]].limit
    mesh = SimpleNamespace(shape=kept["mesh"])
    memory = Memory(*kept["memory"])
    fit = Fit(memory, None, limit, kept["seconds"], None, mesh)
    found.append(
      Compiled(rows, kept["devices"], Program(kept["text"], mesh), fit, None)
    )
  return found


def predict(row: Row, compiled: list[Compiled], devices: int) -> Step:
  config = MODELS[row.model][0](row.rows, devices)
  rates = rates_of(row.chip, row.machine)
  return step_on(config, compiled, rates, devices, row.rows, overlap=row.overlap)


def compare(row: Row, compiled: list[Compiled]) -> dict[str, Any]:
  """A row with what is planned, and how far it is off."""
  step, base = (predict(row, compiled, n) for n in (row.devices, row.base))
  found: dict[str, Any] = {
    "name": row.name, "chip": row.chip, "devices": row.devices, "rows": row.rows,
    "overlap": row.overlap, "use": row.use, "tag": row.tag, "source": row.source,
    "step_ms": 1e3 * step.seconds["expected"],
    "parts_ms": {name: 1e3 * s for name, s in step.parts.items()},
  }  # fmt: skip
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


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
  """Medians and worst of the errors, of each half."""
  found = {}
  for use in ("choose", "held-out"):
    for kind in ("rate_error", "efficiency_error"):
      errors = [abs(r[kind]) for r in rows if r["use"] == use and kind in r]
      if errors:
        median, worst = statistics.median(errors), max(errors)
        of = {"rows": len(errors), "median": median, "worst": worst}
        found[f"{use}: {kind}"] = of
    ranged = [r["in_range"] for r in rows if r["use"] == use and "in_range" in r]
    found[f"{use}: in_range"] = f"{sum(ranged)} of {len(ranged)}"
  return found


def line(row: dict[str, Any]) -> list[str]:
  """Cells of the Markdown table."""
  cells = [row["name"], f"{row['devices']:,} {row['chip']}", f"{row['rows']}"]
  if "rate" in row:
    share = (
      f"{row['planned_rate']:,.0f} ({row['slowest']:,.0f} to {row['fastest']:,.0f})"
    )
    cells += [f"{row['rate']:,.0f}", share, f"{row['rate_error']:+.0%}"]
  else:
    cells += ["-", "-", "-"]
  if "efficiency" in row:
    off = f"{100 * row['efficiency_error']:+.1f}"
    planned = f"{row['planned_efficiency']:.1%}"
    cells += [f"{row['efficiency']:.1%}", planned, off]
  else:
    cells += ["-", "-", "-"]
  return [*cells, row["use"]]


HEAD = (
  "result", "devices", "rows", "published /s", "planned /s (range)", "error",
  "efficiency", "planned", "points", "use",
)  # fmt: skip


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--table", action="store_true", help="of what is kept")
  parser.add_argument("--kept", action="store_true", help="compile nothing")
  args = parser.parse_args()
  path = ROOT / "benchmarks" / "results" / "backtest.json"
  if args.table:
    rows = json.loads(path.read_text())["rows"]
  else:
    models = [key for key in MODELS if not args.kept or is_kept(key)]
    compiled = {key: programs(key) for key in models}
    rows = [compare(row, compiled[row.model]) for row in ROWS if row.model in compiled]
    left_out = [row.name for row in ROWS if row.model not in compiled]
    report("backtest", rows=rows, summary=summary(rows), not_compiled=left_out)
  for cells in (HEAD, ["---"] * len(HEAD), *map(line, rows)):
    print(f"| {' | '.join(cells)} |")
  print(json.dumps(summary(rows), indent=2))


if __name__ == "__main__":
  main()
