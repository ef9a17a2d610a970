"""ResNet-50 on a few random images, the config that benchmarks/startup.py starts."""

import numpy as np

from jaxscale.config import SGD, Config, Cosine, Evaluation, ResNet
from jaxscale.data import Arrays


def get_config() -> Config:
  rng = np.random.default_rng(0)
  images = rng.integers(0, 256, (36, 64, 64, 3), np.uint8)
  return Config(
    model=ResNet(depth=50),
    data=Arrays(x=images, y=np.arange(36) % 10),
    optimizer=SGD(lr=0.1),
    schedule=Cosine(warmup_epochs=0.5),
    batch_size=16,
    epochs=1,
    evaluation=Evaluation(batch_size=8),
  )
