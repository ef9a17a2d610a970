"""SGD, LARS and LAMB on Fashion-MNIST at large batch.

Command    python benchmarks/large_batch.py runs all of it, three seeds each; one is
           jaxscale train
             --config configs/fashion_mnist_large_batch.py:lars-16384
           after `make fashion_mnist`
Hardware   2 Xeon cores, 10 to 35 s per run
Result     validation accuracy, mean of 3 seeds, 2026-11-21: 89.90 % at 256 (all
           in docs/large_batch.md); at 8,192 SGD diverges with the scaled rate, 85.13 %
           with a tuned one, LARS 87.08 %, LAMB 88.58 %; at 16,384 the same: 81.76,
           85.13, 86.54 %
"""

from jaxscale.config import (
  LAMB,
  LARS,
  MLP,
  SGD,
  TFDS,
  Checkpoint,
  Config,
  Evaluation,
  Log,
  Polynomial,
)
from jaxscale.errors import ConfigError

EPOCHS, WARMUP_EPOCHS = 30, 5
# Peak rates at the batch itself. Linear scaling takes SGD from 0.1 at 256 to 3.2 and
# 6.4. The others are the best of three to five, by the validation accuracy that the
# table shows, which favours all of them alike, but not SGD at 256. Rates that
# did well with seed 0 alone (SGD 0.32, LARS 20 at 8,192) fell apart with the next.
LR = {
  "sgd-256": 0.1,
  "sgd-8192": 3.2,
  "sgd-16384": 6.4,
  "sgd_tuned-8192": 0.2,
  "sgd_tuned-16384": 0.2,
  "lars-8192": 10.0,
  "lars-16384": 15.0,
  "lamb-8192": 0.04,
  "lamb-16384": 0.04,
}


def get_config(name: str = "sgd-256") -> Config:
  if name not in LR:
    raise ConfigError(f"fashion_mnist_large_batch.py:{name}: give one of {', '.join(LR)}")
  kind, batch = name.split("-")
  optimizers = {
    "sgd": lambda lr: SGD(lr=lr, weight_decay=5e-4),
    "sgd_tuned": lambda lr: SGD(lr=lr, weight_decay=5e-4),
    "lars": lambda lr: LARS(lr=lr, weight_decay=5e-4),
    "lamb": lambda lr: LAMB(lr=lr, weight_decay=1e-2),
  }
  return Config(
    model=MLP(hidden=(256, 128)),
    data=TFDS(name="fashion_mnist", cache=True),
    optimizer=optimizers[kind](LR[name]),
    schedule=Polynomial(warmup_epochs=WARMUP_EPOCHS, end_lr=0.0),
    batch_size=int(batch),
    epochs=EPOCHS,
    accumulate_steps=4,  # as many gradients for the noise scale
    noise_scale=True,
    evaluation=Evaluation(every_epochs=5),
    checkpoint=Checkpoint(every_epochs=EPOCHS, keep_last=1, keep_best=0),
    log=Log(every_steps=10, tensorboard=False),
  )
