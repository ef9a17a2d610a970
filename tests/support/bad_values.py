"""Values that a run must notice: NaN gradients and flipped bits."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.mesh import batch_sharding

AXES, ROWS, DIM, OUT = ("replica", "data"), 32, 12, 5
WHERE = {"gradient": "kernel", "loss": "loss", "state": "batch_stats/mean"}


@jax.custom_vjp
def spoilt(w, by):
  """Return `w`; its gradient is multiplied by the mean of `by`, which is 1 without a fault."""
  del by
  return w


spoilt.defvjp(lambda w, by: (w, by), lambda by, g: (g * by.mean(), jnp.zeros_like(by)))


def init(key):
  kernel = 0.1 * jax.random.normal(key, (DIM, OUT))
  params = {"kernel": kernel, "bias": jnp.zeros(OUT), "gain": jnp.ones(OUT)}
  return params, {"batch_stats": {"mean": jnp.zeros(DIM)}}


def loss_fn(params, model_state, batch, keys):
  del keys
  kernel = spoilt(params["kernel"], batch["gradient"])
  out = (batch["x"] @ kernel + params["bias"]) * params["gain"]
  loss = jnp.sum((out - batch["y"]) ** 2)
  mean = model_state["batch_stats"]["mean"]
  mean = 0.9 * mean + 0.1 * batch["x"].mean(0) * batch["state"].mean()
  examples = (batch["x"][:, 0] < jnp.inf).sum(dtype=jnp.int32)
  totals = {"loss": loss * batch["loss"].mean(), "examples": examples}
  return loss, ({"batch_stats": {"mean": mean}}, totals)


def batch(mesh, step, **bad):
  """Return the rows of a step; `bad` maps a fault to (row, value), e.g. gradient=(9, jnp.nan)."""
  rng = np.random.default_rng(step)
  rows = {name: np.ones(ROWS, np.float32) for name in WHERE}
  for name, (row, value) in bad.items():
    rows[name][row] = value
  rows["x"] = rng.standard_normal((ROWS, DIM)).astype(np.float32)
  rows["y"] = rng.standard_normal((ROWS, OUT)).astype(np.float32)
  return jax.device_put(rows, batch_sharding(mesh))


def flipped(value, element=1, bit=0):
  """Return the array with one bit of one element flipped."""
  raw = np.array(value)
  bits = raw.view(f"u{raw.dtype.itemsize}").reshape(-1)
  bits[element] ^= np.asarray(1 << bit, bits.dtype)
  return raw
