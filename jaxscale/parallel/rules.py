"""Sharding rules: which dim of a parameter is split along which mesh axis.

Every parameter must be matched by exactly one rule: one that is forgotten would be
whole on every device, one that two rules match would depend on their order, and both
would be seen only when the memory is full.

Models of stacked layers have rules of their own (`SHARDING` in models/). They split the
first matrices of a branch by columns along `model`, the last by rows (tensor.py); what
`fsdp` splits is the other dim, so that both go together; layers are split along `stage`
by their first dim. Vectors are small, and whole but along `model`, where they belong to
columns.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec as P

from jaxscale.errors import ConfigError
from jaxscale.optim.tree_paths import path_name

Dims = tuple[str | None, ...]  # an axis, or None, for each dim


class Rule(NamedTuple):
  """Split of the parameters whose paths match a pattern.

  Attributes:
    pattern: a regular expression that must fit all of a path, "layers/.*/bias" say.
    dims: for each dim the axis that splits it, or None; or what gives them for a
      shape and the sizes of the mesh's axes. An axis that the mesh does not have
      splits nothing.
  """

  pattern: str
  dims: Dims | Callable[[tuple[int, ...], Mapping[str, int]], Dims]


def largest(axis: str, least: int = 1024) -> Callable[..., Dims]:
  """Split the largest dim that the axis divides; none of a small parameter.

  For models whose parameters have no common shape, such as convolutions.

  Args:
    axis: of the mesh.
    least: parameters of fewer elements stay whole: to send them costs more time
      than they take memory.

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
  """A `PartitionSpec` for each parameter.

  Args:
    params: arrays, or anything with a shape.
    rules: of which exactly one must fit each path.
    sizes: of the mesh's axes, by name.

  Raises:
    ConfigError: no rule fits a parameter, or two do, or its shape is not divided by
      the devices; the line names it.

  Example:
    >>> rules = [Rule(".*/kernel", ("fsdp", "model")), Rule(".*/bias", ("model",))]
    >>> w = {"up": {"kernel": jnp.ones((4, 8)), "bias": jnp.ones(8)}}
    >>> tuple(partition(w, rules, {"fsdp": 2})["up"]["kernel"])
    ('fsdp', None)
  """

  def spec(path: Any, leaf: Any) -> P:
    name = path_name(path)
    fitting = [rule for rule in rules if re.fullmatch(rule.pattern, name)]
    if len(fitting) != 1:
      fits = " and ".join(repr(rule.pattern) for rule in fitting) or "no rule"
      verb = "fit" if len(fitting) > 1 else "fits"
      why = f"{fits} {verb} this parameter of shape {tuple(leaf.shape)}"
      raise ConfigError(f"{name}: {why}, it must be exactly one rule of the layout")
    return P(*_dims(name, tuple(leaf.shape), fitting[0], sizes))

  return jax.tree.map_with_path(spec, params)


def _dims(name: str, shape: tuple[int, ...], rule: Rule, sizes: Mapping[str, int]) -> Dims:
  """The axes of a parameter's dims, without those that the mesh has not."""
  dims = rule.dims(shape, sizes) if callable(rule.dims) else rule.dims
  if len(dims) != len(shape):
    names = f"and the rule {rule.pattern!r} names {len(dims)} dims"
    raise ConfigError(f"{name}: has the shape {shape}, {names}")
  kept = tuple(a if a is not None and sizes.get(a, 1) > 1 else None for a in dims)
  for dim, axis in enumerate(kept):
    if axis is not None and shape[dim] % sizes[axis]:
      why = f"does not divide dim {dim} of {name}, {shape}; give a divisor of {shape[dim]}"
      raise ConfigError(f"Mesh.{axis}={sizes[axis]}: {why}")
  return kept


def parse(rule: str) -> Rule:
  """A rule as people write it: "layers/.*/kernel: stage, fsdp, -".

  Example:
    >>> parse("head/kernel: fsdp, -")
    Rule(pattern='head/kernel', dims=('fsdp', None))
  """
  pattern, _, dims = rule.rpartition(":")
  axes = (dim.strip() for dim in dims.split(","))
  return Rule(pattern.strip(), tuple(None if a == "-" else a for a in axes))


# Models of any other shape: along `fsdp` alone.
OTHERS = (Rule(".*", largest("fsdp")),)
