"""Attention over tokens that are split: exact, and what crosses the network."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxscale import hlo
from jaxscale.collectives import vary
from jaxscale.collectives.typed import varying
from jaxscale.errors import ConfigError
from jaxscale.models.attention import attention
from jaxscale.models.stack import Ops
from jaxscale.parallel.ring import ring_attention
from jaxscale.parallel.sequence import (
  all_to_all_attention,
  gather_tokens,
  scatter_tokens,
  split,
  token_positions,
  zigzag_order,
)
from support.cases import all_slow_except
from support.tiny_pipeline import mesh_of
from support.trees import largest_distance

ROWS, TOKENS, HEADS, WIDTH = 2, 24, 8, 4
MESH = {"data": 2, "model": 4}
WAYS = {
  "ring": (ring_attention, {}),
  "ring, small blocks": (ring_attention, {"block": 4}),  # of 6 keys: 4 and 2
  "ring, 16 keys": (ring_attention, {"block": 16}),
  "zigzag": (ring_attention, {"order": "zigzag", "block": 2}),
  "all_to_all": (all_to_all_attention, {}),
}


@functools.cache
def inputs(groups, tokens=TOKENS):
  """q, k, v and a gradient of the output, float32."""
  rng = np.random.default_rng(0)
  heads = (HEADS, groups, groups, HEADS)
  return tuple(np.float32(rng.normal(size=(ROWS, tokens, n, WIDTH))) for n in heads)


@functools.cache
def by_hand(groups, causal):
  """Output and gradients in float64, a head at a time, from the definition."""
  q, k, v, dout = (x.astype(np.float64) for x in inputs(groups))
  out, dq, dk, dv = (np.zeros_like(x) for x in (q, q, k, v))
  for row in range(ROWS):
    for head in range(HEADS):
      one, other = (row, slice(None), head), (row, slice(None), head * groups // HEADS)
      s = q[one] @ k[other].T / np.sqrt(WIDTH)
      if causal:
        s[np.triu_indices(TOKENS, 1)] = -np.inf
      p = np.exp(s - s.max(-1, keepdims=True))
      p /= p.sum(-1, keepdims=True)
      out[one] = p @ v[other]
      dp = dout[one] @ v[other].T
      ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / np.sqrt(WIDTH)
      dq[one] = ds @ k[other]
      dk[other] += ds.T @ q[one]
      dv[other] += p.T @ dout[one]
  return out, dq, dk, dv


def on_mesh(way, causal):
  """A jitted (q, k, v, dout) -> (out, dq, dk, dv), tokens over `model`."""
  attend, settings = WAYS[way]
  mesh = mesh_of(**MESH)

  def local(q, k, v, dout):
    f = functools.partial(attend, axis="model", causal=causal, **settings)
    out, pull = jax.vjp(f, q, k, v)
    return out, *pull(dout)

  tokens = P("data", "model")
  return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=tokens, out_specs=tokens))


def order_of(way, tokens=TOKENS):
  zigzag = way == "zigzag"
  return zigzag_order(tokens, MESH["model"]) if zigzag else np.arange(tokens)


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


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ring", "zigzag", "all_to_all"])
def test_bfloat16_is_as_near_as_on_one_device(way):
  arrays = tuple(jnp.asarray(x, jnp.bfloat16) for x in inputs(4))
  # JAX's own attention has mixed dtypes in its derivative.
  with jax.numpy_dtype_promotion("standard"):
    out, pull = jax.vjp(functools.partial(attention, causal=True), *arrays[:3])
    one = out, *pull(arrays[3])
  with jax.numpy_dtype_promotion("standard" if way == "all_to_all" else "strict"):
    results = on_mesh(way, True)(*(x[:, order_of(way)] for x in arrays))
  assert all(x.dtype == jnp.bfloat16 for x in results)
  results = (np.asarray(x[:, np.argsort(order_of(way))], np.float32) for x in results)
  for ours, theirs, exact in zip(results, one, by_hand(4, True), strict=True):
    assert largest_distance(ours, exact) < 1.2 * largest_distance(theirs, exact)


@pytest.mark.parametrize("way", ["ring", "zigzag"])
def test_blocks_that_nobody_sees_are_left_out(way):
  # NaN times a probability of zero would be NaN.
  order, share = order_of(way), TOKENS // 4
  q, k, v, dout = (x[:, order].copy() for x in inputs(4))
  last = np.arange(TOKENS) // share == (0 if way == "zigzag" else 3)
  hidden = last & (order >= TOKENS - share)  # at the end of the sequence
  if way == "zigzag":
    hidden = last & (order >= TOKENS - share // 2)
  v[:, hidden] = np.nan
  out, *_ = on_mesh(way, True)(q, k, v, dout)
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
def test_places_are_the_order(order):
  mesh = mesh_of(model=4)
  f = functools.partial(token_positions, TOKENS // 4, "model", order)
  found = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(), out_specs=P("model")))()
  assert found.dtype == np.int32
  np.testing.assert_array_equal(found, order_of(order))
  assert sorted(found.tolist()) == list(range(TOKENS))


def test_zigzag_order_shares_the_work_out():
  order = zigzag_order(16, 4)
  assert order.tolist() == [0, 1, 14, 15, 2, 3, 12, 13, 4, 5, 10, 11, 6, 7, 8, 9]
  seen = (order + 1).reshape(4, -1).sum(axis=1)  # keys that a device's queries see
  assert set(seen.tolist()) == {17 * 2}


def model(ops: Ops, params, tokens, targets):
  """Two layers of grouped attention; what a token is depends on its place."""
  h = ops.lookup(params["table"], tokens)
  h = h + jnp.sin(ops.positions(h.shape[1])[:, None] * params["rate"])
  for w in params["layers"]:
    x = h * lax.rsqrt((h * h).mean(-1, keepdims=True) + 1e-6) * w["scale"]
    q, k, v = ((x @ w[name]).reshape(*x.shape[:2], -1, WIDTH) for name in ("q", "k", "v"))
    h = h + ops.attend(q, k, v, causal=True).reshape(*h.shape[:2], -1) @ w["o"]
  losses, _ = ops.classify(h, params["head"], None, targets, num_classes=11)
  return losses.sum()


def model_params():
  rng = np.random.default_rng(2)

  def normal(*shape):
    return np.float32(rng.normal(size=shape) * 0.3)

  wide, narrow = HEADS * WIDTH, 4 * WIDTH
  layer = {"q": (16, wide), "k": (16, narrow), "v": (16, narrow), "o": (wide, 16)}
  layers = [
    {name: normal(*shape) for name, shape in layer.items()} | {"scale": 1 + normal(16)}
    for _ in range(2)
  ]
  return {"table": normal(11, 16), "rate": normal(16), "layers": layers, "head": normal(16, 11)}


@pytest.mark.parametrize(
  ("attend", "order"), [("ring", "contiguous"), ("ring", "zigzag"), ("all_to_all", "contiguous")]
)
def test_a_model_has_the_numbers_of_one_device(attend, order):
  rng = np.random.default_rng(3)
  params = jax.tree.map(lambda x: x.astype(np.float32), model_params())
  tokens, targets = rng.integers(0, 11, (2, 4, TOKENS)).astype(np.int32)
  float_positions = Ops()._replace(positions=lambda n: jnp.arange(n, dtype=np.float32))
  loss, grads = jax.jit(jax.value_and_grad(functools.partial(model, float_positions)))(
    params, tokens, targets
  )

  def local(params, tokens, targets):
    ops = split(axis="model", attend=attend, order=order)
    assert ops.enter is Ops().enter and ops.classify is Ops().classify
    floats = lambda n: ops.positions(n).astype(np.float32)  # noqa: E731
    f = functools.partial(model, ops._replace(positions=floats))
    loss, grads = jax.value_and_grad(f)(vary(params, ("data",)), tokens, targets)
    # Summed over `model` by the types; over `data` here.
    assert not any("model" in varying(g) for g in jax.tree.leaves(grads))
    return lax.psum(loss, ("data", "model")), lax.psum(grads, "data")

  rows = P("data", "model")
  mapped = jax.shard_map(local, mesh=mesh_of(**MESH), in_specs=(P(), rows, rows), out_specs=P())
  where = order_of(order)
  found = jax.jit(mapped)(params, tokens[:, where], targets[:, where])
  assert largest_distance(found, (loss, grads)) < 2e-6


def test_regions_between_the_branches_of_tensor_parallelism():
  rng = np.random.default_rng(4)
  h, scale, up, down = (
    np.float32(rng.normal(size=shape) * 0.3) for shape in ((2, 8, 6), (6,), (6, 16), (16, 6))
  )

  def branch(h, scale, up, down, enter=lambda x: x, reduce=lambda x: x):
    x = enter(h * scale)
    return ((h + reduce(jnp.tanh(x @ up) @ down)) ** 2).sum()

  expected = jax.value_and_grad(branch, argnums=(0, 1, 2, 3))(h, scale, up, down)
  mesh = mesh_of(model=4)

  def local(*args):
    f = functools.partial(
      branch,
      enter=functools.partial(gather_tokens, axis="model"),
      reduce=functools.partial(scatter_tokens, axis="model"),
    )
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


MISTAKES = {
  "heads": (
    lambda q, k: all_to_all_attention(q[:, :, :6], k, k, axis="model", causal=True),
    r"attend='all_to_all': 6 heads cannot be split over the 4 devices of 'model', "
    r"give attend='ring' or a divisor of them",
  ),
  "groups": (
    lambda q, k: all_to_all_attention(q, k[:, :, :2], k[:, :, :2], axis="model", causal=True),
    r"attend='all_to_all': 2 key/value heads cannot be split over the 4 devices.*",
  ),
  "ring": (
    lambda q, k: ring_attention(q[:, :, :6], k, k, axis="model", causal=True),
    r"groups=4: do not divide the 6 heads",
  ),
  "odd": (
    lambda q, k: ring_attention(
      q[:, :5], k[:, :5], k[:, :5], axis="model", causal=True, order="zigzag"
    ),
    r"tokens=5 per device: order='zigzag' needs an even number, two pieces",
  ),
  "way": (lambda q, k: split(attend="rings"), r"attend='rings': did you mean 'ring'\?"),
  "order": (lambda q, k: split(order="zig"), r"order='zig': give 'contiguous' or 'zigzag'"),
  "zigzag": (
    lambda q, k: split(attend="all_to_all", order="zigzag"),
    r"order='zigzag': does nothing for attend='all_to_all', .*",
  ),
  "tokens": (
    lambda q, k: scatter_tokens(q, axis="model"),
    r"tokens=6: cannot be split over the 4 devices of 'model', give a multiple",
  ),
  "axis": (
    lambda q, k: ring_attention(q, k, k, axis="seq", causal=True),
    r"axes=\('seq',\): the mesh has no axis 'seq' here, .*",
  ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_line(name):
  call, message = MISTAKES[name]
  q, k, *_ = inputs(4)
  tokens = P("data", "model")
  mapped = jax.shard_map(
    lambda q, k: (call(q, k), q)[1], mesh=mesh_of(**MESH), in_specs=tokens, out_specs=tokens
  )
  with pytest.raises(ConfigError) as error:
    jax.eval_shape(mapped, q, k)
  assert re.fullmatch(message, str(error.value))


def test_an_order_that_cannot_be():
  with pytest.raises(ConfigError, match=r"^tokens=10: give a multiple of 8, two pieces"):
    zigzag_order(10, 4)
