"""Collectives, overlap and memory of each exchange, as compiled. Needs no hardware.

    pip install libtpu==0.0.51 jax-cuda12-plugin==0.10.2 jax-cuda12-pjrt==0.10.2
    python benchmarks/overlap.py [--model MODEL] [--target TARGET] [--exchange NAME]
    python benchmarks/overlap.py --table     (Markdown, of results/overlap.json)

Compiles the train step ahead of time, for devices that are not here, and reads the
programs with `jaxscale.hlo`; nothing is run, so there is no time of a step
here but the compiler's own. Each program is compiled in a process of its own, one
after the other; rows are kept in runs/overlap/ with the programs, and what is there
is not compiled again, but read again: the result has all that is kept there, also
of other calls. A combination that does not compile is a row that says why.

Models: "stack", 8 residual layers of 1024 x 4096 and back in a `lax.scan`, bfloat16
compute, 8192 rows per device (67 M parameters, 268 MB of gradients); "resnet50", 32
images of 224 x 224 a device (25.6 M parameters). Parameters are float32, the
optimizer is SGD with momentum. Every mesh is replica 2 x data 4.

Of a device and step: `wire_mb` what it sends, `slow_mb` the part of it in collectives
that cross the replica axis, `hidden` the share of wire_mb with any compute scheduled
between start and end, `overlap` how much there is of it, as a share of the step's
(summed over collectives, so it can pass 1; those below 1 KiB or 1 % of wire_mb do
not count). `compute` is the compiler's estimate of cycles (TPU) or our roofline in
bytes (GPU, CPU), relative to plain. Seconds to compile are of the processor, which
others may share.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import report
from jax import lax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from jaxscale import collectives, hlo, models
from jaxscale.config.config_file import load_file
from jaxscale.exchange import Exchange, plain
from jaxscale.exchange.buckets import bucketed
from jaxscale.exchange.low_precision import half_precision, int8
from jaxscale.exchange.one_bit import one_bit
from jaxscale.exchange.wrappers import delayed, silent
from jaxscale.hlo.cost import costs
from jaxscale.hlo.parse import modules
from jaxscale.mesh import batch_sharding
from jaxscale.planning.topologies import target_config
from jaxscale.training import losses
from jaxscale.training.state import abstract_state
from jaxscale.training.step import make_train_step

ROOT = Path(__file__).parent.parent
KEPT = ROOT / "runs" / "overlap"
power_sgd = load_file(ROOT / "configs" / "exchange_power_sgd.py").power_sgd
top_k = load_file(ROOT / "configs" / "exchange_top_k.py").top_k
GRID = {"replica": 2, "data": 4}
AXES = tuple(GRID)
LAYERS, WIDTH, HIDDEN, ROWS, IMAGES = 8, 1024, 4096, 8192, 32
LIMIT = 900  # seconds a compile may take


def tpu(**topology):
  return topologies.get_topology_desc(platform="tpu", **topology).devices


def h100():
  options = {"target_config": target_config("h100"), "topology": "1x2x4"}
  return topologies.get_topology_desc(platform="cuda", **options).devices


TARGETS: dict[str, tuple[str, Callable[[], Any]]] = {
  "cpu": ("8 simulated CPU devices", lambda: jax.devices("cpu")),
  "v5e": ("one TPU v5e slice, 4 x 2", lambda: tpu(topology_name="v5e:4x2")),
  "slices": ("two TPU v5e slices of 2 x 2", lambda: tpu(topology_name="v5e:2x2", num_slices=2)),
  "h100": ("2 hosts of 4 H100", h100),
}


def by_plan(mesh, algorithm: str) -> Exchange:
  """Return the exchange that takes the mean of the whole tree by an algorithm of `collectives`."""

  def exchange(grads, state):
    num_bytes = collectives.payload_bytes(grads)
    plan = collectives.plan(mesh.shape, num_bytes, algorithm)
    sums = collectives.sum_tree(grads, plan)
    return jax.tree.map(lambda s: s / mesh.size, sums), state

  return Exchange(lambda params: (), exchange)


EXCHANGES: dict[str, Callable[[Mesh], Exchange]] = {
  "none": lambda m: silent(plain(AXES), AXES),
  "plain": lambda m: plain(AXES),
  "ring": lambda m: by_plan(m, "ring"),
  "torus": lambda m: by_plan(m, "torus"),
  "hierarchical": lambda m: by_plan(m, "hierarchical"),
  "halving_doubling": lambda m: by_plan(m, "halving_doubling"),
  "bucketed": lambda m: bucketed(AXES),
  "bf16": lambda m: half_precision(AXES),
  "bf16 psum": lambda m: half_precision(AXES, sum_in="payload"),
  "int8": lambda m: int8(AXES),
  "1-bit": lambda m: one_bit(AXES, num_devices=m.size),
  "top-k 1 %": lambda m: top_k(AXES, share=0.01),
  "PowerSGD-4": lambda m: power_sgd(AXES, rank=4),
  "delayed": lambda m: delayed(plain(AXES)),
}


def stack():
  """Return (init, loss, shapes of a device's batch) of scanned residual layers."""

  def init(key):
    shapes = {"up": (LAYERS, WIDTH, HIDDEN), "down": (LAYERS, HIDDEN, WIDTH)}
    layers = {k: 0.01 * jax.random.normal(key, s) for k, s in shapes.items()}
    return {"layers": layers, "head": jnp.ones((WIDTH, 256)) / WIDTH}, {}

  def layer(h, w):
    w = jax.tree.map(lambda x: x.astype(jnp.bfloat16), w)
    return h + jax.nn.gelu(h @ w["up"]) @ w["down"], None

  def loss(params, model_state, batch, keys):
    h, _ = lax.scan(layer, batch["x"].astype(jnp.bfloat16), params["layers"])
    out = (h @ params["head"].astype(jnp.bfloat16)).astype(jnp.float32)
    value = jnp.sum(out**2)
    rows = jnp.sum(jnp.isfinite(batch["x"][:, 0]), dtype=jnp.int32)
    return value, (model_state, {"examples": rows, "loss": value})

  return init, loss, {"x": ((ROWS, WIDTH), "float32")}


def resnet50():
  """Return (init, loss, shapes of a device's batch) of ResNet-50."""
  shape = (224, 224, 3)
  model = models.make_resnet(50, num_classes=1000, dtype=jnp.bfloat16)
  fns = models.functions(model, shape)
  batch = {"image": ((IMAGES, *shape), "uint8"), "label": ((IMAGES,), "int32")}
  return fns.init, losses.classification_loss(fns.apply), batch


MODELS = {"stack": stack, "resnet50": resnet50}


def compile_one(target: str, model: str, name: str) -> tuple[dict[str, Any], str]:
  """Return a row and the text of its program."""
  grid = np.array(TARGETS[target][1]()).reshape(*GRID.values())
  mesh = Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 2)
  exchange = EXCHANGES[name](mesh)
  init, loss, rows = MODELS[model]()
  tx = optax.sgd(0.1, momentum=0.9)
  spread = batch_sharding(mesh)
  batch = {
    k: jax.ShapeDtypeStruct((mesh.size * n, *rest), dtype, sharding=spread)
    for k, ((n, *rest), dtype) in rows.items()
  }
  state = abstract_state(init, tx, mesh, exchange)
  step: Any = make_train_step(loss, tx, mesh, exchange)
  lowered = step.lower(state, batch)
  wall, cpu = time.perf_counter(), time.process_time()
  compiled = lowered.compile()
  wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
  text = compiled.as_text()
  memory = compiled.memory_analysis()
  return {
    "compile_s": round(wall, 1),
    "compile_cpu_s": round(cpu, 1),
    "temp_mb": round(memory.temp_size_in_bytes / 1e6, 1) if memory else None,
  }, text


def read(text: str) -> dict[str, Any]:
  """Return facts about the collectives in a program's text."""
  table = hlo.collectives(text, GRID)
  everything = hlo.total(table)
  hidden = sum(r.times * r.wire_bytes for r in table if r.is_async and r.overlap)

  def counts(row):
    sent = row.times * row.wire_bytes
    return sent >= 1024 and sent >= 0.01 * everything.wire_bytes

  kinds = {}
  for kind in dict.fromkeys(r.kind for r in table):
    of_kind = [r for r in table if r.kind == kind]
    sums = hlo.total(of_kind)
    behind = sum(r.times * r.wire_bytes for r in of_kind if r.is_async and r.overlap)
    kinds[kind] = {
      "number": len(of_kind),
      "times": sums.times,
      "wire_mb": round(sums.wire_bytes / 1e6, 3),
      "async": sum(r.is_async for r in of_kind),
      "hidden_mb": round(behind / 1e6, 3),
      "dtypes": sorted({d for r in of_kind for d in r.dtypes}),
    }
  return {
    "kinds": kinds,
    "times": everything.times,
    "wire_mb": round(everything.wire_bytes / 1e6, 3),
    "slow_mb": round(hlo.total(table, axis="replica").wire_bytes / 1e6, 3),
    "hidden": round(hidden / everything.wire_bytes, 4) if hidden else 0.0,
    "overlap": round(sum(r.overlap or 0.0 for r in table if counts(r)), 4),
    "trips_known": all(r.times_known for r in table),
    "compute_cost": sum(costs(module)[1] for module in modules(text)),
  }


def kept(target: str, model: str, name: str) -> Path:
  """Return the file in which a row is stored."""
  stem = "-".join((target, model, *name.split()))
  return KEPT / f"{stem.replace('%', 'percent')}.json"


def make_row(target: str, model: str, name: str) -> None:
  """Compile in a separate process, which stores the row and the program."""
  KEPT.mkdir(parents=True, exist_ok=True)
  path = kept(target, model, name)
  with open(path.with_suffix(".log"), "w") as log:
    command = [sys.executable, __file__, "--one", target, model, name, str(path)]
    try:
      subprocess.run(command, stderr=log, stdout=log, timeout=LIMIT)
    except subprocess.TimeoutExpired:
      log.write(f"\nnot compiled within {LIMIT} s\n")
  if not path.exists():
    path.write_text(json.dumps({"error": _reason(path.with_suffix(".log"))}))


def read_row(target: str, model: str, name: str) -> dict[str, Any]:
  """Return a row with the facts about its stored program."""
  path = kept(target, model, name)
  row = {"target": target, "model": model, "exchange": name}
  row |= json.loads(path.read_text())
  return row if "error" in row else row | read(path.with_suffix(".txt").read_text())


def _reason(log: Path) -> str:
  """Return the error of a failed process: its exception, or its last line."""
  lines = [x.strip() for x in log.read_text().splitlines() if x.strip()]
  raised = [x for x in lines if "Error: " in x and not x.startswith(("File", "raise"))]
  return ([*lines[-1:], *raised[-1:]] or ["ended without a word"])[-1][:300]


def markdown(rows: list[dict[str, Any]]) -> str:
  """Return the rows as Markdown tables of docs/exchange.md, one per model and target.

  Args:
    rows: the rows of `benchmarks/results/overlap.json`.
  """
  parts: dict[tuple[str, str], list[dict[str, Any]]] = {}
  for row in rows:
    parts.setdefault((row["model"], row["target"]), []).append(row)
  lines = []
  for (model, target), of_part in parts.items():
    plain_cost = next((r.get("compute_cost") for r in of_part if r["exchange"] == "plain"), None)
    lines += [
      "",
      f"**{model}, {TARGETS[target][0]}**",
      "",
      "| exchange | collectives (times per step) | sent MB | across replicas MB "
      "| hidden | overlap | compute | temp MB | compile CPU s |",
      "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_line(row, plain_cost) for row in of_part]
  return "\n".join(lines).strip()


def _line(row: dict[str, Any], plain_cost: float | None) -> str:
  if "error" in row:
    return f"| {row['exchange']} | does not compile: {row['error']} |" + " |" * 7
  kinds = ", ".join(f"{kind} {k['times']}" for kind, k in row["kinds"].items())
  hidden, overlap = f"{row['hidden']:.0%}", f"{row['overlap']:.0%}"
  if row["target"] == "cpu":  # its programs have no start and end
    hidden = overlap = "?"
  elif row["exchange"] == "none":  # the metrics alone
    hidden = overlap = "-"
  compute = f"{row['compute_cost'] / plain_cost:.2f}" if plain_cost else "?"
  temp = "?" if row["temp_mb"] is None else f"{row['temp_mb']:,.0f}"
  return (
    f"| {row['exchange']} | {kinds or 'none'} | {row['wire_mb']:.1f} "
    f"| {row['slow_mb']:.1f} | {hidden} | {overlap} | {compute} | {temp} "
    f"| {row['compile_cpu_s']:.0f} |"
  )


def version(name: str) -> str | None:
  try:
    return metadata.version(name)
  except metadata.PackageNotFoundError:
    return None


def main() -> None:
  if sys.argv[1:2] == ["--one"]:
    target, model, name, path = sys.argv[2:]
    row, text = compile_one(target, model, name)
    Path(path).with_suffix(".txt").write_text(text)
    Path(path).write_text(json.dumps(row))
    return
  if sys.argv[1:] == ["--table"]:
    results = Path(__file__).parent / "results" / "overlap.json"
    print(markdown(json.loads(results.read_text())["rows"]))
    return
  parser = argparse.ArgumentParser()
  parser.add_argument("--model", nargs="*", choices=MODELS, default=[*MODELS])
  parser.add_argument("--target", nargs="*", choices=TARGETS, default=[*TARGETS])
  parser.add_argument("--exchange", nargs="*", choices=EXCHANGES, default=[*EXCHANGES])
  args = parser.parse_args()
  for model, target, name in itertools.product(args.model, args.target, args.exchange):
    if not kept(target, model, name).exists():
      make_row(target, model, name)
      print(model, target, name, flush=True)
  everything = itertools.product(MODELS, TARGETS, EXCHANGES)
  rows = [read_row(t, m, n) for m, t, n in everything if kept(t, m, n).exists()]
  print(markdown(rows))
  packages = ("jaxlib", "libtpu", "jax-cuda12-plugin", "flax", "optax")
  report("overlap", rows=rows, versions={name: version(name) for name in packages})


if __name__ == "__main__":
  main()
