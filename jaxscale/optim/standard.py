"""The baselines: momentum SGD and Muon (AdamW is in adam.py)."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers

from jaxscale.optim.layers import Layer, flags_of, layers_of, wide
from jaxscale.optim.masks import Mask, kernels
from jaxscale.optim.momentum import Form, Rule, momentum_rule


def sgd(
  learning_rate: optax.ScalarOrSchedule,
  *,
  momentum: float = 0.9,
  nesterov: bool = True,
  weight_decay: float = 0.0,
  momentum_correction: bool | int = False,
  rate_in_velocity: bool | None = None,
  mask: Mask | None = kernels,
  stacked: Mask | None = None,
) -> optax.GradientTransformation:
  """Momentum SGD: v = m v + g + wd w; w = w - lr v (or lr (g + wd w + m v)).

  Goyal et al. (arXiv:1706.02677, §3) show that a velocity that holds the rate,
  v = m v + lr (g + wd w) and w = w - v as in Caffe, needs m lr_t / lr_{t-1} for m
  to do the same when the rate changes. The default here has the rate outside
  (their eq. 9, PyTorch's), where there is nothing to correct.

  Nado et al. (arXiv:2102.06356) find this with Nesterov's look-ahead as good as
  LARS on ResNet-50 at batch 32,768, if it is tuned for that batch: peak rate,
  1 - m (on a log scale), decay, label smoothing and length of the warm-up, with a
  polynomial decay of power 2 and no decay on BatchNorm and biases, which is
  `mask`'s default. configs/resnet50_nesterov_32k.py has their values, which are
  for that model and batch alone.

  Args:
    learning_rate: a number or a function of the step.
    momentum: m.
    nesterov: the form in brackets (Sutskever et al., ICML 2013).
    weight_decay: wd, an L2 term in the gradient.
    momentum_correction: multiply m by lr_t / lr_{t-1}: True: always; a number:
      in that many first steps (Intel Caffe: the warm-up), and then Caffe's form.
    rate_in_velocity: Caffe's form; None: if there is a correction to make.
    mask: params -> bool per leaf, where to decay. None: everywhere.
    stacked: params -> bool per leaf: its first dim counts layers (of a scan), and
      `mask` sees one of them, so that their biases are biases. None: none is.

  Raises:
    ValueError: a correction, and a velocity without the rate.

  Example:
    >>> tx = sgd(warmup_steps(3.2, 780, (4680, 9360, 12480)), weight_decay=1e-4)
  """
  corrected = momentum_correction is not False
  if corrected and rate_in_velocity is False:
    raise ValueError(
      f"momentum_correction={momentum_correction}: a velocity without the rate "
      "needs none; leave out rate_in_velocity=False"
    )
  return momentum_rule(
    learning_rate,
    Rule(
      Form(rate_in_velocity=corrected or bool(rate_in_velocity)),
      momentum,
      weight_decay,
      nesterov,
    ),
    momentum_correction=momentum_correction,
    mask=mask,
    stacked=stacked,
  )


def muon(
  learning_rate: optax.ScalarOrSchedule,
  *,
  momentum: float = 0.95,
  nesterov: bool = True,
  weight_decay: float = 0.0,
  ns_steps: int = 5,
  consistent_rms: float | None = 0.2,
  adam_learning_rate: optax.ScalarOrSchedule | None = None,
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-8,
  mask: Mask | None = kernels,
  stacked: Mask | None = None,
  by_adam: Mask | None = None,
) -> optax.GradientTransformation:
  """Muon for kernels, AdamW for the rest: `optax.contrib.muon`.

  The state is float32 at least, whatever the parameters are.

  Of a kernel's momentum only the directions are kept: Newton and Schulz's
  iteration brings its singular values near 1. The last dim of a kernel is the
  output and all before it are the input, so a convolution [h, w, in, out] is the
  matrix [h w in, out]. Orthogonalised momentum keeps its data efficiency beyond
  the batch sizes where AdamW loses it (arXiv:2505.02222).

  It is for the layers inside a network: tables of embeddings, input and output layers
  are left to AdamW (K. Jordan, "Muon: An optimizer for hidden layers in neural
  networks", 2024; arXiv:2502.16982, where what AdamW has decays too). Which ones they
  are `by_adam` says.

  Args:
    learning_rate: a number or a function of the step.
    momentum: decay of the velocity; 0.95 as in K. Jordan's code and in optax.
    nesterov: look ahead; optax does so in its Adam for the rest as well.
    weight_decay: of kernels, also those of `by_adam`, decoupled, times the rate.
    ns_steps: Newton-Schulz iterations.
    consistent_rms: scale updates by this times sqrt(max(inputs, outputs)), so
      that they are as large as AdamW's and one rate serves both; 0.2 in
      arXiv:2502.16982. None: by sqrt(max(1, outputs / inputs)), Jordan's, whose
      rates are larger: then give `adam_learning_rate`.
    adam_learning_rate: for the rest; None: the same.
    b1: AdamW's, for the rest, which has no decay but for the kernels of `by_adam`.
    b2: AdamW's.
    eps: AdamW's, and of the norm before the iteration.
    mask: params -> bool per leaf of two dims or more: Muon. None: all of those.
    stacked: params -> bool per leaf: its first dim counts layers (of a scan),
      each a matrix of its own. None: none is.
    by_adam: params -> bool per leaf: AdamW's, though `mask` has it. None: none is.

  Example:
    >>> tx = muon(warmup_cosine(2e-3, 100, 1000), weight_decay=0.1)
    >>> tx = muon(2e-3, by_adam=matching("^(embed|head)/"))
  """

  def labels(params):
    leaves, treedef = jax.tree.flatten(params)
    given = flags_of(by_adam, params, default=False)
    pairs = zip(leaves, layers_of(params, mask, stacked), given, strict=True)
    return jax.tree.unflatten(treedef, [_label(*pair) for pair in pairs])

  inside = optax.contrib.muon(
    learning_rate,
    ns_steps=ns_steps,
    beta=momentum,
    eps=eps,
    weight_decay=weight_decay,
    nesterov=nesterov,
    muon_weight_dimension_numbers=lambda params: _matrices(params, mask, stacked),
    consistent_rms=consistent_rms,
  )
  outside = functools.partial(
    optax.adamw,
    learning_rate if adam_learning_rate is None else adam_learning_rate,
    b1=b1,
    b2=b2,
    eps=eps,
    nesterov=nesterov,
  )
  parts: dict[Hashable, optax.GradientTransformation] = {
    "muon": inside,
    "adam, decayed": outside(weight_decay=weight_decay),
    "adam": outside(weight_decay=0.0),
  }
  return _wide_and_lenient(optax.partition(parts, labels))


def _label(leaf: Any, layer: Layer, is_given_to_adam: bool) -> str:
  """Whose a leaf is."""
  if _numbers(leaf, layer) is None:
    return "adam"
  return "adam, decayed" if is_given_to_adam else "muon"


def _wide_and_lenient(
  tx: optax.GradientTransformation,
) -> optax.GradientTransformation:
  """`tx` on float32 at least, under standard promotion whatever is set outside."""

  def widen(tree):
    return jax.tree.map(lambda x: x.astype(wide(x.dtype)), tree)

  def init(params):
    return tx.init(widen(params))

  def update(updates, state, params=None):
    if params is None:
      raise ValueError("decay needs parameters: tx.update(grads, state, params)")
    # optax's bias correction mixes int32 and float32.
    with jax.numpy_dtype_promotion("standard"):
      steps, state = tx.update(widen(updates), state, widen(params))
    return jax.tree.map(lambda s, w: s.astype(w.dtype), steps, params), state

  return optax.GradientTransformation(init, update)


def _matrices(params: Any, mask: Mask | None, stacked: Mask | None) -> Any:
  """Of each leaf the dims of its matrix, or None."""
  leaves, treedef = jax.tree.flatten(params)
  pairs = zip(leaves, layers_of(params, mask, stacked), strict=True)
  return jax.tree.unflatten(treedef, [_numbers(*pair) for pair in pairs])


def _numbers(leaf: Any, layer: Layer) -> MuonDimensionNumbers | None:
  """Which dims of a leaf are a matrix's rows and columns; None: it has none."""
  first, last = int(layer.stacked), leaf.ndim - 1
  if not layer.chosen or last - first < 1:
    return None
  return MuonDimensionNumbers(tuple(range(first, last)), last)
