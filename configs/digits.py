from jaxscale.config import CNN, Config, Cosine, Digits, Evaluation, Log, SGD


def get_config() -> Config:
  return Config(
    model=CNN(features=(32, 64), dense=128),
    data=Digits(),
    optimizer=SGD(lr=0.1, weight_decay=1e-4),
    schedule=Cosine(warmup_epochs=2),
    batch_size=128,
    epochs=40,
    target_accuracy=0.97,
    evaluation=Evaluation(every_epochs=5),
    log=Log(every_steps=50),
  )
