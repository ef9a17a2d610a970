"""Work that some devices do and others leave out, inside `jax.shard_map`.

All devices run one program, so that work of one stage of a pipeline stands in a
branch that the other stages do not take. A collective in it is then run by some of
the devices. That is well where its groups are wholly in or wholly out, as those of
an all-reduce over `model` are. It is not along the stages themselves: half of the
group never comes. Nor is it for a permute along any axis: one instruction names all
pairs of the mesh, and XLA on CPU waits for every device in it. `check_branch` says
so before the program hangs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from jaxscale.collectives import vary
from jaxscale.collectives.typed import in_mesh_order, varying
from jaxscale.errors import ConfigError

_MEETINGS = ("psum", "pmax", "pmin", "all_gather", "reduce_scatter", "all_to_all")


def type_axes(struct: Any) -> tuple[str, ...]:
  """The axes over which the array varies that `jax.eval_shape` describes."""
  kind = struct.manual_axis_type
  return () if kind is None else in_mesh_order(kind.varying)


def zeros_of(structs: Any) -> Any:
  """Zeros with the shapes, dtypes and varying axes that `jax.eval_shape` says."""
  return jax.tree.map(
    lambda s: vary(jnp.zeros(s.shape, s.dtype), type_axes(s)), structs
  )


def zeros_like(x: jax.Array) -> jax.Array:
  """Zeros of an array's shape, dtype and varying axes."""
  return vary(jnp.zeros(x.shape, x.dtype), varying(x))


def choose(
  taken: jax.Array, work: Callable, rest: Callable, *args: Any, skip: bool = True
) -> Any:
  """`work(*args)` where `taken`, else `rest(*args)`.

  Args:
    taken: bool, the same on all devices that `work` has collectives between.
    work: args -> tree.
    rest: args -> tree of the same types.
    args: trees.
    skip: run the one alone. False: run both and take the one, whatever is in the
      other.
  """
  if skip:
    return lax.cond(taken, work, rest, *args)
  return jax.tree.map(lambda a, b: jnp.where(taken, a, b), work(*args), rest(*args))


def check_branch(name: str, axis: str, work: Callable, *args: Any) -> None:
  """Refuse work that may not stand in a branch that some stages do not take.

  The derivatives are not looked at: what is sent backwards by rules of its own is
  the caller's.

  Args:
    name: of the work, for the message.
    axis: mesh axis along which some devices take the branch and others do not.
    work: args -> tree.
    args: trees of arrays or of what `jax.eval_shape` gives.

  Raises:
    ConfigError: it permutes, or has a collective along `axis`.
  """
  for eqn in _equations(jax.make_jaxpr(work)(*args).jaxpr):
    kind = eqn.primitive.name
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    axes = axes if isinstance(axes, tuple) else (axes,)
    if kind == "ppermute":
      raise ConfigError(
        f"{name}: permutes along {axes[0]!r}, which all stages must take part in; "
        "give skip=False, or attention without a ring"
      )
    if kind.startswith(_MEETINGS) and axis in axes:
      raise ConfigError(
        f"{name}: has a collective ({kind}) along {axis!r}, where the other stages do "
        "not come; leave that axis to the pipeline"
      )


def _equations(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
  """Those of a program and of all programs in it."""

  def is_program(x):
    return isinstance(x, core.Jaxpr | core.ClosedJaxpr)

  for eqn in jaxpr.eqns:
    yield eqn
    for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_program):
      if is_program(inner):
        yield from _equations(getattr(inner, "jaxpr", inner))
