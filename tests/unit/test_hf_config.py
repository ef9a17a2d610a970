"""The config.json next to parameters: what of it is compared, and the messages."""

import json

import pytest

from jaxscale import config as cfg
from jaxscale.errors import ConfigError
from jaxscale.weights.hf_config import check_hf_config, llama_config

# Settings that are not the defaults, where transformers and we have the same.
LLAMA = cfg.Transformer(
  num_layers=2, width=32, num_heads=4, num_kv_heads=2, rope_theta=5e5, norm_eps=1e-5
)
SIZES = {"hidden": 64, "vocab_size": 256, "sequence_length": 64, "dtype": "float32"}
TEXT = {"sequence_length": 64}
HEAD = ("model.embed_tokens.weight", "lm_head.weight")


def check(
  folder, reported, *, model=LLAMA, naming="huggingface", names=HEAD, **options
):
  """The line that says what is another, or None."""
  (folder / "config.json").write_text(json.dumps(reported))
  try:
    check_hf_config(folder / "x.safetensors", naming, names, model, **TEXT, **options)
  except ConfigError as e:
    where, _, line = str(e).partition(": of another model: ")
    assert where == str(folder / "config.json") and "\n" not in line
    check_hf_config(folder / "x.safetensors", "jaxscale", names, model, **TEXT)
    return line
  return None


def changed(**fields):
  """What Llama's folder says, but for some fields; None: it does not say."""
  reported = llama_config(LLAMA, **SIZES) | fields
  return {k: v for k, v in reported.items() if k not in fields or v is not None}


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("groups", [None, 2])
def test_what_is_written_for_a_model_is_of_that_model(groups, qk_norm, tmp_path):
  model = cfg.Transformer(width=32, num_kv_heads=groups, qk_norm=qk_norm)
  reported = llama_config(model, **SIZES)
  assert reported["model_type"] == ("qwen3" if qk_norm else "llama")
  assert check(tmp_path, reported, model=model) is None
  assert check(tmp_path, reported) is not None


TRANSFORMERS_5 = {"rope_type": "default", "rope_theta": 5e5}


@pytest.mark.parametrize(
  "fields",
  [
    {},
    {"head_dim": None},
    {"rope_theta": 500_000},
    {"rope_theta": None, "rope_parameters": TRANSFORMERS_5},
    {"rope_scaling": {"type": "default"}},
    {"hidden_act": "swish"},
    {"tie_word_embeddings": True},
    {"model_type": "mistral", "sliding_window": 64},
    {"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": False},
    {"model_type": "qwen2", "sliding_window": 8},
    {"rms_norm_eps": None, "rope_theta": None, "model_type": None},
    {"quantity": 3},
  ],
  ids=str,
)
def test_the_same_model_in_other_words(fields, tmp_path):
  assert check(tmp_path, changed(**fields)) is None


@pytest.mark.parametrize(
  ("fields", "says"),
  [
    (
      {"num_attention_heads": 8, "head_dim": None},
      "num_attention_heads is 8 there and 4 here, set Transformer.num_heads=8; "
      "head_dim is 4 there and 8 here, set Transformer.head_width=4",
    ),
    (
      {"num_key_value_heads": 1},
      "num_key_value_heads is 1 there and 2 here, set Transformer.num_kv_heads=1",
    ),
    (
      {"num_key_value_heads": None},
      "num_key_value_heads is 4 there and 2 here, set Transformer.num_kv_heads=4",
    ),
    (
      {"head_dim": 16},
      "head_dim is 16 there and 8 here, set Transformer.head_width=16",
    ),
    (
      {"head_dim": None, "model_type": "qwen3"},
      "head_dim is 128 there and 8 here, set Transformer.head_width=128",
    ),
    (
      {"rope_theta": None, "rope_parameters": TRANSFORMERS_5 | {"rope_theta": 1e6}},
      "rope_theta is 1000000.0 there and 500000.0 here, set "
      "Transformer.rope_theta=1000000.0",
    ),
    (
      {"rope_theta": None},
      "rope_theta is 10000.0 there and 500000.0 here, set "
      "Transformer.rope_theta=10000.0",
    ),
    (
      {"rms_norm_eps": None},
      "rms_norm_eps is 1e-06 there and 1e-05 here, set Transformer.norm_eps=1e-06",
    ),
    (
      {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
      "rope_scaling is {'rope_type': 'llama3', 'factor': 8.0} there and 'default' "
      "here, which no setting changes",
    ),
    (
      {"rope_parameters": TRANSFORMERS_5 | {"rope_type": "yarn"}},
      "rope_parameters is {'rope_type': 'yarn', 'rope_theta': 500000.0} there and "
      "'default' here, which no setting changes",
    ),
    (
      {"hidden_act": "gelu"},
      "hidden_act is 'gelu' there and 'silu' here, which no setting changes",
    ),
    (
      {"attention_bias": True},
      "attention_bias is True there and False here, which no setting changes",
    ),
    (
      {"mlp_bias": True},
      "mlp_bias is True there and False here, which no setting changes",
    ),
    (
      {"model_type": "gemma"},
      "model_type is 'gemma' there and one of llama, mistral, qwen2, qwen3 here, which "
      "no setting changes",
    ),
    (
      {"model_type": "mistral", "sliding_window": 63},
      "sliding_window is 63 there and attention is to all tokens here, give 63 tokens "
      "or fewer as sequence_length",
    ),
  ],
  ids=str,
)  # fmt: skip
def test_another_model_is_one_line(fields, says, tmp_path):
  assert check(tmp_path, changed(**fields)) == says


def test_a_file_without_a_head_is_of_tied_embeddings(tmp_path):
  only = HEAD[:1]
  for tied, says in ((True, None), (False, "tie_word"), (None, "tie_word")):
    line = check(tmp_path, changed(tie_word_embeddings=tied), names=only)
    assert (line or "None").startswith(str(says))
  untied = changed(tie_word_embeddings=False)
  assert check(tmp_path, untied, names=only, init_head=True) is None
  assert check(tmp_path, {"num_hidden_layers": 2}, names=only) is None


S16 = cfg.ViT(width=384, num_layers=12, num_heads=6)
HEADS = "whose heads are 6, and 8 here, set ViT.num_heads=6"


@pytest.mark.parametrize(
  ("model", "reported", "says"),
  [
    (S16, {"architecture": "vit_small_patch16_224"}, None),
    (
      cfg.ViT(width=384, num_heads=8),
      {"architecture": "vit_small_patch16_224.augreg_in21k"},
      f"architecture is 'vit_small_patch16_224' there, {HEADS}",
    ),
    (
      cfg.ViT(width=384, num_heads=8),
      {"architecture": "deit_small_patch16_224", "num_classes": 8},
      f"architecture is 'deit_small_patch16_224' there, {HEADS}; num_classes is 8 "
      "there and 7 here, init_head=True starts the classifier anew",
    ),
    # Not certain: another width, and models of timm's that are built otherwise.
    (cfg.ViT(width=192, num_heads=4), {"architecture": "vit_small_patch16_224"}, None),
    (cfg.ViT(num_heads=8), {"architecture": "vit_small_patch16_36x1_224"}, None),
    (cfg.ViT(num_heads=8), {"architecture": ["vit_small_patch16_224"]}, None),
    (cfg.ResNet(), {"architecture": "resnet50", "num_classes": 7}, None),
    (cfg.ResNet(), {"config": {"model": {"class": "ResNet"}}, "data": {}}, None),
  ],
)  # fmt: skip
def test_what_timm_says(model, reported, says, tmp_path):
  assert check(tmp_path, reported, model=model, naming="timm", num_classes=7) == says
  assert check(tmp_path, {"num_classes": 8}, model=model, naming="timm") is None
  options = {"naming": "timm", "num_classes": 7, "init_head": True}
  assert check(tmp_path, {"num_classes": 8}, model=model, **options) is None


def test_one_that_cannot_be_read_is_one_line(tmp_path):
  check_hf_config(tmp_path, "huggingface", HEAD, LLAMA)  # there is none
  for text in ("{", "[]"):
    (tmp_path / "config.json").write_text(text)
    for naming in ("huggingface", "timm"):
      with pytest.raises(ConfigError, match=r"config.json: unreadable; copy it again"):
        check_hf_config(tmp_path, naming, HEAD, LLAMA)
    check_hf_config(tmp_path, "jaxscale", HEAD, LLAMA)
