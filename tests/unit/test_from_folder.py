"""A model from a folder's config.json: each family, and what jaxscale has not."""

import json
import subprocess
import sys

import pytest

from jaxscale import config as cfg
from jaxscale import models
from jaxscale.config.record import to_plain
from jaxscale.models.hf_config import llama_config, vit_config
from jaxscale.models.timm_config import timm_config
from support.errors import config_error
from support.tables import fields

# Fields of published files: the config.json of Llama 3.2 1B, Qwen3 0.6B, Mistral 7B v0.3 and
# google/vit-base-patch16-224, without what changes no mathematics.
LLAMA = fields("""
model_type='llama' hidden_size=2048 intermediate_size=8192 num_hidden_layers=16
num_attention_heads=32 num_key_value_heads=8 head_dim=64 rms_norm_eps=1e-05 rope_theta=500000.0
vocab_size=128256 tie_word_embeddings=True hidden_act='silu' attention_bias=False mlp_bias=False
max_position_embeddings=131072
""")
LLAMA["rope_scaling"] = dict(factor=32.0, high_freq_factor=4.0, low_freq_factor=1.0)
LLAMA["rope_scaling"] |= dict(original_max_position_embeddings=8192, rope_type="llama3")
QWEN3 = fields("""
model_type='qwen3' hidden_size=1024 intermediate_size=3072 num_hidden_layers=28
num_attention_heads=16 num_key_value_heads=8 head_dim=128 rms_norm_eps=1e-06 rope_theta=1000000
vocab_size=151936 tie_word_embeddings=True hidden_act='silu' attention_bias=False
rope_scaling=None sliding_window=None use_sliding_window=False
""")
MISTRAL = fields("""
model_type='mistral' hidden_size=4096 intermediate_size=14336 num_hidden_layers=32
num_attention_heads=32 num_key_value_heads=8 rms_norm_eps=1e-05 rope_theta=1000000.0
vocab_size=32768 sliding_window=None hidden_act='silu' tie_word_embeddings=False
""")
VIT = fields("""
model_type='vit' hidden_size=768 intermediate_size=3072 num_hidden_layers=12 image_size=224
num_attention_heads=12 layer_norm_eps=1e-12 patch_size=16 hidden_act='gelu' qkv_bias=True
""")
SCALED = dict(rope_factor=32.0, rope_low=1.0, rope_high=4.0, rope_length=8192)
FOLDERS = [
  (
    LLAMA,
    cfg.Transformer(
      num_layers=16, width=2048, num_heads=32, num_kv_heads=8, head_width=64, hidden=8192,
      rope_theta=5e5, **SCALED, norm_eps=1e-5, pad_vocab_to=128256, tied=True,
    ),
  ),
  (
    QWEN3,
    cfg.Transformer(
      num_layers=28, width=1024, num_heads=16, num_kv_heads=8, head_width=128, hidden=3072,
      rope_theta=1e6, norm_eps=1e-6, qk_norm=True, pad_vocab_to=151936, tied=True,
    ),
  ),
  (
    MISTRAL,
    cfg.Transformer(
      num_layers=32, width=4096, num_heads=32, num_kv_heads=8, head_width=128, hidden=14336,
      rope_theta=1e6, norm_eps=1e-5, pad_vocab_to=32768,
    ),
  ),
  (VIT, cfg.ViT(width=768, num_heads=12, num_layers=12, hidden=3072, norm_eps=1e-12)),
  (
    {"architecture": "vit_small_patch16_224.augreg_in21k_ft_in1k", "num_classes": 1000},
    cfg.ViT(width=384, num_heads=6, num_layers=12, hidden=1536),
  ),
  (
    {"architecture": "vit_giant_patch16_gap_224", "model_args": {"num_classes": 3}},
    cfg.ViT(width=1408, num_heads=16, num_layers=40, hidden=6144, pool="mean"),
  ),
  ({"architecture": "resnet50.a1_in1k", "num_classes": 1000}, cfg.ResNet(depth=50)),
  (
    {"architecture": "convnext_base.fb_in22k", "num_classes": 21841},
    cfg.ConvNeXt(depths=(3, 3, 27, 3), dims=(128, 256, 512, 1024)),
  ),
]  # fmt: skip


def folder_of(tmp_path, reported):
  (tmp_path / "config.json").write_text(json.dumps(reported))
  return tmp_path


@pytest.mark.parametrize("reported, model", FOLDERS, ids=lambda x: str(x)[:40])
def test_published_models(reported, model, tmp_path):
  found = models.from_folder(folder_of(tmp_path, reported))
  assert type(found) is type(model) and to_plain(found) == to_plain(model)


SMALL = dict(num_layers=2, width=32, num_heads=4, num_kv_heads=2, hidden=64)
OURS = [
  cfg.Transformer(**SMALL),
  cfg.Transformer(**SMALL, qk_norm=True, head_width=16, tied=True),
  cfg.Transformer(**SMALL, qkv_bias=True, norm_eps=1e-6),
  cfg.Transformer(**SMALL, rope_factor=8.0, rope_low=2.0, rope_length=32),
]


@pytest.mark.parametrize("model", OURS)
def test_what_is_exported_is_read_again(model, tmp_path):
  written = llama_config(model, hidden=64, vocab_size=128, sequence_length=8, dtype="float32")
  plain = to_plain(models.from_folder(folder_of(tmp_path, written)))
  width = model.head_width or 8
  assert plain == to_plain(model) | {"head_width": width}


IMAGES = {"image_shape": (32, 32, 3), "num_classes": 10, "dtype": "uint8"}
IMAGES |= {"mean": (127.5,), "std": (127.5,)}


@pytest.mark.parametrize("write", ["timm", "huggingface"])
def test_a_vit_that_is_exported_is_read_again(write, tmp_path):
  model = cfg.ViT(width=48, num_layers=2, num_heads=3, patch=8, hidden=100)
  of_timm = timm_config(model, IMAGES)
  of_hf = vit_config(model, IMAGES, hidden=100, dtype="float32")
  found = models.from_folder(folder_of(tmp_path, of_timm if write == "timm" else of_hf))
  assert to_plain(found) == to_plain(model)


NO_TYPE = "model_type=None is not supported; use a model of llama, mistral, qwen2, qwen3, vit, or"
QUANTIZED = {"quantization_config": {"bits": 4}}
NOT_OURS = [
  ({}, {}, NO_TYPE),
  ({"model_type": "gemma3"}, {}, "model_type=gemma3 is not supported; use a model of llama"),
  (MISTRAL, {"hidden_size": None}, "lacks 'hidden_size'; copy it again"),
  (LLAMA, QUANTIZED, "quantization_config is {'bits': 4} in the file and None in the model"),
  (QWEN3, {"attention_bias": True}, "attention_bias is True in the file and False in the"),
  (VIT, {"num_attention_heads": "five"}, "ViT.num_heads='five': expected int"),
  ({"architecture": "seresnet50"}, {}, "architecture=seresnet50 is not supported; use resnet18"),
  ({"architecture": "vit_base_patch16_224"}, {"global_pool": "avg"}, "global_pool is 'avg, class"),
]


@pytest.mark.parametrize("reported, changes, says", NOT_OURS, ids=str)
def test_what_jaxscale_has_not_is_one_line(reported, changes, says, tmp_path):
  reported = {k: v for k, v in (reported | changes).items() if v is not None}
  with config_error() as e:
    models.from_folder(folder_of(tmp_path, reported))
  assert str(e.value).startswith(f"{tmp_path / 'config.json'}") and says in str(e.value)


def test_a_path_without_a_config(tmp_path):
  with config_error(match="has no config.json; give a folder with the config.json of Hugging"):
    models.from_folder(tmp_path)
  with config_error(match="^Qwen/Qwen3-0.6B is not a folder; nothing is downloaded; run `hf"):
    models.from_folder("Qwen/Qwen3-0.6B")
  with config_error(match="is not a folder; give a folder with"):
    models.from_folder(tmp_path / "Qwen3-0.6B")


def test_jax_is_not_imported(tmp_path):
  folder = folder_of(tmp_path, VIT)
  code = f"from jaxscale import models; models.from_folder({str(folder)!r}); import sys; "
  code += "assert 'jax' not in sys.modules and 'flax' not in sys.modules"
  subprocess.run([sys.executable, "-c", code], check=True)
