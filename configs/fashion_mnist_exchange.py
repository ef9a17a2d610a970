"""Accuracy with each gradient exchange on Fashion-MNIST.

Command    python benchmarks/exchange_accuracy.py runs all of it, three seeds each; one
           is JAX_NUM_CPU_DEVICES=8 jaxscale train
             --config configs/fashion_mnist_exchange.py:one_bit
           after `make fashion_mnist`
Hardware   2 Xeon cores, 8 simulated devices
Result     validation accuracy, mean of 3 seeds, 2026-11-21 (bytes in docs/exchange.md):
           plain 89.83 %, bfloat16 89.95, int8 89.92, 1-bit 89.96, top-k 1 % 89.40,
           PowerSGD 89.84, one step late 89.61, BMUF 89.75 %
"""

from exchange_power_sgd import PowerSGD
from exchange_top_k import TopK

from jaxscale.config import (
  MLP,
  SGD,
  TFDS,
  AllReduce,
  BlockMomentum,
  Checkpoint,
  Config,
  Cosine,
  DiLoCo,
  Evaluation,
  EveryStep,
  HalfPrecision,
  Int8,
  LocalSGD,
  Log,
  OneBit,
)
from jaxscale.errors import ConfigError

EPOCHS, BATCH = 40, 512
# Gradients one step late are stable at a lower rate only, and want their spikes cut.
# Block momentum of 8 workers carries each way on 1 / (1 - 7/8) times, so that a
# worker's rate is an eighth.
LR, RATES = 0.1, {"delayed": 0.05, "block_momentum": 0.0125}
CLIP_NORM = {"delayed": 1.0}
# Compressed exchanges begin with whole gradients, as CNTK does.
PLAIN_EPOCHS = 1.0
EXCHANGES = {
  "plain": AllReduce(),
  "bf16": HalfPrecision(),
  "fp16": HalfPrecision(dtype="float16"),
  "int8": Int8(),
  "one_bit": OneBit(plain_epochs=PLAIN_EPOCHS),
  "top_k": TopK(plain_epochs=PLAIN_EPOCHS, share=0.01),
  "power_sgd": PowerSGD(plain_epochs=PLAIN_EPOCHS, rank=4),
  "delayed": AllReduce(delayed=True),
}
# 14 steps of 64 examples: tau N^2 is 57,344 of the 60,000 examples there are.
SYNC = {
  "local_sgd": LocalSGD(sync_every_steps=14),
  "diloco": DiLoCo(sync_every_steps=14),
  "block_momentum": BlockMomentum(sync_every_steps=14),
}


def get_config(name: str = "plain") -> Config:
  if name not in EXCHANGES | SYNC:
    raise ConfigError(
      f"fashion_mnist_exchange.py:{name}: give one of {', '.join(EXCHANGES | SYNC)}"
    )
  return Config(
    model=MLP(hidden=(256, 128)),
    data=TFDS(name="fashion_mnist", cache=True),
    optimizer=SGD(lr=RATES.get(name, LR), weight_decay=5e-4),
    schedule=Cosine(warmup_epochs=1),
    batch_size=BATCH,
    epochs=EPOCHS,
    clip_norm=CLIP_NORM.get(name),
    exchange=EXCHANGES.get(name, AllReduce()),
    sync=SYNC.get(name, EveryStep()),
    evaluation=Evaluation(every_epochs=10),
    checkpoint=Checkpoint(every_epochs=EPOCHS, keep_last=1, keep_best=0),
    log=Log(every_steps=100, tensorboard=False),
  )
