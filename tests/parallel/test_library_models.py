"""Inputs, outputs, parameters and files of the models of each library."""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from jaxscale import config as cfg
from jaxscale import data, models, weights
from jaxscale.optim.masks import kernels
from jaxscale.optim.tree_paths import path_name
from jaxscale.training.losses import Objective
from support.errors import config_error
from support.libraries import MODELS, Eqx, Nnx, Normed, Of, X, Y, made_of, trained
from support.trees import assert_same_bits


@pytest.fixture(autouse=True)
def standard():
  """Equinox and Haiku need JAX's usual promotion of dtypes."""
  with jax.numpy_dtype_promotion("standard"):
    yield


@pytest.mark.parametrize("name", ["nnx", "equinox", "equinox, ema", "haiku"])
def test_export_has_the_modules_paths_and_is_read_back(name, tmp_path):
  made = made_of(Normed(make=MODELS[name]))
  _, state = trained(made, 2)
  path = tmp_path / "model.safetensors"
  weights.export_safetensors(path, state.params, state.model_state)
  paths = {
    "nnx": ["params/layers/0/kernel", "batch_stats/norm/mean", "state/drop/rngs/key"],
    "equinox": ["params/layers/0/weight", "batch_stats/norm/batch_state_index/0"],
    "equinox, ema": ["params/norm/weight", "state/norm/ema_first_time_index"],
    "haiku": ["params/linear_1/w", "batch_stats/batch_norm/~/mean_ema/average"],
  }
  held = load_file(path)
  assert {*paths[name]} <= held.keys()
  for where, x in jax.tree.leaves_with_path((state.params, state.model_state)):
    where = path_name(where[1:])
    same = held[where if where in held else f"params/{where}"]
    assert same.dtype == x.dtype and np.array_equal(same, x)
  again = made_of(Normed(make=MODELS[name]), 2, init_from=str(path), seed=1)
  read = again.init_state()
  assert_same_bits(read.params, state.params)
  assert_same_bits(read.model_state, state.model_state)


GIVEN = {
  "nnx": lambda: Nnx(False, rngs=nnx.Rngs(7)),
  "equinox": lambda: Eqx(None, key=jax.random.key(7)),
}


@pytest.mark.parametrize("name", GIVEN)
def test_a_module_with_its_own_parameters_is_noted_and_keeps_them(name):
  first = GIVEN[name]().layers[0]
  first = first.kernel[...] if name == "nnx" else first.weight
  made = made_of(Of(make=GIVEN[name]))
  (note,) = made.notes
  assert "has its own initial parameters, which do not depend on Config.seed; return" in note
  kernel = next(x for x in jax.tree.leaves(made.init_state().params) if x.shape == first.shape)
  np.testing.assert_array_equal(kernel, first)


class Towers(nnx.Module):
  def __init__(self, rngs):
    self.photo, self.text = nnx.Linear(16, 4, rngs=rngs), nnx.Embed(5, 4, rngs=rngs)

  def __call__(self, photo, caption=None):
    return {"photo": self.photo(photo), "text": self.text(caption).mean(1)}


class Pairs(cfg.Data):
  def build(self):
    arrays = {"photo": X, "caption": Y[:, None] + np.arange(2), "label": Y}
    return data.from_named("pairs", arrays), data.from_named("pairs", arrays)


class Sum(cfg.Loss):
  def build(self, info):
    def loss(outputs, batch):
      return ((outputs["photo"] - outputs["text"]) ** 2).sum(-1)

    return Objective(loss)


class Picked(Of):
  def inputs(self, batch):
    return batch["photo"], batch["caption"]


class Named(Towers):
  def __call__(self, picture, caption):
    return super().__call__(picture, caption)


class Lost(Towers):
  def __call__(self, photo, caption):
    return super().__call__(photo, caption)["photo"].mean(0)


def test_a_model_gets_the_arrays_that_its_call_names_or_that_its_settings_pick():
  options = {"data": Pairs(), "loss": Sum()}
  one, _ = trained(made_of(Of(make=lambda: Towers), **options))
  four, _ = trained(made_of(Of(make=lambda: Towers), 4, **options))
  np.testing.assert_allclose(one, four, rtol=1e-6)
  np.testing.assert_array_equal(trained(made_of(Picked(make=lambda: Named), **options))[0], one)
  with config_error("Of.build: Named.__call__ requires 'picture', but the data has label, photo"):
    made_of(Of(make=lambda: Named), **options)
  with config_error("the model's output has shape [4] for 16 rows; return one value per row"):
    made_of(Of(make=lambda: Lost), **options)
  with config_error("Of.build returned int; return a Flax Linen module, an NNX module or a fun"):
    made_of(Of(make=lambda: 3))


def test_images_are_normalised_for_a_module_as_for_its_settings():
  pictures = np.arange(64 * 16, dtype=np.uint8).reshape(64, 16)
  arrays = cfg.Arrays(x=pictures, y=Y, eval_share=0.5, mean=(100.0,), std=(50.0,))
  seen = (pictures[:2] - np.float32(100)) / np.float32(50)

  class Image(Of):
    def inputs(self, batch):
      return batch["image"]

  def identity(image):
    return image

  for kind in (Of, Image):
    model = kind(make=lambda: hk.transform(identity))
    made = made_of(model, data=arrays)
    fns = made.model
    outputs, _ = fns.apply({}, {}, fns.inputs({"image": jnp.asarray(pictures[:2])}), False, None)
    np.testing.assert_allclose(outputs, seen, rtol=1e-6)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "functions"])
def test_weight_decay_leaves_out_biases_and_scales(name):
  fns = models.functions(MODELS[name](), (16,), dtype="float32")
  mask = kernels(models.init_shapes(fns.init)[0])
  chosen = {
    path_name(path).split("/")[-1] for path, flag in jax.tree.leaves_with_path(mask) if flag
  }
  assert chosen == {"kernel" if name in ("linen", "nnx") else "w" if name == "haiku" else "weight"}
  assert sum(jax.tree.leaves(mask)) == 2
  conv = eqx.filter(eqx.nn.Conv2d(2, 1, 1, key=jax.random.key(0)), eqx.is_array)
  convs = {"conv": {"weight": conv.weight, "bias": conv.bias}, "out": {"kernel": np.ones((3, 1))}}
  assert kernels(convs) == {"conv": {"weight": True, "bias": False}, "out": {"kernel": True}}
