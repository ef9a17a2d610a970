"""Contrastive losses at batch 32,768: equality over devices and micro-batches, and memory.

    JAX_NUM_CPU_DEVICES=8 python benchmarks/contrastive.py [rows]

Two towers (16 inputs, embeddings of 32 numbers) and a step with InfoNCE, NT-Xent (SimCLR) and
SigLIP, once on one device in one piece and once on 8 devices with 4 micro-batches each.
`loss` and `gradient` are relative differences of the two, the latter of the whole gradient.
`reference` compares a step of 1,024 rows with float64 numpy: the loss, and the gradient
along a random direction by central differences. `temp_mb` is the memory that the compiled
step of one device needs besides its arguments, in blocks of 1,024 columns (`chunked`) and
with the whole matrix of all pairs (`whole`).
"""

from __future__ import annotations

import os
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import report

from jaxscale.mesh import batch_axes, batch_sharding, make_mesh
from jaxscale.training.contrastive import contrastive
from jaxscale.training.gathered import GatheredObjective, gathered_loss
from jaxscale.training.state import init_state
from jaxscale.training.step import make_train_step
from jaxscale.training.types import StepOptions

ROWS = int(sys.argv[1]) if len(sys.argv) > 1 else 32_768
INPUTS, DIM, TEMPERATURE = 16, 32, 0.1
KINDS = ("infonce", "nt_xent", "siglip")


def init(key: jax.Array):
  keys = dict(zip("ab", jax.random.split(key), strict=True))
  return {name: jax.random.normal(k, (INPUTS, DIM)) / 4 for name, k in keys.items()}, {}


def apply(params, state, batch, train, keys):
  return tuple(jnp.tanh(batch[name] @ params[name]) for name in "ab"), state


def rows(count: int) -> dict[str, np.ndarray]:
  rng = np.random.default_rng(0)
  latent = rng.normal(size=(count, INPUTS))
  return {n: (latent + rng.normal(size=latent.shape)).astype("float32") for n in "ab"}


def step_of(kind: str, devices: int, micros: int, count: int, chunk: int = 1024):
  """Return a compiled step of SGD with the rate 1, the first state, and a batch."""
  mesh = make_mesh(devices=jax.devices()[:devices])
  objective = contrastive(kind, temperature=TEMPERATURE, chunk=chunk)  # pyright: ignore
  loss = gathered_loss(apply, GatheredObjective(objective.loss), batch_axes(mesh))
  state = init_state(init, optax.sgd(1.0), mesh)
  options = StepOptions(num_microbatches=micros)
  step = make_train_step(loss, optax.sgd(1.0), mesh, options=options)
  batch = jax.device_put(rows(count), batch_sharding(mesh))
  return step.lower(state, batch).compile(), state, batch  # pyright: ignore


def results(*arguments) -> tuple[float, np.ndarray, float]:
  """Return the loss, the whole gradient and the seconds of a step."""
  step, state, batch = step_of(*arguments)
  before = jax.device_get(state.params)
  clock = time.perf_counter()
  state, metrics = jax.block_until_ready(step(state, batch))
  seconds = time.perf_counter() - clock
  grads = jax.tree.map(lambda old, new: (old - new).ravel(), before, jax.device_get(state.params))
  return float(metrics["loss"]), np.concatenate(jax.tree.leaves(grads)), seconds


def loss_in_float64(kind: str, params: dict, batch: dict) -> float:
  """Return the mean loss by numpy, from whole matrices."""
  a, b = (np.tanh(batch[n].astype(float) @ params[n]) for n in "ab")
  a, b = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (a, b))
  cosines, eye = a @ b.T / TEMPERATURE, np.eye(len(a), dtype=bool)
  if kind == "siglip":
    return np.log1p(np.exp(np.where(eye, -1, 1) * (cosines - 10.0))).sum() / len(a)
  logits = [cosines, cosines.T]
  if kind == "nt_xent":
    within = (np.where(eye, -np.inf, x @ x.T / TEMPERATURE) for x in (a, b))
    logits = [np.hstack(pair) for pair in zip(logits, within, strict=True)]
  return float(np.mean([np.log(np.exp(x).sum(1)) - np.diag(cosines) for x in logits]))


def reference(kind: str) -> dict[str, float]:
  loss, grad, _ = results(kind, 8, 4, 1024)
  params, batch = jax.device_get(init(jax.random.key(0))[0]), rows(1024)
  params = {n: x.astype(float) for n, x in params.items()}
  rng = np.random.default_rng(1)
  way = {n: rng.normal(size=x.shape) for n, x in params.items()}
  moved = [
    loss_in_float64(kind, {n: x + s * 1e-5 * way[n] for n, x in params.items()}, batch)
    for s in (1, -1)
  ]
  slope, found = (moved[0] - moved[1]) / 2e-5, grad @ np.concatenate([way[n].ravel() for n in "ab"])
  exact = loss_in_float64(kind, params, batch)
  return {"loss": float(abs(loss - exact) / exact), "slope": float(abs(found / slope - 1))}


def main() -> None:
  out = {}
  for kind in KINDS:
    loss, grad, alone_s = results(kind, 1, 1, ROWS)
    other, split, split_s = results(kind, 8, 4, ROWS)
    memory = {
      name: round(step_of(kind, 1, 1, ROWS, c)[0].memory_analysis().temp_size_in_bytes / 1e6, 1)
      for name, c in (("chunked", 1024), ("whole", ROWS))
    }
    out[kind] = {
      "loss": abs(loss - other) / loss,
      "gradient": float(np.linalg.norm(grad - split) / np.linalg.norm(grad)),
      "reference": reference(kind),
      "temp_mb": memory,
      "step_s": {"one device": round(alone_s, 1), "8 x 4": round(split_s, 1)},
    }
    print(kind, out[kind], file=sys.stderr, flush=True)
  report("contrastive", keep=ROWS == 32_768, rows=ROWS, kinds=out)


if __name__ == "__main__":
  main()
