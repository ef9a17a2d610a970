"""Six optimizers from small to large batches, on images and on text.

Command    python benchmarks/large_batch.py runs all of it, three seeds each; one is
           jaxscale train --config configs/large_batch.py:images-muon-16384
           after `make fashion_mnist`; text needs no download
Hardware   2 CPU cores (Xeon), jax 0.10.2, Python 3.11, 2026-11-28; 2.6 hours for all of it
Result     validation accuracy at batch 256 and 16,384: SGD 90.0 and 69.2 %, LARS 89.7 and 72.7,
           LAMB 89.6 and 75.6, AdamW 89.7 and 76.2, Muon 90.5 and 82.9, SOAP 90.2 and 81.2; means
           of three seeds, more in docs/large_batch.md
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
# Peak rates: the best of four with seed 0 (benchmarks/results/large_batch.json).
LR: dict[str, dict[int, float]] = {
  "images-sgd": {256: 0.2, 1536: 0.1, 4096: 0.141, 8192: 0.0705, 16384: 0.03525},
  "images-lars": {256: 0.4, 1536: 0.8, 4096: 1.6, 8192: 0.8, 16384: 1.13},
  "images-lamb": {256: 0.01, 1536: 0.0283, 4096: 0.04, 8192: 0.0566, 16384: 0.0566},
  "images-adamw": {256: 0.008, 1536: 0.064, 4096: 0.064, 8192: 0.064, 16384: 0.016},
  "images-muon": {256: 0.016, 1536: 0.0226, 4096: 0.0639, 8192: 0.0639, 16384: 0.0904},
  "images-soap": {256: 0.016, 1536: 0.016, 4096: 0.0453, 8192: 0.0453, 16384: 0.02265},
  "text-sgd": {16: 0.125, 128: 0.5, 512: 0.125},
  "text-lars": {16: 0.566, 128: 2.264, 512: 2.264},
  "text-lamb": {16: 0.0141, 128: 0.0564, 512: 0.0564},
  "text-adamw": {16: 0.004, 128: 0.004, 512: 0.00566},
  "text-muon": {16: 0.016, 128: 0.0226, 512: 0.032},
  "text-soap": {16: 0.016, 128: 0.016, 512: 0.008},
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
    sizes = (f"{task} {', '.join(map(str, LR[f'{task}-sgd']))}" for task in TASKS)
    optimizers = dict.fromkeys(key.partition("-")[2] for key in LR)
    raise ConfigError(
      f"large_batch.py:{name}: give TASK-OPTIMIZER-SIZE, e.g. images-lamb-4096; optimizers are "
      f"{', '.join(optimizers)}; sizes are of {', of '.join(sizes)}; a batch that grows has one of "
      f"-{', -'.join(GROWTH)} after it"
    )
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
