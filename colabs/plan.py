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
# # Plan a run and read a scaling report
#
# A plan predicts the time of a step on hardware you do not have, and how many devices are worth
# using. A scaling report measures the same on real runs. This notebook makes one of each for the
# same network and explains how to read them.

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
import tempfile

import jax
from IPython.display import Image

jax.config.update("jax_num_cpu_devices", 8)  # to compile for; a plan runs nothing

import jaxscale as jxs
from jaxscale import config, data, jobs, models, optim
from jaxscale.planning import plan_report
from jaxscale.planning.plan import bottleneck, make_plan

# %% [markdown]
# ## Make a plan
# The plan is for 64 Xeon Phi 7250 (Knights Landing), the processors of the first large-batch
# records, because it needs no other compiler than the CPU's. With `pip install libtpu` or JAX's
# CUDA plugin, plans for TPUs and GPUs work the same way.

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
# From top to bottom, the plan lists:
#
# - where the rates are from (published or assumed here, none measured)
# - the memory of a device and the bytes sent, both from the compiler
# - the parts of a step; "exposed" is communication that does not overlap with computation
# - the same batch on more devices (strong scaling) and the same rows per device (weak scaling)
# - the length of the run and of the job
#
# The fields of the plan have the same numbers:

# %%
step = plan.step
name, sentence = bottleneck(plan)
print(f"{step.rate:,.0f} examples/s, {step.efficiency:.0%} of a device alone")
print(f"between {min(step.seconds.values()):.2g} and {max(step.seconds.values()):.2g} s")
print(f"most: {sentence}")
for size in plan.strong:
  print(f"devices: {size.devices:3,}  {size.rate:8,.0f} examples/s")

# %% [markdown]
# ## Make a scaling report
# Run the same config on one process and on two, here one after the other on this machine. On a
# cluster, `nodes=[1, 2, 4, …]` counts nodes.

# %%
study = jobs.scaling(settings, [1, 2], executor="local", runs=tempfile.mkdtemp())
study.wait(timeout_s=1200)

# %%
report = study.report()
for row in report.rows:
  devices, rate, up = row["devices"], row["examples_per_s"], row["speed_up"]
  if up:
    print(f"devices: {devices}  {rate:8,.0f} examples/s, speed-up {up:.2f}")

# %% [markdown]
# `report` in the last section is the table that `jaxscale report` prints. Its picture is in
# the file `scaling.png` of the study's folder.
#
# - **speed-up** and **efficiency** are relative to the smallest size.
# - **quartiles** show how steady a run was.
# - **exposed** is the measured share of a step that waits for the exchange.
# - The notes below the table list what limits the comparison; here both processes share the
#   cores of one machine.
#
# ## The plan as a picture
# The picture shows the parts of a step as the same batch is spread over more devices, and the
# rate of each device.

# %%
picture = tempfile.mkdtemp() + "/plan.png"
plan_report.draw(plan, picture)
Image(picture)

# %% [markdown]
# ## The report

# %%
report

# %%
Image(study.folder / "scaling.png")
