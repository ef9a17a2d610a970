"""A head that is the table of the embedding, in every layout, against a head of its own."""

import functools

import jax
import numpy as np
import pytest

from jaxscale import config as cfg
from jaxscale import data
from jaxscale.experiment import build
from jaxscale.models import make_transformer
from support.cases import all_slow_except
from support.configs import tiny_language
from support.stacks import run_stack
from support.steps import on_mesh

VOCABULARY = 40
SIZES = dict(num_layers=2, width=24, num_heads=6, num_kv_heads=2, hidden=20)
LR, STEPS = 0.5, 3


def batch(seed):
  rng = np.random.default_rng(seed)
  targets = rng.integers(-1, VOCABULARY, (8, 8)).astype(np.int32)
  return {"tokens": np.abs(rng.permuted(targets)), "targets": targets}


def first_params():
  """Parameters of a spread that makes every part count, without rows of padding."""
  stack = make_transformer(vocab_size=VOCABULARY, **SIZES, pad_vocab_to=1, tied=True)
  leaves, tree = jax.tree.flatten(stack.init(jax.random.key(0)))
  rng = np.random.default_rng(0)
  return tree.unflatten(leaf + rng.normal(0, 0.2, leaf.shape).astype(np.float32) for leaf in leaves)


@functools.cache
def expected():
  """Losses and parameters of SGD, with gradients of an untied model on one device.

  Both its matrices are the table, so the table's gradient is the sum of theirs.
  """
  stack = make_transformer(vocab_size=VOCABULARY, **SIZES, pad_vocab_to=1)
  params, losses = first_params(), []

  def mean_loss(params, batch):
    totals = run_stack(stack, params, batch)
    return totals["loss"] / totals["examples"].astype(np.float32)

  step = jax.jit(jax.value_and_grad(mean_loss))
  for seed in range(STEPS):
    head = params["head"] | {"kernel": params["embed"]["table"].T}
    loss, grads = jax.device_get(step(params | {"head": head}, batch(seed)))
    losses.append(loss)
    by_head = grads["head"].pop("kernel").T
    grads["embed"]["table"] = grads["embed"]["table"] + by_head
    params = jax.tree.map(lambda w, g: np.float32(w - LR * g), params, grads)
  return losses, params


LAYOUTS = {
  "one device": ({}, {}),
  "data": ({"data": 4}, {}),
  "zero2": ({"data": 1, "fsdp": 4}, {"shard": "zero2"}),
  "fsdp": ({"data": 2, "fsdp": 2}, {"shard": "fsdp"}),
  "fsdp, summed in the backward pass": (
    {"data": 2, "fsdp": 2},
    {"shard": "fsdp", "slow_axes": "in_backward", "remat": "full"},
  ),
  "tensor": ({"data": 2, "model": 2}, {}),
  "fsdp, loss of 3 tokens at a time": ({"data": 2, "fsdp": 2}, {"shard": "fsdp", "loss_chunk": 3}),
  "tensor, loss of 5 tokens at a time": ({"data": 2, "model": 2}, {"loss_chunk": 5}),
  "tensor and tokens, fsdp": (
    {"data": 1, "fsdp": 2, "model": 2},
    {"shard": "fsdp", "model": "layers_and_tokens"},
  ),
  "ring": ({"data": 1, "model": 2}, {"model": "ring"}),
  "all to all": ({"data": 1, "model": 2}, {"model": "all_to_all"}),
  "gpipe": ({"data": 2, "stage": 2}, {"schedule": "gpipe"}),
  "gpipe, tensor, fsdp": (
    {"data": 1, "stage": 2, "fsdp": 2, "model": 2},
    {"schedule": "gpipe", "shard": "fsdp"},
  ),
  "1f1b": ({"data": 1, "stage": 2}, {"schedule": "1f1b"}),
  "1f1b, tensor, zero2": (
    {"data": 1, "stage": 2, "fsdp": 2, "model": 2},
    {"schedule": "1f1b", "shard": "zero2"},
  ),
  "1f1b, ring": ({"data": 1, "stage": 2, "model": 2}, {"schedule": "1f1b", "model": "ring"}),
}
QUICK = "fsdp", "tensor", "1f1b, tensor, zero2"


@pytest.mark.parametrize("name", all_slow_except(LAYOUTS, *QUICK))
def test_a_tied_head_trains_as_two_equal_matrices(name):
  mesh, layout = LAYOUTS[name]
  config = tiny_language(
    model=cfg.Transformer(**SIZES, pad_vocab_to=4, tied=True),
    data=cfg.Text(sequence_length=8),
    optimizer=cfg.SGD(lr=LR, momentum=0.0, nesterov=False, weight_decay=0.0),
    schedule=cfg.Steps(),
    batch_size=8,
    accumulate_steps=2 if "stage" in mesh else 1,
    mesh=cfg.Mesh(**mesh),
    layout=cfg.Layout(**layout),
  )
  datasets = tuple(
    x._replace(info=data.TextInfo("words", VOCABULARY, 8)) for x in config.data.abstract(8)
  )
  devices = jax.devices()[: np.prod([*mesh.values()], dtype=int)]
  built = build.experiment(config, devices=devices, datasets=datasets)
  state = built.init_state()
  where = jax.tree.map(lambda x: x.sharding, state.params)
  state = state._replace(params=jax.device_put(first_params(), where))
  losses, params = expected()
  for seed, loss in enumerate(losses):
    state, metrics = built.train_step(state, on_mesh(built.mesh, batch(seed)))
    np.testing.assert_allclose(metrics["loss"], loss, rtol=2e-6)
  assert "kernel" not in state.params["head"]
  for found, wanted in zip(*map(jax.tree.leaves, (state.params, params)), strict=True):
    np.testing.assert_allclose(found, wanted, rtol=0, atol=4e-6 * np.abs(wanted).max())
  totals = jax.device_get(built.eval_step(state.params, {}, on_mesh(built.mesh, batch(9))))
  stack = make_transformer(vocab_size=VOCABULARY, **SIZES, pad_vocab_to=1, tied=True)
  alone = run_stack(stack, params, batch(9))
  np.testing.assert_allclose(totals["loss"].sum(), alone["loss"], rtol=2e-6)
