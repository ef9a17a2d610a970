"""Requirements of a step on a loss and its state: refused in one line, or right."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from jaxscale import config
from jaxscale.exchange import Exchange
from jaxscale.exchange.local_updates import local_sgd
from jaxscale.experiment.build import experiment
from jaxscale.mesh import make_mesh
from jaxscale.training import contract
from jaxscale.training.losses import Objective
from jaxscale.training.step import make_eval_step
from support.cases import all_slow_except
from support.configs import small_config
from support.errors import config_error
from support.leaves import assert_close
from support.paths import ROOT
from support.steps import on_mesh, training

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
  """Compute a correct loss; `new_state` maps (state, params, batch, keys) to the model state."""
  loss = errors(params, batch).sum()
  if new_state is not None:
    model_state = new_state(model_state, params, batch, keys)
  return loss, (model_state, {"loss": loss, "examples": len(keys)})


def train(loss_fn, num_devices=4, steps=2, make=None, exchange=None, **options):
  """Return the state and the last metrics of some steps."""
  mesh, tx = make_mesh(devices=jax.devices()[:num_devices]), optax.sgd(0.1)
  state, step = training(loss_fn, make or init(), tx, mesh, exchange, **options)
  for _ in range(steps):
    state, metrics = step(state, on_mesh(mesh, BATCH))
  return state, metrics


def with_state(new_state):
  return lambda *args: summed(*args, new_state=new_state)


def totals(loss, **more):
  return loss, ({}, {"loss": loss, **more})


def contrastive(p, s, b, keys):
  """InfoNCE: each row's loss grows with the rows, and it is a sum all the same."""
  z = b["image"] @ p["w"]
  every = lax.all_gather(z, AXES, tiled=True)
  own = lax.axis_index(AXES) * len(z) + jnp.arange(len(z))
  loss = optax.softmax_cross_entropy_with_integer_labels(z @ every.T, own)
  return totals(loss.sum(), examples=len(keys))


def counted(loss, examples=len):
  """Return a loss function of the parameters, row errors and keys, with a count of examples."""

  def loss_fn(p, s, b, keys):
    return totals(loss(p["w"], errors(p, b), keys), examples=examples(keys))

  return loss_fn


LOSSES = {
  "mean": counted(lambda w, e, k: e.mean()),
  "average": counted(lambda w, e, k: jnp.average(e)),
  "shared out": counted(lambda w, e, k: (e / len(k)).sum()),
  "a count of one": counted(lambda w, e, k: e.sum(), lambda k: 1),
  "penalty": counted(lambda w, e, k: e.sum() + 0.1 * (w**2).sum()),
  "mean of metrics": lambda p, s, b, k: (
    errors(p, b).sum(),
    ({}, {"loss": errors(p, b).mean(), "examples": len(k)}),
  ),
  "mean over devices": counted(lambda w, e, k: lax.pmean(e.mean(), AXES)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_is_no_sum_is_refused(name):
  """Its gradients would grow with the devices: 0.217, 0.433 and 1.73 on 1, 2 and 8."""
  for num_devices, micros in ((1, 1), (4, 2)):
    with config_error(match=r"^loss_fn returns .*; sum over the rows"):
      train(LOSSES[name], num_devices, num_microbatches=micros)


def test_a_loss_that_cannot_be_checked_is_named(monkeypatch):
  def for_eight(params, model_state, batch, keys):
    return summed(params, model_state, batch | {"k": keys.reshape(8)}, keys)

  def not_finite(params, model_state, batch, keys):
    loss = errors(params, batch).sum() * jnp.log(-1 - (params["w"] ** 2).sum())
    return loss, ({}, {"loss": loss, "examples": len(keys)})

  for loss, reason in ((for_eight, "reshape"), (not_finite, "is not finite")):
    with pytest.warns(UserWarning, match=f"^cannot check that loss_fn sums over rows.*{reason}"):
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
  assert note.startswith("PerRow: cannot check that its loss sums over rows: ")
  assert "reshape" in note and "\n" not in note


RIGHT = {
  "sum": summed,
  "mean that counts as one": counted(lambda w, e, k: e.mean(), lambda k: 1),
  "negative": counted(lambda w, e, k: -e.sum()),
  "zero": counted(lambda w, e, k: 0.0 * e.sum()),
  "penalty for each row": counted(lambda w, e, k: e.sum() + len(k) * (w**2).sum()),
  "without a total": lambda p, s, b, k: (errors(p, b).sum(), ({}, {"examples": len(k)})),
  "random": counted(lambda w, e, k: (e * jax.vmap(jax.random.uniform)(k)).sum()),
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

  def noted(*args):
    calls.append(0)
    return summed(*args)

  mesh, batch = make_mesh(devices=jax.devices()[:1]), jax.device_put(BATCH)
  state, step = training(noted, init(), optax.sgd(0.1), mesh)
  state, _ = step(state, batch)
  traced = len(calls)
  for _ in range(3):
    state, _ = step(state, batch)
  assert len(calls) == traced <= 4


COUNT = {"examples": 8}
RESULTS = [
  (lambda x: x, "loss_fn returns .*; return .loss, .model_state, totals"),
  (lambda x: (x, {"loss": x}), "loss_fn returns tuple; return .loss"),
  (lambda x: (x, ({}, x)), "loss_fn returns tuple; return .loss"),
  (lambda x: (x, ({}, {"loss": x})), "has totals 'loss' and no 'examples'; add the"),
  (lambda x: (x[None], ({}, COUNT)), r"returns 'loss' as float32\[1\]"),
  (lambda x: (x.astype(int), ({}, COUNT)), r"returns 'loss' as int32\[\]"),
  (lambda x: (x, ({}, COUNT | {"all": x[None]})), r"'all' as float32\[1\]"),
  (lambda x: (x, ({"n": x}, COUNT)), "has different leaves after a step: n; r"),
]


@pytest.mark.parametrize("result, line", RESULTS)
def test_what_a_loss_returns_is_checked(result, line):
  def loss_fn(params, model_state, batch, keys):
    return result(errors(params, batch).sum())

  with config_error(match=line):
    train(loss_fn)


@pytest.mark.parametrize(
  ("totals", "line"),
  [
    ({"loss": 1.0}, "no 'examples'; add the number of rows"),
    ((1.0, 32), "^totals are tuple; return a dict of sums with 'examples'"),
    (None, "^totals are NoneType; return a dict"),
  ],
)
def test_totals_of_evaluation_have_examples(totals, line):
  mesh = make_mesh(devices=jax.devices()[:2])
  step = make_eval_step(lambda p, s, b: totals, mesh)
  with config_error(match=line):
    step({}, {}, on_mesh(mesh, BATCH))


SHORT, EMPTY = BATCH | {"label": BATCH["label"][:8]}, "is empty, but the options need it; create it"
CALLS = {
  "batch first": (lambda state: (BATCH, state), {}, "^state is a dict; give a TrainState"),
  "rows": (lambda s: (s, jax.tree.map(lambda x: x[:30], BATCH)), {}, "30 rows, .* use 28 rows"),
  "micro-batches": (lambda s: (s, BATCH), {"num_microbatches": 3}, "4 devices x 3 .* use 24 rows"),
  "unequal": (lambda s: (s, SHORT), {}, r"rows \(image \[32\], label \[8\]\); give arrays"),
  "scalar": (lambda s: (s, BATCH | {"lr": 1.0}), {}, r"different or no rows \(.*lr \[\].*\)"),
  "noise": (lambda s: (s._replace(noise=()), BATCH), {"measure_noise_scale": True}, EMPTY),
  "average": (lambda s: (s._replace(average=()), BATCH), {"ema_decay": 0.9}, rf"average {EMPTY}"),
}


@pytest.mark.parametrize("name", CALLS)
def test_arguments_that_a_step_cannot_use_are_refused(name):
  arguments, options, line = CALLS[name]
  mesh = make_mesh(devices=jax.devices()[:4])
  state, step = training(summed, init(), optax.sgd(0.1), mesh, **options)
  with config_error(match=line):
    step(*arguments(state))


def test_the_loss_of_the_documentation_trains_and_its_mean_is_refused_as_it_says():
  page = (ROOT / "docs" / "start" / "notebook.md").read_text()
  (block,) = (b for b in re.findall(r"```python\n(.*?)```", page, re.S) if "def loss_fn" in b)
  names = {"optax": optax, "apply": lambda p, s, x, train, keys: (x @ p["w"], s)}
  exec(compile(block, "notebook.md", "exec"), names)
  _, metrics = train(names["loss_fn"])
  np.testing.assert_allclose(metrics["loss"], train(summed)[1]["loss"], rtol=1e-6)
  exec(compile(block.replace(".sum()", ".mean()"), "notebook.md", "exec"), names)
  with config_error(match="^loss_fn returns the loss") as error:
    train(names["loss_fn"])
  line, shown = (re.sub(r"[\d.]+ ", "", " ".join(x.split())) for x in (str(error.value), page))
  assert line in shown


@pytest.mark.parametrize("num_devices", [1, 4])
@pytest.mark.parametrize("local", [None, local_sgd(2)])
def test_a_donated_state_is_refused(num_devices, local):
  """Without the check JAX's simulated devices end the process by a segmentation fault."""
  mesh = make_mesh(devices=jax.devices()[:num_devices])
  state, step = training(summed, init(), optax.sgd(0.1), mesh, local=local)
  after, _ = step(state, on_mesh(mesh, BATCH))
  with config_error(match="^state was donated to an earlier step; use the one it returned"):
    step(state, on_mesh(mesh, BATCH))
  assert step(state=after, batch=on_mesh(mesh, BATCH))[0].step == 2


def queue():
  zero = functools.partial(jnp.zeros, ())
  scalars = dict(pointer=zero(jnp.int32), steps=zero(jnp.uint8), warm=zero(bool))
  keys = dict(key=jax.random.key(1), raw=jax.random.PRNGKey(1))
  teacher, means = jnp.zeros((6, 3), jnp.bfloat16), {"mean": jnp.zeros(6)}
  return dict(queue=jnp.ones((32, 3)), teacher=teacher, batch_stats=means, **scalars, **keys)


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
  keys = {name: jax.random.split(s[name])[0] for name in ("key", "raw")}
  return keys | {"steps": s["steps"] + jnp.uint8(1), "warm": ~s["warm"]}


def values(state):
  """Return a model state on the host, with the bits of its keys."""
  is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
  state = jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, state)
  return jax.tree.map(np.asarray, jax.device_get(state))


@pytest.mark.parametrize("skips", [False, True])
def test_state_of_any_dtype_is_that_of_one_device(skips):
  options = {"make": init(queue), "ema_decay": 0.5, "skip_bad_steps": skips}
  one, four = (train(with_state(gathered), n, steps=3, **options)[0] for n in (1, 4))
  dtypes = lambda tree: jax.tree.map(lambda x: x.dtype, tree)  # noqa: E731
  assert dtypes(four.model_state) == dtypes(queue())
  assert dtypes(four.average[1]) == dtypes(queue())
  for part in ("model_state", "average"):
    parts, expected = (values(getattr(state, part)) for state in (four, one))
    assert_close(parts, expected, rtol=1e-5, atol=1e-6)
  assert four.model_state["steps"] == 3 and four.average[1]["steps"] == 3
  keys = jax.random.key_data(four.model_state["key"])
  assert not np.array_equal(keys, jax.random.key_data(jax.random.key(1)))


@pytest.mark.parametrize("micros", [1, 4])
def test_micro_batches_count_as_one_step(micros):
  loss_fn = with_state(lambda s, *_: s | same_on_all(s) | {"teacher": 0.5 * s["teacher"] + 1})
  state, _ = train(loss_fn, make=init(queue), num_microbatches=micros, steps=3)
  assert state.model_state["steps"] == 3 and state.model_state["warm"]
  assert state.model_state["steps"].dtype == jnp.uint8
  np.testing.assert_array_equal(state.model_state["teacher"].astype(float), 1.75)


def scanned(queue, rows):
  return lax.scan(lambda q, x: (jnp.roll(q, 1, 0).at[0].set(x), None), queue, rows)[0]


def one_more(n):
  return n + 1


# What the new value of a leaf of the state is made of: state, parameters, batch, keys.
DIFFERS = {
  "queue": lambda s, p, b, k: jnp.resize(b["image"] @ p["w"], (32, 3)),
  "pointer": lambda s, p, b, k: (b["label"] > 0).sum(dtype=jnp.int32),
  "steps": lambda s, p, b, k: s["steps"] + lax.axis_index("data").astype(jnp.uint8),
  "warm": lambda s, p, b, k: (b["label"] > 0).all(),
  "key": lambda s, p, b, k: k[0],
  "teacher": lambda s, p, b, k: lax.ppermute(s["teacher"], "data", [(0, 1)]),
  "queue half gathered": lambda s, p, b, k: jnp.resize(
    lax.psum(b["image"], "replica") @ p["w"], (32, 3)
  ),
  "queue of a scan": lambda s, p, b, k: scanned(s["queue"], b["image"] @ p["w"]),
  "pointer of a branch": lambda s, p, b, k: lax.cond(
    b["label"][0] > 0, one_more, lambda n: n + 0, s["pointer"]
  ),
  "pointer of a while": lambda s, p, b, k: lax.while_loop(
    lambda n: n < b["label"][0], one_more, s["pointer"]
  ),
}


@pytest.mark.parametrize("name", DIFFERS)
def test_state_that_differs_between_devices_is_refused_by_name(name):
  leaf = name.split()[0]

  loss_fn = with_state(lambda s, *rest: s | {leaf: DIFFERS[name](s, *rest)})
  for num_devices in (1, 4):
    line = f"^model state {leaf} differs between devices; .*all_gather.*'batch_stats'"
    with config_error(match=line):
      train(loss_fn, num_devices, make=init(queue))


def test_a_queue_of_several_micro_batches_is_refused():
  with config_error(match=r"queue depends on the rows.*accumulate_steps=1"):
    train(with_state(gathered), make=init(queue), num_microbatches=2)


def test_state_of_another_shape_or_dtype_is_refused():
  for changed, line in (
    ({"steps": 1.0}, r"state steps is uint8\[\] before a step and float32\[\] after it"),
    ({"pointer": jnp.zeros(2, int)}, r"pointer is int32\[\] before a step and int32\[2\] after"),
    ({"more": 1}, "has different leaves after a step: more; return the leaves"),
  ):
    with config_error(match=line):
      train(with_state(lambda s, *_, changed=changed: s | changed), make=init(queue))


def test_workers_that_train_alone_keep_the_dtypes_of_the_state():
  mesh, tx = make_mesh(devices=jax.devices()[:4]), optax.sgd(0.1)
  batch = on_mesh(mesh, BATCH)
  loss_fn = with_state(lambda s, *_: s | same_on_all(s))
  state, step = training(loss_fn, init(queue), tx, mesh, local=local_sgd(2))
  for _ in range(4):
    state, _ = step(state, batch)
  assert state.model_state["steps"] == 4
  kinds, wanted = ([x.dtype for x in jax.tree.leaves(t)] for t in (state.model_state, queue()))
  assert kinds == wanted
  state, step = training(LOSSES["mean"], init(), tx, mesh, local=local_sgd(2))
  with config_error(match=r"^loss_fn returns .*; sum over the rows"):
    step(state, batch)


def mapped(function):
  return lambda grads, state: (jax.tree.map(function, grads), state)


SCALAR = r"returns float32\[\] for the gradient float32\[6, 3\] of w; return the mean"
EXCHANGES = [
  (lambda g, s: (g, s), "leaves the gradient of w different along .*pmean"),
  (lambda g, s: (lax.pmean(g, "replica"), s), "of w different along .'data',.; av"),
  (lambda g, s: (lax.pmean(list(g.values()), AXES), s), "returns a tree unlike"),
  (mapped(lambda x: lax.pmean(x.sum(), AXES)), SCALAR),
  (mapped(lambda x: lax.psum(x.astype("bfloat16"), AXES)), "returns bfloat16"),
]


@pytest.mark.parametrize("exchange, line", EXCHANGES)
def test_an_exchange_that_gives_no_means_is_refused(exchange, line):
  with config_error(match=f"^exchange .*{line}"):
    train(summed, exchange=Exchange(lambda params: (), exchange))
