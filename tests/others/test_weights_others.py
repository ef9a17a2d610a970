"""Networks of timm, torchvision and transformers: read by ours, or refused by name."""

import dataclasses
import json
import re

import pytest

pytest.importorskip("torch")
for package in ("timm", "torchvision", "transformers"):
  pytest.importorskip(package)

import timm
import transformers
from timm.models import convnext, deit, vision_transformer
from timm.models import resnet as timm_resnet

from jaxscale import config as cfg
from jaxscale.errors import ConfigError
from jaxscale.models.hf_config import completed
from jaxscale.models.resnet import DEPTHS
from jaxscale.weights.check import check_source
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
  convnext: "_create_convnext",
}


def arguments(module, architecture, monkeypatch):
  """Return the arguments with which timm makes an architecture."""
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
  if module is convnext:
    return made.keys() == {"depths", "dims"}
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
    if module is convnext:
      sizes = {name: tuple(made[name]) for name in ("depths", "dims")} if ours else {}
      model = cfg.ConvNeXt(**sizes)
    elif module is not timm_resnet:
      pool = "mean" if "class_token" in made else "token"
      own = made if ours else {}
      width, ratio = own.get("embed_dim", 768), own.get("mlp_ratio", 4)
      sizes = {"num_layers": own.get("depth", 12), "num_heads": own.get("num_heads", 12)}
      sizes |= {"hidden": int(width * ratio), "patch": own.get("patch_size", 16)}
      model = cfg.ViT(width=width, pool=pool, **sizes)
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


VIT = {"embed_dim": 48, "depth": 2, "num_heads": 3, "img_size": 32, "patch_size": 8}
V48 = cfg.ViT(width=48, num_layers=2, num_heads=3, patch=8)
NO_HEAD = "2 missing, first fc.weight; set init_head=True to initialize the classifier anew"
R18, AVG = cfg.ResNet(depth=18), {"global_pool": "avg"}
ATTO = cfg.ConvNeXt(depths=(2, 2, 6, 2), dims=(40, 80, 160, 320))
FOUR_HEADS = dataclasses.replace(V48, num_heads=4)
OF_R18 = "; set the model's sizes"
OF_NONE = "if jaxscale has this model"
# An architecture, settings of ours, options of timm's; what is refused, and what
# without config.json, where anything is.
REFUSED = [
  ("resnet18", R18, {"num_classes": 0}, NO_HEAD, NO_HEAD),
  (
    "resnet18",
    cfg.ResNet(depth=34),
    {},
    "depth is 18 in the file and 34 in the model, set ResNet",
    OF_R18,
  ),
  ("seresnet18", R18, {}, "architecture is 'seresnet18'", OF_NONE),
  ("resnetblur18", R18, {}, "architecture is 'resnetblur18'", None),
  ("convnext_small", cfg.ConvNeXt(), {}, "set ConvNeXt.depths=(3, 3, 27, 3)", OF_R18),
  ("convnextv2_atto", ATTO, {}, "architecture is 'convnextv2_atto'", OF_R18),
  ("vit", V48, AVG, "class_token=True, fc_norm=True", "only timm's ViTs with fc_norm=False can"),
  ("vit", V48, AVG | {"fc_norm": False}, "class_token=True, fc_norm=False", None),
  ("vit", V48, {"qk_norm": True}, "qk_norm is True in the file", OF_NONE),
  ("vit", FOUR_HEADS, {}, "num_heads is 3 in the file and 4 in the model, set V", None),
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
      assert "no config.json next to the file" in notes[0]


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
  with pytest.raises(ConfigError, match=r"partial_rotary_factor is 0\.\d+ in the file"):
    check_source(tmp_path, "huggingface", (), cfg.Transformer(), agreement.TEXT)
