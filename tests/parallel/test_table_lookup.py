"""Rows of a table that is split over devices, against a table that is gathered."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxscale import hlo
from jaxscale.mesh import batch_axes, make_mesh
from jaxscale.parallel.fsdp_gather import Gather, ShardedAndFull, gather_params
from jaxscale.parallel.table_lookup import SplitTable

WORDS, WIDTH, ROWS, TOKENS = 96, 16, 8, 3
RNG = np.random.default_rng(0)
TABLE = RNG.normal(size=(WORDS, WIDTH)).astype(np.float32)
# Devices share frequent words, and one occurs several times in a row.
IDS = np.minimum(RNG.integers(0, WORDS, (ROWS, TOKENS)), RNG.integers(0, 9, (ROWS, TOKENS)))
SLOPE = RNG.normal(size=(ROWS, TOKENS, WIDTH)).astype(np.float32)


def looked_up(mesh_sizes, ids=IDS, *, dtype=None, sharded=True, in_backward=False, gathered=False):
  """Return rows, the table's gradient and the compiled program."""
  mesh = make_mesh(**mesh_sizes)
  axes = batch_axes(mesh)
  slow = tuple(a for a in axes if a != "fsdp")
  how = Gather(1, sharded, *((slow, ()) if in_backward else ((), slow)), dtype)
  split, rows_of = P(None, "fsdp"), P(axes)

  def on_device(shard, whole, ids, slope):
    shard = jax.lax.pcast(shard, how.sum_in_exchange, to="varying")
    full = None if sharded else whole

    def loss(shard):
      part = shard if sharded else ShardedAndFull(shard, full)
      table = gather_params(part, how) if gathered else SplitTable(part, how)
      rows = table[ids].astype(dtype or jnp.float32)
      return (rows.astype(jnp.float32) * slope).sum(), rows

    grad, rows = jax.grad(loss, has_aux=True)(shard)
    grad = jax.lax.psum(grad, how.sum_in_exchange) if how.sum_in_exchange else grad
    return rows, grad

  specs = (split, P(), rows_of, rows_of), (rows_of, split)
  function = jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=specs[0], out_specs=specs[1]))
  args = TABLE, TABLE, ids.astype(np.int32), np.resize(SLOPE, (*ids.shape, WIDTH))
  compiled = function.lower(*args).compile()
  rows, grad = jax.device_get(compiled(*args))
  return (
    rows,
    grad,
    {
      c.kind
      for c in hlo.collectives(compiled, mesh)
      if c.kind == "all-to-all" or c.payload_bytes > 500
    },
  )


FSDP, HYBRID = {"data": 1, "fsdp": 8}, {"data": 2, "fsdp": 4}
CASES = {
  "fsdp": (FSDP, {}),
  "zero-2": (FSDP, {"sharded": False}),
  "hybrid": (HYBRID, {}),
  "hybrid, in the backward": (HYBRID, {"in_backward": True}),
  "hybrid zero-2": (HYBRID, {"sharded": False}),
  "bfloat16": (HYBRID, {"dtype": jnp.bfloat16}),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_and_gradients_are_those_of_a_gathered_table(name):
  sizes, options = CASES[name]
  rows, grad, kinds = looked_up(sizes, **options)
  others = looked_up(sizes, gathered=True, **options)
  np.testing.assert_array_equal(rows, others[0])
  slope = np.asarray(jnp.asarray(SLOPE, options.get("dtype")).astype(jnp.float32))
  wanted = np.zeros_like(TABLE)
  np.add.at(wanted, IDS, slope)
  for found in (grad, others[1]):
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)
  assert "all-to-all" in kinds and not kinds & {"all-gather", "reduce-scatter"}
  assert "all-to-all" not in others[2]


def test_a_small_table_is_gathered():
  """More tokens than words: then sending rows would cost more than sending the table."""
  *_, kinds = looked_up(FSDP, np.tile(IDS, (1, 40)))
  assert "all-to-all" not in kinds


def test_gradients_of_a_frequent_word_are_added_in_float32():
  """In bfloat16, adding 1 to 256 changes nothing."""
  mesh = make_mesh(data=1, fsdp=8)
  how, count = Gather(1, True, dtype=jnp.bfloat16), 128
  words = 4 * count

  def on_device(shard, ids):
    def loss(shard):
      return SplitTable(shard, how)[ids].astype(jnp.bfloat16).astype(jnp.float32).sum()

    return jax.grad(loss)(shard)

  split = P(None, "fsdp")
  function = jax.shard_map(on_device, mesh=mesh, in_specs=(split, P("fsdp")), out_specs=split)
  grad = jax.jit(function)(jnp.zeros((words, WIDTH)), jnp.full(8 * count, 5, jnp.int32))
  np.testing.assert_array_equal(grad[5], np.full(WIDTH, 8 * count))
  assert np.count_nonzero(grad) == WIDTH
