"""Optimizers of PyTorch and timm, with the equivalent settings of jaxscale's.

`theirs` runs them where torch is installed; `golden/torch_optimizers.json` has what
it gave (golden/record_optimizers.py).
"""

import importlib
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax

from jaxscale import optim

RATES = [0.3, 0.9, 0.04, 1.7, 0.02]  # up, down, and below LARC's own rate
SHAPES = {"matrix": (5, 7), "tall": (6, 2), "bias": (7,), "zero": (4, 3), "still": (3, 4)}


def rate(step):
  return jnp.array(RATES)[step]


def slow_rate(step):
  return 0.1 * rate(step)


def layers():
  """Return parameters and five gradients: one layer is 0, one has no gradient."""
  rng = np.random.default_rng(3)
  params, *grads = (
    {name: rng.standard_normal(shape) for name, shape in SHAPES.items()} for _ in range(6)
  )
  params["zero"] *= 0
  for scale, g in zip([1, 0.01, 1, 1, 1], grads, strict=True):
    for name in g:  # one global norm is below 1
      g[name] *= 0 if name == "still" else scale
  return params, grads


class Case(NamedTuple):
  """One of our optimizers, and the equivalent class.

  Attributes:
    ours: our transformation.
    factory: "module.Class" of theirs for matrices and, if `rest` is None, vectors.
    options: options of their class; weight_decay is for matrices only.
    factor: their learning rates, as a multiple of `RATES`.
    rest: the class and options for vectors.
  """

  ours: optax.GradientTransformation
  factory: str
  options: dict[str, Any]
  factor: float = 1.0
  rest: tuple[str, dict[str, Any]] | None = None


def lars(variant="timm", weight_decay=0.1, clip=None, **options):
  """Return LARS of timm; `options` are for both, `clip` only for timm."""
  both = dict(weight_decay=weight_decay, momentum=0.8, **options)
  ours = optim.lars(rate, variant=variant, trust_coefficient=0.05, eps=1e-8, **both)
  return Case(ours, "timm.optim.Lars", dict(trust_coeff=0.05, **both, **(clip or {})))


def lamb(both, rate=rate, factor=1.0, theirs=None, **ours):
  """Return LAMB of timm; `both` are options of ours and timm's."""
  return Case(optim.lamb(rate, **both, **ours), "timm.optim.Lamb", both | (theirs or {}), factor)


def muon(both, ours, **theirs):
  """Return Muon of PyTorch; vectors use AdamW."""
  tx = optim.muon(slow_rate, variant="torch", **both, **ours)
  rest = "torch.optim.AdamW", dict(weight_decay=0.0)
  return Case(tx, "torch.optim.Muon", both | theirs, 0.1, rest)


DECAY, NO_DECAY = dict(weight_decay=0.1), dict(weight_decay=0.0)
LAMBC = DECAY | dict(trust_clip=True, bias_correction=False)
PLAIN_MUON = dict(momentum=0.8, nesterov=False, weight_decay=0.2, ns_steps=3)
NS = 2.0, -1.5, 0.5  # coefficients of the iteration
CASES = {
  "lars": lars(),
  "lars, nesterov": lars(nesterov=True),
  "lars without decay": lars(weight_decay=0.0),
  "larc": lars("timm_clip", clip=dict(trust_clip=True)),
  "lamb": lamb(DECAY, variant="timm"),
  "lamb without decay": lamb(NO_DECAY, slow_rate, 0.1, variant="timm"),
  "lambc": lamb(LAMBC, theirs=dict(max_grad_norm=None)),
  "muon": muon(DECAY, dict(adjust="original")),
  "muon, options": muon(
    PLAIN_MUON, dict(ns_coeffs=NS), ns_coefficients=NS, adjust_lr_fn="match_rms_adamw"
  ),
}


def theirs(case):
  """Return the weights after five steps in float64 by PyTorch, whose kernels are [out, in].

  PyTorch's Muon iterates in bfloat16 unless `torch.Tensor.bfloat16` is replaced.
  """
  import torch

  def make(name, groups, **options):
    module, cls = name.rsplit(".", 1)
    return getattr(importlib.import_module(module), cls)(groups, **options)

  params, grads = layers()
  weights = {n: torch.nn.Parameter(torch.tensor(w.T.copy())) for n, w in params.items()}
  decayed = [w for w in weights.values() if w.ndim > 1]
  bare = [w for w in weights.values() if w.ndim == 1]
  options = {"lr": 1.0} | case.options
  if case.rest is None:
    groups = [{"params": decayed}, {"params": bare, "weight_decay": 0.0}]
    made = [make(case.factory, groups, **options)]
  else:
    name, own = case.rest
    made = [make(case.factory, decayed, **options), make(name, bare, **own)]
  for given, lr in zip(grads, RATES, strict=True):
    for name, w in weights.items():
      w.grad = torch.tensor(given[name].T.copy())
    for optimizer in made:
      for group in optimizer.param_groups:
        group["lr"] = case.factor * lr
      optimizer.step()
  return {n: w.detach().numpy().T for n, w in weights.items()}
