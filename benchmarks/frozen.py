"""Frozen parameters and LoRA: bytes of state and exchange, and the time of a step.

    python benchmarks/frozen.py

A small Transformer on 8 simulated devices trains whole, with 93 % of its parameters frozen,
and with LoRA, under data parallelism and FSDP. Bytes are those of one device: of the
optimizer's state (AdamW) between steps, and of what the compiled step sends to sum gradients
(`hlo.collectives`: all-reduce and reduce-scatter). Time is processor time of all threads, in
turns, which other work on the machine disturbs less than the clock; `time` is its median
relative to the whole training of the same layout. `memory_mb` is what the step needs next to
its arguments.

Without frozen parameters a step has three products of equal size for each kernel. A frozen
kernel in the middle of the model saves the one for its gradient; frozen kernels below all
trained ones also save that for the gradient of their inputs.
"""

from __future__ import annotations

import os
import statistics
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
  " --xla_force_host_platform_device_count=8 --xla_cpu_multi_thread_eigen=false"
)

from typing import Any

import jax
import numpy as np
from common import report

from jaxscale import hlo, optim
from jaxscale.exchange import plain
from jaxscale.mesh import batch_sharding, make_mesh
from jaxscale.models import decoder, lora, make_transformer
from jaxscale.parallel import make_layout, stack_loss
from jaxscale.parallel.layout_exchange import exchange_axes
from jaxscale.parallel.rules import Rule
from jaxscale.parallel.trainable import trainable_layout
from jaxscale.training import init_state
from jaxscale.training.step import make_train_step
from jaxscale.training.types import StepOptions

STEPS, TURNS, ROWS, TOKENS, VOCAB = 1, 12, 16, 128, 1024
SIZES: dict[str, Any] = {
  "num_layers": 4,
  "width": 256,
  "num_heads": 8,
  "hidden": 704,
  "vocab_size": VOCAB,
}
TX = optim.adamw(1e-3, stacked=optim.matching("^layers/"))
RULES = [Rule(*rule) for rule in decoder.SHARDING]
LAYOUTS: dict[str, Any] = {"data": ({"data": 8}, "none"), "fsdp": ({"data": 1, "fsdp": 8}, "fsdp")}
# Each with the pattern of the trained parameters.
PARTS = {
  "whole": None,
  "output kernels of attention": "layers/o/",
  "head": "^head/",
  "LoRA of rank 8": lora.LEAVES,
}


def made(layout_name: str, part: str) -> tuple[Any, Any, Any]:
  """Return the compiled step, its state and a batch."""
  sizes, shard = LAYOUTS[layout_name]
  mesh, pattern, stack = make_mesh(**sizes), PARTS[part], make_transformer(**SIZES)
  if pattern == lora.LEAVES:
    stack = lora.adapt(stack, lora.Lora(rank=8, scale=2.0))
  shapes = jax.eval_shape(stack.init, jax.random.key(0))
  layout = make_layout(mesh, shapes, RULES, shard=shard)
  exchange = plain(exchange_axes(trainable_layout(layout, pattern)))
  state = init_state(
    lambda key: (stack.init(key), {}), TX, mesh, exchange, layout=layout, trainable=pattern
  )
  tokens = np.random.default_rng(0).integers(0, VOCAB, (ROWS, TOKENS)).astype(np.int32)
  batch = jax.device_put({"tokens": tokens, "targets": tokens}, batch_sharding(mesh))
  loss, options = stack_loss(stack, layout), StepOptions(trainable=pattern)
  step: Any = make_train_step(loss, TX, mesh, exchange, layout=layout, options=options)
  return step.lower(state, batch).compile(), state, batch


def bytes_on_device(tree: Any) -> int:
  return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def main() -> None:
  results: dict[str, Any] = {}
  for layout in LAYOUTS:
    runs = {part: made(layout, part) for part in PARTS}
    rows = results[layout] = {}
    for part, (step, state, _) in runs.items():
      sent = hlo.collectives(step)
      sums = [hlo.total(sent, kind).wire_bytes for kind in ("all-reduce", "reduce-scatter")]
      trained = jax.tree.leaves(state.opt_state[0].mu)
      share = sum(x.size for x in trained) / sum(x.size for x in jax.tree.leaves(state.params))
      rows[part] = {
        "trained": round(share, 3),
        "optimizer_mb": round(bytes_on_device(state.opt_state) / 1e6, 3),
        "exchange_mb": round(sum(sums) / 1e6, 3),
        "memory_mb": round(step.memory_analysis().temp_size_in_bytes / 1e6, 1),
      }
    seconds: dict[str, list[float]] = {part: [] for part in runs}
    for turn in range(TURNS + 1):
      for part in [*runs][:: 1 if turn % 2 else -1]:
        step, state, batch = runs[part]
        clock = time.process_time()
        for _ in range(STEPS):
          state, _ = step(state, batch)
        jax.block_until_ready(state)
        runs[part] = step, state, batch
        if turn:  # The first warms up.
          seconds[part].append((time.process_time() - clock) / STEPS)
    for part, spent in seconds.items():
      ratios = [a / b for a, b in zip(spent, seconds["whole"], strict=True)]
      rows[part]["ms"] = round(1e3 * statistics.median(spent), 1)
      rows[part]["time"] = round(statistics.median(ratios), 3)
  report("frozen", model=SIZES, rows=ROWS, tokens=TOKENS, devices=8, turns=TURNS, results=results)


if __name__ == "__main__":
  main()
