"""Names of parameters in jaxscale, timm, torchvision and Hugging Face.

A naming is a list of `Link`s. Each link connects a leaf of jaxscale (or one layer of a
stacked leaf) with an array of a file (or a part of a fused array). Tables have the names of
the stacked models, as of timm 1.0.31, torchvision 0.28 and transformers 5.23.0;
`tests/data/state_dicts` has the names of whole models in these packages. The names of a
ResNet follow from its shapes.

The arrays do not show these settings, which must agree with the parameters:

    timm, torchvision   images as (x / 255 - mean) / std. ResNets: ImageNet's mean
                        (0.485, 0.456, 0.406) and std (0.229, 0.224, 0.225), the
                        default for colour images; timm's "augreg" ViTs: 0.5 and
                        0.5. Test images are resized bicubically to size / crop_pct
                        and cropped: see `pretrained_cfg` in timm, e.g. crop_pct
                        0.95 for resnet50.a1_in1k, and 0.9 for
                        vit_small_patch16_224.augreg_in21k_ft_in1k
    ViTs                exact GELU (erf); LayerNorm epsilon 1e-6, or 1e-12 in
                        Hugging Face's ViTs
    Hugging Face Llama  rms_norm_eps, rope_theta and the numbers of heads as in the
                        config.json next to the file, which `check` compares; a
                        rotary pair is the units i and i + width / 2 of a head
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxscale.config.validation import nearest
from jaxscale.errors import ConfigError
from jaxscale.models import lora
from jaxscale.models.config_json import read_config_json

Shape = tuple[int, ...]
NAMINGS = ("jaxscale", "timm", "torchvision", "huggingface", "peft")
Shapes = Mapping[str, Shape]  # shapes of jaxscale's leaves, by path


class Arrangement(NamedTuple):
  """Conversion between an array in a file and a leaf of jaxscale.

  Attributes:
    shape: a function from the leaf's shape to the shape in the file.
    ours: a function from the array in the file to the leaf, a view if possible.
    theirs: a function from (leaf, shape in the file) to the array in the file.
  """

  shape: Callable[[Shape], Shape]
  ours: Callable[[np.ndarray], np.ndarray]
  theirs: Callable[[np.ndarray, Shape], np.ndarray]


def _patch_shape(shape: Shape) -> Shape:
  """Convert [p * p * channels, width] to [width, channels, p, p], with 3 channels or 1.

  The result is unambiguous, as a square is never three times a square.
  """
  rows, width = shape
  for channels in (3, 1):
    side = math.isqrt(rows // channels)
    if side * side * channels == rows:
      return (width, channels, side, side)
  return (width, rows, 1, 1)


ARRANGEMENTS = {
  "same": Arrangement(lambda s: s, lambda a: a, lambda a, _: a),
  # [in, out]; PyTorch's Linear is [out, in].
  "linear": Arrangement(lambda s: s[::-1], lambda a: a.T, lambda a, _: a.T),
  # [height, width, in, out]; PyTorch's Conv2d is [out, in, height, width].
  "conv": Arrangement(
    lambda s: (s[3], s[2], s[0], s[1]),
    lambda a: a.transpose(2, 3, 1, 0),
    lambda a, _: a.transpose(3, 2, 0, 1),
  ),
  # A Conv2d whose stride equals its kernel's size is a matrix that takes flattened patches;
  # its rows are ordered by (row, column, channel).
  "patch": Arrangement(
    _patch_shape,
    lambda a: a.transpose(2, 3, 1, 0).reshape(-1, len(a)),
    lambda a, s: a.reshape(s[2], s[3], s[1], s[0]).transpose(3, 2, 0, 1),
  ),
  # [tokens, width] and [width]; timm adds a batch dim, and a dim of tokens.
  "tokens": Arrangement(lambda s: (1, *s), lambda a: a[0], lambda a, _: a[None]),
  "token": Arrangement(lambda s: (1, 1, *s), lambda a: a[0, 0], lambda a, _: a[None][None]),
}


class Link(NamedTuple):
  """Connection between a leaf, or one of its layers, and an array of a file.

  Attributes:
    ours: the path of the leaf, e.g. params/layers/q/kernel.
    theirs: the name of the array in the file.
    how: a key of `ARRANGEMENTS`.
    layer: the index in the leaf's first dim; None if the leaf is not stacked.
    part: (i, n) for the i-th of n equal parts of the array along its first dim.
    or_else: the name of the array to use if the file lacks `theirs`.
    fit: the change of an array after it is read and arranged (`weights.fit`).
  """

  ours: str
  theirs: str
  how: str = "same"
  layer: int | None = None
  part: tuple[int, int] = (0, 1)
  or_else: str | None = None
  fit: Callable[[np.ndarray], np.ndarray] | None = None

  def shape_in_file(self, shape: Shape) -> Shape:
    """Return the shape of the array in the file, from the leaf's shape."""
    own = shape if self.layer is None else shape[1:]
    own = ARRANGEMENTS[self.how].shape(own)
    return own and (own[0] * self.part[1], *own[1:])


# In tables, `ours` is below params/, and "{}" in `theirs` is the index of a stacked layer.


def _dense(
  ours: str, theirs: str, part: tuple[int, int] = (0, 1), joint: str = "."
) -> tuple[Link, Link]:
  weight = Link(f"{ours}/kernel", f"{theirs}{joint}weight", "linear", part=part)
  return weight, Link(f"{ours}/bias", f"{theirs}{joint}bias", part=part)


def _norm(ours: str, theirs: str) -> list[Link]:
  leaves = {"scale": "weight", "bias": "bias"}
  return [Link(f"{ours}/{a}", f"{theirs}.{b}") for a, b in leaves.items()]


# Names of transformers' LlamaForCausalLM; with biases of Qwen2, with norms of queries and
# keys of Qwen3. A file with tied embeddings has no lm_head.
_LAYER = "model.layers.{}."
_HEADS = {name: f"{_LAYER}self_attn.{name}_proj" for name in "qkvo"}
_MLP = {name: f"{_LAYER}mlp.{name}_proj" for name in ("gate", "up", "down")}
_LLAMA = (
  Link("embed/table", "model.embed_tokens.weight"),
  *_norm("layers/attn_norm", _LAYER + "input_layernorm"),
  *_norm("layers/q_norm", _LAYER + "self_attn.q_norm"),
  *_norm("layers/k_norm", _LAYER + "self_attn.k_norm"),
  *(row for n, to in (_HEADS | _MLP).items() for row in _dense(f"layers/{n}", to)),
  *_norm("layers/mlp_norm", _LAYER + "post_attention_layernorm"),
  *_norm("head/norm", "model.norm"),
  Link("head/kernel", "lm_head.weight", "linear", or_else="model.embed_tokens.weight"),
)


def _vit(text: str) -> tuple[Link, ...]:
  """Return the table of a ViT.

  Args:
    text: in the first line, the names outside of the layers: class token, positions, patches,
      norm and head. After it, the prefix of a layer's names, followed by the names of both
      norms, of queries, keys and values (one name if they are one array), and of `o`, `up`
      and `down`.
  """
  token, position, patch, norm, head, block, *layer = text.split()
  first, second, *qkv, o, up, down = (block + name for name in layer)
  joint = "_" if o.endswith("out_proj") else "."  # for PyTorch's MultiheadAttention
  heads = []
  for i, name in enumerate("qkv"):
    own = (qkv[0], (i, 3)) if len(qkv) == 1 else (qkv[i], (0, 1))
    heads += _dense(f"layers/{name}", *own, joint)
  embed = Link("embed/class_token", token, "token"), Link("embed/position", position, "tokens")
  patches = Link("embed/patch/kernel", f"{patch}.weight", "patch")
  rows = [*embed, patches, Link("embed/patch/bias", f"{patch}.bias")]
  rows += [*_norm("layers/attn_norm", first), *heads, *_dense("layers/o", o)]
  rows += [*_norm("layers/mlp_norm", second), *_dense("layers/up", up)]
  rows += [*_dense("layers/down", down), *_norm("head/norm", norm), *_dense("head", head)]
  return tuple(rows)


_WORDS, _PATCHES = "params/embed/table", "params/embed/patch/kernel"
# The table of names by naming and a leaf that only such a model has. Models that classify the
# mean have no class token; only timm has such models.
_TABLES = {
  ("huggingface", _WORDS): _LLAMA,
  ("timm", _PATCHES): _vit(
    """cls_token pos_embed patch_embed.proj norm head
    blocks.{}. norm1 norm2 attn.qkv attn.proj mlp.fc1 mlp.fc2"""
  ),
  ("torchvision", _PATCHES): _vit(
    """class_token encoder.pos_embedding conv_proj encoder.ln heads.head
    encoder.layers.encoder_layer_{}. ln_1 ln_2 self_attention.in_proj self_attention.out_proj
    mlp.0 mlp.3"""
  ),
  ("huggingface", _PATCHES): _vit(
    """vit.embeddings.cls_token vit.embeddings.position_embeddings
    vit.embeddings.patch_embeddings.projection vit.layernorm classifier
    vit.encoder.layer.{}. layernorm_before layernorm_after attention.attention.query
    attention.attention.key attention.attention.value attention.output.dense
    intermediate.dense output.dense"""
  ),
}


def table_of(naming: str, member: str) -> tuple[Link, ...]:
  """Return the links of a stacked model; only such a model has the leaf `member`."""
  return _TABLES.get((naming, member), ())


# BatchNorm: collection, jaxscale's name below the module's, and the name in the file.
_NORM = (
  ("params", "bn/scale", "weight"),
  ("params", "bn/bias", "bias"),
  ("batch_stats", "bn/mean", "running_mean"),
  ("batch_stats", "bn/var", "running_var"),
)


class Naming(NamedTuple):
  """Names of the parameters of one model in a file.

  Attributes:
    name: the name of the naming.
    links: the links; each leaf is in at least one.
    counters: int64 scalars that are not parameters; ignored in reading, 0 in writing.
    derived: suffixes of arrays that follow from the settings, and are ignored.
    classes: by path, the dim of a leaf that counts classes or words, and may be padded.
    head: the paths of the classifier's leaves.
    metadata: the metadata that readers of such files expect.
  """

  name: str
  links: tuple[Link, ...]
  counters: tuple[str, ...]
  derived: tuple[str, ...]
  classes: Mapping[str, int]
  head: tuple[str, ...]
  metadata: Mapping[str, str]


_PYTORCH = {"format": "pt"}  # transformers rejects a file without it.
# Names in a file that identify its naming.
_SIGNS = {"model.embed_tokens.weight": "huggingface", "vit.embeddings.cls_token": "huggingface"}
_SIGNS |= {"patch_embed.proj.weight": "timm", "layer1.0.conv1.weight": "timm"}
_SIGNS |= {"conv_proj.weight": "torchvision"}


def guess(path: str | os.PathLike, names: Collection[str]) -> str:
  """Identify the naming of a file.

  Args:
    path: the path of the file, or of its folder, for the message.
    names: the names of all arrays in it.

  Raises:
    ConfigError: the naming is unknown.

  Example:
    >>> guess("x.safetensors", ["params/Dense_0/kernel"])
    'jaxscale'
  """
  if any(name.startswith("params/") for name in names):
    return "jaxscale"
  for sign, naming in _SIGNS.items():
    if sign in names:
      return naming
  some = ", ".join(sorted(names)[:3])
  problem = f"its names (such as {some}) match none of {', '.join(NAMINGS)}{_kind(path)}"
  fix = "use a ResNet or ViT from timm or torchvision"
  raise ConfigError(f"{path}: {problem}; {fix}, a Llama or ViT from Hugging Face, or an export")


def _kind(path: Any) -> str:
  """Return the model type in the config.json next to a file, for a message."""
  fields = "architecture", "model_type", "rotary_pct", "partial_rotary_factor"
  folder = Path(path) if Path(path).is_dir() else Path(path).parent
  found = read_config_json(folder / "config.json") or {}
  stated = ", ".join(f"{k}={found[k]!r}" for k in fields if k in found)
  return f", and its config.json says {stated}" if stated else ""


def naming_of(name: str, shapes: Shapes) -> Naming:
  """Return the names of a model's leaves.

  Args:
    name: one of `NAMINGS`.
    shapes: the shapes of all leaves of the model, by path: params/..., batch_stats/....

  Raises:
    ConfigError: there is no such naming, or it does not support this model.

  Example:
    >>> naming = naming_of("jaxscale", {"params/Dense_0/kernel": (3, 2)})
    >>> naming.links[0].theirs
    'params/Dense_0/kernel'
  """
  if name not in NAMINGS:
    raise ConfigError(f"naming={name}: {nearest(name, NAMINGS)}")
  if name == "peft":
    return _adapters(shapes)
  classes = _classes(shapes)
  head = tuple(path for path in classes if path != _WORDS)
  if name == "jaxscale":
    links = tuple(Link(path, path) for path in shapes)
    return Naming(name, links, (), (), classes, head, {"format": "jaxscale"})
  links, counters, derived = (), (), ()
  if _WORDS in shapes:
    links = tuple(_table_links(table_of(name, _WORDS), shapes))
    derived = (".rotary_emb.inv_freq",)  # in files of Llama 2 and older
  elif _PATCHES in shapes:
    if name == "timm" or "params/embed/class_token" in shapes:
      links = tuple(_table_links(table_of(name, _PATCHES), shapes))
  elif name != "huggingface":
    links, counters = _resnet_links(shapes)
  if left := [path for path in shapes if path not in {link.ours for link in links}]:
    problem = f"has no name for {left[0]} of this model; use naming=jaxscale"
    raise ConfigError(f"naming={name}: {problem}")
  return Naming(name, links, counters, derived, classes, head, _PYTORCH)


def _adapters(shapes: Shapes) -> Naming:
  """Return the names of an adapter's factors in PEFT, which follow from Hugging Face's."""
  base = naming_of("huggingface", {n: s for n, s in shapes.items() if not lora.kernel_of(n)[1]})
  links, classes = [], {}
  for suffix, factor in ((lora.A, "lora_A"), (lora.B, "lora_B")):
    for link in (x for x in base.links if x.ours + suffix in shapes):
      theirs = f"base_model.model.{link.theirs.removesuffix('weight')}{factor}.weight"
      links.append(link._replace(ours=link.ours + suffix, theirs=theirs))
    classes |= {f"{n}{lora.B}": dim for n, dim in base.classes.items() if n.endswith("/kernel")}
  return Naming("peft", tuple(links), (), (), classes, (), _PYTORCH)


def _classes(shapes: Shapes) -> dict[str, int]:
  """Return the dims that count classes: in the embedding and in the last dense layer."""
  dims = {"params/embed/table": 0, "params/head/kernel": 1, "params/head/bias": 0}
  last = _count(shapes, "Dense") - 1
  for module in (f"Dense_{last}", "fc8"):  # AlexNet's layer has its published name.
    dims |= {f"params/{module}/kernel": 1, f"params/{module}/bias": 0}
  return {path: dim for path, dim in dims.items() if path in shapes}


def _table_links(rows: tuple[Link, ...], shapes: Shapes) -> Iterator[Link]:
  for row in rows:
    row = row._replace(ours=f"params/{row.ours}")
    if row.ours in shapes and "{}" not in row.theirs:
      yield row
    elif row.ours in shapes:
      for layer in range(shapes[row.ours][0]):
        yield row._replace(theirs=row.theirs.format(layer), layer=layer)


def _resnet_links(shapes: Shapes) -> tuple[tuple[Link, ...], tuple[str, ...]]:
  """Return links and counters of a ResNet, by the names of timm and torchvision.

  jaxscale's modules are numbered in the order of the forward pass, with a block's shortcut
  last. Channels double at the beginning of a stage, and its first block has a shortcut, in
  the first stage only if blocks increase the channels (bottlenecks).

  Returns:
    For example links of Conv_0 and conv1, of Dense_0 and fc; nothing for other models.
  """
  kernels = [shapes[f"params/Conv_{i}/kernel"] for i in range(_count(shapes, "Conv"))]
  if len(kernels) < 3 or _count(shapes, "Dense") != 1:
    return (), ()
  is_bottleneck = kernels[1][:2] == (1, 1)
  names = ["conv1"]
  stage, block, width = 1, 0, kernels[0][3]
  while len(names) < len(kernels):
    out = kernels[len(names)][3]
    if out == 2 * width:
      stage, block, width = stage + 1, 0, out
    elif out != width:
      return (), ()
    at = f"layer{stage}.{block}"
    names += [f"{at}.conv{i + 1}" for i in range(3 if is_bottleneck else 2)]
    if block == 0 and (stage > 1 or is_bottleneck):
      names.append(f"{at}.downsample.0")
    block += 1
  if len(names) > len(kernels):
    return (), ()
  norms = [re.sub(r"conv(?=\d)", "bn", n).replace("le.0", "le.1") for n in names]
  links = [Link(f"params/Conv_{i}/kernel", f"{n}.weight", "conv") for i, n in enumerate(names)]
  for i, theirs in enumerate(norms):
    for collection, leaf, name in _NORM:
      links.append(Link(f"{collection}/BatchNorm_{i}/{leaf}", f"{theirs}.{name}"))
  counters = tuple(f"{theirs}.num_batches_tracked" for theirs in norms)
  return (*links, *_dense("params/Dense_0", "fc")), counters


def _count(shapes: Shapes, module: str) -> int:
  """Return the number of numbered modules of a kind."""
  numbers = itertools.count()
  return next(i for i in numbers if f"params/{module}_{i}/kernel" not in shapes)
