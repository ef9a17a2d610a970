"""Small model of stacked layers, with every part that a layout may split."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxscale.mesh import batch_sharding
from jaxscale.models.linear import linear, shift
from jaxscale.models.stack import Stack, rejoin
from jaxscale.parallel import Rule

VOCAB, WIDTH, HEADS, HIDDEN, LAYERS, LENGTH = 32, 16, 4, 32, 4, 8

RULES = (
  Rule("embed/table", ("model", "fsdp")),
  Rule("layers/(q|k|v|up)", ("stage", "fsdp", "model")),
  Rule("layers/(o|down)", ("stage", "model", "fsdp")),
  Rule("layers/.*scale", ("stage", None)),
  Rule("layers/up_bias", ("stage", "model")),
  Rule("layers/down_bias", ("stage", None)),
  Rule("head/scale", (None,)),
  Rule("head/kernel", ("fsdp", "model")),
)


def tiny_stack(num_layers=LAYERS, width=WIDTH, hidden=HIDDEN, dtype=jnp.float32):
  def init(key):
    keys = iter(jax.random.split(key, 12))

    def normal(*shape):
      return 0.5 * jax.random.normal(next(keys), shape) / shape[-2] ** 0.5

    one, many = jnp.ones(width), jnp.ones((num_layers, width))
    kernels = {n: normal(num_layers, width, width) for n in "qkvo"}
    layers = kernels | {"scale": many, "mlp_scale": many}
    for name, *ends in (("up", width, hidden), ("down", hidden, width)):
      layers[name] = normal(num_layers, *ends)
      layers[f"{name}_bias"] = 0.1 * normal(num_layers, ends[-1])
    embed = {"table": normal(VOCAB, width)}
    head = {"scale": one, "kernel": normal(width, VOCAB)}
    return {"embed": embed, "layers": layers, "head": head}

  def norm(h, scale):
    wide = h.astype(jnp.float32)
    return wide * lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6) * scale

  def embed(params, batch, ops):
    return ops.lookup(params["table"], batch["tokens"]).astype(dtype)

  def layer(w, h, ops):
    x = ops.enter(norm(h, w["scale"]))
    places = ops.positions(x.shape[1]).astype(jnp.float32)
    q, k, v = (linear(x, w[n], dtype).reshape(*x.shape[:2], -1, width // HEADS) for n in "qkv")
    turn = jnp.cos(places / 10)[None, :, None, None].astype(dtype)
    a = ops.attend(q * turn, k * turn, v, causal=True)
    h = h + rejoin(a.reshape(*x.shape[:2], -1), {"kernel": w["o"]}, ops)
    x = ops.enter(norm(h, w["mlp_scale"]))
    x = jax.nn.gelu(shift(linear(x, w["up"], dtype), w["up_bias"]))
    return h + shift(rejoin(x, {"kernel": w["down"]}, ops), w["down_bias"])

  def finish(params, h, batch, ops):
    h = ops.enter(norm(h, params["scale"]))
    targets = batch["targets"]
    counts = targets >= 0
    losses, hits = ops.classify(
      h, params["kernel"], None, jnp.maximum(targets, 0), num_classes=VOCAB, dtype=dtype
    )
    return {
      "loss": jnp.where(counts, losses, 0.0).sum(),
      "accuracy": (hits & counts).sum(dtype=jnp.int32),
      "examples": counts.sum(dtype=jnp.int32),
    }

  def logits(params, h):
    return (norm(h, params["scale"]) @ params["kernel"].astype(dtype)).astype(jnp.float32)

  return Stack(init, embed, layer, finish, logits, num_layers, has_lookup=True)


ROWS = 16


def batch(number, mesh):
  tokens = np.random.default_rng(number).integers(0, VOCAB, (ROWS, LENGTH + 1))
  tokens = tokens.astype(np.int32)
  made = {"tokens": tokens[:, :-1].copy(), "targets": tokens[:, 1:].copy()}
  return jax.device_put(made, batch_sharding(mesh))
