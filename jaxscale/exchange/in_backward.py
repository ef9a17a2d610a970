"""A layer's gradient exchanged where it is made: inside the backward scan.

Layers that are stacked and run by `lax.scan` have gradients that come out of the
backward loop all at once, after its last step: an exchange that follows can hide
behind nothing. So a layer's parameters go through an identity whose derivative is
the exchange,

    forward    w -> w                      backward    g_i -> 1/N sum_j g_j

and layer l's collective stands in the loop, where it depends on nothing that the
layers before l (the later turns of the loop) compute. Whether that hides it is the
compiler's affair. In programs compiled ahead of time (jax 0.10.2, 8 layers of 34 MB,
benchmarks/overlap.py)

    two TPU v5e slices   7 of 8 layers' sums between the slices have a third of the
                         step's compute beside them; within a slice half of the
                         all-gathers a little, the reduce-scatters nothing
    2 hosts of 4 H100    all layers' sums, 20 % of the step's compute; 3 % after it
    one TPU v5e slice    nothing: XLA's all-reduce is synchronous there
    CPU                  the programs do not tell

by `lax.psum`. By a hierarchy or a ring less was hidden, or the copies cost more
compute than the hiding is worth.

The mean is linear, so to scale gradients afterwards, as the train step does, or to
add those of micro-batches, is the same mathematics. `all_but` makes the exchange
of the step, which lets these gradients pass and gives the rest to another.

The identity with a backward of its own is Megatron-LM's *f* (arXiv:1909.08053,
section 3), here with the mean over data-parallel devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.collectives import same_everywhere
from jaxscale.collectives.typed import axis_sizes, vary, varying
from jaxscale.errors import ConfigError
from jaxscale.exchange import Exchange
from jaxscale.tree_paths import path_name


def in_backward(
  axes: tuple[str, ...], reduce: Callable[[Any], Any] | None = None
) -> Callable[[Any], Any]:
  """An identity on parameters that averages their gradients over devices.

  Call it in the body of the scan, on the parameters of its one layer: before they
  are cast, else the gradients cross the network in what they were cast to, and once,
  else each call exchanges a gradient of its own. With `jax.checkpoint`, inside of
  what is recomputed: nothing is sent twice.

  Every micro-batch is exchanged: with `accumulate_steps` of A the network carries A
  times the bytes of an exchange that follows the last one. And the step sees no
  gradient of a device alone, so its `noise_scale` would measure nothing: leave it off.

  Args:
    axes: mesh axes to average over.
    reduce: tree of a layer's gradients -> tree of their sums over `axes`, e.g.
      `functools.partial(collectives.sum_tree, by=plan)`; equal in every bit on all
      devices. None: `lax.psum`. Gradients are here not yet divided by the number
      of examples.

  Returns:
    tag: tree -> the same tree, typed varying over `axes`. What flows back has the
    type that the tree had: varying in the train step, whose parameters are.

  Raises:
    ConfigError: an axis that the mesh has not.

  Example:
    >>> tag = in_backward(("replica", "data"))
    >>> def layer(h, w):   # of lax.scan(layer, h, stacked)
    ...   w = tag(w)
    ...   return h + jax.nn.relu(h @ w["up"]) @ w["down"], None
  """

  def tag(tree):
    axis_sizes(axes)
    was_varying = [varying(x) for x in jax.tree.leaves(tree)]

    @jax.custom_vjp
    def identity(tree):
      return vary(tree, axes)

    def forward(tree):
      return identity(tree), None

    def backward(_, grads):
      sums = lax.psum(grads, axes) if reduce is None else reduce(grads)
      leaves, structure = jax.tree.flatten(sums)
      means = [
        vary(x / lax.axis_size(axes), tuple(a for a in axes if a in names))
        for x, names in zip(leaves, was_varying, strict=True)
      ]
      return (jax.tree.unflatten(structure, means),)

    identity.defvjp(forward, backward)
    return identity(tree)

  return tag


def all_but(
  inner: Exchange,
  exchanged: Callable[[str], bool],
  axes: tuple[str, ...],
  *,
  check: bool = True,
) -> Exchange:
  """The exchange of a step some of whose gradients were exchanged in the backward.

      result = g             where `exchanged(path)`: it is the mean already
      result = inner(g)      of the others

  Args:
    inner: how the other gradients are averaged; it sees a tree with None in the
      place of those that pass, and so keeps no state for them.
    exchanged: whether the parameter of this path, e.g. "layers/up", goes through
      `in_backward`.
    axes: mesh axes to average over.
    check: a gradient that passes without being the same on all devices becomes NaN.
      Forgotten, the identity would let the devices drift apart unseen. What is
      compared is its sum; that reads it once more and sends 8 bytes a tensor.

  Raises:
    ConfigError: when the state is made, or a step traced: no path is exchanged.

  Example:
    >>> from jaxscale.exchange import plain
    >>> axes = ("replica", "data")
    >>> exchange = all_but(plain(axes), lambda path: path.startswith("layers/"), axes)
    >>> exchange.init({"layers": {"w": 0.0}, "head": 0.0})
    ()
  """

  def split(tree):
    """Leaf by leaf, whether it passes, and the tree with None in its place."""
    paths, structure = jax.tree.flatten_with_path(tree)
    names = [path_name(path) for path, _ in paths]
    passes = [bool(exchanged(name)) for name in names]
    if not any(passes):
      raise ConfigError(
        f"all_but.exchanged: is True of none of the {len(names)} parameters, such as "
        f"{', '.join(names[:2])}; give the paths of what goes through in_backward"
      )
    rest = [None if p else x for p, (_, x) in zip(passes, paths, strict=True)]
    return passes, jax.tree.unflatten(structure, rest)

  def init(params):
    return inner.init(split(params)[1])

  def exchange(grads, state):
    leaves, structure = jax.tree.flatten(grads)
    passes, rest = split(grads)
    means, state = inner.exchange(rest, state)
    means = structure.flatten_up_to(means)
    passing = [g for p, g in zip(passes, leaves, strict=True) if p]
    passed = iter(_passed(passing, axes, check))
    means = [next(passed) if p else m for p, m in zip(passes, means, strict=True)]
    return structure.unflatten(means), state

  return Exchange(init, exchange, inner.resize)


def _passed(
  grads: list[jax.Array], axes: tuple[str, ...], check: bool
) -> list[jax.Array]:
  """The gradients, typed invariant; NaN where devices have different sums."""
  same = [same_everywhere(g, axes) for g in grads]
  if not check:
    return same
  sums = jnp.stack([jnp.sum(g, dtype=jnp.float32) for g in grads])
  most, minus_least = lax.pmax(jnp.stack([sums, -sums]), axes)
  is_same = most == -minus_least
  return [
    jnp.where(ok, g, jnp.full_like(g, jnp.nan))
    for ok, g in zip(is_same, same, strict=True)
  ]
