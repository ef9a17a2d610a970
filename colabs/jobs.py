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
# `jaxscale submit`, `sweep` and `scaling` are also Python functions that return handles. Where
# `sbatch` is installed they submit to Slurm. Here `executor="local"` runs jobs in the background
# of this machine. Jobs keep running after the notebook is closed, and `jobs.job(name)` finds
# them again in a new session. The last section is a scaling report with its picture.

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
from IPython.display import Image

from jaxscale import jobs
from jaxscale.config import CNN, SGD, Config, Cosine, Digits, Evaluation, Log

# %% [markdown]
# ## Submit a run
# A config is either the path of a file or an object like the one below. On a cluster, replace
# `executor` by `nodes=4, time="1:00:00", site="mycluster"`.

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
# `status()` returns at once, and `wait()` returns when the run has ended. `job.cancel()` saves a
# checkpoint and stops the run, and `job.resume()` resumes it.

# %%
job.wait(timeout_s=1200)

# %% [markdown]
# The metrics are a list of dicts, one per logged step. `pandas.DataFrame(job.metrics())`
# converts them to a data frame.

# %%
job.metrics()

# %%
print(job.logs(lines=3))

# %% [markdown]
# ## Sweep over settings
# A sweep is one job with one row per trial. `at_most` limits how many trials run at a time.

# %%
trials = jobs.sweep(config, [{"seed": 0}, {"seed": 1}], executor="local")
trials.wait(timeout_s=1200)

# %% [markdown]
# ## Measure scaling
# Run the same config at several sizes, here one after another. The report is the same as that of
# `jaxscale report`. The processes share the cores of one machine, so there is no speed-up; on
# separate nodes there would be.

# %%
study = jobs.scaling(config, [1, 2], executor="local")
study.wait(timeout_s=1200)
study.report()

# %% [markdown]
# The report is also in the files `scaling.csv` and `scaling.png` of the study's folder.

# %%
Image(study.folder / "scaling.png")
