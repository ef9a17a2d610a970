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
# # Large batch: SGD, LARS and LAMB
#
# Train the same network on the same digits for the same number of epochs, first with 32
# examples per step and then with 1,024, which leaves a 32nd of the steps. For SGD the learning
# rate is scaled with the batch (arXiv:1706.02677). LARS (arXiv:1708.03888) and LAMB
# (arXiv:1904.00962) scale the step of each layer in proportion to the norm of its weights by a
# trust ratio. The last picture shows how much the trust ratios differ between layers.

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
import contextlib
import io
import tempfile

import matplotlib.pyplot as plt

import jaxscale as jxs
from jaxscale import config, data, models, optim

# %% [markdown]
# ## Train
# Each run has forty epochs with eight epochs of warm-up. "lr x 32" is the learning rate of the
# small batch under linear scaling. The last three learning rates are the best of a few that
# were tried by hand.

# %%
runs = {
  "SGD, 32 per step": (optim.SGD(lr=0.05), 32),
  "SGD, lr x 32": (optim.SGD(lr=1.6), 1024),
  "SGD, tuned lr": (optim.SGD(lr=0.2), 1024),
  "LARS": (optim.LARS(lr=3.0, trust_coefficient=0.01), 1024),
  "LAMB": (optim.LAMB(lr=0.04), 1024),
}
folder = pathlib.Path(tempfile.mkdtemp())


def run(name):
  optimizer, batch_size = runs[name]
  settings = jxs.Config(
    model=models.CNN(),
    data=data.Digits(augment="none"),
    optimizer=optimizer,
    schedule=optim.Cosine(warmup_epochs=8),
    batch_size=batch_size,
    epochs=40,
    evaluation=config.Evaluation(every_epochs=4),
    checkpoint=config.Checkpoint(every_epochs=40),
    log=config.Log(every_steps=1, trust_ratios=True, tensorboard=False),
  )
  with contextlib.redirect_stdout(io.StringIO()):  # one line per logged step
    try:
      summary = jxs.fit(settings, folder / name).summary
    except jxs.NonFiniteError:
      return f"{name:18} {batch_size:6,}  diverged"
  steps, accuracy = summary["step"], summary["accuracy"]
  return f"{name:18} {batch_size:6,} {steps:6,} {accuracy:9.1%}"


print("                    batch  steps  accuracy")
for name in runs:
  print(run(name))

# %% [markdown]
# With 1,024 examples per step there are only 57 steps, so this is an illustration, not a
# benchmark. `docs/large_batch.md` reports 60,000 images and three seeds.
#
# ## Trust ratios
# LARS and LAMB multiply the step of each layer by a ratio of norms: weights to gradient (LARS)
# or weights to update (LAMB). With `log.trust_ratios=True` a run writes the ratios to
# `metrics.jsonl` at every logged step.


# %%
def series(name, metric):
  lines = jxs.metrics.read_metrics(folder / name / "metrics.jsonl")
  return list(zip(*[(m["step"], m[metric]) for m in lines if metric in m], strict=True))


def trust_ratios(name):
  lines = jxs.metrics.read_metrics(folder / name / "metrics.jsonl")
  return sorted({n for m in lines for n in m if "trust_ratio" in n})


figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), dpi=90, layout="constrained")
for name, (_, batch_size) in runs.items():
  if points := series(name, "eval/accuracy"):
    epochs = [step * batch_size / 1437 for step in points[0]]
    axes[0].plot(epochs, [100 * a for a in points[1]], "o-", ms=3, label=name)
axes[0].set(xlabel="epoch", ylabel="validation accuracy (%)", ylim=(0, 102))
axes[0].legend(frameon=False, fontsize=8)
for axis, name in zip(axes[1:], ("LARS", "LAMB"), strict=True):
  for metric in trust_ratios(name):
    layer = metric.partition("trust_ratio/")[2].removesuffix("/kernel")
    axis.plot(*series(name, metric), label=layer)
  axis.set(xlabel="step", title=f"{name}: trust ratio of each layer", yscale="log")
  axis.legend(frameon=False, fontsize=8)
