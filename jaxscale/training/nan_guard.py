"""Steps with NaN or Inf in loss or gradient: skipped on the device, named on the host.

In the step every device checks its own gradients, loss and model state before
anything of them is sent, and writes down what it found as four integers. A device that
found NaN or Inf gives NaN for its loss. The sum of losses crosses the network anyway,
so that without a further collective every device knows:

    skipped = the loss, the norm of the mean gradient or the rate is NaN or Inf

and keeps the state that it had: parameters, statistics, averages, momenta, residuals
of the exchange and gradients that wait in it. Only the counts of steps move on, the
run's and the optimizer's, which its schedule reads.

The check is a sum of squares of each leaf: NaN and Inf stay in it, and on CPU it took
half the time of `max(abs)` and a quarter of `all(isfinite)`. So a gradient whose
squared norm is more than float32 holds (a norm of 1.8e19) counts as Inf, as it does
in `grad_norm`.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxscale import cluster
from jaxscale.collectives import vary
from jaxscale.metrics.text import few
from jaxscale.optim.tree_paths import path_name
from jaxscale.training.types import Metrics, StepOutputs, TrainState, Update

# The metric with what each device found, int32 [devices, 4], sharded over them. Codes
# of its gradients, loss and model state, and of the mean gradient: -1 if all is
# finite, else 2 i if the first bad leaf, of index i, holds NaN, 2 i + 1 if Inf.
CODES = "nan_codes"
Sums = Mapping[str, tuple[str, ...]]
_MEAN = "mean gradient"
_WHAT = ("gradient of {}", "{}", "new {}", _MEAN + " of {}, after the exchange,")


def first_bad(tree: Any) -> jax.Array:
  """The code of the first leaf, in the order of `jax.tree`, that is not finite.

  Returns:
    int32 []: as `CODES` says.

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


def find_bad(
  grads: Any, model_state: Any, totals: Metrics, axes: tuple[str, ...]
) -> tuple[jax.Array, Metrics]:
  """Check a device's own step for NaN and Inf, inside `shard_map`.

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


def all_codes(codes: jax.Array, grads: Any, mesh: Mesh) -> jax.Array:
  """The metric `CODES`: what each device found, and the code of the mean gradient."""
  mean = jnp.broadcast_to(first_bad(grads), (mesh.size, 1))
  codes = jnp.concatenate([codes, mean], axis=1)
  return lax.with_sharding_constraint(codes, NamedSharding(mesh, P(mesh.axis_names)))


def mark_bad(metrics: Metrics) -> Metrics:
  """Set the loss to NaN where "grad_norm" or the learning rate is NaN or Inf."""
  names = [n for n in ("loss", "grad_norm", "learning_rate") if n in metrics]
  is_good = jnp.isfinite(jnp.stack([metrics[name] for name in names])).all()
  return metrics | {"loss": jnp.where(is_good, metrics["loss"], jnp.nan)}


def skip_bad_steps(update: Update, *, branch: bool) -> Update:
  """An update that leaves the state as it was where the loss is NaN or Inf.

  Args:
    update: of a good step.
    branch: see `if_good`.
  """

  def guarded(state: TrainState, outputs: StepOutputs) -> TrainState:
    opt_state = count_steps(state.opt_state)
    skipped = state._replace(step=state.step + 1, opt_state=opt_state)
    is_good = jnp.isfinite(outputs.metrics["loss"])
    after = if_good(is_good, lambda: update(state, outputs), lambda: skipped, branch=branch)
    # Selected in any case: in a branch XLA would keep both residuals of an exchange.
    return after._replace(
      model_state=keep(is_good, outputs.model_state, state.model_state),
      exchange_state=keep(is_good, outputs.exchange_state, state.exchange_state),
    )

  return guarded


def keep(is_good: jax.Array, new: Any, old: Any) -> Any:
  """The new tree if the step is good, else the old one."""
  return jax.tree.map(lambda n, o: jnp.where(is_good, n, o), new, old)


def if_good(
  is_good: jax.Array, move: Callable[[], Any], skip: Callable[[], Any], *, branch: bool
) -> Any:
  """`move()` in a good step, `skip()` in a bad one.

  Args:
    is_good: bool [].
    move: makes the new state.
    skip: makes that of a skipped step.
    branch: around the update, rather than select what it computed. Better on CPU:
      XLA there computes the new momentum again for the new parameters, and so
      copied the old one first for a select (9 copies more for 6 leaves), while
      branches worked in place, without a copy or a byte more. Elsewhere a branch would
      make the host wait: XLA for GPU reads the condition on the host in mid-step.
  """
  return lax.cond(is_good, move, skip) if branch else keep(is_good, move(), skip())


def count_steps(opt_state: Any, steps: int = 1) -> Any:
  """An optimizer's state after so many skipped steps: only its counts move on.

  All its integers are counts. Else its schedule would fall behind the run's. Adam's
  bias corrections move on too, that much ahead of the moments.
  """
  return jax.tree.map(lambda x: x + steps if jnp.issubdtype(x.dtype, jnp.integer) else x, opt_state)


class Diagnosis(NamedTuple):
  """Report of a bad step.

  Attributes:
    text: in one line.
    in_state: the state itself is bad, so that every further step will be.
  """

  text: str
  in_state: bool


def describe(
  codes: jax.Array, params: Any, model_state: Any, state: Any, summed: Sums | None = None
) -> Diagnosis:
  """Report the devices of a bad step and their findings; every process calls it.

  All get the same. A gradient that is summed in the backward pass is bad on all
  devices that have a part of the sum: where the loss of one of them is bad, that is
  who is named.

  Args:
    codes: the metric `CODES` of the step.
    params: whose gradients they were, for the names.
    model_state: likewise.
    state: before the step; where it is bad itself, its leaf is named.
    summed: axes that a gradient is summed over before a device checks it, by the
      path of its parameter (`parallel.specs.backward_sum_axes`).

  Example:
    >>> describe(metrics[CODES], state.params, state.model_state, state).text
    ...                                                        # doctest: +SKIP
    'process 3 (n4), device 6: gradient of layers_0/kernel is NaN'
  """
  rows = sorted(codes.addressable_shards, key=lambda s: s.index[0].start or 0)
  found = {ordinal(s.device): np.asarray(s.data)[0].tolist() for s in rows}
  before = bad_leaves(state)
  named = {device: (before.get(device, ""), *own) for device, own in found.items()}
  bad = [[device, *own] for device, own in named.items() if own[0] or max(own[1:]) >= 0]
  gathered = cluster.gather([platform.node(), len(found), bad])
  summed, of_params = summed or {}, _names(params)
  sums = {name: f", summed over {' and '.join(axes)}," for name, axes in summed.items()}
  own_names = [name + sums.get(name, "") for name in of_params]
  names = [own_names, ["loss"], _names(model_state), of_params]
  has_bad_loss = any(own[1] >= 0 for _, _, bad in gathered for _, _, *own in bad)
  places: dict[str, list[tuple[int, str, int]]] = {}
  for process, (host, _, bad) in enumerate(gathered):
    for device, bad_before, *own in bad:
      is_received = own[0] >= 0 > own[1] and of_params[own[0] // 2] in summed
      if has_bad_loss and is_received and not bad_before:
        continue
      which = next((i for i, code in enumerate(own) if code >= 0), 0)
      leaf, is_inf = divmod(own[which], 2)
      finding = _WHAT[which].format(names[which][leaf])
      what = bad_before or f"{finding} is {'Inf' if is_inf else 'NaN'}"
      places.setdefault(what, []).append((process, host, device))
  # The mean is bad where a device's own gradient is, and then adds nothing.
  if own := {what: at for what, at in places.items() if not what.startswith(_MEAN)}:
    places = own
  number = sum(count for _, count, _ in gathered)
  rarest_first = sorted(places.items(), key=lambda item: len(item[1]))
  lines = [_at(at, what, number) for what, at in rarest_first]
  in_state = any(bad_before for _, _, bad in gathered for _, bad_before, *_ in bad)
  more = [f"{len(lines) - 4} more"] if len(lines) > 4 else []
  return Diagnosis("; ".join(lines[:4] + more), in_state)


def bad_leaves(tree: Any) -> dict[int, str]:
  """Ordinal -> what is bad, of this process's devices that hold such a leaf.

  Reads every array of the tree: for when something is wrong.
  """
  found: dict[int, str] = {}
  for path, leaf in jax.tree.leaves_with_path(tree):
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
      continue
    for shard in leaf.addressable_shards:
      if (device := ordinal(shard.device)) in found:
        continue
      if not np.isfinite(shard.data).all():
        kind = "NaN" if np.isnan(shard.data).any() else "Inf"
        found[device] = f"{path_name(path)} is {kind} in the state itself"
  return found


def ordinal(device: Any) -> int:
  """Return the device's number on its host, where the host counts its devices."""
  number = device.local_hardware_id
  return device.id if number is None else number


def _names(tree: Any) -> list[str]:
  return [path_name(path) for path, _ in jax.tree.leaves_with_path(tree)]


def _at(places: Sequence[tuple[int, str, int]], what: str, number: int) -> str:
  """Return a finding with the devices, of `number`, that have it."""
  if what.startswith(_MEAN):
    return what
  if len(places) == number > 1:
    return f"all {number} devices: {what}"
  shown = by_process(places, lambda own: f"), device{'s' * (len(own) > 1)} {few(own)}")
  return f"{shown}: {what}"


def by_process(
  places: Iterable[tuple[int, str, Any]], devices_text: Callable[[list[Any]], str]
) -> str:
  """Processes, hosts and devices, as words.

  Args:
    places: process, host and device of each.
    devices_text: devices of one process -> what follows "process 3 (host".
  """
  devices: dict[tuple[int, str], list[Any]] = {}
  for process, host, device in places:
    devices.setdefault((process, host), []).append(device)
  words = [f"process {p} ({host}{devices_text(d)}" for (p, host), d in devices.items()]
  return few(words, more="more processes")
