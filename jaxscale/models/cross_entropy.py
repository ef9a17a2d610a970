"""Cross entropy of a linear classifier, with a derivative of its own.

With z the logits, t = (1 - e) onehot(label) + e / num_classes the target with label smoothing
e (arXiv:1512.00567, section 7), and p = softmax(z):

    loss = log sum exp(z) - sum t z          d loss / d z = p - t

The logits are stored in the dtype in which the product returns them, and p - t has that dtype
as well. JAX's derivative would scatter float32 numbers into zeros, and so write several
float32 arrays [tokens, classes], 4.2 GB each for 8,192 tokens and 128,256 classes.

If the classes are split over a mesh axis (Megatron-LM, arXiv:1909.08053, section 3), a device
computes its part of the logits, and only maxima and sums cross the network.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.models.linear import alike, linear


def classify(
  h: jax.Array,
  kernel: jax.Array,
  bias: jax.Array | None,
  labels: jax.Array,
  *,
  num_classes: int,
  label_smoothing: float = 0.0,
  dtype: Any = None,
  axis: str | None = None,
  chunk: int = 0,
) -> tuple[jax.Array, jax.Array]:
  """Return the cross entropy of a linear classifier, and whether predictions are right.

  Args:
    h: inputs, [..., width].
    kernel: kernel, [width, classes], or a device's part of the classes; the last classes may
      be padding.
    bias: bias, [classes], or None.
    labels: labels below `num_classes`, int [...].
    num_classes: number of classes without padding.
    label_smoothing: share of the target that is spread over all classes.
    dtype: dtype of the product; None means the dtype of h.
    axis: mesh axis over which the classes are split; None means that they are not split.
    chunk: number of labels whose logits exist at a time. The backward pass computes them
      again. 0 means all labels.

  Returns:
    losses: losses, float32 [...].
    hits: whether the best class is the label, bool [...].
  """

  def of(h: jax.Array, kernel: jax.Array, bias: jax.Array | None, labels: jax.Array):
    logits = linear(h, kernel, dtype)
    return cross_entropy(logits, bias, labels, num_classes, label_smoothing, axis)

  if not 0 < chunk < labels.size:
    return of(h, kernel, bias, labels)
  # Cast here, so that gradients are summed over devices once and not for each chunk.
  h, kernel, *biases = alike(h, kernel, *([] if bias is None else [bias]))
  rows = h.reshape(-1, h.shape[-1]), labels.reshape(-1)
  chunks = [_split(x, chunk) for x in rows]
  again = jax.checkpoint(of, prevent_cse=False)
  losses, hits = lax.map(lambda x: again(x[0], kernel, *(biases or [None]), x[1]), chunks)
  return tuple(x.reshape(-1)[: labels.size].reshape(labels.shape) for x in (losses, hits))


def _split(rows: jax.Array, size: int) -> jax.Array:
  """Return [chunks, size, ...], with zeros after the last row."""
  padding = [(0, -len(rows) % size)] + [(0, 0)] * (rows.ndim - 1)
  return jnp.pad(rows, padding).reshape(-1, size, *rows.shape[1:])


def cross_entropy(
  logits: jax.Array,
  bias: jax.Array | None,
  labels: jax.Array,
  num_classes: int,
  label_smoothing: float = 0.0,
  axis: str | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Return the cross entropy of logits + bias in float32, and whether predictions are right.

  Args:
    logits: logits of any float dtype, [..., classes].
    bias: bias, [classes], or None.
    labels: labels, int [...]. The loss of a label of num_classes or more is NaN.
    num_classes: number of classes without padding.
    label_smoothing: share of the target that is spread over all classes.
    axis: as for `classify`.

  Returns:
    Losses, float32 [...], and hits, bool [...], the same on all devices along the axis.

  Example:
    >>> losses, hits = cross_entropy(jnp.array([[0.0, 0.0, 9.0]]), None, jnp.array([1]), 2)
    >>> print(losses, hits)
    [0.6931472] [False]
  """
  options = num_classes, label_smoothing, axis
  # NumPy's argmax is int64, so its arrays become JAX's first.
  logits, *biases = alike(jnp.asarray(logits), *([] if bias is None else [bias]))
  # Labels vary over fewer axes than split logits, and so do the results.
  return _cross_entropy(options, logits, labels.astype(jnp.int32), *biases)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(options, logits, labels, bias=None):
  return _forward(options, logits, labels, bias)[0]


def _forward(options, logits, labels, bias=None):
  num_classes, smoothing, axis = options
  z, classes = _float32(logits, bias, num_classes, axis)
  own_top = z.max(-1)
  top = own_top if axis is None else lax.pmax(own_top, axis)
  sums = [jnp.exp(z - top[..., None]).sum(-1)]
  if axis is None:
    sums.append(jnp.take_along_axis(z, labels[..., None], -1, mode="clip")[..., 0])
  else:
    sums.append(jnp.where(classes == labels[..., None], z, 0.0).sum(-1))
  if smoothing:
    sums.append(jnp.where(classes < num_classes, z, 0.0).sum(-1))
  # One psum for all sums, since latency matters, not bytes.
  exps, of_label, *every = sums if axis is None else lax.psum(sums, axis)
  total = jnp.log(exps)
  losses = total - (of_label - top)  # large logits would cost digits of total + top
  if smoothing:
    losses = losses + smoothing * (of_label - every[0] / num_classes)
  losses = jnp.where(labels < num_classes, losses, jnp.nan)
  # The first of several equal maxima, as in argmax.
  best = classes[0] + z.argmax(-1)
  if axis is not None:
    best = lax.pmin(jnp.where(own_top == top, best, num_classes), axis)
  return (losses, best == labels), (logits, labels, bias, top, total)


def _backward(options, kept, cotangents):
  (num_classes, smoothing, axis), (logits, labels, bias, top, total) = options, kept
  z, classes = _float32(logits, bias, num_classes, axis)
  target = jnp.where(classes == labels[..., None], 1 - smoothing, 0.0)
  if smoothing:
    target = target + jnp.where(classes < num_classes, smoothing / num_classes, 0.0)
  slope = (jnp.exp(z - top[..., None] - total[..., None]) - target) * cotangents[0][..., None]
  by_bias = None if bias is None else slope.reshape(-1, len(bias)).sum(0).astype(bias.dtype)
  return slope.astype(logits.dtype), None, by_bias


_cross_entropy.defvjp(_forward, _backward)


def _float32(logits, bias, num_classes, axis):
  """Return logits + bias in float32, -inf for padding, and the numbers of the classes."""
  size = logits.shape[-1]
  classes = jnp.arange(size) + (0 if axis is None else size * lax.axis_index(axis))
  z = logits.astype(jnp.float32)
  if bias is not None:
    z = z + bias.astype(jnp.float32)
  if axis is None and size == num_classes:
    return z, classes
  return jnp.where(classes < num_classes, z, -jnp.inf), classes
