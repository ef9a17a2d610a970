"""Newton-Schulz iterations: published coefficients against float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale import config as cfg
from jaxscale import optim
from jaxscale.optim.newton_schulz import JORDAN, VARIANTS, coefficients_of, orthogonalize
from support.errors import config_error
from support.optimizers import optimize


def naive(matrix, steps, triples, eps=0.0):
  """Apply the polynomials to the singular values of a matrix in float64."""
  left, values, right = np.linalg.svd(matrix, full_matrices=False)
  values = values / (np.sqrt((values**2).sum()) + eps)
  for i in range(steps):
    a, b, c = triples[min(i, len(triples) - 1)]
    values = a * values + b * values**3 + c * values**5
  return left @ np.diag(values) @ right


def polar_express(matrix, steps):
  """Algorithm 1 of arXiv:2505.16932 in float64, written from its text."""
  table = [
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
  ]
  x = matrix / (np.linalg.norm(matrix) * 1.01 + 1e-7)
  for t in range(steps):
    a, b, c = (1.875, -1.25, 0.375)
    if t < len(table):
      a, b, c = table[t][0] / 1.01, table[t][1] / 1.01**3, table[t][2] / 1.01**5
    s = x @ x.T
    x = a * x + (b * s + c * s @ s) @ x
  return x


def with_values(values, outputs=24, seed=0):
  """Return a matrix [n, outputs] with the given singular values, n of them, in float64."""
  rng = np.random.default_rng(seed)
  left = np.linalg.qr(rng.standard_normal((len(values), len(values))))[0]
  right = np.linalg.qr(rng.standard_normal((outputs, len(values))))[0]
  return left @ np.diag(values) @ right.T


def run64(matrices, *args, **options):
  with jax.enable_x64(True):
    return np.asarray(orthogonalize(jnp.array(matrices), *args, **options))


@pytest.mark.parametrize("steps", [1, 5, 6, 9])
@pytest.mark.parametrize("name", VARIANTS)
def test_matrices_are_those_of_the_svd(name, steps):
  rng = np.random.default_rng(1)
  for shape in ((2, 5, 8), (3, 8, 5), (1, 6, 6)):
    matrices = rng.standard_normal(shape)
    got = run64(matrices, steps, name, 1e-8)
    for x, wanted in zip(got, matrices, strict=True):
      wanted = naive(wanted, steps, VARIANTS[name], 1e-8)
      np.testing.assert_allclose(x, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("steps", [1, 5, 7, 8, 10])
def test_polar_express_is_that_of_its_paper(steps):
  matrix = np.random.default_rng(2).standard_normal((6, 9))
  got = run64(matrix[None], steps, "polar_express", 1e-7 / 1.01)[0]
  np.testing.assert_allclose(got, polar_express(matrix, steps), rtol=1e-9, atol=1e-11)


RANGES = [  # variant, iterations, least singular value, range
  ("jordan", 5, 0.01, 0.68, 1.14),
  ("jordan", 10, 0.001, 0.68, 1.14),
  ("you", 5, 0.01, 0.977, 1.033),
  ("polar_express", 5, 0.01, 0.87, 1.13),
  ("polar_express", 5, 0.001, 0.84, 1.13),
  ("polar_express", 6, 0.001, 0.993, 1.002),
  ("polar_express", 7, 0.001, 0.9999, 1.0001),
]


@pytest.mark.parametrize("name, steps, least, low, high", RANGES)
def test_singular_values_are_in_the_documented_range(name, steps, least, low, high):
  values = np.geomspace(least, 1, 20_001)
  for a, b, c in (coefficients_of(name) * 10)[:steps] if name == "jordan" else of(name, steps):
    values = a * values + b * values**3 + c * values**5
  assert low <= values.min() <= low + 0.01 and high - 0.01 <= values.max() <= high


def of(name, steps):
  triples = coefficients_of(name)
  return [triples[min(i, len(triples) - 1)] for i in range(steps)]


@pytest.mark.parametrize("name", VARIANTS)
def test_bfloat16_moves_singular_values_little(name):
  """Up to a condition of 100, singular values move by 0.08 and the matrix by 8 % at most."""
  for seed in range(5):
    for least in (0.1, 0.01):
      values = np.geomspace(least, 1, 32)
      matrix = with_values(values / np.linalg.norm(values), 64, seed)
      got = orthogonalize(jnp.float32(matrix)[None], 5, name, dtype="bfloat16")
      assert got.dtype == jnp.float32
      exact = naive(matrix, 5, VARIANTS[name])
      found, wanted = (np.linalg.svd(x, compute_uv=False) for x in (got[0], exact))
      np.testing.assert_allclose(found, wanted, rtol=0, atol=0.08)
      assert 0 < np.linalg.norm(got[0] - exact) < 0.08 * np.linalg.norm(exact)


def test_a_matrix_of_zeros_stays():
  for name in VARIANTS:
    for dtype in ("float32", "bfloat16"):
      got = orthogonalize(jnp.zeros((1, 3, 4)), 5, name, dtype=dtype)
      np.testing.assert_array_equal(got, np.zeros((1, 3, 4)))


def test_coefficients():
  assert coefficients_of(JORDAN) == coefficients_of("jordan") == [JORDAN]
  assert coefficients_of([[1, 2, 3], [4, 5, 6]]) == [(1, 2, 3), (4, 5, 6)]
  for wrong in ((1.0, 2.0), (), ((1.0, 2.0),)):
    with pytest.raises(ValueError, match="three coefficients"):
      coefficients_of(wrong)
  for wrong in ((1.0, 2.0), (), ((1.0, 2.0),), ((1.0, 2.0, 3.0), 4.0)):
    with config_error(match=r"Muon.ns_coeffs=.* must be three coefficients; give those of x, x\^3"):
      cfg.Muon(lr=0.1, ns_coeffs=wrong)


def test_settings_choose_the_iteration():
  params = {"kernel": jnp.ones((4, 4)), "bias": jnp.ones(4)}
  grads = {"kernel": jax.random.normal(jax.random.key(0), (4, 4)), "bias": jnp.ones(4)}
  after = {}
  for coeffs in ("jordan", JORDAN, "polar_express", VARIANTS["polar_express"]):
    for dtype in ("float32", "bfloat16"):
      chosen = cfg.Muon(lr=0.1, ns_coeffs=coeffs, ns_dtype=dtype)
      tx = chosen.build(lambda step: 0.1, cfg.OptimizerContext())
      after[coeffs, dtype] = optimize(tx, params, [grads])[0][-1]["kernel"]
  for dtype in ("float32", "bfloat16"):
    np.testing.assert_array_equal(after["jordan", dtype], after[JORDAN, dtype])
    polar = after[VARIANTS["polar_express"], dtype]
    np.testing.assert_array_equal(after["polar_express", dtype], polar)
    assert np.abs(polar - after[JORDAN, dtype]).max() > 1e-3
  moved = np.abs(after["jordan", "bfloat16"] - after["jordan", "float32"]).max()
  assert 0 < moved < 5e-3


def test_injected_steps_use_the_same_coefficients():
  matrices = jax.random.normal(jax.random.key(1), (2, 4, 6))
  for name in VARIANTS:
    wanted = orthogonalize(matrices, 6, name)
    got = jax.jit(lambda n, name=name: orthogonalize(matrices, n, name))(jnp.int32(6))
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
  assert optim.scale_by_muon(ns_coeffs="you", ns_dtype="bfloat16").init({"w": matrices}).mu
