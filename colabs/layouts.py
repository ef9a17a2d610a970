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
# # Layouts on eight devices
#
# Place one language model on eight devices in five ways: data parallel, FSDP, tensor parallel, a
# mixture, and a pipeline. JAX simulates the devices on the CPU, so the notebook runs on any
# machine. It shows which device holds which part of a matrix, how much memory each device needs,
# what has to be sent, and that all layouts train the same model.

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
import itertools

import jax

jax.config.update("jax_platforms", "cpu")  # with eight accelerators, remove these two lines
jax.config.update("jax_num_cpu_devices", 8)

import matplotlib.pyplot as plt

import jaxscale as jxs
from jaxscale import config, data, models, optim
from jaxscale.experiment import build
from jaxscale import hlo

# %% [markdown]
# ## Five layouts
# `mesh` sets the number of devices along each axis, and `layout` what is sharded along them. The
# training text is the documentation of Python, in bytes.

# %%
FSDP = config.Layout(shard="fsdp")
layouts = {
  "data 8": {"mesh": config.Mesh(data=8)},
  "fsdp 8": {"mesh": config.Mesh(data=1, fsdp=8), "layout": FSDP},
  "model 8": {"mesh": config.Mesh(data=1, model=8)},
  "data 2 x fsdp 2 x model 2": {"mesh": config.Mesh(data=2, fsdp=2, model=2), "layout": FSDP},
  "data 2 x stage 4": {"mesh": config.Mesh(data=2, stage=4), "accumulate_steps": 4},
}


def experiment(name):
  settings = jxs.Config(
    model=models.Transformer(num_layers=4, width=64, num_heads=8, hidden=192),
    data=data.Text(sequence_length=64),
    optimizer=optim.AdamW(lr=3e-3),
    batch_size=32,
    epochs=0.05,
    schedule=optim.Cosine(),
    **layouts[name],
  )
  return build.experiment(settings)


experiments = {name: experiment(name) for name in layouts}

# %% [markdown]
# ## Which device holds what
# The shardings are known before anything is computed. `jax.debug.visualize_array_sharding` draws
# those of one matrix:

# %%
table = experiments["fsdp 8"].init_state().params["embed"]["table"]
print(table.shape)
jax.debug.visualize_array_sharding(table)

# %% [markdown]
# ## Train
# Run twenty steps with each layout. The memory is that of parameters and optimizer state on one
# device. The bytes that a device sends are read from the compiled step.


# %%
def train(each):
  step, state = each.compile_train_step(), each.init_state()
  size = sum(
    x.addressable_shards[0].data.nbytes for x in jax.tree.leaves((state.params, state.opt_state))
  )
  sent = hlo.collectives(step, each.mesh)
  batches = data.to_device(data.train_batches(each.train_data, batch_size=32), each.mesh)
  losses = []
  for batch in itertools.islice(batches, 20):
    state, metrics = step(state, batch)
    losses.append(float(metrics["loss"]))
  return size, sent, losses


results = {name: train(each) for name, each in experiments.items()}
print("layout                     state kB  sends kB  by                  last loss")
for name, (size, sent, losses) in results.items():
  sizes = {}
  for c in sent:
    sizes[c.kind] = sizes.get(c.kind, 0) + c.times * c.wire_bytes
  most = max(sizes, key=sizes.get)
  total = f"{size / 1e3:8,.0f} {sum(sizes.values()) / 1e3:9,.0f}"
  print(f"{name:26} {total}  most: {most:18} {losses[-1]:.6f}")

# %% [markdown]
# The losses agree to rounding: the layout does not change what the model learns. Data parallel
# keeps everything on every device. The other layouts keep a part and communicate more. Which one
# is fastest depends on the model and the links, and `jaxscale plan` compares them.
#
# ## Draw the shards
# The picture shows the first MLP matrix of all four layers, with inputs from top to bottom and
# outputs from left to right. The numbers are the devices that hold each part.


# %%
def draw(axis, leaf):
  """Draw a rectangle for each shard, coloured by the first device that holds it."""
  owners = {}
  for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
    ends = tuple(s.indices(n)[:2] for s, n in zip(index, leaf.shape, strict=True))
    owners.setdefault(ends, []).append(device.id)
  layers, rows, columns = leaf.shape
  for (layer, row, column), devices in owners.items():
    for i in range(*layer):
      corner = (i * 1.15 + column[0] / columns, row[0] / rows)
      size = ((column[1] - column[0]) / columns, (row[1] - row[0]) / rows)
      color = plt.cm.Set3(devices[0] / 11)
      axis.add_patch(plt.Rectangle(corner, *size, fc=color, ec="white", lw=1))
      text = "all" if len(devices) == 8 else ",".join(map(str, sorted(devices)))
      middle = (corner[0] + size[0] / 2, corner[1] + size[1] / 2)
      turned = 90 if size[0] < 0.2 else 0
      axis.text(*middle, text, ha="center", va="center", fontsize=6, rotation=turned)
  axis.set(xlim=(-0.02, layers * 1.15 - 0.1), ylim=(1, 0), yticks=[])
  axis.set_xticks([i * 1.15 + 0.5 for i in range(layers)], range(1, layers + 1))
  axis.spines[:].set_visible(False)
  axis.tick_params(length=0)


figure, panels = plt.subplots(5, 1, figsize=(9, 7.5), dpi=90, layout="constrained")
for axis, (name, each) in zip(panels, experiments.items(), strict=True):
  draw(axis, each.abstract_state().params["layers"]["up"]["kernel"])
  kilobytes = f"{results[name][0] / 1e3:,.0f} kB of state per device"
  axis.set_title(f"{name}: {kilobytes}", loc="left", fontsize=10)
for axis in panels[:-1]:
  axis.set_xticks([])
_ = panels[-1].set_xlabel("layer")
