"""The train step of local updates: every worker trains alone, H steps at a time.

The state is a `TrainState`, sharded as usual, of which

    params, model_state   the anchor: what all workers started from, replicated;
                          this is what is evaluated
    opt_state             of the outer optimizer, replicated
    exchange_state        `WorkerState` with a leading dim of one entry per device,
                          sharded over them

so checkpoints and evaluation need nothing new. A device's own parameters are
whole, and its optimizer runs inside `jax.shard_map` on them: norms, as of LARS, are
right there. Every H steps, in a `lax.cond` on the step's number, workers synchronize:
the exchange averages their pseudo-gradients, anchor - parameters, and the outer
optimizer moves the anchor; `jaxscale.exchange.local` has the equations. In all other
steps nothing crosses the network but the metrics, and those need not.

The condition is inside the one compiled step, so the loop, resuming and the order
of the data stay as they are. While it is not taken it costs nothing on CPU and TPU;
in programs for GPU the branch that does nothing copies its operands, six sets
of parameters per step with block momentum (read from ahead-of-time compiled
programs, jax 0.10.2).
"""

from __future__ import annotations

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
from jaxscale.errors import ConfigError
from jaxscale.exchange import Exchange
from jaxscale.exchange.local import LocalUpdate, reset_momentum
from jaxscale.mesh import on_cpu, replicated
from jaxscale.training import nan_guard
from jaxscale.training import step as steps
from jaxscale.training.contract import check_sums, checked, warn_unchecked
from jaxscale.training.losses import IS_SUM
from jaxscale.training.model_state import agree, check_agrees
from jaxscale.training.state import TrainState, WorkerState, state_shardings


def make_local_train_step(
  loss_fn: steps.LossFn,
  tx: optax.GradientTransformation,
  mesh: Mesh,
  exchange: Exchange,
  method: LocalUpdate,
  *,
  workers: tuple[str, ...] | None = None,
  last_step: int | None = None,
  accumulate_steps: int = 1,
  observe: Callable[[Any], steps.Metrics] | None = None,
  reduce_metrics: bool = True,
  skip_bad_steps: bool = False,
  seed: int = 0,
) -> steps.TrainStep:
  """Compile-ready `train_step(state, batch) -> (state, metrics)`.

  The state is that of `init_state(..., local=method)` and is donated. Metrics are
  means over the global batch, each worker's at its own parameters; `grad_norm` is the
  mean of the workers' norms, `learning_rate` of the rates that they applied.

  Args:
    loss_fn: as of `make_train_step`.
    tx: the workers' own optimizer, on their own mean gradients.
    mesh: every axis of it splits the batch.
    exchange: of the pseudo-gradients W - w_k; `plain` is exact.
    method: when workers synchronize and how.
    workers: mesh axes that tell workers apart; the devices along the others are one
      worker, and average their gradients in every step. None: all axes, so that
      each device is a worker.
    last_step: workers synchronize after it too, so that a run whose number of steps H
      does not divide ends with all that was learned; None: they do not.
    accumulate_steps: as of `make_train_step`.
    observe: inner opt_state -> further metrics, averaged over the workers.
    reduce_metrics: False: metrics are [devices], each a device's own, and nothing
      crosses the network between synchronizations; whoever reads them averages.
    skip_bad_steps: a worker whose loss, gradient or model state is NaN or Inf skips
      the step: its state stays as it was, but for counts of steps, and is good when
      workers synchronize. Where the averaged pseudo-gradient is bad nobody moves: all
      continue from their own parameters. Metrics as of `make_train_step`; the loss
      of such steps is NaN.
    seed: of `loss_fn`'s keys.

  Raises:
    ConfigError: `workers` names an axis that the mesh does not have.

  Example:
    >>> step = make_local_train_step(                             # doctest: +SKIP
    ...   loss_fn, tx, mesh, plain(AXES), diloco(every=50))
    >>> state, metrics = step(state, batch)                       # doctest: +SKIP
  """
  axes = mesh.axis_names
  if unknown := [axis for axis in workers or () if axis not in axes]:
    raise ConfigError(f"workers={workers}: the mesh has {axes}, not {unknown[0]!r}")
  within = () if workers is None else tuple(a for a in axes if a not in workers)
  is_sum = getattr(loss_fn, IS_SUM, False)
  loss_fn = checked(loss_fn)
  options = within, accumulate_steps, skip_bad_steps
  update = _make_worker_update(loss_fn, tx, mesh, *options)
  synchronize = _make_synchronize(exchange, method, axes, skip_bad_steps)

  def train_apart(anchor, worker):
    return anchor, worker, jnp.full((), -1, jnp.int32)

  def device_step(anchor, worker, batch, key, step):
    # One device: the anchor whole, its own state with a leading dim of 1.
    worker = jax.tree.map(lambda x: x[0], worker)
    worker, totals, grad_norm, codes = update(worker, batch, key)
    observed = {"grad_norm": grad_norm} | steps.observed(worker.opt_state, observe)
    is_due = ((step + 1) % method.every == 0) | (step + 1 == (last_step or 0))
    anchor, worker, code = lax.cond(is_due, synchronize, train_apart, anchor, worker)
    if skip_bad_steps:
      totals["loss"] = jnp.where(code < 0, totals["loss"], jnp.nan)
      codes = jnp.append(codes, vary(code, axes))[None]
    if reduce_metrics:
      totals, observed = lax.psum(totals, axes), lax.pmean(observed, axes)
    metrics = steps.means(totals) | observed
    if not reduce_metrics:
      metrics = jax.tree.map(lambda x: x[None], metrics)
    return anchor, jax.tree.map(lambda x: x[None], worker), metrics, codes

  in_specs = P(), P(axes), P(axes), P(), P()
  out_specs = P(), P(axes), P() if reduce_metrics else P(axes), P(axes)
  mapped = jax.shard_map(device_step, mesh=mesh, in_specs=in_specs, out_specs=out_specs)

  def train_step(state: TrainState, batch: steps.Batch):
    key = jax.random.fold_in(jax.random.key(seed), state.step)
    anchor = state.params, state.model_state, state.opt_state
    given = anchor, state.exchange_state, batch, key, state.step
    (params, model_state, opt_state), workers, metrics, codes = mapped(*given)
    if not is_sum:
      tried = loss_fn, state.params, state.model_state, batch, mesh
      warn_unchecked(check_sums(*tried))
    if skip_bad_steps:
      metrics[nan_guard.CODES] = codes
    new = TrainState(state.step + 1, params, model_state, opt_state, workers, ())
    return new, metrics

  # Metrics are sharded as they come: replicated, or one per device.
  alike = reduce_metrics and not skip_bad_steps
  shardings = (state_shardings(mesh), replicated(mesh) if alike else None)
  jitted = jax.jit(train_step, donate_argnums=0, out_shardings=shardings)
  return one_at_a_time(jitted, mesh)


def _make_worker_update(loss_fn, tx, mesh, within, micros, is_guarded):
  """A worker's own step on one device.

  Returns:
    (worker, batch, key) -> (worker, totals, norm of its gradient, codes of what the
    device found, () without `is_guarded`).
  """
  axes, is_cpu = mesh.axis_names, on_cpu(mesh)

  def update(worker: WorkerState, batch, key):
    keys = steps.row_keys(key, batch, axes)
    arguments = worker.params, worker.model_state, batch, keys
    check_agrees(lambda *args: loss_fn(*args)[1][0], arguments, micros, axes)
    sum_grads = jax.named_scope("gradients")(steps.sum_grads)
    grads, model_state, totals = sum_grads(
      loss_fn, worker.params, worker.model_state, batch, keys, micros, unroll=is_cpu
    )
    codes: Any = ()
    if is_guarded:
      codes, totals = nan_guard.find_bad(grads, model_state, totals, axes)
    examples = totals["examples"]
    if within:
      # The same within the worker, and typed as each device's own all the same.
      sums = lax.psum((grads, examples), within), agree(model_state, within)
      (grads, examples), model_state = vary(sums, within)
    scale = 1 / examples.astype(jnp.float32)
    grads = jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
    norm = optax.tree.norm(grads)

    @jax.named_scope("update")
    def move():
      updates, opt_state = tx.update(grads, worker.opt_state, worker.params)
      params = optax.apply_updates(worker.params, updates)
      return WorkerState(params, model_state, opt_state, worker.exchange_state)

    if not is_guarded:
      return move(), totals, norm, codes
    loss = totals["loss"]
    if within:  # NaN on one device: the whole worker skips the step
      loss = vary(lax.psum(loss, within), within)
    is_good = jnp.isfinite(loss) & jnp.isfinite(norm)
    totals["loss"] = jnp.where(is_good, totals["loss"], jnp.nan)
    skipped = worker._replace(opt_state=nan_guard.count_steps(worker.opt_state))
    worker = nan_guard.if_good(is_good, move, lambda: skipped, branch=is_cpu)
    return worker, totals, norm, codes

  return update


def _make_synchronize(exchange: Exchange, method: LocalUpdate, axes, is_guarded: bool):
  """The outer step on one device: (anchor, worker) -> (anchor, worker, code).

  An anchor is params, model state and the outer optimizer's state. The code is
  `nan_guard.first_bad` of the averaged pseudo-gradient, -1 without `is_guarded`.
  """

  @jax.named_scope("exchange")
  def synchronize(anchor: tuple[Any, Any, Any], worker: WorkerState):
    params, _, outer_state = anchor
    pseudo_grads = jax.tree.map(jnp.subtract, vary(params, axes), worker.params)
    mean, exchange_state = exchange.exchange(pseudo_grads, worker.exchange_state)
    updates, outer_state = method.outer.update(mean, outer_state, params)
    params = optax.apply_updates(params, updates)
    model_state = agree(worker.model_state, axes, apart=True)
    opt_state = worker.opt_state
    if method.reset_momentum:
      opt_state = reset_momentum(opt_state)
    start, own_model_state = vary((params, model_state), axes)
    worker_after = WorkerState(start, own_model_state, opt_state, exchange_state)
    after = (params, model_state, outer_state), worker_after
    if not is_guarded:
      return *after, jnp.full((), -1, jnp.int32)
    # Not every exchange hands NaN on: each device reports its own pseudo-gradient.
    code = lax.pmax(nan_guard.first_bad(pseudo_grads), axes)
    code = jnp.maximum(nan_guard.first_bad(mean), code)
    return *nan_guard.keep(code < 0, after, (anchor, worker)), code

  return synchronize
