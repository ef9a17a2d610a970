"""Low-rank adaptation (LoRA, arXiv:2106.09685) of any model.

Beside each adapted kernel W [..., in, out], which is frozen, there are two trained leaves

    A [..., in, rank]    the kernel's name with "_lora_a"
    B [..., rank, out]   the kernel's name with "_lora_b"

and the model computes with W' = W + scale A B (section 4.1). A is uniform in
+-1/sqrt(in) and B is 0, as in PEFT (0.21, tuners/lora/layer.py, `reset_lora_parameters`:
`kaiming_uniform_` with a = sqrt(5)), so that training starts from W.

Models compute W' before they use it. The layers of built-in stacks instead compute
x W + (x A) (scale B) (`models.linear.dense` and `models.stack.rejoin`), so that no gradient
of the size of W exists. Both work on a device's part of W: A is split like the first dim of
W and B like its second.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxscale.errors import invalid
from jaxscale.models.model_fns import ModelFns
from jaxscale.models.stack import Stack
from jaxscale.optim.tree_paths import path_name

A, B = "_lora_a", "_lora_b"
LEAVES = "_lora_[ab]$"  # pattern of the paths of these leaves
_IN_LAYERS = "^layers/[^/]+/kernel$"


class Lora(NamedTuple):
  """Low-rank adaptation of the kernels of a model.

  Attributes:
    rank: the rank of A B.
    scale: the factor of A B.
    targets: pattern that is searched in the paths of kernels; None means those of attention and
      MLP in the layers of a built-in stack.
  """

  rank: int
  scale: float
  targets: str | None = None


def adapt(model: ModelFns | Stack, lora: Lora) -> Any:
  """Return the model with adapters, whose parameters have further leaves.

  Args:
    model: the model; parameters are nested dicts.
    lora: the adapters.

  Raises:
    ConfigError: by `init`, if no kernel is selected, or something that is not one.

  Example:
    >>> from jaxscale.models import ModelFns
    >>> init = lambda key: ({"w": jnp.ones((3, 2))}, {})
    >>> apply = lambda params, state, x, train, keys: (x @ params["w"], state)
    >>> model = adapt(ModelFns(init, apply), Lora(rank=1, scale=2.0, targets="w"))
    >>> sorted(model.init(jax.random.key(0))[0])
    ['w', 'w_lora_a', 'w_lora_b']
  """
  is_stack = isinstance(model, Stack)
  if lora.targets is None:
    if not (is_stack and model.has_lora):
      fix = "give a regular expression that selects kernels by their paths"
      raise invalid("LoRA.targets", None, "selects the layers of Transformer and ViT only", fix)
    lora = lora._replace(targets=_IN_LAYERS)

  def init(key: jax.Array) -> Any:
    found = model.init(key)
    params = found if is_stack else found[0]
    params = with_adapters(params, lora, key, stacked=is_stack)
    return params if is_stack else (params, *found[1:])

  def with_merged(function: Callable[..., Any]) -> Any:
    return lambda params, *rest: function(merged(params, lora.scale), *rest)

  if not isinstance(model, Stack):
    return model._replace(init=init, apply=with_merged(model.apply))
  names = "embed", "layer", "finish", "logits"
  parts = {name: with_merged(getattr(model, name)) for name in names}
  if model.has_lora:
    parts["layer"] = lambda p, *rest: model.layer(_scaled(p, lora.scale), *rest)
  return model._replace(init=init, **parts)


def with_adapters(params: Any, lora: Lora, key: jax.Array, *, stacked: bool) -> Any:
  """Return the parameters with A and B beside every selected kernel.

  Args:
    params: the parameters, nested dicts.
    lora: the adapters.
    key: random key; each A draws from its own, which depends on its path.
    stacked: whether leaves under "layers/" are kernels of many layers, [layers, in, out].

  Raises:
    ConfigError: no leaf is selected, or one that is not a kernel.
  """
  targets = lora.targets or ""
  chosen = []

  def beside(node: Any, prefix: str) -> Any:
    if not isinstance(node, Mapping):
      return node
    result = {}
    for name, leaf in node.items():
      path = f"{prefix}{name}"
      result[name] = beside(leaf, f"{path}/")
      if isinstance(leaf, Mapping) or not re.search(targets, path):
        continue
      chosen.append(path)
      shape = getattr(leaf, "shape", ())
      is_kernel = name == "kernel" or not stacked
      if not is_kernel or len(shape) != 2 + (stacked and path.startswith("layers/")):
        problem = f"selects {path} of shape {list(shape)}, which is not a kernel [in, out]"
        raise invalid("LoRA.targets", targets, problem, "select only kernels of dense layers")
      *first, width, out = shape
      own = jax.random.fold_in(key, zlib.crc32(path.encode()))
      limit, dtype = width**-0.5, leaf.dtype
      draw = jax.random.uniform(own, (*first, width, lora.rank), dtype, -limit, limit)
      result |= {f"{name}{A}": draw, f"{name}{B}": jnp.zeros((*first, lora.rank, out), dtype)}
    return result

  adapted = beside(params, "")
  if not chosen:
    some = [path_name(p) for p, x in jax.tree.leaves_with_path(params) if x.ndim > 1][:3]
    fix = f"paths are, e.g., {', '.join(some)}"
    raise invalid("LoRA.targets", targets, "matches no parameter", fix)
  return adapted


def merged(params: Any, scale: float) -> Any:
  """Return parameters with W + scale A B in place of each adapted kernel, without A and B."""
  if not isinstance(params, Mapping):
    return params
  result = {name: merged(leaf, scale) for name, leaf in params.items()}
  for name in (n.removesuffix(A) for n in params if n.endswith(A)):
    a, b = result.pop(f"{name}{A}"), result.pop(f"{name}{B}")
    result[name] = result[name] + jnp.asarray(scale, a.dtype) * (a @ b)
  return result


def without_adapters(params: Any) -> Any:
  """Return parameters without A and B."""
  if not isinstance(params, Mapping):
    return params
  return {n: without_adapters(x) for n, x in params.items() if not re.search(LEAVES, n)}


def kernel_of(path: str) -> tuple[str, str]:
  """Return the path of the kernel that a leaf belongs to, and the leaf's suffix or "".

  Example:
    >>> kernel_of("layers/q/kernel_lora_a"), kernel_of("head/kernel")
    (('layers/q/kernel', '_lora_a'), ('head/kernel', ''))
  """
  suffix = next((s for s in (A, B) if path.endswith(s)), "")
  return path.removesuffix(suffix), suffix


def _scaled(params: Any, scale: float) -> Any:
  """Return parameters with scale B in place of B."""
  if not isinstance(params, Mapping):
    return params
  scaled = {n: _scaled(x, scale) for n, x in params.items()}
  return scaled | {n: x * jnp.asarray(scale, x.dtype) for n, x in params.items() if n.endswith(B)}
