"""A decoder-only transformer language model, of Llama's kind.

Before each branch RMSNorm (arXiv:1910.07467), in attention rotary positions
(arXiv:2104.09864) and grouped heads of keys and values (arXiv:2305.13245), SwiGLU
as the MLP (arXiv:2002.05202), no biases: Llama's choices (arXiv:2302.13971, §2.2;
arXiv:2307.09288, §2.2). With biases of queries, keys and values it is Qwen2
(arXiv:2407.10671, §2.2.1). Of layer l, with h the residual stream:

    h = h + o(attention(rope(q(x)), rope(k(x)), v(x)))   x = rms_norm(h)
    h = h + down(silu(gate(x)) * up(x))                  x = rms_norm(h)

The head has a matrix of its own. Tying it to the table of the embeddings would make
one parameter of the first part of the model and the last, which a pipeline has on
different devices and every other layout gathers at different times. Weights that
were trained tied are imported by copying the table.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.errors import invalid
from jaxscale.models.attention import RopeScaling, join_heads, rotate, split_heads
from jaxscale.models.linear import dense, linear
from jaxscale.models.stack import Ops, Stack, at_least_float32, rejoin, sum_totals

# GPT-2's initial deviation (its published code; the same in Megatron-LM,
# arXiv:1909.08053, §4.1), for all matrices and the table.
INIT_STD = 0.02

# How a layout splits each parameter: path, axis of each dim (parallel/rules.py).
SHARDING = (
  ("embed/table", ("model", "fsdp")),
  ("layers/(q|k|v|gate|up)/kernel", ("stage", "fsdp", "model")),
  ("layers/(q|k|v)/bias", ("stage", "model")),
  ("layers/(o|down)/kernel", ("stage", "model", "fsdp")),
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
  label_smoothing: float = 0.0,
  dtype: Any = jnp.float32,
) -> Stack:
  """A language model as pure functions of its parts.

  A batch is {"tokens": int32 [rows, tokens], "targets": likewise}; a target is the
  token to predict there, or -1 for none. "mask", bool [rows], where there is one,
  says which rows count.

  Args:
    vocab_size: tokens are 0 … vocab_size - 1.
    num_layers: layers of attention and MLP.
    width: of the residual stream.
    num_heads: heads of queries.
    hidden: units of the MLP, of `gate` and of `up` each.
    num_kv_heads: heads of keys and values; None: as many as of queries.
    head_width: of a head; None: width / num_heads.
    rope_theta: base of the rotary positions; 500,000 in Llama 3.
    rope_scaling: of the rotary positions, as in Llama 3.1; None: none.
    norm_eps: added to the mean square; 1e-5 in Llama 2 and 3.
    qk_norm: normalise queries and keys by head before they are rotated
      (arXiv:2302.05442, §2.1; by RMSNorm, as in Qwen3, arXiv:2505.09388, §2).
    qkv_bias: add biases to queries, keys and values, as in Qwen2.
    pad_vocab_to: the table and the head have a multiple of this many rows, as in
      Megatron-LM (arXiv:1909.08053, §3), so that they can be split evenly on any
      layout. The rows behind the vocabulary are 0 and stay it.
    label_smoothing: share of the target spread over all tokens of the vocabulary
      (arXiv:1512.00567, section 7; 0.1 in arXiv:1706.03762, section 5.4); 0 for
      evaluation. exp of a smoothed loss is not a perplexity.
    dtype: of activations; parameters are float32, and so are norms, softmax and
      loss inside.

  Raises:
    ConfigError: sizes that do not go together.

  Example:
    >>> stack = make_transformer(
    ...   vocab_size=256, num_layers=2, width=64, num_heads=4, hidden=128
    ... )
    >>> params = stack.init(jax.random.key(0))
    >>> params["layers"]["q"]["kernel"].shape
    (2, 64, 64)
  """
  groups, each = _heads(width, num_heads, num_kv_heads, head_width)
  norm, dtype = functools.partial(rms_norm, eps=norm_eps), jnp.dtype(dtype)

  def embed(p, batch, ops):
    # The rows are looked up as float32: a frequent token's gradients are then summed
    # in float32 too.
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
    params = _init(key, num_layers, vocab_size, more, *sizes, normed)
    for name in "qkv" if qkv_bias else "":
      kernel = params["layers"][name]["kernel"]
      params["layers"][name]["bias"] = jnp.zeros_like(kernel, shape=kernel[:, 0].shape)
    return params

  return Stack(init, embed, layer, finish, logits, num_layers)


def _layer(
  p: Any,
  h: jax.Array,
  ops: Ops,
  *,
  norm: Callable[..., jax.Array],
  turn: Callable[[jax.Array, jax.Array], jax.Array],
  head_width: int,
) -> jax.Array:
  """Attention and MLP of one layer on [rows, tokens, width]; `turn` is RoPE."""
  # Normalised before `enter`: then only one tensor a branch is communicated.
  x = ops.enter(norm(h, p["attn_norm"]["scale"]))
  to, positions = h.dtype, ops.positions(x.shape[1])
  q, k, v = (split_heads(dense(x, p[name], to), head_width) for name in "qkv")
  if "q_norm" in p:
    q = norm(q, p["q_norm"]["scale"]).astype(to)
    k = norm(k, p["k_norm"]["scale"]).astype(to)
  y = join_heads(ops.attend(turn(q, positions), turn(k, positions), v, causal=True))
  h = h + rejoin(y, p["o"]["kernel"], ops)
  x = ops.enter(norm(h, p["mlp_norm"]["scale"]))
  gate, up = (dense(x, p[name], to) for name in ("gate", "up"))
  return h + rejoin(jax.nn.silu(gate) * up, p["down"]["kernel"], ops)


def _heads(
  width: int, num_heads: int, num_kv_heads: int | None, head_width: int | None
) -> tuple[int, int]:
  """(heads of keys and values, width of a head); refuse what is not even."""
  groups = num_heads if num_kv_heads is None else num_kv_heads
  each = width // num_heads if head_width is None else head_width
  if head_width is None and width % num_heads:
    fix = "give a divisor, or head_width"
    raise invalid("transformer.num_heads", num_heads, f"does not divide width={width}", fix)
  if num_heads % groups:
    why = f"does not divide num_heads={num_heads}"
    raise invalid("transformer.num_kv_heads", groups, why, "give a divisor")
  if each % 2:
    why = "is odd, and positions rotate pairs of units"
    fix = "make it even, by width, num_heads or head_width"
    raise invalid("transformer.head_width", each, why, fix)
  return groups, each


def rms_norm(x: jax.Array, scale: jax.Array, *, eps: float) -> jax.Array:
  """RMSNorm (arXiv:1910.07467, eq. 4): x / sqrt(mean(x^2) + eps) * scale.

  Args:
    x: [..., width].
    scale: float32 [width].
    eps: added to the mean square.

  Returns:
    float32 [..., width].
  """
  wide = at_least_float32(x)
  mean_square = jnp.square(wide).mean(axis=-1, keepdims=True)
  return wide * jax.lax.rsqrt(mean_square + eps) * scale


def _init(key, num_layers, vocab_size, more, width, queries, keys, hidden, qk_norm):
  """Normal numbers; into the residual stream 1 / sqrt(branches) of them.

  GPT-2's scale for the matrices that end a branch, of which there are two per layer
  ("Language Models are Unsupervised Multitask Learners", Radford et al. 2019, §2.3).
  """
  embed_key, layers_key, head_key = jax.random.split(key, 3)
  into = INIT_STD / math.sqrt(2 * num_layers)

  def normal(key, shape, std=INIT_STD):
    return std * jax.random.normal(key, shape, jnp.float32)

  ones = {"scale": jnp.ones(width, jnp.float32)}

  def layer(key):
    q, k, v, o, gate, up, down = jax.random.split(key, 7)
    by_head = {"scale": jnp.ones(qk_norm or 1, jnp.float32)}
    norms = {"q_norm": by_head, "k_norm": by_head} if qk_norm else {}
    made = {"q": normal(q, (width, queries)), "o": normal(o, (queries, width), into)}
    made |= {"k": normal(k, (width, keys)), "v": normal(v, (width, keys))}
    made |= {"gate": normal(gate, (width, hidden)), "up": normal(up, (width, hidden))}
    made |= {"down": normal(down, (hidden, width), into)}
    kernels = {name: {"kernel": kernel} for name, kernel in made.items()}
    return norms | {"attn_norm": ones, "mlp_norm": ones} | kernels

  table = jnp.pad(normal(embed_key, (vocab_size, width)), ((0, more), (0, 0)))
  kernel = jnp.pad(normal(head_key, (width, vocab_size)), ((0, 0), (0, more)))
  layers = jax.vmap(layer)(jax.random.split(layers_key, num_layers))
  head = {"norm": ones, "kernel": kernel}
  return {"embed": {"table": table}, "layers": layers, "head": head}
