"""Models of a user's own: the same on any number of devices, or named if not."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxscale import config as cfg
from jaxscale import data, models
from jaxscale.data.packing import text_windows
from jaxscale.data.stream import of_array
from jaxscale.experiment.build import experiment
from jaxscale.training import contract
from jaxscale.training.losses import Objective, cross_entropy
from support.configs import small_config
from support.errors import config_error
from support.extending import blocks
from support.steps import on_mesh
from support.tiny_stack import VOCAB, tiny_stack

RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 6)).astype("float32")
Y = RNG.integers(0, 3, 64)


class Block(nn.Module):
  rate: float = 0.5
  broadcast: tuple[int, ...] = ()

  @nn.compact
  def __call__(self, x, train):
    x = nn.relu(nn.Dense(16)(x))
    return nn.Dropout(self.rate, self.broadcast, deterministic=not train)(x)


class Plain(nn.Module):
  again: bool = False

  @nn.compact
  def __call__(self, x, train):
    block = nn.remat(Block, static_argnums=(2,)) if self.again else Block
    return nn.Dense(3)(block()(block()(x, train), train))


class Layers(nn.Module):
  """Layers of a scan, whose random numbers Flax splits itself."""

  @nn.compact
  def __call__(self, x, train):
    split = dict(variable_axes={"params": 0}, split_rngs={"params": True, "dropout": True})
    layer = nn.scan(lambda block, x, _: (block(x, train), None), **split, length=2)
    x, _ = layer(Block(), nn.Dense(16)(x), None)
    return nn.Dense(3)(x)


class Norm(nn.Module):
  @nn.compact
  def __call__(self, x, train):
    return nn.Dense(3)(nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x)))


class Own(cfg.Model):
  """A module that is given.

  Attributes:
    module: it.
  """

  module: object

  def build(self, context):
    return self.module


def config_of(model, **other):
  usual = dict(data=cfg.Arrays(x=X, y=Y, eval_share=0.5), schedule=cfg.Steps())
  return small_config(model=model, **usual | other)


def trained(model, num_devices, **other):
  """Return the notes and the parameters after four steps."""
  made = experiment(config_of(model, **other), devices=jax.devices()[:num_devices])
  state, step = made.init_state(), made.compile_train_step()
  batches = data.train_batches(made.train_data, 16, position=0, seed=0)
  for _ in range(4):
    state, metrics = step(state, on_mesh(made.mesh, next(batches)))
  assert np.isfinite(float(metrics["loss"]))
  return made.notes, jax.tree.map(np.asarray, jax.device_get(state.params))


def furthest(a, b):
  pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  return max(np.abs(x - y).max() for x, y in pairs)


@pytest.mark.parametrize("again", [False, True], ids=["plain", "remat"])
def test_flax_dropout_is_the_same_on_any_number_of_devices(again):
  notes, one = trained(Own(module=Plain(again=again)), 1)
  more, eight = trained(Own(module=Plain(again=again)), 8)
  assert furthest(one, eight) < 1e-6 and not notes and not more
  _, without = trained(Own(module=nn.Sequential([nn.Dense(16), nn.Dense(3)])), 1)
  assert furthest(one["Dense_0"], without["layers_1"]) > 1e-3


def masks(module, rows=4096, width=16):
  """Return a module's dropout of ones, each row with a key of its own."""
  fns = models.functions(module, (width,), dtype="float32")
  state = fns.init(jax.random.key(0))
  keys = jax.random.split(jax.random.key(1), rows)
  ones = jnp.ones((rows, width))
  return [np.asarray(fns.apply(*state, ones, t, keys)[0]) for t in (True, False)]


class Twice(nn.Module):
  """Two dropouts of ones, next to each other."""

  rate: float = 0.3
  dims: tuple[int, ...] = ()

  @nn.compact
  def __call__(self, x, train):
    drops = [nn.Dropout(self.rate, self.dims, deterministic=not train) for _ in "ab"]
    self.param("unused", nn.initializers.zeros, (1,))  # `functions` wants parameters
    return jnp.concatenate([drop(x) for drop in drops], -1)


MODES = {"train": 1, "training": 1, "is_training": 1, "deterministic": 0, "use_running_average": 0}


@pytest.mark.parametrize("name, is_on", MODES.items())
def test_the_mode_is_passed_by_each_usual_name(name, is_on):
  lines = f"""
class Net(nn.Module):
  @nn.compact
  def __call__(self, x, {name}):
    self.param("unused", nn.initializers.zeros, (1,))
    return x * int({name})
"""
  exec(lines, space := {"nn": nn})
  in_training, in_evaluation = masks(space["Net"](), rows=2)
  assert (in_training == is_on).all() and (in_evaluation == 1 - is_on).all()


def test_masks_are_of_the_rate_and_differ_by_row_and_layer():
  dropped, kept = masks(Twice())
  assert (kept == 1).all()
  is_kept = dropped > 0
  np.testing.assert_allclose(dropped[is_kept], 1 / 0.7, rtol=1e-6)
  assert is_kept.mean() == pytest.approx(0.7, abs=0.005)
  first, second = is_kept[:, :16], is_kept[:, 16:]
  both = (first & second).mean()
  assert both == pytest.approx(0.49, abs=0.01)  # of independent ones
  assert (is_kept[:-1] & is_kept[1:]).mean() == pytest.approx(0.49, abs=0.01)
  shared, _ = masks(Twice(dims=(1,)))
  assert set(np.unique((shared[:, :16] > 0).mean(1))) == {0.0, 1.0}


def test_what_depends_on_the_number_of_devices_is_named():
  for module, what in (
    (Norm(), "Own: BatchNorm_0 (nn.BatchNorm; set batch_norm and bn_span"),
    (Layers(), "nn.Dropout on inputs without"),
    (Block(broadcast=(0,)), "Own: Dropout_0 (nn.Dropout on inputs"),
  ):
    made = experiment(config_of(Own(module=module)), devices=jax.devices()[:2])
    (note,) = (x for x in made.notes if "results depend on the number of devices" in x)
    assert what in note
  assert "Own: 16 outputs for 3 classes" in made.notes
  notes, one = trained(Own(module=Layers()), 1)
  assert notes and furthest(one, trained(Own(module=Layers()), 8)[1]) > 1e-4


def test_the_page_s_batch_norm_is_the_same_on_any_number_of_devices():
  (code,) = blocks("norm")
  home = {"nn": nn, "config": cfg, "__name__": __name__}
  exec(code, home)  # as a user's file; its class is in this module's name
  model = home["MyNormNet"](bn_span=8)
  notes, one = trained(model, 1)
  assert furthest(one, trained(model, 8)[1]) < 1e-6 and not notes
  assert furthest(one, trained(home["MyNormNet"](bn_span=16), 1)[1]) > 1e-4


class Asks(nn.Module):
  @nn.compact
  def __call__(self, x, mode):
    return nn.Dense(3)(x) * mode


class Calls(nn.Module):
  """A module that is a function of its input."""

  function: Callable

  @nn.compact
  def __call__(self, x):
    return nn.Dense(3)(self.function(x))


CALLED = rf"^{__file__}:\d+: Own \(\w+\)"
UNCALLABLE = {
  "mode": (Asks(), r"Own.build: Asks.__call__ requires 'mode', but the data has image, label; g"),
  "shape": (Calls(lambda x: x.reshape(7, -1)), rf"{CALLED}: TypeError: .*reshape"),
  "norm": (Calls(lambda x: nn.BatchNorm()(x)), rf"{CALLED}: .*running_av"),
  "outputs": (nn.Dense(2), "Own.build gives 2 outputs, but Arrays has 3 classes; use"),
}


@pytest.mark.parametrize("name", UNCALLABLE)
def test_a_model_that_cannot_be_called_is_one_line(name):
  module, line = UNCALLABLE[name]
  with config_error(match=line):
    experiment(config_of(Own(module=module)), devices=jax.devices()[:1])


def test_targets_that_do_not_fit_are_one_line():
  info = data.array_info(X, Y)
  with config_error(match="64 inputs and 60 targets; give the same"):
    data.from_arrays(info, X, Y[:60])
  with config_error(match=r"targets have shape \(1,\) each, but \(\) in info"):
    data.from_arrays(info, X, Y[:, None])
  for wrong in (-2, 3):
    with config_error(f"target {wrong} is out of range [0, 2]; fix the"):
      data.from_arrays(info, X, np.where(np.arange(64) == 5, wrong, Y))
  with config_error("target -1 is out of range [0, 2]; fix the"):
    data.array_info(X, Y - (np.arange(64) == 5) * (Y + 1))
  data.from_arrays(data.array_info(X, -X), X, -X)  # numbers may be anything
  arrays = cfg.Arrays(x=X, y=X[:, 0], eval_share=0.5)
  with config_error("needs integer targets, but they are float32; give"):
    experiment(config_of(cfg.MLP(), data=arrays))


class Functions(cfg.Model):
  """Two functions.

  Attributes:
    name: in `MODELS`.
  """

  name: str

  def build(self, context):
    return MODELS[self.name](context)


def plain(hidden, state=None, head=0.3):
  """Two layers; `hidden` is called with the hidden units, the state and the keys."""

  def init(key):
    a, b = jax.random.split(key)
    params = {"w": 0.3 * jax.random.normal(a, (6, 8)), "head": head * jax.random.normal(b, (8, 3))}
    return params, state or {}

  def apply(params, model_state, x, train, keys):
    h = x @ params["w"]
    return (hidden(h, model_state, keys) if train else h) @ params["head"], model_state

  return lambda context: models.ModelFns(init, apply)


def of_nnx(*layers):
  """Return an NNX model with these layers between two linear ones."""

  class Net(nnx.Module):
    def __init__(self, rngs):
      self.first, self.last = nnx.Linear(6, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)
      self.layers = nnx.List([layer(rngs) for layer in layers])

    def __call__(self, x):
      x = self.first(x)
      for layer in self.layers:
        x = layer(x)
      return self.last(x)

  def make(context):
    kinds = nnx.Param, nnx.BatchStat, ...
    graph, _, _, rest = nnx.split(Net(nnx.Rngs(0)), *kinds)

    def init(key):
      _, params, stats, _ = nnx.split(Net(nnx.Rngs(key)), *kinds)
      return params, stats

    def apply(params, stats, x, train, keys):
      net = nnx.merge(graph, params, stats, rest, copy=True)
      if train:
        net.train()
        nnx.reseed(net, dropout=keys[0])
      else:
        net.eval()
      return net(x), nnx.state(net, nnx.BatchStat)

    return models.ModelFns(init, apply)

  return make


def drop(key, h):
  return h * jax.random.bernoulli(key, 0.5, h.shape).astype(h.dtype)


MIXING = {
  "mean": plain(lambda h, s, k: h - h.mean(0)),
  "behind a head of zeros": plain(lambda h, s, k: h - h.mean(0), head=0.0),
  "maximum": plain(lambda h, s, k: h / jnp.abs(h).max()),
  "the row before": plain(lambda h, s, k: h + jnp.roll(h, 1, 0)),
  "one mask by the first key": plain(lambda h, s, k: drop(k[0], h)),
  "one mask by the last key": plain(lambda h, s, k: drop(k[-1], h)),
  "a mask by the place": plain(lambda h, s, k: drop(jax.random.key(0), h)),
  "a mask of the state": plain(lambda h, s, k: drop(s["key"], h), {"key": jax.random.PRNGKey(3)}),
  "for one batch size": plain(lambda h, s, k: h.reshape(16, 8) - h.mean(0)),
  "nnx.BatchNorm": of_nnx(lambda rngs: nnx.BatchNorm(8, rngs=rngs)),
  "nnx.Dropout": of_nnx(lambda rngs: nnx.Dropout(0.5, rngs=rngs)),
}
ALONE = {
  "rows": plain(lambda h, s, k: h - h.mean(1, keepdims=True)),
  "a mask of each row": plain(lambda h, s, k: models.dropout(h, 0.5, k, 0)),
  "nnx.LayerNorm": of_nnx(lambda rngs: nnx.LayerNorm(8, rngs=rngs)),
}


MODELS = MIXING | ALONE


@pytest.mark.parametrize("name", MIXING)
def test_functions_that_mix_rows_are_named(name):
  """A row depends on the others: what it is in depends on the number of devices."""
  count = 1 if name == "for one batch size" else 2
  made = experiment(config_of(Functions(name=name)), devices=jax.devices()[:count])
  line = "Functions: its model mixes the rows of each device: results"
  assert any(note.startswith(line) for note in made.notes)


@pytest.mark.parametrize("name", ALONE)
def test_functions_of_each_row_are_the_same_on_any_number_of_devices(name):
  notes, one = trained(Functions(name=name), 1)
  assert furthest(one, trained(Functions(name=name), 8)[1]) < 1e-6 and not notes


class Mixed(cfg.Loss):
  """A loss of any function of the cross entropies.

  Attributes:
    of: it.
  """

  of: object

  def build(self, info):
    entropy = cross_entropy().loss
    return Objective(lambda outputs, batch: self.of(entropy(outputs, batch)))


OF_ROWS = [(lambda x: x * (x - x.mean()), True), (lambda x: x - jnp.median(x), True)]
OF_ROWS += [(jnp.sort, True), (jnp.square, False)]


@pytest.mark.parametrize("of, is_noted", OF_ROWS)
def test_a_loss_that_mixes_rows_is_named(of, is_noted):
  config = config_of(cfg.MLP(), loss=Mixed(of=of))
  notes = experiment(config, devices=jax.devices()[:2]).notes
  line = "Mixed: its loss mixes the rows of each device: results depend on the number of"
  assert any(note.startswith(line) for note in notes) == is_noted


def test_a_model_that_cannot_be_tested_is_named(monkeypatch):
  def log(h, state, keys):
    return h * jnp.log(-1 - h**2)

  def count(h, state, keys):
    return h.reshape(16 // jax.lax.axis_size("data"), 8)

  MODELS["log"], MODELS["count"] = plain(log), plain(count)
  for name, reason in (("log", "are not finite"), ("count", "reshape")):
    config = config_of(Functions(name=name))
    (note,) = experiment(config, devices=jax.devices()[:2]).notes
    assert note.startswith("Functions: cannot check whether its model mixes the rows")
    assert reason in note and "\n" not in note
  monkeypatch.setattr(contract, "_ELEMENTS", 20)
  (note,) = experiment(config_of(Functions(name="rows")), devices=jax.devices()).notes
  assert "Functions: cannot check whether its model mixes" in note and "over 20" in note


def test_a_typed_key_is_refused_before_it_is_saved():
  MODELS["key"] = plain(lambda h, s, k: h, {"key": jax.random.key(3)})
  with config_error(match=r"state key is a typed key.*random.key_data"):
    experiment(config_of(Functions(name="key")), devices=jax.devices()[:1])
  noisy = cfg.Optax(lr=0.1, make=lambda rate: optax.noisy_sgd(rate, key=0))
  made = experiment(config_of(cfg.MLP(), optimizer=noisy), devices=jax.devices()[:1])
  with config_error(match=r"optimizer state .* is a typed key.*key_data"):
    made.abstract_state()


class Layered(cfg.Model):
  """A stack.

  Attributes:
    mixes: whether a layer takes the mean of the rows.
  """

  is_stack = True
  takes_text = True
  mixes: bool

  def build(self, context):
    stack = tiny_stack()

    def layer(params, h, ops):
      h = stack.layer(params, h, ops)
      return h - h.mean(0) if self.mixes else h

    return stack._replace(layer=layer)


@pytest.mark.parametrize("mixes", [True, False])
def test_a_stack_that_mixes_rows_is_named(mixes):
  tokens = np.arange(2000, dtype=np.uint16) % VOCAB

  class Text(cfg.Data):
    def build(self):
      return 2 * (text_windows("mine", of_array(tokens, None), VOCAB, 8),)

  config = config_of(Layered(mixes=mixes), data=Text())
  notes = experiment(config, devices=jax.devices()[:2]).notes
  named = [note for note in notes if "mixes the rows" in note]
  assert len(named) == mixes, notes
