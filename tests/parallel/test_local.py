"""Local updates: against plain data parallelism, and against float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxscale import exchange, hlo, optim
from jaxscale.exchange import local_updates as local
from jaxscale.mesh import make_mesh
from jaxscale.training import losses
from jaxscale.training.local_step import make_local_train_step
from jaxscale.training.state import abstract_state, init_state
from support.digits import cnn, digits_batch
from support.errors import config_error
from support.leaves import assert_near
from support.steps import on_mesh, training

AXES = ("replica", "data")
PLAIN = exchange.plain(AXES)
DIM, ROWS, WORKERS = 12, 32, 8
W0 = np.linspace(-1, 1, DIM)
CURVED = np.linspace(0.2, 1.8, DIM)  # of the loss below, by coordinate


def quadratic(params, model_state, batch, keys):
  """Return the sum over rows of |a (w - x)|^2 / 2: a row's gradient is a^2 (w - x)."""
  del keys
  scale = jnp.asarray(CURVED, jnp.float32)
  loss = 0.5 * jnp.square(scale * (params["w"] - batch["x"])).sum()
  examples = (batch["x"][:, 0] < jnp.inf).sum(dtype=jnp.int32)
  return loss, (model_state, {"loss": loss, "examples": examples})


def init(key):
  del key
  return {"w": jnp.asarray(W0, jnp.float32)}, {}


def data(steps):
  return np.random.default_rng(0).normal(size=(steps, ROWS, DIM)).astype(np.float32)


def run(method, tx, steps, **options):
  """Return the state and metrics after every step on the quadratic."""
  mesh, out = make_mesh(replica=2), []
  state, step = training(quadratic, init, tx, mesh, local=method, **options)
  for x in data(steps):
    state, metrics = step(state, on_mesh(mesh, {"x": x}))
    out.append(jax.device_get((state, metrics)))
  return out


def reference(outer, every, steps, *, lr, momentum, reset, groups=WORKERS):
  """Compute the run in float64.

  `outer` is (anchor, averaged pseudo-gradient, its state) -> new anchor and state.
  """
  anchor, state = W0.copy(), np.zeros(DIM)
  w = np.tile(anchor, (groups, 1))
  v = np.zeros_like(w)
  for i, x in enumerate(data(steps).astype(np.float64), 1):
    rows = x.reshape(groups, -1, DIM).mean(axis=1)
    v = momentum * v + CURVED**2 * (w - rows)
    w = w - lr * v
    if i % every == 0:
      anchor, state = outer(anchor, (anchor - w).mean(axis=0), state)
      w = np.tile(anchor, (groups, 1))
      v = v * (0 if reset else 1)
  return anchor, w


def bmuf(n, zeta=1.0, nesterov=True, workers=WORKERS):
  """CNTK's own form, on the sum over workers, with (1 - n) b N = zeta."""

  def outer(anchor, mean, smoothed):
    block_rate = zeta / ((1 - n) * workers)
    smoothed = n * smoothed + (1 - n) * block_rate * (workers * mean)
    anchor = anchor - smoothed
    return anchor - (n * smoothed if nesterov else 0), smoothed

  return outer


def nesterov(anchor, mean, v, rate=0.7, m=0.9):
  v = m * v + mean
  return anchor - rate * (mean + m * v), v


OTHERS = dict(momentum=0.6, rate=0.5, nesterov=False, reset_momentum=False)
# Two workers of four devices are two workers, whatever their devices hold.
CASES = {
  "block momentum": (local.block_momentum(3, WORKERS), bmuf(1 - 1 / WORKERS), True),
  "of two workers": (local.block_momentum(3, 2), bmuf(0.5, workers=2), True),
  "its options": (local.block_momentum(3, WORKERS, **OTHERS), bmuf(0.6, 0.5, False), False),
  "diloco": (local.diloco(3), nesterov, False),
  "local sgd": (local.local_sgd(3), lambda w, mean, s: (w - mean, s), False),
}


@pytest.mark.parametrize("name", CASES)
def test_equations_against_float64(name):
  method, outer, reset = CASES[name]
  groups, workers = (2, ("replica",)) if "two" in name else (WORKERS, None)
  out = run(method, optax.sgd(0.05, momentum=0.8), 14, workers=workers)
  anchor, own = reference(outer, 3, 14, lr=0.05, momentum=0.8, reset=reset, groups=groups)
  state = out[-1][0]
  np.testing.assert_allclose(state.params["w"], anchor, rtol=0, atol=3e-6)
  each = state.exchange_state.params["w"].reshape(groups, -1, DIM)
  np.testing.assert_allclose(each[:, 0], own, rtol=0, atol=3e-6)
  # Apart between agreements, two steps after the last one; together at each, and in a worker.
  assert np.ptp(own, axis=0).max() > 1e-2
  assert np.ptp(out[11][0].exchange_state.params["w"], axis=0).max() == 0
  assert np.ptp(each, axis=1).max() == 0


@pytest.mark.parametrize("every", [1, 3])
def test_elastic_averaging_against_float64(every):
  lr, momentum, rate, steps = 0.05, 0.8, 0.9, 14
  out = run(local.elastic_averaging(every, WORKERS), optax.sgd(lr, momentum=momentum), steps)
  center, w, v = W0.copy(), np.tile(W0, (WORKERS, 1)), np.zeros((WORKERS, DIM))
  for i, x in enumerate(data(steps).astype(np.float64), 1):
    v = momentum * v + CURVED**2 * (w - x.reshape(WORKERS, -1, DIM).mean(axis=1))
    apart = (w - center) if i % every == 0 else 0 * w
    w = w - lr * v - rate / WORKERS * apart
    center = center + rate / WORKERS * apart.sum(axis=0)
  state = out[-1][0]
  np.testing.assert_allclose(state.params["w"], center, rtol=0, atol=3e-6)
  np.testing.assert_allclose(state.exchange_state.params["w"], w, rtol=0, atol=3e-6)
  assert np.ptp(w, axis=0).max() > 1e-2  # workers stay apart


def test_a_slow_worker_takes_fewer_steps():
  """Against float64; worker 5 takes one of three steps, and its rows of the others are unused."""
  steps, every, lr, momentum = 14, 3, 0.05, 0.8
  counts = tuple(1 if k == 5 else every for k in range(WORKERS))
  method = local.diloco(every)._replace(worker_steps=counts)
  out = run(method, optax.sgd(lr, momentum=momentum), steps)
  anchor, w, v, outer_v = W0.copy(), np.tile(W0, (WORKERS, 1)), np.zeros((WORKERS, DIM)), 0
  losses, reported, taken = [], 0.0, np.zeros(WORKERS)
  for i, x in enumerate(data(steps).astype(np.float64)):
    is_active = np.asarray(counts) > i % every
    rows = x.reshape(WORKERS, -1, DIM)
    losses += [*0.5 * (CURVED**2 * (w[:, None] - rows) ** 2).sum(-1).mean(-1)[is_active]]
    taken += is_active
    if i == 0 or (i + 1) % every == 0:  # of all steps of all workers since the last report
      reported, losses = np.mean(losses), []
    metrics = out[i][1]
    assert metrics["loss"] == pytest.approx(reported, rel=1e-5)
    new_v = momentum * v + CURVED**2 * (w - rows.mean(axis=1))
    v = np.where(is_active[:, None], new_v, v)
    w = np.where(is_active[:, None], w - lr * new_v, w)
    if (i + 1) % every == 0:
      anchor, outer_v = nesterov(anchor, (anchor - w).mean(axis=0), outer_v)
      w = np.tile(anchor, (WORKERS, 1))
  state = out[-1][0]
  np.testing.assert_allclose(state.params["w"], anchor, rtol=0, atol=3e-6)
  np.testing.assert_allclose(state.exchange_state.params["w"], w, rtol=0, atol=3e-6)
  assert metrics["worker_steps"] == sum(counts) / WORKERS
  np.testing.assert_array_equal(state.exchange_state.exchange_state[0].taken, taken)


def test_a_slow_worker_is_awaited_only_where_workers_synchronize():
  """No collective is outside of a branch; with two workers of four devices only a worker's own."""
  mesh, tx = make_mesh(replica=2), optax.sgd(0.05)
  batch = {"x": jax.ShapeDtypeStruct((ROWS, DIM), jnp.float32)}
  for workers, counts in ((None, (6,) * 7 + (1,)), (("replica",), (6, 1))):
    method = local.diloco(6)._replace(worker_steps=counts)
    state = abstract_state(init, tx, mesh, PLAIN, local=method)
    step = make_local_train_step(quadratic, tx, mesh, PLAIN, method, workers=workers)
    rows = hlo.collectives(step.lower(state, batch).compile(), mesh)
    assert rows and all(row.conditional for row in rows)
    assert {row.axes for row in rows} == ({AXES} if workers is None else {AXES, ("data",)})


def test_a_skipped_step_of_a_round_is_reported_where_workers_synchronize():
  """Worker 3 meets NaN in the second of three steps."""
  mesh, tx = make_mesh(replica=2), optax.sgd(0.05)
  method = local.diloco(3)._replace(worker_steps=(3,) * 7 + (1,))
  fields = dict(local=method, skip_bad_steps=True)
  state, step = training(quadratic, init, tx, mesh, **fields)
  losses, codes = [], []
  for i, x in enumerate(data(6)):
    rows = x.reshape(WORKERS, -1, DIM).copy()
    rows[3] *= np.nan if i == 1 else 1
    state, metrics = step(state, on_mesh(mesh, {"x": rows.reshape(ROWS, DIM)}))
    losses.append(float(metrics["loss"]))
    codes.append(np.asarray(metrics["nan_codes"]).max(axis=1))
  assert [np.isfinite(x) for x in losses] == [True, True, False, True, True, True]
  assert codes[2][3] >= 0 and (np.delete(codes[2], 3) < 0).all()
  assert jax.device_get(state.exchange_state.exchange_state[0].taken).tolist() == [6, 6, 6, 5] + [
    6
  ] * 3 + [2]


PARTS = {"a": slice(0, 3), "b": slice(3, 8), "c": slice(8, 12)}  # 2 fragments: b, then a and c


def in_parts(params, model_state, batch, keys):
  whole = {"w": jnp.concatenate([params[name] for name in PARTS])}
  return quadratic(whole, model_state, batch, keys)


def streamed(method, steps, **options):
  """Return the state after every step with the parameters in three leaves."""
  mesh, out = make_mesh(replica=2), []
  first = {name: jnp.asarray(W0[part], jnp.float32) for name, part in PARTS.items()}
  parts = in_parts, lambda key: (first, {}), optax.sgd(0.05, momentum=0.8), mesh
  state, step = training(*parts, local=method, **options)
  for x in data(steps):
    state, _ = step(state, on_mesh(mesh, {"x": x}))
    out.append(jax.device_get(state))
  return out


def streamed_reference(every, steps, delay, mixing, counts=(), last=None, rate=0.7, m=0.9):
  """Compute streaming DiLoCo in float64 by loops over workers and fragments."""
  members = [[3, 4, 5, 6, 7], [0, 1, 2, 8, 9, 10, 11]]  # b is the largest leaf
  anchor, outer = W0.copy(), np.zeros(DIM)
  w, v = np.tile(W0, (WORKERS, 1)), np.zeros((WORKERS, DIM))
  arriving = {}  # step -> fragment that workers take over after it

  def outer_step(part):
    gap = anchor[part] - w[:, part].mean(axis=0)
    outer[part] = m * outer[part] + gap
    anchor[part] -= rate * (gap + m * outer[part])

  for t, x in enumerate(data(steps).astype(np.float64)):  # after t steps
    sent = [p for p in (0, 1) if t and t % every == p * every // 2]
    grads = CURVED**2 * (w - x.reshape(WORKERS, -1, DIM).mean(axis=1))
    for p in sent if delay else ():
      outer_step(members[p])
      arriving[t + delay] = p
    for k in range(WORKERS):
      if not counts or t % every < counts[k]:
        v[k] = 0.8 * v[k] + grads[k]
        w[k] = w[k] - 0.05 * v[k]
    if not delay:
      for p in range(2):
        if (t + 1) % every == p * every // 2:
          outer_step(members[p])
          w[:, members[p]] = anchor[members[p]]
    if t + 1 in arriving:
      part = members[arriving.pop(t + 1)]
      w[:, part] = mixing * w[:, part] + (1 - mixing) * anchor[part]
    if t + 1 == last:
      for p in range(2):
        is_done = not delay and (t + 1) % every == p * every // 2
        if p not in arriving.values() and not is_done:
          outer_step(members[p])
          w[:, members[p]] = anchor[members[p]]
  return anchor, w


SLOW = tuple(2 if k == 3 else 6 for k in range(WORKERS))
STREAMS = [
  (0, 0.0, (), None),
  (1, 0.0, (), None),
  (2, 0.5, (), None),
  (2, 0.5, SLOW, None),
  (2, 0.0, (), 16),
  (0, 0.0, (), 16),
  (0, 0.0, (), 18),  # a fragment is due after the last step itself
  (1, 0.0, (), 18),
]


@pytest.mark.parametrize("delay, mixing, counts, last", STREAMS)
def test_streamed_fragments_against_float64(delay, mixing, counts, last):
  steps = last or 17
  fields = dict(fragments=2, delay=delay, mixing=mixing, worker_steps=counts)
  method = local.diloco(6)._replace(**fields)
  state = streamed(method, steps, last_step=last)[-1]
  anchor, w = streamed_reference(6, steps, delay, mixing, counts, last)

  def whole(params):
    return np.concatenate([params[name] for name in PARTS], axis=-1)

  np.testing.assert_allclose(whole(state.params), anchor, rtol=0, atol=3e-6)
  np.testing.assert_allclose(whole(state.exchange_state.params), w, rtol=0, atol=3e-6)


def test_a_fragment_is_sent_at_its_own_step():
  """Each of the branches sends its own fragment only, by the 2-bit exchange, and in the step."""
  method = local.diloco(6)._replace(fragments=2, delay=1)
  mesh, tx = make_mesh(replica=2), optax.sgd(0.05)
  first = {name: jnp.asarray(W0[part], jnp.float32) for name, part in PARTS.items()}
  state = abstract_state(lambda key: (first, {}), tx, mesh, PLAIN, local=method)
  batch = {"x": jax.ShapeDtypeStruct((ROWS, DIM), jnp.float32)}
  step = make_local_train_step(in_parts, tx, mesh, PLAIN, method)
  rows = hlo.collectives(step.lower(state, batch).compile(), mesh)
  sent = [row.payload_bytes for row in rows if row.conditional]
  assert sum(sent) == DIM * 4 and max(sent) < DIM * 4


def test_an_exchange_of_ones_own_sees_the_names_of_a_fragment():
  """Each fragment has the parameters at their paths, so that names can choose."""

  def init(params):
    return {name: jnp.zeros(()) for name in params}

  def summed(grads, state):
    means, _ = PLAIN.exchange(grads, ())
    return means, {name: count + len(name) for name, count in state.items()}

  method = local.diloco(6)._replace(fragments=2)
  own = exchange.Exchange(init, summed)
  state, plain = (streamed(method, 12, exchange=x)[-1] for x in (own, PLAIN))
  jax.tree.map(np.testing.assert_array_equal, state.params, plain.params)
  counts = jax.device_get(state.exchange_state.exchange_state)
  assert [{name: x.tolist() for name, x in part.items()} for part in counts] == [
    {"b": [2.0] * WORKERS},
    {"a": [2.0] * WORKERS, "c": [2.0] * WORKERS},
  ]


def with_a_model(**options):
  """Parameters and losses of 20 steps whose dropout is by the keys of the rows."""
  mesh, fns, history = make_mesh(replica=2), cnn(dropout=0.5), []
  loss = losses.classification_loss(fns.apply)
  state, step = training(loss, fns.init, optax.sgd(0.1), mesh, seed=1, **options)
  for i in range(20):
    state, metrics = step(state, on_mesh(mesh, digits_batch(64, seed=i)))
    history.append(metrics["loss"].item())
  return jax.device_get(state.params), history


def test_agreeing_in_every_step_is_data_parallelism():
  """H = 1, the outer step W = W - D, no momentum: plain SGD, with a real model."""
  params, history = with_a_model()
  for workers in (None, ("replica",)):
    agreed, losses = with_a_model(local=local.local_sgd(1), workers=workers)
    assert losses == pytest.approx(history, rel=1e-5)
    assert_near(agreed, params, 1e-6, 1e-3)


def test_norms_are_of_whole_parameters():
  """LARS in a worker is LARS on one device with that worker's rows."""
  tx = optim.lars(lambda step: jnp.float32(1.0), weight_decay=1e-3, mask=None)
  method = local.local_sgd(99)
  state = run(method, tx, 4)[-1][0]
  params = init(None)[0]
  opt_state = tx.init(params)
  for x in data(4):
    rows = x.reshape(WORKERS, -1, DIM)[5]
    grads = jax.grad(lambda p, rows=rows: quadratic(p, {}, {"x": rows}, None)[0])(params)
    grads = jax.tree.map(lambda g, rows=rows: g / len(rows), grads)
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
  got = state.exchange_state.params["w"][5]
  np.testing.assert_allclose(got, params["w"], rtol=1e-6)


def test_nothing_crosses_the_network_between_synchronizations():
  mesh, method = make_mesh(replica=2), local.diloco(5)
  tx = optim.adamw(1e-3)
  state = abstract_state(init, tx, mesh, PLAIN, local=method)
  batch = {"x": jax.ShapeDtypeStruct((ROWS, DIM), jnp.float32)}

  def table(**options):
    step = make_local_train_step(quadratic, tx, mesh, PLAIN, method, **options)
    return hlo.collectives(step.lower(state, batch).compile(), mesh)

  rows = table()
  always, due = ([row for row in rows if row.conditional == is_due] for is_due in (False, True))
  assert hlo.total(due).payload_bytes == DIM * 4
  assert hlo.total(always).payload_bytes == 12  # loss, examples, norm of gradients
  by_replica = table(workers=("replica",))
  large = [row for row in by_replica if row.payload_bytes > 12]
  assert all(row.conditional == (row.axes == AXES) for row in large)
  assert {row.conditional for row in large} == {True, False}


def test_the_schedule_is_in_the_metrics():
  def schedule(step):
    return 0.05 / jnp.asarray(1 + step, jnp.float32)

  tx, method = optim.sgd(schedule), local.local_sgd(2)
  whole = run(method, tx, 3, schedule=schedule)
  rates = [metrics["learning_rate"] for _, metrics in whole]
  np.testing.assert_allclose(rates, [0.05, 0.025, 0.05 / 3], rtol=1e-6)


def test_workers_synchronize_after_the_last_step_of_a_run():
  tx = optax.sgd(0.05)
  wanted = run(local.local_sgd(4), tx, 4)[-1][0]
  got = run(local.local_sgd(99), tx, 4, last_step=4)
  np.testing.assert_array_equal(got[-1][0].params["w"], wanted.params["w"])
  np.testing.assert_array_equal(got[-2][0].params["w"], np.float32(W0))


def test_micro_batches_change_nothing():
  def observe(opt_state):
    return {"velocity": optax.tree.norm(opt_state)}

  def last(**options):
    tx = optax.sgd(0.05, momentum=0.9)
    return run(local.diloco(2), tx, 3, observe=observe, **options)[-1]

  (whole, metrics), (parts, same) = last(), last(num_microbatches=2)
  np.testing.assert_allclose(
    parts.exchange_state.params["w"], whole.exchange_state.params["w"], atol=1e-6
  )
  assert metrics["velocity"] > 0
  assert same == {name: pytest.approx(value, rel=1e-5) for name, value in metrics.items()}


def test_shapes_are_known_without_computing():
  parts, method = (init, optim.sgd(0.1), make_mesh(replica=2)), local.block_momentum(2, 8)
  state = init_state(*parts, local=method)
  abstract = abstract_state(*parts, local=method)
  assert jax.tree.structure(state) == jax.tree.structure(abstract)
  for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(abstract), strict=True):
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
  assert state.exchange_state.params["w"].shape == (8, DIM)
  assert state.evaluated()[0]["w"].shape == (DIM,)


def test_too_few_samples():
  assert local.check_samples(64_000, 10, worker_batch=100, num_workers=8) is None
  note = local.check_samples(63_999, 10, worker_batch=100, num_workers=8)
  assert note and "needs 64,000" in note and "has 63,999; give 9 or" in note
  with config_error(match=r"64,000 different samples .* has 7,000"):
    local.check_samples(7_000, every=10, worker_batch=100, num_workers=8)
  assert local.block_steps(100) == 1200 and local.block_steps(10**9) == 1


def with_statistics(method):
  mesh, first = make_mesh(replica=2), lambda key: (init(key)[0], {"mean": jnp.zeros(DIM)})
  state, step = training(quadratic, first, SGD, mesh, local=method)
  step(state, on_mesh(mesh, {"x": data(1)[0]}))


SGD, TWO, BLOCKS = optax.sgd(0.1), local.local_sgd(2), local.block_momentum(2, 8)
NO_MOMENTUM = "reset_momentum=True does not work with an optimizer without momentum"
MISTAKES = [
  (lambda: run(BLOCKS, optim.adamw(1e-3), 1), NO_MOMENTUM),
  (lambda: run(TWO, SGD, 1, workers=("model",)), "no axis 'model'"),
  (lambda: run(TWO._replace(fragments=2), SGD, 1), "fragments=2 is more than the 1 trained"),
  (lambda: with_statistics(TWO._replace(delay=1)), "^sync streams fragments, which does not"),
  (lambda: run(TWO, SGD, 1, ema_decay=0.9), "^options need synchronous training; unset"),
  (lambda: run(TWO, SGD, 1, measure_noise_scale=True), "^options need synchronous training; unset"),
]


@pytest.mark.parametrize("make, match", MISTAKES)
def test_mistakes_are_one_line(make, match):
  with config_error(match=match):
    make()
