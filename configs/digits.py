"""The quickstart: a small CNN on the embedded UCI digits, in seconds.

Command    jaxscale train --config configs/digits.py   (make train)
Hardware   2 CPU cores (Xeon), jax 0.10.2, Python 3.11
Time       seconds (docs/measured.md)
Result     98.06 % of the 360 validation digits (target 97 %)
"""

from jaxscale.config import CNN, SGD, Checkpoint, Config, Cosine, CrossEntropy, Digits, Evaluation


def get_config() -> Config:
  return Config(
    model=CNN(features=(32, 64), dense=128, dropout=0.5),
    data=Digits(augment="shift"),
    optimizer=SGD(lr=0.1, momentum=0.9, weight_decay=5e-4),
    schedule=Cosine(warmup_epochs=2),
    batch_size=128,
    epochs=40,
    loss=CrossEntropy(label_smoothing=0.1),
    ema_decay=0.98,
    target_accuracy=0.97,
    evaluation=Evaluation(every_epochs=5),
    checkpoint=Checkpoint(every_epochs=5),
  )
