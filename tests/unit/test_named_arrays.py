"""Datasets of named arrays, and models and losses that take them."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale import ConfigError, config, data, fit, models
from jaxscale.training.losses import Objective
from support.configs import small_config

RNG = np.random.default_rng(0)
LEFT, RIGHT = RNG.normal(size=(2, 40, 3)).astype("float32")
SUM = (LEFT + RIGHT).sum(1)


def pairs(**arrays):
  return data.from_named("pairs", {"left": LEFT, "right": RIGHT, "sum": SUM, **arrays})


class Pairs(config.Data):
  """Two inputs and a target, none of them with a standard name."""

  def build(self):
    return pairs(), pairs()


class Sum(config.Model):
  """A linear function of both inputs."""

  def build(self, context):
    def apply(params, state, batch, train, keys):
      return batch["left"] @ params["left"] + batch["right"] @ params["right"], state

    shape = context.info.arrays["left"][0]
    return models.ModelFns(
      lambda key: ({s: jnp.zeros(shape) for s in ("left", "right")}, {}), apply
    )


class Squared(config.Loss):
  """The squared error of the sum."""

  def build(self, info):
    return Objective(lambda outputs, batch: (outputs - batch["sum"]) ** 2)


def test_every_array_reaches_a_batch_and_keeps_its_dtype():
  ids, flags = np.arange(40), LEFT[:, 0] > 0
  dataset = pairs(ids=ids, flags=flags, image=np.zeros((40, 2, 2, 3), np.uint8), label=ids % 7)
  assert (dataset.info.image_shape, dataset.info.dtype) == ((2, 2, 3), "uint8")
  assert (dataset.info.label_shape, dataset.info.num_classes) == ((), 7)
  assert dataset.info.arrays["ids"] == ((), "int32") and dataset.info.arrays["flags"][1] == "bool"
  data.check_readable(dataset)
  batch = next(data.train_batches(dataset, 8))
  shapes = {name: (x.shape, str(x.dtype)) for name, x in batch.items()}
  assert shapes == data.batch_shapes(dataset.info, 8)
  np.testing.assert_array_equal(batch["left"], LEFT[batch["ids"]])


def test_a_dict_of_arrays_is_split_as_one_array_is():
  named = {"left": LEFT, "weight": np.abs(SUM)}
  train, held_out = config.Arrays(x=named, y=np.arange(40) % 3).build()
  assert (train.num_examples, held_out.num_examples) == (36, 4)
  assert train.info == held_out.info and train.info.num_classes == 3
  np.testing.assert_array_equal(held_out.load(np.arange(4), None)["left"], LEFT[36:])
  assert config.Arrays(x=named) == config.Arrays(x={**named})
  assert config.Arrays(x=named) != config.Arrays(x=named | {"left": RIGHT})


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"x": LEFT}, "Arrays.y is not set; give the targets"),
    ({"x": {}}, "Arrays: arrays of {} examples"),
    ({"x": {"a": LEFT, "b": LEFT[:5]}}, "Arrays: arrays of {'a': 40, 'b': 5} examples"),
    ({"x": {"a": LEFT * np.inf}}, "Arrays: a has NaN or infinite values, first in row 0"),
    ({"x": {"a": LEFT[:1]}}, "Arrays.eval_share=0.1 leaves no example for training"),
    ({"x": {"a": LEFT}, "x_eval": {"b": LEFT}}, "Arrays.x_eval has examples of {'b'"),
  ],
)
def test_a_dict_of_arrays_that_does_not_fit_is_refused(fields, message):
  with pytest.raises(ConfigError) as error:
    config.Arrays(**fields).build()
  assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
  ("arrays", "message"),
  [
    ({}, "arrays of {} examples; give arrays of the same length"),
    ({"a": LEFT, "b": LEFT[:5]}, r"arrays of {'a': 40, 'b': 5} examples"),
    ({"a": ["x", "y"]}, "pairs: a has the dtype <U1"),
    ({"a": np.array([2**40])}, "pairs: a has 1099511627776, which int32 cannot represent"),
  ],
)
def test_arrays_that_do_not_fit_are_refused(arrays, message):
  with pytest.raises(ConfigError) as error:
    data.from_named("pairs", arrays)
  assert message in str(error.value) and "\n" not in str(error.value)


def test_the_name_of_the_padding_mask_is_refused():
  with pytest.raises(ConfigError, match=r"'mask' is an array of examples.*rename it"):
    data.check_readable(pairs(mask=SUM > 0))


def test_a_run_with_two_inputs_learns_and_describes_its_arrays(tmp_path):
  seldom = config.Evaluation(every_epochs=100.0), config.Checkpoint(every_epochs=100.0)
  parts = {"model": Sum(), "data": Pairs(), "loss": Squared()}
  parts |= {"evaluation": seldom[0], "checkpoint": seldom[1]}
  settings = small_config(**parts, batch_size=24, epochs=60)
  result = fit(settings, tmp_path)
  np.testing.assert_allclose(result.state.params["left"], np.ones(3), atol=0.05)
  assert result.summary["evaluation"]["loss"] < 0.01
  described = json.loads((tmp_path / "config.json").read_text())["data"]["arrays"]
  assert described["left"] == [[3], "float32"]
  again = fit(settings, tmp_path)
  assert jax.tree.all(jax.tree.map(np.array_equal, again.state.params, result.state.params))
