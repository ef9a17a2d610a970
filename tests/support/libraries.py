"""One model in each library, and short runs of them."""

import functools

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxscale import config as cfg
from jaxscale import data, models
from jaxscale.experiment.build import experiment
from support.configs import small_config
from support.steps import on_mesh

RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 16)).astype("float32")
Y = RNG.integers(0, 3, 64)
W = 64  # so that FSDP splits the first kernel


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
