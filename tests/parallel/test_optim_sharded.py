"""Layer-wise optimizers on 8 devices that split the state equal one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxscale import optim
from jaxscale.mesh import make_mesh

LARS = [
  "paper", "nvidia", "tf_contrib", "tf_contrib_l2_in_loss", "torch", "optax",
  "larc_clip", "larc_scale", "nvcaffe_clip", "nvcaffe_scale", "timm", "timm_clip",
]  # fmt: skip
STEPS = 4


def rate(step):
  return jnp.array([0.5, 1.0, 3.0, 2.0])[step]


STACKED = optim.matching("^scan/")
OPTIMIZERS = {
  name: optim.lars(
    rate, variant=name, weight_decay=0.1, trust_coefficient=0.02, stacked=STACKED
  )
  for name in LARS
} | {
  "lamb": optim.lamb(lambda s: 0.05 * rate(s), stacked=STACKED),
  "lamb as released": optim.lamb(
    lambda s: 0.05 * rate(s), bias_correction=False, weight_decay=1.5, phi_max=3.0
  ),
  "lamb of timm": optim.lamb(lambda s: 0.05 * rate(s), variant="timm", stacked=STACKED),
  "adamw": optim.adamw(lambda s: 0.05 * rate(s), stacked=STACKED),
  "muon": optim.muon(lambda s: 0.05 * rate(s), stacked=STACKED),
  "muon of torch": optim.muon(
    lambda s: 0.05 * rate(s), variant="torch", adjust="original", adam_rate_factor=0.5
  ),
}
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


def one_step(params, states, grads):
  """Every optimizer at once, so that a layout is compiled once."""
  moved, kept = {}, {}
  for name, tx in OPTIMIZERS.items():
    updates, kept[name] = tx.update(grads, states[name], params[name])
    moved[name] = optax.apply_updates(params[name], updates)
  return moved, kept


@functools.cache
def results(layout):
  """(parameters, trust ratios) after some steps."""
  mesh = make_mesh(devices=jax.devices()[: 1 if layout == "one" else 8])
  shardings = jax.tree.map(
    lambda spec: NamedSharding(mesh, spec if layout == "sharded" else P()),
    SHARDED,
    is_leaf=lambda x: isinstance(x, P),
  )
  put = functools.partial(jax.device_put, device=shardings)
  params = {name: put(tree(0)) for name in OPTIMIZERS}
  states = {name: tx.init(params[name]) for name, tx in OPTIMIZERS.items()}
  # Run four times: a faster compilation is worth more than a faster step.
  options = {"xla_backend_optimization_level": 0}
  step = jax.jit(one_step, compiler_options=options)
  for i in range(STEPS):
    params, states = step(params, states, put(tree(i + 1)))
    jax.block_until_ready(params)
  if layout == "sharded":
    for leaf, sharding in zip(
      jax.tree.leaves(params["paper"]), jax.tree.leaves(shardings), strict=True
    ):
      assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
  ratios = {name: optim.trust_ratios(state) for name, state in states.items()}
  return jax.device_get(params), jax.device_get(ratios)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_eight_devices_equal_one(name):
  (params, ratios), (params_1, ratios_1) = results("sharded"), results("one")
  for a, b in zip(
    jax.tree.leaves(params[name]), jax.tree.leaves(params_1[name]), strict=True
  ):
    assert np.linalg.norm(a - b) <= 1e-6 * np.linalg.norm(b)
  assert ratios[name].keys() == ratios_1[name].keys()
  for path, ratio in ratios_1[name].items():
    np.testing.assert_allclose(ratios[name][path], ratio, rtol=2e-6)
  if name in LARS or name.startswith("lamb"):
    assert ratios[name]["dense/kernel"] != 1
    many = ratios[name]["scan/kernel"]
    assert many.shape == ((3,) if name != "lamb as released" else ())


def test_norms_move_no_array():
  """Only sums cross the network: nothing sharded is gathered."""
  mesh = make_mesh(devices=jax.devices())
  shardings = jax.tree.map(
    lambda s: NamedSharding(mesh, s), SHARDED, is_leaf=lambda x: isinstance(x, P)
  )
  params = jax.device_put(tree(0), shardings)
  for name in ("paper", "lamb"):
    tx = OPTIMIZERS[name]
    lowered = jax.jit(tx.update).lower(params, tx.init(params), params)
    text = lowered.compile().as_text()
    assert "all-reduce" in text
    assert "all-gather" not in text and "all-to-all" not in text
