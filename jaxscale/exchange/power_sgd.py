"""PowerSGD: low-rank gradients by one step of subspace iteration.

A tensor is a matrix [n, m] with m its last dim. With r_i the residual of device i, Q
[m, rank] from the previous step, and means over N devices:

    x_i = g_i + r_i
    P = mean_i x_i Q,           P^ = orthonormalised columns of P
    Q_i = x_i^T P^,             Q' = mean_i Q_i
    result = P^ Q'^T,           r_i' = x_i - P^ Q_i^T

P is linear in x_i, and so is Q' for a given P^, so plain all-reduces of P and Q' suffice:
together rank (n + m) float32 instead of n m. The mean of r_i' is the error of the result.
Tensors that would not shrink, such as vectors, are averaged uncompressed in the
all-reduce of P.

Source: arXiv:1905.13727, algorithms 1 and 2 (error feedback, warm start of Q).
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.errors import ConfigError
from jaxscale.exchange import base
from jaxscale.exchange.base import Axes, Exchange, mean_for_all, zero_residuals
from jaxscale.exchange.buckets import BUCKET_BYTES, exchange_groups, sum_together

# A remainder of a float32 column below this share of its length is rounding error.
_DEPENDENT = 1e-5


def matrix_shape(shape: tuple[int, ...], rank: int) -> tuple[int, int] | None:
  """Return the matrix dims (n, m) of a tensor; None if `rank` would not shrink it.

  Example:
    >>> matrix_shape((3, 3, 64, 128), 4)
    (576, 128)
    >>> matrix_shape((128,), 4)
  """
  if len(shape) < 2:
    return None
  n, m = math.prod(shape[:-1]), shape[-1]
  return (n, m) if rank * (n + m) < n * m else None


def power_sgd(
  axes: Axes, *, rank: int = 4, seed: int = 0, bucket_bytes: int = BUCKET_BYTES
) -> Exchange:
  """Return PowerSGD with error feedback (equations in the module).

  Args:
    axes: mesh axes to average over.
    rank: number of columns of P and Q.
    seed: seed of the first Q, normal random numbers that are the same on every device.
    bucket_bytes: bytes of gradients that are sent together.

  Returns:
    An exchange. Its state has "residual", r, float32 and shaped like the parameters, and
    "q", the Q of each tensor that shrinks, float32 [m, rank], in the order of the tree.

  Raises:
    ConfigError: the rank is below 1.

  Example:
    >>> exchange = power_sgd(("replica", "data"), rank=2)
    >>> [q.shape for q in exchange.init({"w": jnp.zeros((64, 20))})["q"]]
    [(20, 2)]
  """
  if rank < 1:
    raise ConfigError(f"rank={rank} is out of range; give 1 or more")

  def shrinking(leaves: list[Any]):
    return [i for i, x in enumerate(leaves) if matrix_shape(x.shape, rank)]

  def init(params: Any):
    leaves = jax.tree.leaves(params)
    key = jax.random.key(seed)
    sizes = {i: (leaves[i].shape[-1], rank) for i in shrinking(leaves)}
    qs = tuple(jax.random.normal(jax.random.fold_in(key, i), size) for i, size in sizes.items())
    return {"residual": zero_residuals(params), "q": qs}

  def exchange(grads: Any, state: Any):
    qs = dict(zip(shrinking(jax.tree.leaves(grads)), state["q"], strict=True))

    def group(numbers: list[int], xs: list[jax.Array]):
      arrays, devices = dict(zip(numbers, xs, strict=True)), lax.axis_size(axes)
      low = {i: x for i, x in arrays.items() if i in qs}
      whole = [i for i in numbers if i not in qs]
      bases, others = [qs[i] for i in low], [arrays[i] for i in whole]
      done, totals = _exchange_group(list(low.values()), bases, others, axes)
      means = zip(whole, totals, strict=True)
      pairs = {i: (total / devices, jnp.zeros_like(arrays[i])) for i, total in means}
      for i, (mean, left, q) in zip(low, done, strict=True):
        pairs[i], qs[i] = (mean, left), q
      return [pairs[i] for i in numbers]

    means, left = exchange_groups(group, grads, state["residual"], bucket_bytes)
    return means, {"residual": left, "q": tuple(qs.values())}

  def resize(state: Any, num_devices: int):
    residual = mean_for_all(state["residual"], num_devices)
    return {"residual": residual, "q": base.same_for_all(state["q"], num_devices)}

  return Exchange(init, exchange, resize)


def _exchange_group(xs: list[jax.Array], qs: list[jax.Array], whole: list[jax.Array], axes: Axes):
  """Return (mean, residual, next Q) of each tensor in xs, and the sums of `whole`."""
  num_devices = lax.axis_size(axes)
  matrices = [x.reshape(-1, x.shape[-1]) for x in xs]
  ps = [_matmul(x, q) for x, q in zip(matrices, qs, strict=True)]
  sums = sum_together([*ps, *whole], axes)
  bases = _orthonormal([p / num_devices for p in sums[: len(ps)]])
  own = [_matmul(x.T, p) for x, p in zip(matrices, bases, strict=True)]
  means = [q / num_devices for q in sum_together(own, axes)]
  done = []
  for x, p, q_own, q, last in zip(xs, bases, own, means, qs, strict=True):
    left = x - _matmul(p, q_own.T).reshape(x.shape)
    # A column of Q whose P is 0 is kept for the next step.
    q_next = jnp.where(jnp.any(p != 0, axis=0), q, last)
    done.append((_matmul(p, q.T).reshape(x.shape), left, q_next))
  return done, sums[len(ps) :]


def _orthonormal(ps: list[jax.Array]):
  """Orthonormalise matrices [n, rank] of different n with one compiled function.

  Shorter matrices are padded with rows of zeros, which do not change the result. Separate
  code for each of ResNet-50's 54 matrices took three times as long to compile on CPU.
  Matrix products of one shape are not batched, since stacking the operands cost more
  than it saved.
  """
  if not ps:
    return []
  longest = max(len(p) for p in ps)
  rows = [jnp.pad(p, ((0, longest - len(p)), (0, 0))) for p in ps]
  bases = jax.vmap(orthonormalise)(jnp.stack(rows))
  return [basis[: len(p)] for basis, p in zip(bases, ps, strict=True)]


def orthonormalise(p: jax.Array) -> jax.Array:
  """Return orthonormal columns with the span of P's columns, by Gram-Schmidt.

  Every column is projected twice, since one pass leaves float32 rounding errors if the
  column nearly depends on earlier ones. A column that depends on them becomes 0.

  Args:
    p: the matrix P, float32 [n, rank].
  """
  columns: list[jax.Array] = []
  for j in range(p.shape[1]):
    column, length = p[:, j], jnp.linalg.norm(p[:, j])
    for _ in range(2):
      for before in columns:
        column = column - before * jnp.sum(before * column)
    left = jnp.linalg.norm(column)
    depends = left <= _DEPENDENT * length  # False for NaN, which must propagate
    columns.append(jnp.where(depends, 0.0, column / jnp.where(depends, 1.0, left)))
  return jnp.stack(columns, axis=1)


def _matmul(a: jax.Array, b: jax.Array) -> jax.Array:
  # With less than float32 precision, P^ Q' and the mean of P^ Q_i would differ by rounding,
  # and that part of the gradients would be lost.
  return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)
