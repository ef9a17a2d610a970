"""Cross entropy and its derivative, against float64 numpy and JAX's own derivative."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.models.cross_entropy import classify, cross_entropy
from jaxscale.models.linear import linear

ROWS, TOKENS, WIDTH, CLASSES, PADDED = 3, 7, 8, 37, 40
RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, CLASSES, (ROWS, TOKENS)).astype(np.int32)
WEIGHTS = RNG.normal(size=(ROWS, TOKENS))
H, KERNEL, BIAS = (RNG.normal(size=s) for s in ((ROWS, TOKENS, WIDTH), (WIDTH, PADDED), PADDED))


def by_numpy(h, kernel, bias, smoothing):
  """Return losses and the gradients of their weighted sum, in float64."""
  z = (h @ kernel + bias)[..., :CLASSES]
  exps = np.exp(z - z.max(-1, keepdims=True))
  p = exps / exps.sum(-1, keepdims=True)
  target = (1 - smoothing) * np.eye(CLASSES)[LABELS] + smoothing / CLASSES
  losses = -(target * np.log(p)).sum(-1)
  slope = np.pad((p - target) * WEIGHTS[..., None], [(0, 0), (0, 0), (0, PADDED - CLASSES)])
  by_kernel = np.einsum("rti,rto->io", h, slope)
  return losses, z.argmax(-1) == LABELS, (slope @ kernel.T, by_kernel, slope.sum((0, 1)))


def ours(h, kernel, bias, smoothing, dtype=None, chunk=0):
  def loss(h, kernel, bias):
    options = dict(num_classes=CLASSES, label_smoothing=smoothing, dtype=dtype, chunk=chunk)
    losses, hits = classify(h, kernel, bias, LABELS, **options)
    return (losses * WEIGHTS.astype(np.float32)).sum(), (losses, hits)

  arrays = [jnp.asarray(x, jnp.float32) for x in (h, kernel, bias)]
  (_, (losses, hits)), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*arrays)
  return losses, hits, grads


@pytest.mark.parametrize("chunk", [0, 1, 8, 21, 100])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_and_gradients_are_those_of_float64(smoothing, chunk):
  losses, hits, grads = by_numpy(H, KERNEL, BIAS, smoothing)
  found_losses, found_hits, found = ours(H, KERNEL, BIAS, smoothing, chunk=chunk)
  np.testing.assert_allclose(found_losses, losses, rtol=2e-6, atol=2e-6)
  np.testing.assert_array_equal(found_hits, hits)
  for x, y in zip(found, grads, strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk", [0, 8])
def test_in_bfloat16_the_gradient_of_the_kernel_is_summed_in_float32(chunk):
  bf16 = jnp.bfloat16
  *_, grads = ours(H, KERNEL, BIAS, 0.1, dtype=bf16, chunk=chunk)

  def plain(h, kernel, bias):
    logits = linear(h, kernel, bf16).astype(jnp.float32)
    log_p = jax.nn.log_softmax((logits + bias)[..., :CLASSES])
    hard = jnp.take_along_axis(log_p, LABELS[..., None], -1)[..., 0]
    losses = -0.9 * hard - 0.1 * log_p.mean(-1)
    return (losses * WEIGHTS.astype(np.float32)).sum()

  wanted = jax.grad(plain, (0, 1, 2))(*(jnp.asarray(x, jnp.float32) for x in (H, KERNEL, BIAS)))
  # A chunk's part of the slope is rounded in the same way; only the order of sums differs.
  for x, y in zip(grads, wanted, strict=True):
    assert x.dtype == jnp.float32
    np.testing.assert_allclose(x, y, rtol=1e-2, atol=4e-3 * np.abs(y).max())


def kept(function, *args):
  """Shapes and dtypes of the arrays that the backward pass is given."""
  pulled = jax.eval_shape(lambda *args: jax.vjp(function, *args)[1], *args)
  return [(x.shape, x.dtype.name) for x in jax.tree.leaves(pulled)]


def test_logits_are_kept_in_their_own_dtype_or_not_at_all():
  h = jnp.zeros((ROWS, TOKENS, WIDTH), jnp.bfloat16)
  kernel = jnp.zeros((WIDTH, PADDED))

  def loss(h, kernel, chunk):
    return classify(h, kernel, None, LABELS, num_classes=CLASSES, chunk=chunk)[0].sum()

  of_logits = [x for x in kept(lambda *a: loss(*a, 0), h, kernel) if x[0][-1:] == (PADDED,)]
  assert of_logits.count(((ROWS, TOKENS, PADDED), "bfloat16")) == 1
  assert {dtype for shape, dtype in of_logits if TOKENS in shape} == {"bfloat16"}
  chunked = kept(lambda *a: loss(*a, 7), h, kernel)
  assert not [shape for shape, _ in chunked if shape[-1:] == (PADDED,) and shape[0] != WIDTH]


def test_a_label_out_of_range_is_not_a_number():
  losses, hits = cross_entropy(jnp.zeros((3, 4)), None, jnp.array([3, 4, 0]), 4)
  np.testing.assert_array_equal(np.isnan(losses), [False, True, False])
  np.testing.assert_array_equal(hits, [False, False, True])  # the first of equal maxima


def test_large_logits_do_not_overflow():
  logits = jnp.array([[1e30, -1e30, 0.0], [3e4, 3e4, 0.0]])
  losses, _ = cross_entropy(logits, None, jnp.array([0, 1]), 3)
  np.testing.assert_allclose(losses, [0.0, np.log(2.0)], rtol=1e-6)
