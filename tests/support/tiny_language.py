"""Config of a small language model, for command-line runs under layouts."""

from jaxscale import config as cfg


def get_config() -> cfg.Config:
  return cfg.Config(
    model=cfg.Transformer(num_layers=4, width=32, num_heads=4, num_kv_heads=2, hidden=64),
    data=cfg.Text(sequence_length=64),
    optimizer=cfg.SGD(lr=0.02, momentum=0.9),
    schedule=cfg.Cosine(warmup_epochs=0.01),
    batch_size=32,
    epochs=0.05,  # 27 steps
    ema_decay=0.9,
    evaluation=cfg.Evaluation(every_epochs=0.025),
    checkpoint=cfg.Checkpoint(every_epochs=0.0037, keep_last=3),  # every second step
    checks=cfg.Checks(replicas_every_steps=10),
    log=cfg.Log(every_steps=1, tensorboard=False, plot=False),
  )
