# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Your own model and data
#
# The task: two handwritten digits are shown side by side, and the model predicts their sum.
# The dataset and the model are one class each, with typed fields and a `build` method.
# Checkpoints, resume, metrics and any number of devices work as for the built-in classes.

# %% tags=["hide-input"]
# Install jaxscale where it is missing, as in Colab. Set JAXSCALE_SOURCE to a checkout, a
# wheel or a git address; the default is the checkout that contains this notebook.
import importlib.util
import os
import pathlib
import subprocess
import sys

if importlib.util.find_spec("jaxscale") is None:
  source = os.environ.get("JAXSCALE_SOURCE", "..")
  subprocess.run([sys.executable, "-m", "pip", "install", "-q", source], check=True)

# %%
import tempfile

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import jaxscale as jxs
from jaxscale import config, data, models, optim

# %% [markdown]
# ## The data
# `build` returns two datasets, one for training and one for validation. Both draw pairs from
# the UCI digits that come with the package. The validation pairs use validation digits only.


# %%
class Sums(config.Data):
  """Pairs of digits with their sum as the target.

  Attributes:
    num_pairs: number of training pairs.
  """

  num_pairs: config.Count = 6000

  def build(self):
    train = self._pairs("train", self.num_pairs, seed=0)
    validation = self._pairs("test", 1000, seed=1)
    info = data.array_info(*train, num_classes=19, mean=(4.89,), std=(6.01,))
    return data.from_arrays(info, *train), data.from_arrays(info, *validation)

  def _pairs(self, split, count, seed):
    digits = data.digits(split, augment="none")
    chosen = np.random.default_rng(seed).integers(0, digits.num_examples, (2, count))
    left, right = (digits.load(indices, None) for indices in chosen)
    images = np.concatenate([left["image"], right["image"]], axis=2)
    return images, left["label"] + right["label"]


# %% [markdown]
# ## The model
# One small network reads each digit, and further layers compute the sum from both outputs.
# `__call__` takes the images and whether the model is training. It returns one score for
# each of the 19 possible predictions.


# %%
class Reader(nn.Module):
  width: int
  outputs: int

  @nn.compact
  def __call__(self, x, train):
    left_and_right = jnp.stack(jnp.split(x, 2, axis=2), axis=1)
    flat = left_and_right.reshape(*left_and_right.shape[:2], -1)
    hidden = nn.relu(nn.Dense(self.width)(flat))
    read = nn.relu(nn.Dense(self.width)(hidden)).sum(axis=1)
    return nn.Dense(self.outputs)(nn.relu(nn.Dense(self.width)(read)))


class TwoDigits(config.Model):
  """One network that reads both digits, and layers that add them.

  Attributes:
    width: units of every layer.
  """

  width: config.Count = 128

  def build(self, context):
    return Reader(self.width, context.info.num_classes)


# %% [markdown]
# ## Train two models
# Train the model above and a built-in MLP that sees the whole picture, with the same data,
# optimizer and number of steps.


# %%
def run(model):
  return jxs.fit(
    jxs.Config(
      model=model,
      data=Sums(),
      optimizer=optim.AdamW(lr=2e-3),
      schedule=optim.Cosine(warmup_epochs=1),
      batch_size=128,
      epochs=12,
      evaluation=config.Evaluation(every_epochs=1),
      checkpoint=config.Checkpoint(every_epochs=12),
    ),
    workdirs[type(model).__name__],
  )


folder = tempfile.mkdtemp()
workdirs = {name: f"{folder}/{name}" for name in ("TwoDigits", "MLP")}
custom, built_in = run(TwoDigits()), run(models.MLP(hidden=(128, 128, 128)))

# %%
for name, result in (("TwoDigits", custom), ("MLP", built_in)):
  weights = sum(x.size for x in jax.tree.leaves(result.state.params))
  accuracy = result.summary["accuracy"]
  print(f"{name:10} {weights:7,} weights, validation accuracy {accuracy:.1%}")

# %% [markdown]
# ## Look at the result
# The metrics of a run are in its folder. `result.state` has the trained parameters, which the
# Flax module above can apply. Normalise the inputs as in training.

# %%
_, validation = Sums().build()
pairs = validation.load(np.arange(8), None)
inputs = (pairs["image"].astype("float32") - 4.89) / 6.01
scores = Reader(128, 19).apply({"params": custom.state.params}, inputs, train=False)
predictions = np.asarray(scores.argmax(-1))

figure = plt.figure(figsize=(9, 3.6), dpi=90, layout="constrained")
curves, images = figure.subfigures(1, 2, width_ratios=(1, 1.15))
axis = curves.subplots()
for name, workdir in workdirs.items():
  lines = jxs.metrics.read_metrics(pathlib.Path(workdir, "metrics.jsonl"))
  points = [(m["step"], 100 * m["eval/accuracy"]) for m in lines if "eval/accuracy" in m]
  axis.plot(*zip(*points, strict=True), "o-", ms=3, label=name)
axis.set(xlabel="step", ylabel="validation accuracy (%)", ylim=(0, 102))
axis.legend(frameon=False)
for axis, image, label, prediction in zip(
  images.subplots(4, 2).flat, pairs["image"], pairs["label"], predictions, strict=True
):
  axis.imshow(image[..., 0], cmap="gray_r")
  axis.set_title(f"{prediction}" + (f", not {label}" if prediction != label else ""), fontsize=9)
  axis.axis("off")
