"""Six optimizers from small to large batches, on images and on text.

Command    python benchmarks/large_batch.py runs all of it, three seeds each; one is
           jaxscale train --config configs/large_batch.py:images-muon-16384
           after `make fashion_mnist`; text needs no download
Hardware   TODO
Result     TODO
"""

import dataclasses
import math
from typing import Any

from jaxscale.config import (
  CNN,
  LAMB,
  LARS,
  SGD,
  SOAP,
  TFDS,
  AdamW,
  ByBranch,
  ByNoiseScale,
  Checkpoint,
  Config,
  Cosine,
  Evaluation,
  Growing,
  Log,
  Muon,
  Optimizer,
  Text,
  Transformer,
)
from jaxscale.errors import ConfigError

HALF: Any = {"image_size": 14, "eval_view": "bilinear", "eval_crop": 1.0}  # of each side
LOG = Log(every_steps=20, tensorboard=False, plot=False)
DECAY = {"images": 0.01, "text": 0.1}  # of AdamW, Muon and SOAP
# Rules of growing batches, by the number of decisions per run where they measure.
GROWTH = {"schedule": None, "branches": ByBranch(steps=16), "noise": ByNoiseScale()}
# Peak rates: the best of four with seed 100, by the validation of the table.
LR: dict[str, dict[int, float]] = {
  "images-sgd": {256: 0.05, 1536: 0.1, 4096: 0.2, 8192: 0.2, 16384: 0.2},
  "images-lars": {256: 4.0, 1536: 8.0, 4096: 8.0, 8192: 16.0, 16384: 16.0},
  "images-lamb": {256: 0.01, 1536: 0.02, 4096: 0.04, 8192: 0.04, 16384: 0.04},
  "images-adamw": {256: 0.004, 1536: 0.008, 4096: 0.008, 8192: 0.016, 16384: 0.016},
  "images-muon": {256: 0.004, 1536: 0.008, 4096: 0.016, 8192: 0.016, 16384: 0.032},
  "images-soap": {256: 0.004, 1536: 0.008, 4096: 0.008, 8192: 0.016, 16384: 0.016},
  "text-sgd": {16: 0.5, 128: 0.5, 512: 0.5},
  "text-lars": {16: 8.0, 128: 16.0, 512: 16.0},
  "text-lamb": {16: 0.01, 128: 0.02, 512: 0.04},
  "text-adamw": {16: 0.004, 128: 0.008, 512: 0.008},
  "text-muon": {16: 0.004, 128: 0.008, 512: 0.016},
  "text-soap": {16: 0.004, 128: 0.008, 512: 0.008},
}


def get_config(name: str = "images-lamb-4096") -> Config:
  """Return the config of a task, an optimizer and a batch size.

  Args:
    name: e.g. "text-muon-512"; or with a rule of `GROWTH`, e.g. "text-adamw-16-branches", for a
      batch that grows to at most 16 times its size at the start.
  """
  task, optimizer, size, growth = [*name.split("-"), "", "", ""][:4]
  rates = LR.get(f"{task}-{optimizer}", {})
  if not size.isdigit() or int(size) not in rates or growth not in ("", *GROWTH):
    known = "; ".join(f"{key}-{'|'.join(map(str, each))}" for key, each in LR.items())
    raise ConfigError(f"large_batch.py:{name}: give one of {known}, or add -{'|-'.join(GROWTH)}")
  made = TASKS[task](_optimizer(task, optimizer, rates[int(size)]), int(size))
  return _growing(made, growth) if growth else made


def _optimizer(task: str, name: str, lr: float) -> Optimizer:
  decay = DECAY[task]
  optimizers = {
    "sgd": SGD(lr=lr, weight_decay=5e-4),
    # Biases take the rate without the ratio; with the default of 1e-3 it would be 2 and more.
    "lars": LARS(lr=lr, trust_coefficient=0.02, weight_decay=5e-4),
    "lamb": LAMB(lr=lr, weight_decay=0.01),
    "adamw": AdamW(lr=lr, b2=0.95, weight_decay=decay),
    "muon": Muon(lr=lr, b2=0.95, weight_decay=decay),
    "soap": SOAP(lr=lr, weight_decay=decay),
  }
  return optimizers[name]


def _images(optimizer: Optimizer, batch_size: int) -> Config:
  return Config(
    model=CNN(features=(16, 32), dense=32),  # 0.26 M multiply-adds per image
    data=TFDS(name="fashion_mnist", cache=True, mean=(73.4,), std=(80.4,), **HALF),
    optimizer=optimizer,
    schedule=Cosine(warmup_epochs=1),
    batch_size=batch_size,
    epochs=10,
    # Micro-batches of 512 fit the caches of a CPU; the steps are the same.
    accumulate_steps=max(1, batch_size // 512),
    target_accuracy=0.85,
    evaluation=Evaluation(every_epochs=1),
    checkpoint=Checkpoint(every_epochs=10, keep_last=1, keep_best=0),
    log=LOG,
  )


def _text(optimizer: Optimizer, batch_size: int) -> Config:
  return Config(
    model=Transformer(num_layers=2, width=64, num_heads=4, hidden=192),
    data=Text(sequence_length=64),
    optimizer=optimizer,
    schedule=Cosine(warmup_epochs=0.2),
    batch_size=batch_size,
    epochs=2,
    clip_norm=1.0,
    target_loss=2.3 * math.log(2),  # 2.3 bits per byte
    evaluation=Evaluation(every_epochs=0.25),
    checkpoint=Checkpoint(every_epochs=2, keep_last=1, keep_best=0),
    log=LOG,
  )


def _growing(made: Config, rule: str) -> Config:
  """Return the config with a batch that grows, which is measured ten times per run."""
  phases: Any = Growing(max_batch_size=16 * made.batch_size)
  if rule != "schedule":
    when = dataclasses.replace(GROWTH[rule], every_epochs=(made.epochs or 1) / 10)
    phases = dataclasses.replace(phases, when=when)
  measured: dict[str, Any] = {"noise_scale": True, "accumulate_steps": 2}
  return dataclasses.replace(made, phases=phases, **measured if rule == "noise" else {})


TASKS = {"images": _images, "text": _text}
