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
# # What crosses the network
#
# Eight devices average their gradients in every step. A plain all-reduce sends four bytes per
# weight, 1-bit SGD one bit, and PowerSGD two thin matrices. What is left out stays on the
# device and is sent later (error feedback). This notebook shows one gradient as each exchange
# sends it, how the rest arrives, the bytes per step in the compiled program, and the effect on
# accuracy and time.

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
import time

import jax

jax.config.update("jax_platforms", "cpu")  # simulated, on any machine
jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax.sharding import PartitionSpec as P

import jaxscale as jxs
from jaxscale import data, exchange, models, optim
from jaxscale.config.config_file import load_file
from jaxscale.config.packaged import names
from jaxscale.experiment import build
from jaxscale.exchange.one_bit import one_bit
from jaxscale import hlo

recipe = load_file(names()["exchange_power_sgd"])  # configs/exchange_power_sgd.py

# %% [markdown]
# ## One gradient
# Compute the gradient of a network on real digits. Each device has its own 64 images.

# %%
mesh = jxs.make_mesh()
axes = mesh.axis_names
digits = data.digits("train", augment="none")
batch = digits.load(np.arange(512), None)
net = models.functions(
  models.MLPModule(hidden=(128, 64), num_classes=10),
  digits.info.image_shape,
  mean=digits.info.mean,
  std=digits.info.std,
)
params, _ = net.init(jax.random.key(0))


def loss(params, images, labels):
  logits = net.apply(params, {}, images, True, None)[0]
  return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()


local_grads = jax.vmap(jax.grad(loss), (None, 0, 0))(
  params, batch["image"].reshape(8, 64, 8, 8, 1), batch["label"].reshape(8, 64)
)
jax.tree.map(jnp.shape, local_grads)

# %% [markdown]
# An exchange is two functions. `init` creates the state that a device keeps, and `exchange`
# turns a device's own gradients into the mean over devices. Here each exchange averages the
# same gradients repeatedly, as if the parameters did not change. The mean of the received
# values should then approach the true mean.

# %%
exchanges = {
  "plain": exchange.plain(axes),
  "1-bit": one_bit(axes, num_devices=8),
  "PowerSGD, rank 4": recipe.power_sgd(axes, rank=4),
}


def received(method, steps=32):
  """Return the mean gradient of the first kernel after each of `steps` exchanges."""

  def on_a_device(grads):
    grads = jax.tree.map(lambda g: g[0], grads)

    def step(state, _):
      mean, state = method.exchange(grads, state)
      return state, mean["Dense_0"]["kernel"]

    start = jax.lax.pcast(method.init(grads), axes, to="varying")
    return jax.lax.scan(step, start, length=steps)[1]

  split = jax.shard_map(on_a_device, mesh=mesh, in_specs=P(axes), out_specs=P())
  return np.asarray(jax.jit(split)(local_grads))


means = {name: received(method) for name, method in exchanges.items()}
true = means["plain"][0]

# %% [markdown]
# The first row is the kernel after one step (64 inputs by 128 outputs), the second row the mean
# of the first 16 steps. 1-bit leaves two values per column, and rank 4 the sum of four patterns.
# After 16 steps both are close to the gradient.

# %%
figure, panels = plt.subplots(2, 3, figsize=(10, 4.4), dpi=90, layout="constrained")
limit = np.abs(true).max() / 3
for column, (name, steps) in zip(panels.T, means.items(), strict=True):
  for axis, shown in zip(column, (steps[0], steps[:16].mean(0)), strict=True):
    axis.imshow(shown, "RdBu", aspect="auto", interpolation="nearest", vmin=-limit, vmax=limit)
    axis.set(xticks=[], yticks=[])
  column[0].set_title(name, fontsize=10)
panels[0, 0].set_ylabel("step 1")
_ = panels[1, 0].set_ylabel("mean of 16")

# %% [markdown]
# ## Train with each exchange
# The bytes are what one device sends, read from the compiled step. The accuracy is that of the
# validation digits after 20 epochs with one seed. The milliseconds show the cost of computing
# an exchange: the eight simulated devices share the cores of this machine and nothing crosses a
# network. To measure real links, run `jaxscale bench`.


# %%
def train(exchange_setting):
  settings = jxs.Config(
    model=models.MLP(hidden=(256, 256)),
    data=data.Digits(),
    optimizer=optim.SGD(lr=0.05),
    schedule=optim.Cosine(warmup_epochs=2),
    batch_size=128,
    epochs=20,
    exchange=exchange_setting,
  )
  experiment = build.experiment(settings)
  step, state = experiment.compile_train_step(), experiment.init_state()
  sent = sum(c.times * c.wire_bytes for c in hlo.collectives(step, experiment.mesh))
  batches = data.to_device(data.train_batches(experiment.train_data, batch_size=128), mesh)
  began = time.perf_counter()
  for batch in itertools.islice(batches, experiment.derived.total_steps):
    state, _ = step(state, batch)
  took = (time.perf_counter() - began) / experiment.derived.total_steps
  validation = data.to_device(data.eval_batches(experiment.eval_data, batch_size=360), mesh)
  result = jxs.evaluate(experiment.eval_step, *state.evaluated(), validation)
  return sent, result["accuracy"], took


chosen = {
  "plain": exchange.AllReduce(),
  "16 bits": exchange.HalfPrecision(),
  "1-bit": exchange.OneBit(),
  "PowerSGD, rank 4": recipe.PowerSGD(rank=4),
}
results = {name: train(setting) for name, setting in chosen.items()}
whole = results["plain"][0]
print("exchange           kB per step  of plain  validation accuracy  ms per step")
for name, (sent, accuracy, took) in results.items():
  share = f"{sent / 1e3:11,.1f} {sent / whole:9.1%}"
  print(f"{name:18} {share} {accuracy:20.1%} {1e3 * took:12.1f}")

# %% [markdown]
# ## Error and savings
# Left: the distance between the mean of the first steps and the true gradient. The part that was
# left out arrives later, so the error falls with the number of steps. Right: the bytes sent.

# %%
figure, (late, saved) = plt.subplots(1, 2, figsize=(10, 3.4), dpi=90, layout="constrained")
steps = np.arange(1, 33)
for name in ("1-bit", "PowerSGD, rank 4"):
  so_far = means[name].cumsum(0) / steps[:, None, None]
  error = np.linalg.norm(so_far - true, axis=(1, 2)) / np.linalg.norm(true)
  late.loglog(steps, 100 * error, "o-", ms=3, label=name)
late.set(xlabel="steps", ylabel="error of the mean (%)")
late.set_xticks([1, 2, 4, 8, 16, 32], [1, 2, 4, 8, 16, 32])
late.set_yticks([8, 16, 32, 64], [8, 16, 32, 64])
late.minorticks_off()
late.legend(frameon=False)
names = list(results)[::-1]
bars = saved.barh(names, [results[name][0] / 1e3 for name in names], color="#4c72b0")
labels = [f"validation {results[name][1]:.1%}" for name in names]
saved.bar_label(bars, labels, padding=4, fontsize=8)
saved.set(xlabel="kB that a device sends in a step", xlim=(0, 1.5 * whole / 1e3))
for axis in (late, saved):
  axis.spines[["top", "right"]].set_visible(False)
