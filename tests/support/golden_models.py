"""Recorded models (golden/record_models.py) as parameters of jaxscale's models."""

import re

import numpy as np

from support.paths import DATA

GOLDEN = DATA / "golden"


def load(name):
  """Return the weights, gradient probes and other values of a fixture, each by name."""
  with np.load(GOLDEN / f"{name}.npz") as file:
    whole = dict(file)
  parts = {"weight": {}, "probe": {}}
  for key in list(whole):
    kind, _, rest = key.partition(":")
    if kind in parts:
      parts[kind][rest] = whole.pop(key)
  return parts["weight"], parts["probe"], whole


def probe(gradient):
  """Return the number that represents a gradient in the fixture's layout."""
  flat = np.asarray(gradient, np.float64).reshape(-1)
  return (flat * (np.arange(flat.size) % 7)).sum()


def pairs(text):
  """Return {ours: theirs} from a table with a few pairs per line."""
  return dict(pair.split(" ") for pair in re.split(r",\s+", text.strip()))


LLAMA = pairs("""
  attn_norm/scale input_layernorm, mlp_norm/scale post_attention_layernorm,
  q/kernel self_attn.q_proj, k/kernel self_attn.k_proj, v/kernel self_attn.v_proj,
  q/bias self_attn.q_proj, k/bias self_attn.k_proj, v/bias self_attn.v_proj,
  q_norm/scale self_attn.q_norm, k_norm/scale self_attn.k_norm, o/kernel self_attn.o_proj,
  gate/kernel mlp.gate_proj, up/kernel mlp.up_proj, down/kernel mlp.down_proj
""")


def _theirs(ours, layer):
  leaf = "bias" if ours.endswith("/bias") else "weight"
  return f"model.layers.{layer}.{LLAMA[ours]}.{leaf}"


def nested(flat):
  """Return {"a": {"b": x}} for {"a/b": x}."""
  tree = {}
  for path, leaf in flat.items():
    *parents, name = path.split("/")
    node = tree
    for parent in parents:
      node = node.setdefault(parent, {})
    node[name] = leaf
  return tree


def from_llama(weights, num_layers=2):
  """Convert Hugging Face's [out, in] matrices of each layer, and stack them."""

  def layers(ours):
    return np.stack([weights[_theirs(ours, i)].T for i in range(num_layers)])

  has = {ours for ours in LLAMA if _theirs(ours, 0) in weights}
  head = {"norm": {"scale": weights["model.norm.weight"]}, "kernel": weights["lm_head.weight"].T}
  embed = {"table": weights["model.embed_tokens.weight"]}
  return {"embed": embed, "layers": nested({ours: layers(ours) for ours in has}), "head": head}


def to_llama(params):
  """Convert a tree back to Hugging Face's names."""
  found = {
    "model.embed_tokens.weight": params["embed"]["table"],
    "model.norm.weight": params["head"]["norm"]["scale"],
    "lm_head.weight": params["head"]["kernel"].T,
  }
  for ours in LLAMA:
    module, leaf = ours.split("/")
    for i, of_layer in enumerate(params["layers"].get(module, {}).get(leaf, ())):
      found[_theirs(ours, i)] = of_layer.T
  return found


VIT = pairs("""
  attn_norm/scale norm1.weight, attn_norm/bias norm1.bias,
  mlp_norm/scale norm2.weight, mlp_norm/bias norm2.bias,
  o/kernel attn.proj.weight, o/bias attn.proj.bias,
  up/kernel mlp.fc1.weight, up/bias mlp.fc1.bias,
  down/kernel mlp.fc2.weight, down/bias mlp.fc2.bias
""")
QKV = [("kernel", "attn.qkv.weight"), ("bias", "attn.qkv.bias")]


def from_vit(weights, num_layers=2):
  """Convert timm's ViT; its patches are a convolution [out, in, h, w]."""

  def layers(name):
    return np.stack([weights[f"blocks.{i}.{name}"].T for i in range(num_layers)])

  flat = {ours: layers(name) for ours, name in VIT.items()}
  for leaf, name in QKV:
    for which, part in zip("qkv", np.split(layers(name), 3, axis=-1), strict=True):
      flat[f"{which}/{leaf}"] = part
  patch = weights["patch_embed.proj.weight"].transpose(2, 3, 1, 0)
  patch = {"kernel": patch.reshape(-1, patch.shape[-1]), "bias": weights["patch_embed.proj.bias"]}
  embed = {"patch": patch, "position": weights["pos_embed"][0]}
  if "cls_token" in weights:
    embed["class_token"] = weights["cls_token"][0, 0]
  norm = {"scale": weights["norm.weight"], "bias": weights["norm.bias"]}
  head = {"norm": norm, "kernel": weights["head.weight"].T, "bias": weights["head.bias"]}
  return {"embed": embed, "layers": nested(flat), "head": head}


def to_vit(params, patch_shape):
  """Convert a tree back to timm's names."""
  embed, head, layers = params["embed"], params["head"], params["layers"]
  size, _, channels = patch_shape
  patch = embed["patch"]["kernel"].reshape(size, size, channels, -1)
  found = {
    "patch_embed.proj.weight": patch.transpose(3, 2, 0, 1),
    "patch_embed.proj.bias": embed["patch"]["bias"],
    "pos_embed": embed["position"],
    "norm.weight": head["norm"]["scale"],
    "norm.bias": head["norm"]["bias"],
    "head.weight": head["kernel"].T,
    "head.bias": head["bias"],
  }
  if "class_token" in embed:
    found["cls_token"] = embed["class_token"]
  for i in range(len(layers["q"]["bias"])):
    for ours, name in VIT.items():
      module, leaf = ours.split("/")
      found[f"blocks.{i}.{name}"] = layers[module][leaf][i].T
    for leaf, name in QKV:
      parts = [layers[which][leaf][i].T for which in "qkv"]
      found[f"blocks.{i}.{name}"] = np.concatenate(parts)
  return found
