"""Requirements of a step on a loss and its state: refused in one line, or right."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from jaxscale import config
from jaxscale.errors import ConfigError
from jaxscale.exchange import Exchange, plain
from jaxscale.exchange.local_updates import local_sgd
from jaxscale.experiment.build import experiment
from jaxscale.mesh import batch_sharding, make_mesh
from jaxscale.training import contract
from jaxscale.training.local_step import make_local_train_step
from jaxscale.training.losses import Objective
from jaxscale.training.state import init_state
from jaxscale.training.step import make_eval_step, make_train_step
from jaxscale.training.types import StepOptions
from support.cases import all_slow_except
from support.configs import small_config
from support.errors import config_error

RNG = np.random.default_rng(0)
BATCH = {
  "image": RNG.normal(size=(32, 6)).astype("float32"),
  "label": RNG.integers(0, 3, 32).astype("int32"),
}
AXES = ("replica", "data")


def init(state=None):
  def make(key):
    return {"w": 0.3 * jax.random.normal(key, (6, 3))}, {} if state is None else state()

  return make


def errors(params, batch):
  logits = batch["image"] @ params["w"]
  return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])


def summed(params, model_state, batch, keys, new_state=None):
  """A right loss; `new_state` makes the model state of (state, params, batch, keys)."""
  loss = errors(params, batch).sum()
  if new_state is not None:
    model_state = new_state(model_state, params, batch, keys)
  return loss, (model_state, {"loss": loss, "examples": len(keys)})


def train(loss_fn, num_devices=4, steps=2, make=None, exchange=None, **options):
  """The state and the last metrics of some steps."""
  mesh, tx = make_mesh(devices=jax.devices()[:num_devices]), optax.sgd(0.1)
  average = "ema_decay" in options
  state = init_state(make or init(), tx, mesh, average=average)
  step = make_train_step(loss_fn, tx, mesh, exchange, options=StepOptions(**options))
  batch = jax.device_put(BATCH, batch_sharding(mesh))
  for _ in range(steps):
    state, metrics = step(state, batch)
  return state, metrics


def totals(loss, **more):
  return loss, ({}, {"loss": loss, **more})


def contrastive(p, s, b, keys):
  """InfoNCE: each row's loss grows with the rows, and it is a sum all the same."""
  z = b["image"] @ p["w"]
  every = lax.all_gather(z, AXES, tiled=True)
  own = lax.axis_index(AXES) * len(z) + jnp.arange(len(z))
  loss = optax.softmax_cross_entropy_with_integer_labels(z @ every.T, own)
  return totals(loss.sum(), examples=len(keys))


LOSSES = {
  "mean": lambda p, s, b, k: totals(errors(p, b).mean(), examples=len(k)),
  "average": lambda p, s, b, k: totals(jnp.average(errors(p, b)), examples=len(k)),
  "shared out": lambda p, s, b, k: totals((errors(p, b) / len(k)).sum(), examples=len(k)),
  "a count of one": lambda p, s, b, k: totals(errors(p, b).sum(), examples=1),
  "penalty": lambda p, s, b, k: totals(
    errors(p, b).sum() + 0.1 * (p["w"] ** 2).sum(), examples=len(k)
  ),
  "mean of metrics": lambda p, s, b, k: (
    errors(p, b).sum(),
    ({}, {"loss": errors(p, b).mean(), "examples": len(k)}),
  ),
  "mean over devices": lambda p, s, b, k: totals(
    lax.pmean(errors(p, b).mean(), AXES), examples=len(k)
  ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_is_no_sum_is_refused(name):
  """Its gradients would grow with the devices: 0.217, 0.433 and 1.73 on 1, 2 and 8."""
  for num_devices, micros in ((1, 1), (4, 2)):
    with pytest.raises(ConfigError, match=r"^loss_fn returns .*; sum over the rows"):
      train(LOSSES[name], num_devices, num_microbatches=micros)


def test_a_loss_that_cannot_be_checked_is_named(monkeypatch):
  def for_eight(params, model_state, batch, keys):
    return summed(params, model_state, batch | {"k": keys.reshape(8)}, keys)

  def not_finite(params, model_state, batch, keys):
    loss = errors(params, batch).sum() * jnp.log(-1 - (params["w"] ** 2).sum())
    return loss, ({}, {"loss": loss, "examples": len(keys)})

  for loss, reason in ((for_eight, "reshape"), (not_finite, "is not finite")):
    with pytest.warns(UserWarning, match=f"^loss_fn was not tested to be.*{reason}"):
      train(loss)
  monkeypatch.setattr(contract, "_ELEMENTS", 2)
  with pytest.warns(UserWarning, match="it has 18 parameters, over 2"):
    train(summed)


class PerRow(config.Loss):
  """An objective.

  Attributes:
    loss: of each row.
  """

  loss: object

  def build(self, info):
    return Objective(self.loss)


def of_config(loss):
  arrays = config.Arrays(x=BATCH["image"], y=BATCH["label"], eval_share=0.5)
  settings = small_config(data=arrays, loss=PerRow(loss=loss), schedule=config.Steps())
  return experiment(settings, devices=jax.devices()[:2])


def each(outputs, batch):
  loss = optax.softmax_cross_entropy_with_integer_labels
  return loss(outputs.astype("float32"), batch["label"])


def test_an_objective_divided_by_the_rows_is_refused():
  for wrong in (
    lambda o, b: each(o, b) / len(o),
    lambda o, b: jnp.full(len(o), each(o, b).mean() / len(o)),
    lambda o, b: jax.nn.softmax(each(o, b)),
    lambda o, b: each(o, b) / jnp.ones(len(o)).sum(),
  ):
    with config_error(match=r"^Config.loss returns .*; sum"):
      of_config(wrong)
  assert not of_config(each).notes
  (note,) = of_config(lambda o, b: each(o.reshape(8, -1), b)).notes
  assert note.startswith("PerRow: not tested whether its loss is a sum over rows: ")
  assert "reshape" in note and "\n" not in note


RIGHT = {
  "sum": summed,
  "mean that counts as one": lambda p, s, b, k: totals(errors(p, b).mean(), examples=1),
  "negative": lambda p, s, b, k: totals(-errors(p, b).sum(), examples=len(k)),
  "zero": lambda p, s, b, k: totals(0.0 * errors(p, b).sum(), examples=len(k)),
  "penalty for each row": lambda p, s, b, k: totals(
    errors(p, b).sum() + len(k) * (p["w"] ** 2).sum(), examples=len(k)
  ),
  "without a total": lambda p, s, b, k: (errors(p, b).sum(), ({}, {"examples": len(k)})),
  "random": lambda p, s, b, k: totals(
    (errors(p, b) * jax.vmap(jax.random.uniform)(k)).sum(), examples=len(k)
  ),
  "contrastive": contrastive,
}


@pytest.mark.parametrize("name", all_slow_except(RIGHT, "random", "contrastive"))
def test_a_sum_is_the_same_on_any_number_of_devices(name):
  _, one = train(RIGHT[name], 1)
  _, four = train(RIGHT[name], 4)
  assert one.keys() == four.keys() >= {"loss", "grad_norm"}
  for key, value in one.items():
    np.testing.assert_allclose(four[key], value, rtol=1e-5, err_msg=key)


def test_a_loss_is_computed_once_before_the_first_step():
  calls = []

  def counted(*args):
    calls.append(0)
    return summed(*args)

  mesh, tx = make_mesh(devices=jax.devices()[:1]), optax.sgd(0.1)
  state, batch = init_state(init(), tx, mesh), jax.device_put(BATCH)
  step = make_train_step(counted, tx, mesh)
  state, _ = step(state, batch)
  traced = len(calls)
  for _ in range(3):
    state, _ = step(state, batch)
  assert len(calls) == traced <= 4


@pytest.mark.parametrize(
  ("result", "line"),
  [
    (lambda x: x, "loss_fn returns .*; return .loss, .model_state, totals"),
    (lambda x: (x, {"loss": x}), "loss_fn returns tuple; return .loss"),
    (lambda x: (x, ({}, x)), "loss_fn returns tuple; return .loss"),
    (lambda x: (x, ({}, {"loss": x})), "has totals 'loss' and no 'examples'; add the"),
    (lambda x: (x[None], ({}, {"examples": 8})), r"returns 'loss' as float32\[1\]"),
    (lambda x: (x.astype(int), ({}, {"examples": 8})), r"returns 'loss' as int32\[\]"),
    (lambda x: (x, ({}, {"examples": 8, "all": x[None]})), r"'all' as float32\[1\]"),
    (lambda x: (x, ({"n": x}, {"examples": 8})), "has other leaves after a step: n; r"),
  ],
)
def test_what_a_loss_returns_is_checked(result, line):
  def loss_fn(params, model_state, batch, keys):
    return result(errors(params, batch).sum())

  with pytest.raises(ConfigError, match=line):
    train(loss_fn)


def test_totals_of_evaluation_have_examples():
  mesh = make_mesh(devices=jax.devices()[:2])
  step = make_eval_step(lambda p, s, b: {"loss": b["image"].sum()}, mesh)
  with pytest.raises(ConfigError, match="no 'examples'; add the number of rows"):
    step({}, {}, jax.device_put(BATCH, batch_sharding(mesh)))


def queue():
  return {
    "queue": jnp.ones((32, 3)),
    "pointer": jnp.zeros((), jnp.int32),
    "steps": jnp.zeros((), jnp.uint8),
    "warm": jnp.zeros((), bool),
    "key": jax.random.key(1),
    "raw": jax.random.PRNGKey(1),
    "teacher": jnp.zeros((6, 3), jnp.bfloat16),
    "batch_stats": {"mean": jnp.zeros(6)},
  }


def gathered(s, params, batch, keys):
  rows = lax.all_gather(batch["image"] @ params["w"], AXES, tiled=True)
  teacher = 0.5 * s["teacher"] + (0.5 * params["w"]).astype(jnp.bfloat16)
  return s | {
    "queue": lax.dynamic_update_slice_in_dim(s["queue"], rows, s["pointer"], 0),
    "pointer": (s["pointer"] + len(rows)) % 32,
    **same_on_all(s),
    "teacher": teacher,
    "batch_stats": {"mean": 0.9 * s["batch_stats"]["mean"] + batch["image"].mean(0)},
  }


def same_on_all(s):
  return {
    "steps": s["steps"] + jnp.uint8(1),
    "warm": ~s["warm"],
    "key": jax.random.split(s["key"])[0],
    "raw": jax.random.split(s["raw"])[0],
  }


def values(state):
  """A model state on the host, with the bits of its keys."""
  is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
  state = jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, state)
  return jax.tree.map(np.asarray, jax.device_get(state))


@pytest.mark.parametrize("skips", [False, True])
def test_state_of_any_dtype_is_that_of_one_device(skips):
  def loss_fn(*args):
    return summed(*args, new_state=gathered)

  options = {"make": init(queue), "ema_decay": 0.5, "skip_bad_steps": skips}
  one, four = (train(loss_fn, n, steps=3, **options)[0] for n in (1, 4))
  dtypes = lambda tree: jax.tree.map(lambda x: x.dtype, tree)  # noqa: E731
  assert dtypes(four.model_state) == dtypes(queue())
  assert dtypes(four.average[1]) == dtypes(queue())
  for part in ("model_state", "average"):
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
      values(getattr(four, part)),
      values(getattr(one, part)),
    )
  assert four.model_state["steps"] == 3 and four.average[1]["steps"] == 3
  keys = jax.random.key_data(four.model_state["key"])
  assert not np.array_equal(keys, jax.random.key_data(jax.random.key(1)))


@pytest.mark.parametrize("micros", [1, 4])
def test_micro_batches_count_as_one_step(micros):
  def new_state(s, params, batch, keys):
    return s | same_on_all(s) | {"teacher": 0.5 * s["teacher"] + 1}

  def loss_fn(*args):
    return summed(*args, new_state=new_state)

  state, _ = train(loss_fn, make=init(queue), num_microbatches=micros, steps=3)
  assert state.model_state["steps"] == 3 and state.model_state["warm"]
  assert state.model_state["steps"].dtype == jnp.uint8
  np.testing.assert_array_equal(state.model_state["teacher"].astype(float), 1.75)


DIFFERS = {
  "queue": lambda s, p, b, k: s | {"queue": jnp.resize(b["image"] @ p["w"], (32, 3))},
  "pointer": lambda s, p, b, k: s | {"pointer": (b["label"] > 0).sum(dtype=jnp.int32)},
  "steps": lambda s, p, b, k: s | {"steps": s["steps"] + lax.axis_index("data").astype(jnp.uint8)},
  "warm": lambda s, p, b, k: s | {"warm": (b["label"] > 0).all()},
  "key": lambda s, p, b, k: s | {"key": k[0]},
  "teacher": lambda s, p, b, k: s | {"teacher": lax.ppermute(s["teacher"], "data", [(0, 1)])},
  "queue half gathered": lambda s, p, b, k: (
    s | {"queue": jnp.resize(lax.psum(b["image"], "replica") @ p["w"], (32, 3))}
  ),
  "queue of a scan": lambda s, p, b, k: (
    s
    | {
      "queue": lax.scan(
        lambda q, x: (jnp.roll(q, 1, 0).at[0].set(x), None), s["queue"], b["image"] @ p["w"]
      )[0]
    }
  ),
  "pointer of a branch": lambda s, p, b, k: (
    s | {"pointer": lax.cond(b["label"][0] > 0, lambda n: n + 1, lambda n: n + 0, s["pointer"])}
  ),
  "pointer of a while": lambda s, p, b, k: (
    s | {"pointer": lax.while_loop(lambda n: n < b["label"][0], lambda n: n + 1, s["pointer"])}
  ),
}


@pytest.mark.parametrize("name", DIFFERS)
def test_state_that_differs_between_devices_is_refused_by_name(name):
  def loss_fn(*args):
    return summed(*args, new_state=DIFFERS[name])

  for num_devices in (1, 4):
    leaf = name.split()[0]
    line = f"^model state {leaf} differs between devices; .*all_gather.*'batch_stats'"
    with pytest.raises(ConfigError, match=line):
      train(loss_fn, num_devices, make=init(queue))


def test_a_queue_of_several_micro_batches_is_refused():
  with pytest.raises(ConfigError, match=r"queue depends on the rows.*accumulate_steps=1"):
    train(lambda *args: summed(*args, new_state=gathered), make=init(queue), num_microbatches=2)


@pytest.mark.parametrize(
  ("changed", "line"),
  [
    ({"steps": 1.0}, r"state steps is uint8\[\], and float32\[\] after a step; return"),
    ({"pointer": jnp.zeros(2, int)}, r"pointer is int32\[\], and int32\[2\] after"),
    ({"more": 1}, "has other leaves after a step: more; return the state as init"),
  ],
)
def test_state_of_another_shape_or_dtype_is_refused(changed, line):
  def loss_fn(*args):
    return summed(*args, new_state=lambda s, *_: s | changed)

  with pytest.raises(ConfigError, match=line):
    train(loss_fn, make=init(queue))


def test_workers_that_train_alone_keep_the_dtypes_of_the_state():
  mesh, tx, method = make_mesh(devices=jax.devices()[:4]), optax.sgd(0.1), local_sgd(2)
  exchange = plain(mesh.axis_names)
  state = init_state(init(queue), tx, mesh, exchange, local=method)
  batch = jax.device_put(BATCH, batch_sharding(mesh))

  def new_state(s, params, batch, keys):
    return s | same_on_all(s)

  def loss_fn(*args):
    return summed(*args, new_state=new_state)

  step = make_local_train_step(loss_fn, tx, mesh, exchange, method)
  for _ in range(4):
    state, _ = step(state, batch)
  assert state.model_state["steps"] == 4
  assert [x.dtype for x in jax.tree.leaves(state.model_state)] == [
    x.dtype for x in jax.tree.leaves(queue())
  ]
  with pytest.raises(ConfigError, match=r"^loss_fn returns .*; sum over the rows"):
    state = init_state(init(), tx, mesh, exchange, local=method)
    make_local_train_step(LOSSES["mean"], tx, mesh, exchange, method)(state, batch)


@pytest.mark.parametrize(
  ("exchange", "line"),
  [
    (lambda g, s: (g, s), "leaves the gradient of w different along .*pmean"),
    (lambda g, s: (lax.pmean(g, "replica"), s), "of w different along .'data',.; av"),
    (lambda g, s: (lax.pmean(list(g.values()), AXES), s), "returns other leaves than"),
    (
      lambda g, s: (jax.tree.map(lambda x: lax.pmean(x.sum(), AXES), g), s),
      r"returns float32\[\] for the gradient of w, float32\[6, 3\]; return the mean",
    ),
    (
      lambda g, s: (jax.tree.map(lambda x: lax.psum(x.astype("bfloat16"), AXES), g), s),
      "returns bfloat16",
    ),
  ],
)
def test_an_exchange_that_gives_no_means_is_refused(exchange, line):
  with pytest.raises(ConfigError, match=f"^exchange .*{line}"):
    train(summed, exchange=Exchange(lambda params: (), exchange))
