"""Memory and communication of models larger than a device, as compiled.

    pip install libtpu==0.0.51 jax-cuda12-plugin==0.10.2 jax-cuda12-pjrt==0.10.2 \
      nvidia-cudnn-cu12
    python benchmarks/parallel.py [--case NAME ...]
    python benchmarks/parallel.py --table     (Markdown, of results/parallel.json)

Compiles train steps of configs/llama_1b.py and configs/llama_7b.py, under several
layouts, for chips that are not here (`jaxscale plan`), and reads the programs with
`jaxscale.hlo`. Nothing is run: there is no time of a step here. Each program
is compiled in a process of its own, one after the other; rows are kept in
runs/parallel/ with the programs, and what is there is not compiled again, but read
again. A case that does not compile is a row that says why.

Of a device and a step: bytes of `hlo.Memory`; by kind of collective and
mesh axes `times`, `wire_mb` that the device sends, `hidden_mb` the part of it with
any compute scheduled between start and end, and `overlap`, how much compute that
is, as a share of the step's (summed over collectives, so that it can pass 1).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
from common import report
from overlap import version
from parallel_table import tables

from jaxscale import hlo
from jaxscale.config.loading import load_config
from jaxscale.experiment import build
from jaxscale.hlo.memory import memory_of, out_of_memory
from jaxscale.mesh import replicated
from jaxscale.planning.topologies import find_chips

ROOT = Path(__file__).parent.parent
KEPT = ROOT / "runs" / "parallel"
LIMIT = 3000  # seconds a compile may take
PROBE = {"batch_size": "64", "accumulate_steps": "1"}  # 4 rows per device of 16


class Case(NamedTuple):
  """A program to compile.

  Attributes:
    part: the part of the page's tables that has the case.
    config: the config file, with its argument.
    chips: the name of the chips.
    changes: changes to the config, as on the command line.
    options: options of the compiler.
    program: "step" or "init".
  """

  part: str
  config: str
  chips: str
  changes: Mapping[str, str] = MappingProxyType({})
  options: Mapping[str, Any] = MappingProxyType({})
  program: str = "step"


def probe(chips: str, options: Any = None, **changes: str) -> Case:
  """Return a case of the 1B model with one micro-batch per step, under another layout."""
  changed = PROBE | {k.replace("__", "."): v for k, v in changes.items()}
  return Case("layouts", "configs/llama_1b.py", chips, changed, options or {})


FSDP = {"mesh.replica": "1", "mesh.fsdp": "-1", "layout.slow_axes": "after"}
FSDP4 = {"mesh__data": "4", "mesh__fsdp": "4"}
MODEL4 = {"mesh__fsdp": "4", "mesh__model": "4"}
STAGES = {"mesh__fsdp": "8", "mesh__stage": "2", "accumulate_steps": "4"}
GROUPS = {"mesh__replica": "2", "mesh__fsdp": "8"}
CASES = {
  "1B v5e-16": Case("models", "configs/llama_1b.py", "v5e-16"),
  "1B h100-16": Case("models", "configs/llama_1b.py:h100", "h100-16", FSDP),
  "7B v5e-256": Case("models", "configs/llama_7b.py", "v5e-256"),
  "7B v5e-256, sums in bfloat16": Case(
    "models", "configs/llama_7b.py", "v5e-256", {"layout.sum_in": "dtype"}
  ),
  "7B v5e-256, fsdp alone": Case(
    "models", "configs/llama_7b.py", "v5e-256", {"mesh.model": "1", "accumulate_steps": "4"}
  ),
  "7B v5e-256, fsdp 16 x model 16": Case(
    "models", "configs/llama_7b.py", "v5e-256", {"mesh.model": "16", "accumulate_steps": "16"}
  ),
  "7B v5e-256, data 16 x fsdp 16": Case(
    "models",
    "configs/llama_7b.py",
    "v5e-256",
    {"mesh.model": "1", "mesh.data": "16", "accumulate_steps": "4"},
  ),
  "7B h100-256": Case("models", "configs/llama_7b.py:h100", "h100-256", FSDP),
  "init of 7B v5e-256": Case("init", "configs/llama_7b.py", "v5e-256", program="init"),
  "init of 7B h100-256": Case("init", "configs/llama_7b.py:h100", "h100-256", program="init"),
}
for chips, groups in (("h100-16", "h100-16"), ("v5e-16", "2xv5e-8")):
  CASES |= {
    f"{chips} {name}": case
    for name, case in {
      "fsdp 16": probe(chips),
      "data 4 x fsdp 4": probe(chips, **FSDP4),
      "fsdp 4 x model 4": probe(chips, **MODEL4),
      "fsdp 4 x model 4, sums in bfloat16": probe(chips, **MODEL4, layout__sum_in="dtype"),
      "fsdp 4 x model 4, tokens too": probe(chips, **MODEL4, layout__model="layers_and_tokens"),
      "fsdp 8 x stage 2, 1f1b": probe(chips, **STAGES, layout__schedule="1f1b"),
    }.items()
  } | {
    f"{groups} replica 2 x fsdp 8": probe(groups, **GROUPS),
    f"{groups} replica 2 x fsdp 8, in the backward": probe(
      groups, **GROUPS, layout__slow_axes="in_backward"
    ),
  }

  CASES |= {
    f"{chips} fsdp 16, remat {remat}": probe(chips, layout__remat=remat)._replace(part="memory")
    for remat in ("none", "dots", "branches", "offload")
  }
# Near the limit of the memory.
ROWS = {"batch_size": "40", "mesh.fsdp": "4"}
CASES |= {
  f"v5e-4 fsdp 4, 10 rows, optimizer on the {where}": Case(
    "memory", "configs/llama_1b.py", "v5e-4", PROBE | ROWS | {"layout.optimizer": where}
  )
  for where in ("device", "host")
}
# Flags of the compilers, on what hides least without them.
FLAGS = {
  "h100-16": {
    "no latency hiding": {"xla_gpu_enable_latency_hiding_scheduler": False},
    "latency hiding": {"xla_gpu_enable_latency_hiding_scheduler": True},
    "pipelined": {
      "xla_gpu_enable_pipelined_all_gather": True,
      "xla_gpu_enable_pipelined_reduce_scatter": True,
      "xla_gpu_enable_pipelined_all_reduce": True,
    },
    "one combined": {
      "xla_gpu_all_gather_combine_threshold_bytes": 1 << 30,
      "xla_gpu_reduce_scatter_combine_threshold_bytes": 1 << 30,
    },
  },
  "v5e-16": {
    "async reduce-scatter": {
      "xla_enable_async_reduce_scatter_fusion": "true",
      "xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter": "true",
    }
  },
}
for chips, flags in FLAGS.items():
  CASES |= {
    f"{chips} data 4 x fsdp 4, {name}": probe(chips, options, **FSDP4)._replace(part="flags")
    for name, options in flags.items()
  } | {
    f"{chips} fsdp 4 x model 4, {name}": probe(chips, options, **MODEL4)._replace(part="flags")
    for name, options in flags.items()
  }


def compile_one(name: str, path: Path) -> None:
  """Compile a case and store its row and program."""
  case = CASES[name]
  config = load_config(str(ROOT / case.config), case.changes)
  chips, data = find_chips(case.chips), config.data.abstract(config.batch_size)
  cpu_before = time.process_time()
  made = build.experiment(config, devices=chips.devices, datasets=data)
  before = time.perf_counter()
  memory = refusal = None
  try:
    if case.program == "step":
      lowered = made.lower_train_step()
    else:  # the program that creates the initial state
      seed = jax.ShapeDtypeStruct((), "int32", sharding=replicated(made.mesh))
      lowered = made._init.lower(seed, {})
    compiled = lowered.compile(dict(case.options))
    memory = memory_of(compiled)
    path.with_suffix(".txt").write_text(compiled.as_text())
  except RuntimeError as e:
    if (refusal := out_of_memory(e)) is None:
      raise
  row = {
    "memory": memory._asdict() if memory else None,
    "refusal": refusal,
    "limit": chips.chip.limit,
    "compile_s": round(time.perf_counter() - before, 1),
    "compile_cpu_s": round(time.process_time() - cpu_before, 1),
    "mesh": dict(made.mesh.shape),
  }
  path.write_text(json.dumps(row))


def kept(name: str) -> Path:
  """Return the file in which a row is stored."""
  return KEPT / f"{name.replace(' ', '-').replace(',', '')}.json"


def make_row(name: str) -> None:
  """Compile a case in a separate process."""
  KEPT.mkdir(parents=True, exist_ok=True)
  path = kept(name)
  with open(path.with_suffix(".log"), "w") as log:
    command = [sys.executable, __file__, "--one", name]
    try:
      subprocess.run(command, stderr=log, stdout=log, timeout=LIMIT)
    except subprocess.TimeoutExpired:
      log.write(f"\nnot compiled within {LIMIT} s\n")
  if not path.exists():
    path.write_text(json.dumps({"error": _reason(path.with_suffix(".log"))}))


def _reason(log: Path) -> str:
  """Return the error of a failed process."""
  lines = [x.strip() for x in log.read_text().splitlines() if x.strip()]
  raised = [x for x in lines if "Error: " in x and not x.startswith(("File", "raise"))]
  return ([*lines[-1:], *raised[-1:]] or ["ended without a word"])[-1][:300]


def read_row(name: str) -> dict[str, Any]:
  """Return a row with the facts about the collectives of its stored program."""
  path, case = kept(name), CASES[name]
  row = {"case": name, "part": case.part, "config": case.config, "chips": case.chips}
  row |= {"changes": dict(case.changes), "options": dict(case.options)}
  row |= json.loads(path.read_text())
  text = path.with_suffix(".txt")
  return row | read(text.read_text(), row["mesh"]) if text.exists() else row


def read(text: str, mesh: dict[str, int]) -> dict[str, Any]:
  """Return facts about the collectives in a program's text, by kind and axes."""
  table = hlo.collectives(text, mesh)
  alike: dict[tuple, list[hlo.Collective]] = {}
  for one in table:
    alike.setdefault((one.kind, one.axes), []).append(one)
  rows = []
  for (kind, axes), found in alike.items():
    sums = hlo.total(found)
    behind = sum(r.times * r.wire_bytes for r in found if r.is_async and r.overlap)
    dtypes = sorted({d for r in found for d in r.dtypes})
    rows.append(
      {
        "kind": kind,
        "axes": axes,
        "dtypes": dtypes,
        "times": sums.times,
        "payload_mb": round(sums.payload_bytes / 1e6, 3),
        "wire_mb": round(sums.wire_bytes / 1e6, 3),
        "hidden_mb": round(behind / 1e6, 3),
        "overlap": round(sum(r.overlap or 0.0 for r in found), 4),
      }
    )
  return {"collectives": rows, "trips_known": all(r.times_known for r in table)}


def main() -> None:
  if sys.argv[1:2] == ["--one"]:
    compile_one(sys.argv[2], kept(sys.argv[2]))
    return
  if sys.argv[1:] == ["--table"]:
    results = Path(__file__).parent / "results" / "parallel.json"
    for part, table in tables(json.loads(results.read_text())["rows"]).items():
      print(f"**{part}**\n\n{table}\n")
    return
  parser = argparse.ArgumentParser()
  parser.add_argument("--case", nargs="*", choices=CASES, default=[*CASES])
  for name in parser.parse_args().case:
    if not kept(name).exists():
      make_row(name)
      print(name, kept(name).read_text()[:300], flush=True)
  rows = [read_row(name) for name in CASES if kept(name).exists()]
  packages = ("jaxlib", "libtpu", "jax-cuda12-plugin", "nvidia-cudnn-cu12", "flax", "optax")
  report("parallel", rows=rows, versions={name: version(name) for name in packages})


if __name__ == "__main__":
  main()
