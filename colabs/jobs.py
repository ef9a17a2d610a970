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
# What `jaxscale submit` and its like do, as functions that return handles. Runs go to
# Slurm where there is `sbatch`; here `executor="local"` puts them into the background
# of this machine. They do not end with the notebook: `launch.job(name)` in another
# one finds them again.

# %%
from jaxscale import launch
from jaxscale.config import CNN, SGD, Config, Cosine, Digits, Evaluation, Log

# %% [markdown]
# A config is the path of a file, or an object as this one. On a cluster there would be
# `nodes=4, time="1:00:00", site="mycluster"` and no `executor`.

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
job = launch.submit(config, executor="local")
job.status()

# %% [markdown]
# `status()` can be asked at any time; `wait()` comes back when the run has ended.
# `job.cancel()` would end it, saved, and `job.resume()` go on from there.

# %%
job.wait(timeout_s=300)

# %% [markdown]
# The record is a list of dicts, a row a logged step: `pandas.DataFrame(job.metrics())`
# takes it as it is.

# %%
job.metrics()

# %%
print(job.logs(lines=3))

# %% [markdown]
# ## Several at once
# A sweep is one job with a row a trial, `at_most` so many of them at a time.

# %%
trials = launch.sweep(config, [{"seed": 0}, {"seed": 1}], executor="local")
trials.wait(timeout_s=300)

# %% [markdown]
# ## How does it scale?
# The same config at several sizes, one after another on this machine; the report is
# the one of `jaxscale report`. Processes that share one machine's cores
# show no speed-up, nodes of their own do.

# %%
study = launch.scaling(config, [1, 2], executor="local")
study.wait(timeout_s=300)
study.report()
