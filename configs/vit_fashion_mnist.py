"""A small Vision Transformer on Fashion-MNIST.

Command    jaxscale train --config configs/vit_fashion_mnist.py
           after `make fashion_mnist`, with JAX_NUM_CPU_DEVICES=8 for 8 devices; a
           layout is e.g. --config.mesh.data=2 --config.mesh.fsdp=2
           --config.mesh.model=2 --config.layout.shard=fsdp
Hardware   2 CPU cores (Xeon) as 8 devices, jax 0.10.2, Python 3.11
Result     68.5 % after 211 steps (epochs=0.45, batch_size=128, warm-up of 0.1 epochs),
           under four layouts (docs/parallelism.md); the whole 5 epochs were not run
"""

from jaxscale.config import TFDS, AdamW, Config, Cosine, CrossEntropy, ViT


def get_config() -> Config:
  return Config(
    # Patches of 4 x 4 are 49 tokens; of 10 classes the head has 16, and so divides.
    model=ViT(patch=4, width=64, num_layers=4, num_heads=4, pool="mean", pad_classes_to=8),
    data=TFDS(name="fashion_mnist", augment="flip", cache=True),
    optimizer=AdamW(lr=2e-3, weight_decay=0.05),
    schedule=Cosine(warmup_epochs=0.5),
    batch_size=256,
    epochs=5,
    loss=CrossEntropy(label_smoothing=0.05),
    clip_norm=1.0,
  )
