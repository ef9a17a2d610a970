"""What timm and Hugging Face call the parameters of our stacked models.

As of timm 1.0.31 and transformers 5.23.0; `tests/data/state_dicts` has the names of
whole models, as these packages make them. A row whose parameter a model does not have
is ignored.
"""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
  """Our path below params/, the name in the file, and how; see `names.Link`.

  "layers/..." are stacked; "{}" in `theirs` is then the layer's number.
  """

  ours: str
  theirs: str
  how: str = "same"
  part: tuple[int, int] = (0, 1)
  or_else: str | None = None


def _dense(ours: str, theirs: str, part: tuple[int, int] = (0, 1)) -> tuple[Row, Row]:
  weight = Row(f"{ours}/kernel", f"{theirs}.weight", "linear", part)
  return weight, Row(f"{ours}/bias", f"{theirs}.bias", "same", part)


def _norm(ours: str, theirs: str) -> tuple[Row, Row]:
  return Row(f"{ours}/scale", f"{theirs}.weight"), Row(f"{ours}/bias", f"{theirs}.bias")


# transformers, LlamaForCausalLM; with biases, Qwen2's names; with norms of queries
# and keys, Qwen3's. A file with tied embeddings has no lm_head.
_LAYER = "model.layers.{}."
_HEADS = {name: f"{_LAYER}self_attn.{name}_proj" for name in "qkvo"}
_MLP = {name: f"{_LAYER}mlp.{name}_proj" for name in ("gate", "up", "down")}
LLAMA = (
  Row("embed/table", "model.embed_tokens.weight"),
  *_norm("layers/attn_norm", _LAYER + "input_layernorm"),
  *_norm("layers/q_norm", _LAYER + "self_attn.q_norm"),
  *_norm("layers/k_norm", _LAYER + "self_attn.k_norm"),
  *(
    row for name, to in (_HEADS | _MLP).items() for row in _dense(f"layers/{name}", to)
  ),
  *_norm("layers/mlp_norm", _LAYER + "post_attention_layernorm"),
  *_norm("head/norm", "model.norm"),
  Row("head/kernel", "lm_head.weight", "linear", or_else="model.embed_tokens.weight"),
)

# timm, VisionTransformer with a class token; queries, keys and values are one array.
_BLOCK = "blocks.{}."
VIT = (
  Row("embed/class_token", "cls_token", "token"),
  Row("embed/position", "pos_embed", "tokens"),
  Row("embed/patch/kernel", "patch_embed.proj.weight", "patch"),
  Row("embed/patch/bias", "patch_embed.proj.bias"),
  *_norm("layers/attn_norm", _BLOCK + "norm1"),
  *_dense("layers/q", _BLOCK + "attn.qkv", (0, 3)),
  *_dense("layers/k", _BLOCK + "attn.qkv", (1, 3)),
  *_dense("layers/v", _BLOCK + "attn.qkv", (2, 3)),
  *_dense("layers/o", _BLOCK + "attn.proj"),
  *_norm("layers/mlp_norm", _BLOCK + "norm2"),
  *_dense("layers/up", _BLOCK + "mlp.fc1"),
  *_dense("layers/down", _BLOCK + "mlp.fc2"),
  *_norm("head/norm", "norm"),
  *_dense("head", "head"),
)

# BatchNorm: collection, our name below the module's, the name in the file.
NORM = (
  ("params", "bn/scale", "weight"),
  ("params", "bn/bias", "bias"),
  ("batch_stats", "bn/mean", "running_mean"),
  ("batch_stats", "bn/var", "running_var"),
)
