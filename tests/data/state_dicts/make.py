"""Records what timm and Hugging Face call parameters, and what they compute.

    pip install torch timm transformers safetensors
    python tests/data/state_dicts/make.py

writes beside this file, and into nothing else:

    <model>.json            names, dtypes and shapes of whole published models
    tiny_<kind>.safetensors random parameters of tiny models of the same classes,
                            by the package `safetensors`
    tiny.npz                their inputs and logits, float32, in evaluation mode

The packages are none of jaxscale's: only this script needs them. The models are
built from their published configurations; nothing is downloaded.
"""

from __future__ import annotations

# ruff: noqa: E402
import json
import sys
import types
from pathlib import Path

# torchvision's wheels are for CUDA. Beside a PyTorch without it, to register its
# compiled operators fails; none of them is needed here.
sys.modules["torchvision._meta_registrations"] = types.ModuleType("unused")

import numpy as np
import safetensors.torch
import timm
import torch
import transformers
from timm.models import convnext, resnet, vision_transformer
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
WIDTH, CLASSES = 4, 7
# Of TinyLlama/TinyLlama-1.1B-Chat-v1.0's config.json.
TINY_LLAMA = dict(hidden_size=2048, intermediate_size=5632, num_hidden_layers=22)
TINY_LLAMA |= dict(num_attention_heads=32, num_key_value_heads=4)
TINY_LLAMA |= dict(vocab_size=32000, rms_norm_eps=1e-5)


def record(name: str, model: torch.nn.Module, made_by: str) -> None:
  """Names, dtypes and shapes, a line an array."""
  rows = [
    f"    {json.dumps(key)}: {json.dumps([str(x.dtype)[6:], list(x.shape)])}"
    for key, x in model.state_dict().items()
  ]
  text = ",\n".join(rows)
  head = f'{{\n  "made_by": "{made_by}",\n  "arrays": {{\n'
  (HERE / f"{name}.json").write_text(f"{head}{text}\n  }}\n}}\n")


def tiny_resnet(block) -> torch.nn.Module:
  """Return timm's ResNet with 4 channels after the stem and few blocks per stage.

  timm's constructor has 64 channels after the stem; its functions make the stages again.
  """
  model = resnet.ResNet(block, [1, 1, 1, 1], num_classes=CLASSES)
  model.conv1 = torch.nn.Conv2d(3, WIDTH, 7, 2, 3, bias=False)
  model.bn1 = torch.nn.BatchNorm2d(WIDTH)
  channels = tuple(WIDTH * 2**i for i in range(4))
  stages, _ = resnet.make_blocks((block,) * 4, channels, (2, 1, 1, 1), WIDTH)
  for name, stage in stages:
    setattr(model, name, stage)
  model.fc = torch.nn.Linear(channels[-1] * block.expansion, CLASSES)
  return model


def stir(model: torch.nn.Module, seed: int) -> torch.nn.Module:
  """Replace every initial value; signals keep their size through the layers."""
  draw = torch.Generator().manual_seed(seed)
  for name, x in model.state_dict().items():
    if not x.dtype.is_floating_point:
      continue
    if name.endswith("running_var"):
      x.uniform_(0.05, 0.5, generator=draw)
    elif x.ndim < 2:
      x.normal_(1.0 if "weight" in name else 0.0, 0.3, generator=draw)
    else:
      x.normal_(0.0, x[0].numel() ** -0.5, generator=draw)
  return model.eval()


def main() -> None:
  by = f"timm {timm.__version__}"
  for name in ("resnet18", "resnet50", "vit_small_patch16_224", "convnext_tiny"):
    record(name, timm.create_model(name, pretrained=False), by)
  with torch.device("meta"):
    llama = LlamaForCausalLM(LlamaConfig(**TINY_LLAMA))
  record("tinyllama_1.1b", llama, f"transformers {transformers.__version__}")

  of_vit = dict(img_size=12, patch_size=4, embed_dim=16, depth=3, num_heads=2)
  of_llama = TINY_LLAMA | dict(hidden_size=16, intermediate_size=24, num_hidden_layers=3)
  of_llama |= dict(num_attention_heads=4, num_key_value_heads=2, vocab_size=40)
  tiny = {
    "bottleneck": tiny_resnet(resnet.Bottleneck),
    "basic": tiny_resnet(resnet.BasicBlock),
    "vit": vision_transformer.VisionTransformer(num_classes=CLASSES, **of_vit),
    "llama": LlamaForCausalLM(LlamaConfig(attn_implementation="eager", **of_llama)),
    "convnext": convnext.ConvNeXt(num_classes=CLASSES, depths=(1, 2, 1, 1), dims=(4, 8, 12, 16)),
  }
  rng = np.random.default_rng(0)
  images = {32: rng.standard_normal((3, 3, 32, 32), np.float32)}
  images[12] = images[32][..., :12, :12]
  found = {"tokens": rng.integers(0, 40, (2, 11)), "images": images[32]}
  for seed, (name, model) in enumerate(tiny.items()):
    stir(model, seed)
    path = HERE / f"tiny_{name}.safetensors"
    safetensors.torch.save_file(
      {k: x.contiguous() for k, x in model.state_dict().items()}, path, {"format": "pt"}
    )
    with torch.no_grad():
      if name == "llama":
        logits = model(torch.from_numpy(found["tokens"])).logits
      else:
        logits = model(torch.from_numpy(images[12 if name == "vit" else 32]))
    found[name] = logits.numpy()
    print(name, path.stat().st_size, "bytes, logits", logits.std().item())
  np.savez_compressed(HERE / "tiny.npz", **found)


if __name__ == "__main__":
  main()
