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
# Eight devices average their gradients in every step. Plainly that is four bytes per
# weight; 1-bit SGD sends a bit, PowerSGD two thin matrices. What they leave out stays
# on the device and is sent later (error feedback). This notebook shows one gradient
# as each sends it, how the rest arrives, how many bytes a step takes by the compiled
# program, and what becomes of accuracy and time.

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
from jaxscale.experiment import build
from jaxscale.exchange.one_bit import one_bit
from jaxscale.exchange.power_sgd import power_sgd
from jaxscale import hlo

# %% [markdown]
# ## One gradient
# Of the first layer of a network on real digits, on each device that of its own 64
# images.

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


own = jax.vmap(jax.grad(loss), (None, 0, 0))(
  params, batch["image"].reshape(8, 64, 8, 8, 1), batch["label"].reshape(8, 64)
)
jax.tree.map(jnp.shape, own)

# %% [markdown]
# An exchange is two functions: `init` makes the state that a device keeps, `exchange`
# turns its own gradients into their mean. Here each averages the same gradients again
# and again, as if nothing was learnt in between: the mean of what was received is then
# to become the true mean.

# %%
exchanges = {
  "plain": exchange.plain(axes),
  "1-bit": one_bit(axes, num_devices=8),
  "PowerSGD, rank 4": power_sgd(axes, rank=4),
}


def received(method, steps=32):
  """What `steps` exchanges gave: the first kernel's mean gradient of each."""

  def on_a_device(grads):
    grads = jax.tree.map(lambda g: g[0], grads)

    def step(state, _):
      mean, state = method.exchange(grads, state)
      return state, mean["Dense_0"]["kernel"]

    start = jax.lax.pcast(method.init(grads), axes, to="varying")
    return jax.lax.scan(step, start, length=steps)[1]

  split = jax.shard_map(on_a_device, mesh=mesh, in_specs=P(axes), out_specs=P())
  return np.asarray(jax.jit(split)(own))


means = {name: received(method) for name, method in exchanges.items()}
true = means["plain"][0]

# %% [markdown]
# The first step's kernel, 64 inputs by 128 outputs, and the mean of the first 16 steps.
# One bit leaves two values per column, rank 4 the sum of four patterns. After 16 steps
# both look like the gradient.

# %%
figure, panels = plt.subplots(2, 3, figsize=(10, 4.4), dpi=150, layout="constrained")
limit = np.abs(true).max() / 3
for column, (name, steps) in zip(panels.T, means.items(), strict=True):
  for axis, shown in zip(column, (steps[0], steps[:16].mean(0)), strict=True):
    axis.imshow(shown, cmap="RdBu", vmin=-limit, vmax=limit, aspect="auto")
    axis.set(xticks=[], yticks=[])
  column[0].set_title(name, fontsize=10)
panels[0, 0].set_ylabel("step 1")
_ = panels[1, 0].set_ylabel("mean of 16")

# %% [markdown]
# ## Training with each
# Bytes are read from the compiled step: what one device sends. Accuracy is of the
# held-out digits after 20 epochs, one seed. Milliseconds are of eight simulated devices
# that share the cores of this machine, where nothing crosses a network: they show what
# an exchange computes. How long the bytes take depends on the links; `jaxscale bench`
# measures them.


# %%
def train(chosen):
  settings = jxs.Config(
    model=models.MLP(hidden=(256, 256)),
    data=data.Digits(),
    optimizer=optim.SGD(lr=0.05),
    schedule=optim.Cosine(warmup_epochs=2),
    batch_size=128,
    epochs=20,
    exchange=chosen,
  )
  made = build.experiment(settings)
  step, state = made.compile_train_step(), made.init_state()
  sent = sum(c.times * c.wire_bytes for c in hlo.collectives(step, made.mesh))
  batches = data.to_device(data.train_batches(made.train_data, batch_size=128), mesh)
  began = time.perf_counter()
  for batch in itertools.islice(batches, made.derived.total_steps):
    state, _ = step(state, batch)
  took = (time.perf_counter() - began) / made.derived.total_steps
  held_out = data.to_device(data.eval_batches(made.eval_data, batch_size=360), mesh)
  result = jxs.evaluate(made.eval_step, *state.evaluated(), held_out)
  return sent, result["accuracy"], took


chosen = {
  "plain": exchange.AllReduce(),
  "16 bits": exchange.HalfPrecision(),
  "1-bit": exchange.OneBit(),
  "PowerSGD, rank 4": exchange.PowerSGD(rank=4),
}
results = {name: train(given) for name, given in chosen.items()}
whole = results["plain"][0]
print("exchange           kB per step  of plain  held-out accuracy  ms per step")
for name, (sent, accuracy, took) in results.items():
  share = f"{sent / 1e3:11,.1f} {sent / whole:9.1%}"
  print(f"{name:18} {share} {accuracy:18.1%} {1e3 * took:12.1f}")

# %% [markdown]
# ## What is late, and what is saved
# Left, how far the mean of the first steps is from the true gradient: what was left out
# arrives, and the error falls with the number of steps. Right, the bytes.

# %%
figure, (late, saved) = plt.subplots(1, 2, figsize=(10, 3.4), dpi=150, layout="constrained")
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
labels = [f"held-out {results[name][1]:.1%}" for name in names]
saved.bar_label(bars, labels, padding=4, fontsize=8)
saved.set(xlabel="kB that a device sends in a step", xlim=(0, 1.5 * whole / 1e3))
for axis in (late, saved):
  axis.spines[["top", "right"]].set_visible(False)
