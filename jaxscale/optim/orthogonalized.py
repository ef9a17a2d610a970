"""Muon: momentum whose singular values are brought near 1, by optax."""

from __future__ import annotations

import functools
from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers

from jaxscale.optim.layers import Layer, flags_of, in_float32, map_layers
from jaxscale.optim.masks import Mask, kernels
from jaxscale.optim.rate import scale_by_rate


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
    outer = flags_of(by_adam, params, default=False)
    outer = jax.tree.structure(params).unflatten(outer)

    def label(layer, leaf, is_outer):
      # In alphabetical order: `learning_rate` reads the kernels' first.
      kernel = "outer kernels" if is_outer else "kernels"
      return (kernel if _matrix(layer, leaf)[0] else "rest",)

    return map_layers(1, label, params, mask, stacked, outer)[0]

  def matrices(params):
    return map_layers(1, _matrix, params, mask, stacked)[0]

  inside = optax.contrib.muon(
    1.0,  # and -1 of optax: the rate follows
    ns_steps=ns_steps,
    beta=momentum,
    eps=eps,
    weight_decay=weight_decay,
    nesterov=nesterov,
    muon_weight_dimension_numbers=matrices,
    consistent_rms=consistent_rms,
  )
  rest_rate = learning_rate if adam_learning_rate is None else adam_learning_rate
  options: dict[str, Any] = {"b1": b1, "b2": b2, "eps": eps, "nesterov": nesterov}
  adam = functools.partial(optax.adamw, rest_rate, **options)
  parts: dict[Any, Any] = {
    "kernels": optax.chain(inside, scale_by_rate(learning_rate, flip_sign=False)),
    "outer kernels": adam(weight_decay=weight_decay),
    "rest": adam(weight_decay=0.0),
  }
  return in_float32(optax.partition(parts, labels))


def _matrix(layer: Layer, leaf: Any) -> tuple[MuonDimensionNumbers | None]:
  """Which dims of a leaf are a matrix's rows and columns; None: it has none."""
  rows, last = tuple(range(layer.stacked, leaf.ndim - 1)), leaf.ndim - 1
  return (MuonDimensionNumbers(rows, last) if layer.chosen and rows else None,)
