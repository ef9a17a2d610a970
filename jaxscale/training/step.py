"""Train step: local gradients, their exchange, and the update.

    local_grads     jax.shard_map: each device's own gradients, micro-batches in a
                    scan, sums and counts of the metrics
    exchange_grads  jax.shard_map: the only place where gradients cross the network
    update          optax on global arrays under plain jit

All three are in one `jax.jit`, so that the compiler sees the whole step. Traces show them
by the scopes "gradients", "exchange" and "update". Parameters are cast to varying *before*
the loss: with `check_vma=True` `jax.grad` would otherwise all-reduce the gradients itself,
in the dtype to which the forward pass casts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxscale.collectives import vary
from jaxscale.collectives.cpu_workarounds import one_at_a_time
from jaxscale.collectives.typed import names as names_of
from jaxscale.collectives.typed import varying
from jaxscale.errors import invalid
from jaxscale.exchange import Exchange, plain
from jaxscale.mesh import batch_axes, on_cpu, replicated, row_blocks
from jaxscale.optim.matrices import dealt_by
from jaxscale.optim.tree_paths import path_name
from jaxscale.parallel import placement, specs
from jaxscale.parallel.deal import make_dealer
from jaxscale.parallel.layout_exchange import exchange_axes, make_layout_exchange
from jaxscale.parallel.run_stack import PipelineGrads
from jaxscale.parallel.specs import Layout
from jaxscale.parallel.trainable import merge, trainable_layout, trainable_part
from jaxscale.training import contract, nan_guard
from jaxscale.training import loss_scale as loss_scales
from jaxscale.training import model_state as model_states
from jaxscale.training import noise_scale as noise_scales
from jaxscale.training.gathered import PARTS, Parts, cotangents, second_pass
from jaxscale.training.metrics import ROWS, SUMS
from jaxscale.training.model_state import Queue, map_averaged, map_queues, queues, summed
from jaxscale.training.state import state_shardings
from jaxscale.training.types import (
  LOSS_WEIGHT,
  Batch,
  EvalFn,
  EvalStep,
  LossFn,
  Metrics,
  StepOptions,
  StepOutputs,
  Totals,
  TrainState,
  TrainStep,
  Tree,
  Update,
)


def make_train_step(
  loss_fn: LossFn | PipelineGrads,
  tx: optax.GradientTransformation,
  mesh: Mesh,
  exchange: Exchange | None = None,
  *,
  schedule: optax.Schedule | None = None,
  layout: Layout | None = None,
  options: StepOptions = StepOptions(),
) -> TrainStep:
  """Return a jitted `train_step(state, batch) -> (state, metrics)`.

  The state is donated: use the returned one. Metrics are float32 scalars on the devices,
  means over the global batch. They include `grad_norm` (before clipping) and, if there is
  a schedule, `learning_rate`.

  Args:
    loss_fn: (params, model_state, batch, keys) -> (loss, (model_state, totals)), for the
      rows of one device and micro-batch, arrays [rows, ...]. The loss is a float scalar and
      totals are a dict of scalars, all sums over these rows, not means. "examples" is the
      number of summed values: the step adds up gradients and totals over micro-batches and
      devices and divides by the sum of "examples". `keys` holds one key per row, [rows],
      which depends on the seed, the step and the row's position in the global batch, not on
      the number of devices. Alternatively `PipelineGrads`, which computes gradients itself.
    tx: the optimizer, which is applied to mean gradients.
    mesh: the mesh; all its axes except `stage` and `model` split the batch.
    exchange: the exchange that averages gradients over the axes of `parallel.
      layout_exchange.exchange_axes`; None means `exchange.plain`, which is exact.
    schedule: step -> learning rate, the same as in `tx`; for the metrics and for
      `skip_bad_steps`. None means that no learning rate is reported.
    layout: the layout of the parameters. `loss_fn` then gets the part of the parameters
      that a device holds (`parallel.stack_loss`, `parallel.with_gathered_params`). None means
      that everything is replicated.
    options: see `StepOptions`.

  Raises:
    ConfigError: raised by the first call, if the loss returns something else or is a mean;
      and by any call with a state or batch that the step cannot use.

  Example:
    >>> from jaxscale.mesh import make_mesh
    >>> from jaxscale.training import init_state
    >>> def loss_fn(params, model_state, batch, keys):
    ...   errors = batch["x"] @ params["w"] - batch["y"]
    ...   totals = {"loss": (errors**2).sum(), "examples": len(errors)}
    ...   return totals["loss"], (model_state, totals)
    >>> mesh, tx = make_mesh(), optax.sgd(0.1)
    >>> state = init_state(lambda key: ({"w": jnp.zeros(2)}, {}), tx, mesh)
    >>> train_step = make_train_step(loss_fn, tx, mesh)
    >>> state, metrics = train_step(state, {"x": jnp.ones((8, 2)), "y": jnp.ones(8)})
    >>> float(metrics["loss"])
    1.0
  """
  if options.scale_loss and (isinstance(loss_fn, PipelineGrads) or not options.skip_bad_steps):
    raise invalid("scale_loss", True, "needs skip_bad_steps and no pipeline", "change the options")
  has_layout, layout = layout is not None, layout or specs.replicated_layout(mesh)
  if options.measure_noise_scale and hasattr(loss_fn, PARTS):
    problem = "compares gradients of micro-batches, but this loss depends on all rows"
    raise invalid("options.measure_noise_scale", True, problem, "use False")
  loss_fn = loss_fn if isinstance(loss_fn, PipelineGrads) else contract.checked(loss_fn)
  local_grads = _make_local_grads(loss_fn, layout, options)
  trained = trainable_layout(layout, options.trainable)
  exchange_grads = _make_exchange_grads(exchange or plain(exchange_axes(trained)), trained)
  update = _make_update(tx, trained, options)

  def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    contract.check_rows(batch, row_blocks(mesh), options.num_microbatches)
    key = jax.random.fold_in(jax.random.key(options.seed), state.step)
    trees = state.params, state.model_state, batch, key, state.loss_scale
    grads, model_state, totals, codes = local_grads(*trees)
    if not (has_layout or isinstance(loss_fn, PipelineGrads)):
      contract.check_loss(loss_fn, state.params, state.model_state, batch, mesh)
    grads, exchange_state = exchange_grads(grads, state.exchange_state)

    metrics = means(totals) | {"grad_norm": optax.tree.norm(grads)}
    if schedule is not None:
      metrics["learning_rate"] = jnp.asarray(schedule(state.step), jnp.float32)
    if options.skip_bad_steps:
      metrics = nan_guard.mark_bad(metrics, totals.get(loss_scales.OVERFLOWS, 0) > 0)
    num_rows = len(jax.tree.leaves(batch)[0])
    outputs = StepOutputs(grads, model_state, exchange_state, totals, num_rows, metrics)
    part = state._replace(params=trainable_part(state.params, options.trainable))
    part = update(part, outputs)
    state = part._replace(params=merge(part.params, state.params))

    if options.observe is not None:
      metrics |= options.observe(state.opt_state)
    if options.measure_noise_scale:
      metrics |= noise_scales.metrics(state.noise)
    if options.scale_loss:
      metrics |= loss_scales.metrics(state.loss_scale)
    if options.skip_bad_steps:
      metrics = lax.with_sharding_constraint(metrics, replicated(mesh))
      metrics[nan_guard.CODES] = nan_guard.all_codes(codes, grads, mesh)
    return state, metrics

  average, trainable = options.ema_decay is not None, options.trainable
  state_sharding = state_shardings(mesh, layout, tx, average=average, trainable=trainable)
  # `nan_guard.CODES` is sharded over the devices; all other metrics are replicated.
  metric_sharding = None if options.skip_bad_steps else replicated(mesh)
  shardings, compiler = (state_sharding, metric_sharding), options.compiler_options
  jitted = jax.jit(train_step, donate_argnums=0, out_shardings=shardings, compiler_options=compiler)
  return contract.checked_step(one_at_a_time(jitted, mesh), options)


def _make_local_grads(
  loss_fn: LossFn | PipelineGrads, layout: Layout, options: StepOptions
) -> Callable[[Tree, Tree, Batch, jax.Array, Tree], tuple[Tree, Tree, Totals, Any]]:
  """Return the function that computes gradients, model state, totals and codes.

  Its arguments are params, model_state, batch, key, and the loss scale or (). Gradients are
  each device's own, [devices, ...], and totals are sums over all devices.
  Codes are int32 [devices, 3] with `skip_bad_steps` (see `nan_guard.CODES`), else ().
  """
  mesh, axes, row_axes = layout.mesh, layout.mesh.axis_names, batch_axes(layout.mesh)
  device_grads = _make_device_grads(loss_fn, layout, options)
  trained = trainable_layout(layout, options.trainable)

  @jax.named_scope("gradients")
  def local_grads(params: Tree, model_state: Tree, batch: Batch, key: jax.Array, loss_scale: Tree):
    # Arrays of one device: its part of the parameters, and batch [local rows, ...].
    before = vary(model_state, layout.token_axes)
    scale = loss_scale.scale if options.scale_loss else None
    grads, model_state, totals = device_grads(params, before, batch, key, scale)
    codes: Any = ()
    if options.skip_bad_steps:
      loss = totals["loss"]
      codes, totals = nan_guard.find_bad(grads, model_state, totals, axes)
      if scale is not None:
        totals = loss_scales.find_overflow(codes, totals, scale, loss)
      codes = codes[None]
    totals = sum_totals(totals, layout.token_axes)
    grads = placement.scale_for_exchange(grads, trained, divisor(totals))
    model_state = model_states.push(before, model_state, row_axes)
    model_state = model_states.agree(model_state, axes, together=on_cpu(mesh))
    return grads, model_state, totals, codes

  in_specs = layout.param_specs, P(), P(row_axes), P(), P()
  out_specs = specs.exchange_specs(trained), P(), P(), P(axes)
  return jax.shard_map(local_grads, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


def _make_device_grads(
  loss_fn: LossFn | PipelineGrads, layout: Layout, options: StepOptions
) -> Callable[[Tree, Tree, Batch, jax.Array, Any], tuple[Tree, Tree, Totals]]:
  """Return the function that computes one device's gradients, inside `shard_map`."""
  num_microbatches, row_axes = options.num_microbatches, batch_axes(layout.mesh)
  unroll = on_cpu(layout.mesh) if options.unroll is None else options.unroll
  observe = noise_scales.observe if options.measure_noise_scale else None

  def device_grads(params: Tree, model_state: Tree, batch: Batch, key: jax.Array, scale: Any):
    shards, full = placement.shards_and_full(params, layout, options.trainable)
    if isinstance(loss_fn, PipelineGrads):
      assert observe is None, "a pipeline has no gradients of its micro-batches"
      return loss_fn.grads(shards, full, model_state, batch, num_microbatches)

    def loss_of(shards: Tree, *rest: Any):
      return cast(LossFn, loss_fn)(placement.pair_shards(shards, full), *rest)

    arguments = shards, model_state, batch, row_keys(key, batch, row_axes)
    model_states.check_agrees(loss_of, arguments, num_microbatches, layout.token_axes)
    how: Any = {"unroll": unroll, "scale": scale}
    if (parts := getattr(loss_fn, PARTS, None)) and num_microbatches > 1:

      def outputs_of(shards: Tree, *rest: Any):
        return parts.outputs(placement.pair_shards(shards, full), *rest)

      of_shards = parts._replace(outputs=outputs_of)
      return gathered_grads(of_shards, *arguments, num_microbatches, **how)
    return sum_grads(loss_of, *arguments, num_microbatches, observe=observe, **how)

  return device_grads


def _make_exchange_grads(
  exchange: Exchange, layout: Layout
) -> Callable[[Tree, Tree], tuple[Tree, Tree]]:
  """Return (each device's gradients, exchange_state) -> (means, exchange_state)."""
  whole_exchange = make_layout_exchange(exchange, layout)
  grad_specs, state_specs = specs.exchange_specs(layout), P(layout.mesh.axis_names)
  out_specs = specs.grad_specs(layout), state_specs

  @jax.shard_map(mesh=layout.mesh, in_specs=(grad_specs, state_specs), out_specs=out_specs)
  @jax.named_scope("exchange")
  def exchange_grads(stacked: Tree, exchange_state: Tree):
    # On one device every leaf has a leading dim of 1 for its position in the mesh.
    grads, state = jax.tree.map(lambda x: x[0], (stacked, exchange_state))
    means, state = whole_exchange.exchange(grads, state)
    _check_means(grads, means, layout)
    return means, jax.tree.map(lambda x: x[None], state)

  return exchange_grads


def _check_means(grads: Any, means: Any, layout: Layout) -> None:
  """Raise if an exchange did not return the mean of each gradient to every device."""
  names = [path_name(path) for path, _ in jax.tree.leaves_with_path(grads)]
  if jax.tree.structure(grads) != jax.tree.structure(means):
    problem, fix = "returns a tree unlike the gradients", "return (means, state)"
    raise invalid("exchange", ..., problem, fix)
  split_like = jax.tree.broadcast(specs.grad_specs(layout), grads)
  leaves = map(jax.tree.leaves, (grads, means, split_like))
  for name, grad, mean, spec in zip(names, *leaves, strict=True):
    kinds = [f"{jnp.result_type(x)}{list(jnp.shape(x))}" for x in (grad, mean)]
    if kinds[0] != kinds[1]:
      problem = f"returns {kinds[1]} for the gradient {kinds[0]} of {name}"
      raise invalid("exchange", ..., problem, "return the mean of each gradient")
    split = {a for entry in spec for a in names_of(entry or ())}
    if differing := tuple(a for a in varying(mean) if a not in split):
      problem = f"leaves the gradient of {name} different along {differing}"
      raise invalid("exchange", ..., problem, "average it with jax.lax.pmean over these axes")


def _make_update(tx: optax.GradientTransformation, layout: Layout, options: StepOptions) -> Update:
  """Return the update: the optimizer's step, averages, noise scale and NaN guard."""
  dealer = make_dealer(layout)

  def optimize(state: TrainState, outputs: StepOutputs) -> TrainState:
    grads, params = placement.shard_like_optimizer((outputs.grads, state.params), layout)
    opt_state = placement.move_opt_state(state.opt_state, layout, jax.memory.Space.Device)
    with dealt_by(dealer):
      updates, opt_state = tx.update(grads, opt_state, params)
    params = placement.shard_like_params(optax.apply_updates(params, updates), layout)
    return state._replace(
      step=state.step + 1,
      params=params,
      model_state=outputs.model_state,
      opt_state=placement.move_opt_state(opt_state, layout, jax.memory.Space.Host),
      exchange_state=outputs.exchange_state,
    )

  update: Update = optimize
  if options.ema_decay is not None:
    update = with_average(update, options.ema_decay, warmup=options.ema_warmup)
  if options.measure_noise_scale:
    update = noise_scales.with_noise_scale(update)
  if options.skip_bad_steps:
    # Host memory can only be read inside a branch (`placement.move_opt_state`).
    branch = on_cpu(layout.mesh) or layout.opt_on_host
    update = nan_guard.skip_bad_steps(update, branch=branch)
  if options.scale_loss:
    update = loss_scales.with_loss_scale(update)
  return jax.named_scope("update")(update)


def with_average(update: Update, decay: float, *, warmup: bool = False) -> Update:
  """Return an update that also averages: average = decay average + (1 - decay) new.

  Parameters are averaged, and so are BatchNorm's statistics, which must fit them. Other
  model state is taken from the newest step.

  Args:
    update: the update whose results are averaged.
    decay: decay at the end of the warm-up.
    warmup: use the decay min(decay, 1 - t^(-2/3)) in step t = 1, 2, ..., as timm's
      ModelEmaV3 (1.0.31, utils/model_ema.py) with `use_warmup`. The parameters after the
      first step then replace the initial ones.
  """

  def averaged(state: TrainState, outputs: StepOutputs) -> TrainState:
    after = update(state, outputs)
    share: Any = 1 - decay
    if warmup:
      share = jnp.maximum(share, after.step.astype(jnp.float32) ** (-2 / 3))

    def mean(new: Tree, old: Tree) -> Tree:
      return optax.incremental_update(new, old, step_size=share)

    params, model_state = state.average
    params = mean(after.params, params)
    model_state = map_averaged(mean, after.model_state, model_state)
    return after._replace(average=(params, model_state))

  return averaged


def sum_totals(totals: Any, axes: tuple[str, ...]) -> Totals:
  """Sum totals over all devices, each over the axes along which it differs.

  Along `axes` devices have different examples, even if a total such as their number is
  equal on all of them. A loss that was marked as bad (`nan_guard.find_bad`) also differs
  along axes whose devices computed the same loss. It counts once.
  """
  if not isinstance(totals, dict) or "examples" not in totals:
    raise contract.without_examples(totals)
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
  batch: Any,
  keys: jax.Array,
  num_microbatches: int,
  *,
  unroll: bool,
  observe: Callable[[Any, Totals], Totals] | None = None,
  scale: jax.Array | None = None,
) -> tuple[Any, Any, Totals]:
  """Sum a device's gradients over its micro-batches (gradient accumulation).

  Args:
    loss_fn: the loss, as in `make_train_step`.
    params: parameters for which gradients are computed.
    model_state: model state before the step.
    batch: this device's rows, each array [rows, ...].
    keys: one key per row, [rows].
    num_microbatches: number of micro-batches, which divides the rows.
    unroll: unroll the loop over micro-batches.
    observe: gradients and totals of a micro-batch -> further totals.
    scale: the scale of the loss in the backward pass (`loss_scale`); None means no scaling.

  Returns:
    Sums of gradients, the model state (with means of averaged leaves), sums of totals.
  """

  grads_of = loss_scales.value_and_grad(loss_fn, scale)

  def micro_grads(micro: tuple[Batch, jax.Array]):
    (_, (new_state, totals)), grads = grads_of(params, model_state, *micro)
    more = {} if observe is None else observe(grads, totals)
    return grads, new_state, totals | more

  if num_microbatches == 1:
    return micro_grads((batch, keys))

  def add_micro(sums: Any, micro: tuple[Batch, jax.Array]):
    (grads, state, totals), (more, new_state, also) = sums, micro_grads(micro)
    grads, totals = jax.tree.map(jnp.add, (grads, totals), (more, also))
    return (grads, summed(state, new_state), totals), queues(new_state)

  # The first micro-batch gives the sums their shapes, and the scan adds the rest. All
  # micro-batches start from the step's model state, and their results are averaged, so
  # that running averages decay once per step for any number of micro-batches.
  parts = _split((batch, keys), num_microbatches)
  first = micro_grads(jax.tree.map(lambda x: x[0], parts))
  rest = jax.tree.map(lambda x: x[1:], parts)
  (grads, states, totals), queued = lax.scan(add_micro, first, rest, unroll=unroll)

  def joined(first: Queue, rest: Queue):
    return Queue(jnp.concatenate([first.rows, rest.rows.reshape(-1, *first.rows.shape[1:])]))

  states = map_queues(joined, states, queued)
  return grads, map_averaged(lambda x: x / num_microbatches, states), totals


def _split(rows: Any, num_microbatches: int) -> Any:
  """Split arrays [rows, ...] into micro-batches, [num_microbatches, rows of each, ...]."""
  return jax.tree.map(lambda x: x.reshape(num_microbatches, -1, *x.shape[1:]), rows)


def gathered_grads(
  parts: Parts,
  params: Any,
  model_state: Any,
  batch: Batch,
  keys: jax.Array,
  num_microbatches: int,
  *,
  unroll: bool,
  scale: Any = None,
) -> tuple[Any, Any, Totals]:
  """Compute a device's gradients of a gathered loss in two passes (`training.gathered`).

  The results are those of `sum_grads`. The model state comes from the second pass.

  Args:
    parts: the parts of the loss.
    params: parameters for which gradients are computed.
    model_state: model state before the step.
    batch: this device's rows.
    keys: one key per row, the same in both passes.
    num_microbatches: number of micro-batches per device.
    unroll: unroll the loops over micro-batches.
    scale: the loss scale, as in `sum_grads`.
  """

  def outputs_of(_: None, micro: tuple[Batch, jax.Array]):
    return None, parts.outputs(params, model_state, *micro)[0]

  micros = _split((batch, keys), num_microbatches)
  _, outputs = lax.scan(outputs_of, None, micros, unroll=unroll)
  outputs = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), outputs)
  totals, grads = cotangents(parts, outputs, batch)
  # Without the barrier XLA could merge the two passes, and would keep all activations.
  params, grads = lax.optimization_barrier((params, grads))
  arguments = params, model_state, (batch, grads), keys, num_microbatches
  grads, model_state, _ = sum_grads(second_pass(parts), *arguments, unroll=unroll, scale=scale)
  return grads, model_state, totals


def row_keys(key: jax.Array, batch: Batch, axes: tuple[str, ...]) -> jax.Array:
  """Return a key for each of this device's rows, by its position in the global batch.

  Args:
    key: key of the step, the same on all devices.
    batch: this device's rows.
    axes: mesh axes that split the batch; called inside `shard_map` over them.
  """
  rows = len(jax.tree.leaves(batch)[0])
  positions = lax.axis_index(axes) * rows + jnp.arange(rows)
  return jax.vmap(lambda position: jax.random.fold_in(key, position))(positions)


def make_eval_step(
  eval_fn: EvalFn,
  mesh: Mesh,
  layout: Layout | None = None,
  compiler_options: dict[str, Any] | None = None,
) -> EvalStep:
  """Return a jitted `eval_step(params, model_state, batch) -> totals`.

  Totals are sums over the global batch, as arrays on the devices. Rows whose mask is
  False are padding and do not count. Arrays [rows, ...] of gathered metrics have the rows
  of all devices and processes.

  Args:
    eval_fn: (params, model_state, batch) -> totals over the rows of the batch.
    mesh: the mesh; all its axes except `stage` and `model` split the batch.
    layout: the layout of the parameters; None means that everything is replicated.
    compiler_options: options of XLA's compiler by name, as for `jax.jit`; None means none.
  """
  layout = layout or specs.replicated_layout(mesh)
  in_specs = layout.param_specs, P(), P(batch_axes(mesh))
  out_specs, axes = (P(), P(), P(batch_axes(mesh))), layout.token_axes

  def sums_and_rows(params: Tree, model_state: Tree, batch: Batch):
    totals: Any = eval_fn(params, model_state, batch)
    more = totals if isinstance(totals, dict) else {}  # `sum_totals` refuses others
    sums, rows = more.pop(SUMS, {}), more.pop(ROWS, {})
    return sum_totals(totals, axes), lax.psum(vary(sums, axes), axes), vary(rows, axes)

  def local_totals(params: Tree, model_state: Tree, batch: Batch):
    mapped = jax.shard_map(sums_and_rows, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    totals, sums, rows = mapped(params, model_state, batch)
    return totals | {SUMS: sums, ROWS: rows} if rows else totals

  # Replicated: XLA gathers the rows, and every process reads all of them.
  options: Any = {"out_shardings": replicated(mesh), "compiler_options": compiler_options}
  return one_at_a_time(jax.jit(local_totals, **options), mesh)


def divisor(totals: Totals, name: str = "loss") -> jax.Array:
  """Return the number of examples or the sum of weights that divides a total, float32 [].

  If all weights are 0, their sum is replaced by 1: loss and gradients are then 0, not NaN.
  """
  count = totals["examples"]
  count = totals.get(LOSS_WEIGHT, count) if name == "loss" else count
  if jnp.issubdtype(count.dtype, jnp.floating):
    count = jnp.where(count == 0, jnp.ones_like(count), count)
  return count.astype(jnp.float32)


def means(totals: Totals) -> Metrics:
  """Divide each total by the number of examples or the sum of weights, in float32.

  Names that begin with "_" are internal and are left out.
  """
  return {
    name: jnp.asarray(total, jnp.float32) / divisor(totals, name)
    for name, total in totals.items()
    if name != "examples" and not name.startswith("_")
  }
