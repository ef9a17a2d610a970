"""Models of each library, as their users write them: the same losses on any number of devices."""

import functools

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import load_file

from jaxscale import config as cfg
from jaxscale import data, models, weights
from jaxscale.experiment.build import experiment
from jaxscale.optim.tree_paths import path_name
from jaxscale.training.losses import Objective
from support.configs import small_config
from support.errors import config_error
from support.steps import on_mesh
from support.trees import assert_same_bits

RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 16)).astype("float32")
Y = RNG.integers(0, 3, 64)
W = 64  # so that FSDP splits the first kernel


@pytest.fixture(autouse=True)
def standard():
  """Equinox and Haiku need JAX's usual promotion of dtypes."""
  with jax.numpy_dtype_promotion("standard"):
    yield


class Linen(nn.Module):
  norm: bool = True
  rate: float = 0.2

  @nn.compact
  def __call__(self, x, train):
    x = nn.Dense(W)(x)
    x = nn.BatchNorm(use_running_average=not train)(x) if self.norm else x
    x = nn.Dropout(self.rate, deterministic=not train)(nn.relu(x))
    return nn.Dense(3)(x)


class Nnx(nnx.Module):
  def __init__(self, norm=True, rate=0.2, *, rngs):
    self.layers = nnx.List([nnx.Linear(16, W, rngs=rngs), nnx.Linear(W, 3, rngs=rngs)])
    self.norm = nnx.BatchNorm(W, rngs=rngs) if norm else nnx.data(None)
    self.drop = nnx.Dropout(rate, rngs=rngs)
    self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

  def __call__(self, x):
    self.calls[...] += 1
    x = self.layers[0](x)
    x = x if self.norm is None else self.norm(x)
    return self.layers[1](self.drop(nnx.relu(x)))


class Eqx(eqx.Module):
  layers: list
  norm: eqx.nn.BatchNorm | None
  drop: eqx.nn.Dropout

  def __init__(self, norm="batch", rate=0.2, *, key):
    a, b = jax.random.split(key)
    self.layers = [eqx.nn.Linear(16, W, key=a), eqx.nn.Linear(W, 3, key=b)]
    self.norm = eqx.nn.BatchNorm(W, "batch", mode=norm) if norm else None
    self.drop = eqx.nn.Dropout(rate)

  def __call__(self, x, state, *, key):
    x = self.layers[0](x)
    if self.norm is not None:
      x, state = self.norm(x, state)
    return self.layers[1](self.drop(jax.nn.relu(x), key=key)), state


def haiku_net(x, is_training, norm=True, rate=0.2):
  x = hk.Linear(W)(x)
  x = hk.BatchNorm(True, True, 0.9)(x, is_training) if norm else x
  x = jax.nn.relu(x)
  x = hk.dropout(hk.next_rng_key(), rate, x) if is_training else x
  return hk.Linear(3)(x)


def init(key):
  a, b = jax.random.split(key)
  params = {"w": 0.3 * jax.random.normal(a, (16, W)), "head": jax.random.normal(b, (W, 3))}
  return params, {}


def apply(params, model_state, x, train, keys, rate=0.2):
  x = models.dropout(jax.nn.relu(x @ params["w"]), rate, keys if train else None, 0)
  return x @ params["head"], model_state


MODELS = {
  "linen": Linen,
  "nnx": lambda *a: functools.partial(Nnx, *a),
  "equinox": lambda norm=True, rate=0.2: functools.partial(Eqx, norm and "batch", rate),
  "equinox, ema": lambda norm=True, rate=0.2: functools.partial(Eqx, norm and "ema", rate),
  "haiku": lambda *a: hk.transform_with_state(lambda x, is_training: haiku_net(x, is_training, *a)),
  "functions": lambda norm=False, rate=0.2: (init, functools.partial(apply, rate=rate)),
}


class Of(cfg.Model):
  """A model of a library.

  Attributes:
    make: a function that returns it.
  """

  make: object

  def build(self, context):
    return self.make()


class Normed(Of):
  """A model whose BatchNorm follows `bn_span`.

  Attributes:
    bn_span: examples that share statistics.
  """

  batch_norm = True
  bn_span: object = "global"


def made_of(model, num_devices=1, **other):
  usual = dict(data=cfg.Arrays(x=X, y=Y, eval_share=0.5), schedule=cfg.Steps())
  config = small_config(model=model, **usual | other)
  return experiment(config, devices=jax.devices()[:num_devices])


def trained(made, steps=10, state=None):
  """Return the losses and the last state."""
  state, step = made.init_state() if state is None else state, made.compile_train_step()
  start = int(state.step) * 16
  batches, losses = data.train_batches(made.train_data, 16, position=start, seed=0), []
  for _ in range(steps):
    state, metrics = step(state, on_mesh(made.mesh, next(batches)))
    losses.append(float(metrics["loss"]))
  return losses, state


FSDP = {"mesh": cfg.Mesh(fsdp=4, data=2), "layout": cfg.Layout(shard="fsdp")}
FSDP4 = {"mesh": cfg.Mesh(fsdp=4, data=1), "layout": cfg.Layout(shard="fsdp")}
FAST, ALL = [(8, FSDP)], [(4, {}), (4, FSDP4), (8, {}), (8, FSDP)]
TABLE = [("nnx", FAST), ("equinox", FAST), ("haiku", FAST)]
TABLE += [pytest.param(name, ALL, marks=pytest.mark.slow) for name in MODELS]


@pytest.mark.parametrize("name, layouts", TABLE)
def test_losses_are_equal_on_any_number_of_devices(name, layouts):
  """The model itself, and nothing more, is a user's code; BatchNorm and dropout are in it."""
  model = Normed(make=MODELS[name])
  one, _ = trained(made_of(model))
  assert one[-1] < 0.7 * one[0]
  for num_devices, layout in layouts:
    made = made_of(model, num_devices, **layout)
    losses, state = trained(made)
    np.testing.assert_allclose(losses, one, rtol=1e-6, atol=1e-6)
    assert not made.notes
  split = [x for x in jax.tree.leaves(state.params) if not x.is_fully_replicated]
  assert split, "FSDP splits no parameter"


@pytest.mark.parametrize("name", [name for name in MODELS if name != "functions"])
def test_a_batch_norm_of_each_device_is_named(name):
  (note,) = made_of(Of(make=MODELS[name]), 2).notes
  assert "BatchNorm; set batch_norm and bn_span in the settings class) processes the r" in note
  made_of(Normed(make=MODELS[name], bn_span="device"), 2)  # the user chose it
  if name != "linen":
    with config_error("cannot normalise groups of 4 rows of a device; use 'device', 'global'"):
      made_of(Normed(make=MODELS[name], bn_span=4), 2)


PLAIN = {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0}


def library_losses(name, batches):
  """Return losses of the library alone, as its documentation trains, from the same parameters."""
  key, tx = jax.random.key(0), optax.sgd(0.1)  # `Config.seed` is 0

  def entropy(logits, y):
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

  losses = []
  if name == "nnx":
    net = Nnx(True, 0.0, rngs=nnx.Rngs(key))
    optimizer = nnx.Optimizer(net, tx, wrt=nnx.Param)
    for x, y in batches:
      loss, grads = nnx.value_and_grad(lambda net, x=x, y=y: entropy(net(x), y))(net)
      optimizer.update(net, grads)
      losses.append(float(loss))
    return losses
  if name.startswith("equinox"):
    net, state = eqx.nn.make_with_state(MODELS[name](True, 0.0))(key=key)
    params, static = eqx.partition(net, eqx.is_inexact_array)

    def of(params, state, x, y):
      net = functools.partial(eqx.combine(params, static), key=jax.random.key(0))
      net = jax.vmap(net, (0, None), (0, None), axis_name="batch")
      logits, state = net(x, state)
      return entropy(logits, y), state
  elif name == "linen":
    variables = dict(Linen(True, 0.0).init(key, X[:1], False))
    params, state = variables.pop("params"), variables

    def of(params, state, x, y):
      call = {"params": params, **state}
      logits, state = Linen(True, 0.0).apply(call, x, True, mutable=["batch_stats"])
      return entropy(logits, y), dict(state)
  else:
    net = MODELS["haiku"](True, 0.0)
    params, state = net.init(key, X[:1], True)

    def of(params, state, x, y):
      logits, state = net.apply(params, state, key, x, True)
      return entropy(logits, y), state

  opt_state, gradient = tx.init(params), jax.jit(jax.value_and_grad(of, has_aux=True))
  for x, y in batches:
    (loss, state), grads = gradient(params, state, x, y)
    updates, opt_state = tx.update(grads, opt_state)
    params = optax.apply_updates(params, updates)
    losses.append(float(loss))
  return losses


@pytest.mark.parametrize("name", [name for name in MODELS if name != "functions"])
def test_losses_equal_those_of_the_library_alone(name):
  made = made_of(Normed(make=lambda: MODELS[name](True, 0.0)), 4, optimizer=cfg.SGD(**PLAIN))
  rows = data.train_batches(made.train_data, 16, position=0, seed=0)
  batches = [(b["image"], b["label"]) for b, _ in zip(rows, range(3), strict=False)]
  expected = library_losses(name, batches)
  np.testing.assert_allclose(trained(made, 3)[0], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["nnx", "equinox", "equinox, ema", "haiku"])
def test_export_has_the_modules_paths_and_is_read_back(name, tmp_path):
  made = made_of(Normed(make=MODELS[name]))
  _, state = trained(made, 2)
  path = tmp_path / "model.safetensors"
  weights.export_safetensors(path, state.params, state.model_state)
  paths = {
    "nnx": ["params/layers/0/kernel", "batch_stats/norm/mean", "state/drop/rngs/key"],
    "equinox": ["params/layers/0/weight", "batch_stats/norm/batch_state_index/0"],
    "equinox, ema": ["params/norm/weight", "state/norm/ema_first_time_index"],
    "haiku": ["params/linear_1/w", "batch_stats/batch_norm/~/mean_ema/average"],
  }
  held = load_file(path)
  assert {*paths[name]} <= held.keys()
  for where, x in jax.tree.leaves_with_path((state.params, state.model_state)):
    where = path_name(where[1:])
    same = held[where if where in held else f"params/{where}"]
    assert same.dtype == x.dtype and np.array_equal(same, x)
  again = made_of(Normed(make=MODELS[name]), 2, init_from=str(path), seed=1)
  read = again.init_state()
  assert_same_bits(read.params, state.params)
  assert_same_bits(read.model_state, state.model_state)


GIVEN = {
  "nnx": lambda: Nnx(False, rngs=nnx.Rngs(7)),
  "equinox": lambda: Eqx(None, key=jax.random.key(7)),
}


@pytest.mark.parametrize("name", GIVEN)
def test_a_module_with_its_own_parameters_is_noted_and_keeps_them(name):
  first = GIVEN[name]().layers[0]
  first = first.kernel[...] if name == "nnx" else first.weight
  made = made_of(Of(make=GIVEN[name]))
  (note,) = made.notes
  assert "has its own initial parameters, which do not depend on Config.seed; return" in note
  kernel = next(x for x in jax.tree.leaves(made.init_state().params) if x.shape == first.shape)
  np.testing.assert_array_equal(kernel, first)


class Towers(nnx.Module):
  def __init__(self, rngs):
    self.photo, self.text = nnx.Linear(16, 4, rngs=rngs), nnx.Embed(5, 4, rngs=rngs)

  def __call__(self, photo, caption=None):
    return {"photo": self.photo(photo), "text": self.text(caption).mean(1)}


class Pairs(cfg.Data):
  def build(self):
    arrays = {"photo": X, "caption": Y[:, None] + np.arange(2), "label": Y}
    return data.from_named("pairs", arrays), data.from_named("pairs", arrays)


class Sum(cfg.Loss):
  def build(self, info):
    def loss(outputs, batch):
      return ((outputs["photo"] - outputs["text"]) ** 2).sum(-1)

    return Objective(loss)


class Picked(Of):
  def inputs(self, batch):
    return batch["photo"], batch["caption"]


class Named(Towers):
  def __call__(self, picture, caption):
    return super().__call__(picture, caption)


class Lost(Towers):
  def __call__(self, photo, caption):
    return super().__call__(photo, caption)["photo"].mean(0)


def test_a_model_gets_the_arrays_that_its_call_names_or_that_its_settings_pick():
  options = {"data": Pairs(), "loss": Sum()}
  one, _ = trained(made_of(Of(make=lambda: Towers), **options))
  four, _ = trained(made_of(Of(make=lambda: Towers), 4, **options))
  np.testing.assert_allclose(one, four, rtol=1e-6)
  np.testing.assert_array_equal(trained(made_of(Picked(make=lambda: Named), **options))[0], one)
  with config_error("Of.build: Named.__call__ requires 'picture', but the data has label, photo"):
    made_of(Of(make=lambda: Named), **options)
  with config_error("the model's output has shape [4] for 16 rows; return one value per row"):
    made_of(Of(make=lambda: Lost), **options)
  with config_error("Of.build returned int; return a Flax Linen module, an NNX module or a fun"):
    made_of(Of(make=lambda: 3))


def test_images_are_normalised_for_a_module_as_for_its_settings():
  pictures = np.arange(64 * 16, dtype=np.uint8).reshape(64, 16)
  arrays = cfg.Arrays(x=pictures, y=Y, eval_share=0.5, mean=(100.0,), std=(50.0,))
  seen = (pictures[:2] - np.float32(100)) / np.float32(50)

  class Image(Of):
    def inputs(self, batch):
      return batch["image"]

  def identity(image):
    return image

  for kind in (Of, Image):
    model = kind(make=lambda: hk.transform(identity))
    made = made_of(model, data=arrays)
    fns = made.model
    outputs, _ = fns.apply({}, {}, fns.inputs({"image": jnp.asarray(pictures[:2])}), False, None)
    np.testing.assert_allclose(outputs, seen, rtol=1e-6)
