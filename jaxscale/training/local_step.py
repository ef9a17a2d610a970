"""Train step for local updates: each worker trains alone for H steps at a time.

The state is a `TrainState` with the usual shardings:

    params, model_state   the anchor from which all workers started, replicated;
                          evaluation uses it
    opt_state             state of the outer optimizer, replicated
    exchange_state        `WorkerState` with a leading dim of one entry per device,
                          sharded over the devices

Checkpoints and evaluation therefore work as in synchronous training. Each device holds
its worker's parameters in full, and the inner optimizer runs on them inside
`jax.shard_map`, so that norms (as in LARS) are correct. Every H steps, in a `lax.cond` on
the step number, workers synchronize: the exchange averages their pseudo-gradients
(anchor - parameters), and the outer optimizer moves the anchor, from which all workers
start again; with elastic averaging they only move towards it. The equations are in
`jaxscale.exchange.local_updates`. In all other steps only metrics cross the network.

The condition is part of the compiled step, so the loop, resuming and the order of the
data do not change. On CPU and TPU a step without synchronization costs nothing extra. On
GPU the branch that does nothing copies its operands: six sets of parameters per step with
block momentum (seen in programs compiled ahead of time, jax 0.10.2).

If fragments are streamed, each has its own state of the outer optimizer and of the exchange, in
tuples. All else is a function of the step number, so a checkpoint at any step is complete.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxscale.collectives import vary
from jaxscale.collectives.cpu_workarounds import one_at_a_time
from jaxscale.errors import ConfigError, invalid
from jaxscale.exchange import Exchange, fragments
from jaxscale.exchange.local_updates import LocalUpdate, reset_momentum
from jaxscale.mesh import on_cpu, replicated
from jaxscale.parallel.trainable import merge, trainable_part
from jaxscale.training import nan_guard, rounds
from jaxscale.training.contract import check_loss, checked, checked_step
from jaxscale.training.gathered import PARTS
from jaxscale.training.model_state import agree, check_agrees, queues
from jaxscale.training.state import state_shardings
from jaxscale.training.step import divisor, means, row_keys, sum_grads
from jaxscale.training.types import (
  LOSS_WEIGHT,
  Batch,
  LossFn,
  Metrics,
  StepOptions,
  Totals,
  TrainState,
  TrainStep,
  Tree,
  WorkerState,
)

Axes = tuple[str, ...]
# Parameters, model state and the outer optimizer's state, the same on all devices.
Anchor = tuple[Tree, Tree, Tree]
WorkerUpdate = Callable[
  [WorkerState, Tree, Batch, jax.Array, jax.Array], tuple[WorkerState, Totals, Metrics, Any]
]
Synchronize = Callable[[Anchor, WorkerState, Tree], tuple[Anchor, WorkerState, jax.Array]]
MakeSynchronize = Callable[..., Synchronize]  # of the number of a fragment
IsActive = Callable[[jax.Array], jax.Array]  # step -> whether the worker takes it
# (anchor, worker, further arguments of the worker's update) -> (anchor, the update's results,
# code of the synchronization)
TakeStep = Callable[[Anchor, WorkerState, Any], tuple[Anchor, Any, jax.Array]]


def make_local_train_step(
  loss_fn: LossFn,
  tx: optax.GradientTransformation,
  mesh: Mesh,
  exchange: Exchange,
  method: LocalUpdate,
  *,
  schedule: optax.Schedule | None = None,
  workers: Axes | None = None,
  last_step: int | None = None,
  options: StepOptions = StepOptions(),
) -> TrainStep:
  """Return a jitted `train_step(state, batch) -> (state, metrics)`.

  The state comes from `init_state(..., local=method)` and is donated. Metrics are
  means over the global batch, where each worker uses its own parameters; `grad_norm` is
  the mean of the workers' gradient norms.

  Args:
    loss_fn: the loss, as in `make_train_step`.
    tx: the inner optimizer; each worker applies it to its own mean gradients.
    mesh: the mesh, whose axes all split the batch.
    exchange: the exchange of the pseudo-gradients W - w_k; `plain` is exact.
    method: the schedule of synchronizations and the outer optimizer.
    schedule: step -> learning rate, the same as in `tx`; reported in the metrics.
    workers: mesh axes along which workers differ. Devices along the other axes form one
      worker and average their gradients in every step. None means all axes, so that each
      device is a worker.
    last_step: last step of the run, after which workers also synchronize, so that no
      training is lost if H does not divide the number of steps; None means no extra
      synchronization.
    options: options as in `make_train_step`, without averages, noise scale and loss
      scale. `observe` gets the state of the inner optimizer; its metrics are averaged over
      the workers. With `skip_bad_steps` a worker whose loss, gradient or model state has NaN or Inf
      skips the step: its state keeps its values except for step counts, so that it is
      good when workers synchronize. If the averaged pseudo-gradient has NaN or Inf, the
      synchronization is skipped: all workers continue from their own parameters.

  Raises:
    ConfigError: `workers` has an axis that the mesh lacks, or an option does not work
      with local updates. The first call raises it for a model with a state, such as BatchNorm's,
      whose parameters are streamed in fragments.

  Example:
    >>> step = make_local_train_step(                             # doctest: +SKIP
    ...   loss_fn, tx, mesh, plain(AXES), diloco(every=50))
    >>> state, metrics = step(state, batch)                       # doctest: +SKIP
  """
  axes = mesh.axis_names
  if unknown := [axis for axis in workers or () if axis not in axes]:
    raise ConfigError(f"workers={workers}: the mesh has no axis {unknown[0]!r}; use axes of {axes}")
  if options.ema_decay is not None or options.measure_noise_scale or options.scale_loss:
    fix = "unset ema_decay, measure_noise_scale and scale_loss"
    raise invalid("options", ..., "need synchronous training", fix)
  within = () if workers is None else tuple(a for a in axes if a not in workers)
  loss_fn = checked(loss_fn)
  is_active = functools.partial(_is_active, method, workers or axes)
  update = _make_worker_update(loss_fn, tx, mesh, within, options)
  if method.worker_steps:
    update = _some_steps(update, is_active, axes)
  synchronize = functools.partial(_make_synchronize, exchange, method, options.skip_bad_steps)
  report = _make_report(method, last_step, axes, is_active, options.skip_bad_steps)
  make = _make_streamed if method.is_streamed else _make_whole
  take_step = make(update, synchronize, method, last_step)

  def device_step(
    anchor: Anchor, stacked: WorkerState, batch: Batch, key: jax.Array, step: jax.Array
  ):
    # Arrays of one device: the anchor in full, the worker's state with a leading dim of 1.
    before, paced = jax.tree.map(lambda x: x[0], stacked), ()
    if method.worker_steps:  # The exchange's state is paired with a `rounds.Round`.
      paced, exchange_state = before.exchange_state
      before = before._replace(exchange_state=exchange_state)
    part = trainable_part(anchor[0], options.trainable), *anchor[1:]
    inputs = vary(anchor[0], axes), batch, key, step
    part, (worker, *outputs), code = take_step(part, before, inputs)
    metrics, worker, codes = report(paced, worker, outputs, code, step)
    if schedule is not None:
      metrics["learning_rate"] = jnp.asarray(schedule(step), jnp.float32)
    worker = jax.tree.map(lambda x: x[None], worker)
    return (merge(part[0], anchor[0]), *part[1:]), worker, metrics, codes

  in_specs = P(), P(axes), P(axes), P(), P()
  out_specs = P(), P(axes), P(), P(axes)
  mapped = jax.shard_map(device_step, mesh=mesh, in_specs=in_specs, out_specs=out_specs)

  def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    key = jax.random.fold_in(jax.random.key(options.seed), state.step)
    anchor = state.params, state.model_state, state.opt_state
    anchor, workers, metrics, codes = mapped(anchor, state.exchange_state, batch, key, state.step)
    check_loss(loss_fn, state.params, state.model_state, batch, mesh)
    if options.skip_bad_steps:
      metrics[nan_guard.CODES] = codes
    return TrainState(state.step + 1, *anchor, workers, ()), metrics

  # Metrics are replicated, but the codes of a skipped step are one per device.
  shardings = (state_shardings(mesh), None if options.skip_bad_steps else replicated(mesh))
  compiler = options.compiler_options
  jitted = jax.jit(train_step, donate_argnums=0, out_shardings=shardings, compiler_options=compiler)
  return checked_step(one_at_a_time(jitted, mesh), options)


def _make_report(
  method: LocalUpdate, last_step: int | None, axes: Axes, is_active: IsActive, is_guarded: bool
) -> Callable[..., tuple[Metrics, WorkerState, Any]]:
  """Return the function that averages a step's metrics, or with `worker_steps` a round's."""

  def report(paced: Any, worker: WorkerState, outputs: Any, code: jax.Array, step: jax.Array):
    totals, metrics, codes = outputs
    if not method.worker_steps:
      totals, metrics = lax.psum(totals, axes), lax.pmean(metrics, axes)
      metrics = means(totals) | metrics
    else:
      if others := set(metrics) - {"grad_norm"}:
        problem = f"reports {min(others)} of each step, and worker_steps only means of rounds"
        raise invalid("options.observe", ..., problem, "do not observe, or unset worker_steps")
      paced = rounds.count(paced, totals, metrics["grad_norm"], is_active(step), codes)
      due = method.fragment_due(step + int(method.delay == 0)) > 0
      due |= (step == 0) | (step + 1 == (last_step or 0))
      codes = paced.codes
      paced, metrics = rounds.report(paced, due, axes)
      worker = worker._replace(exchange_state=(paced, worker.exchange_state))
    metrics["loss"] = jnp.where(code < 0, metrics["loss"], jnp.nan)
    if is_guarded:
      codes = jnp.append(codes, vary(code, axes))[None]
    return metrics, worker, codes if is_guarded else ()

  return report


def _make_worker_update(
  loss_fn: LossFn, tx: optax.GradientTransformation, mesh: Mesh, within: Axes, options: StepOptions
) -> WorkerUpdate:
  """Return a worker's inner step on one device.

  Returns:
    (worker, parameters of the anchor, batch, key, step) -> (worker, totals, further metrics of
    the worker, codes). Frozen parameters are those of the anchor. With `skip_bad_steps` the
    codes are int32 [3] and report what the device found, else ().
  """
  axes, is_cpu, num_microbatches = mesh.axis_names, on_cpu(mesh), options.num_microbatches

  def mean_grads(worker: WorkerState, anchor: Tree, batch: Batch, key: jax.Array):
    def loss_of(part: Tree, *rest: Any):
      return loss_fn(merge(part, anchor), *rest)

    arguments = worker.params, worker.model_state, batch, row_keys(key, batch, axes)
    if queues(worker.model_state) or hasattr(loss_fn, PARTS):
      problem = "gathers rows of all devices, whose parameters differ with local updates"
      raise invalid("loss_fn", ..., problem, "train synchronously")
    check_agrees(loss_of, arguments, num_microbatches, axes)
    with jax.named_scope("gradients"):
      grads, model_state, totals = sum_grads(loss_of, *arguments, num_microbatches, unroll=is_cpu)
    codes: Any = ()
    if options.skip_bad_steps:
      codes, totals = nan_guard.find_bad(grads, model_state, totals, axes)
    counts = {n: x for n, x in totals.items() if n in ("examples", LOSS_WEIGHT)}
    if within:
      # The values are equal within the worker, but must be typed as varying.
      sums = lax.psum((grads, counts), within), agree(model_state, within, together=is_cpu)
      (grads, counts), model_state = vary(sums, within)
    scale = 1 / divisor(counts)
    grads = jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
    return grads, model_state, totals, codes

  def update(worker: WorkerState, anchor: Tree, batch: Batch, key: jax.Array, step: jax.Array):
    del step
    grads, model_state, totals, codes = mean_grads(worker, anchor, batch, key)
    norm = optax.tree.norm(grads)

    @jax.named_scope("update")
    def move() -> WorkerState:
      updates, opt_state = tx.update(grads, worker.opt_state, worker.params)
      params = optax.apply_updates(worker.params, updates)
      return WorkerState(params, model_state, opt_state, worker.exchange_state)

    if not options.skip_bad_steps:
      after = move()
    else:
      loss = totals["loss"]
      if within:  # NaN on one device makes its whole worker skip the step
        loss = vary(lax.psum(loss, within), within)
      is_good = jnp.isfinite(loss) & jnp.isfinite(norm)
      totals["loss"] = jnp.where(is_good, totals["loss"], jnp.nan)
      skipped = worker._replace(opt_state=nan_guard.count_steps(worker.opt_state))
      after = nan_guard.if_good(is_good, move, lambda: skipped, branch=is_cpu)
    metrics = {"grad_norm": norm}
    if options.observe is not None:
      metrics |= options.observe(after.opt_state)
    return after, totals, metrics, codes

  return update


def _is_active(method: LocalUpdate, workers: Axes, step: jax.Array) -> jax.Array:
  """Return whether this device's worker takes a step with `worker_steps`, bool []."""
  steps = jnp.asarray(method.worker_steps, jnp.int32)[lax.axis_index(workers)]
  return step % method.every < steps


def _some_steps(update: WorkerUpdate, is_active: IsActive, axes: Axes) -> WorkerUpdate:
  """Return an inner step that each worker takes only in its first steps of a round.

  A round is the steps between two synchronizations; `method.worker_steps` has the number of
  each worker. In the other steps of a round a worker computes nothing: its state keeps its
  values except for step counts, and its totals and metrics are 0.
  """

  def some(worker: WorkerState, *arguments: Any):
    *_, step = arguments
    _, *shapes = jax.eval_shape(update, worker, *arguments)
    totals, metrics, codes = vary(jax.tree.map(jnp.zeros_like, shapes), axes)

    def idle(worker: WorkerState, *_: Any):
      kept = worker._replace(opt_state=nan_guard.count_steps(worker.opt_state))
      return kept, totals, metrics, jax.tree.map(lambda x: x - 1, codes)  # nothing was bad

    return lax.cond(is_active(step), update, idle, worker, *arguments)

  return some


def _make_whole(
  update: WorkerUpdate, synchronize: MakeSynchronize, method: LocalUpdate, last_step: int | None
) -> TakeStep:
  """Return the step of a worker, after which all parameters may be exchanged."""
  outer = synchronize(0)

  def take_step(anchor: Anchor, before: WorkerState, inputs: Any):
    *_, step = inputs
    worker, *outputs = update(before, *inputs)
    is_due = ((step + 1) % method.every == 0) | (step + 1 == (last_step or 0))
    sent = worker.params if method.elastic is None else before.params
    anchor, worker, code = lax.cond(is_due, outer, _stay, anchor, worker, sent)
    return anchor, (worker, *outputs), code

  return take_step


def _make_streamed(
  update: WorkerUpdate, synchronize: MakeSynchronize, method: LocalUpdate, last_step: int | None
) -> TakeStep:
  """Return the step of a worker, beside or after which a fragment may be exchanged.

  With a delay the exchange is in one branch with the step, and takes the parameters from before
  it, so that a compiler can run both at once. The program therefore has a copy of the step for
  each fragment. After the last step of a run all fragments are exchanged, except those that
  were just sent and those whose result has not been taken over yet (`LocalUpdate.arrived`).
  """
  count, numbers = method.fragments, range(method.fragments)

  def beside(send: Synchronize, anchor: Anchor, before: WorkerState, inputs: Any):
    anchor, before, code = send(anchor, before, before.params)
    return anchor, update(before, *inputs), code

  def take_over(number: int, anchor: Tree, params: Tree):
    own, start = (fragments.pick(tree, number, count) for tree in (params, anchor))
    start = vary(start, jax.sharding.get_abstract_mesh().axis_names)
    mixed = optax.incremental_update(start, own, step_size=1 - method.mixing)
    return fragments.put(params, number, count, mixed)

  def after_all(anchor: Anchor, worker: WorkerState, sent: Tree):
    *_, code = _stay(anchor, worker, sent)
    for number in numbers if last_step is None else method.arrived(last_step):
      anchor, worker, bad = synchronize(number)(anchor, worker, worker.params)
      code = jnp.maximum(code, bad)
    return anchor, worker, code

  def take_step(anchor: Anchor, before: WorkerState, inputs: Any):
    *_, step = inputs
    if jax.tree.leaves(before.model_state):
      problem = "streams fragments, which does not average a model state such as BatchNorm's"
      raise invalid("sync", ..., problem, "use one fragment without a delay, or another model")
    if method.delay:
      sends = _stay, *(synchronize(n, takes_over=False) for n in numbers)
      branches, due = [functools.partial(beside, x) for x in sends], method.fragment_due(step)
      anchor, (worker, *outputs), code = lax.switch(due, branches, anchor, before, inputs)
      due = method.fragment_due(step + 1 - method.delay)
      takes = (functools.partial(take_over, n) for n in numbers)
      params = lax.switch(due, [lambda _, own: own, *takes], anchor[0], worker.params)
      worker = worker._replace(params=params)
    else:
      (worker, *outputs), due = update(before, *inputs), method.fragment_due(step + 1)
      branches = [_stay, *map(synchronize, numbers)]
      anchor, worker, code = lax.switch(due, branches, anchor, worker, worker.params)
    if last_step is not None:
      last = anchor, worker, worker.params
      anchor, worker, bad = lax.cond(step + 1 == last_step, after_all, _stay, *last)
      code = jnp.maximum(code, bad)
    return anchor, (worker, *outputs), code

  return take_step


def _make_synchronize(
  exchange: Exchange, method: LocalUpdate, is_guarded: bool, number: int, *, takes_over: bool = True
) -> Synchronize:
  """Return the outer step of a fragment: (anchor, worker, sent) -> (anchor, worker, code).

  With `takes_over` the worker starts again from the anchor. `sent` are the worker's parameters
  in its pseudo-gradient: those after the step, or with elastic averaging those before it. The
  code is `nan_guard.first_bad` of the averaged pseudo-gradient, int32 [], or -1 if `is_guarded`
  is False.
  """
  count = method.fragments

  @jax.named_scope("exchange")
  def synchronize(anchor: Anchor, worker: WorkerState, sent: Tree):
    whole, model_state, outer_states = anchor
    axes = jax.sharding.get_abstract_mesh().axis_names
    params = fragments.pick(whole, number, count)
    sent = fragments.pick(sent, number, count)
    pseudo_grads = jax.tree.map(jnp.subtract, vary(params, axes), sent)
    own = worker.exchange_state, outer_states
    exchange_state, outer_state = (x if count == 1 else x[number] for x in own)
    mean, exchange_state = exchange.exchange(pseudo_grads, exchange_state)
    updates, outer_state = method.outer.update(mean, outer_state, params)
    params = optax.apply_updates(params, updates)
    after = worker._replace(exchange_state=_with(own[0], number, count, exchange_state))
    if takes_over:
      start = vary(params, axes)
      if method.elastic is not None:
        start = optax.apply_updates(worker.params, optax.tree.scale(method.elastic, pseudo_grads))
      model_state = agree(worker.model_state, axes, apart=True, together=True)
      opt_state = reset_momentum(worker.opt_state) if method.reset_momentum else worker.opt_state
      start = fragments.put(worker.params, number, count, start)
      after = WorkerState(start, vary(model_state, axes), opt_state, after.exchange_state)
    whole = fragments.put(whole, number, count, params)
    after = (whole, model_state, _with(own[1], number, count, outer_state)), after
    if not is_guarded:
      return *after, jnp.full((), -1, jnp.int32)
    # Lossy exchanges may drop a NaN, so each device also checks its own pseudo-gradient.
    code = lax.pmax(nan_guard.first_bad(pseudo_grads), axes)
    code = jnp.maximum(nan_guard.first_bad(mean), code)
    return *nan_guard.keep(code < 0, after, (anchor, worker)), code

  return synchronize


def _with(states: Any, number: int, count: int, state: Any) -> Any:
  """Return the fragments' states with one replaced."""
  return state if count == 1 else (*states[:number], state, *states[number + 1 :])


def _stay(anchor: Anchor, worker: WorkerState, sent: Tree) -> tuple[Anchor, WorkerState, jax.Array]:
  """Return anchor and worker unchanged: the branch between synchronizations."""
  del sent
  return anchor, worker, jnp.full((), -1, jnp.int32)
