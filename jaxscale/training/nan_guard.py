"""NaN guard: skip steps with NaN or Inf on the devices, and report them on the host.

In each step every device checks its gradients, loss and model state before they are
sent, and records the result as four integers. A device that finds NaN or Inf sets its
loss to NaN. The losses are summed over the network anyway, so every device knows,
without a further collective, whether the step is skipped:

    skipped = the loss, the norm of the mean gradient or the learning rate is NaN or Inf

A skipped step keeps the previous state: parameters, statistics, averages, momenta, and
the exchange's residuals and delayed gradients. Only the step counts increase: the run's
count and the optimizer's, which the schedule reads.

The check is a sum of squares of each leaf, which is NaN or Inf if an element is. On CPU
it takes half the time of `max(abs)` and a quarter of `all(isfinite)`. A gradient whose
squared norm overflows float32 (a norm above 1.8e19) therefore counts as Inf, as it does
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
from jaxscale.optim.matrices import is_dealt
from jaxscale.optim.tree_paths import path_name
from jaxscale.training.types import Metrics, StepOutputs, TrainState, Update

# Name of the metric with each device's findings, int32 [devices, 4], sharded over the
# devices. The four codes describe the device's gradients, loss and model state, and the
# mean gradient: -1 if all values are finite, else 2 i if the first bad leaf, of index i,
# holds NaN, 2 i + 1 if it holds Inf.
CODES = "nan_codes"
Sums = Mapping[str, tuple[str, ...]]
_MEAN = "mean gradient"
_WHAT = ("gradient of {}", "{}", "new {}", _MEAN + " of {}, after the exchange,")


def first_bad(tree: Any) -> jax.Array:
  """Return the code of the first leaf, in `jax.tree` order, that is not finite.

  Returns:
    The code as in `CODES`, int32 [].

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
  # A cast from float64 keeps NaN and Inf; large finite sums may become Inf.
  stacked = jnp.stack([s.astype(jnp.float32) for s in sums])
  is_inf = (~jnp.isnan(stacked)).astype(jnp.int32)
  codes = 2 * jnp.arange(len(sums), dtype=jnp.int32) + is_inf
  fine = 2 * len(sums)
  least = jnp.min(jnp.where(jnp.isfinite(stacked), fine, codes))
  return jnp.where(least == fine, -1, least)


def find_bad(
  grads: Any, model_state: Any, totals: Metrics, axes: tuple[str, ...]
) -> tuple[jax.Array, Metrics]:
  """Check one device's results for NaN and Inf, inside `shard_map`.

  Args:
    grads: gradients summed over the device's micro-batches. NaN or Inf in one of them
      remains in the sum.
    model_state: the new model state.
    totals: sums of the device's metrics, with "loss".
    axes: mesh axes.

  Returns:
    Three codes, int32 [3], and the totals, with a loss of NaN if a code is not -1.
  """
  codes = [first_bad(tree) for tree in (grads, totals["loss"], model_state)]
  codes = jnp.stack(vary(codes, axes))
  loss = jnp.where((codes < 0).all(), totals["loss"], jnp.nan)
  return codes, totals | {"loss": loss}


def all_codes(codes: jax.Array, grads: Any, mesh: Mesh) -> jax.Array:
  """Return the metric `CODES`: each device's codes and the code of the mean gradient."""
  codes = jnp.concatenate([codes, jnp.broadcast_to(first_bad(grads), (mesh.size, 1))], axis=1)
  return lax.with_sharding_constraint(codes, NamedSharding(mesh, P(mesh.axis_names)))


def mark_bad(metrics: Metrics, is_overflow: jax.Array | bool = False) -> Metrics:
  """Set the loss to NaN if "grad_norm" or the learning rate is NaN or Inf.

  In an overflow of scaled gradients (`loss_scale`), "grad_norm" may have NaN or Inf.
  """
  values = {"grad_norm": jnp.where(is_overflow, 0, metrics["grad_norm"])}
  values = [(metrics | values)[n] for n in ("loss", "grad_norm", "learning_rate") if n in metrics]
  is_good = jnp.isfinite(jnp.stack(values)).all()
  return metrics | {"loss": jnp.where(is_good, metrics["loss"], jnp.nan)}


def skip_bad_steps(update: Update, *, branch: bool) -> Update:
  """Return an update that keeps the old state if the loss is NaN or Inf.

  Args:
    update: the update of a good step.
    branch: see `if_good`.
  """

  def guarded(state: TrainState, outputs: StepOutputs) -> TrainState:
    opt_state = count_steps(state.opt_state)
    skipped = state._replace(step=state.step + 1, opt_state=opt_state)
    is_good = jnp.isfinite(outputs.metrics["loss"])
    after = if_good(is_good, lambda: update(state, outputs), lambda: skipped, branch=branch)
    # Selected even with `branch`, since in a branch XLA would keep both copies of an
    # exchange's residuals.
    return after._replace(
      model_state=keep(is_good, outputs.model_state, state.model_state),
      exchange_state=keep(is_good, outputs.exchange_state, state.exchange_state),
    )

  return guarded


def keep(is_good: jax.Array, new: Any, old: Any) -> Any:
  """Return the new tree if the step is good, else the old one."""
  return jax.tree.map(lambda n, o: jnp.where(is_good, n, o), new, old)


def if_good(
  is_good: jax.Array, move: Callable[[], Any], skip: Callable[[], Any], *, branch: bool
) -> Any:
  """Return `move()` in a good step and `skip()` in a bad one.

  Args:
    is_good: whether the step is good, bool [].
    move: function that returns the new state.
    skip: function that returns the state of a skipped step.
    branch: use a conditional around the update instead of selecting its results. This is
      better on CPU: for a select, XLA recomputed the new momentum for the new parameters
      and copied the old one first (9 more copies for 6 leaves), while branches worked in
      place without copies. On other platforms a branch makes the host wait: XLA for GPU
      reads the condition on the host during the step.
  """
  return lax.cond(is_good, move, skip) if branch else keep(is_good, move(), skip())


def count_steps(opt_state: Any, steps: int = 1) -> Any:
  """Increase the step counts in an optimizer's state, as after skipped steps.

  All integers in the state are counts, except those of a `MatrixState`. Otherwise the
  optimizer's schedule would lag behind the run's. Adam's bias corrections advance too, ahead
  of the moments.
  """

  def counted(x: Any) -> Any:
    return x if is_dealt(x) or not jnp.issubdtype(x.dtype, jnp.integer) else x + steps

  return jax.tree.map(counted, opt_state, is_leaf=is_dealt)


class Diagnosis(NamedTuple):
  """Report of a bad step.

  Attributes:
    text: the report, one line.
    in_state: the state itself has NaN or Inf, so that all further steps will, too.
  """

  text: str
  in_state: bool


def describe(
  codes: jax.Array, params: Any, model_state: Any, state: Any, summed: Sums | None = None
) -> Diagnosis:
  """Report the devices that found NaN or Inf; every process must call it.

  All processes get the same report. If a gradient is summed in the backward pass, NaN on
  one device reaches all devices that take part in the sum. If the loss of one of them is
  bad, only that device is reported.

  Args:
    codes: the metric `CODES` of the step.
    params: the parameters, for the names of the gradients.
    model_state: the model state, for the names of its leaves.
    state: the state before the step; a leaf with NaN or Inf in it is reported.
    summed: axes over which a gradient is summed before the device checks it, by the
      path of its parameter (`parallel.specs.backward_sum_axes`).

  Example:
    >>> describe(metrics[CODES], state.params, state.model_state, state).text
    ...                                                        # doctest: +SKIP
    'process 3 (n4), device 6: gradient of layers_0/kernel is NaN'
  """
  rows = sorted(codes.addressable_shards, key=lambda s: s.index[0].start or 0)
  by_device = {ordinal(s.device): np.asarray(s.data)[0].tolist() for s in rows}
  before = bad_leaves(state)
  named = {device: (before.get(device, ""), *leaves) for device, leaves in by_device.items()}
  bad = [[device, *leaves] for device, leaves in named.items() if leaves[0] or max(leaves[1:]) >= 0]
  gathered = cluster.gather([platform.node(), len(by_device), bad])
  summed, of_params = summed or {}, _names(params)
  sums = {name: f", summed over {' and '.join(axes)}," for name, axes in summed.items()}
  own_names = [name + sums.get(name, "") for name in of_params]
  names = [own_names, ["loss"], _names(model_state), of_params]
  has_bad_loss = any(leaves[1] >= 0 for _, _, bad in gathered for _, _, *leaves in bad)
  locations: dict[str, list[tuple[int, str, int]]] = {}
  for process, (host, _, bad) in enumerate(gathered):
    for device, bad_before, *leaves in bad:
      is_received = leaves[0] >= 0 > leaves[1] and of_params[leaves[0] // 2] in summed
      if has_bad_loss and is_received and not bad_before:
        continue
      which = next((i for i, code in enumerate(leaves) if code >= 0), 0)
      leaf, is_inf = divmod(leaves[which], 2)
      finding = _WHAT[which].format(names[which][leaf])
      what = bad_before or f"{finding} is {'Inf' if is_inf else 'NaN'}"
      locations.setdefault(what, []).append((process, host, device))
  # A bad mean gradient is reported only if no device's own gradient explains it.
  if of_devices := {what: at for what, at in locations.items() if not what.startswith(_MEAN)}:
    locations = of_devices
  number = sum(count for _, count, _ in gathered)
  rarest_first = sorted(locations.items(), key=lambda item: len(item[1]))
  lines = [_at(at, what, number) for what, at in rarest_first]
  in_state = any(bad_before for _, _, bad in gathered for _, bad_before, *_ in bad)
  more = [f"{len(lines) - 4} more"] if len(lines) > 4 else []
  return Diagnosis("; ".join(lines[:4] + more), in_state)


def bad_leaves(tree: Any) -> dict[int, str]:
  """Return a description of NaN or Inf in a tree, by ordinal of this process's devices.

  It reads every array of the tree, so call it only after a bad step.
  """
  result: dict[int, str] = {}
  for path, leaf in jax.tree.leaves_with_path(tree):
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
      continue
    for shard in leaf.addressable_shards:
      if (device := ordinal(shard.device)) in result:
        continue
      if not np.isfinite(shard.data).all():
        kind = "NaN" if np.isnan(shard.data).any() else "Inf"
        result[device] = f"{path_name(path)} is {kind} in the state itself"
  return result


def ordinal(device: Any) -> int:
  """Return the device's number on its host, or its global id if the host has none."""
  number = device.local_hardware_id
  return device.id if number is None else number


def _names(tree: Any) -> list[str]:
  return [path_name(path) for path, _ in jax.tree.leaves_with_path(tree)]


def _at(locations: Sequence[tuple[int, str, int]], what: str, number: int) -> str:
  """Return a finding, preceded by the devices that have it, of `number` in all."""
  if what.startswith(_MEAN):
    return what
  if len(locations) == number > 1:
    return f"all {number} devices: {what}"
  shown = by_process(locations, lambda ids: f"), device{'s' * (len(ids) > 1)} {few(ids)}")
  return f"{shown}: {what}"


def by_process(
  locations: Iterable[tuple[int, str, Any]], devices_text: Callable[[list[Any]], str]
) -> str:
  """Return a text that lists processes with their hosts and devices.

  Args:
    locations: (process, host, device) triples.
    devices_text: devices of one process -> the text after "process 3 (host".
  """
  ids: dict[tuple[int, str], list[Any]] = {}
  for process, host, device in locations:
    ids.setdefault((process, host), []).append(device)
  words = [f"process {p} ({host}{devices_text(d)}" for (p, host), d in ids.items()]
  return few(words, more="more processes")
