"""A small language model of a mixture of two corpora, with whole documents packed into windows.

Command    jaxscale train --config configs/mixture_text.py:corpora
           corpora/web/train.jsonl and val.jsonl, and the same in corpora/code, have an object
           {"text": ...} per line
Hardware   a CPU
Result     none: it depends on the corpora
"""

from jaxscale.config import AdamW, Config, Cosine, Mixture, TextFiles, Transformer


def get_config(path: str = "corpora") -> Config:
  web, code = (
    TextFiles(path=f"{path}/{name}", packing="best_fit", sequence_length=128)
    for name in ("web", "code")
  )
  return Config(
    model=Transformer(num_layers=2, width=64, num_heads=4, hidden=192),
    # 70 % web; half of each after 4,096 examples, which is step 256.
    data=Mixture(
      sources={"web": web, "code": code},
      weights={"web": (0.7, 0.5), "code": (0.3, 0.5)},
      changes_at=(4096,),
    ),
    optimizer=AdamW(lr=3e-3, b2=0.95, weight_decay=0.1),
    schedule=Cosine(warmup_epochs=0.1),
    batch_size=16,
    epochs=2,
    clip_norm=1.0,
  )
