"""Factors of each parameter in muP and CompleteP, with which learning rates transfer.

A model is compared with a base model, the same model at smaller sizes. In a parameter
[..., in, out], the dims that differ decide its kind:

    input    only `out` grows: embeddings, the first layer
    hidden   `in` grows, and `out` too or the parameter is in a stack of layers
    output   only `in` grows: the last layer
    vector   biases, and scales of norms
    fixed    nothing grows

With m the growth of `in`, L the growth of the number of layers, and alpha = 1 in CompleteP,
table 1 of CompleteP (arXiv:2505.01618; without the terms in L it is muP, arXiv:2203.03466)
multiplies for AdamW

                  initial std   rate              decay   eps            multiplier
    hidden        m^-1/2        m^-1 L^(alpha-1)  m       m^-1 L^-alpha  L^-alpha at a branch's end
    in a layer    1             L^(alpha-1)       1       m^-1 L^-alpha  L^-alpha at a branch's end
    output        1             1                 1       1              m^-1
    others        1             1                 1       1              1

where "in a layer" are the vectors of a stack, with m their own growth, and queries have a further
multiplier sqrt(base width / width) of a head, which makes the scale of attention 1 / width
(arXiv:2203.03466, definition 4.1). The authors' code (EleutherAI/nanoGPT-mup, branch completep)
multiplies the eps of all parameters by that of a hidden one. SGD's rates are multiplied by the
growth of `out`, over m if hidden, and by m for outputs (as in `MuSGD` of the package mup); decay
times rate stays constant. Muon's updates are scaled to have the spectral norm sqrt(out / in) of
arXiv:2310.17813, condition 1, up to a constant.

No multiplier is computed in the forward pass. With a multiplier c, w = c v is stored instead of
v: its initial values, gradients and updates are those of v times c, 1 / c and c. Exported weights
are therefore those of the plain architecture. In this form outputs have table 3 of
arXiv:2203.03466: standard deviation and rate m^-1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import optax

from jaxscale.errors import invalid
from jaxscale.optim.masks import VECTORS
from jaxscale.optim.tree_paths import path_name


class Leaf(NamedTuple):
  """Shapes of a parameter, without the dim of stacked layers.

  Attributes:
    shape: shape in the model.
    base: shape in the base model.
    in_layers: whether the parameter belongs to a stack of layers.
    adjust: `adjust` of `optim.muon` if Muon updates the parameter, otherwise "".
  """

  shape: tuple[int, ...]
  base: tuple[int, ...]
  in_layers: bool = False
  adjust: str = ""


class LeafFactors(NamedTuple):
  """Factors of a parameter relative to the base model, in the module's table.

  Attributes:
    kind: kind of the parameter.
    init: factor of the initial values' root mean square in the base model.
    rate: factor of the learning rate.
    decay: factor of the weight decay, which the learning rate multiplies.
    eps: factor of Adam's eps.
    multiplier: factor of the parameter, which its stored values contain.
  """

  kind: str = "fixed"
  init: float = 1.0
  rate: float = 1.0
  decay: float = 1.0
  eps: float = 1.0
  multiplier: float = 1.0

  def stored(self, rule: str = "adam") -> tuple[float, float, float, float]:
    """Return the factors of init, rate, decay and eps of the stored values.

    Args:
      rule: rule of the optimizer; the updates of "sgd" also grow with the gradient.
    """
    c = self.multiplier
    power = c * c if rule == "sgd" else c
    return self.init * c, self.rate * power, self.decay / power, self.eps / c


def growth(path: str, leaf: Leaf, outputs: str | None, out_first: bool) -> tuple[str, float, float]:
  """Return the kind of a parameter and the growth of its dims `in` and `out`.

  Args:
    path: path of the parameter.
    leaf: its shapes.
    outputs: pattern of the paths of output layers; None decides by shapes.
    out_first: whether kernels are [out, in], as in Equinox.

  Raises:
    ConfigError: the shapes do not decide.

  Example:
    >>> growth("Dense_0/kernel", Leaf((64, 256), (16, 64)), None, False)
    ('hidden', 4.0, 4.0)
  """
  if len(leaf.shape) != len(leaf.base):
    problem = f"{path} has shape {leaf.shape}, and {leaf.base} in the base model"
    raise invalid("Parametrization.base", ..., problem, "change sizes only")
  ratios = [n / b for n, b in zip(leaf.shape, leaf.base, strict=True)]
  grown = [i for i, ratio in enumerate(ratios) if ratio != 1]
  if not grown:
    return "fixed", 1.0, 1.0
  if len(leaf.shape) < 2 or path.split("/")[-1] in VECTORS:
    return "vector", 1.0, math.prod(ratios)
  if outputs is not None and re.search(outputs, path):
    return "output", math.prod(ratios), 1.0
  if len(grown) > 2:
    problem = f"{path} grows in {len(grown)} dims, from {leaf.base} to {leaf.shape}"
    raise invalid("Parametrization.base", ..., problem, "change fewer sizes")
  first, last = ratios[grown[0]], ratios[grown[-1]]
  if len(grown) == 2:
    return ("hidden", last, first) if out_first else ("hidden", first, last)
  if out_first and outputs is None:
    problem = f"is not set, and the shape of {path} does not tell an output layer from a table"
    raise invalid("MuP.outputs", ..., problem, "give the pattern of output layers, e.g. '^head/'")
  is_out = outputs is not None or grown == [len(ratios) - 1]
  kind = "hidden" if leaf.in_layers else "input" if is_out else "output"
  return (kind, 1.0, first) if is_out else (kind, first, 1.0)


def mup(
  leaves: Mapping[str, Leaf],
  rule: str,
  *,
  outputs: str | None = None,
  out_first: bool = False,
  depth: float = 1.0,
  alpha: float = 1.0,
  ends: str = "^$",
) -> dict[str, LeafFactors]:
  """Return the factors of muP or CompleteP by path (equations in the module).

  Args:
    leaves: shapes of the parameters by path.
    rule: rule of the optimizer: "adam", "sgd" or "muon".
    outputs: pattern of the paths of output layers; None decides by shapes.
    out_first: whether kernels are [out, in].
    depth: L, the number of layers over that of the base model; 1 in muP.
    alpha: exponent of the depth.
    ends: pattern of the paths of a residual branch's last kernel and bias.

  Example:
    >>> factors = mup({"head/kernel": Leaf((64, 10), (16, 10))}, "adam")["head/kernel"]
    >>> factors.kind, factors.stored()
    ('output', (0.25, 0.25, 4.0, 4.0))
  """
  factors = {}
  for path, leaf in leaves.items():
    kind, into, out = growth(path, leaf, outputs, out_first)
    is_hidden, multiplier = kind == "hidden", 1 / into if kind == "output" else 1.0
    rate = 1 / into if is_hidden else 1.0
    if leaf.adjust:
      rate = _spectral(leaf.shape, leaf.adjust) / _spectral(leaf.base, leaf.adjust) / multiplier
    elif rule == "sgd":
      rate = out / into if is_hidden else out * into
    is_inside, decay = rule != "sgd" and (leaf.in_layers or is_hidden), 1 / rate
    eps = 1 / (into if is_hidden else out) if is_inside else 1.0
    if leaf.in_layers:
      rate, eps = rate * depth ** (alpha - 1), eps * depth**-alpha
      multiplier *= depth**-alpha if re.search(ends, path) else 1
    init = into**-0.5 if is_hidden else 1.0
    factors[path] = LeafFactors(kind, init, rate, decay, eps, multiplier)
  return factors


def _spectral(shape: tuple[int, ...], adjust: str) -> float:
  """Return sqrt(out / in) over the size of Muon's update, which is its spectral norm."""
  inputs, outputs = math.prod(shape[:-1]), shape[-1]
  size = max(1, outputs / inputs) if adjust == "original" else max(inputs, outputs)
  return math.sqrt(outputs / inputs / size)


def scale_by_path(factors: Mapping[str, float]) -> optax.GradientTransformation:
  """Multiply the update of each leaf by the factor of its path; others stay.

  Example:
    >>> tx = optax.chain(optax.adam(1e-3), scale_by_path({"head/kernel": 0.25}))
  """
  return optax.stateless(lambda updates, params: _scaled(updates, factors))


def with_factors(
  tx: optax.GradientTransformation, factors: Mapping[str, LeafFactors]
) -> optax.GradientTransformation:
  """Apply the factors of rate, decay and eps to an optimizer, whatever its equations are.

  Gradients are divided by the factors of eps, which is the same to Adam; the optimizer sees
  parameters that are multiplied by the factors of decay and divided by their multipliers; and
  its updates are multiplied by both those of the rate and the multipliers. Gradients must
  already be multiplied by the multipliers (`scale_by_path`), so that a norm to which they are
  clipped does not depend on where multipliers are.

  Args:
    tx: the optimizer, which uses parameters for weight decay only.
    factors: factors by path; parameters without one keep 1.
  """
  eps = {path: 1 / f.eps for path, f in factors.items()}
  rate = {path: f.rate * f.multiplier for path, f in factors.items()}
  decay = {path: f.decay / f.multiplier for path, f in factors.items()}

  def update(updates: Any, state: Any, params: Any = None):
    seen = None if params is None else _scaled(params, decay)
    updates, state = tx.update(_scaled(updates, eps), state, seen)
    return _scaled(updates, rate), state

  return optax.GradientTransformation(tx.init, update)


def _scaled(tree: Any, factors: Mapping[str, float]) -> Any:
  return jax.tree.map_with_path(lambda path, x: factors.get(path_name(path), 1.0) * x, tree)
