"""A Vision Transformer fine-tuned on a folder of images: by LoRA, only its head, or whole.

Command    jaxscale train --config configs/vit_finetune.py --config.data.path=DIR
           --config.init_from=FILE, where DIR/train and DIR/val hold one directory per
           class and FILE is timm's vit_small_patch16_224; configs/vit_finetune.py:head
           trains only the head, and :whole everything. A layout is e.g.
           --config.mesh.data=1 --config.mesh.fsdp=-1 --config.layout.shard=fsdp
Hardware   2 CPU cores, with a tiny ViT and folder (tests/parallel/test_tuned_run.py)
Result     not run with published weights; the learning rates are not tuned
"""

from jaxscale.config import AdamW, Config, Cosine, ImageFolder, LoRA, NoAdapter, ViT


def get_config(part: str = "lora") -> Config:
  rates = {"lora": 1e-3, "head": 1e-3, "whole": 5e-5}
  return Config(
    model=ViT(patch=16, width=384, num_layers=12, num_heads=6),
    data=ImageFolder(path="images", image_size=224, augment="crop", eval_view="bicubic"),
    init_from="vit_small_patch16_224.safetensors",
    init_head=True,  # for the classes of the folder
    adapter=LoRA(rank=8, alpha=16) if part == "lora" else NoAdapter(),
    trainable=None if part == "whole" else "^head/",
    optimizer=AdamW(lr=rates[part], weight_decay=0.01),
    schedule=Cosine(warmup_epochs=0.5),
    batch_size=256,
    epochs=10,
    clip_norm=1.0,
  )
