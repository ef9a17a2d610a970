"""What timm and Hugging Face call the parameters of our stacked models.

As of timm 1.0.31 and transformers 5.23.0; `tests/state_dicts` has the names of whole
models, as these packages make them.
"""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
  """A row of a table: path of ours below params/, theirs, and how; see `Link`.

  "layers/..." are stacked; "{}" in `theirs` is then the layer's number.
  """

  ours: str
  theirs: str
  how: str = "same"
  part: tuple[int, int] = (0, 1)
  or_else: str | None = None


# transformers, LlamaForCausalLM; with biases, Qwen2's names; with norms of queries
# and keys, Qwen3's. A file of tied embeddings has no lm_head.
_LAYER = "model.layers.{}."
LLAMA = (
  Row("embed/table", "model.embed_tokens.weight"),
  Row("layers/attn_norm/scale", _LAYER + "input_layernorm.weight"),
  Row("layers/q/kernel", _LAYER + "self_attn.q_proj.weight", "linear"),
  Row("layers/q/bias", _LAYER + "self_attn.q_proj.bias"),
  Row("layers/k/kernel", _LAYER + "self_attn.k_proj.weight", "linear"),
  Row("layers/k/bias", _LAYER + "self_attn.k_proj.bias"),
  Row("layers/v/kernel", _LAYER + "self_attn.v_proj.weight", "linear"),
  Row("layers/v/bias", _LAYER + "self_attn.v_proj.bias"),
  Row("layers/q_norm/scale", _LAYER + "self_attn.q_norm.weight"),
  Row("layers/k_norm/scale", _LAYER + "self_attn.k_norm.weight"),
  Row("layers/o/kernel", _LAYER + "self_attn.o_proj.weight", "linear"),
  Row("layers/mlp_norm/scale", _LAYER + "post_attention_layernorm.weight"),
  Row("layers/gate/kernel", _LAYER + "mlp.gate_proj.weight", "linear"),
  Row("layers/up/kernel", _LAYER + "mlp.up_proj.weight", "linear"),
  Row("layers/down/kernel", _LAYER + "mlp.down_proj.weight", "linear"),
  Row("head/norm/scale", "model.norm.weight"),
  Row("head/kernel", "lm_head.weight", "linear", or_else="model.embed_tokens.weight"),
)

# timm, VisionTransformer with a class token; queries, keys and values are one there.
_BLOCK = "blocks.{}."
VIT = (
  Row("embed/class_token", "cls_token", "token"),
  Row("embed/position", "pos_embed", "tokens"),
  Row("embed/patch/kernel", "patch_embed.proj.weight", "patch"),
  Row("embed/patch/bias", "patch_embed.proj.bias"),
  Row("layers/attn_norm/scale", _BLOCK + "norm1.weight"),
  Row("layers/attn_norm/bias", _BLOCK + "norm1.bias"),
  *(
    Row(f"layers/{ours}/{leaf}", f"{_BLOCK}attn.qkv.{theirs}", how, (i, 3))
    for leaf, theirs, how in (("kernel", "weight", "linear"), ("bias", "bias", "same"))
    for i, ours in enumerate("qkv")
  ),
  Row("layers/o/kernel", _BLOCK + "attn.proj.weight", "linear"),
  Row("layers/o/bias", _BLOCK + "attn.proj.bias"),
  Row("layers/mlp_norm/scale", _BLOCK + "norm2.weight"),
  Row("layers/mlp_norm/bias", _BLOCK + "norm2.bias"),
  Row("layers/up/kernel", _BLOCK + "mlp.fc1.weight", "linear"),
  Row("layers/up/bias", _BLOCK + "mlp.fc1.bias"),
  Row("layers/down/kernel", _BLOCK + "mlp.fc2.weight", "linear"),
  Row("layers/down/bias", _BLOCK + "mlp.fc2.bias"),
  Row("head/norm/scale", "norm.weight"),
  Row("head/norm/bias", "norm.bias"),
  Row("head/kernel", "head.weight", "linear"),
  Row("head/bias", "head.bias"),
)

# Of a BatchNorm: ours below its collection's and its module's names, theirs.
NORM = (
  ("params", "bn/scale", "weight"),
  ("params", "bn/bias", "bias"),
  ("batch_stats", "bn/mean", "running_mean"),
  ("batch_stats", "bn/var", "running_var"),
)
