"""A language model of 1.1 billion parameters, TinyLlama's, on 16 chips by FSDP.

Command    srun jaxscale train --config configs/llama_1b.py
           --config.data.path=DIR: DIR/train.bin and DIR/val.bin are tokens below
           32,000 as nanoGPT keeps them (uint16)
Hardware   16 TPU v5e; `configs/llama_1b.py:h100` for 16 H100 in 2 hosts
Result     never run. Compiled ahead of time: 7.98 of the 15.75 GiB of a TPU v5e (jax
           0.10.2, libtpu 0.0.51). With `:h100` remat is dots_attention, by an estimate
           of 40.5 of the 71.2 GiB of an H100, which was not compiled. What is
           communicated is in docs/parallelism.md

Sizes, optimizer and batch of 2 million tokens are TinyLlama's (arXiv:2401.02385, §2).
"""

from jaxscale.config import AdamW, Config, Cosine, Evaluation, Layout, Mesh, TextFiles, Transformer

DEVICES = 16
# Rows of a micro-batch on a device. XLA's attention, TPUs' here, writes the scores of
# all pairs of tokens: 0.5 GB per row. cuDNN's does not.
ROWS = {"v5e": 4, "h100": 16}
REMAT = {"v5e": "full", "h100": None}  # None: what the memory of the devices allows
# Between nodes of GPUs gradients are summed once per step, after all micro-batches; gathers
# stay within a node of 8.
MESH = {"v5e": Mesh(data=1, fsdp=-1), "h100": Mesh(replica=-1, data=1, fsdp=8)}


def get_config(chips: str = "v5e") -> Config:
  batch_size = 1024  # 2 million tokens
  return Config(
    model=Transformer(num_layers=22, width=2048, num_heads=32, num_kv_heads=4, hidden=5632),
    data=TextFiles(path="slimpajama", vocab_size=32_000, sequence_length=2048),
    optimizer=AdamW(lr=4e-4, b1=0.9, b2=0.95, weight_decay=0.1),
    schedule=Cosine(warmup_epochs=0.01, end_lr=4e-5),
    clip_norm=1.0,
    batch_size=batch_size,
    accumulate_steps=batch_size // (DEVICES * ROWS[chips]),
    epochs=1,
    dtype="bfloat16",
    mesh=MESH[chips],
    layout=Layout(shard="fsdp", remat=REMAT[chips]),
    evaluation=Evaluation(every_epochs=0.05, batch_size=256),
  )
