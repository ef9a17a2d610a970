"""Distillation of the digits' CNN into a small MLP.

Command    jaxscale train --config configs/digits.py --workdir runs/digits
           jaxscale export runs/digits --to runs/teacher.safetensors
           jaxscale train --config configs/distill.py
Hardware   2 CPU cores (AMD EPYC), jax 0.10.2, Python 3.11
Time       20 s of processor time; 2026-11-27
Result     91.1 % of the 360 validation digits (teacher 98.06 %); the same with
           --config.loss=CrossEntropy

The loss is that of arXiv:1503.02531: cross entropy with the teacher's probabilities at a
temperature, times its square, and cross entropy with the labels.
"""

import jax
import optax

import jaxscale as jxs
from jaxscale import config, models


class Distilled(config.Loss):
  """Cross entropy with the probabilities of a trained model, and with the labels.

  Attributes:
    teacher: the exported parameters of configs/digits.py.
    temperature: the temperature of both models' probabilities.
    hard: the weight of the labels.
  """

  teacher: str = "runs/teacher.safetensors"
  temperature: config.Positive = 4.0
  hard: config.Fraction = 0.1

  def build(self, info, context):
    net = models.CNNModule(num_classes=info.num_classes, features=(32, 64), dense=128, dropout=0.5)
    net = models.functions(net, info.image_shape, mean=info.mean, std=info.std)
    state = jax.jit(net.init)(jax.random.key(0))
    state = jax.device_get(jxs.import_safetensors(self.teacher, *state)[:2])
    usual, t = config.CrossEntropy().build(info), self.temperature

    def loss(logits, batch):
      teacher = net.apply(*state, batch["image"], False, None)[0]
      targets = jax.lax.stop_gradient(jax.nn.softmax(teacher / t))
      soft = optax.softmax_cross_entropy(logits / t, targets)
      return (1 - self.hard) * t**2 * soft + self.hard * usual.loss(logits, batch)

    return usual._replace(loss=loss, eval_loss=usual.loss)


def get_config() -> config.Config:
  return config.Config(
    model=config.MLP(hidden=(128,)),
    data=config.Digits(),
    loss=Distilled(),
    optimizer=config.AdamW(lr=3e-3),
    batch_size=128,
    epochs=40,
  )
