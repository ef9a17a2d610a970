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
# # Jobs from a notebook
#
# `jaxscale submit` and its like as functions that return handles. Runs are submitted
# to Slurm where `sbatch` is installed; here `executor="local"` runs them in the
# background of this machine. They do not end with the notebook: `jobs.job(name)` in
# another session finds them again. At the end: how one config scales, as a report with
# its picture.

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
from jaxscale import jobs
from jaxscale.config import CNN, SGD, Config, Cosine, Digits, Evaluation, Log

# %% [markdown]
# A config is the path of a file, or an object as this one. On a cluster, give
# `nodes=4, time="1:00:00", site="mycluster"` instead of `executor`.

# %%
config = Config(
  model=CNN(),
  data=Digits(augment="shift"),
  optimizer=SGD(lr=0.1, weight_decay=5e-4),
  schedule=Cosine(warmup_epochs=1),
  batch_size=128,
  epochs=8,
  evaluation=Evaluation(every_epochs=2),
  log=Log(every_steps=5),
)
job = jobs.submit(config, executor="local")
job.status()

# %% [markdown]
# `status()` returns at once; `wait()` returns when the run has ended. `job.cancel()`
# would save and end it, and `job.resume()` would resume it.

# %%
job.wait(timeout_s=1200)

# %% [markdown]
# The metrics are a list of dicts, one per logged step;
# `pandas.DataFrame(job.metrics())` makes a data frame of it.

# %%
job.metrics()

# %%
print(job.logs(lines=3))

# %% [markdown]
# ## Several at once
# A sweep is one job with one row per trial; `at_most` of them run at the same time.

# %%
trials = jobs.sweep(config, [{"seed": 0}, {"seed": 1}], executor="local")
trials.wait(timeout_s=1200)

# %% [markdown]
# ## How does it scale?
# The same config at several sizes, one after another on this machine; the report is
# that of `jaxscale report`. Processes that share the cores of one machine show no
# speed-up, unlike those on nodes of their own.

# %%
study = jobs.scaling(config, [1, 2], executor="local")
study.wait(timeout_s=1200)
study.report()
