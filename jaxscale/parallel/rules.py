"""Sharding rules: the mesh axes that split the dims of each parameter.

Every parameter must be matched by exactly one rule. A parameter without a rule would be
replicated, and one with two rules would depend on their order, and neither mistake would
be noticed before memory runs out.

Models of stacked layers define their own rules (`SHARDING` in models/). The first
matrices of a branch are split by columns along `model`, and the last one by rows
(tensor.py). `fsdp` splits the other dim, so that both can be combined. Layers are split
along `stage` by their first dim. Vectors are small and therefore replicated, except along
`model` if they belong to split columns.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec as P

from jaxscale.errors import ConfigError
from jaxscale.models import lora
from jaxscale.optim.tree_paths import path_name

Dims = tuple[str | None, ...]  # axis that splits each dim, or None


class Rule(NamedTuple):
  """Split of the parameters whose paths match a pattern.

  Attributes:
    pattern: a regular expression that must match the whole path, e.g. "layers/.*/bias".
    dims: for each dim, the axis that splits it, or None; or a function of the shape and
      the sizes of the mesh axes that returns them. Axes that the mesh lacks are ignored.
  """

  pattern: str
  dims: Dims | Callable[[tuple[int, ...], Mapping[str, int]], Dims]


def largest(axis: str, least: int = 1024) -> Callable[..., Dims]:
  """Return the `dims` of a `Rule` that splits the largest dim divisible by an axis's size.

  Use it for models with parameters of various shapes, such as convolutions.

  Args:
    axis: mesh axis.
    least: parameters with fewer elements are not split, because gathering them would
      cost more than the memory is worth.

  Example:
    >>> largest("fsdp")((3, 3, 64, 128), {"fsdp": 8})
    (None, None, None, 'fsdp')
  """

  def dims(shape: tuple[int, ...], sizes: Mapping[str, int]) -> Dims:
    fitting = [i for i, n in enumerate(shape) if n % sizes.get(axis, 1) == 0]
    if math.prod(shape) < least or not fitting:
      return (None,) * len(shape)
    chosen = max(fitting, key=lambda i: (shape[i], i))
    return tuple(axis if i == chosen else None for i in range(len(shape)))

  return dims


def partition(params: Any, rules: Sequence[Rule], sizes: Mapping[str, int]) -> Any:
  """Return a `PartitionSpec` for each parameter.

  Args:
    params: arrays, or objects with a shape.
    rules: sharding rules; exactly one must match each path. Adapters (`models.lora`) follow the
      rule of their kernel.
    sizes: sizes of the mesh axes by name.

  Raises:
    ConfigError: a parameter is matched by no rule or by several, or the devices do not
      divide its shape.

  Example:
    >>> rules = [Rule(".*/kernel", ("fsdp", "model")), Rule(".*/bias", ("model",))]
    >>> w = {"up": {"kernel": jnp.ones((4, 8)), "bias": jnp.ones(8)}}
    >>> tuple(partition(w, rules, {"fsdp": 2})["up"]["kernel"])
    ('fsdp', None)
  """

  shapes = {path_name(path): tuple(leaf.shape) for path, leaf in jax.tree.leaves_with_path(params)}

  def spec(path: Any, leaf: Any) -> P:
    name, adapter = lora.kernel_of(path_name(path))
    fitting = [rule for rule in rules if re.fullmatch(rule.pattern, name)]
    if len(fitting) != 1:
      fits = " and ".join(repr(rule.pattern) for rule in fitting) or "no rule"
      verb = "match" if len(fitting) > 1 else "matches"
      problem = f"{fits} {verb} this parameter of shape {tuple(leaf.shape)}"
      raise ConfigError(f"{name}: {problem}; change the layout's rules so that exactly one does")
    dims = _dims(name, shapes[name], fitting[0], sizes)
    if adapter:  # A is split like the kernel's inputs, and B like its outputs.
      *first, inputs, outputs = dims
      dims = (*first, inputs, None) if adapter == lora.A else (*first, None, outputs)
    return P(*dims)

  return jax.tree.map_with_path(spec, params)


def _dims(name: str, shape: tuple[int, ...], rule: Rule, sizes: Mapping[str, int]) -> Dims:
  """Return the axes of a parameter's dims, without axes that the mesh lacks."""
  dims = rule.dims(shape, sizes) if callable(rule.dims) else rule.dims
  if len(dims) != len(shape):
    names = f"but the rule {rule.pattern!r} has {len(dims)} dims; give {len(shape)}"
    raise ConfigError(f"{name} has the shape {shape}, {names}")
  kept = tuple(a if a is not None and sizes.get(a, 1) > 1 else None for a in dims)
  for dim, axis in enumerate(kept):
    if axis is not None and shape[dim] % sizes[axis]:
      problem = f"does not divide dim {dim} of {name}, {shape}; give a divisor of {shape[dim]}"
      raise ConfigError(f"Mesh.{axis}={sizes[axis]} {problem}")
  return kept


def parse(rule: str) -> Rule:
  """Parse a rule from its text form, e.g. "layers/.*/kernel: stage, fsdp, -".

  Example:
    >>> parse("head/kernel: fsdp, -")
    Rule(pattern='head/kernel', dims=('fsdp', None))
  """
  pattern, _, dims = rule.rpartition(":")
  axes = (dim.strip() for dim in dims.split(","))
  return Rule(pattern.strip(), tuple(None if a == "-" else a for a in axes))


# Rules for models that define none: they are split along `fsdp` only.
OTHERS = (Rule(".*", largest("fsdp")),)
