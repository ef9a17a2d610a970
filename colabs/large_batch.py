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
# The same network on the same digits, for the same number of examples: once with 32
# examples per step, then with 1,024, a 32nd of the steps. The learning rate of SGD is
# scaled with the batch (arXiv:1706.02677); LARS (arXiv:1708.03888) and LAMB
# (arXiv:1904.00962) give each layer a step in proportion to its own weights. At the
# end: how different these proportions, the trust ratios, are from layer to layer.

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
import contextlib
import io
import tempfile

import matplotlib.pyplot as plt

import jaxscale as jxs
from jaxscale import config, data, models, optim

# %% [markdown]
# ## The runs
# Forty epochs each, eight of them warm-up. The last three rates are the best of a few
# that were tried by hand; "rate x 32" is what linear scaling makes of the small
# batch's.

# %%
runs = {
  "SGD, 32 per step": (optim.SGD(lr=0.05), 32),
  "SGD, rate x 32": (optim.SGD(lr=1.6), 1024),
  "SGD, its own rate": (optim.SGD(lr=0.2), 1024),
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
  with contextlib.redirect_stdout(io.StringIO()):  # a line per logged step
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
# With 1,024 examples per step there are 57 steps in all. Such a small problem is a
# model of the large one and no more; `docs/large_batch.md` has 60,000 images and
# three seeds.
#
# ## Trust ratios
# For each layer LARS and LAMB multiply the step by a ratio of norms, of its weights to
# its gradient (LARS) or to its update (LAMB). A run with `log.trust_ratios=True` writes
# them to its `metrics.jsonl`, at every logged step.


# %%
def series(name, metric):
  lines = jxs.metrics.read_metrics(folder / name / "metrics.jsonl")
  return list(zip(*[(m["step"], m[metric]) for m in lines if metric in m], strict=True))


def trust_ratios(name):
  lines = jxs.metrics.read_metrics(folder / name / "metrics.jsonl")
  return sorted({n for m in lines for n in m if "trust_ratio" in n})


figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), dpi=150, layout="constrained")
for name, (_, batch_size) in runs.items():
  if found := series(name, "eval/accuracy"):
    epochs = [step * batch_size / 1437 for step in found[0]]
    axes[0].plot(epochs, [100 * a for a in found[1]], "o-", ms=3, label=name)
axes[0].set(xlabel="epoch", ylabel="held-out accuracy (%)", ylim=(0, 102))
axes[0].legend(frameon=False, fontsize=8)
for axis, name in zip(axes[1:], ("LARS", "LAMB"), strict=True):
  for metric in trust_ratios(name):
    layer = metric.partition("trust_ratio/")[2].removesuffix("/kernel")
    axis.plot(*series(name, metric), label=layer)
  axis.set(xlabel="step", title=f"{name}: trust ratio of each layer", yscale="log")
  axis.legend(frameon=False, fontsize=8)
