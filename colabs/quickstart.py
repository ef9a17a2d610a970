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
  models.CNNModule(num_classes=10),
  train.info.image_shape,
  mean=train.info.mean,
  std=train.info.std,
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
for step, batch in zip(range(450), batches, strict=False):
  state, metrics = train_step(state, batch)
  if step % 50 == 49:
    print(f"step {step + 1}  loss {metrics['loss']:.3f}")

# %%
held_out = data.to_device(data.eval_batches(test, batch_size=360), mesh)
result = jxs.evaluate(eval_step, *state.evaluated(), held_out)
print(f"{jax.device_count()} devices, held-out accuracy {result['accuracy']:.2%}")
