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
# # Reading a plan, and a scaling report
#
# Before a job is submitted, a plan says what a step will take on machines that are
# not here, and up to how many it pays to go. Afterwards, a scaling report says what
# it took. This notebook makes one of each, of the same network on the same digits,
# and goes through what they say.

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

import jax
from IPython.display import Image

jax.config.update("jax_num_cpu_devices", 8)  # to compile for; a plan runs nothing

import jaxscale as jxs
from jaxscale import config, data, jobs, models, optim
from jaxscale.planning import plan_report
from jaxscale.planning.plan import bottleneck, make_plan

# %% [markdown]
# ## A plan
# For 64 Xeon Phi 7250 (Knights Landing), the processors of the first large-batch
# records, since their programs need no other compiler than this one; with `pip
# install libtpu` or JAX's CUDA plugin the same is done for TPUs and GPUs.

# %%
settings = jxs.Config(
  model=models.CNN(features=(32, 64), dense=128),
  data=data.Digits(),
  optimizer=optim.LARS(lr=3.0, trust_coefficient=0.01),
  schedule=optim.Cosine(warmup_epochs=6),
  batch_size=1024,
  epochs=30,
  log=config.Log(every_steps=5),
)
plan = make_plan(settings, "knl-64")
print(plan_report.text(plan))

# %% [markdown]
# From top to bottom: **where the rates are from** (here published or assumed, none
# measured: read the numbers as such); the **memory** of a device, and **what is
# sent**, both by the compiler; **a step by parts**, of which "exposed" is
# communication that nothing hides; the same batch on more devices (**strong**
# scaling) and the same rows per device (**weak**); the **run** and the **job**. The
# fields of the plan have it as numbers:

# %%
step = plan.step
name, sentence = bottleneck(plan)
print(f"{step.rate:,.0f} examples/s, {step.efficiency:.0%} of a device alone")
print(f"between {min(step.seconds.values()):.2g} and {max(step.seconds.values()):.2g} s")
print(f"most: {sentence}")
for size in plan.strong:
  print(f"{size.devices:5,} devices: {size.rate:10,.0f} examples/s")

# %% [markdown]
# ## A scaling report
# The same config on one process and on two, each a run, here one after the other on
# this machine. On a cluster `nodes=[1, 2, 4, …]` are nodes.

# %%
study = jobs.scaling(settings, [1, 2], executor="local", runs=tempfile.mkdtemp())
study.wait(timeout_s=1200)

# %%
report = study.report()
for row in report.rows:
  devices, rate, up = row["devices"], row["examples_per_s"], row["speed_up"]
  if up:
    print(f"{devices} devices: {rate:8,.0f} examples/s, speed-up {up:.2f}")

# %% [markdown]
# `report` in the last cell is the page that `jaxscale report` prints, with its
# picture. **Speed-up** and **efficiency** are relative to the smallest size;
# **quartiles** say how steady a run was; **exposed** is the share of a step that
# waits for the exchange, measured, the counterpart of the plan's; the notes below the
# table say what limits the comparison. Here it is that both processes share the cores
# of one machine.
#
# ## What was planned
# The plan's picture: what a step is made of as the same batch is spread over more
# devices, and what each device then gets done.

# %%
picture = tempfile.mkdtemp() + "/plan.png"
plan_report.draw(plan, picture)
Image(picture)

# %% [markdown]
# ## What was measured

# %%
report
