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
# Two handwritten digits are shown next to each other, and the model has to say their
# sum. No built-in dataset or model does that, so both are written here: a class each,
# with typed fields and a `build`. Everything else of a run then works with them as
# with the built-in ones: checkpoints, resume, metrics, any number of devices.

# %% tags=["hide-input"]
# Where jaxscale is missing, as in Colab: install it, from this repository if there.
import importlib.util
import pathlib
import subprocess
import sys

if importlib.util.find_spec("jaxscale") is None:
  source = ".." if pathlib.Path("../pyproject.toml").exists() else "jaxscale"
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
# `build` returns two datasets: to train on, and held-out. The pairs are drawn from the
# UCI digits that the package carries; held-out pairs are of held-out digits.


# %%
class Sums(config.Data):
  """Pairs of digits, and their sum.

  Attributes:
    num_pairs: to train on.
  """

  num_pairs: config.Count = 6000

  def build(self):
    train = self._pairs("train", self.num_pairs, seed=0)
    held_out = self._pairs("test", 1000, seed=1)
    info = data.array_info(*train, num_classes=19, mean=(4.89,), std=(6.01,))
    return data.from_arrays(info, *train), data.from_arrays(info, *held_out)

  def _pairs(self, split, count, seed):
    digits = data.digits(split, augment="none")
    chosen = np.random.default_rng(seed).integers(0, digits.num_examples, (2, count))
    left, right = (digits.load(indices, None) for indices in chosen)
    images = np.concatenate([left["image"], right["image"]], axis=2)
    return images, left["label"] + right["label"]


# %% [markdown]
# ## The model
# One small network reads either digit, and the sum is read from what it found in both.
# `__call__` takes the images and whether this is training; it returns a score for each
# of the 19 sums.


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
  """The same network for both digits, then their sum.

  Attributes:
    width: of every layer.
  """

  width: config.Count = 128

  def build(self, context):
    return Reader(self.width, context.info.num_classes)


# %% [markdown]
# ## Two runs
# Against a built-in network that gets the picture as a whole, with the same data,
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
own, built_in = run(TwoDigits()), run(models.MLP(hidden=(128, 128, 128)))

# %%
for name, result in (("TwoDigits", own), ("MLP", built_in)):
  weights = sum(x.size for x in jax.tree.leaves(result.state.params))
  accuracy = result.summary["accuracy"]
  print(f"{name:10} {weights:7,} weights, held-out accuracy {accuracy:.1%}")

# %% [markdown]
# ## What it sees
# A run's metrics are in its folder. The state of a result has the parameters, and the
# model that was built above applies them; inputs are normalised as in training.

# %%
_, held_out = Sums().build()
pairs = held_out.load(np.arange(8), None)
inputs = (pairs["image"].astype("float32") - 4.89) / 6.01
scores = Reader(128, 19).apply({"params": own.state.params}, inputs, train=False)
sums = np.asarray(scores.argmax(-1))

figure = plt.figure(figsize=(9, 3.6), dpi=150, layout="constrained")
curves, images = figure.subfigures(1, 2, width_ratios=(1, 1.15))
axis = curves.subplots()
for name, workdir in workdirs.items():
  lines = jxs.metrics.read_metrics(pathlib.Path(workdir, "metrics.jsonl"))
  points = [(m["step"], 100 * m["eval/accuracy"]) for m in lines if "eval/accuracy" in m]
  axis.plot(*zip(*points, strict=True), "o-", ms=3, label=name)
axis.set(xlabel="step", ylabel="held-out accuracy (%)", ylim=(0, 102))
axis.legend(frameon=False)
for axis, image, label, found in zip(
  images.subplots(4, 2).flat, pairs["image"], pairs["label"], sums, strict=True
):
  axis.imshow(image[..., 0], cmap="gray_r")
  axis.set_title(f"{found}" + (f", not {label}" if found != label else ""), fontsize=9)
  axis.axis("off")
