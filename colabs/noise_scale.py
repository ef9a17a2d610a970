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
# Twice the batch saves nearly half of the steps, until the gradient has hardly any
# noise left to average away. The noise scale (arXiv:1812.06162) is the batch size at
# which that happens, and a run can measure it while it trains. A batch study finds
# the same limit the long way, by training to a target at many batch sizes. Here both
# are done, on real digits.

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
# ## Measured while training
# `noise_scale=True` compares the squared norm of each device's gradient with that of
# their mean. Both are there anyway, so it costs next to nothing. On fewer than eight
# devices micro-batches take their place.

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
# It grows as the loss falls: the gradient gets smaller, its noise less so. Early steps
# want a small batch, late ones a larger one.
#
# ## The long way
# The same network to 85 % of the validation digits, at six batch sizes: a sweep in the
# background of this machine. By the same model, steps fall as
# S = S_min (1 + B_crit / B); B_crit is fitted.

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
# ## Both in one picture
# Left, steps and examples to the target at each batch size. Right, the noise scale of
# the run above, with the critical batch size of the study where it could be fitted.

# %%
sizes = np.array([s["batch_size"] for s in study["sizes"]])
steps = np.array([s["target_step"] for s in study["sizes"]], float)

figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), dpi=150, layout="constrained")
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
