"""Sharpness-aware minimization of a CNN on the digits.

Command    jaxscale train --config configs/sam.py
Hardware   2 CPU cores (AMD EPYC), jax 0.10.2, Python 3.11
Time       12 s of processor time; 2026-11-27
Result     93.61 % of the 360 validation digits

SAM (arXiv:2010.01412): the gradient is taken where the loss is highest within `rho`, one
step along the gradient of the whole batch. With `accumulate_steps` above 1 each
micro-batch of all devices has its own step.
"""

import jax
import optax
from jax import lax

from jaxscale.config import CNN, SGD, Config, Cosine, CrossEntropy, Digits, Loss, Positive
from jaxscale.training import CustomLoss
from jaxscale.training.losses import training_loss


class SAM(Loss):
  """Cross entropy at the worst point near the parameters.

  Attributes:
    rho: the distance of that point.
  """

  rho: Positive = 0.05

  def build(self, info, context):
    objective = CrossEntropy().build(info)
    loss = training_loss(context.model.apply, objective, context.model.inputs)

    def loss_fn(params, model_state, batch, keys):
      here = lax.stop_gradient(params)
      grads, _ = jax.grad(loss, has_aux=True)(here, model_state, batch, keys)
      grads = lax.psum(grads, context.axes)
      scale = self.rho / optax.tree.norm(grads)
      worst = jax.tree.map(lambda w, g: w + scale * g, params, grads)
      return loss(worst, model_state, batch, keys)

    return CustomLoss(loss_fn, objective)


def get_config() -> Config:
  return Config(
    model=CNN(features=(16, 32), dense=64),
    data=Digits(),
    loss=SAM(),
    optimizer=SGD(lr=0.1),
    schedule=Cosine(warmup_epochs=1),
    batch_size=128,
    epochs=15,
  )
