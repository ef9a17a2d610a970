"""A small language model of bytes, on the text that the package carries.

Command    jaxscale train --config configs/text.py
           jaxscale generate runs/text --prompt "The "
           a layout is e.g. --config.mesh.data=1 --config.mesh.fsdp=2
           --config.mesh.model=4 --config.layout.shard=fsdp
Hardware   2 CPU cores (Xeon), jax 0.10.2, Python 3.11
Result     1.967 bits per byte, accuracy 60.5 %, in 1,013 s on one device while
           other work ran; after 216 steps (epochs=0.4) 3.013 and 41.8 %, under five
           layouts (docs/parallelism.md)
"""

from jaxscale.config import AdamW, Config, Cosine, Text, Transformer


def get_config() -> Config:
  return Config(
    # 8 heads, hidden units and bytes divide by 2, 4 and 8 devices, layers by 2 and 4.
    model=Transformer(num_layers=4, width=128, num_heads=8, hidden=384),
    data=Text(sequence_length=128),
    optimizer=AdamW(lr=3e-3, b2=0.95, weight_decay=0.1),
    schedule=Cosine(warmup_epochs=0.1),
    batch_size=16,
    epochs=3,
    clip_norm=1.0,
  )
