"""SOAP: Adam in the eigenbasis of Shampoo's preconditioners.

With g the gradient of a matrix w [in, out] in step t = 1, 2, ..., moments m and v,
preconditioners L [in, in] and R [out, out] and their eigenvectors P and Q as columns:

    m = b1 m + (1 - b1) g                 m_hat = m / (1 - b1^t)
    v = b2 v + (1 - b2) (P^T g Q)^2       v_hat = v / (1 - b2^t)
    w = w - lr (P (P^T m_hat Q / (sqrt(v_hat) + eps)) Q^T + wd w)
    L = b L + (1 - b) g g^T               R = b R + (1 - b) g^T g
    P = qr(L P)                           Q = qr(R Q)               every f steps

This is algorithm 3 of arXiv:2409.11321 with algorithm 4 (one power iteration) and with
Adam's bias correction and decay, which its section 4 adds. What the paper leaves open is as
in the authors' code (github.com/nikhilvyas/SOAP, a1e5535): a step 0 before the first one
only sets L, R, and their eigenvectors by `eigh`, in descending order; columns are sorted by
the estimate diag(P^T L P) before a power iteration, v with them; b is b2 unless given. A
side longer than `max_precond_dim` has no preconditioner (P = I). The code keeps P^T m Q and
rotates it to each new basis, which is m in the original space as in the paper. Three small
terms of the code are as in AdamW here: it decays w - lr u instead of w, not in step 0, and
corrects the bias of v after adding eps.

Preconditioners, their eigenvectors and rotations have full float32 products on every
device. With the TF32 or bfloat16 that GPUs and TPUs use by default, small eigenvalues would
be rounding errors (NVIDIA's Emerging-Optimizers report that of TF32).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxscale.errors import invalid
from jaxscale.optim.adam import one_minus_power, scale_by_adam
from jaxscale.optim.layers import in_float32, is_injected, matrix_labels
from jaxscale.optim.masks import Mask
from jaxscale.optim.matrices import init_matrices, map_matrices


class Side(NamedTuple):
  """Preconditioner of one side of k matrices; n is `in` on the left and `out` on the right.

  Attributes:
    mean: preconditioners L or R, [k, n, n].
    basis: their eigenvectors P or Q as columns, [k, n, n].
  """

  mean: Any
  basis: Any


class Moments(NamedTuple):
  """State of k matrices.

  Attributes:
    mu: first moments m [k, in, out].
    nu: second moments v [k, in, out], in the eigenbasis.
    left: the left side, or None if `in` is above `max_precond_dim`.
    right: the right side, or None if `out` is above `max_precond_dim`.
  """

  mu: Any
  nu: Any
  left: Side | None
  right: Side | None


class SOAPState(NamedTuple):
  """State of `scale_by_soap`.

  Attributes:
    count: steps done, int32 [].
    has_basis: whether step 0 has set the eigenvectors, bool []. Skipped steps only count.
    moments: an `optim.MatrixState` of `Moments`, at least float32.
  """

  count: Any
  has_basis: Any
  moments: Any


def soap(
  learning_rate: optax.ScalarOrSchedule,
  *,
  b1: float = 0.95,
  b2: float = 0.95,
  shampoo_beta: float | None = None,
  eps: float = 1e-8,
  weight_decay: float = 1e-2,
  precondition_frequency: int = 10,
  max_precond_dim: int = 10_000,
  mask: Mask | None = "kernels",
  stacked: Mask | None = None,
  by_adam: Mask | None = None,
) -> optax.GradientTransformation:
  """SOAP for kernels, AdamW for the rest (equations in the module).

  The last dim of a kernel is the output and all dims before it are the input, so that a
  convolution [h, w, in, out] is the matrix [h w in, out]. The state has at least float32:
  2 in out + 2 in^2 + 2 out^2 values for a matrix. The defaults are those of the authors'
  code. At batches of 2 million tokens SOAP needs 40 % fewer steps than AdamW
  (arXiv:2409.11321, section 6.1).

  Eigenvectors amplify rounding: those of eigenvalues that are equal, or below 1e-7 of the
  largest, are arbitrary. Runs on different numbers of devices, whose gradients differ by
  rounding, therefore drift apart faster than with other optimizers.

  Args:
    learning_rate: the learning rate, a number or a function of the step.
    b1: decay of the first moment m.
    b2: decay of the second moment v.
    shampoo_beta: decay b of the preconditioners; None uses `b2`.
    eps: term added to the square root of v_hat.
    weight_decay: weight decay wd of kernels, including those of `by_adam`; it is multiplied
      by the learning rate.
    precondition_frequency: steps between two updates f of the eigenvectors.
    max_precond_dim: longest side of a matrix that has a preconditioner.
    mask: params -> bool per leaf, or a name or pattern of `including`: the leaves of two
      dims or more that use SOAP. None means all leaves of two dims or more.
    stacked: params -> bool per leaf, or a pattern. True: the first dim of the leaf counts
      the layers of a scan, each a separate matrix. None means that no leaf is stacked.
    by_adam: params -> bool per leaf, or a pattern: leaves of `mask` that use AdamW. None means
      no leaf.

  Example:
    >>> tx = soap(warmup_cosine(3e-3, 100, 1000), weight_decay=0.1)
  """

  labels, decays = matrix_labels("soap", mask, stacked, by_adam)
  options: Any = {"precondition_frequency": precondition_frequency, "stacked": stacked}
  options |= {"max_precond_dim": max_precond_dim, "shampoo_beta": shampoo_beta}
  inside = scale_by_soap(b1, b2, eps=eps, **options)
  parts: dict[Any, Any] = {"soap": inside, "adam": scale_by_adam(b1, b2, eps)}
  decay = optax.add_decayed_weights(weight_decay, mask=decays)
  rate = optax.scale_by_learning_rate(learning_rate)
  return in_float32(optax.chain(optax.partition(parts, labels), decay, rate))


def scale_by_soap(
  b1: float = 0.95,
  b2: float = 0.95,
  *,
  shampoo_beta: float | None = None,
  eps: float = 1e-8,
  precondition_frequency: int = 10,
  max_precond_dim: int = 10_000,
  stacked: Mask | None = None,
) -> optax.GradientTransformation:
  """Replace the gradients of matrices by SOAP's updates, without learning rate and decay.

  Every leaf must be a matrix or a stack of matrices: select them with `optax.masked` or
  `optax.partition`. A layout deals the matrices and their state out over devices
  (`matrices.map_matrices`).

  Args:
    b1: decay of the first moment m.
    b2: decay of the second moment v.
    shampoo_beta: decay b of the preconditioners; None uses `b2`.
    eps: term added to the square root of v_hat.
    precondition_frequency: steps between two updates f of the eigenvectors.
    max_precond_dim: longest side of a matrix that has a preconditioner.
    stacked: params -> bool per leaf, or a pattern. True: the first dim of the leaf counts
      layers, each a separate matrix. None means that no leaf is stacked.

  Example:
    >>> tx = optax.chain(scale_by_soap(), optax.scale_by_learning_rate(3e-3))
  """
  decay = b2 if shampoo_beta is None else shampoo_beta
  if is_injected(max_precond_dim):
    problem = "decides shapes, but optax.inject_hyperparams made it an array"
    raise invalid("max_precond_dim", ..., problem, "add static_args=('max_precond_dim',)")
  every = 1 if is_injected(precondition_frequency) else precondition_frequency
  dealt: Any = {"stacked": stacked, "cost": functools.partial(_flops, every, max_precond_dim)}

  def start(shape: tuple[int, int], dtype: Any):
    def side(n: int):
      is_short = n <= max_precond_dim
      return Side(jnp.zeros((n, n), dtype), jnp.eye(n, dtype=dtype)) if is_short else None

    return Moments(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), *map(side, shape))

  def init(params: Any):
    moments = init_matrices(start, params, **dealt)
    return SOAPState(jnp.zeros([], jnp.int32), jnp.zeros([], bool), moments)

  def averaged(side: Side | None, g: Any):  # g with this side as rows
    return side and side._replace(mean=decay * side.mean + (1 - decay) * g @ g.mT)

  @jax.default_matmul_precision("float32")
  def step(bias: Any, refresh: Any, has_basis: Any, g: Any, s: Moments):
    c1, c2 = (c.astype(g.dtype) for c in bias)
    mu = b1 * s.mu + (1 - b1) * g
    nu = b2 * s.nu + (1 - b2) * _into(g, s) ** 2
    moved = _out_of(_into(mu, s) / c1 / (jnp.sqrt(nu / c2) + eps), s)
    # Step 0 only sets the basis: it leaves moments and parameters as they are.
    mu, nu, moved = (jnp.where(has_basis, x, 0) for x in (mu, nu, moved))
    moments = Moments(mu, nu, averaged(s.left, g), averaged(s.right, g.mT))
    return moved, lax.switch(refresh, (lambda s: s, _power_iteration, _eigenvectors), moments)

  def update(updates: Any, state: Any, params: Any = None):
    steps = jnp.maximum(state.count, 1)  # Step 0 moves nothing, but must not divide by 0.
    is_due = state.count % precondition_frequency == 0
    refresh = jnp.where(state.has_basis, is_due.astype(jnp.int32), 2)
    bias = [one_minus_power(b, steps) for b in (b1, b2)]
    function = functools.partial(step, bias, refresh, state.has_basis)
    moved, moments = map_matrices(function, updates, state=state.moments, **dealt)
    return moved, SOAPState(state.count + 1, state.has_basis | True, moments)

  return optax.GradientTransformation(init, update)


def _flops(every: int, longest: int, inputs: int, outputs: int) -> float:
  """Return the FLOPs of a step: on each side four products, and its part of an iteration.

  A power iteration of n x n multiplies (2 n^3) and has a QR decomposition with Q (8/3 n^3).
  """
  sides = [n for n in (inputs, outputs) if n <= longest]
  return sum(8 * inputs * outputs * n + 14 / 3 * n**3 / every for n in sides)


def _into(x: jax.Array, s: Moments) -> jax.Array:
  """Return P^T x Q for matrices x [k, in, out]."""
  x = x if s.left is None else s.left.basis.mT @ x
  return x if s.right is None else x @ s.right.basis


def _out_of(x: jax.Array, s: Moments) -> jax.Array:
  """Return P x Q^T for matrices x [k, in, out]."""
  x = x if s.left is None else s.left.basis @ x
  return x if s.right is None else x @ s.right.basis.mT


def _power_iteration(s: Moments) -> Moments:
  """Return the state after a power iteration on each side."""

  def sides(side: Side | None, nu: jax.Array):  # nu with this side as rows
    if side is None:
      return side, nu
    image = side.mean @ side.basis
    order = jnp.argsort(-jnp.sum(side.basis * image, axis=1))[:, None]
    basis = _one_by_one(lambda x: jnp.linalg.qr(x)[0], jnp.take_along_axis(image, order, axis=2))
    return side._replace(basis=basis), jnp.take_along_axis(nu, order.mT, axis=1)

  left, nu = sides(s.left, s.nu)
  right, nu = sides(s.right, nu.mT)
  return Moments(s.mu, nu.mT, left, right)


def _eigenvectors(s: Moments) -> Moments:
  """Return the state with the eigenvectors in descending order, from `eigh`.

  After step 0 a mean has rank min(in, out). Its null space gets the basis that completes the
  other eigenvectors by reflections: that of `eigh` consists of rounding errors, and would
  differ between devices.
  """
  rank = min(s.mu.shape[1:])

  def side(x: Side):
    basis = _one_by_one(lambda x: jnp.linalg.eigh(x)[1], x.mean, tpu=_jacobi)[:, :, ::-1]
    if basis.shape[-1] > rank:
      basis = _one_by_one(lambda x: jnp.linalg.qr(x, mode="complete")[0], basis[:, :, :rank])
    return x._replace(basis=basis)

  return s._replace(left=s.left and side(s.left), right=s.right and side(s.right))


def _jacobi(x: jax.Array) -> jax.Array:
  """Return the eigenvectors of x [n, n] by Jacobi's method.

  `eigh` takes it on TPUs up to n = 256. Above, its QDWH cannot be lowered in a `shard_map` that
  checks how values vary (jax 0.10.2 and 0.11.2).
  """
  return lax.linalg.eigh(x, implementation=lax.linalg.EighImplementation.JACOBI)[0]


def _one_by_one(each: Any, x: jax.Array, tpu: Any = None) -> jax.Array:
  """Apply a function to each of the matrices [k, m, n], on a CPU one after another.

  There, a batch waits on one thread of XLA's pool for the others of that pool. If as many batches
  as there are threads begin at once, all wait forever (jaxlib 0.10.2, `jax::ParallelBatchMap`).
  """
  ways = {"cpu": functools.partial(lax.map, each), "tpu": jax.vmap(tpu or each)}
  return lax.platform_dependent(x, **ways, default=jax.vmap(each))
