"""Optimizers of PyTorch and timm with settings of ours that do the same.

`theirs` runs them where torch is installed; `golden/torch_optimizers.json` has what
it gave (golden/record_optimizers.py).
"""

import importlib

import jax.numpy as jnp
import numpy as np

from jaxscale import optim

RATES = [0.3, 0.9, 0.04, 1.7, 0.02]  # up, down, and below LARC's own rate
SHAPES = {"matrix": (5, 7), "tall": (6, 2), "bias": (7,), "zero": (4, 3), "still": (3, 4)}


def rate(step):
  return jnp.array(RATES)[step]


def slow_rate(step):
  return 0.1 * rate(step)


def layers():
  """Parameters and five gradients: one layer is 0, one has no gradient."""
  rng = np.random.default_rng(3)
  params, *grads = (
    {name: rng.standard_normal(shape) for name, shape in SHAPES.items()} for _ in range(6)
  )
  params["zero"] *= 0
  for scale, g in zip([1, 0.01, 1, 1, 1], grads, strict=True):
    for name in g:  # one global norm is below 1
      g[name] *= 0 if name == "still" else scale
  return params, grads


class Case:
  """One of ours, and the class that does the same.

  Attributes:
    ours: the transformation.
    factory: "module.Class" of theirs for matrices and, if `rest` is None, vectors.
    options: of theirs; weight_decay is of matrices alone.
    rest: class and options for vectors.
    factor: their rates, as a multiple of `RATES`.
  """

  def __init__(self, ours, factory, rest=None, factor=1.0, **options):
    self.ours, self.factory, self.rest = ours, factory, rest
    self.factor, self.options = factor, options


LARS = dict(trust_coefficient=0.05, momentum=0.8, eps=1e-8)
TIMM_LARS = dict(trust_coeff=0.05, momentum=0.8)
MUON = ("torch.optim.AdamW", dict(weight_decay=0.0))
CASES = {
  "lars": Case(
    optim.lars(rate, variant="timm", weight_decay=0.1, **LARS),
    "timm.optim.Lars",
    weight_decay=0.1,
    **TIMM_LARS,
  ),
  "lars, nesterov": Case(
    optim.lars(rate, variant="timm", weight_decay=0.1, nesterov=True, **LARS),
    "timm.optim.Lars",
    weight_decay=0.1,
    nesterov=True,
    **TIMM_LARS,
  ),
  "lars without decay": Case(
    optim.lars(rate, variant="timm", weight_decay=0.0, **LARS),
    "timm.optim.Lars",
    weight_decay=0.0,
    **TIMM_LARS,
  ),
  "larc": Case(
    optim.lars(rate, variant="timm_clip", weight_decay=0.1, **LARS),
    "timm.optim.Lars",
    weight_decay=0.1,
    trust_clip=True,
    **TIMM_LARS,
  ),
  "lamb": Case(
    optim.lamb(rate, variant="timm", weight_decay=0.1), "timm.optim.Lamb", weight_decay=0.1
  ),
  "lamb without decay": Case(
    optim.lamb(slow_rate, variant="timm", weight_decay=0.0),
    "timm.optim.Lamb",
    factor=0.1,
    weight_decay=0.0,
  ),
  "lambc": Case(
    optim.lamb(rate, trust_clip=True, weight_decay=0.1, bias_correction=False),
    "timm.optim.Lamb",
    trust_clip=True,
    weight_decay=0.1,
    max_grad_norm=None,
    bias_correction=False,
  ),
  "muon": Case(
    optim.muon(slow_rate, variant="torch", adjust="original", weight_decay=0.1),
    "torch.optim.Muon",
    MUON,
    factor=0.1,
    weight_decay=0.1,
  ),
  "muon, options": Case(
    optim.muon(
      slow_rate,
      variant="torch",
      momentum=0.8,
      nesterov=False,
      weight_decay=0.2,
      ns_steps=3,
      ns_coeffs=(2.0, -1.5, 0.5),
    ),
    "torch.optim.Muon",
    MUON,
    factor=0.1,
    weight_decay=0.2,
    momentum=0.8,
    nesterov=False,
    ns_steps=3,
    ns_coefficients=(2.0, -1.5, 0.5),
    adjust_lr_fn="match_rms_adamw",
  ),
}


def theirs(case):
  """Weights after five steps in float64, by PyTorch, whose kernels are [out, in].

  Its Muon iterates in bfloat16 unless `torch.Tensor.bfloat16` is replaced.
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
