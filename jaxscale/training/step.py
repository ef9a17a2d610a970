"""The train step: local gradients, their exchange, the update.

    local_grads   jax.shard_map: each device's own gradients, micro-batches in a
                  scan, sums and counts of the metrics
    exchange      jax.shard_map: the one place where gradients cross the network
    update        optax on global arrays under plain jit

All three are one `jax.jit`, so the compiler sees the whole step; traces name them by
the scopes "gradients", "exchange" and "update" (`planning.trace`). Parameters are
cast to varying *before* the loss, else `jax.grad` under `check_vma=True` sums
gradients over devices by itself, in whatever dtype the forward pass cast to.

What is optional wraps the update (`with_average`, `noise_scale.with_noise_scale`,
`nan_guard.skip_bad_steps`) or reads the new state (`observe`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxscale import optim
from jaxscale.collectives import vary
from jaxscale.collectives.cpu_workarounds import one_at_a_time
from jaxscale.collectives.typed import names as names_of
from jaxscale.collectives.typed import varying
from jaxscale.errors import invalid
from jaxscale.exchange import Exchange, plain
from jaxscale.mesh import batch_axes, on_cpu, replicated
from jaxscale.optim.tree_paths import path_name
from jaxscale.parallel import layout as layouts
from jaxscale.parallel.layout import Layout
from jaxscale.parallel.layout_exchange import exchange_axes, make_layout_exchange
from jaxscale.parallel.run_stack import PipelineGrads
from jaxscale.training import nan_guard
from jaxscale.training import noise_scale as noise_scales
from jaxscale.training.contract import (
  check_sums,
  checked,
  warn_unchecked,
  without_examples,
)
from jaxscale.training.losses import IS_SUM
from jaxscale.training.model_state import agree, check_agrees, map_averaged
from jaxscale.training.state import TrainState, state_shardings

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]
Totals = dict[str, jax.Array]  # sums over examples, with their number: "examples"
# (params, model_state, batch, keys: one per row) -> loss summed over the rows,
# (new model_state, totals)
LossFn = Callable[[Any, Any, Batch, jax.Array], tuple[jax.Array, tuple[Any, Totals]]]
TrainStep = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
# (params, model_state, batch with "mask") -> totals
EvalFn = Callable[[Any, Any, Batch], Totals]
EvalStep = Callable[[Any, Any, Batch], Totals]


class Gradients(NamedTuple):
  """What a step has computed before its update.

  Attributes:
    grads: means over the global batch.
    model_state: the new one.
    exchange_state: the new one.
    totals: sums over the global batch.
    rows: of the global batch.
    metrics: means over the global batch, with `grad_norm`.
  """

  grads: Any
  model_state: Any
  exchange_state: Any
  totals: Totals
  rows: int
  metrics: Metrics


Update = Callable[[TrainState, Gradients], TrainState]


def make_train_step(
  loss_fn: LossFn | PipelineGrads,
  tx: optax.GradientTransformation,
  mesh: Mesh,
  exchange: Exchange | None = None,
  *,
  layout: Layout | None = None,
  accumulate_steps: int = 1,
  unroll: bool | None = None,
  ema_decay: float | None = None,
  ema_warmup: bool = False,
  noise_scale: bool = False,
  observe: Callable[[Any], Metrics] | None = None,
  skip_bad_steps: bool = False,
  seed: int = 0,
) -> TrainStep:
  """Compile-ready `train_step(state, batch) -> (state, metrics)`.

  The state is donated: use the one returned. Metrics are float32 scalars on
  the devices, means over the global batch, and `grad_norm` (before any clipping)
  and `learning_rate`, where the optimizer keeps it (`optim.learning_rate`).

  Args:
    loss_fn: (params, model_state, batch, keys) -> (loss, (model_state,
      totals)); loss and totals are sums over the rows given, and `keys` holds
      one key per row that depends on seed, step and the row's place in the
      global batch, not on the number of devices. Or what computes gradients itself,
      as a pipeline does.
    tx: the optimizer, on mean gradients.
    mesh: its axes but `stage` and `model` split the batch.
    exchange: how gradients are averaged, over the axes of `parallel.layout_exchange.
      exchange_axes`; None: exactly, by `exchange.plain`.
    layout: of the parameters, which `loss_fn` then gets as a device holds them
      (`parallel.stack_loss`, `parallel.with_gathered_params`); None: everything on
      every device.
    accumulate_steps: micro-batches that a device computes one after another;
      gradients are exchanged once, after the last.
    unroll: write the micro-batches out one after another instead of looping;
      None: on CPU, where XLA canonicalises convolutions only outside of loops:
      inside, the gradient of a 3x3 kernel was 37 times slower.
    ema_decay: of the averages that `init_state(..., average=True)` began.
    ema_warmup: the decay rises to it, see `with_average`.
    noise_scale: also measure the gradient-noise scale, in rows of the batch, from
      the gradients of the micro-batches and of the whole step; the state was made
      with `init_state(..., noise_scale=True)`.
    observe: opt_state -> further metrics, scalars.
    skip_bad_steps: a step with NaN or Inf in its loss, gradients, learning rate or
      model state leaves the state as it was, but for the counts of steps; its loss
      is NaN, and the metric `nan_guard.CODES`, which is not a scalar, has what each
      device found. The totals of `loss_fn` must have "loss".
    seed: of `keys`.

  Example:
    >>> step = make_train_step(loss_fn, optax.sgd(0.1), mesh)   # doctest: +SKIP
    >>> state, metrics = step(state, batch)                     # doctest: +SKIP
  """
  is_sum = layout is not None or getattr(loss_fn, IS_SUM, False)
  layout = layouts.replicated_layout(mesh) if layout is None else layout
  exchange = plain(exchange_axes(layout)) if exchange is None else exchange
  loss_fn = loss_fn if isinstance(loss_fn, PipelineGrads) else checked(loss_fn)
  local_grads = _make_local_grads(
    loss_fn, layout, accumulate_steps, on_cpu(mesh) if unroll is None else unroll,
    noise_scale, skip_bad_steps,
  )  # fmt: skip
  exchange_grads = _make_exchange_grads(exchange, layout)
  bare_update = update = _make_update(tx, layout)
  if ema_decay is not None:
    update = with_average(update, ema_decay, warmup=ema_warmup)
  if noise_scale:
    update = noise_scales.with_noise_scale(update)
  if skip_bad_steps:
    # The host's memory can be read in a branch alone (`layouts.opt_to_device`).
    branch = on_cpu(mesh) or layout.opt_on_host
    update = nan_guard.skip_bad_steps(update, branch=branch)

  def train_step(state: TrainState, batch: Batch):
    key = jax.random.fold_in(jax.random.key(seed), state.step)
    grads, model_state, totals, codes = local_grads(
      state.params, state.model_state, batch, key
    )
    if not is_sum:
      tried = cast(LossFn, loss_fn), state.params, state.model_state, batch, mesh
      warn_unchecked(check_sums(*tried))
    grads, exchange_state = exchange_grads(grads, state.exchange_state)
    metrics = means(totals) | {"grad_norm": optax.tree.norm(grads)}
    rows = len(jax.tree.leaves(batch)[0])
    new = Gradients(grads, model_state, exchange_state, totals, rows, metrics)
    if skip_bad_steps:
      # Of the optimizer's new state only the rate: XLA never sees the rest.
      rate = optim.learning_rate(bare_update(state, new).opt_state)
      new = new._replace(metrics=nan_guard.mark_bad(metrics, rate))
    with jax.named_scope("update"):
      state = update(state, new)
    metrics = new.metrics | observed(state.opt_state, observe)
    if noise_scale:
      metrics |= noise_scales.metrics(state.noise)
    if skip_bad_steps:
      metrics = lax.with_sharding_constraint(metrics, replicated(mesh))
      metrics[nan_guard.CODES] = nan_guard.all_codes(codes, grads, mesh)
    return state, metrics

  # With `CODES` not all metrics are replicated.
  where = state_shardings(mesh, layout, tx, average=ema_decay is not None)
  shardings: Any = (where, None if skip_bad_steps else replicated(mesh))
  jitted = jax.jit(train_step, donate_argnums=0, out_shardings=shardings)
  return one_at_a_time(jitted, mesh)


def _make_local_grads(loss_fn, layout, micros, unroll, noise_scale, is_guarded):
  """(params, model_state, batch, key) -> gradients, model state, totals, codes.

  Gradients are each device's own, with a leading dim of devices; totals are sums over
  all of them; codes are what each found with `is_guarded`, else ().
  """
  mesh, axes, row_axes = layout.mesh, layout.mesh.axis_names, batch_axes(layout.mesh)

  @jax.named_scope("gradients")
  def local_grads(params, model_state, batch, key):
    # One device: its part of the parameters, batch [local rows, ...].
    shards, full = layouts.shards_and_full(params, layout)
    model_state = vary(model_state, layout.token_axes)

    def loss_of(shards, *rest):
      return loss_fn(layouts.pair_shards(shards, full), *rest)

    if isinstance(loss_fn, PipelineGrads):
      assert not noise_scale, "it has no gradients of its micro-batches"
      found = loss_fn.grads(shards, full, model_state, batch, micros)
    else:
      keys = row_keys(key, batch, row_axes)
      arguments = shards, model_state, batch, keys
      new_state = lambda *args: loss_of(*args)[1][0]  # noqa: E731
      check_agrees(new_state, arguments, micros, layout.token_axes)
      more = noise_scales.observe if noise_scale else None
      found = sum_grads(
        loss_of, shards, model_state, batch, keys, micros, unroll=unroll, observe=more
      )
    grads, model_state, totals = found
    codes: Any = ()
    if is_guarded:
      codes, totals = nan_guard.find_bad(grads, model_state, totals, axes)
      codes = codes[None]
    totals = sum_totals(totals, layout.token_axes)
    grads = layouts.scale_for_exchange(grads, layout, totals["examples"])
    model_state = agree(model_state, axes)
    return grads, model_state, totals, codes

  in_specs = layout.param_specs, P(), P(row_axes), P()
  out_specs = layouts.exchange_specs(layout), P(), P(), P(axes)
  return jax.shard_map(local_grads, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


def _make_exchange_grads(exchange: Exchange, layout: Layout):
  """(each device's gradients, exchange_state) -> (mean gradients, exchange_state)."""
  whole_exchange = make_layout_exchange(exchange, layout)
  specs, own = layouts.exchange_specs(layout), P(layout.mesh.axis_names)
  out_specs = layouts.grad_specs(layout), own

  @jax.shard_map(mesh=layout.mesh, in_specs=(specs, own), out_specs=out_specs)
  @jax.named_scope("exchange")
  def exchange_grads(stacked, exchange_state):
    # One device: every leaf has a leading dim of 1, its place in the mesh.
    grads, state = jax.tree.map(lambda x: x[0], (stacked, exchange_state))
    means, state = whole_exchange.exchange(grads, state)
    _check_means(grads, means, layout)
    return means, jax.tree.map(lambda x: x[None], state)

  return exchange_grads


def _check_means(grads: Any, means: Any, layout: Layout) -> None:
  """Refuse an exchange that did not give every device the mean of each gradient."""
  names = [path_name(path) for path, _ in jax.tree.leaves_with_path(grads)]
  if jax.tree.structure(grads) != jax.tree.structure(means):
    why, fix = "returns other leaves than the gradients", "return (means, state)"
    raise invalid("exchange", ..., why, fix)
  specs = jax.tree.broadcast(layouts.grad_specs(layout), grads)
  leaves = map(jax.tree.leaves, (grads, means, specs))
  for name, grad, mean, spec in zip(names, *leaves, strict=True):
    kinds = [f"{jnp.result_type(x)}{list(jnp.shape(x))}" for x in (grad, mean)]
    if kinds[0] != kinds[1]:
      why = f"returns {kinds[1]} for the gradient of {name}, {kinds[0]}"
      raise invalid("exchange", ..., why, "return the mean of each gradient")
    split = {a for entry in spec for a in names_of(entry or ())}
    if own := tuple(a for a in varying(mean) if a not in split):
      why = f"leaves the gradient of {name} different along {own}"
      raise invalid("exchange", ..., why, "average it by jax.lax.pmean over these axes")


def _make_update(tx: optax.GradientTransformation, layout: Layout) -> Update:
  """The optimizer's step, on gradients and parameters sharded like its state."""

  def update(state: TrainState, new: Gradients) -> TrainState:
    grads, params = layouts.shard_like_optimizer((new.grads, state.params), layout)
    opt_state = layouts.opt_to_device(state.opt_state, layout)
    updates, opt_state = tx.update(grads, opt_state, params)
    params = layouts.shard_like_params(optax.apply_updates(params, updates), layout)
    return state._replace(
      step=state.step + 1,
      params=params,
      model_state=new.model_state,
      opt_state=layouts.opt_to_host(opt_state, layout),
      exchange_state=new.exchange_state,
    )

  return update


def with_average(update: Update, decay: float, *, warmup: bool = False) -> Update:
  """Also average = decay average + (1 - decay) new.

  Of the parameters and of BatchNorm's statistics, which must fit them. Other model
  state is that of the newest step.

  Args:
    update: what is averaged over.
    decay: at the end of the warm-up.
    warmup: in step t, which is 1 at first, min(decay, 1 - t^(-2/3)) is the decay: that
      of timm's ModelEmaV3 (1.0.31, utils/model_ema.py) with `use_warmup`. The first
      step's parameters so replace the initial ones.
  """

  def averaged(state: TrainState, new: Gradients) -> TrainState:
    after = update(state, new)
    share = 1 - decay
    if warmup:
      share = jnp.maximum(share, after.step.astype(jnp.float32) ** (-2 / 3))

    def mean(new, old):
      return optax.incremental_update(new, old, step_size=share)

    params, model_state = state.average
    params = mean(after.params, params)
    model_state = map_averaged(mean, after.model_state, model_state)
    return after._replace(average=(params, model_state))

  return averaged


def observed(opt_state: Any, observe: Callable[[Any], Metrics] | None) -> Metrics:
  """The learning rate of a new state, where it is kept, and what `observe` reads."""
  rate = optim.learning_rate(opt_state)
  found = {} if rate is None else {"learning_rate": rate}
  return found if observe is None else found | observe(opt_state)


def sum_totals(totals: Totals, axes: tuple[str, ...]) -> Totals:
  """Sums over all devices, each over the axes along which devices differ in it.

  Along `axes` they have other examples, also where all count as many, as a loss
  does whose number of examples is that of its rows. A loss that was marked as bad
  (`nan_guard.find_bad`) also differs along axes whose devices computed the same: it
  counts once.
  """
  if "examples" not in totals:
    raise without_examples(totals)
  totals = vary(totals, axes)
  counted = varying(totals["examples"])
  sums = {}
  for name, total in totals.items():
    again = tuple(axis for axis in varying(total) if axis not in counted)
    own = total / lax.axis_size(again) if again else total
    sums[name] = lax.psum(own, varying(total))
  return sums


def sum_grads(
  loss_fn: LossFn,
  params: Any,
  model_state: Any,
  batch: Batch,
  keys: jax.Array,
  micros: int,
  *,
  unroll: bool,
  observe: Callable[[Any, Totals], Totals] | None = None,
) -> tuple[Any, Any, Totals]:
  """A device's gradients, summed over its micro-batches (gradient accumulation).

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
    Sums of gradients, the model state (means of what is averaged), sums of totals.
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
    (grads, state, totals), (more, new_state, also) = sums, micro_grads(micro)
    grads, totals = jax.tree.map(jnp.add, (grads, totals), (more, also))
    return (grads, map_averaged(jnp.add, state, new_state), totals), None

  # The first micro-batch gives the sums their shapes; the scan adds the rest.
  # All start from the step's own model state: the mean of their new ones decays
  # running averages once per step, however many micro-batches there are.
  parts = jax.tree.map(lambda x: x.reshape(micros, -1, *x.shape[1:]), (batch, keys))
  first = micro_grads(jax.tree.map(lambda x: x[0], parts))
  rest = jax.tree.map(lambda x: x[1:], parts)
  (grads, states, totals), _ = lax.scan(add_micro, first, rest, unroll=unroll)
  return grads, map_averaged(lambda x: x / micros, states), totals


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
    mesh: its axes but `stage` and `model` split the batch.
    layout: of the parameters; None: everything on every device.
  """
  layout = layouts.replicated_layout(mesh) if layout is None else layout
  in_specs = layout.param_specs, P(), P(batch_axes(mesh))

  @jax.shard_map(mesh=mesh, in_specs=in_specs, out_specs=P())
  def local_totals(params, model_state, batch):
    return sum_totals(eval_fn(params, model_state, batch), layout.token_axes)

  return one_at_a_time(jax.jit(local_totals, out_shardings=replicated(mesh)), mesh)


def means(totals: Totals) -> dict[str, jax.Array]:
  """Each sum over examples divided by their number, as float32.

  Names that begin with "_" are of the step itself and left out.
  """
  count = totals["examples"].astype(jnp.float32)
  return {
    name: jnp.asarray(total, jnp.float32) / count
    for name, total in totals.items()
    if name != "examples" and not name.startswith("_")
  }
