"""Arrays of other images that are made to fit, and what a file is of if they do not."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale import models
from jaxscale.models.stack import stack_logits
from jaxscale.weights import export_safetensors, import_safetensors
from jaxscale.weights.fit import fit, resize_positions
from jaxscale.weights.names import guess
from support.cases import all_slow_except
from support.errors import config_error


@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize(("old", "new"), [(4, 6), (6, 4), (7, 2), (3, 3), (1, 5)])
def test_positions_are_resized_as_jax_resizes_images(old, new, prefix):
  x = np.random.default_rng(0).normal(size=(prefix + old * old, 5)).astype(np.float32)
  found = resize_positions(x, prefix=prefix, new=new)
  grid = x[prefix:].reshape(old, old, 5)
  wanted = jax.image.resize(grid, (new, new, 5), "cubic", antialias=True)
  np.testing.assert_array_equal(found[:prefix], x[:prefix])
  assert found.dtype == np.float32
  np.testing.assert_allclose(found[prefix:], wanted.reshape(-1, 5), atol=2e-6)


EMBEDDING = "params/embed/"
MISFITS = [
  (EMBEDDING + "position", "tokens", (1, 196, 8), (1, 197, 8)),  # no class token
  (EMBEDDING + "position", "tokens", (1, 197, 8), (1, 50, 9)),
  (EMBEDDING + "position", "tokens", (1, 12, 8), (1, 16, 8)),  # not square
  (EMBEDDING + "patch/kernel", "patch", (8, 3, 4, 4), (8, 3, 2, 2)),
  (EMBEDDING + "patch/kernel", "patch", (8, 4, 4, 4), (8, 3, 4, 4)),
  ("params/Conv_1/kernel", "conv", (8, 3, 3, 3), (8, 1, 3, 3)),
  ("params/head/kernel", "linear", (3, 8), (1, 8)),
]


@pytest.mark.parametrize("ours, how, there, here", MISFITS)
def test_what_cannot_be_made_to_fit(ours, how, there, here):
  assert fit(ours, how, there, here) is None


def vit(pixels=16, channels=3, num_layers=1):
  sizes = dict(num_classes=5, patch=4, width=8, num_heads=2, num_layers=num_layers)
  return models.make_vit(image_shape=(pixels, pixels, channels), **sizes)


def resnet(channels):
  module = models.ResNetModule(num_classes=5, stage_sizes=(1, 1), bottleneck=True, width=4)
  return models.functions(module, (32, 32, channels))


@pytest.mark.parametrize("kind", all_slow_except(["vit", "resnet"], "vit"))
@pytest.mark.parametrize("there", [1, 3])
def test_gray_images_have_the_logits_of_gray_colors(kind, there, tmp_path):
  here, path = 4 - there, tmp_path / "x"
  make = vit if kind == "vit" else resnet

  def made(channels):
    found = make(channels=channels).init(jax.random.key(0))
    return (found, {}) if kind == "vit" else found

  params, state = made(there)
  if kind == "vit":  # its head starts at 0
    params["head"]["kernel"] = params["embed"]["patch"]["kernel"][:8, :5] * jnp.ones(5)
  export_safetensors(path, params, state, naming="timm")
  found = import_safetensors(path, *made(here))
  assert f"kernels of {there} channels converted to {here}" in found.summary
  gray = np.random.default_rng(0).normal(size=(2, 32, 32, 1)).astype(np.float32)
  images = {1: gray, 3: np.repeat(gray, 3, axis=-1)}

  def logits(channels, params, state):
    x = images[channels]
    if kind == "vit":
      return stack_logits(make(channels=channels), params, {"image": x[:, :16, :16]})
    return make(channels).apply(params, state, x, False, None)[0]

  wanted = logits(there, params, state)
  assert np.ptp(wanted) > 1e-3
  found = logits(here, found.params, found.model_state)
  np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)


def test_another_image_size_is_read_and_said(tmp_path):
  params = vit(16).init(jax.random.key(0))
  export_safetensors(tmp_path / "x", params, naming="timm")
  like = vit(24).init(jax.random.key(1))
  found = import_safetensors(tmp_path / "x", like)
  assert "position embeddings resized from 4x4 to 6x6 patches" in found.summary
  wanted = resize_positions(np.asarray(params["embed"]["position"]), prefix=1, new=6)
  np.testing.assert_array_equal(found.params["embed"]["position"], wanted)
  assert found.params["embed"]["class_token"].shape == (8,)


def test_a_file_that_does_not_fit_says_what_to_set(tmp_path):
  export_safetensors(tmp_path / "x", vit().init(jax.random.key(0)), naming="timm")
  with config_error() as e:
    import_safetensors(tmp_path / "x", vit(num_layers=2).init(jax.random.key(0)))
  assert str(e.value).endswith(
    "12 missing, first blocks.1.norm1.weight; set the model's sizes (and pad_vocab_to) to "
    "the file's, if jaxscale has this model"
  )


def test_names_that_are_not_known_are_of_what_the_config_says(tmp_path):
  names = ["gpt_neox.embed_in.weight"]
  with config_error("(such as gpt_neox.embed_in.weight) match none"):
    guess(tmp_path, names)
  fields = {"model_type": "gpt_neox", "rotary_pct": 0.25, "hidden_size": 8}
  (tmp_path / "config.json").write_text(json.dumps(fields))
  for path in (tmp_path, tmp_path / "model.safetensors"):
    wanted = "torchvision, huggingface, peft, and its config.json says "
    with config_error(f"{wanted}model_type='gpt_neox', rotary_pct=0.25; use"):
      guess(path, names)
