"""SOAP against the equations of arXiv:2409.11321 in float64 numpy, and its state."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxscale import optim
from jaxscale.optim.eigenbasis import SOAPState
from support.optimizers import optimize, optimize64

RATES = [0.02, 0.03, 0.05, 0.04] * 6
STEPS = 22


def numpy_soap(w, grads, *, start=None, b1=0.95, b2=0.95, b=None, eps=1e-8, wd=1e-2, f=10, top=999):
  """Train a matrix w [m, n] by algorithms 3 and 4, with AdamW's bias correction and decay.

  Args:
    start: eigenvectors after step 0, which numpy's `eigh` finds if it is None.
  """
  b = b2 if b is None else b
  m, n = w.shape
  moment, squares = np.zeros((2, m, n))
  means = [np.zeros((k, k)) for k in (m, n)]
  bases = [np.eye(k) for k in (m, n)]
  is_used = [k <= top for k in (m, n)]

  def accumulate(g):
    for i, outer in enumerate((g @ g.T, g.T @ g)):
      means[i] = b * means[i] + (1 - b) * outer

  for t, (g, lr) in enumerate(zip(grads, RATES, strict=False)):
    if t == 0:
      accumulate(g)
      for i in range(2):
        if is_used[i]:
          bases[i] = np.linalg.eigh(means[i])[1][:, ::-1] if start is None else start[i]
      w = w - lr * wd * w
      continue
    p, q = bases
    turned = p.T @ g @ q
    moment = b1 * moment + (1 - b1) * g
    squares = b2 * squares + (1 - b2) * turned**2
    corrected = np.sqrt(squares / (1 - b2**t)) + eps
    update = p @ ((p.T @ moment @ q) / (1 - b1**t) / corrected) @ q.T
    w = w - lr * update - lr * wd * w
    accumulate(g)
    if t % f == 0:
      for i in range(2):
        if is_used[i]:
          estimates = np.diag(bases[i].T @ means[i] @ bases[i])
          order = np.argsort(-estimates)
          squares = squares[order] if i == 0 else squares[:, order]
          bases[i] = np.linalg.qr(means[i] @ bases[i][:, order])[0]
  return w


CASES = {  # shape, whether it is stacked, options
  "square": ((6, 6), False, {}),
  "wide": ((4, 7), False, dict(f=5, b1=0.9, b2=0.98)),
  "tall": ((7, 4), False, dict(f=5, b=0.8, eps=1e-3)),
  "every step": ((5, 5), False, dict(f=1, wd=0.0)),
  "convolution": ((3, 2, 2, 4), False, dict(f=7)),
  "stacked": ((3, 5, 5), True, dict(f=4)),
  "stacked convolutions": ((2, 2, 2, 1, 4), True, dict(f=4)),
  "left side only": ((4, 9), False, dict(top=5, f=3)),
  "right side only": ((9, 4), False, dict(top=5, f=3)),
  "no side": ((7, 7), False, dict(top=5, f=3)),
}
NAMES = {"b": "shampoo_beta", "wd": "weight_decay", "f": "precondition_frequency"}
NAMES |= {"top": "max_precond_dim"}


def made(is_stacked, options):
  options = {NAMES.get(name, name): value for name, value in options.items()}
  return optim.soap(rate, stacked="w" if is_stacked else None, **options)


def rate(step):
  return jnp.array(RATES)[step]


def drawn(shape, steps=STEPS):
  rng = np.random.default_rng(1)
  w, *grads = ({"w": rng.standard_normal(shape)} for _ in range(1 + steps))
  return w, grads


def bases_of(state):
  """Return the eigenvectors of every matrix, [k, n, n] or None, of the left and the right."""
  (found,) = (x for x in jax.tree.leaves(state, is_leaf=is_soap) if is_soap(x))
  (moments,) = found.moments.by_shape.values()
  return [side and np.asarray(side.basis) for side in (moments.left, moments.right)]


def is_soap(node):
  return isinstance(node, SOAPState)


@pytest.mark.parametrize("name", CASES)
def test_against_numpy(name):
  """The eigenvectors of a null space are arbitrary, so numpy starts from ours, which are checked.

  Later power iterations are of full rank, and their sign has no effect.
  """
  shape, is_stacked, options = CASES[name]
  w, grads = drawn(shape)
  tx = made(is_stacked, options)
  with jax.enable_x64(True):
    first = jax.tree.map(jnp.array, (w, grads[0]))
    _, state = optimize(tx, first[0], [first[1]])
    starts = bases_of(state)
  got = optimize64(tx, w, grads)["w"]
  count = shape[0] if is_stacked else 1
  matrices = [x["w"].reshape(count, -1, shape[-1]) for x in (w, *grads)]
  for i in range(count):
    ours = [start if start is None else start[i] for start in starts]
    g = matrices[1][i]
    for basis, mean in zip(ours, (g @ g.T, g.T @ g), strict=True):
      if basis is not None:
        turned = basis.T @ mean @ basis
        np.testing.assert_allclose(basis.T @ basis, np.eye(len(basis)), atol=1e-12)
        np.testing.assert_allclose(turned, np.diag(np.diag(turned)), atol=1e-11)
        assert np.all(np.diff(np.diag(turned)) < 1e-11)
    of_numpy = None if shape[-2:] == (5, 5) else ours  # Full rank: numpy's own eigenvectors.
    wanted = numpy_soap(matrices[0][i], [x[i] for x in matrices[1:]], start=of_numpy, **options)
    found = got.reshape(count, *wanted.shape)[i]
    np.testing.assert_allclose(found, wanted, rtol=1e-8, atol=1e-10)


def test_float32_is_near_float64():
  w, grads = drawn((8, 8))
  tx = made(False, dict(f=5))
  wanted = optimize64(tx, w, grads)["w"]
  got = optimize(tx, *jax.tree.map(jnp.float32, (w, grads)))[0][-1]["w"]
  np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=2e-4)


def test_without_preconditioners_it_is_adam_after_a_step():
  w, grads = drawn((6, 5))
  got = optimize64(made(False, dict(top=1, wd=0.0)), w, grads)["w"]
  adam = optim.adamw(lambda step: rate(step + 1), b1=0.95, b2=0.95, weight_decay=0.0)
  np.testing.assert_allclose(got, optimize64(adam, w, grads[1:])["w"], rtol=1e-12)


def test_vectors_and_chosen_leaves_move_by_adamw():
  rng = np.random.default_rng(0)
  shapes = {"w": (4, 4), "table": (9, 4), "bias": (4,)}
  params, *grads = ({n: rng.standard_normal(s) for n, s in shapes.items()} for _ in range(6))
  got = optimize64(optim.soap(rate, by_adam="table"), params, grads)
  adam = optim.adamw(rate, b1=0.95, b2=0.95, weight_decay=1e-2)
  wanted = optimize64(adam, params, grads)
  for name in ("table", "bias"):
    np.testing.assert_allclose(got[name], wanted[name], rtol=1e-12)
  assert np.abs(got["w"] - wanted["w"]).max() > 1e-3


def test_a_skipped_first_step_leaves_the_basis_to_the_next():
  """Skipped steps increase counts only; the next step still computes eigenvectors."""
  params, grads = jax.tree.map(jnp.float32, drawn((4, 4), 3))
  tx = optim.soap(0.1, weight_decay=0.0)
  state = jax.tree.map(
    lambda x: x + 1 if jnp.issubdtype(x.dtype, jnp.integer) else x, tx.init(params)
  )
  moved, state = tx.update(grads[0], state, params)
  assert not np.any(moved["w"])
  left, _ = bases_of(state)
  g = np.asarray(grads[0]["w"])
  turned = left[0].T @ g @ g.T @ left[0]
  np.testing.assert_allclose(turned, np.diag(np.diag(turned)), atol=1e-4)
  moved, _ = tx.update(grads[1], state, params)
  assert np.abs(moved["w"]).max() > 0.05


def test_gradients_of_zero_do_no_harm():
  params = {"w": jnp.ones((4, 3))}
  still = {"w": jnp.zeros((4, 3))}
  tx = optim.soap(0.1, weight_decay=0.0, precondition_frequency=2)
  out, state = optimize(tx, params, [still] * 5)
  np.testing.assert_array_equal(out[-1]["w"], params["w"])
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))
  for basis in bases_of(state):
    np.testing.assert_allclose(basis[0] @ basis[0].T, np.eye(len(basis[0])), atol=1e-6)


def test_memory_is_that_of_the_paper():
  """2 m n + 2 m^2 + 2 n^2 values for a matrix (section 7.2, without the gradient)."""
  state = optim.soap(0.1).init({"w": jnp.ones((3, 8, 5))})
  arrays = [x for x in jax.tree.leaves(state) if x.ndim]
  m, n = 24, 5
  assert sum(x.size for x in arrays) == 2 * m * n + 2 * m * m + 2 * n * n
  assert isinstance(optax.tree.get(state, "has_basis"), jax.Array)


def test_on_a_cpu_lapack_gets_one_matrix_at_a_time():
  """A batch waits for other threads of XLA's pool: two of them hung on two cores."""
  params = {"w": jnp.ones((4, 32, 24)), "tall": jnp.ones((4, 48, 8))}
  tx = optim.soap(1e-3, stacked="w|tall")
  state = jax.eval_shape(tx.init, params)
  program = jax.jit(tx.update).lower(params, state, params).compile().as_text()
  calls = re.findall(r"= \(?\w+\[([\d,]*)\]\S* .*custom_call_target=\"lapack_\w+\"", program)
  assert calls and all(dims.count(",") == 1 for dims in calls), calls
