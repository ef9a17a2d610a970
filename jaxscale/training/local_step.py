"""The train step of local updates: every worker trains alone, H steps at a time.

The state is a `TrainState`, laid out as ever, of which

    params, model_state   the anchor: what all workers started from, replicated;
                          this is what is evaluated
    opt_state             of the outer optimizer, replicated
    exchange_state        `Own`, a leading dim of one entry a device, sharded over
                          them: the device's own parameters, model state, inner
                          optimizer state and exchange state

so checkpoints and evaluation need nothing new. A device's own parameters are
whole, and its optimizer runs inside `jax.shard_map` on them: norms, as of LARS, are
right there. Every H steps, in a `lax.cond` on the step's number, the mean way from
the anchor crosses the network by the exchange and the outer optimizer moves the
anchor; `jaxscale.exchange.local` has the equations. Between, nothing crosses it
but the metrics, and those need not.

The condition is inside the one compiled step, so the loop, resuming and the order
of the data stay as they are. While it is not taken it costs nothing on CPU and TPU;
in programs for GPU the branch that does nothing copies what it hands on, six sets
of parameters a step with block momentum (read from ahead-of-time compiled
programs, jax 0.10.2). Who would rather decide on the host gives a `method.every`
that never comes and calls `make_agree`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

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
from jaxscale.mesh import replicated
from jaxscale.training import nan_guard
from jaxscale.training.state import TrainState, abstract_on, state_shardings, with_given
from jaxscale.training.step import (
  Batch,
  LossFn,
  TrainStep,
  means,
  row_keys,
  sum_grads,
  unrolls,
)


class Own(NamedTuple):
  """What a device keeps for itself; in the state with a leading dim of devices.

  Attributes:
    params: w_k, float32; the same on all devices of a worker.
    model_state: likewise.
    opt_state: of the inner optimizer.
    exchange_state: of the exchange of ways.
  """

  params: Any
  model_state: Any
  opt_state: Any
  exchange_state: Any


def init_local_state(
  init_fn: Callable[[jax.Array], tuple[Any, Any]],
  tx: optax.GradientTransformation,
  mesh: Mesh,
  exchange: Exchange,
  method: LocalUpdate,
  *,
  seed: int = 0,
  given: Mapping[str, jax.Array] | None = None,
) -> TrainState:
  """The state before the first step: all workers at the anchor.

  Args:
    init_fn: key -> (params, model_state).
    tx: the workers' own optimizer.
    mesh: where the state lives.
    exchange: of the ways, for its state.
    method: for the state of its outer optimizer.
    seed: of the parameters.
    given: what is not to be initialised; see `state.with_given`.

  Raises:
    ConfigError: `method` resets a momentum that `tx` does not have.
  """
  init = _initialiser(init_fn, tx, mesh, exchange, method)
  key = jax.random.key(seed)
  return jax.jit(init, out_shardings=state_shardings(mesh))(key, given or {})


def abstract_local_state(
  init_fn: Callable[[jax.Array], tuple[Any, Any]],
  tx: optax.GradientTransformation,
  mesh: Mesh,
  exchange: Exchange,
  method: LocalUpdate,
) -> TrainState:
  """Shapes, dtypes and shardings of `init_local_state`, without computing it."""
  init = _initialiser(init_fn, tx, mesh, exchange, method)
  return abstract_on(state_shardings(mesh), init)


def _initialiser(init_fn, tx, mesh, exchange, method):
  """The function of a key that makes a state."""

  def init(key, given):
    params, model_state = with_given(init_fn(key), given)
    inner = tx.init(params)
    if method.reset_momentum:
      reset_momentum(inner)  # to refuse now what it would refuse in the step
    own = Own(params, model_state, inner, exchange.init(params))
    stacked = jax.tree.map(lambda x: jnp.stack([x] * mesh.size), own)
    step = jnp.zeros((), jnp.int32)
    outer = method.outer.init(params)
    return TrainState(step, params, model_state, outer, stacked, ())

  return init


def make_local_train_step(
  loss_fn: LossFn,
  tx: optax.GradientTransformation,
  mesh: Mesh,
  exchange: Exchange,
  method: LocalUpdate,
  *,
  workers: tuple[str, ...] | None = None,
  last_step: int | None = None,
  accumulate_steps: int = 1,
  unroll: bool | None = None,
  schedule: optax.Schedule | None = None,
  observe: Callable[[Any], dict[str, jax.Array]] | None = None,
  reduce_metrics: bool = True,
  refuse: bool = False,
  seed: int = 0,
) -> TrainStep:
  """Compile-ready `train_step(state, batch) -> (state, metrics)`.

  The state is that of `init_local_state` and is donated. Metrics are means over
  the global batch, each worker's at its own parameters; `grad_norm` is the mean of
  the workers' norms.

  Args:
    loss_fn: as of `make_train_step`.
    tx: the workers' own optimizer, on their own mean gradients.
    mesh: every axis of it splits the batch.
    exchange: of the ways W - w_k; `plain` is exact.
    method: when workers agree and how.
    workers: mesh axes that tell workers apart; the devices along the others are one
      worker, and average their gradients in every step. None: all axes, so that
      each device is a worker.
    last_step: workers agree after it too, so that a run whose steps H does not
      divide ends with all that was learned; None: nothing of the kind.
    accumulate_steps, unroll: as of `make_train_step`.
    schedule: step -> learning rate, only to be reported.
    observe: inner opt_state -> further metrics, averaged over the workers.
    reduce_metrics: False: metrics are [devices], each a device's own, and nothing
      crosses the network between agreements; whoever reads them averages.
    refuse: a worker whose loss, gradient or model state is NaN or Inf sits the step
      out: what it has stays as it was, but for counts of steps, and so is good when
      workers agree. A mean way that is no number moves nobody: all go on from where
      they are. Metrics as of `make_train_step`; the loss of such steps is NaN.
    seed: of `loss_fn`'s keys.

  Raises:
    ConfigError: `workers` names an axis that the mesh does not have.

  Example:
    >>> method = diloco(every=50)
    >>> step = make_local_train_step(loss_fn, tx, mesh, plain(AXES), method)
    >>> state, metrics = step(state, batch)   # doctest: +SKIP
  """
  axes = mesh.axis_names
  unknown = [axis for axis in workers or () if axis not in axes]
  if unknown:
    raise ConfigError(f"workers={workers}: the mesh has {axes}, not {unknown[0]!r}")
  within = () if workers is None else tuple(a for a in axes if a not in workers)
  agree = _agreement(exchange, method, axes, refuse)
  unrolled = unrolls(mesh) if unroll is None else unroll
  branch = nan_guard.branches(mesh) if refuse else None
  update = _worker_update(loss_fn, tx, axes, within, accumulate_steps, unrolled, branch)

  def device_step(anchor, own, batch, key, step):
    # One device: the anchor whole, its own with a leading dim of 1.
    own, totals, norm, seen = update(jax.tree.map(lambda x: x[0], own), batch, key)
    observed = {"grad_norm": norm} | (observe(own.opt_state) if observe else {})
    is_due = (step + 1) % method.every == 0
    if last_step is not None:
      is_due |= step + 1 == last_step

    def apart(anchor, own):
      return anchor, own, jnp.full((), -1, jnp.int32)

    anchor, own, mean = lax.cond(is_due, agree, apart, anchor, own)
    if refuse:
      totals["loss"] = jnp.where(mean < 0, totals["loss"], jnp.nan)
      seen = jnp.append(seen, vary(mean, axes))[None]
    if reduce_metrics:
      totals, observed = lax.psum(totals, axes), lax.pmean(observed, axes)
    metrics = means(totals) | observed
    if not reduce_metrics:
      metrics = jax.tree.map(lambda x: x[None], metrics)
    return anchor, jax.tree.map(lambda x: x[None], own), metrics, seen

  mapped = jax.shard_map(
    device_step,
    mesh=mesh,
    in_specs=(P(), P(axes), P(axes), P(), P()),
    out_specs=(P(), P(axes), P() if reduce_metrics else P(axes), P(axes)),
    check_vma=True,
  )

  def train_step(state: TrainState, batch: Batch):
    key = jax.random.fold_in(jax.random.key(seed), state.step)
    anchor = (state.params, state.model_state, state.opt_state)
    (params, model_state, outer), own, metrics, seen = mapped(
      anchor, state.exchange_state, batch, key, state.step
    )
    if schedule is not None:
      metrics["learning_rate"] = jnp.asarray(schedule(state.step), jnp.float32)
    if refuse:
      metrics[nan_guard.SEEN] = seen
    state = TrainState(state.step + 1, params, model_state, outer, own, ())
    return state, metrics

  # Metrics lie as they come: replicated, or one a device.
  alike = reduce_metrics and not refuse
  shardings = (state_shardings(mesh), replicated(mesh) if alike else None)
  jitted = jax.jit(train_step, donate_argnums=0, out_shardings=shardings)
  return one_at_a_time(jitted, mesh)


def make_agree(
  mesh: Mesh, exchange: Exchange, method: LocalUpdate
) -> Callable[[TrainState], TrainState]:
  """Compile-ready `agree(state) -> state`: an outer step now, whatever the step.

  For the end of a run whose number of steps H does not divide: the anchor then
  lacks what was learned since.

  Args:
    mesh: of the state, which is donated.
    exchange: as of the train step.
    method: as of the train step.
  """
  axes = mesh.axis_names
  outer_step = _agreement(exchange, method, axes)

  def on_device(anchor, own):
    anchor, own, _ = outer_step(anchor, jax.tree.map(lambda x: x[0], own))
    return anchor, jax.tree.map(lambda x: x[None], own)

  specs = (P(), P(axes))
  mapped = jax.shard_map(
    on_device, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=True
  )

  def agree(state: TrainState) -> TrainState:
    anchor = (state.params, state.model_state, state.opt_state)
    (params, model_state, outer), own = mapped(anchor, state.exchange_state)
    return TrainState(state.step, params, model_state, outer, own, ())

  jitted = jax.jit(agree, donate_argnums=0, out_shardings=state_shardings(mesh))
  return one_at_a_time(jitted, mesh)


def _worker_update(loss_fn, tx, axes, within, micros, unroll, branch):
  """A worker's own step.

  Args:
    branch: how a bad step is refused, as `non_finite.branches` says; None: not at all.

  Returns:
    (own, batch, key) -> (own, totals, norm of its gradient, what a device saw).
  """

  def update(own: Own, batch, key):
    keys = row_keys(key, batch, axes)
    grads, model_state, totals = sum_grads(
      loss_fn, own.params, own.model_state, batch, keys, micros=micros, unroll=unroll
    )
    seen: Any = ()
    if branch is not None:
      seen, totals = nan_guard.look(grads, model_state, totals, axes)
    examples = totals["examples"]
    if within:
      # Alike within the worker; what a device keeps is typed as its own all the same.
      sums = lax.psum((grads, examples), within), lax.pmean(model_state, within)
      (grads, examples), model_state = vary(sums, within)
    scale = 1 / examples.astype(jnp.float32)
    grads = jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
    norm = optax.tree.norm(grads)

    def move(own):
      updates, opt_state = tx.update(grads, own.opt_state, own.params)
      params = optax.apply_updates(own.params, updates)
      return own._replace(params=params, model_state=model_state, opt_state=opt_state)

    def stay(own):
      return own._replace(opt_state=nan_guard.move_on(own.opt_state))

    if branch is None:
      return move(own), totals, norm, seen
    loss = totals["loss"]
    if within:  # one that is bad is NaN, and the worker is refused as a whole
      loss = vary(lax.psum(loss, within), within)
    is_good = jnp.isfinite(loss) & jnp.isfinite(norm)
    totals["loss"] = jnp.where(is_good, totals["loss"], jnp.nan)
    own = nan_guard.unless_refused(is_good, move, stay, own, branch=branch)
    return own, totals, norm, seen

  return update


def _agreement(
  exchange: Exchange, method: LocalUpdate, axes: tuple[str, ...], refuse: bool = False
):
  """The outer step on one device: (anchor, own) -> (anchor, own, code of the mean).

  The code is `non_finite.first_bad` of the mean way, -1 without `refuse`.
  """

  def agree(anchor, own: Own):
    params, _, outer_state = anchor
    ways = jax.tree.map(jnp.subtract, vary(params, axes), own.params)
    mean, exchange_state = exchange.exchange(ways, own.exchange_state)
    updates, outer_state = method.outer.update(mean, outer_state, params)
    params = optax.apply_updates(params, updates)
    model_state = lax.pmean(own.model_state, axes)
    opt_state = own.opt_state
    if method.reset_momentum:
      opt_state = reset_momentum(opt_state)
    start, own_model = vary((params, model_state), axes)
    code = jnp.full((), -1, jnp.int32)
    met = (
      (params, model_state, outer_state),
      Own(start, own_model, opt_state, exchange_state),
    )
    if not refuse:
      return *met, code
    # Not every exchange hands on what is no number: a device says so of its own.
    code = jnp.maximum(
      nan_guard.first_bad(mean), lax.pmax(nan_guard.first_bad(ways), axes)
    )
    is_good = code < 0
    anchor = nan_guard.keep(is_good, met[0], anchor)
    return anchor, nan_guard.keep(is_good, met[1], own), code

  return agree
