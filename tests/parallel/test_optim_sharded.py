"""Norms of layer-wise optimizers whose parameters are split over 8 devices."""

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxscale import optim
from jaxscale.mesh import make_mesh

# Which dim of a leaf is spread over the devices: the first, the last, the middle.
SHARDED = {
  "conv": {"kernel": P(None, None, None, "data"), "bias": P("data")},
  "dense": {"kernel": P("data"), "bias": P()},
  "scan": {"kernel": P(None, "data", None), "bias": P(None, "data")},
}


def tree(seed):
  rng = np.random.default_rng(seed)
  shapes = {
    "conv": {"kernel": (3, 3, 4, 16), "bias": (16,)},
    "dense": {"kernel": (24, 10), "bias": (10,)},
    "scan": {"kernel": (3, 8, 6), "bias": (3, 8)},
  }
  return jax.tree.map(
    lambda shape: rng.standard_normal(shape).astype(np.float32),
    shapes,
    is_leaf=lambda x: isinstance(x, tuple),
  )


def test_norms_move_no_array():
  """Only sums cross the network: nothing sharded is gathered."""
  mesh = make_mesh(devices=jax.devices())
  shardings = jax.tree.map(
    lambda s: NamedSharding(mesh, s), SHARDED, is_leaf=lambda x: isinstance(x, P)
  )
  params = jax.device_put(tree(0), shardings)
  for tx in (optim.lars(0.1), optim.lamb(0.1)):
    lowered = jax.jit(tx.update).lower(params, tx.init(params), params)
    text = lowered.compile().as_text()
    assert "all-reduce" in text
    assert "all-gather" not in text and "all-to-all" not in text
