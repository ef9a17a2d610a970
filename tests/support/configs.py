"""Small configs, and the records of their runs."""

from jaxscale import config as cfg
from jaxscale.config.loading import load_config
from jaxscale.config.record import FORMAT, to_plain


def settings(text):
  """Return settings for `load_config` from words `name=value`."""
  return dict(word.split("=") for word in text.split())


def small_config(**fields):
  """Return a config of a small MLP on the digits, with these fields changed."""
  usual = dict(model=cfg.MLP(hidden=(8,)), data=cfg.Digits(), optimizer=cfg.SGD(lr=0.1))
  usual |= dict(batch_size=16, epochs=9, log=cfg.Log(plot=False))
  return cfg.Config(**usual | fields)


def tiny_language(**fields):
  model = cfg.Transformer(num_layers=2, width=32, num_heads=4, hidden=64)
  usual = dict(model=model, data=cfg.Text(sequence_length=16), optimizer=cfg.AdamW(lr=1e-3))
  return cfg.Config(**usual | dict(batch_size=16, epochs=1.0) | fields)


TINY = settings("""
  epochs=4 schedule.warmup_epochs=1 model=MLP model.hidden=(32,) mesh.data=8
  evaluation.every_epochs=2 checkpoint.every_epochs=2 log.every_steps=5
  log.plot=False
""")


def tiny_digits(**changes):
  dotted = {k.replace("__", "."): v for k, v in changes.items()}
  base = dict(TINY)
  if "model" in dotted:
    del base["model.hidden"]
  return load_config("configs/digits.py", base | dotted)


def recorded(config):
  """Return the part of config.json that a resuming run compares."""
  rest = {"data": {"name": "any"}, "derived": {"total_steps": 9, "num_devices": 8}}
  return {"format": FORMAT, "config": to_plain(config)} | rest
