"""Models of each library, as their users write them: the same losses on any number of devices."""

import functools

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from flax import nnx

from jaxscale import config as cfg
from jaxscale import data
from support.errors import config_error
from support.libraries import MODELS, Linen, Nnx, Normed, Of, X, made_of, trained


@pytest.fixture(autouse=True)
def standard():
  """Equinox and Haiku need JAX's usual promotion of dtypes."""
  with jax.numpy_dtype_promotion("standard"):
    yield


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
