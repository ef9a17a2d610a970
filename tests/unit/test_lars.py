"""LARS in all its forms: golden vectors, float64 numpy, and each other."""

from typing import get_args

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxscale import optim
from jaxscale.errors import ConfigError
from jaxscale.optim.layers import Layer, layer_norm
from jaxscale.optim.settings import LarsVariant
from support.optimizers import optimize, optimize64
from support.tables import words

LAYER = Layer(chosen=True, stacked=False)

# One layer of three weights, three steps. tests/data/golden/record_lars.py has the
# published steps line for line, in float64, and prints these vectors.
W0 = [1.0, -2.0, 3.0]
GRADS = [[0.1, 0.2, -0.3], [-0.2, 0.1, 0.4], [0.3, -0.1, 0.2]]
RATES = [1.0, 2.0, 4.0]
SETTINGS = dict(weight_decay=0.05, trust_coefficient=0.01, mask=None)
CORRECTED = [0.89571258022, -1.986782211694, 2.788860103044]
GOLDEN = {  # (variant, step, options): weights
  ("paper", 1): [0.99, -2.006666666667, 3.01],
  ("paper", 3): [0.913293627721, -1.964773501163, 2.813361955594],
  ("paper", 3, "corrected"): CORRECTED,
  ("nvidia", 3): CORRECTED,
  ("torch", 3): CORRECTED,
  ("larc_scale", 3): CORRECTED,
  ("tf_contrib", 3): [0.902673070542, -1.985175698115, 2.770004480558],
  ("optax", 1): [0.976068278943, -2.015954480704, 3.023931721057],
  ("optax", 3): [0.875313871063, -1.98660441432, 2.829314017596],
  ("larc_clip", 3): [0.940797660249, -2.026812833332, 2.94755159787],
  ("nvcaffe_clip", 3): [0.994765509923, -2.000708667251, 2.992029907121],
  ("nvcaffe_scale", 3): [0.986608812151, -1.994713222407, 2.97301905049],
  ("tf_contrib_l2_in_loss", 3): [0.952252344822, -2.086684862678, 2.919876280859],
  ("timm", 1): [0.990000000178, -2.006666666548, 3.009999999822],
  ("timm", 3): [0.895712582184, -1.986782211934, 2.788860106388],
  ("timm_clip", 3): [0.940797661358, -2.026812832856, 2.9475515986],
}
VARIANTS = words("""
  paper nvidia tf_contrib tf_contrib_l2_in_loss torch optax larc_clip larc_scale
  nvcaffe_clip nvcaffe_scale timm timm_clip
""")
IN_VELOCITY = ["paper", "nvidia", "optax", "nvcaffe_clip", "nvcaffe_scale"]


def test_every_variant_has_a_golden_vector():
  assert {case[0] for case in GOLDEN} == set(VARIANTS) == set(get_args(LarsVariant))


def changing(rates):
  return lambda step: jnp.array(rates)[step]


@pytest.mark.parametrize("case", GOLDEN, ids=str)
def test_golden_vectors(case):
  variant, step, *corrected = case
  settings = SETTINGS | dict(eps=1e-8 if variant.startswith("timm") else 0.0)
  settings |= dict(variant=variant, momentum_correction=bool(corrected))
  tx = optim.lars(changing(RATES), **settings)
  after = optimize64(tx, np.array(W0), np.array(GRADS)[:step])
  np.testing.assert_allclose(after, GOLDEN[case], rtol=0, atol=1e-11)


def reference(variant, w, grads, rates, *, scaled, m, wd, eta, eps, nesterov, fix):
  """Each form by the rate of its layer, in float64.

  `scaled`: the leaf has ratio and decay; `fix`: steps with corrected momentum.
  """
  v, norm = np.zeros_like(w), np.linalg.norm
  for t, (g, lr) in enumerate(zip(grads, rates, strict=True)):
    decays = scaled and variant != "tf_contrib_l2_in_loss"
    u = g + wd * w if decays else g
    top, bottom = norm(w), norm(g)
    if variant == "optax":
      bottom = norm(u)
    local = lr
    if scaled and variant in ("nvcaffe_clip", "timm_clip"):
      local = min(lr, 1.0)  # the ratio is 1 where a norm is 0, and then clipped
    if scaled and top > 0 and bottom > 0:
      if variant == "optax":
        eta_w_g = eta * top / (bottom + eps)
      elif variant.startswith("nvcaffe"):
        eta_w_g = (1 - m) * eta * top / (bottom + eps)
      else:
        eta_w_g = eta * top / (bottom + wd * top + eps)
      local = min(lr, eta_w_g) if variant.endswith("clip") else lr * eta_w_g
    if variant in IN_VELOCITY:
      corrected = t > 0 and (t < fix or variant == "nvidia")
      v = (m * lr / rates[t - 1] if corrected else m) * v + local * u
      w = w - (m * v + local * u if nesterov else v)
    elif variant.startswith("tf_contrib"):
      v = m * v + u
      w = w - local * (m * v + u if nesterov else v)
    else:
      v = m * v + local / lr * u
      w = w - lr * (m * v + local / lr * u if nesterov else v)
  return w


def random_layers(seed=0, steps=5):
  """Layers of several shapes, one of them 0, one without gradient."""
  rng = np.random.default_rng(seed)
  shapes = dict(matrix=(5, 7), conv=(3, 3, 4, 2), bias=(7,), scalar=(), zero=(4, 3), still=(3, 4))
  draw = lambda: {n: np.array(rng.standard_normal(s)) for n, s in shapes.items()}  # noqa: E731
  params, *grads = (draw() for _ in range(steps + 1))
  params["zero"] *= 0
  for g in grads:
    g["still"] *= 0
  return params, grads


CASES = {
  "plain": dict(eps=0.0, nesterov=False, fix=0, masked=True),
  "nesterov eps all": dict(eps=0.3, nesterov=True, fix=0, masked=False),
  "corrected": dict(eps=0.0, nesterov=False, fix=3, masked=True),
}


OF_VARIANTS = [(v, c) for v in VARIANTS for c in CASES if v in IN_VELOCITY or not CASES[c]["fix"]]


@pytest.mark.parametrize("variant, case", OF_VARIANTS)
def test_against_numpy(variant, case):
  options = dict(CASES[case])
  fix, masked = options.pop("fix"), options.pop("masked")
  rates = [0.3, 0.9, 1.7, 0.8, 0.02]  # up, and below eta's rate, which is clipped
  params, grads = random_layers()
  tx = optim.lars(
    changing(rates),
    **dict(variant=variant, momentum=0.8, weight_decay=0.1, trust_coefficient=0.05),
    **dict(momentum_correction=fix or False, mask=optim.kernels if masked else None),
    **options,
  )
  got = optimize64(tx, params, grads)
  known = dict(m=0.8, wd=0.1, eta=0.05, fix=fix, **options)
  for name, w in params.items():
    scaled, of_layer = w.ndim > 1 or not masked, [g[name] for g in grads]
    wanted = reference(variant, w, of_layer, rates, scaled=scaled, **known)
    np.testing.assert_allclose(got[name], wanted, rtol=1e-10, err_msg=name)


def assert_close(tree, wanted):
  for name, w in wanted.items():
    np.testing.assert_allclose(tree[name], w, rtol=1e-11, atol=1e-13, err_msg=name)


@pytest.mark.parametrize("nesterov", [False, True])
def test_correction_is_the_rate_outside_the_velocity(nesterov):
  """NVIDIA's form and torch's, for any schedule; without it only a constant one."""
  params, grads = random_layers(1, steps=8)
  settings = dict(trust_coefficient=0.02, nesterov=nesterov)
  rates = np.random.default_rng(2).uniform(0.1, 9, 8)

  def after(variant, rates):
    return optimize64(optim.lars(changing(rates), variant=variant, **settings), params, grads)

  constant = np.full(8, 0.7)
  assert_close(after("nvidia", rates), after("torch", rates))
  assert_close(after("paper", constant), after("torch", constant))
  gap = after("paper", rates)["matrix"] - after("torch", rates)["matrix"]
  assert np.abs(gap).max() > 1e-3


def test_a_rate_of_0_parts_the_two_forms():
  """Corrected, lr inside forgets what came up to it; lr outside does not."""
  params, grads = random_layers(1, steps=6)
  first, mid = [0.0, 0.3, 0.9, 0.5, 0.4, 0.1], [0.3, 0.9, 0.0, 0.5, 0.4, 0.1]

  def after(variant, rates, params, grads):
    return optimize64(optim.lars(changing(rates), variant=variant), params, grads)

  inside = after("nvidia", first, params, grads)
  fresh = after("torch", first[1:], params, grads[1:])
  both = after("torch", first, params, grads)
  middle = after("nvidia", mid, params, grads)
  two = after("torch", mid[:2], params, grads[:2])
  anew = after("torch", mid[3:], two, grads[3:])
  assert_close(inside, fresh)
  assert_close(middle, anew)
  assert np.abs(inside["matrix"] - both["matrix"]).max() > 1e-4


@pytest.mark.parametrize("mask", [None, optim.kernels])
@pytest.mark.parametrize("nesterov", [False, True])
def test_the_optax_form_is_optax(mask, nesterov):
  params, grads = random_layers(3)
  rates, everything = [0.3, 0.9, 1.7, 0.8, 0.0], True if mask is None else mask
  both = dict(weight_decay=0.1, trust_coefficient=0.05, eps=0.01, nesterov=nesterov)
  got = optimize64(optim.lars(changing(rates), variant="optax", mask=mask, **both), params, grads)
  masks = dict(weight_decay_mask=everything, trust_ratio_mask=everything)
  theirs = optax.lars(changing(rates), **masks, **both)
  for name, w in optimize64(theirs, params, grads).items():
    np.testing.assert_allclose(got[name], w, rtol=1e-10, err_msg=name)


@pytest.mark.parametrize("variant", VARIANTS)
def test_zero_norms_and_rate_zero(variant):
  """Ratio 1, decay as ever; at rate 0 nothing moves and nothing is NaN."""
  zero, one = jnp.zeros((2, 2)), jnp.ones((2, 2))
  tx = optim.lars(0.5, variant=variant, momentum=0.0, weight_decay=0.0)
  (moved,), _ = optimize(tx, zero, [one])  # a zero layer can leave zero
  np.testing.assert_array_equal(moved, -0.5 * one)
  (stayed,), _ = optimize(tx, one, [zero])
  np.testing.assert_array_equal(stayed, one)
  # A rate above 1 is the bare rate, which is what NVIDIA's Caffe clips as well, by 1.
  (moved,), _ = optimize(optim.lars(4.0, variant=variant, momentum=0.0), zero, [one])
  np.testing.assert_array_equal(moved, -1 if variant in ("nvcaffe_clip", "timm_clip") else -4)
  tx = optim.lars(0.5, variant=variant, weight_decay=0.25, trust_coefficient=0.125)
  (decayed,), state = optimize(tx, one, [zero])
  ratio = 0.5 if variant == "optax" else 1.0  # its |g + wd w| is not 0: eta / wd
  decay = 0.0 if variant == "tf_contrib_l2_in_loss" else 0.5 * 0.25 * ratio
  np.testing.assert_allclose(decayed, (1 - decay) * one)
  np.testing.assert_allclose(list(optim.trust_ratios(state).values()), [ratio])
  # From rate 0 on, as every MLPerf schedule starts.
  tx = optim.lars(changing([0.0, 0.1, 0.2]), variant=variant)
  (first, _, last), _ = optimize(tx, one, [one, one, one])
  np.testing.assert_array_equal(first, one)
  assert np.isfinite(last).all() and (last < one).all()


def test_norms_are_float32_for_bfloat16():
  """4096 ones: their squares' running sum in bfloat16 would stop at 256."""
  w = jnp.ones((64, 64), jnp.bfloat16)
  tx = optim.lars(1.0, momentum=0.0, weight_decay=0.0, trust_coefficient=0.25)
  (after,), state = optimize(tx, w, [w])
  velocity = optax.tree.get(state, "velocity")
  assert after.dtype == jnp.bfloat16 and velocity.dtype == jnp.float32
  np.testing.assert_array_equal(after, 0.75 * w)
  tx = optim.lars(1.0, momentum=0.0, weight_decay=0.5, trust_coefficient=0.25)
  updates, state = tx.update(w / 3, tx.init(w), w)
  # |g| / |w| is 1/3 as bfloat16 has it; the ratio is rounded to no such thing.
  third = float(jnp.bfloat16(1 / 3))
  (ratio,) = optim.trust_ratios(state).values()
  assert float(ratio) == pytest.approx(0.25 / (third + 0.5), rel=1e-6)
  assert updates.dtype == jnp.bfloat16


SIZES = [1e-36, 1e-24, 1e-12, 1.0, 1e20, 1e36]


@pytest.mark.parametrize("stacked", [False, True])
def test_norms_neither_overflow_nor_vanish(stacked):
  """In float32, where the squares of most of these are 0 or infinite."""
  x = np.random.default_rng(6).standard_normal((len(SIZES), 4, 5))
  x = (x * np.array(SIZES)[:, None, None]).astype(np.float32)
  wanted = np.linalg.norm(x.astype(np.float64), axis=(1, 2))
  if stacked:
    got = layer_norm(jnp.array(x), Layer(chosen=True, stacked=True))
    assert got.shape == (len(SIZES), 1, 1)
  else:
    got = jnp.stack([layer_norm(jnp.array(w), LAYER) for w in x])
  np.testing.assert_allclose(got.reshape(-1), wanted, rtol=1e-6)


def test_norms_of_what_has_none():
  for value in (0.0, np.inf, -np.inf, np.nan):
    x = jnp.array([1.0 if value else 0.0, value, 0.0])
    np.testing.assert_array_equal(layer_norm(x, LAYER), np.abs(value))
  assert layer_norm(jnp.zeros((0, 3)), LAYER) == 0
  # A layer next to one that is not finite is not touched by it.
  rows = jnp.array([[3.0, 4.0], [np.inf, 1.0], [0.0, 0.0], [np.nan, 1.0]])
  norms = layer_norm(rows, Layer(chosen=True, stacked=True))
  np.testing.assert_array_equal(norms[:, 0], [5, np.inf, 0, np.nan])


def test_the_scaling_of_a_norm_costs_no_digit():
  """A power of 2: the bits are those of the plain sum, where that has a value."""
  x = jnp.array(np.random.default_rng(7).standard_normal((64, 33)), jnp.float32)
  np.testing.assert_array_equal(layer_norm(x, LAYER), jnp.sqrt(jnp.sum(x * x)))


@pytest.mark.parametrize("size", [1e-24, 1e20])
@pytest.mark.parametrize("make", [optim.lars, optim.lamb])
def test_tiny_and_huge_layers_have_their_ratio(make, size):
  """Scaled with its gradient, a layer's step is scaled, whatever the size."""
  options = dict(weight_decay=0.0) | (dict(eps=0.0) if make is optim.lamb else {})
  rng = np.random.default_rng(8)
  w, g = (jnp.array(rng.standard_normal((6, 4)), jnp.float32) for _ in range(2))
  (plain,), _ = optimize(make(0.1, **options), w, [g])
  # LAMB's v would under- or overflow with g: its r does not depend on |g|.
  scaled = (w * size, g if make is optim.lamb else g * size)
  (moved,), state = optimize(make(0.1, **options), scaled[0], [scaled[1]])
  np.testing.assert_allclose(moved / size, plain, rtol=1e-5)
  (ratio,) = optim.trust_ratios(state).values()
  assert ratio != 1


def test_a_mask_is_a_function_or_a_tree():
  params = {"a": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}, "b": jnp.ones(2)}
  for mask in ({"a": True, "b": False}, optim.matching("^a/")):
    tx = optim.lars(0.1, mask=mask)
    assert set(optim.trust_ratios(tx.init(params))) == {"a/kernel", "a/bias"}
  with pytest.raises(ValueError, match="stacked selects a scalar"):
    optim.lars(0.1, stacked=lambda p: True).init(jnp.ones(()))


def test_mistakes_are_reported():
  with pytest.raises(ConfigError, match=r"LARS.variant='papre' .* one of paper"):
    optim.lars(0.1, variant="papre")
  for variant in set(VARIANTS) - set(IN_VELOCITY):
    with pytest.raises(ConfigError, match="does not contain the lr"):
      optim.lars(0.1, variant=variant, momentum_correction=5)
  with pytest.raises(ValueError, match="params=None: call"):
    tx = optim.lars(0.1)
    tx.update(jnp.ones(2), tx.init(jnp.ones(2)))
