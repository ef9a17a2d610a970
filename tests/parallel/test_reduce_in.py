"""Gradients that FSDP sums in the dtype of activations."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxscale import config as cfg
from jaxscale.experiment import build
from jaxscale.mesh import make_mesh
from jaxscale.parallel.fsdp_gather import Gather, gather_params
from support.configs import tiny_language

RNG = np.random.default_rng(0)
SLOPES = RNG.normal(size=(8, 16, 8)).astype(np.float32)  # of each device
BFLOAT16 = ml_dtypes.bfloat16


@pytest.mark.parametrize("in_backward", [False, True])
def test_each_devices_gradient_is_rounded(in_backward):
  """The reference is NumPy's float64 sum of rounded gradients; the result is rounded once more."""
  sizes: Any = {"data": 2, "fsdp": 4} if in_backward else {"data": 1, "fsdp": 8}
  mesh = make_mesh(**sizes)
  how = Gather(0, True, ("data",) if in_backward else (), reduce_dtype=jnp.bfloat16)

  @jax.jit
  @jax.shard_map(mesh=mesh, in_specs=(P("fsdp"), P(("data", "fsdp"))), out_specs=P("fsdp"))
  def grads(w, slopes):
    return jax.grad(lambda w: (gather_params(w, how) * slopes[0]).sum())(w)

  found = np.asarray(grads(np.ones((16, 8), np.float32), SLOPES))
  wanted = SLOPES.astype(BFLOAT16).astype(np.float64).sum(0)
  assert found.dtype == np.float32
  np.testing.assert_array_equal(found, found.astype(BFLOAT16).astype(np.float32))
  # XLA may round after each of the sums: 8 half steps of 2^-8 of partial sums.
  np.testing.assert_allclose(found, wanted, atol=8 * 2.0**-9 * np.abs(SLOPES).sum(0).max())
  assert np.abs(found - SLOPES.astype(np.float64).sum(0)).max() > 1e-3


def reduced(field):
  """Return the dtypes of the reduce-scatters of matrices that a step hands to the compiler."""
  layout = cfg.Layout(shard="fsdp", reduce_in=field)
  config = tiny_language(dtype="bfloat16", mesh=cfg.Mesh(data=1, fsdp=8), layout=layout)
  parts = build.experiment(config, devices=jax.devices())
  text = parts.lower_train_step().as_text()
  lines = text.split('"stablehlo.reduce_scatter"')[1:]
  types = [part.split("}) : (tensor<")[1].split(">")[0].split("x") for part in lines]
  return {kind for *dims, kind in types if len(dims) > 1}


def test_reduce_scatters_of_a_step():
  assert reduced("float32") == {"f32"}
  assert reduced("dtype") == {"bf16"}
