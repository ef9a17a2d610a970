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
# # How large may the batch be?
#
# Doubling the batch nearly halves the number of steps until little gradient noise is left to
# average. The noise scale (arXiv:1812.06162) is the batch size at which this happens. A run can
# measure it while it trains. A batch study finds the same limit by training to a target at many
# batch sizes. This notebook does both, on real digits.

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
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import contextlib
import io
import tempfile

import jax
import matplotlib.pyplot as plt
import numpy as np

import jaxscale as jxs
from jaxscale import config, data, jobs, models, optim
from jaxscale.jobs import batch_study

folder = pathlib.Path(tempfile.mkdtemp())

# %% [markdown]
# ## Measure during training
# `noise_scale=True` compares the squared norm of each device's gradient with that of their mean.
# Both are computed anyway, so the cost is small. With fewer than eight devices, micro-batches
# take the place of devices.

# %%
settings = jxs.Config(
  model=models.MLP(hidden=(64,)),
  data=data.Digits(augment="none"),
  optimizer=optim.SGD(lr=0.05, momentum=0.0),
  schedule=optim.Cosine(warmup_epochs=1),
  batch_size=64,
  epochs=12,
  accumulate_steps=max(8 // jax.device_count(), 1),
  noise_scale=True,
  log=config.Log(every_steps=4, tensorboard=False),
)
with contextlib.redirect_stdout(io.StringIO()):
  jxs.fit(settings, folder / "one")
lines = jxs.metrics.read_metrics(folder / "one" / "metrics.jsonl")
measured = [(m["step"], m["train/noise_scale"]) for m in lines if "train/noise_scale" in m]
for step, scale in measured[:: len(measured) // 6]:
  print(f"step {step:4}  noise scale {scale:8,.0f} examples")

# %% [markdown]
# The noise scale grows as the loss falls, because the gradient shrinks faster than its noise.
# Early steps profit from a small batch, late steps from a larger one.
#
# ## Study batch sizes
# Train the same network to 85 % validation accuracy at six batch sizes, as a sweep in the
# background of this machine. The number of steps is modelled as S = S_min (1 + B_crit / B), and
# B_crit is fitted.

# %%
study_config = jxs.Config(
  model=models.MLP(hidden=(64,)),
  data=data.Digits(augment="none"),
  optimizer=optim.SGD(lr=0.05, momentum=0.0),
  schedule=optim.Cosine(warmup_epochs=1),
  batch_size=64,
  epochs=40,
  lr_scaling="sqrt",
  lr_reference_batch_size=64,
  target_accuracy=0.85,
  evaluation=config.Evaluation(every_epochs=0.25),
  log=config.Log(tensorboard=False),
)
trials = batch_study.trials(study_config, [16, 32, 64, 128, 256, 512])
job = jobs.sweep(study_config, trials, executor="local", runs=str(folder))
job.wait(timeout_s=1800)
study = batch_study.read(job.folder)
print(batch_study.table(study))

# %% [markdown]
# ## Compare
# Left and middle: steps and examples to the target at each batch size. Right: the noise scale of
# the first run, with the critical batch size of the study where the fit succeeded.

# %%
sizes = np.array([s["batch_size"] for s in study["sizes"]])
steps = np.array([s["target_step"] for s in study["sizes"]], float)

figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), dpi=90, layout="constrained")
axes[0].loglog(sizes, steps, "o")
axes[0].set(xlabel="batch size", ylabel="steps to 85 %")
axes[0].set_yticks([50, 100, 200], [50, 100, 200])
axes[1].loglog(sizes, steps * sizes, "o")
axes[1].set(xlabel="batch size", ylabel="examples to 85 %")
axes[1].set_yticks([5_000, 10_000, 20_000], ["5,000", "10,000", "20,000"])
axes[2].plot(*zip(*measured, strict=True), color="C1", label="noise scale")
axes[2].set(xlabel="step of the run at batch 64", ylabel="examples", ylim=(0, None))
if fit := study["fit"]:
  grid = np.geomspace(sizes[0], sizes[-1])
  curve = fit["s_min"] * (1 + fit["b_crit"] / grid)
  axes[0].plot(grid, curve, color="gray", lw=1, label="fitted")
  axes[1].plot(grid, curve * grid, color="gray", lw=1)
  axes[0].legend(frameon=False)
  axes[2].axhline(fit["b_crit"], color="gray", lw=1, label="critical batch size")
axes[2].legend(frameon=False)
for axis in axes:
  axis.spines[["top", "right"]].set_visible(False)
for axis in axes[:2]:
  axis.set_xticks(sizes, sizes)
  axis.minorticks_off()
