"""MoCo on the digits: a momentum encoder as the teacher, and a queue of its embeddings.

Command    jaxscale train --config configs/moco.py
Hardware   2 CPU cores (AMD EPYC), jax 0.10.2, Python 3.11
Time       19 s of processor time; 2026-11-27
Result     finds the shifted image of 28 % of the 360 validation digits

MoCo (arXiv:1911.05722, algorithm 1), without shuffled BatchNorm. The queue keeps the newest
embeddings of all devices and micro-batches; all devices hold the same teacher.
"""

import jax
import jax.numpy as jnp
import optax

from jaxscale import config, models
from jaxscale.training import CustomLoss, Queue
from jaxscale.training.contrastive import contrastive

NET = models.CNNModule(num_classes=32, features=(16, 32), dense=64)


def embed(params, image):
  """Return embeddings of length 1."""
  z = NET.apply({"params": params}, image, True)
  return z / jnp.linalg.norm(z, axis=-1, keepdims=True)


def view(key, image):
  """Return an image in [0, 1], shifted by up to one pixel in each direction, with noise."""
  by, noise = jax.random.split(key)
  image = jnp.roll(image.astype(jnp.float32) / 16, jax.random.randint(by, (2,), -1, 2), (0, 1))
  return image + 0.1 * jax.random.normal(noise, image.shape)


class Encoder(config.Model):
  """A CNN; an evaluation embeds each image and the image shifted by a pixel."""

  def build(self, context):
    def init(key):
      return NET.init(key, jnp.ones((1, 8, 8, 1)), False)["params"], {}

    def apply(params, state, image, train, keys):
      image = image.astype(jnp.float32) / 16
      return (embed(params, image), embed(params, jnp.roll(image, 1, 2))), state

    return models.ModelFns(init, apply)


class MoCo(config.Loss):
  """InfoNCE of a view's embedding with the teacher's of another view and the queue.

  Attributes:
    length: the number of embeddings in the queue.
    momentum: the decay of the teacher.
    temperature: the temperature of the softmax.
  """

  length: config.Count = 1024
  momentum: config.Fraction = 0.99
  temperature: config.Positive = 0.1

  def build(self, info, context):
    def init_state(params, key):
      queue = jax.random.normal(key, (self.length, 32))
      queue /= jnp.linalg.norm(queue, axis=-1, keepdims=True)
      return {"teacher": params, "queue": Queue(queue)}

    def loss_fn(params, state, batch, keys):
      teacher, queue = state.loss["teacher"], state.loss["queue"].rows
      teacher = optax.incremental_update(params, teacher, 1 - self.momentum)
      pairs = jax.vmap(jax.random.split)(keys)
      one, other = (jax.vmap(view)(pairs[:, i], batch["image"]) for i in range(2))
      a, b = embed(params, one), jax.lax.stop_gradient(embed(teacher, other))
      logits = jnp.concatenate([(a * b).sum(-1, keepdims=True), a @ queue.T], -1)
      first = jnp.zeros(len(a), jnp.int32)
      loss = optax.softmax_cross_entropy_with_integer_labels(logits / self.temperature, first).sum()
      state = state._replace(loss={"teacher": teacher, "queue": Queue(b)})
      return loss, (state, {"loss": loss, "examples": len(keys)})

    return CustomLoss(loss_fn, contrastive(temperature=self.temperature), init_state)


def get_config() -> config.Config:
  return config.Config(
    model=Encoder(),
    data=config.Digits(augment="none"),
    loss=MoCo(),
    optimizer=config.AdamW(lr=1e-3),
    batch_size=128,
    epochs=20,
  )
