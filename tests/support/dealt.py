"""Small parameters of every kind of matrix, under every layout."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxscale.mesh import make_mesh
from jaxscale.optim import matching
from jaxscale.parallel import Rule, make_layout

RULES = (
  Rule("layers/up", ("stage", "fsdp", "model")),
  Rule("layers/down", ("stage", "model", "fsdp")),
  Rule("layers/conv", ("stage", None, None, "model", "fsdp")),
  Rule("layers/narrow", ("stage", "fsdp", None)),
  Rule("head", ("fsdp", "model")),
)
SHAPES = {
  "layers": {"up": (4, 8, 16), "down": (4, 16, 8), "conv": (4, 3, 2, 8, 16), "narrow": (4, 16, 4)},
  "head": (8, 24),
}
STACKED = matching("^layers/")
MESHES = {
  "fsdp": {"fsdp": 8},
  "zero1": {"fsdp": 8},
  "replica x fsdp": {"replica": 2, "fsdp": 4},
  "data": {"replica": 2, "data": 4},
  "fsdp x model": {"fsdp": 2, "model": 4},
  "data x model": {"data": 2, "model": 4},
  "fsdp x stage": {"fsdp": 4, "stage": 2},
  "data x fsdp x stage": {"data": 2, "fsdp": 2, "stage": 2},
  "stage x model": {"stage": 2, "model": 4},
  "one device": {},
}


def layout_of(name):
  """Return the layout of the parameters on one of the meshes."""
  sizes = {"data": 1} | MESHES[name]
  count = int(np.prod(list(sizes.values())))
  mesh = make_mesh(devices=jax.devices()[:count], **sizes)
  shapes = jax.tree.map(
    lambda s: jax.ShapeDtypeStruct(s, jnp.float32), SHAPES, is_leaf=lambda x: isinstance(x, tuple)
  )
  shard = "none" if "fsdp" not in sizes else "zero1" if name == "zero1" else "fsdp"
  return make_layout(mesh, shapes, RULES, shard=shard)


def numbers(layout, seed):
  """Return a tree of normal numbers like the parameters."""
  rng = np.random.default_rng(seed)
  tree = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), layout.shapes)
  return tree


def put(tree, layout):
  """Put a tree on the devices, split like the optimizer state."""
  where = jax.tree.map(lambda spec: NamedSharding(layout.mesh, spec), layout.opt_specs)
  return jax.device_put(tree, where)
