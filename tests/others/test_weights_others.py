"""Networks of timm, torchvision and transformers: read by ours, or refused by name."""

import dataclasses
import json
import re

import pytest

pytest.importorskip("torch")
for package in ("timm", "torchvision", "transformers"):
  pytest.importorskip(package)

import timm
import torch
import torchvision
import transformers
from timm.models import deit, vision_transformer
from timm.models import resnet as timm_resnet

from jaxscale import config as cfg
from jaxscale.errors import ConfigError
from jaxscale.models.resnet import DEPTHS
from jaxscale.weights.check import check_source
from jaxscale.weights.families import settings_of
from jaxscale.weights.hf_config import completed
from others import agreement, training


@pytest.mark.parametrize("name", agreement.NETWORKS)
def test_the_same_logits(name):
  error, deviation = agreement.measured(name)
  assert deviation > 0.1
  assert error < 1e-5 * deviation


def test_the_table_of_the_docs_is_what_is_measured():
  lines = agreement.written().splitlines()
  rows = [re.split(r" *\| *", line)[1:-1] for line in lines if line.startswith("| ")]
  written = {name: [float(x) for x in rest] for name, *rest in rows if rest[0][0].isdigit()}
  trained = training.differences()
  assert list(written) == [*agreement.NETWORKS, *trained]
  # Another machine rounds otherwise.
  for name in agreement.NETWORKS:
    (error, deviation), found = written[name], agreement.measured(name)
    assert found[0] <= 4 * error
    assert abs(found[1] - deviation) < 0.01 * found[1]
  for name, found in trained.items():
    assert found <= 4 * written[name][0] + 1e-15


# Arguments of a network of timm's that is ours, whatever their values.
PLAIN = {"patch_size", "embed_dim", "depth", "num_heads", "mlp_ratio", "img_size"}
GAP = {"class_token": False, "global_pool": "avg", "fc_norm": False}
MODULES = {
  vision_transformer: "_create_vision_transformer",
  deit: "_create_deit",
  timm_resnet: "_create_resnet",
}


def arguments(module, architecture, monkeypatch):
  """What an architecture of timm's is made with."""
  found = {}
  with monkeypatch.context() as patch:
    patch.setattr(module, MODULES[module], lambda variant, *_, **more: found.update(more))
    timm.models._registry._model_entrypoints[architecture]()
  return {k: v for k, v in found.items() if k not in ("pretrained", "variant")}


def is_ours(module, made):
  if module is timm_resnet:
    block = made.pop("block")
    kind = made.pop("layers"), block is timm_resnet.Bottleneck
    return not made and kind in DEPTHS.values()
  rest = {k: v for k, v in made.items() if k not in PLAIN}
  return rest in ({}, GAP)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_of_all_architectures_of_timm_only_ours_are_taken(module, monkeypatch, tmp_path):
  taken = 0
  for architecture in timm.list_models(module=module.__name__.rpartition(".")[2]):
    made = arguments(module, architecture, monkeypatch)
    is_image_net = "siglip" not in architecture  # plain, but without a classifier
    ours = is_ours(module, dict(made)) and is_image_net
    (tmp_path / "config.json").write_text(json.dumps({"architecture": architecture}))
    model = cfg.ResNet()
    if module is not timm_resnet:
      pool = "mean" if "class_token" in made else "token"
      heads = made.get("num_heads", 12)
      model = cfg.ViT(width=heads * 8, num_heads=heads, pool=pool)
    elif ours:
      depth = int(architecture.removeprefix("tv_").removeprefix("resnet"))
      model = cfg.ResNet(depth=depth)
    try:
      check_source(tmp_path, "timm", (), model, agreement.photos(224))
    except ConfigError as e:
      assert not ours, architecture
      assert "architecture is" in str(e) or "no setting" in str(e)
    else:
      assert ours, architecture
    taken += ours
  assert taken > 3


def shapes(model):
  return {k: tuple(v.shape) for k, v in model.state_dict().items()}


# What names and shapes alone say of a network: timm's, torchvision's, transformers'.
ADVICE = """
  timm resnet101: ResNet(depth=101, width=64,
  timm resnet18 in_chans=1 num_classes=3: ResNet(depth=18, width=64, stem='imagenet')
  timm vit_small_patch32_224: ViT(patch=32, width=384, num_layers=12, hidden=1536, pool='token') \
and images of 224 pixels
  timm vit_base_patch16_gap_224: ViT(patch=16, width=768, num_layers=12, hidden=3072, \
pool='mean') and
  timm torchvision.resnet34: ResNet(depth=34,
  torchvision torchvision.vit_b_16: ViT(patch=16, width=768, num_layers=12, hidden=3072, \
pool='token') and
  huggingface Qwen2: Transformer(num_layers=2, width=48, hidden=64, qk_norm=False, \
qkv_bias=True) and 48 words
  huggingface Qwen3 head_dim=12: Transformer(num_layers=2, width=48, hidden=64, qk_norm=True,
"""


def network(naming, name, **options):
  if naming == "huggingface":  # stirring needs numbers
    return agreement.language_model(name, **options)
  with torch.device("meta"):
    if name.startswith("torchvision."):
      return getattr(torchvision.models, name.removeprefix("torchvision."))()
    return timm.create_model(name, **options)


@pytest.mark.parametrize("line", ADVICE.strip().splitlines(), ids=lambda x: x.partition(":")[0])
def test_settings_are_advised_only_where_there_are_such(line):
  of, _, advice = line.partition(": ")
  naming, name, *options = of.split()
  options = {k: int(v) for k, v in (x.split("=") for x in options)}
  assert settings_of(naming, shapes(network(naming, name, **options))).startswith(advice)


OTHER = """
  resnet50d seresnet50 resnext50_32x4d wide_resnet50_2 resnet50_gn resnet26
  vit_small_patch14_dinov2 deit3_small_patch16_224 deit_small_distilled_patch16_224
"""
OF_VIT = [("vit_tiny_patch16_224", x) for x in ({"global_pool": "avg"}, {"reg_tokens": 4})]


@pytest.mark.parametrize(
  ("architecture", "options"), [*((name, {}) for name in OTHER.split()), *OF_VIT]
)
def test_no_settings_are_advised_for_what_is_not_ours(architecture, options):
  assert settings_of("timm", shapes(network("timm", architecture, **options))) is None


BIASED = [("Llama", {"attention_bias": True}), ("Llama", {"mlp_bias": True})]


@pytest.mark.parametrize(("kind", "fields"), [*BIASED, ("Gemma2", {"head_dim": 12})])
def test_nor_for_language_models_that_are_not(kind, fields):
  assert settings_of("huggingface", shapes(network("huggingface", kind, **fields))) is None


VIT = {"embed_dim": 48, "depth": 2, "num_heads": 3, "img_size": 32, "patch_size": 8}
V48 = cfg.ViT(width=48, num_layers=2, num_heads=3, patch=8)
NO_HEAD = "2 missing, first fc.weight; init_head=True starts the classifier anew"
R18, AVG, FOUR_HEADS = cfg.ResNet(depth=18), {"global_pool": "avg"}, {"num_heads": 4}
OF_R18 = "it is of ResNet(depth=18, width=64, stem='imagenet'), set these"
OF_NONE = "it is of a network that is not among ours, and no settings make it one"
# An architecture, settings of ours, options of timm's; what is refused, and what
# without config.json, where anything is.
REFUSED = [
  ("resnet18", R18, {"num_classes": 0}, NO_HEAD, NO_HEAD),
  ("resnet18", cfg.ResNet(depth=34), {}, "depth is 18 there and 34 here, set ResNet", OF_R18),
  ("seresnet18", R18, {}, "architecture is 'seresnet18' there", OF_NONE),
  ("resnetblur18", R18, {}, "architecture is 'resnetblur18' there", None),
  ("vit", V48, AVG, "class_token=True, fc_norm=True", "only those of fc_norm=False are"),
  ("vit", V48, AVG | {"fc_norm": False}, "class_token=True, fc_norm=False", None),
  ("vit", V48, {"qk_norm": True}, "qk_norm is True there", "not among ours"),
  (
    "vit",
    dataclasses.replace(V48, **FOUR_HEADS),
    {},
    "num_heads is 3 there and 4 here, set V",
    None,
  ),
]


@pytest.mark.parametrize(("architecture", "settings", "options", "says", "or_else"), REFUSED)
def test_what_timm_saved_is_refused_by_name(architecture, settings, options, says, or_else):
  options = {"num_classes": agreement.CLASSES} | options
  if architecture == "vit":
    architecture, options = "vit_base_patch16_224", VIT | options
  info = agreement.photos(32)
  with agreement.saved(timm.create_model(architecture, **options)) as folder:
    with pytest.raises(ConfigError) as with_config:
      agreement.read(folder, settings, info)
    (folder / "config.json").unlink()
    assert says in str(with_config.value) and "\n" not in str(with_config.value)
    if or_else is not None:  # by names and shapes alone
      with pytest.raises(ConfigError) as e:
        agreement.read(folder, settings, info)
      assert or_else in str(e.value) and "\n" not in str(e.value)
    else:
      _, notes = agreement.read(folder, settings, info)
      assert "no config.json next to it" in notes[0]


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("fields", [{}, {"hidden_size": 64, "num_attention_heads": 4}], ids=str)
def test_a_field_that_is_missing_is_what_transformers_takes(kind, fields):
  made = getattr(transformers, f"{kind}Config")(**fields)
  there = completed({"hidden_size": 4096, "model_type": kind.lower()} | fields)
  heads = made.num_attention_heads
  width = getattr(made, "head_dim", None) or made.hidden_size // heads
  wanted = dict(num_attention_heads=heads, num_key_value_heads=made.num_key_value_heads)
  wanted |= dict(head_dim=width, rms_norm_eps=made.rms_norm_eps)
  wanted |= dict(rope_theta=made.rope_parameters["rope_theta"])
  assert {name: there[name] for name in wanted} == wanted


@pytest.mark.parametrize("kind", ["StableLm", "Phi", "GPTNeoX"])
def test_partial_rotary_positions_are_refused_by_name(kind, tmp_path):
  config = getattr(transformers, f"{kind}Config")()
  config.save_pretrained(tmp_path)
  with pytest.raises(ConfigError, match=r"partial_rotary_factor is 0\.\d+ there"):
    check_source(tmp_path, "huggingface", (), cfg.Transformer(), agreement.TEXT)
