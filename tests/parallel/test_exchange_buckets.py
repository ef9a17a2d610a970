"""Buckets, one step late, and how many bytes each exchange really sends."""

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxscale import hlo
from jaxscale.exchange import Exchange
from jaxscale.exchange.buckets import best_bucket_bytes, bucketed, layout, pack, unpack
from jaxscale.exchange.low_precision import half_precision, int8
from jaxscale.exchange.one_bit import one_bit
from jaxscale.mesh import make_mesh
from support.cases import all_slow_except
from support.exchanges import AXES, SHAPES, N, compiled, first_state, gradients, program, run
from support.recipes import power_sgd, top_k

W = {"w": (64, 128)}  # divides by devices, blocks and eight bits
M, ROWS, COLUMNS = 64 * 128, 64, 128


@pytest.mark.parametrize("size", [4, 12, 100, 10**9])
def test_buckets_are_full_in_order_and_come_back(size):
  shapes = [(3,), (2, 3, 5), (), (7,), (4, 4), (19,)]
  leaves = [np.random.default_rng(i).random(s).astype("f") for i, s in enumerate(shapes)]
  pieces = layout(leaves, size)
  buckets = pack([jnp.asarray(x) for x in leaves], pieces)
  wanted = np.concatenate([leaf.reshape(-1) for leaf in leaves[::-1]])
  np.testing.assert_array_equal(np.concatenate(buckets), wanted)
  assert {b.size for b in buckets[:-1]} <= {size // 4}
  assert 0 < buckets[-1].size <= size // 4
  jax.tree.map(np.testing.assert_array_equal, unpack(buckets, pieces, leaves), leaves)


def test_a_bucket_has_one_dtype_and_empty_leaves_come_back():
  leaves = [jnp.ones(3), jnp.ones((2, 0)), jnp.ones(5, jnp.int32), jnp.ones(())]
  pieces = layout(leaves, 8)
  dtypes = [b.dtype.name for b in pack(leaves, pieces)]
  assert dtypes == ["float32"] * 2 + ["int32"] * 3
  back = unpack(pack(leaves, pieces), pieces, leaves)
  jax.tree.map(np.testing.assert_array_equal, back, leaves)


def test_a_bucket_waits_for_its_own_tensors_only():
  """The first bucket is made of the last leaves: it needs no other argument."""
  leaves = [jnp.ones(s) for s in SHAPES.values()]
  pieces = layout(leaves, 4 * 1000)
  for i, bucket in enumerate(pieces):
    lowered = jax.jit(lambda xs, i=i: pack(xs, pieces)[i]).lower(leaves)
    head = re.findall(r"func public @main\((.*?)\) ->", lowered.as_text())[0]
    assert head.count("%arg") == len({p.leaf for p in bucket})
  assert {p.leaf for p in pieces[0]} == {len(leaves) - 1}


def test_any_reduction_goes_into_the_buckets():
  """Whole numbers add exactly, whoever adds them."""
  grads = jax.tree.map(np.round, gradients(2))

  def reduce(x):
    parts = jnp.pad(x, (0, -x.size % 4)).reshape(4, -1)
    part = lax.psum(lax.psum_scatter(parts, "data"), "replica")
    return lax.all_gather(part, "data", to="invarying").reshape(-1)[: x.size]

  exchange = bucketed(AXES, bucket_bytes=4000, reduce=reduce)
  means, _ = run(exchange, grads)
  for name, g in grads.items():
    np.testing.assert_array_equal(means[name], g.mean(1))


@pytest.mark.parametrize("name", all_slow_except(["delayed", "delayed one bit"], "delayed"))
def test_delayed_is_the_inner_exchange_a_step_late(name):
  grads = gradients(50)
  steps, state = compiled(name)
  means, state = jax.device_get(steps(grads, state))
  inner, first = compiled("one bit" if "bit" in name else "plain")
  on_time, _ = inner(grads, first)
  for leaf, g in grads.items():
    assert not np.any(means[leaf][0])
    close = {"rtol": 1e-5, "atol": 1e-6 * np.abs(g).max()}
    # The inner one quantised zeros first, which changes nothing.
    np.testing.assert_allclose(means[leaf][1:], on_time[leaf][:-1], **close)
    np.testing.assert_array_equal(state["grads"][leaf], g[-1])


def collectives(exchange: Exchange, shapes):
  """[(kind, dtype, bytes of the result)] of a compiled step on 8 devices."""
  mesh = make_mesh(replica=2)
  arguments = gradients(1, shapes=shapes), first_state(exchange, shapes=shapes)
  table = hlo.collectives(program(exchange, mesh).lower(*arguments).compile(), mesh)
  return sorted((row.kind, *row.dtypes, row.payload_bytes) for row in table)


def test_bytes_of_bucketed():
  shapes = {"a": (3000,), "b": (37, 130)}  # 7,810 elements, 2,500 a bucket
  exchange = bucketed(AXES, bucket_bytes=10_000)
  step = program(exchange, make_mesh(replica=2))
  written = step.lower(gradients(1, shapes=shapes), ()).as_text()
  assert written.count("stablehlo.all_reduce") == 4
  # XLA's combiner on CPU joins them again; the bytes are the same.
  got = collectives(exchange, shapes)
  assert {(kind, dtype) for kind, dtype, _ in got} == {("all-reduce", "f32")}
  assert sum(size for _, _, size in got) == 31_240


def there_and_back(dtype, size, *more):
  return sorted([("all-gather", dtype, size), ("all-to-all", dtype, size), *more])


def summed(size):
  return "all-reduce", "f32", size


ONE_BIT, RANK_4 = one_bit(AXES, num_devices=N), power_sgd(AXES, rank=4)
ODD, WITH_BIAS = {"b": (3,), "w": (37, 130)}, W | {"bias": (128,)}
# Exchange, shapes, and what is sent: kind, dtype, bytes.
SENT = {
  "bfloat16": (half_precision(AXES), W, there_and_back("u16", 2 * M)),
  "float16": (half_precision(AXES, "float16"), W, there_and_back("u16", 2 * M, summed(4))),
  "int8": (int8(AXES), W, there_and_back("s8", M + 4 * M // 256)),
  # The bits, and two floats per column.
  "1-bit": (ONE_BIT, W, there_and_back("u8", M // 8 + 8 * COLUMNS)),
  # 37 bits are 5 bytes; 130 columns are 8 stripes of 17; a tiny bias stays float32.
  "1-bit, odd": (ONE_BIT, ODD, there_and_back("u8", 8 * 17 * (5 + 8), summed(12))),
  # 82 of 8,192.
  "top-k": (top_k(AXES, share=0.01), W, [("all-gather", "s32", N * 2 * 4 * 82)]),
  # The bias goes with P.
  "PowerSGD": (RANK_4, WITH_BIAS, [summed(4 * (4 * ROWS + 128)), summed(4 * 4 * COLUMNS)]),
}


@pytest.mark.parametrize("name", SENT)
def test_bytes_that_are_sent(name):
  exchange, shapes, sent = SENT[name]
  assert collectives(exchange, shapes) == sent


def test_tensors_of_a_group_share_their_collectives():
  for exchange in (one_bit(AXES, num_devices=N), top_k(AXES)):
    got = collectives(exchange, {"a": (64, 128), "b": (99, 64), "c": (7,)})
    kinds = [kind for kind, _, _ in got]
    assert len(set(kinds)) == len(kinds) <= 3  # one of each, one psum of what is tiny


def test_buckets_are_for_processes_on_cpus():
  """The mesh's devices decide: gloo takes tensors one after another."""

  def mesh(platform, *processes):
    made = [types.SimpleNamespace(platform=platform, process_index=p) for p in processes]
    return types.SimpleNamespace(devices=np.array(made, object))

  assert best_bucket_bytes(make_mesh()) is None
  assert best_bucket_bytes(mesh("cpu", 0, 0)) is None
  assert best_bucket_bytes(mesh("gpu", 0, 1)) is None
  assert best_bucket_bytes(mesh("cpu", 0, 1)) == 25 * 2**20
