"""Classification: cross entropy with label smoothing, and exact totals.

Both functions are built from any `apply`, so a model need not be Flax:

    apply(params, model_state, images, train, keys) -> (logits, model_state)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

Apply = Callable[..., tuple[jax.Array, Any]]


def smoothed_cross_entropy(
  logits: jax.Array, labels: jax.Array, label_smoothing: float = 0.0
) -> jax.Array:
  """Cross entropy per example in float32, [batch].

  The target is (1 - e) onehot + e / num_classes (arXiv:1512.00567, §7).

  Args:
    logits: [batch, classes], any float dtype.
    labels: int [batch].
    label_smoothing: e.
  """
  logits = logits.astype(jnp.float32)
  loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
  if label_smoothing:
    uniform = -jax.nn.log_softmax(logits).mean(axis=-1)
    loss = (1 - label_smoothing) * loss + label_smoothing * uniform
  return loss


def classification_loss(apply: Apply, *, label_smoothing: float = 0.0):
  """The loss of a train step, with the training accuracy beside it.

  Args:
    apply: (params, model_state, images, train, keys) -> (logits, model_state).
    label_smoothing: share of the target spread over all classes.

  Returns:
    A `LossFn` for batches of "image" [n, h, w, c] and "label" int32 [n].
  """

  def loss_fn(params, model_state, batch, keys):
    logits, model_state = apply(params, model_state, batch["image"], True, keys)
    loss = smoothed_cross_entropy(logits, batch["label"], label_smoothing).sum()
    totals = {
      "loss": loss,
      "accuracy": (logits.argmax(-1) == batch["label"]).sum(dtype=jnp.int32),
      # Summed from the rows, so that it varies over devices as they do.
      "examples": (batch["label"] >= 0).sum(dtype=jnp.int32),
    }
    return loss, (model_state, totals)

  return loss_fn


def classification_totals(apply: Apply):
  """The totals of an eval step: every example once, padding never.

  Returns:
    An `EvalFn` for batches of "image", "label" and "mask" (bool [n]). Hits and
    examples are int32, so accuracy is exact to the last example.
  """

  def eval_fn(params, model_state, batch):
    logits, _ = apply(params, model_state, batch["image"], False, None)
    mask = batch["mask"]
    loss = smoothed_cross_entropy(logits, batch["label"])
    hit = logits.argmax(-1) == batch["label"]
    return {
      "loss": jnp.where(mask, loss, 0.0).sum(),
      "accuracy": (hit & mask).sum(dtype=jnp.int32),
      "examples": mask.sum(dtype=jnp.int32),
    }

  return eval_fn
