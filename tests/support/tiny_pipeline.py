"""Small stacked model, on one device and in a pipeline, and a comparison of the two."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxscale.collectives import vary
from jaxscale.collectives.typed import varying
from jaxscale.parallel.pipeline import gpipe, one_f_one_b, split_microbatches, stage_microbatches

LAYERS, WIDTH, HIDDEN, SYMBOLS, TOKENS = 4, 12, 16, 11, 4


def mesh_of(**sizes):
  """Return a mesh of the first devices."""
  devices = jax.devices()[: int(np.prod(list(sizes.values())))]
  auto = (AxisType.Auto,) * len(sizes)
  return jax.make_mesh(tuple(sizes.values()), tuple(sizes), auto, devices=devices)


def init(width=WIDTH, hidden=HIDDEN, layers=LAYERS):
  """Return random parameters, none of them zero or one."""
  rng = np.random.default_rng(0)

  def normal(*shape, scale=0.2):
    return np.float32(rng.normal(size=shape) * scale)

  embed, many = {"table": normal(SYMBOLS, width, scale=1.0)}, {"scale": 1 + normal(layers, width)}
  many |= dict(up=normal(layers, width, hidden), down=normal(layers, hidden, width))
  return {"embed": embed, "layers": many, "head": {"kernel": normal(width, SYMBOLS)}}


def make_batch(rows, tokens=TOKENS):
  rng = np.random.default_rng(1)
  ids = rng.integers(0, SYMBOLS, (2, rows, tokens)).astype(np.int32)
  return {"tokens": ids[0], "targets": ids[1]}


def embed(params, batch):
  return params["embed"]["table"][batch["tokens"]]


def make_layer(reduce=lambda x: x, eps=1e-6, dtype=jnp.float32):
  """Return a layer in which each token sees the mean of those before it."""

  def layer(h, w):
    w = jax.tree.map(lambda x: x.astype(dtype), w)
    x = h * lax.rsqrt((h * h).mean(-1, keepdims=True) + eps) * w["scale"]
    counts = jnp.arange(1, x.shape[1] + 1).astype(dtype)
    x = x + jnp.cumsum(x, axis=1) / counts[:, None]
    return h + reduce(jnp.tanh(x @ w["up"]) @ w["down"])

  return layer


def run(layer):
  """Return a function that runs the layers one after another in a scan."""
  return lambda layers, h: lax.scan(lambda h, w: (layer(h, w), None), h, layers)[0]


def finish(params, h, batch):
  logits = h.astype(jnp.float32) @ params["head"]["kernel"]
  own = jnp.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
  losses = jax.nn.logsumexp(logits, -1) - own
  return {
    "loss": losses.sum(),
    "accuracy": (logits.argmax(-1) == batch["targets"]).sum(dtype=jnp.int32),
    "examples": (batch["targets"] >= 0).sum(dtype=jnp.int32),
  }


def on_one_device(params, batch, layer, embed=embed):
  """Return the gradients and totals from JAX on one device."""

  def loss(params):
    h = run(layer)(params["layers"], embed(params, batch))
    totals = finish(params, h, batch)
    return totals["loss"], totals

  grads, totals = jax.jit(jax.grad(loss, has_aux=True))(params)
  return jax.device_get((grads, totals))


def piped(schedule, mesh, micros, run_layers, *, embed=embed, tokens=None, **settings):
  """Return a jitted (params, batch) -> (grads, totals), and a function that shards its inputs.

  Args:
    schedule: "gpipe" or "1f1b".
    mesh: a mesh with the axis `stage`, and perhaps `data` and `model`.
    micros: the number of micro-batches.
    run_layers: a function (layers, h) -> h.
    embed: a function (params, micro-batch) -> h.
    tokens: the mesh axis that splits the tokens; None: `model` splits the hidden units.
    settings: the settings of the schedule.
  """
  model = "model" if "model" in mesh.axis_names and tokens is None else None
  data = tuple(a for a in mesh.axis_names if a == "data")
  layers = {"scale": P("stage"), "up": P("stage", None, model), "down": P("stage", model)}
  specs = {"embed": {"table": P()}, "layers": layers, "head": {"kernel": P()}}

  def local(params, batch):
    params, batch = vary(params, data), split_microbatches(batch, micros)
    if schedule == "1f1b":
      grads, totals = one_f_one_b(embed, run_layers, finish, params, batch, **settings)
    else:

      def loss(params):
        h = jax.vmap(lambda micro: embed(params, micro))(batch)
        h = gpipe(run_layers, params["layers"], h, **settings)
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (h, stage_microbatches(batch)))
        totals = finish(params, *flat)
        return totals["loss"], totals

      grads, totals = jax.grad(loss, has_aux=True)(params)
      # Where all phases have all outputs, they count once.
      totals = vary(totals, varying(totals["loss"]))
    totals = jax.tree.map(lambda x: lax.psum(x, varying(x)), totals)
    return lax.psum(grads, data) if data else grads, totals

  rows = P(data or None, tokens)
  mapped = jax.shard_map(local, mesh=mesh, in_specs=(specs, rows), out_specs=(specs, P()))

  def put(params, batch):
    shardings = jax.tree.map(
      lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P)
    )
    return jax.device_put(params, shardings), jax.device_put(batch, NamedSharding(mesh, rows))

  return jax.jit(mapped), put
