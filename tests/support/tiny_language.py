"""A config of a small language model, for runs of the command line under layouts."""

from jaxscale.config import (
  SGD,
  Checkpoint,
  Checks,
  Config,
  Cosine,
  Evaluation,
  Log,
  Text,
  Transformer,
)


def get_config() -> Config:
  return Config(
    model=Transformer(num_layers=4, width=32, num_heads=4, num_kv_heads=2, hidden=64),
    data=Text(sequence_length=64),
    optimizer=SGD(lr=0.02, momentum=0.9),
    schedule=Cosine(warmup_epochs=0.01),
    batch_size=32,
    epochs=0.05,  # 27 steps
    ema_decay=0.9,
    evaluation=Evaluation(every_epochs=0.025),
    checkpoint=Checkpoint(every_epochs=0.0037, keep_last=3),  # every second step
    checks=Checks(replicas_every_steps=10),
    log=Log(every_steps=1, tensorboard=False),
  )
