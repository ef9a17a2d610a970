"""Muon: SGD with orthogonalised momentum, whose singular values are brought near 1.

With g the gradient of a matrix w [in, out], velocity v, momentum m, learning rate lr and
weight decay wd; c_t is 1 - m^t in optax and 1 in PyTorch:

    v = m v + (1 - m) g
    u = v / c_t                                 or, with Nesterov momentum,
    u = m v / c_{t+1} + (1 - m) g / c_t
    x = u / (|u| + eps)                         optax
    x = u / max(|u|, 1e-7)                      PyTorch
    x = a x + (b s + c s s) x, s = x x^T        ns_steps times (newton_schulz.py)
    w = w - lr (size x + wd w)
    size = sqrt(max(1, out / in))               "original"
    size = 0.2 sqrt(max(in, out))               "match_rms_adamw"

The second size is from arXiv:2502.16982, §2.2. The other equations and (a, b, c) =
(3.4445, -4.7750, 2.0315) are from K. Jordan, "Muon: An optimizer for hidden layers in
neural networks", 2024. The implementations are optax 0.2.8 contrib/_muon.py and torch
2.13 optim/_muon.py. PyTorch always iterates in bfloat16. jaxscale iterates in the dtype
of the parameters, at least float32, unless `ns_dtype` is "bfloat16".

Parameters that are not matrices inside the network use Adam. In optax's form Adam uses
Nesterov momentum, too (NAdam: T. Dozat, 2016): m_hat = b1 m / (1 - b1^(t+1)) + (1 - b1) g
/ (1 - b1^t) in the equations of adam.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxscale.optim.adam import one_minus_power, scale_by_adam
from jaxscale.optim.layers import in_float32, is_injected, matrix_labels
from jaxscale.optim.masks import Mask
from jaxscale.optim.matrices import map_matrices
from jaxscale.optim.newton_schulz import JORDAN, orthogonalize

NS_STEPS = 5


class MuonState(NamedTuple):
  """State of `scale_by_muon`.

  Attributes:
    count: steps done, int32 [].
    mu: velocities, at least float32.
  """

  count: Any
  mu: Any


def muon(
  learning_rate: optax.ScalarOrSchedule,
  *,
  variant: Literal["optax", "torch"] = "optax",
  momentum: float = 0.95,
  nesterov: bool = True,
  weight_decay: float = 0.0,
  ns_steps: int = 5,
  ns_coeffs: str | Sequence[Any] = JORDAN,
  ns_dtype: str = "float32",
  adjust: Literal["original", "match_rms_adamw"] = "match_rms_adamw",
  adam_rate_factor: float = 1.0,
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-8,
  mask: Mask | None = "kernels",
  stacked: Mask | None = None,
  by_adam: Mask | None = None,
) -> optax.GradientTransformation:
  """Muon for kernels, AdamW for the rest (equations in the module).

  The last dim of a kernel is the output and all dims before it are the input, so that a
  convolution [h, w, in, out] is the matrix [h w in, out]. The state has at least float32.
  Muon keeps its data efficiency beyond the batch sizes at which AdamW loses it
  (arXiv:2505.02222).

  Muon is meant for the layers inside a network. Use AdamW, by `by_adam`, for embedding
  tables, input and output layers (K. Jordan; arXiv:2502.16982, which uses weight decay on
  them, too).

  Args:
    learning_rate: the learning rate, a number or a function of the step.
    variant: "optax" for `optax.contrib.muon`, or "torch" for `torch.optim.Muon` with
      AdamW for the other parameters.
    momentum: momentum m; 0.95 in K. Jordan's code, optax and PyTorch.
    nesterov: use Nesterov momentum; variant "optax" also uses it in Adam.
    weight_decay: decoupled weight decay of kernels, including those of `by_adam`; it is
      multiplied by the learning rate.
    ns_steps: number of Newton-Schulz iterations.
    ns_coeffs: coefficients (a, b, c) of the iteration, a triple for each iteration, of which
      the last is repeated, or the name of a variant in `newton_schulz`.
    ns_dtype: dtype of the iteration, "float32" (or more, as the parameters) or "bfloat16".
    adjust: size of an update. "match_rms_adamw": as large as AdamW's, so that both can
      use the same learning rate. "original": K. Jordan's, which needs larger learning
      rates; set `adam_rate_factor` to reduce AdamW's.
    adam_rate_factor: AdamW's learning rate as a multiple of Muon's.
    b1: AdamW's decay of the first moment. AdamW decays only the kernels of `by_adam`.
    b2: AdamW's decay of the second moment.
    eps: AdamW's eps; with "optax" also added to the norm before the iteration.
    mask: params -> bool per leaf, or a name or pattern of `including`: the leaves of two
      dims or more that use Muon. None means all leaves of two dims or more.
    stacked: params -> bool per leaf, or a pattern. True: the first dim of the leaf counts
      the layers of a scan, each a separate matrix. None means that no leaf is stacked.
    by_adam: params -> bool per leaf, or a pattern: leaves of `mask` that use AdamW. None means
      no leaf.

  Example:
    >>> tx = muon(warmup_cosine(2e-3, 100, 1000), weight_decay=0.1)
    >>> tx = muon(2e-3, variant="torch", by_adam=matching("^(embed|head)/"))
  """

  labels, decays = matrix_labels("muon", mask, stacked, by_adam)
  of_torch = variant == "torch"
  iteration: Any = {"ns_steps": ns_steps, "ns_coeffs": ns_coeffs, "ns_dtype": ns_dtype}
  iteration |= {"adjust": adjust, "eps": None if of_torch else eps, "stacked": stacked}
  inside = scale_by_muon(momentum, nesterov=nesterov, **iteration)
  adam = scale_by_adam(b1, b2, eps, nesterov=nesterov and not of_torch)
  parts: dict[Any, Any] = {"muon": inside, "adam": adam}
  factors: dict[Any, Any] = {"muon": optax.identity(), "adam": optax.scale(adam_rate_factor)}
  decay = optax.add_decayed_weights(weight_decay, mask=decays)
  moved = optax.chain(optax.partition(parts, labels), decay)
  rate = optax.scale_by_learning_rate(learning_rate)
  return in_float32(optax.chain(moved, optax.partition(factors, labels), rate))


def scale_by_muon(
  momentum: float = 0.95,
  *,
  nesterov: bool = True,
  ns_steps: int = 5,
  ns_coeffs: str | Sequence[Any] = JORDAN,
  ns_dtype: str = "float32",
  adjust: Literal["original", "match_rms_adamw"] = "match_rms_adamw",
  eps: float | None = 1e-8,
  stacked: Mask | None = None,
) -> optax.GradientTransformation:
  """Replace the gradients of matrices by Muon's updates.

  An update is `size x` in the module's equations, without learning rate and weight decay.

  Every leaf must be a matrix or a stack of matrices: select them with `optax.masked` or
  `optax.partition`.

  Args:
    momentum: momentum m.
    nesterov: use Nesterov momentum.
    ns_steps: number of Newton-Schulz iterations.
    ns_coeffs: coefficients (a, b, c) of the iteration, a triple for each iteration, of which
      the last is repeated, or the name of a variant in `newton_schulz`.
    ns_dtype: dtype of the iteration, "float32" (or more, as the parameters) or "bfloat16".
    adjust: size of an update; see `muon`.
    eps: term added to the norm before the iteration; None uses PyTorch's form.
    stacked: params -> bool per leaf, or a pattern. True: the first dim of the leaf counts
      layers, each a separate matrix. None means that no leaf is stacked.

  Example:
    >>> tx = optax.chain(scale_by_muon(), optax.scale_by_learning_rate(2e-3))
  """

  def init(params: Any):
    return MuonState(jnp.zeros([], jnp.int32), optax.tree.zeros_like(params))

  def update(updates: Any, state: Any, params: Any = None):
    count = state.count + 1
    corrections = [jnp.ones([])] * 2
    if eps is not None:
      corrections = [one_minus_power(momentum, t) for t in (count, count + 1)]

    def step(g: Any, v: Any):
      now, ahead = (c.astype(v.dtype) for c in corrections)
      return momentum * v / ahead + (1 - momentum) * g / now if nesterov else v / now

    def whole_step(matrices: jax.Array):
      inputs, outputs = matrices.shape[1:]
      size = math.sqrt(max(1, outputs / inputs))
      if adjust == "match_rms_adamw":
        size = 0.2 * math.sqrt(max(inputs, outputs))
      return size * orthogonalize(matrices, ns_steps, ns_coeffs, eps, ns_dtype)

    mu = jax.tree.map(lambda g, v: momentum * v + (1 - momentum) * g, updates, state.mu)
    moved = jax.tree.map(step, updates, mu)
    cost = functools.partial(_flops, NS_STEPS if is_injected(ns_steps) else ns_steps)
    moved = map_matrices(whole_step, moved, stacked=stacked, cost=cost)
    return moved, MuonState(count, mu)

  return optax.GradientTransformation(init, update)


def _flops(steps: int, inputs: int, outputs: int) -> float:
  """Return the FLOPs of Newton-Schulz iterations: in each two products with x, and s s."""
  small, large = sorted((inputs, outputs))
  return steps * (4 * small**2 * large + 2 * small**3)
