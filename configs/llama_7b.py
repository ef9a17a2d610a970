"""Llama 2 with 7 billion parameters, on 256 chips.

Command    srun jaxscale train --config configs/llama_7b.py
           --config.data.path=DIR: DIR/train.bin and DIR/val.bin are tokens below
           32,000 as nanoGPT keeps them (uint16)
Hardware   256 TPU v5e; `configs/llama_7b.py:h100` for 256 H100 in 32 hosts
Result     never run. Compiled ahead of time: 10.0 of the 15.75 GiB of a TPU v5e (jax
           0.10.2, libtpu 0.0.51). With `:h100` remat is dots_attention, by an estimate
           of 61.8 of the 71.2 GiB of an H100, which was not compiled; with
           --config.layout.remat=full it was: 22.3 GiB (jax 0.11.2). What is
           communicated is in docs/parallelism.md

Sizes, optimizer and batch of 4 million tokens of arXiv:2307.09288, section 2.2.
"""

from jaxscale.config import AdamW, Config, Cosine, Evaluation, Layout, Mesh, TextFiles, Transformer


def get_config(chips: str = "v5e") -> Config:
  # A row's attention scores are 2.1 GB where XLA computes it, on TPUs: heads are split
  # over 4 chips, and micro-batches are of 4 rows. cuDNN writes none.
  # Gathers of GPUs stay within a node of 8. As there is one micro-batch, each layer's gradients
  # are summed between nodes while the backward pass of the next layers computes. Remat is
  # what the memory of the GPUs allows.
  layout = Layout(shard="fsdp", remat="full")
  in_backward = Layout(shard="fsdp", slow_axes="in_backward")
  mesh, layout, num_microbatches = {
    "v5e": (Mesh(data=1, fsdp=-1, model=4), layout, 4),
    "h100": (Mesh(replica=-1, data=1, fsdp=8), in_backward, 1),
  }[chips]
  return Config(
    model=Transformer(num_layers=32, width=4096, num_heads=32, hidden=11_008),
    data=TextFiles(path="tokens", vocab_size=32_000, sequence_length=4096),
    optimizer=AdamW(lr=3e-4, b1=0.9, b2=0.95, eps=1e-5, weight_decay=0.1),
    schedule=Cosine(warmup_epochs=0.01, end_lr=3e-5),
    clip_norm=1.0,
    batch_size=1024,  # 4 million tokens
    accumulate_steps=num_microbatches,
    epochs=1,
    dtype="bfloat16",
    mesh=mesh,
    layout=layout,
    evaluation=Evaluation(every_epochs=0.05, batch_size=256),
  )
