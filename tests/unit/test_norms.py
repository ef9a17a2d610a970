"""Norms and activations, and what they keep for the backward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.models.decoder import swiglu
from jaxscale.models.norms import layer_norm, rms_norm
from jaxscale.models.stack import Ops, rejoin
from jaxscale.models.vision_transformer import gelu

SHAPE, EPS = (4, 6, 32), 1e-5
RNG = np.random.default_rng(0)
X, G = (RNG.normal(1.0, 2.0, SHAPE) for _ in range(2))
SCALE, BIAS = RNG.normal(1.0, 0.3, SHAPE[-1]), RNG.normal(size=SHAPE[-1])


def plain_rms(x, scale):
  return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + EPS) * scale


def plain_layer(x, scale, bias):
  centred = x - x.mean(-1, keepdims=True)
  return centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + EPS) * scale + bias


NORMS = {
  "rms": (lambda *args: rms_norm(*args, eps=EPS), plain_rms, (SCALE,)),
  "layer": (lambda *args: layer_norm(*args, eps=EPS), plain_layer, (SCALE, BIAS)),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_and_its_derivative_are_those_of_the_formula(name):
  norm, plain, weights = NORMS[name]
  with jax.enable_x64(True):
    wanted, pull = jax.vjp(plain, *map(jnp.asarray, (X, *weights)))
    grads = pull(jnp.asarray(G))
  arrays = [jnp.asarray(x, jnp.float32) for x in (X, *weights)]
  found, pull = jax.vjp(norm, *arrays)
  np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
  for x, y in zip(pull(jnp.asarray(G, jnp.float32)), grads, strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_keeps_its_input_and_numbers_of_rows(name):
  norm, _, weights = NORMS[name]
  x = jnp.asarray(X, jnp.bfloat16)
  args = x, *(jnp.asarray(w, jnp.float32) for w in weights)
  pulled = jax.eval_shape(lambda *args: jax.vjp(norm, *args)[1], *args)
  large = [leaf for leaf in jax.tree.leaves(pulled) if leaf.size >= x.size]
  assert [leaf.dtype for leaf in large] == [jnp.bfloat16]
  pull = jax.vjp(norm, *args)[1]
  assert [g.dtype for g in pull(jnp.asarray(G, jnp.float32))] == [
    x.dtype,
    *["float32"] * len(weights),
  ]


ACTIVATIONS = {
  "swiglu": (swiglu, lambda gate, up: jax.nn.silu(gate) * up, 2),
  "gelu": (gelu, lambda x: jax.nn.gelu(x, approximate=False), 1),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_last_product_computes_its_activation_again(name):
  activation, plain, count = ACTIVATIONS[name]
  kernel = RNG.normal(size=(SHAPE[-1], 8))
  lora = {"kernel_lora_a": RNG.normal(size=(32, 2)), "kernel_lora_b": RNG.normal(size=(2, 8))}
  p = {n: jnp.asarray(w, jnp.float32) for n, w in ({"kernel": kernel} | lora).items()}
  parts = tuple(jnp.asarray(x, jnp.float32) for x in (X, G)[:count])

  def loss(parts, p):
    return jnp.sin(rejoin(parts, p, Ops(), activation)).sum()

  def by_formula(parts, p):
    y = plain(*parts)
    return jnp.sin(y @ p["kernel"] + y @ p["kernel_lora_a"] @ p["kernel_lora_b"]).sum()

  found, wanted = (jax.grad(f, (0, 1))(parts, p) for f in (loss, by_formula))
  for x, y in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
    np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-4)
  half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), parts)
  pulled = jax.eval_shape(lambda *a: jax.vjp(loss, *a)[1], half, p)
  large = [leaf for leaf in jax.tree.leaves(pulled) if leaf.shape == SHAPE]
  assert [leaf.dtype for leaf in large] == [jnp.bfloat16] * count
