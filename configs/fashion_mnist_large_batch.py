"""How far SGD, LARS and LAMB carry Fashion-MNIST into large batches.

Command    python benchmarks/large_batch.py runs all of it, three seeds each; one is
           python -m jaxscale.train
             --config configs/fashion_mnist_large_batch.py:lars-16384
           after `make fashion_mnist`
Hardware   not run yet
Result     not run yet
"""

from jaxscale.config import (
  LAMB,
  LARS,
  MLP,
  SGD,
  TFDS,
  Checkpoint,
  Config,
  ConfigError,
  Evaluation,
  Log,
  Polynomial,
)

EPOCHS, WARMUP_EPOCHS = 30, 5
NAMES = (
  "sgd-256", "sgd-8192", "lars-8192", "lamb-8192", "sgd-16384", "lars-16384",
  "lamb-16384",
)  # fmt: skip
# Peak rates at 256 (SGD, linear scaling) and at the batch itself.
SGD_LR = 0.05
LARS_LR = {8192: 4.0, 16384: 6.0}
LAMB_LR = {8192: 0.02, 16384: 0.03}


def get_config(name: str = "sgd-256") -> Config:
  if name not in NAMES:
    raise ConfigError(
      f"fashion_mnist_large_batch.py:{name}: give one of {', '.join(NAMES)}"
    )
  kind, size = name.split("-")
  batch = int(size)
  optimizer = {
    "sgd": lambda: SGD(lr=SGD_LR, weight_decay=5e-4),
    "lars": lambda: LARS(lr=LARS_LR[batch], weight_decay=5e-4),
    "lamb": lambda: LAMB(lr=LAMB_LR[batch], weight_decay=1e-2),
  }[kind]()
  return Config(
    model=MLP(hidden=(256, 128)),
    data=TFDS(name="fashion_mnist", cache=True),
    optimizer=optimizer,
    lr_scaling="linear" if kind == "sgd" else "none",
    schedule=Polynomial(warmup_epochs=WARMUP_EPOCHS, end_lr=0.0),
    batch_size=batch,
    epochs=EPOCHS,
    accumulate_steps=4,  # as many gradients for the noise scale
    noise_scale=True,
    evaluation=Evaluation(every_epochs=5),
    checkpoint=Checkpoint(every_epochs=EPOCHS, keep_last=1, keep_best=0),
    log=Log(every_steps=1 if batch > 256 else 100, tensorboard=False),
  )
