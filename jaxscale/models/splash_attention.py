"""JAX's splash attention, a flash attention for TPUs, inside `jax.shard_map`.

The kernels are in `jax.experimental.pallas.ops.tpu.splash_attention`. They do not say over which
mesh axes their results vary, which `jax.shard_map` requires. They compute on one device, so
here they run on arrays that are declared invariant, with that check turned off, and results are
cast to vary like q.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash

from jaxscale.cluster.jax_internals import without_axes_check
from jaxscale.collectives import vary
from jaxscale.collectives.typed import same_everywhere, varying
from jaxscale.models.flash_attention import ATTENTION
from jaxscale.models.linear import alike

# Tokens in a block; the first that divides the tokens. 512 is the default of MaxText for all
# blocks (AI-Hypercomputer/maxtext, configs/types.py: SplashAttention); 128 that of JAX.
BLOCKS = (512, 256, 128)
_BLOCKS_OF = "q kv kv_compute q_dkv kv_dkv kv_dkv_compute q_dq kv_dq"


def splash_attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  causal: bool,
  documents: jax.Array | None = None,
  interpret: bool = False,
) -> jax.Array:
  """Compute attention on a TPU without scores in memory and without masked blocks.

  The blocks of two different documents are computed, too. The output and a float32 number per
  query and head are stored for the backward pass, with the checkpoint name `ATTENTION`.

  Args:
    q: queries, [rows, tokens, heads, width]; tokens are a multiple of 128.
    k: keys, [rows, tokens, groups, width]; groups divide heads.
    v: values, with the shape of `k`.
    causal: whether a token attends only to itself and earlier tokens.
    documents: numbers of the tokens' documents, int32 [rows, tokens]; a token attends only
      to tokens with its own number. None means one document per row.
    interpret: whether JAX computes the kernels without a TPU, slowly.

  Returns:
    Outputs, [rows, tokens, heads, width].
  """
  q, k, v = (x.swapaxes(1, 2) for x in alike(q, k, v))
  q = q * jnp.asarray(q.shape[-1] ** -0.5, q.dtype)
  ids = () if documents is None else (splash.SegmentIds(documents, documents),)
  out: Any = _splash(causal, interpret, q, k, v, ids)
  return out.swapaxes(1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _splash(causal, interpret, q, k, v, ids):
  return _splash_forward(causal, interpret, q, k, v, ids)[0]


def _splash_forward(causal, interpret, q, k, v, ids):
  with without_axes_check():
    heads, tokens = q.shape[1:3]
    rows = jax.vmap(_kernel(heads, tokens, causal, interpret))
    ids = _invariant(ids)
    out, back = jax.vjp(lambda q, k, v: rows(q, k, v, *ids), *_invariant((q, k, v)))
  return vary(out, varying(q)), back


def _kernel(heads: int, tokens: int, causal: bool, interpret: bool) -> Any:
  block = next(block for block in BLOCKS if tokens % block == 0)
  sizes: Any = {f"block_{name}": block for name in _BLOCKS_OF.split()}
  mask = (splash.CausalMask if causal else splash.FullMask)((tokens, tokens))
  return splash.make_splash_mha(
    splash.MultiHeadMask([mask] * heads),
    block_sizes=splash.BlockSizes(**sizes),
    head_shards=1,
    q_seq_shards=1,
    residual_checkpoint_name=ATTENTION,
    interpret=interpret,
  )


def _splash_backward(causal, interpret, back, g):
  with without_axes_check():
    grads = back(_invariant(g))
  return *vary(grads, varying(g)), None


_splash.defvjp(_splash_forward, _splash_backward)


def _invariant(tree: Any) -> Any:
  return jax.tree.map(lambda x: same_everywhere(x, varying(x)), tree)
