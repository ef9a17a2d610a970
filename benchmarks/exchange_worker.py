"""One process of benchmarks/exchange.py: it compiles, then exchanges in turns.

It waits for lines on stdin, so that the first process can compile alone, and
answers each with a line that begins with `MARK`; the first one's last has the
measurements.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxscale import cluster, collectives, hlo, models
from jaxscale.config.config_file import load_file
from jaxscale.exchange import Exchange, plain
from jaxscale.exchange.buckets import BUCKET_BYTES, bucketed
from jaxscale.exchange.low_precision import half_precision, int8
from jaxscale.exchange.one_bit import one_bit
from jaxscale.exchange.wrappers import delayed
from jaxscale.mesh import make_mesh

CONFIGS = Path(__file__).parents[1] / "configs"
power_sgd = load_file(CONFIGS / "exchange_power_sgd.py").power_sgd
top_k = load_file(CONFIGS / "exchange_top_k.py").top_k

MARK = "@exchange "
BASELINE, DEFAULT = "psum of the tree", "default: buckets of 25 MiB"
# What is compared: the baseline, the default, then the rest.
NAMES = (
  BASELINE,
  DEFAULT,
  "plain",
  "ring",
  "torus",
  "hierarchical",
  "halving_doubling",
  "bf16, summed in float32",
  "bf16, summed as payload",
  "fp16, summed in float32",
  "int8",
  "1-bit",
  "top-k 1 %",
  "PowerSGD-4",
  "delayed plain",
)
PROBE = 16 * 2**20  # float32 that a device sends to its neighbour, 64 MiB


def gradient_shapes() -> Any:
  """Return the shapes of ResNet-50 with 1,000 classes: 161 tensors, 25.6 M parameters."""
  resnet = models.functions(models.make_resnet(50, num_classes=1000), (224, 224, 3))
  params, _ = jax.eval_shape(resnet.init, jax.random.key(0))
  return params


def exchanges(mesh: Any, shapes: Any) -> dict[str, Exchange]:
  """Return the exchanges to compare, by `NAMES`, for gradients of these shapes."""
  axes, n = mesh.axis_names, mesh.size

  def psum_of_the_tree(grads, state):
    return jax.tree.map(lambda s: s / n, lax.psum(grads, axes)), state

  def whole(algorithm):
    # All gradients as one vector, so that permutes are as many as for one.
    everything = 4 * sum(x.size for x in jax.tree.leaves(shapes))
    dims = list(reversed(mesh.shape.items())) if algorithm == "torus" else None
    by = collectives.plan(mesh.shape, everything, algorithm, dims=dims)
    reduce = lambda x: collectives.sum_tree(x, by)  # noqa: E731
    return bucketed(axes, bucket_bytes=everything, reduce=reduce)

  return {
    BASELINE: plain(axes)._replace(exchange=psum_of_the_tree),
    DEFAULT: bucketed(axes, bucket_bytes=BUCKET_BYTES),
    "plain": plain(axes),
    "ring": whole("ring"),
    "torus": whole("torus"),
    "hierarchical": whole("hierarchical"),
    "halving_doubling": whole("halving_doubling"),
    "bf16, summed in float32": half_precision(axes),
    "bf16, summed as payload": half_precision(axes, sum_in="payload"),
    "fp16, summed in float32": half_precision(axes, "float16"),
    "int8": int8(axes),
    "1-bit": one_bit(axes, num_devices=n),
    "top-k 1 %": top_k(axes, share=0.01),
    "PowerSGD-4": power_sgd(axes, rank=4),
    "delayed plain": delayed(plain(axes)),
  }


def program(exchange: Exchange, mesh: Any) -> Any:
  """Return a jitted (gradients [devices, ...], state [devices, ...]) -> (means, state)."""
  axes = mesh.axis_names

  def local(grads, state):
    grads, state = jax.tree.map(lambda x: x[0], (grads, state))
    means, state = exchange.exchange(grads, state)
    return means, jax.tree.map(lambda x: x[None], state)

  mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(axes), P(axes)), out_specs=(P(), P(axes)))
  return jax.jit(mapped, donate_argnums=1)  # as the train step does


def gradients(seed: int, shapes: Any) -> Any:
  """Return normally distributed numbers as numpy arrays of these shapes."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda x: np.float32(0.01) * rng.standard_normal(x.shape, np.float32), shapes)


def one_a_device(mesh: Any, own: Any) -> Any:
  """Return arrays [devices, ...] whose local rows are this process's trees."""
  rows, count = NamedSharding(mesh, P(mesh.axis_names)), mesh.local_mesh.size

  def repeated(x):
    same = np.broadcast_to(np.asarray(x), (count, *x.shape))
    return jax.make_array_from_process_local_data(rows, same)

  return jax.tree.map(repeated, own)


def without_names(text: str) -> str:
  """Return a program's text without its name and source locations."""
  text = re.sub(r", metadata=\{[^}]*\}", "", text)
  return re.sub(r"HloModule \S+|stack_frame_id=\d+", "", text).split("\nFileNames")[0]


def compile_all(
  mesh: Any, compared: dict[str, Exchange], shapes: Any
) -> tuple[dict[str, Callable[[], Any]], dict[str, dict[str, Any]]]:
  """Return by name a function that exchanges the gradients once, and facts about its program."""
  own = gradients(jax.process_index(), shapes)
  grads = one_a_device(mesh, own)
  calls, facts, texts = {}, {}, {}
  for name, exchange in compared.items():
    state = one_a_device(mesh, exchange.init(own))
    began = time.perf_counter()
    compiled = program(exchange, mesh).lower(grads, state).compile()
    seconds = time.perf_counter() - began
    calls[name] = caller(compiled, grads, state)
    texts[name] = without_names(compiled.as_text())
    table = hlo.collectives(compiled, mesh)
    facts[name] = {
      "compile_s": round(seconds, 1),
      "sent_mb": round(hlo.total(table).wire_bytes / 1e6, 2),
      "sent_as": sorted({f"{c.kind} {d}" for c in table for d in c.dtypes}),
    }
  if "plain" in texts:
    same = texts[BASELINE] == texts["plain"]
    facts["plain"]["same_program_as_baseline"] = same
  return calls, facts


def caller(compiled: Any, grads: Any, state: Any) -> Callable[[], Any]:
  """Return a function that exchanges once, from the state that its last call returned."""

  def call():
    nonlocal state
    means, state = compiled(grads, state)
    return means, state

  return call


def alone(mesh: Any, function: Callable, count: int, out: Any) -> Callable[[], Any]:
  """Return a function that runs a jitted collective of `count` ones."""
  mapped = jax.shard_map(
    lambda: function(lax.pcast(jnp.ones(count), mesh.axis_names, to="varying")),
    mesh=mesh,
    in_specs=(),
    out_specs=out,
  )
  return jax.jit(mapped)


def turns(mesh: Any, calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
  """Return the seconds of each function in each turn, of the slowest process."""
  names = list(calls)
  empty = alone(mesh, lambda x: lax.psum(x, mesh.axis_names), 1, P())
  own: dict[str, list[float]] = {name: [] for name in names}
  jax.block_until_ready(empty())
  for turn in range(rounds):
    shift = turn % len(names)  # nobody always comes after the same one
    for name in names[shift:] + names[:shift]:
      jax.block_until_ready(empty())  # all begin together
      began = time.perf_counter()
      jax.block_until_ready(calls[name]())
      own[name].append(time.perf_counter() - began)
  everyone = cluster.gather(list(own.values()))
  return {
    name: [max(each) for each in zip(*(p[i] for p in everyone), strict=True)]
    for i, name in enumerate(names)
  }


def neighbour_gbit_s(mesh: Any) -> float:
  """Return the Gbit/s of a device's link while it sends to one neighbour and receives from one."""
  axes, n = mesh.axis_names, mesh.size
  ring = [(i, (i + 1) % n) for i in range(n)]
  shift = alone(mesh, lambda x: lax.ppermute(x, axes, ring), PROBE, P(axes))
  _, *seconds = turns(mesh, {"shift": shift}, 4)["shift"]
  return round(32 * PROBE / min(seconds) / 1e9, 2)


def answer(what: Any) -> None:
  print("\n" + MARK + json.dumps(what), flush=True)


def wait() -> None:
  if not sys.stdin.readline():
    os._exit(1)  # who started us is gone


def main() -> None:
  request = json.loads(sys.argv[1])
  cluster.initialize()
  mesh = make_mesh(replica=1 if jax.process_count() % 2 else 2)
  shapes = gradient_shapes()
  every = exchanges(mesh, shapes)
  answer("ready")
  wait()
  some = {name: every[name] for name in request["names"]}
  calls, facts = compile_all(mesh, some, shapes)
  answer("compiled")
  wait()
  link = neighbour_gbit_s(mesh)
  turns(mesh, calls, 2)  # to be warm
  both = {name: calls[name] for name in (BASELINE, DEFAULT)}
  pairs = turns(mesh, both, request["pairs"])
  rounds = turns(mesh, calls, request["rounds"])
  answer({"rows": facts, "pairs": pairs, "rounds": rounds, "link": link})
  wait()
  os._exit(0)  # nothing is left to be written; JAX's exit barrier may take long


if __name__ == "__main__":
  main()
