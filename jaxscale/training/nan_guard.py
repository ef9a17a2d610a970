"""Steps whose loss or gradient is no number: refused on the device, named on the host.

In the step every device looks at its own gradients, loss and model state before
anything of them is sent, and writes down what it saw as four integers. A device that
saw NaN or Inf gives NaN for its loss. The sum of losses crosses the network anyway,
so that without a collective more every device knows:

    refused = the loss, the norm of the mean gradient or the rate is NaN or Inf

and keeps the state that it had: parameters, statistics, averages, momenta, residuals
of the exchange and gradients that wait in it. Only the counts of steps move on, the
run's and the optimizer's, which its schedule reads.

Leaf by leaf, the look is a sum of squares: NaN and Inf stay in it, and on CPU it took
half the time of `max(abs)` and a quarter of `all(isfinite)`. So a gradient whose
squared norm is more than float32 holds (a norm of 1.8e19) counts as Inf, as it does
in `grad_norm`.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from jaxscale import cluster
from jaxscale.collectives import vary
from jaxscale.tree_paths import path_name

# The metric with what each device saw, int32 [devices, 4], sharded over them. Codes
# of its gradients, loss and model state, and of the mean gradient: -1 if all is
# finite, else 2 i if the first bad leaf, of index i, holds NaN, 2 i + 1 if Inf.
SEEN = "non_finite"
_WHAT = ("gradient of {}", "{}", "new {}", "mean gradient of {}, after the exchange,")
_SHOWN = 4  # processes in one line, and devices of each


def first_bad(tree: Any) -> jax.Array:
  """The code of the first leaf, in the order of `jax.tree`, that is not finite.

  Returns:
    int32 []: as `SEEN` says.

  Example:
    >>> int(first_bad({"a": jnp.ones(3), "b": jnp.array([1.0, jnp.inf])}))
    3
  """
  leaves = jax.tree.leaves(tree)
  sums = [
    jnp.sum(jnp.square(x if x.dtype.itemsize > 4 else x.astype(jnp.float32)))
    if jnp.issubdtype(x.dtype, jnp.floating)
    else jnp.zeros((), jnp.float32)
    for x in leaves
  ]
  if not sums:
    return jnp.full((), -1, jnp.int32)
  # A cast from float64 leaves NaN and Inf what they are, and may make Inf.
  stacked = jnp.stack([s.astype(jnp.float32) for s in sums])
  is_inf = (~jnp.isnan(stacked)).astype(jnp.int32)
  codes = 2 * jnp.arange(len(sums), dtype=jnp.int32) + is_inf
  fine = 2 * len(sums)
  least = jnp.min(jnp.where(jnp.isfinite(stacked), fine, codes))
  return jnp.where(least == fine, -1, least)


def look(
  grads: Any, model_state: Any, totals: dict[str, jax.Array], axes: tuple[str, ...]
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """What a device sees of its own step, inside `shard_map`.

  Args:
    grads: its gradients, of all its micro-batches: what is bad in one stays so in
      their sum.
    model_state: its new one.
    totals: its sums of metrics, with "loss".
    axes: of the mesh.

  Returns:
    Three codes, int32 [3]; the totals, with a loss of NaN if one of them is bad.
  """
  codes = [first_bad(tree) for tree in (grads, totals["loss"], model_state)]
  codes = jnp.stack(vary(codes, axes))
  loss = jnp.where((codes < 0).all(), totals["loss"], jnp.nan)
  return codes, totals | {"loss": loss}


def decide(
  metrics: dict[str, jax.Array],
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Whether a step is good; bool [], and the metrics, whose loss is NaN if not.

  Args:
    metrics: with "loss" and "grad_norm", and maybe "learning_rate".
  """
  looked_at = ("loss", "grad_norm", "learning_rate")
  is_good = jnp.stack([jnp.isfinite(metrics[n]) for n in looked_at if n in metrics])
  is_good = is_good.all(axis=0)
  return is_good, metrics | {"loss": jnp.where(is_good, metrics["loss"], jnp.nan)}


def keep(is_good: jax.Array, new: Any, old: Any) -> Any:
  """The new tree if the step is good, else the old one."""
  return jax.tree.map(lambda n, o: jnp.where(is_good, n, o), new, old)


def unless_refused(
  is_good: jax.Array,
  move: Callable[..., Any],
  stay: Callable[..., Any],
  *operands: Any,
  branch: bool,
) -> Any:
  """`move(*operands)` of a good step, `stay(*operands)` of one that is refused.

  Args:
    is_good: bool [].
    move: what a step makes of the state.
    stay: what is there without it.
    operands: of both.
    branch: as `branches` says.
  """
  if branch:
    return lax.cond(is_good, move, stay, *operands)
  return keep(is_good, move(*operands), stay(*operands))


def branches(mesh: Mesh) -> bool:
  """Whether to branch around an update rather than to select what it made.

  On CPU: XLA there computes the new momentum again for the new parameters, and so
  copied the old one first for a select (9 copies more for 6 leaves), while branches
  worked in place, without a copy or a byte more. Elsewhere a branch would make the
  host wait: XLA for GPU reads the condition on the host in mid-step.
  """
  return mesh.devices.flat[0].platform == "cpu"


def is_count(leaf: Any) -> bool:
  """Whether a leaf of an optimizer's state counts steps: all its integers do."""
  return jnp.issubdtype(leaf.dtype, jnp.integer)


def move_on(opt_state: Any, steps: int = 1) -> Any:
  """An optimizer's state after so many steps that moved nothing but its counts.

  Else its schedule would fall behind the run's. Adam's bias corrections move on too,
  that much ahead of the moments.
  """
  return jax.tree.map(lambda x: x + steps if is_count(x) else x, opt_state)


class Story(NamedTuple):
  """Who saw what.

  Attributes:
    text: in one line.
    in_state: the state itself is bad, so that every further step will be.
  """

  text: str
  in_state: bool


def describe(
  seen: jax.Array,
  params: Any,
  model_state: Any,
  state: Any,
  summed: Mapping[str, tuple[str, ...]] | None = None,
) -> Story:
  """Who saw what in a bad step; every process must call it, and all get the same.

  A gradient that is summed in the backward pass is bad on all devices that have a
  part of the sum: where the loss of one of them is bad, that is who is named.

  Args:
    seen: the metric `SEEN` of the step.
    params: whose gradients they were, for the names.
    model_state: likewise.
    state: what the step was refused for; where that is bad itself, it is named.
    summed: axes that a gradient is summed over before a device looks at it, by the
      path of its parameter (`parallel.layout.backward_sum_axes`).

  Example:
    >>> describe(metrics[SEEN], state.params, state.model_state, state).text
    ...                                                        # doctest: +SKIP
    'process 3 (n4), device 6: gradient of layers_0/kernel is NaN'
  """
  rows = sorted(seen.addressable_shards, key=lambda s: s.index[0].start or 0)
  codes = {_ordinal(s.device): np.asarray(s.data)[0].tolist() for s in rows}
  before = {_ordinal(device): name for device, name in bad_leaves(state).items()}
  mine = [
    [device, before.get(device, ""), *found]
    for device, found in codes.items()
    if max(found) >= 0 or device in before
  ]
  told = cluster.gather([platform.node(), len(codes), mine])
  summed, of_params = summed or {}, _names(params)
  names = [
    [_summed_words(name, summed) for name in of_params], ["loss"],
    _names(model_state), of_params,
  ]  # fmt: skip
  has_bad_loss = any(own[1] >= 0 for _, _, rows in told for _, _, *own in rows)
  said: dict[str, list[tuple[int, str, int]]] = {}
  for process, (host, _, found) in enumerate(told):
    for device, bad_before, *own in found:
      is_received = own[0] >= 0 > own[1] and of_params[own[0] // 2] in summed
      if has_bad_loss and is_received and not bad_before:
        continue
      what = bad_before or _say(own, names)
      said.setdefault(what, []).append((process, host, device))
  number = sum(count for _, count, _ in told)
  # The mean is bad where a device's own is, and then says nothing more.
  if own := {what: places for what, places in said.items() if not _is_mean(what)}:
    said = own
  order = sorted(said, key=lambda what: len(said[what]))
  found = [_of(said[what], what, number) for what in order]
  in_state = any(bad for _, _, rows in told for _, bad, *_ in rows)
  return Story("; ".join(_few(found, "more")), in_state)


def bad_leaves(tree: Any) -> dict[Any, str]:
  """Device -> what is bad, of this process's devices that hold such a leaf.

  Reads every array of the tree: for when something is wrong.
  """
  found: dict[Any, str] = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
      continue
    for shard in leaf.addressable_shards:
      if shard.device not in found and not (x := np.isfinite(shard.data)).all():
        kind = "NaN" if np.isnan(np.asarray(shard.data)[~x]).any() else "Inf"
        found[shard.device] = f"{path_name(path)} is {kind} in the state itself"
  return found


def _names(tree: Any) -> list[str]:
  return [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def _summed_words(name: str, summed: Mapping[str, tuple[str, ...]]) -> str:
  return (
    f"{name}, summed over {' and '.join(summed[name])}," if name in summed else name
  )


def _say(codes: Sequence[int], names: Sequence[Sequence[str]]) -> str:
  """The first of a device's codes that is bad, as words."""
  which = next(i for i, code in enumerate(codes) if code >= 0)
  leaf, is_inf = divmod(codes[which], 2)
  what = _WHAT[which].format(names[which][leaf])
  return f"{what} is {'Inf' if is_inf else 'NaN'}"


def _is_mean(what: str) -> bool:
  return what.startswith("mean gradient")


def _of(places: Sequence[tuple[int, str, int]], what: str, number: int) -> str:
  """Whose it is, and what."""
  if _is_mean(what):
    return what
  if len(places) == number > 1:
    return f"all {number} devices: {what}"
  devices: dict[tuple[int, str], list[str]] = {}
  for process, host, device in places:
    devices.setdefault((process, host), []).append(str(device))
  words = [
    f"process {process} ({host}), device{'s' if len(own) > 1 else ''} "
    + " ".join(_few(own, "more"))
    for (process, host), own in devices.items()
  ]
  return f"{' and '.join(_few(words, 'more processes'))}: {what}"


def _few(words: list[str], more: str) -> list[str]:
  hidden = len(words) - _SHOWN
  return [*words[:_SHOWN], f"{hidden} {more}"] if hidden > 0 else words


def _ordinal(device: Any) -> int:
  """As its host counts its devices, where it does."""
  ordinal = device.local_hardware_id
  return device.id if ordinal is None else ordinal
