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
# # jaxscale in 30 lines
#
# The run of `configs/digits.py`, built from the public functions: a small CNN on
# real handwritten digits, data-parallel over every device there is. Where there
# is one processor and no accelerator, JAX can play eight devices on it.

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
import os

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import jax

import jaxscale as jxs
from jaxscale import data, models, optim

# %% [markdown]
# ## The parts
# A mesh of devices, data, a model as two pure functions, and an optimizer.

# %%
mesh = jxs.make_mesh()
train, test = data.digits("train"), data.digits("test")
model = models.functions(
  models.CNNModule(num_classes=10), train.info.image_shape, mean=train.info.mean, std=train.info.std
)
schedule = optim.warmup_cosine(peak=0.1, warmup_steps=22, total_steps=450)
tx = optim.sgd(schedule, weight_decay=5e-4)

# %% [markdown]
# ## The steps
# Pure functions, compiled for the mesh; the state is a tree of global arrays.

# %%
state = jxs.init_state(model.init, tx, mesh, seed=0)
loss_fn = jxs.classification_loss(model.apply, label_smoothing=0.1)
train_step = jxs.make_train_step(loss_fn, tx, mesh)
eval_step = jxs.make_eval_step(jxs.classification_totals(model.apply), mesh)

# %% [markdown]
# ## The loop

# %%
batches = data.to_device(data.train_batches(train, batch_size=128), mesh)
losses = []
for step, batch in zip(range(450), batches, strict=False):
  state, metrics = train_step(state, batch)
  losses.append(float(metrics["loss"]))
  if step % 50 == 49:
    print(f"step {step + 1}  loss {losses[-1]:.3f}")

# %%
held_out = data.to_device(data.eval_batches(test, batch_size=360), mesh)
result = jxs.evaluate(eval_step, *state.evaluated(), held_out)
print(f"{jax.device_count()} devices, held-out accuracy {result['accuracy']:.2%}")

# %% [markdown]
# ## What it learned
# Left, the loss of each step, whose floor is the label smoothing's. Right, held-out
# digits that it got wrong, or else the first ones, each with what it says.

# %%
import matplotlib.pyplot as plt
import numpy as np

shown = test.load(np.arange(test.num_examples), None)
params, model_state = state.evaluated()
scores, _ = model.apply(
  jax.device_get(params), jax.device_get(model_state), shown["image"], False, None
)
says = np.asarray(scores.argmax(-1))
order = np.argsort(says == shown["label"], kind="stable")[:8]  # wrong ones first

figure = plt.figure(figsize=(9, 3), dpi=150, layout="constrained")
left, right = figure.subfigures(1, 2)
axis = left.subplots()
axis.plot(losses, lw=1)
axis.set(xlabel="step", ylabel="training loss", ylim=(0, None))
axis.spines[["top", "right"]].set_visible(False)
for axis, i in zip(right.subplots(2, 4).flat, order, strict=True):
  axis.imshow(shown["image"][i, ..., 0], cmap="gray_r")
  wrong = says[i] != shown["label"][i]
  axis.set_title(f"{says[i]}" + (f", not {shown['label'][i]}" if wrong else ""))
  axis.axis("off")
