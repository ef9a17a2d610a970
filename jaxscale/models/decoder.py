"""Decoder-only transformer language model in the style of Llama.

It uses Llama's choices (arXiv:2302.13971, §2.2; arXiv:2307.09288, §2.2): RMSNorm before
each branch (arXiv:1910.07467), rotary positions (arXiv:2104.09864), grouped-query
attention (arXiv:2305.13245), SwiGLU as the MLP (arXiv:2002.05202), and no biases. With
biases of queries, keys and values it is Qwen2 (arXiv:2407.10671, §2.2.1). A layer
computes, with h the residual stream:

    h = h + o(attention(rope(q(x)), rope(k(x)), v(x)))   x = rms_norm(h)
    h = h + down(silu(gate(x)) * up(x))                  x = rms_norm(h)

The head has its own matrix, or with `tied` the transposed table of the embedding
(arXiv:1608.05859), as the smaller Llamas and Qwens have.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.models.attention import RopeScaling, join_heads, rotate, split_heads
from jaxscale.models.linear import dense, linear
from jaxscale.models.norms import rms_norm
from jaxscale.models.sizes import transformer_heads
from jaxscale.models.stack import Ops, Stack, at_least_float32, rejoin, split_of_last, sum_totals

# Sharding rules: path pattern and mesh axis of each dim, or a function that returns the axes
# (parallel/rules.py).
SHARDING = (
  ("embed/table", ("model", "fsdp")),
  ("layers/(q|k|v|gate|up)/kernel", ("stage", "fsdp", "model")),
  ("layers/(q|k|v)/bias", ("stage", "model")),
  ("layers/(o|down)/kernel", split_of_last),
  ("layers/.*norm/scale", ("stage", None)),
  ("head/norm/scale", (None,)),
  ("head/kernel", ("fsdp", "model")),
)


def make_transformer(
  *,
  vocab_size: int,
  num_layers: int,
  width: int,
  num_heads: int,
  hidden: int,
  num_kv_heads: int | None = None,
  head_width: int | None = None,
  rope_theta: float = 10_000.0,
  rope_scaling: RopeScaling | None = None,
  norm_eps: float = 1e-5,
  qk_norm: bool = False,
  qkv_bias: bool = False,
  pad_vocab_to: int = 128,
  tied: bool = False,
  init_std: float = 0.02,
  label_smoothing: float = 0.0,
  dtype: Any = jnp.float32,
) -> Stack:
  """Return a Llama-style language model as a `Stack`.

  A batch is {"tokens": int32 [rows, tokens], "targets": int32 [rows, tokens]}. A target
  is the token to predict, or -1 for none. An optional "mask", bool [rows], is False for
  rows that do not count. Optional "documents", int32 [rows, tokens], are the numbers 0, 1, …
  of several documents in a row: a token attends only to its own, whose positions begin at 0.

  Args:
    vocab_size: number of tokens in the vocabulary.
    num_layers: number of layers of attention and MLP.
    width: width of the residual stream.
    num_heads: number of query heads.
    hidden: number of hidden units of the MLP (of `gate` and `up` each).
    num_kv_heads: number of heads of keys and values; None means `num_heads`.
    head_width: width of a head; None means width / num_heads.
    rope_theta: base of the rotary positions; 500,000 in Llama 3.
    rope_scaling: scaling of the rotary positions, as in Llama 3.1; None means no scaling.
    norm_eps: term added to the mean square in RMSNorm; 1e-5 in Llama 2 and 3.
    qk_norm: normalise queries and keys per head before rotation (arXiv:2302.05442, §2.1;
      by RMSNorm, as in Qwen3, arXiv:2505.09388, §2).
    qkv_bias: add biases to queries, keys and values, as in Qwen2.
    pad_vocab_to: pad the rows of table and head to a multiple of this, as in Megatron-LM
      (arXiv:1909.08053, §3), so that every layout can split them evenly. Padding rows
      stay 0.
    tied: use the table, transposed, as the kernel of the head.
    init_std: standard deviation of initial matrices and the table. 0.02 is from GPT-2's
      published code; the same in Megatron-LM (arXiv:1909.08053, §4.1).
    label_smoothing: share of the target that is spread over the vocabulary
      (arXiv:1512.00567, section 7; 0.1 in arXiv:1706.03762, section 5.4); use 0 for
      evaluation. The exponential of a smoothed loss is not a perplexity.
    dtype: dtype of activations. Parameters, norms, softmax and loss are float32.

  Raises:
    ConfigError: sizes do not fit each other.

  Example:
    >>> stack = make_transformer(
    ...   vocab_size=256, num_layers=2, width=64, num_heads=4, hidden=128
    ... )
    >>> params = stack.init(jax.random.key(0))
    >>> params["layers"]["q"]["kernel"].shape
    (2, 64, 64)
  """
  groups, each = transformer_heads(width, num_heads, num_kv_heads, head_width)
  norm, dtype = functools.partial(rms_norm, eps=norm_eps), jnp.dtype(dtype)

  def embed(p, batch, ops):
    # Rows are float32, so that a frequent token's gradients are summed in float32.
    return ops.lookup(p["table"], batch["tokens"]).astype(dtype)

  def layer(p, h, ops):
    def turn(x, positions):
      return rotate(x, positions, rope_theta, rope_scaling)

    return _layer(p, h, ops, norm=norm, turn=turn, head_width=each)

  def finish(p, h, batch, ops):
    x, targets = ops.enter(norm(h, p["norm"]["scale"])), batch["targets"]
    counts = targets >= 0
    if "mask" in batch:
      counts &= batch["mask"][:, None]
    options = {"num_classes": vocab_size, "label_smoothing": label_smoothing, "dtype": h.dtype}
    losses, hits = ops.classify(x, p["kernel"], None, jnp.maximum(targets, 0), **options)
    return sum_totals(losses, hits, counts)

  def logits(p, h):
    x = norm(h, p["norm"]["scale"])
    return at_least_float32(linear(x, p["kernel"][:, :vocab_size], h.dtype))

  def init(key):
    more, normed = -vocab_size % pad_vocab_to, each if qk_norm else None
    sizes = width, num_heads * each, groups * each, hidden
    params = _init(key, init_std, num_layers, vocab_size, more, *sizes, normed)
    for name in "qkv" if qkv_bias else "":
      kernel = params["layers"][name]["kernel"]
      params["layers"][name]["bias"] = jnp.zeros_like(kernel, shape=kernel[:, 0].shape)
    if tied:
      del params["head"]["kernel"]
    return params

  return Stack(init, embed, layer, finish, logits, num_layers, tied, has_lora=True, has_lookup=True)


def _layer(
  p: Any,
  h: jax.Array,
  ops: Ops,
  *,
  norm: Callable[..., jax.Array],
  turn: Callable[[jax.Array, jax.Array], jax.Array],
  head_width: int,
) -> jax.Array:
  """Run attention and MLP of one layer on [rows, tokens, width]; `turn` is RoPE."""
  # Normalising before `enter` leaves one tensor per branch to communicate.
  x = ops.enter(norm(h, p["attn_norm"]["scale"]))
  to, positions = h.dtype, ops.positions(x.shape[1])
  q, k, v = (split_heads(dense(x, p[name], to), head_width) for name in "qkv")
  if "q_norm" in p:
    q = norm(q, p["q_norm"]["scale"]).astype(to)
    k = norm(k, p["k_norm"]["scale"]).astype(to)
  y = join_heads(ops.attend(turn(q, positions), turn(k, positions), v, causal=True))
  h = h + rejoin(y, p["o"], ops)
  x = ops.enter(norm(h, p["mlp_norm"]["scale"]))
  gate, up = (dense(x, p[name], to) for name in ("gate", "up"))
  return h + rejoin((gate, up), p["down"], ops, swiglu)


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
  """SwiGLU (arXiv:2002.05202, eq. 6): silu(gate) * up, computed in float32."""
  return (jax.nn.silu(at_least_float32(gate)) * at_least_float32(up)).astype(gate.dtype)


def _init(key, init_std, num_layers, vocab_size, more, width, queries, keys, hidden, qk_norm):
  """Initialise parameters from normal distributions.

  Matrices at the end of a branch, of which there are two per layer, are scaled by
  1 / sqrt(branches) as in GPT-2 ("Language Models are Unsupervised Multitask Learners",
  Radford et al. 2019, §2.3).
  """
  embed_key, layers_key, head_key = jax.random.split(key, 3)
  into = init_std / math.sqrt(2 * num_layers)

  def normal(key, shape, std=init_std):
    return std * jax.random.normal(key, shape, jnp.float32)

  ones = {"scale": jnp.ones(width, jnp.float32)}

  def layer(key):
    q, k, v, o, gate, up, down = jax.random.split(key, 7)
    by_head = {"scale": jnp.ones(qk_norm or 1, jnp.float32)}
    norms = {"q_norm": by_head, "k_norm": by_head} if qk_norm else {}
    params = {"q": normal(q, (width, queries)), "o": normal(o, (queries, width), into)}
    params |= {"k": normal(k, (width, keys)), "v": normal(v, (width, keys))}
    params |= {"gate": normal(gate, (width, hidden)), "up": normal(up, (width, hidden))}
    params |= {"down": normal(down, (hidden, width), into)}
    kernels = {name: {"kernel": kernel} for name, kernel in params.items()}
    return norms | {"attn_norm": ones, "mlp_norm": ones} | kernels

  table = jnp.pad(normal(embed_key, (vocab_size, width)), ((0, more), (0, 0)))
  kernel = jnp.pad(normal(head_key, (width, vocab_size)), ((0, 0), (0, more)))
  layers = jax.vmap(layer)(jax.random.split(layers_key, num_layers))
  head = {"norm": ones, "kernel": kernel}
  return {"embed": {"table": table}, "layers": layers, "head": head}
