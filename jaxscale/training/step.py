"""The train step: local gradients, their exchange, the update.

    local_grads   jax.shard_map: each device's own gradients, micro-batches in a
                  scan, sums and counts of the metrics
    exchange      jax.shard_map: the one place where gradients cross the network
    update        optax on global arrays under plain jit

All three are one `jax.jit`, so the compiler sees the whole step. Parameters are
cast to varying *before* the loss, else `jax.grad` under `check_vma=True` sums
gradients over devices by itself, in whatever dtype the forward pass cast to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxscale.collectives import vary
from jaxscale.collectives.cpu_workarounds import one_at_a_time
from jaxscale.collectives.typed import varying
from jaxscale.exchange import Exchange
from jaxscale.mesh import batch_axes, replicated
from jaxscale.parallel import layout as layouts
from jaxscale.parallel.layout import Layout
from jaxscale.parallel.pipelined import OwnGrads
from jaxscale.parallel.reduction import reduction
from jaxscale.training import nan_guard
from jaxscale.training import noise_scale as noise_scales
from jaxscale.training.state import TrainState, state_shardings

Batch = dict[str, jax.Array]
Totals = dict[str, jax.Array]  # sums over examples, with their number: "examples"
# (params, model_state, batch, keys: one a row) -> loss summed over the rows,
# (new model_state, totals)
LossFn = Callable[[Any, Any, Batch, jax.Array], tuple[jax.Array, tuple[Any, Totals]]]
TrainStep = Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]
# (params, model_state, batch with "mask") -> totals
EvalFn = Callable[[Any, Any, Batch], Totals]
EvalStep = Callable[[Any, Any, Batch], Totals]


def make_train_step(
  loss_fn: LossFn | OwnGrads,
  tx: optax.GradientTransformation,
  mesh: Mesh,
  exchange: Exchange,
  *,
  layout: Layout | None = None,
  accumulate_steps: int = 1,
  unroll: bool | None = None,
  ema_decay: float | None = None,
  schedule: optax.Schedule | None = None,
  noise_scale: bool = False,
  observe: Callable[[Any], dict[str, jax.Array]] | None = None,
  refuse: bool = False,
  seed: int = 0,
) -> TrainStep:
  """Compile-ready `train_step(state, batch) -> (state, metrics)`.

  The state is donated: use the one returned. Metrics are float32 scalars on
  the devices, means over the global batch, beside `grad_norm` (before any
  clipping) and `learning_rate` where `schedule` is given.

  Args:
    loss_fn: (params, model_state, batch, keys) -> (loss, (model_state,
      totals)); loss and totals are sums over the rows given, and `keys` holds
      one key a row that depends on seed, step and the row's place in the
      global batch, not on the number of devices. Or what makes gradients itself,
      as a pipeline does.
    tx: the optimizer, on mean gradients.
    mesh: whose axes split the batch, but for `stage` and `model`.
    exchange: how gradients are averaged, over the axes of `parallel.reduction.
      exchange_axes`.
    layout: of the parameters, which `loss_fn` then finds as they lie on a device
      (`parallel.stack_loss`, `parallel.entered`); None: everything on every device.
    accumulate_steps: micro-batches a device works through one after another;
      gradients are exchanged once, after the last.
    unroll: write the micro-batches out one after another instead of looping;
      None: as `unrolls` says.
    ema_decay: of the averages that `init_state(..., average=True)` began:
      average = decay average + (1 - decay) new, of the parameters and of the
      model state, whose BatchNorm statistics must fit them.
    schedule: step -> learning rate, only to be reported.
    noise_scale: also measure the gradient-noise scale, in rows of the batch, from
      the gradients of the micro-batches and of the whole step; the state was made
      with `init_state(..., noise_scale=True)`.
    observe: opt_state -> further metrics, scalars.
    refuse: a step with NaN or Inf in its loss, gradients or model state leaves the
      state as it was, but for the counts of steps; its loss is NaN, and the metric
      `non_finite.SEEN`, which is no scalar, has what each device saw. The totals
      of `loss_fn` must have "loss".
    seed: of `keys`.

  Example:
    >>> step = make_train_step(loss_fn, optax.sgd(0.1), mesh, plain(AXES))
    >>> state, metrics = step(state, batch)   # doctest: +SKIP
  """
  layout = layouts.whole(mesh) if layout is None else layout
  axes, row_axes = mesh.axis_names, batch_axes(mesh)
  unrolled = unrolls(mesh) if unroll is None else unroll
  branch = nan_guard.branches(mesh) or layout.opt_on_host  # layouts.to_device
  reduced = reduction(exchange, layout)

  def local_grads(params, model_state, batch, key):
    # One device: its part of the parameters, batch [local rows, ...].
    shards, beside = layouts.begin(params, layout)
    model_state = vary(model_state, layout.token_axes)
    keys = row_keys(key, batch, row_axes)

    def loss_of(shards, *given):
      assert not isinstance(loss_fn, OwnGrads)
      return loss_fn(layouts.join(shards, beside), *given)

    if isinstance(loss_fn, OwnGrads):
      assert not noise_scale, "it shows no gradients of its micro-batches"
      grads, model_state, totals = loss_fn.grads(
        shards, beside, model_state, batch, accumulate_steps
      )
    else:
      grads, model_state, totals = sum_grads(
        loss_of, shards, model_state, batch, keys, micros=accumulate_steps,
        unroll=unrolled, observe=noise_scales.observe if noise_scale else None,
      )  # fmt: skip

    seen: Any = ()
    if refuse:
      codes, totals = nan_guard.look(grads, model_state, totals, axes)
      seen = codes[None]
    totals = sum_totals(totals, layout.token_axes)
    model_state = mean_state(model_state)
    grads = layouts.stacked(grads, layout, totals["examples"])
    return grads, model_state, totals, seen

  def exchange_grads(stacked, exchange_state):
    # One device: every leaf has a leading dim of 1, its place in the mesh.
    grads, own = jax.tree.map(lambda x: x[0], (stacked, exchange_state))
    grads, own = reduced.exchange(grads, own)
    return grads, jax.tree.map(lambda x: x[None], own)

  everywhere, own, rows = P(), P(axes), P(row_axes)
  stacked = layouts.stacked_specs(layout)
  local_grads = jax.shard_map(
    local_grads,
    mesh=mesh,
    in_specs=(layout.at_rest, everywhere, rows, everywhere),
    out_specs=(stacked, everywhere, everywhere, own),
    check_vma=True,
  )
  exchange_grads = jax.shard_map(
    exchange_grads,
    mesh=mesh,
    in_specs=(stacked, own),
    out_specs=(layouts.grad_specs(layout), own),
    check_vma=True,
  )

  def move(grads, model_state, state):
    # An optimizer whose state is split updates what it has; the rest is brought.
    grads, params = layouts.to_owners((grads, state.params), layout)
    opt_state = layouts.to_device(state.opt_state, layout)
    updates, opt_state = tx.update(grads, opt_state, params)
    params = layouts.to_rest(optax.apply_updates(params, updates), layout)
    average = state.average
    if ema_decay is not None:
      average = optax.incremental_update(
        (params, model_state), average, step_size=1 - ema_decay
      )
    return params, layouts.to_host(opt_state, layout), average

  def stay(grads, model_state, state):
    del grads, model_state
    return state.params, nan_guard.move_on(state.opt_state), state.average

  def train_step(state: TrainState, batch: Batch):
    key = jax.random.fold_in(jax.random.key(seed), state.step)
    grads, model_state, totals, seen = local_grads(
      state.params, state.model_state, batch, key
    )
    grads, exchange_state = exchange_grads(grads, state.exchange_state)
    small = noise_scales.of_micros(totals) if noise_scale else None
    metrics = means(totals)
    metrics["grad_norm"] = optax.tree.norm(grads)
    if schedule is not None:
      rate = jnp.asarray(schedule(state.step), jnp.float32)
      metrics["learning_rate"] = rate
    operands = grads, model_state, state
    if refuse:
      is_good, metrics = nan_guard.decide(metrics)
      params, opt_state, average = nan_guard.unless_refused(
        is_good, move, stay, *operands, branch=branch
      )
      model_state, exchange_state = nan_guard.keep(
        is_good,
        (model_state, exchange_state),
        (state.model_state, state.exchange_state),
      )
    else:
      params, opt_state, average = move(*operands)

    noise = state.noise
    if small is not None:
      rows = len(jax.tree.leaves(batch)[0])
      big_sq = metrics["grad_norm"] ** 2
      noise = noise_scales.update(noise, small.sq, big_sq, rows * small.share, rows)
      if refuse:
        noise = nan_guard.keep(jnp.isfinite(metrics["loss"]), noise, state.noise)
      metrics |= noise_scales.metrics(noise)
    if observe is not None:
      metrics |= observe(opt_state)
    if refuse:
      metrics = lax.with_sharding_constraint(metrics, replicated(mesh))
      metrics[nan_guard.SEEN] = _seen(seen, grads, mesh)
    return TrainState(
      state.step + 1, params, model_state, opt_state, exchange_state, average, noise
    ), metrics

  # With `SEEN` the metrics do not all lie alike.
  where = state_shardings(mesh, layout, tx, average=ema_decay is not None)
  shardings: Any = (where, None if refuse else replicated(mesh))
  jitted = jax.jit(train_step, donate_argnums=0, out_shardings=shardings)
  return one_at_a_time(jitted, mesh)


def _seen(codes: jax.Array, grads: Any, mesh: Mesh) -> jax.Array:
  """What each device saw, and the code of the mean gradient with it."""
  mean = jnp.broadcast_to(nan_guard.first_bad(grads), (mesh.size, 1))
  seen = jnp.concatenate([codes, mean], axis=1)
  return lax.with_sharding_constraint(seen, NamedSharding(mesh, P(mesh.axis_names)))


def sum_totals(totals: Totals, axes: tuple[str, ...]) -> Totals:
  """Sums over all devices, each over the axes along which devices differ in it.

  Along `axes` they have other examples, also where all count as many, as a loss
  does whose number of examples is that of its rows. A loss that was marked as bad
  (`non_finite.look`) also differs along axes whose devices computed the same: it
  counts once.
  """
  totals = vary(totals, axes)
  counted = varying(totals["examples"])
  sums = {}
  for name, total in totals.items():
    again = tuple(axis for axis in varying(total) if axis not in counted)
    own = total / lax.axis_size(again) if again else total
    sums[name] = lax.psum(own, varying(total))
  return sums


def mean_state(model_state: Any) -> Any:
  """The mean of a model's own state over the devices that differ in it."""
  return jax.tree.map(lambda x: lax.pmean(x, varying(x)), model_state)


def unrolls(mesh: Mesh) -> bool:
  """Whether micro-batches are best written out one after another.

  On CPU alone, where XLA canonicalises convolutions only outside of loops: inside,
  the gradient of a 3x3 kernel was 37 times slower.
  """
  return mesh.devices.flat[0].platform == "cpu"


def sum_grads(
  loss_fn: LossFn,
  params: Any,
  model_state: Any,
  batch: Batch,
  keys: jax.Array,
  *,
  micros: int,
  unroll: bool,
  observe: Callable[[Any, Totals], Totals] | None = None,
) -> tuple[Any, Any, Totals]:
  """A device's gradients, summed over its micro-batches one after another.

  Args:
    loss_fn: as of `make_train_step`.
    params: to differentiate by.
    model_state: before the step.
    batch: [rows, ...], this device's.
    keys: [rows].
    micros: micro-batches, which divide the rows.
    unroll: write them out instead of looping.
    observe: gradients and totals of a micro-batch -> further totals.

  Returns:
    Sums of gradients, the mean of the model states, sums of totals.
  """

  def micro_grads(micro):
    (_, (new_state, totals)), grads = jax.value_and_grad(loss_fn, has_aux=True)(
      params, model_state, *micro
    )
    more = {} if observe is None else observe(grads, totals)
    return grads, new_state, totals | more

  if micros == 1:
    return micro_grads((batch, keys))

  def add_micro(sums, micro):
    return jax.tree.map(jnp.add, sums, micro_grads(micro)), None

  # The first micro-batch gives the sums their shapes; the scan adds the rest.
  # All start from the step's own model state: the mean of what they make of it
  # decays running averages once a step, however many micro-batches there are.
  parts = jax.tree.map(lambda x: x.reshape(micros, -1, *x.shape[1:]), (batch, keys))
  first = micro_grads(jax.tree.map(lambda x: x[0], parts))
  rest = jax.tree.map(lambda x: x[1:], parts)
  (grads, states, totals), _ = lax.scan(add_micro, first, rest, unroll=unroll)
  return grads, jax.tree.map(lambda x: x / micros, states), totals


def row_keys(key: jax.Array, batch: Batch, axes: tuple[str, ...]) -> jax.Array:
  """A key for each of this device's rows, by its place in the global batch.

  Args:
    key: of the step, the same on all devices.
    batch: this device's rows.
    axes: mesh axes that split the batch; called inside `shard_map` over them.
  """
  rows = len(jax.tree.leaves(batch)[0])
  places = lax.axis_index(axes) * rows + jnp.arange(rows)
  return jax.vmap(lambda place: jax.random.fold_in(key, place))(places)


def make_eval_step(
  eval_fn: EvalFn, mesh: Mesh, layout: Layout | None = None
) -> EvalStep:
  """Compile-ready `eval_step(params, model_state, batch) -> totals`.

  Totals are sums over the global batch; rows whose mask is False are padding
  and count for nothing. They stay on the devices until somebody reads them.

  Args:
    eval_fn: (params, model_state, batch) -> totals over the rows of the batch.
    mesh: whose axes split the batch, but for `stage` and `model`.
    layout: of the parameters; None: everything on every device.
  """
  layout = layouts.whole(mesh) if layout is None else layout

  def local_totals(params, model_state, batch):
    return sum_totals(eval_fn(params, model_state, batch), layout.token_axes)

  totals = jax.shard_map(
    local_totals,
    mesh=mesh,
    in_specs=(layout.at_rest, P(), P(batch_axes(mesh))),
    out_specs=P(),
    check_vma=True,
  )
  return one_at_a_time(jax.jit(totals, out_shardings=replicated(mesh)), mesh)


def means(totals: Totals) -> dict[str, jax.Array]:
  """Each sum over examples divided by their number, as float32."""
  count = totals["examples"].astype(jnp.float32)
  return {
    name: jnp.asarray(total, jnp.float32) / count
    for name, total in totals.items()
    if name != "examples"
  }
