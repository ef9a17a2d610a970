"""Attention without scores in memory: by blocks in XLA, and by JAX's kernels for TPUs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

from jaxscale.cluster import jax_internals
from jaxscale.collectives.typed import jaxprs_in
from jaxscale.hlo.memory import memory_of
from jaxscale.models import flash_attention as flash
from jaxscale.models.attention import attention
from jaxscale.models.remat import REMAT
from jaxscale.models.splash_attention import splash_attention
from support.attention64 import attention64
from support.tiny_pipeline import mesh_of


def inputs(tokens, heads, groups, width):
  """Return q, k, v, a gradient of the output, and numbers of documents."""
  rng = np.random.default_rng(tokens)
  shapes = [(2, tokens, n, width) for n in (heads, groups, groups, heads)]
  documents = np.sort(rng.integers(0, 3, (2, tokens)), axis=1).astype(np.int32)
  return *(np.float32(rng.normal(size=shape)) for shape in shapes), documents


def gradients(attend, arrays, **options):
  *qkv, dout = arrays
  out, back = jax.vjp(functools.partial(attend, **options), *qkv)
  return out, *back(jnp.asarray(dout))


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
  ("tokens", "block", "heads", "groups"), [(24, 8, 4, 4), (21, 8, 6, 2), (5, 512, 4, 1)]
)
def test_blocks_are_attention(tokens, block, heads, groups, causal, is_packed):
  *arrays, documents = inputs(tokens, heads, groups, 8)
  options = {"causal": causal, "documents": documents if is_packed else None}
  run = functools.partial(gradients, flash.flash_attention, block=block, **options)
  found = jax.jit(run)(arrays)
  plain = gradients(attention, arrays, implementation="xla", **options)
  for a, b, c in zip(found, attention64(*arrays, **options), plain, strict=True):
    largest = np.abs(b).max()
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * largest)
    np.testing.assert_allclose(a, c, rtol=0, atol=1e-6 * largest)


def test_blocks_above_the_diagonal_are_not_computed():
  assert len(flash._starts(True, 4, 16)[0]) == 4 + 3 + 2 + 1
  assert len(flash._starts(False, 4, 16)[0]) == 16


def test_no_array_has_all_pairs_of_tokens():
  x = jax.ShapeDtypeStruct((1, 4096, 4, 16), jnp.float32)

  def temporaries(by):
    loss = functools.partial(attention, causal=True, implementation=by)
    grads = jax.grad(lambda *qkv: loss(*qkv).sum(), (0, 1, 2))
    return memory_of(jax.jit(grads).lower(x, x, x).compile()).temporaries

  assert temporaries("xla") > 4 * 4 * 4096**2
  assert temporaries(None) < 4 * 4 * 4096**2 / 4


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_kernels_for_tpus_are_attention_in_a_step(causal, is_packed):
  """Interpreted inside `shard_map`, which checks axes, in a rematerialised loop over layers."""
  *arrays, documents = inputs(256, 4, 2, 64)
  options = {"causal": causal, "documents": documents if is_packed else None}

  def layers(q, k, v, dout, documents):
    def attend(h, _):
      more = {"causal": causal, "documents": documents if is_packed else None}
      return splash_attention(h, k, v, interpret=True, **more), None

    run = jax.checkpoint(attend, policy=REMAT["dots_attention"])
    return gradients(lambda q: jax.lax.scan(run, q, None, length=1)[0], (q, dout))

  split = jax.shard_map(layers, mesh=mesh_of(data=2), in_specs=P("data"), out_specs=P("data"))
  out, dq = jax.jit(split)(*arrays, documents)
  for a, b in zip((out, dq), attention64(*arrays, **options), strict=False):
    np.testing.assert_allclose(a, b, rtol=0, atol=3e-6 * np.abs(b).max())


@pytest.mark.parametrize("tokens", [128, 1536])
@pytest.mark.parametrize("remat", ["none", "dots_attention", "dots"])
def test_kernels_for_tpus_are_lowered(tokens, remat):
  """Three kernels; the forward one is called again unless its results are stored."""
  q = jax.ShapeDtypeStruct((2, tokens, 4, 128), jnp.bfloat16)
  k = jax.ShapeDtypeStruct((2, tokens, 2, 128), jnp.bfloat16)
  attend = functools.partial(splash_attention, causal=True)
  if REMAT[remat] is not None:
    attend = jax.checkpoint(attend, policy=REMAT[remat])
  grads = jax.grad(lambda *qkv: attend(*qkv).sum(dtype=jnp.float32), (0, 1, 2))
  traced = jax.jit(grads).trace(q, k, k)
  assert kernels_in(traced.jaxpr) == (4 if remat == "dots" else 3)
  lowered = traced.lower(lowering_platforms=("tpu",))
  assert lowered.as_text().count("@tpu_custom_call") == 3  # in functions that may be shared


def kernels_in(jaxpr):
  is_kernel = [e.primitive.name == "pallas_call" for e in jaxpr.eqns]
  return sum(is_kernel) + sum(kernels_in(x) for e in jaxpr.eqns for x in jaxprs_in(e))


def test_without_the_check_of_axes_jax_decides(monkeypatch):
  with jax_internals.without_axes_check():
    assert not jax._src.config._check_vma.value
  monkeypatch.delattr("jax._src.config._check_vma")
  with jax_internals.without_axes_check():
    pass
