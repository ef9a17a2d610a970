"""MLPerf's log of runs that nobody trained."""

import time

from jaxscale import metrics

# What config.json says of configs that MLPerf's closed division allows.
LARS = {"class": "LARS", "momentum": 0.9, "weight_decay": 2e-4, "eps": 0.0}
SGD = {"class": "SGD", "momentum": 0.9, "weight_decay": 1e-4, "nesterov": False}
LAMB = {"class": "LAMB", "b1": 0.9, "b2": 0.999, "eps": 1e-6, "weight_decay": 1e-2}


def described(optimizer, batch_size=4096, **schedule):
  poly = {"class": "Polynomial", "warmup_epochs": 5.0, "end_lr": 1e-4, "power": 2.0}
  config = {
    "model": {"class": "ResNet", "depth": 50, "bn_span": 64},
    "optimizer": optimizer,
    "schedule": poly | schedule,
    "evaluation": {"every_epochs": 4.0, "batch_size": 1000},
    "batch_size": batch_size, "epochs": 12.0, "accumulate_steps": 2, "seed": 3,
    "target_accuracy": 0.759, "clip_norm": None,
  }  # fmt: skip
  steps = -(-12 * 1_281_167 // batch_size)
  derived = {
    "num_train": 1_281_167, "num_eval": 50_000, "peak_lr": 10.0,
    "total_steps": steps, "warmup_steps": round(5 * 1_281_167 / batch_size),
    "num_devices": 8, "micro_batch_size": 256,
    "phases": [
      {"start": 0, "stop": steps, "batch_size": batch_size, "accumulate_steps": 4}
    ],  # on half of the devices that the run began on
  }  # fmt: skip
  data = {"name": "imagenet2012"}
  return {
    "config": config, "derived": derived, "data": data, "devices": ["cpu:0"] * 8
  }  # fmt: skip


def write_run(path, optimizer, accuracies, division="closed"):
  """The log of a run that is evaluated every 1,251 steps (4 epochs)."""
  reported = described(optimizer)
  init_ms = time.time() * 1e3 - 5000
  log = metrics.RunLog(
    path, reported, init_ms=init_ms, submission=metrics.Submission(division=division)
  )
  for i, accuracy in enumerate(accuracies, 1):
    step = 1251 * i
    log.evaluating(step, step * 4096 / 1_281_167)
    log.evaluated(accuracy, is_last=i == len(accuracies))
  log.stop(success=accuracies[-1] >= 0.759)
  return metrics.read_mllog(path)
