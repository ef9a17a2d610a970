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
# # Bring your data and fine-tune
#
# A Vision Transformer is trained on the digits 0 to 4 in a zarr store. It is then fine-tuned on
# 100 images of the digits 5 to 9 in a Parquet file, with a LoRA, with a linear probe, and from
# random parameters for comparison.

# %% tags=["hide-input"]
# Install jaxscale where it is missing, as in Colab. Set JAXSCALE_SOURCE to a checkout, a
# wheel or a git address; the default is the checkout that contains this notebook.
import importlib.util
import os
import subprocess
import sys

if importlib.util.find_spec("jaxscale") is None:
  source = os.environ.get("JAXSCALE_SOURCE", "..")
  subprocess.run([sys.executable, "-m", "pip", "install", "-q", source], check=True)

# %%
import pathlib
import re
import tempfile

import jax
import matplotlib.pyplot as plt
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tensorstore as ts

import jaxscale as jxs
from jaxscale import config, data, models, optim

folder = pathlib.Path(tempfile.mkdtemp())

# %% [markdown]
# ## Two files
# Your data are already in files; here two are written. zarr stores arrays in chunks of rows, and
# the names of the arrays are up to you. Parquet stores columns in groups of rows, and an image is
# a list of its pixels. A file may be larger than memory: each process reads only its rows.

# %%
digits = {}
for split in ("train", "test"):
  source = data.digits(split, augment="none")
  digits[split] = source.load(np.arange(source.num_examples), None)


def rows(split, low, high, count=None):
  """Return the images of some digits and their classes, which begin with 0."""
  images, labels = digits[split]["image"], digits[split]["label"]
  chosen = np.flatnonzero((low <= labels) & (labels <= high))[:count]
  return images[chosen], labels[chosen] - low


def write_zarr(path, arrays):
  for name, array in arrays.items():
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/{name}"}}
    chunks = ts.ChunkLayout(read_chunk_shape=[64, *array.shape[1:]])
    store = ts.open(spec, create=True, dtype=array.dtype, shape=array.shape, chunk_layout=chunks)
    store.result()[...] = array


def write_parquet(path, images, labels):
  pixels = [image.ravel() for image in images]
  pq.write_table(pa.table({"pixels": pixels, "digit": labels}), path, row_group_size=64)


for split in ("train", "test"):
  images, labels = rows(split, 0, 4)
  write_zarr(folder / f"{split}.zarr", {"scan": images, "digit": labels})
write_parquet(folder / "train.parquet", *rows("train", 5, 9, count=100))
write_parquet(folder / "test.parquet", *rows("test", 5, 9))

# %% [markdown]
# ## Train on zarr
# `columns` says which array is the image and which the label. `transform` gets one example and a
# random generator, which is `None` in validation. It draws the same numbers on any number of
# devices and hosts, and after a resume. Labels could change in a transform, so `num_classes` is
# set. `statistics=True` computes mean and standard deviation.


# %%
def shift(example, rng):
  if rng is not None:
    down, right = rng.integers(-1, 2, size=2)
    example["image"] = np.roll(example["image"], (down, right), axis=(0, 1))
  return example


vit = models.ViT(patch=4, width=64, num_layers=2, num_heads=4)


def run(name, data, **settings):
  """Train the ViT."""
  usual = {"model": vit, "optimizer": optim.AdamW(lr=3e-3), "batch_size": 50, "steps": 300}
  usual |= {"schedule": optim.Cosine(warmup_epochs=1), "log": config.Log(every_steps=300)}
  usual |= {"evaluation": config.Evaluation(every_epochs=None, every_steps=50)}
  usual |= {"checkpoint": config.Checkpoint(every_epochs=None, every_steps=300)}
  return jxs.fit(jxs.Config(data=data, **usual | settings), folder / name)


scans = data.Zarr(
  path=str(folder / "train.zarr"),
  eval_path=str(folder / "test.zarr"),
  columns={"image": "scan", "label": "digit"},
  transform=shift,
  num_classes=5,
  statistics=True,
)
base = run("base", scans, steps=600)

# %% [markdown]
# ## Fine-tune on Parquet
# `init_from` loads the parameters, and `init_head=True` starts a new classifier for the new
# classes. `trainable` is a regular expression: the parameters that it does not match are frozen.
# A `LoRA` adds a product of two thin matrices to the kernels of attention and MLP, and trains
# only these. The first lines of each run say what is trained.


# %%
def square(example, rng):
  return example | {"image": example["image"].reshape(8, 8, 1)}


few = data.Parquet(
  path=str(folder / "train.parquet"),
  eval_path=str(folder / "test.parquet"),
  columns={"image": "pixels", "label": "digit"},
  transform=square,
  num_classes=5,
  statistics=True,
)
weights = str(folder / "base.safetensors")
jxs.export_safetensors(weights, *base.state.evaluated())
pretrained = {"init_from": weights, "init_head": True}
runs = {
  "LoRA": {"adapter": config.LoRA(rank=8, alpha=16), "trainable": "^head/"} | pretrained,
  "linear probe": {"trainable": "^head/"} | pretrained,
  "all parameters": pretrained,
  "from random": {},
}
results = {name: run(name, few, **settings) for name, settings in runs.items()}

# %%
print("                 trained   validation accuracy")
for name, result in results.items():
  paths = jax.tree.leaves_with_path(result.state.params)
  pattern = {"LoRA": "lora|head", "linear probe": "head"}.get(name, "")
  count = sum(x.size for path, x in paths if re.search(pattern, jax.tree_util.keystr(path)))
  print(f"{name:15} {count:8,}   {result.summary['accuracy']:.1%}")

# %% [markdown]
# ## Look at the result
# `jxs.load` reads a run, and `predict` takes arrays or files. `jaxscale export RUN --to FOLDER
# --naming timm` merges the LoRA, and writes a folder that timm loads.

# %%
images, labels = rows("test", 5, 9)
found = jxs.load(folder / "LoRA").predict(images)

figure = plt.figure(figsize=(9, 3.2), dpi=90, layout="constrained")
curves, pictures = figure.subfigures(1, 2, width_ratios=(1, 1.15))
axis = curves.subplots()
for name in results:
  lines = jxs.metrics.read_metrics(folder / name / "metrics.jsonl")
  points = [(m["step"], 100 * m["eval/accuracy"]) for m in lines if "eval/accuracy" in m]
  axis.plot(*zip(*points, strict=True), "o-", ms=3, label=name)
axis.set(xlabel="step", ylabel="validation accuracy (%)", ylim=(0, 102))
axis.legend(frameon=False, fontsize=8)
order = np.argsort(found.labels == labels, kind="stable")[:8]  # misclassified first
for axis, i in zip(pictures.subplots(2, 4).flat, order, strict=True):
  axis.imshow(images[i, ..., 0], cmap="gray_r")
  right, label = 5 + labels[i], 5 + found.labels[i]
  axis.set_title(f"{label}" + (f", not {right}" if label != right else ""), fontsize=9)
  axis.axis("off")
