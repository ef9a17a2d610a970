"""Compile steps for H100 GPUs, which need not be present, and estimate their time.

Command    python benchmarks/compiled_gpu.py [CASE ...] [--set FIELD=VALUE ...] [--label NAME]
           with JAX_PLATFORMS=cpu and jax-cuda12-plugin or jax-cuda13-plugin installed
Result     benchmarks/results/compiled_gpu.json, rows by label and case; docs/measured.md

Kernels, bytes, FLOPs, temporaries and collectives are read from the compiled program. The
times are estimates: each kernel takes the longer of its arithmetic and its memory traffic, at
the same rates for all programs, and nothing is lost between kernels. So they compare programs;
a GPU will be slower by 10 or 15 %. No step is executed.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np

from jaxscale import config as cfg
from jaxscale import data, hlo
from jaxscale.config.loading import override
from jaxscale.hlo import parse
from jaxscale.hlo.cost import COLLECTIVES, is_free, trip_count
from jaxscale.metrics.chips import peak_flops
from jaxscale.planning import fits, kernels, machine, transfer
from jaxscale.planning.timeline import Program
from jaxscale.planning.topologies import find_chips

RESULTS = Path(__file__).parent / "results" / "compiled_gpu.json"
PEAK = peak_flops("NVIDIA H100 80GB HBM3") or 0.0  # bfloat16
# What large kernels of an H100 with 700 W reach. Products: 620 TFLOP/s in bfloat16, and twice
# as much in FP8, between the 1,170 of PyTorch's `_scaled_mm` and the 1,610 of cuBLASLt that
# gitea.d-robotics.cc/han.zhao/test_gpu_scripts measured for 8,192^3 (2026-05-24). cuDNN's
# attention: 550 TFLOP/s forwards and 450 backwards, here 475 for both (arXiv:2407.08608,
# figures 5 and 6). Memory: 2.8 of 3.35 TB/s. NVLink 370 GB/s; 45 of 50 GB/s between nodes.
RATES = {
  "peak_bfloat16": PEAK,
  "peak_float32": PEAK / 2,
  "peak_full_float32": 67e12 * PEAK / 620e12,  # Large products reach all 67 TFLOP/s.
  "matmul": 620e12 / PEAK,
  "convolution": 620e12 / PEAK,
  "attention": 475e12 / PEAK,
  "bandwidth": 2.8e12,
  "memory": 1.0,
  "launch": 0.0,
  "units": 132,
  "half_waves": 0.0,
  "half_depth": 0.0,
  "per_node": 8,
  "node_link": 370e9,
  "network_link": 45e9,
  "node_alpha": 15e-6,
  "network_alpha": 15e-6,
  "link_share": 1.0,
}


class Case(NamedTuple):
  """A step to compile: chips for `find_chips`, examples per device, and fields of `Config`."""

  chips: str
  rows: int
  fields: dict[str, Any]


def text(layers: int, tokens: int, words: int, **sizes: Any) -> dict[str, Any]:
  """Return the fields of a language model."""
  return {
    "model": cfg.Transformer(num_layers=layers, num_heads=32, **sizes),
    "data": cfg.TextFiles(path="random", vocab_size=words, sequence_length=tokens),
    "optimizer": cfg.AdamW(lr=1e-4, b2=0.95, weight_decay=0.1),
  }


def images(model: cfg.Model, optimizer: Any) -> dict[str, Any]:
  """Return the fields of a classifier of ImageNet's images."""
  x, y = np.zeros((1, 224, 224, 3), np.uint8), np.zeros(1, np.int32)
  arrays = data.Arrays(x=x, y=y, x_eval=x, y_eval=y, num_classes=1000)
  return {"model": model, "data": arrays, "optimizer": optimizer}


# Sizes: ResNet-50 (arXiv:1512.03385), ViT-B/16 (arXiv:2010.11929), TinyLlama 1.1B
# (arXiv:2401.02385), Llama 3 8B (arXiv:2407.21783).
_1B = {"width": 2048, "num_kv_heads": 4, "hidden": 5632}
_8B = {"width": 4096, "num_kv_heads": 8, "hidden": 14_336}
_FSDP = {"mesh": cfg.Mesh(data=1, fsdp=-1), "layout": cfg.Layout(shard="fsdp")}
_FULL_8B = text(32, 8192, 128_256, **_8B) | {"clip_norm": 1.0, "layout": cfg.Layout(shard="fsdp")}
CASES = {
  "resnet50": Case("h100-1", 256, images(cfg.ResNet(depth=50), cfg.SGD(lr=0.1))),
  "vit_b16": Case(
    "h100-1",
    128,
    images(cfg.ViT(width=768, num_layers=12, num_heads=12), cfg.AdamW(lr=1e-4, weight_decay=0.1)),
  ),
  "transformer_1b": Case("h100-1", 2, text(22, 2048, 32_000, **_1B)),
  "1b_fsdp_8": Case("h100-8", 2, text(22, 2048, 32_000, **_1B) | _FSDP),
  "layers_8b": Case("h100-1", 2, text(5, 2048, 32_000, **_8B)),
  "8b": Case("h100-8", 1, _FULL_8B | {"mesh": cfg.Mesh(data=1, fsdp=-1)}),
  "8b_fsdp_64": Case("h100-64", 1, _FULL_8B | {"mesh": cfg.Mesh(data=1, fsdp=-1)}),
  "8b_replica_8": Case("h100-64", 1, _FULL_8B | {"mesh": cfg.Mesh(replica=8, data=1, fsdp=-1)}),
}


def measure(case: Case, changes: dict[str, str]) -> dict[str, Any]:
  """Compile a case with some fields replaced; return its row."""
  chips, fields = find_chips(case.chips), dict(case.fields)
  batch_size = case.rows * len(chips.devices)
  if isinstance(arrays := fields["data"], data.Arrays):
    x, y = (np.repeat(a, 2 * batch_size, 0) for a in (arrays.x, arrays.y))
    fields["data"] = data.Arrays(x=x, y=y, x_eval=x, y_eval=y, num_classes=arrays.num_classes)
  base = cfg.Config(batch_size=batch_size, epochs=1, dtype="bfloat16", **fields)
  config, began = override(base, changes), time.process_time()
  fit = fits.compile_for(config, chips)
  if fit.compiled is None or fit.memory is None:
    return {"refused": fit.refusal}
  compile_s, program = time.process_time() - began, fit.compiled.as_text()
  found = classes(program)
  exposed, sent = communication(program, fit.mesh)
  compute_s = sum(row["ms"] for row in found.values()) / 1e3
  flops = case.rows * fit.experiment.example_flops
  return {
    "step_ms": round(1e3 * (compute_s + sum(exposed.values())), 1),
    "compute_ms": round(1e3 * compute_s, 1),
    "mfu": round(flops / (compute_s + sum(exposed.values())) / PEAK, 3),
    "plan_ms": round(1e3 * planned(program, fit.mesh), 1),
    "temporaries_gib": round(fit.memory.temporaries / 2**30, 2),
    "memory_gib": round(fit.memory.total / 2**30, 2),
    "compile_s": round(compile_s, 1),
    "exposed_ms": {axes: round(1e3 * s, 1) for axes, s in exposed.items()},
    "classes": found,
    "sent_gb": sent,
  }


def classes(program: str) -> dict[str, dict[str, float]]:
  """Return kernels, FLOPs, bytes and estimated milliseconds by class of kernel."""
  total: dict[str, Any] = defaultdict(lambda: dict.fromkeys(("kernels", "tflop", "gb", "ms"), 0.0))
  for module in parse.modules(program):
    for times, home, instruction in executed(module, module.entry):
      kernel = kernels.kernel_of(module, home, instruction)
      name = "products" if kernel.kind == "matmul" else kernel.kind
      if kernel.kind == "matmul" and kernel.dtype.startswith("f8"):
        name = "products in float8"
      if kernel.kind == "memory":
        name = "update" if "/update/" in instruction.text else "other"
      row = total[name]
      row["kernels"] += times
      row["tflop"] += times * kernel.flops / 1e12
      row["gb"] += times * kernel.bytes / 1e9
      row["ms"] += 1e3 * times * kernels.seconds(kernel, RATES)
  return {k: {n: round(x, 2) for n, x in row.items()} for k, row in sorted(total.items())}


def executed(module: parse.Module, name: str) -> Iterator[tuple[int, Any, parse.Instruction]]:
  """Yield (executions, its computation, instruction) of every kernel of a computation."""
  home = module.computations.get(name, {})
  for instruction in home.values():
    opcode, times = instruction.opcode, 1
    if opcode in ("while", "conditional", "call", "async-start"):
      if opcode == "while":
        times = trip_count(module, home, instruction) or 1
      bodies = [[*executed(module, inner)] for inner in parse.called(instruction)]
      if opcode == "conditional":  # a device takes one branch; here the longest
        bodies = [max(bodies, key=lambda way: sum(n * took(module, b, k) for n, b, k in way))]
      for n, body, kernel in itertools.chain.from_iterable(bodies):
        yield times * n, body, kernel
    elif not is_free(instruction) and opcode.removesuffix("-start") not in COLLECTIVES:
      yield 1, home, instruction


def took(module: parse.Module, home: Any, instruction: parse.Instruction) -> float:
  """Return the estimated seconds of a kernel."""
  return kernels.seconds(kernels.kernel_of(module, home, instruction), RATES)


def communication(program: str, mesh: Any) -> tuple[dict[str, float], dict[str, float]]:
  """Return the exposed seconds by mesh axes, and the GB that a device sends by kind."""

  def cost(collective: hlo.Collective) -> float:
    sizes = dict(mesh.shape)
    return transfer.seconds(collective, sizes, int(RATES["per_node"]), machine.links(RATES))

  exposed = Program(program, mesh).times(RATES, cost).exposed
  sent: dict[str, float] = defaultdict(float)
  for c in hlo.collectives(program, mesh):
    name = f"{c.kind} {'+'.join(c.dtypes)} over {'+'.join(c.axes or ('all',))}"
    sent[name] += c.times * c.wire_bytes / 1e9
  return exposed, {name: round(gb, 3) for name, gb in sent.items() if gb >= 0.001}


def planned(program: str, mesh: Any) -> float:
  """Return the seconds that `jaxscale plan` expects of the kernels and links.

  They are longer: its rates, from chips.toml, are those of published runs, and depend on the
  shapes of products; it adds a launch per kernel, and 8 GPUs and the network share links.
  """
  rates = machine.rates_of("h100")
  at = rates.at("expected")

  def cost(collective: hlo.Collective) -> float:
    return transfer.seconds(collective, dict(mesh.shape), rates.per_node, machine.links(at))

  return Program(program, mesh).times(at, cost).total


def keep(label: str, rows: dict[str, Any]) -> None:
  """Write rows to the results, in place of those with the same label and case."""
  old = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
  old.setdefault("rows", {}).setdefault(label, {}).update(rows)
  names = "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin"
  versions = {d.name: d.version for d in metadata.distributions() if d.name in names}
  command = "python benchmarks/compiled_gpu.py CASE ... --label LABEL --set SET"  # of a row
  facts = {"benchmark": "compiled_gpu", "command": command, "versions": versions}
  facts["date"] = datetime.date.today().isoformat()
  RESULTS.write_text(json.dumps({**old, **facts}) + "\n")


def main() -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
  parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}")
  parser.add_argument("--set", action="append", default=[], help="FIELD=VALUE of Config")
  parser.add_argument("--label", help="keep the rows under this name in benchmarks/results/")
  args = parser.parse_args()
  changes = dict(change.split("=", 1) for change in args.set)
  for name in args.cases or CASES:
    row = measure(CASES[name], changes)
    print(json.dumps({"case": name, **row}, indent=1), flush=True)
    if args.label:
      keep(args.label, {name: {**row, "set": args.set}})


if __name__ == "__main__":
  main()
