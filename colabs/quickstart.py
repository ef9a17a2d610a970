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
# Train a small CNN on handwritten digits with the public functions. It is the same run as
# `configs/digits.py`: data parallel over all devices of this machine. On a CPU, JAX
# simulates eight devices.

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
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import jax

import jaxscale as jxs
from jaxscale import data, models, optim

# %% [markdown]
# ## Build the parts
# A mesh of devices, a dataset, a model as two pure functions, and an optimizer.

# %%
mesh = jxs.make_mesh()
train, test = data.digits("train"), data.digits("test")
model = models.functions(
  models.CNNModule(num_classes=10), train.info.image_shape, mean=train.info.mean, std=train.info.std
)
schedule = optim.warmup_cosine(peak=0.1, warmup_steps=22, total_steps=450)
tx = optim.sgd(schedule, weight_decay=5e-4)

# %% [markdown]
# ## Build the steps
# The steps are pure functions, compiled for the mesh. The state is a tree of global arrays.

# %%
state = jxs.init_state(model.init, tx, mesh, seed=0)
loss_fn = jxs.classification_loss(model.apply, label_smoothing=0.1)
train_step = jxs.make_train_step(loss_fn, tx, mesh)
eval_step = jxs.make_eval_step(jxs.classification_totals(model.apply), mesh)

# %% [markdown]
# ## Train

# %%
batches = data.to_device(data.train_batches(train, batch_size=128), mesh)
losses = []
for step, batch in zip(range(450), batches, strict=False):
  state, metrics = train_step(state, batch)
  losses.append(float(metrics["loss"]))
  if step % 50 == 49:
    print(f"step {step + 1}  loss {losses[-1]:.3f}")

# %%
validation = data.to_device(data.eval_batches(test, batch_size=360), mesh)
result = jxs.evaluate(eval_step, *state.evaluated(), validation)
print(f"validation accuracy {result['accuracy']:.2%}")

# %% [markdown]
# ## Look at the result
# Left: the loss of each step; label smoothing keeps it above zero. Right: misclassified
# validation digits with the prediction, filled up with correct ones.

# %%
import matplotlib.pyplot as plt
import numpy as np

examples = test.load(np.arange(test.num_examples), None)
params, model_state = state.evaluated()
scores, _ = model.apply(
  jax.device_get(params), jax.device_get(model_state), examples["image"], False, None
)
predictions = np.asarray(scores.argmax(-1))
order = np.argsort(predictions == examples["label"], kind="stable")[:8]  # misclassified first

figure = plt.figure(figsize=(9, 3), dpi=90, layout="constrained")
left, right = figure.subfigures(1, 2)
axis = left.subplots()
axis.plot(losses, lw=1)
axis.set(xlabel="step", ylabel="training loss", ylim=(0, None))
axis.spines[["top", "right"]].set_visible(False)
for axis, i in zip(right.subplots(2, 4).flat, order, strict=True):
  axis.imshow(examples["image"][i, ..., 0], cmap="gray_r")
  wrong = predictions[i] != examples["label"][i]
  axis.set_title(f"{predictions[i]}" + (f", not {examples['label'][i]}" if wrong else ""))
  axis.axis("off")
