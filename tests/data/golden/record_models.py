"""Records what Hugging Face's Llama, Qwen2, Qwen3 and timm's ViT compute, as fixtures.

python tests/data/golden/record_models.py, where torch, transformers and timm are
installed (recorded with torch 2.13.0, transformers 5.23.0, timm 1.0.31, on a CPU in
float64). Tiny models with random weights that are multiples of 1/64, so that the
files are small; the weights go by the names of the library. Beside the logits the
gradient of the mean cross entropy is recorded, as its sum over each weight times
the weight's number 0, 1, 2, … modulo 7: one number a weight that knows of places.
"""

from pathlib import Path

import numpy as np
import timm.models.vision_transformer as timm_vit
import torch
from torch.nn import functional
from transformers import (
  LlamaConfig,
  LlamaForCausalLM,
  Qwen2Config,
  Qwen2ForCausalLM,
  Qwen3Config,
  Qwen3ForCausalLM,
)

HERE = Path(__file__).parent


def randomise(model, generator):
  """Weights of a spread that makes every part count, norms near 1."""
  for name, weight in model.named_parameters():
    near = 1.0 if "norm" in name and name.endswith("weight") else 0.0
    steps = torch.randint(-16, 17, weight.shape, generator=generator)
    weight.data = (near + steps / 64).to(torch.float64)
  return model.double().eval()


def probed(model):
  """One number for the gradient of each weight."""
  found = {}
  for name, weight in model.named_parameters():
    places = torch.arange(weight.numel(), dtype=torch.float64) % 7
    found[f"probe:{name}"] = (weight.grad.reshape(-1) * places).sum().numpy()
  return found


def save(name, model, **more):
  """Write the fixture of one model."""
  weights = {
    f"weight:{key}": value.detach().numpy().astype(np.float32)
    for key, value in model.named_parameters()
  }
  np.savez_compressed(HERE / f"{name}.npz", **weights, **probed(model), **more)


def language(name, model, generator):
  """Logits of a language model, and the gradient of predicting the next token."""
  model = randomise(model, generator)
  tokens = torch.randint(0, model.config.vocab_size, (2, 12), generator=generator)
  logits = model(tokens).logits
  targets = torch.roll(tokens, -1, dims=1)
  functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
  save(name, model, tokens=tokens.numpy(), logits=logits.detach().numpy())


def vision(name, generator, **options):
  """Logits of a ViT, and the gradient of predicting the labels 0, 1, 2."""
  sizes = dict(embed_dim=16, depth=2, num_heads=2, mlp_ratio=3, img_size=8, patch_size=4)
  model = timm_vit.VisionTransformer(in_chans=3, num_classes=5, **sizes, **options)
  model = randomise(model, generator)
  images = torch.randint(0, 256, (3, 8, 8, 3), generator=generator)
  mean, std = 120.0, 60.0
  seen = ((images.double() - mean) / std).permute(0, 3, 1, 2)
  logits = model(seen)
  functional.cross_entropy(logits, torch.arange(3)).backward()
  images = images.numpy().astype(np.uint8)
  save(name, model, images=images, logits=logits.detach().numpy())


def main():
  """Write all fixtures beside this file."""
  sizes = dict(vocab_size=40, hidden_size=24, intermediate_size=20, num_hidden_layers=2)
  sizes |= dict(num_attention_heads=6, num_key_value_heads=2)
  sizes |= dict(tie_word_embeddings=False, attention_bias=False)
  generator = torch.Generator().manual_seed(0)
  llama = LlamaConfig(**sizes, rms_norm_eps=1e-5, rope_theta=10_000.0)
  language("hf_llama", LlamaForCausalLM(llama), generator)
  qwen = Qwen3Config(**sizes, rms_norm_eps=1e-6, rope_theta=1e6, head_dim=8)
  language("hf_qwen3", Qwen3ForCausalLM(qwen), generator)
  vision("timm_vit_token", generator)
  vision("timm_vit_mean", generator, class_token=False, global_pool="avg", fc_norm=False)
  qwen = Qwen2Config(**sizes, rms_norm_eps=1e-6, rope_theta=1e6)
  language("hf_qwen2", Qwen2ForCausalLM(qwen), generator)
  scaled = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
  scaled |= dict(original_max_position_embeddings=64)
  # 24 / 2 = 12 numbers a head: pairs that turn slowly, quickly and between.
  sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1}
  llama = LlamaConfig(**sizes, rms_norm_eps=1e-5, rope_theta=100.0, rope_scaling=scaled)
  language("hf_llama31", LlamaForCausalLM(llama), generator)


if __name__ == "__main__":
  main()
