"""PyTorch's models for benchmarks/accelerator.py: its own, timm's and transformers'.

"torch" has torchvision's ResNet and ViT, and Llama written with PyTorch's own
modules; "timm" has its networks and optimizers, and "transformers" its Llama with the
optimizer of its Trainer. Images are channels last, attention is
scaled_dot_product_attention, PyTorch's optimizers are fused.
"""

from __future__ import annotations

from typing import Any

import torch  # pyright: ignore[reportMissingImports]
from torch import nn  # pyright: ignore[reportMissingImports]
from torch.nn import functional as F  # pyright: ignore[reportMissingImports]


def models(name: str, size: dict[str, Any], side: str, device: str) -> tuple[Any, ...]:
  """Return a model on the device, a batch, its loss, and an optimizer."""
  maker = own if side == "torch" else library
  if "vocabulary" in size:
    model = maker(name, size).to(device)
    shape = size["rows"], size["tokens"] + (side == "torch")
    batch = (torch.randint(0, size["vocabulary"], shape, device=device),)
    loss = next_token_loss if side == "torch" else transformers_loss
  else:
    model = maker(name, size).to(device, memory_format=torch.channels_last)
    images = torch.randn(size["rows"], 3, size["side"], size["side"], device=device)
    labels = torch.randint(0, size["classes"], (size["rows"],), device=device)
    batch = images.contiguous(memory_format=torch.channels_last), labels
    loss = class_loss
  model.train()
  return model, batch, loss, optimizer_of(model, name, side)


def class_loss(model: Any, images: Any, labels: Any) -> Any:
  return F.cross_entropy(model(images).float(), labels)


def next_token_loss(model: Any, tokens: Any) -> Any:
  logits = model(tokens[:, :-1]).float()
  return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def transformers_loss(model: Any, tokens: Any) -> Any:
  return model(input_ids=tokens, labels=tokens).loss


def optimizer_of(model: Any, name: str, side: str) -> Any:
  """Return SGD with momentum for the ResNet, and AdamW for the other models."""
  if side != "torch" and name in ("resnet50", "vit_b16"):
    from timm.optim import create_optimizer_v2  # pyright: ignore[reportMissingImports]

    if name == "resnet50":
      return create_optimizer_v2(model, opt="sgd", lr=0.1, momentum=0.9)
    return create_optimizer_v2(model, opt="adamw", lr=1e-4, weight_decay=0.1)
  if name == "resnet50":
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
  return torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)


def own(name: str, size: dict[str, Any]) -> Any:
  """Return a model of PyTorch or torchvision."""
  if "vocabulary" in size:
    return Llama(size)
  from torchvision import models  # pyright: ignore[reportMissingImports]

  if name == "resnet50":
    return getattr(models, f"resnet{size['depth']}")(num_classes=size["classes"])
  return models.VisionTransformer(
    size["side"],
    size["patch"],
    size["layers"],
    size["heads"],
    size["width"],
    4 * size["width"],
    num_classes=size["classes"],
  )


def library(name: str, size: dict[str, Any]) -> Any:
  """Return a model of timm or transformers."""
  if "vocabulary" in size:
    import transformers  # pyright: ignore[reportMissingImports]

    config = transformers.LlamaConfig(
      vocab_size=size["vocabulary"],
      hidden_size=size["width"],
      intermediate_size=size["hidden"],
      num_hidden_layers=size["layers"],
      num_attention_heads=size["heads"],
      num_key_value_heads=size["kv_heads"],
      max_position_embeddings=size["tokens"],
      use_cache=False,
      attn_implementation="sdpa",
    )
    return transformers.LlamaForCausalLM(config)
  import timm  # pyright: ignore[reportMissingImports]

  if name == "resnet50":
    return timm.create_model(f"resnet{size['depth']}", num_classes=size["classes"])
  return timm.models.vision_transformer.VisionTransformer(
    img_size=size["side"],
    patch_size=size["patch"],
    num_classes=size["classes"],
    embed_dim=size["width"],
    depth=size["layers"],
    num_heads=size["heads"],
  )


class Layer(nn.Module):
  """Transformer layer: attention with rotary positions, then a gated MLP, each after an RMSNorm."""

  def __init__(self, size: dict[str, Any]):
    super().__init__()
    width, hidden, self.heads = size["width"], size["hidden"], size["heads"]
    self.kv_heads, self.head = size["kv_heads"], width // size["heads"]
    outputs = (self.heads + 2 * self.kv_heads) * self.head
    self.norms = nn.ModuleList(nn.RMSNorm(width, eps=1e-5) for _ in range(2))
    self.qkv = nn.Linear(width, outputs, bias=False)
    self.out = nn.Linear(width, width, bias=False)
    self.up = nn.Linear(width, 2 * hidden, bias=False)
    self.down = nn.Linear(hidden, width, bias=False)

  def forward(self, x: Any, cos: Any, sin: Any) -> Any:
    """Map [rows, tokens, width] to the same shape."""
    rows, tokens, width = x.shape
    qkv = self.qkv(self.norms[0](x)).view(rows, tokens, -1, self.head).transpose(1, 2)
    q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], 1)
    q, k = turned(q, cos, sin), turned(k, cos, sin)
    seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    x = x + self.out(seen.transpose(1, 2).reshape(rows, tokens, width))
    gate, value = self.up(self.norms[1](x)).chunk(2, -1)
    return x + self.down(F.silu(gate) * value)


def turned(x: Any, cos: Any, sin: Any) -> Any:
  """Apply rotary positions in the type of `x`."""
  a, b = x.float().chunk(2, -1)
  return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class Llama(nn.Module):
  """Model with Llama's architecture in PyTorch's modules, from tokens to logits."""

  def __init__(self, size: dict[str, Any]):
    super().__init__()
    width, half = size["width"], size["width"] // size["heads"] // 2
    self.table = nn.Embedding(size["vocabulary"], width)
    self.layers = nn.ModuleList(Layer(size) for _ in range(size["layers"]))
    self.norm = nn.RMSNorm(width, eps=1e-5)
    self.head = nn.Linear(width, size["vocabulary"], bias=False)
    rates = 10_000.0 ** -(torch.arange(half) / half)
    angles = torch.arange(size["tokens"])[:, None] * rates
    self.register_buffer("cos", angles.cos())
    self.register_buffer("sin", angles.sin())

  def forward(self, tokens: Any) -> Any:
    """Return logits [rows, tokens, vocabulary] for tokens [rows, tokens]."""
    x = self.table(tokens)
    for layer in self.layers:
      x = layer(x, self.cos, self.sin)
    return self.head(self.norm(x))
