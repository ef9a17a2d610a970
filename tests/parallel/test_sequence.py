"""Attention over tokens that are split: exact, and what crosses the network."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P, lax

from jaxscale import hlo
from jaxscale.parallel import sequence
from jaxscale.parallel.ring import ring_attention
from support.attention64 import attention64
from support.cases import all_slow_except
from support.errors import config_error
from support.tiny_pipeline import mesh_of
from support.trees import largest_distance

ROWS, TOKENS, HEADS, WIDTH = 2, 24, 8, 4
MESH = {"data": 2, "model": 4}
WAYS = {
  "ring": (ring_attention, {}),
  "ring, small blocks": (ring_attention, {"block": 4}),  # of 6 keys: 4 and 2
  "ring, 16 keys": (ring_attention, {"block": 16}),
  "ring, blocks of 2": (ring_attention, {"block": 2}),
  "all_to_all": (sequence.all_to_all_attention, {}),
}


@functools.cache
def inputs(groups, tokens=TOKENS):
  """q, k, v and a gradient of the output, float32."""
  rng = np.random.default_rng(0)
  heads = (HEADS, groups, groups, HEADS)
  return tuple(np.float32(rng.normal(size=(ROWS, tokens, n, WIDTH))) for n in heads)


@functools.cache
def by_hand(groups, causal):
  q, k, v, dout = inputs(groups)
  return attention64(q, k, v, dout, causal=causal)


def on_mesh(way, causal):
  """Return a jitted (q, k, v, dout) -> (out, dq, dk, dv) with tokens split over `model`."""
  attend, settings = WAYS[way]
  mesh = mesh_of(**MESH)

  def local(q, k, v, dout):
    f = functools.partial(attend, axis="model", causal=causal, **settings)
    out, pull = jax.vjp(f, q, k, v)
    return out, *pull(dout)

  tokens = P("data", "model")
  return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=tokens, out_specs=tokens))


def zigzag_order(tokens, devices):
  """Return the tokens in the order of the devices, which hold a piece from each end."""
  pieces = np.arange(tokens).reshape(2 * devices, -1)
  front, back = pieces[:devices], pieces[::-1][:devices]
  return np.stack([front, back], axis=1).reshape(-1)


def order_of(way, tokens=TOKENS):
  is_zigzag = way.startswith(("ring", "zigzag"))
  return zigzag_order(tokens, MESH["model"]) if is_zigzag else np.arange(tokens)


def apply(way, causal, arrays):
  order = order_of(way)
  results = on_mesh(way, causal)(*(x[:, order] for x in arrays))
  return tuple(np.asarray(x, np.float32)[:, np.argsort(order)] for x in results)


@pytest.mark.parametrize("groups", all_slow_except([8, 4, 1], 4))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("way", [way for way in WAYS if way != "ring, 16 keys"])
def test_attention_is_exact(way, causal, groups):
  if way == "all_to_all" and groups == 1:
    pytest.skip("needs a group a device")
  results = apply(way, causal, inputs(groups))
  assert largest_distance(results, by_hand(groups, causal)) < 1e-6


def test_blocks_that_nobody_sees_are_left_out():
  # NaN times a probability of zero would be NaN.
  order, share = order_of("ring"), TOKENS // 4
  q, k, v, dout = (x[:, order].copy() for x in inputs(4))
  last = np.arange(TOKENS) // share == 0
  hidden = last & (order >= TOKENS - share // 2)  # at the end of the sequence
  v[:, hidden] = np.nan
  out, *_ = on_mesh("ring", True)(q, k, v, dout)
  others = np.asarray(out)[:, ~last]
  assert hidden.any() and np.isfinite(others).all()


def test_collectives_of_a_step():
  groups, n = 4, MESH["model"]
  part = ROWS // 2 * TOKENS // n * WIDTH * 4  # bytes of one head's tokens
  found = {}
  for way in ("ring", "all_to_all"):
    compiled = on_mesh(way, True).lower(*inputs(groups)).compile()
    found[way] = hlo.collectives(compiled, mesh_of(**MESH))
  # Keys and values n-1 times forwards and backwards, their gradients n times.
  permutes = hlo.total(found["ring"], "collective-permute", "model")
  assert permutes == hlo.total(found["ring"])
  assert permutes.times == 2 * (n - 1) * 2 + 2 * n
  assert permutes.wire_bytes == permutes.times * groups * part
  # q, k, v there and out back; all of them backwards.
  moved = hlo.total(found["all_to_all"], "all-to-all", "model")
  assert moved == hlo.total(found["all_to_all"])
  assert moved.times == 8
  assert moved.payload_bytes == 2 * (2 * HEADS + 2 * groups) * part
  assert moved.wire_bytes == moved.payload_bytes * (n - 1) / n


def temporary(way, tokens):
  compiled = on_mesh(way, True).lower(*inputs(4, tokens)).compile()
  return compiled.memory_analysis().temp_size_in_bytes


def test_memory_of_a_ring_grows_with_the_tokens():
  """Not with their square, and there are no copies of all keys."""
  short, long = temporary("ring, 16 keys", 512), temporary("ring, 16 keys", 2048)
  assert long < 4.1 * short
  assert temporary("all_to_all", 2048) > 25 * long
  # Of a device, in float32: a block's scores and three arrays like them; a token's
  # q, k, v, output, their gradients, and as much again.
  own = 2048 // MESH["model"]
  assert long < 4 * (4 * HEADS * 16 * own) + 4 * (4 * WIDTH * (4 * HEADS + 4 * 4) * own)


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_positions_are_the_order(order):
  mesh = mesh_of(model=4)
  f = functools.partial(sequence.token_positions, TOKENS // 4, "model", order)
  found = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(), out_specs=P("model")))()
  assert found.dtype == np.int32
  np.testing.assert_array_equal(found, order_of(order))
  assert sorted(found.tolist()) == list(range(TOKENS))


def test_zigzag_order_shares_the_work_out():
  order = zigzag_order(16, 4)
  assert order.tolist() == [0, 1, 14, 15, 2, 3, 12, 13, 4, 5, 10, 11, 6, 7, 8, 9]
  seen = (order + 1).reshape(4, -1).sum(axis=1)  # keys that a device's queries see
  assert set(seen.tolist()) == {17 * 2}


def test_regions_between_the_branches_of_tensor_parallelism():
  rng = np.random.default_rng(4)
  shapes = (2, 8, 6), (6,), (6, 16), (16, 6)
  h, scale, up, down = (np.float32(rng.normal(size=shape) * 0.3) for shape in shapes)

  def branch(h, scale, up, down, enter=lambda x: x, reduce=lambda x: x):
    x = enter(h * scale)
    return ((h + reduce(jnp.tanh(x @ up) @ down)) ** 2).sum()

  expected = jax.value_and_grad(branch, argnums=(0, 1, 2, 3))(h, scale, up, down)
  mesh = mesh_of(model=4)

  def local(*args):
    enter = functools.partial(sequence.gather_tokens, axis="model")
    reduce = functools.partial(sequence.scatter_tokens, axis="model")
    f = functools.partial(branch, enter=enter, reduce=reduce)
    loss, grads = jax.value_and_grad(f, argnums=(0, 1, 2, 3))(*args)
    return lax.psum(loss, "model"), grads

  specs = P(None, "model"), P(), P(None, "model"), P("model")
  mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(P(), specs))
  compiled = jax.jit(mapped).lower(h, scale, up, down).compile()
  assert largest_distance(compiled(h, scale, up, down), expected) < 1e-6
  table = hlo.collectives(compiled, mesh)
  for kind in ("all-gather", "reduce-scatter"):
    # One forwards and one backwards, each of all tokens.
    assert hlo.total(table, kind, "model")[:2] == (2, 2 * h.nbytes)


ALL_TO_ALL = functools.partial(sequence.all_to_all_attention, axis="model", causal=True)
HEADS_LEFT = "attend='all_to_all' cannot split 6 heads over the 4 devices of 'model'; give "
GROUPS_LEFT = r"attend='all_to_all' cannot split 2 key/value heads over the 4 devices.*"
TOKENS_LEFT = "tokens=6 cannot be split over the 4 devices of 'model'; give a multiple"
MISTAKES = [
  (lambda q, k: ALL_TO_ALL(q[:, :, :6], k, k), HEADS_LEFT + "attend='ring' or fewer devices"),
  (lambda q, k: ALL_TO_ALL(q, k[:, :, :2], k[:, :, :2]), GROUPS_LEFT),
  (lambda q, k: sequence.scatter_tokens(q, axis="model"), TOKENS_LEFT),
]


@pytest.mark.parametrize("call, line", MISTAKES)
def test_mistakes_are_one_line(call, line):
  q, k, *_ = inputs(4)
  tokens = P("data", "model")
  specs = dict(in_specs=tokens, out_specs=tokens)
  mapped = jax.shard_map(lambda q, k: (call(q, k), q)[1], mesh=mesh_of(**MESH), **specs)
  with config_error() as error:
    jax.eval_shape(mapped, q, k)
  assert re.fullmatch(line, str(error.value))
