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
# # A training loop of your own
#
# A complete distributed training without a `Config`, in fewer than 100 lines: your model, your
# loss, your loop. It evaluates, saves checkpoints, and resumes bit for bit. The notebook is also
# a script. Start it alone, or once per GPU or node:
#
# ```
# python colabs/flat_loop.py                                   # the devices of this machine
# srun --ntasks-per-node=8 python colabs/flat_loop.py          # in a Slurm job
# ```
#
# `jaxscale.fit` also reports hangs, handles preemption, and draws plots. This loop does not.

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
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")  # a CPU stands in for eight devices

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax

import jaxscale as jxs
from jaxscale import data, exchange
from jaxscale.mesh import host_shard

BATCH_SIZE, STEPS, EVERY, FOLDER = 256, 300, 100, "flat_loop"

# %% [markdown]
# ## Connect the processes
# JAX must know the other processes before it looks for devices. In a Slurm job it reads their
# number and the address of the first one from Slurm's variables. With another launcher, set
# `JAX_COORDINATOR_ADDRESS` to HOST:PORT, `NUM_PROCESSES` and `PROCESS_ID`.
#
# The mesh has all devices of all processes. A process loads only its own rows of each batch.

# %%
if "JAX_COORDINATOR_ADDRESS" in os.environ:
  count, index = int(os.environ["NUM_PROCESSES"]), int(os.environ["PROCESS_ID"])
  jax.distributed.initialize(num_processes=count, process_id=index)
elif int(os.environ.get("SLURM_NTASKS", "1")) > 1:
  jax.distributed.initialize()

mesh, is_first = jxs.make_mesh(), jax.process_index() == 0
own_rows = host_shard(mesh)
train, validation = data.digits("train"), data.digits("test")

# %% [markdown]
# ## The model and the loss
# The loss gets one device's rows. It returns **sums** over these rows, never means: the step adds
# them up over micro-batches and devices, and divides by the sum of `"examples"`. `keys` has a
# random key for each row, so that dropout does not depend on the number of devices.


# %%
def init(key):
  one, two = jax.random.split(key)
  params = {"hidden": jax.random.normal(one, (64, 256)) / 8, "bias": jnp.zeros(256)}
  return params | {"head": jax.random.normal(two, (256, 10)) / 16}, {}  # no model state


def scores_of(params, images, keys=None):
  h = jax.nn.relu(images.reshape(-1, 64) / 16.0 @ params["hidden"] + params["bias"])
  if keys is not None:
    h *= jax.vmap(lambda key: jax.random.bernoulli(key, 0.9, (256,)))(keys) / 0.9
  return h @ params["head"]


def loss_fn(params, model_state, batch, keys):
  scores, labels = scores_of(params, batch["image"], keys), batch["label"]
  loss = optax.softmax_cross_entropy_with_integer_labels(scores, labels).sum()
  return loss, (model_state, {"loss": loss, "examples": len(keys)})


def eval_fn(params, model_state, batch):
  hits = scores_of(params, batch["image"]).argmax(-1) == batch["label"]
  mask = batch["mask"]  # False for rows that only fill up the last batch
  return {"accuracy": (hits & mask).sum(), "examples": mask.sum()}


# %% [markdown]
# ## The steps
# Any optax optimizer works. The exchange averages the gradients over the devices, here exactly;
# `exchange.half_precision` sends 16 bits. Both can have a state, which belongs to the train state.

# %%
schedule = optax.warmup_cosine_decay_schedule(0.0, 2e-2, 20, STEPS)
optimizer, method = optax.adamw(schedule), exchange.plain(mesh.axis_names)
train_step = jxs.make_train_step(loss_fn, optimizer, mesh, method, schedule=schedule)
eval_step = jxs.make_eval_step(eval_fn, mesh)


def evaluate(state):
  batches = data.eval_batches(validation, BATCH_SIZE, shard=own_rows)
  return jxs.evaluate(eval_step, *state.evaluated(), data.to_device(batches, mesh))


# %% [markdown]
# ## Train, save, resume
# Interrupt this cell or kill the script, and start it again: it resumes from the newest
# checkpoint. The order of the data follows from the seed and the position alone, so the resumed
# run equals an undisturbed one. `train_step` donates the state, so use the one that it returns.

# %%
losses = {}
with jxs.Checkpoints(FOLDER) as checkpoints:
  parts = init, optimizer, mesh, method
  state = checkpoints.restore(jxs.abstract_state(*parts)) or jxs.init_state(*parts, seed=0)
  start = int(state.step)
  if is_first and start:
    print(f"resumed after step {start}")
  options = {"seed": 0, "position": start * BATCH_SIZE, "shard": own_rows}
  batches = data.to_device(data.train_batches(train, BATCH_SIZE, **options), mesh)
  for step in range(start + 1, STEPS + 1):
    state, metrics = train_step(state, next(batches))
    losses[step] = metrics["loss"]  # read later, so that the host does not wait here
    if step % EVERY == 0:
      result = evaluate(state)
      checkpoints.save(state, result)
      if is_first:
        loss, accuracy = float(metrics["loss"]), result["accuracy"]
        print(f"step {step}  loss {loss:.3f}  validation accuracy {accuracy:.1%}", flush=True)

# %% [markdown]
# ## Look at the result

# %%
if is_first:
  figure, axis = plt.subplots(figsize=(7, 3), dpi=90, layout="constrained")
  axis.plot(list(losses), [float(loss) for loss in losses.values()], lw=1)
  axis.set(xlabel="step", ylabel="training loss", ylim=(0, None))
  axis.spines[["top", "right"]].set_visible(False)
