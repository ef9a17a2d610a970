"""Models for timm's config.json, and refusals of those without an equivalent."""

import dataclasses
import json
import re

import numpy as np
import pytest

from jaxscale import config as cfg
from jaxscale.data import DatasetInfo
from jaxscale.errors import ConfigError
from jaxscale.models.timm_config import timm_config
from jaxscale.weights.check import check_source
from support.tables import columns, fields

IMAGENET = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
INFO = DatasetInfo("photos", (224, 224, 3), 7, *IMAGENET)
S16, B16, RESNET = cfg.ViT(), cfg.ViT(width=768, num_heads=12), cfg.ResNet()
MEAN = cfg.ViT(width=768, num_heads=16, pool="mean")


def check(folder, reported, model, info=INFO):
  """Return the clauses that report differences, or the notes."""
  (folder / "config.json").write_text(json.dumps(reported))
  path = folder / "x.safetensors"
  try:
    return check_source(path, "timm", (), model, info)
  except ConfigError as e:
    where, _, line = str(e).partition(": belongs to a different model: ")
    assert where == str(folder / "config.json") and "\n" not in line
    return line


MODELS = {
  "resnet": RESNET,
  "bn": dataclasses.replace(RESNET, bn_epsilon=1e-3),
  "s16": S16,
  "ln": dataclasses.replace(S16, norm_eps=1e-12),
  "b16": B16,
  "b16 mean": dataclasses.replace(B16, pool="mean"),
  "mean": MEAN,
  "mlp": cfg.MLP(),
  "tiny": cfg.ConvNeXt(),
  "base": cfg.ConvNeXt(depths=(3, 3, 27, 3), dims=(128, 256, 512, 1024)),
}


def reported(cell):
  """Return a config.json: architecture, other fields, and `args.x` for fields of `model_args`."""
  name, *others = cell.split()
  found = {} if name == "-" else {"architecture": name}
  for key, value in fields(" ".join(others)).items():
    name = key.removeprefix("args.")
    (found if name == key else found.setdefault("model_args", {}))[name] = value
  return found


OURS = columns(MODELS.get, reported)("""
resnet | resnet50
resnet | resnet50.a1_in1k global_pool='avg' num_features=2048 num_classes=7
resnet | resnet50 args.aa_layer='' args.zero_init_last=False args.act_layer='relu' args.in_chans=1
s16 | vit_small_patch16_224.augreg_in21k
s16 | deit_small_patch16_224 global_pool='token'
s16 | vit_base_patch16_224 args.num_heads=6 args.embed_dim=384 args.img_size=32 args.qkv_bias=True
s16 | vit_base_patch16_224 args.num_heads=6 args.drop_path_rate=0.1 args.fc_norm=None
tiny | convnext_tiny
tiny | convnext_tiny.fb_in22k_ft_in1k global_pool='avg' num_features=768 args.drop_path_rate=0.1
tiny | convnext_small args.depths=[3,3,9,3] args.conv_mlp=False args.ls_init_value=1e-6
base | convnext_base.fb_in1k
mean | vit_base_patch16_gap_224
mean | vit_base_patch16_gap_224 global_pool='avg'
b16 mean | vit_base_patch16_224 global_pool='avg' args.class_token=False args.fc_norm=False
b16 mean | vit_base_patch16_224 args.global_pool='avg' args.class_token=False args.fc_norm=False
""")


@pytest.mark.parametrize("model, reported", OURS)
def test_networks_that_are_ours(model, reported, tmp_path):
  assert check(tmp_path, reported, model) == []


OTHERS = columns(MODELS.get, reported, str)("""
resnet | resnetaa50 | architecture is 'resnetaa50', but jaxscale only supports resnet18 to
resnet | resnet101 | depth is 101 / 50, set ResNet.depth=101
resnet | resnet50 args.aa_layer='blurpc' | is 'blurpc' / '', which no setting changes
resnet | resnet50 args.act_layer='silu' | act_layer is 'silu' / 'relu'
resnet | resnet50 args.norm_layer='evonorm' | norm_layer is 'evonorm', which jaxscale does not know
resnet | resnet50 global_pool='max' | global_pool is 'max' / 'avg' or 'fast', which no
b16 | vit_base_patch16_gap_224 | num_heads is 16 / 12, set ViT.num_heads=16; pool is
b16 | vit_base_patch16_gap_224 | pool is 'mean' / 'token', set ViT.pool='mean'
b16 | - global_pool='avg' num_classes=7 | global_pool is 'avg, class_token
s16 | vit_base_patch16_224 | num_heads is 12 / 6, set ViT.num_heads=12
s16 | vit_small_patch16_224 args.num_heads=8 | num_heads is 8 / 6, set ViT.num_heads=8
bn | resnet50 | BatchNorm's epsilon is 1e-05 / 0.001, set ResNet.bn_epsilon=1e-05
ln | vit_small_patch8_32 | LayerNorm's epsilon is 1e-06 / 1e-12, set ViT.norm_eps=1e-06
mlp | resnet50 | depth is 50 / None
tiny | convnext_base | depths is (3, 3, 27, 3) / (3, 3, 9, 3), set ConvNeXt.depths=(3, 3, 27, 3)
tiny | convnext_tiny_hnf | is 'convnext_tiny_hnf', but jaxscale only supports convnext_tiny to
tiny | convnextv2_tiny | is 'convnextv2_tiny', but
tiny | convnext_tiny args.use_grn=True | use_grn is True / False, which no
tiny | convnext_tiny args.norm_eps=1e-5 | norm_eps is 1e-05 / 1e-06, set ConvNeXt.norm_eps=1e-05
tiny | convnext_tiny args.head_hidden_size=768 | head_hidden_size is 768, which jaxscale does not
s16 | vit_small_patch14_dinov2 | is 'vit_small_patch14_dinov2', but jaxscale only supports plain
s16 | vit_small_patch16_224 args.reg_tokens=4 | reg_tokens is 4 / 0
""")
POOLING = (
  "global_pool is 'avg, class_token=True, fc_norm=True' / 'token, class_token=True, "
  "fc_norm=False' or 'avg, class_token=False, fc_norm=False', which no setting changes"
)
AVERAGE = {"architecture": "vit_base_patch16_224", "global_pool": "avg"}
WITHOUT_NORM = AVERAGE | {"model_args": {"fc_norm": False}}
OTHERS += [(B16, AVERAGE, POOLING)]
OTHERS += [(B16, WITHOUT_NORM, "global_pool is 'avg, class_token=True, fc_norm=False' in the file")]


@pytest.mark.parametrize("model, reported, says", OTHERS)
def test_networks_of_other_mathematics_are_refused(model, reported, says, tmp_path):
  values = r" in the file and \1 in the model"
  assert re.sub(r" / (.*?)(?=, set|, which|$)", values, says) in check(tmp_path, reported, model)


@pytest.mark.parametrize(
  "model",
  [
    cfg.ResNet(depth=34),
    cfg.ConvNeXt(depths=(1, 1, 1, 1)),
    S16,
    MEAN,
    cfg.ViT(width=96, num_heads=2, hidden=100, patch=7),
  ],
)
@pytest.mark.parametrize("channels", [1, 3])
def test_what_is_written_is_of_that_model(model, channels, tmp_path):
  shape = 224, 224, channels
  info = INFO._replace(image_shape=shape, mean=INFO.mean[:channels], std=INFO.std[:channels])
  written = json.loads(json.dumps(timm_config(model, info._asdict())))
  assert check(tmp_path, written, model, info) == []
  assert written["pretrained_cfg"]["input_size"] == [channels, 224, 224]
  assert written["model_args"]["in_chans"] == channels
  np.testing.assert_allclose(written["pretrained_cfg"]["mean"][0], 0.485, rtol=1e-6)
  if "mlp_ratio" in written["model_args"]:
    hidden = int(model.width * written["model_args"]["mlp_ratio"])
    assert hidden == (model.hidden or 4 * model.width)
  changes = {"num_heads": 1, "depth": 18, "norm_eps": 1e-3}
  change = next({name: value} for name, value in changes.items() if hasattr(model, name))
  other = dataclasses.replace(model, **change)
  assert "in the file and" in check(tmp_path, written, other, info)


UNKNOWN = [cfg.ResNet(width=32), cfg.ResNet(stem="small"), cfg.ResNet(bn_epsilon=1e-3)]
UNKNOWN += [cfg.ViT(norm_eps=1e-12), cfg.CNN(), cfg.ConvNeXt(depths=(1,), dims=(8,))]


@pytest.mark.parametrize("model", UNKNOWN)
def test_what_timm_has_not_is_not_written(model):
  assert timm_config(model, INFO._asdict()) is None


def test_a_config_of_a_run_is_not_timms(tmp_path):
  run = {"config": {"model": {"class": "ResNet"}}, "data": {"num_classes": 3}}
  (note,) = check(tmp_path, run, RESNET)
  assert "no config.json next to the file" in note


def test_what_only_images_have_is_a_note(tmp_path):
  reported = {"architecture": "resnet50", "new": 1}
  (note,) = check(tmp_path, reported, RESNET)
  assert note.endswith("not compared, as their meaning is unknown: new")
  cfg_of = {"mean": [0.485, 0.456, 0.406], "std": [0.5, 0.5, 0.5], "crop_pct": 0.9}
  reported = {"architecture": "resnet50", "pretrained_cfg": cfg_of}
  (note,) = check(tmp_path, reported, RESNET)
  # As older versions wrote it.
  assert check(tmp_path, {"architecture": "resnet50"} | cfg_of, RESNET) == [note]
  assert note.endswith(
    "images had std [0.5, 0.5, 0.5] in the file and have [0.229, 0.224, 0.225] in the data"
  )
  gray = INFO._replace(image_shape=(28, 28, 1), mean=(127.5,), std=(127.5,))
  of_gray = {"architecture": "resnet50", "pretrained_cfg": {"mean": [0.5], "std": [0.4]}}
  (note,) = check(tmp_path, of_gray, RESNET, gray)
  assert "images had std [0.4] in the file and have [0.5] in the data" in note


def test_class_names_are_written():
  names = tuple(f"class {i}" for i in range(7))
  found = timm_config(RESNET, INFO._replace(class_names=names)._asdict())
  assert found is not None and found["label_names"] == list(names)
  assert "label_names" not in (timm_config(RESNET, INFO._asdict()) or {})
