"""Text from a run's language model.

    jaxscale generate --workdir DIR [--prompt TEXT] [--tokens N] ...

`sample` is the pure function behind it, for any model and prompts of any tokens.
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale import data
from jaxscale.checkpoint import load_params
from jaxscale.config.record import describe_run
from jaxscale.data.tokenizer import Tokenizer, byte_tokenizer, read_tokenizer
from jaxscale.errors import ConfigError
from jaxscale.experiment.model import make_model
from jaxscale.models.cached import advance, empty_cache
from jaxscale.models.flax_apply import init_shapes
from jaxscale.models.stack import Stack


def sample(
  stack: Stack, params, prompt: jax.Array, key: jax.Array, *, num_tokens: int, **choice
) -> jax.Array:
  """Tokens that follow a prompt; pure, and to be compiled whole.

  Args:
    stack: a model whose batches are tokens.
    params: as `stack.init` gives.
    prompt: int32 [rows, length], at least one token long.
    key: of the choices.
    num_tokens: how many.
    choice: temperature, top_k and top_p of `choose`.

  Returns:
    int32 [rows, num_tokens].

  Example:
    >>> from jaxscale.models import make_transformer
    >>> stack = make_transformer(
    ...   vocab_size=256, num_layers=2, width=64, num_heads=4, hidden=128
    ... )
    >>> params, prompt = stack.init(jax.random.key(0)), jnp.zeros((1, 3), jnp.int32)
    >>> sample(stack, params, prompt, jax.random.key(1), num_tokens=4).shape
    (1, 4)
  """
  rows, length = prompt.shape
  cache = empty_cache(stack, params, rows, length + num_tokens)

  def scores(tokens, cache):
    h, cache = advance(stack, params, tokens, cache)
    return stack.logits(params["head"], h[:, -1]), cache

  def step(carry, key):
    logits, cache = carry
    token = choose(logits, key, **choice)
    return scores(token[:, None], cache), token

  keys = jax.random.split(key, num_tokens)
  _, tokens = jax.lax.scan(step, scores(prompt, cache), keys)
  return tokens.T


def choose(
  logits: jax.Array,
  key: jax.Array,
  *,
  temperature: float = 1.0,
  top_k: int | None = None,
  top_p: float | None = None,
) -> jax.Array:
  """Choose one token per row.

  Args:
    logits: float [rows, vocabulary].
    key: of the choice.
    temperature: what logits are divided by; 0: the likeliest, the first of equals.
    top_k: only so many of the likeliest (arXiv:1805.04833, §5.4), the first of
      equals; None: all.
    top_p: of those only the fewest likeliest that together have this probability
      (arXiv:1904.09751, §3.1), the one that reaches it included; None: all.

  Returns:
    int32 [rows].
  """
  if temperature == 0:
    return logits.argmax(-1).astype(jnp.int32)
  # From the likeliest on: then both rules keep the first so many, ties or not.
  order = jnp.argsort(-logits, axis=-1, stable=True)
  ranked = jnp.take_along_axis(logits, order, axis=-1) / temperature
  ranks = jnp.arange(logits.shape[-1], dtype=jnp.int32)
  if top_k is not None:
    ranked = jnp.where(ranks < top_k, ranked, -jnp.inf)
  if top_p is not None:
    share = jax.nn.softmax(ranked)
    before = share.cumsum(-1) - share
    ranked = jnp.where((before < top_p) | (ranks == 0), ranked, -jnp.inf)
  rank = jax.random.categorical(key, ranked)
  return jnp.take_along_axis(order, rank[:, None], -1)[:, 0].astype(jnp.int32)


def _tokenizer(workdir: Path, source: Any, info: data.TextInfo) -> Tokenizer:
  """What made tokens of the run's text.

  Raises:
    ConfigError: there was none, or it is not there any more.
  """
  name, why = getattr(source, "tokenizer", "bytes"), ""
  if name == "bytes" and info.vocab_size == byte_tokenizer().vocab_size:
    return byte_tokenizer()
  if name != "bytes":
    field = f"{type(source).__name__}.tokenizer"
    try:
      found = read_tokenizer(name, source.separator, field=field)
    except ConfigError as e:
      # What it says to give instead is for a run that is yet to be.
      reason = re.sub(r", (or )?give .*", "", str(e))
    else:
      if found.vocab_size == info.vocab_size:
        return found
      has, had = found.vocab_size, info.vocab_size
      reason = f"{field}={name!r}: has {has} tokens, and the run's had {had}"
    why = f", and their tokenizer cannot be taken ({reason})"
  why = f"the {info.vocab_size} tokens of {info.name} are not bytes{why}"
  fix = "give jaxscale.run.generate.sample tokens of your own"
  raise ConfigError(f"--workdir={workdir}: {why}; {fix}")


def write(
  workdir: Path, prompt: str = "", *, seed: int = 0, num_tokens: int = 256, **choice
) -> str:
  """Continue a prompt with a run's language model, to the end of its document.

  Args:
    workdir: of the run, whose newest intact checkpoint is used.
    prompt: "": a new document.
    seed: of the choices.
    num_tokens: at most so many.
    choice: as in `choose`.

  Raises:
    ConfigError: the run has no language model, its tokenizer is not there, or it has
      no checkpoint.
  """
  described = describe_run(workdir)
  if not described.is_text:
    why = f"its run is of {described.data['name']}, not of text; give one of a language model"
    raise ConfigError(f"--workdir={workdir}: {why}")
  config = described.settings()
  fields = {k: v for k, v in described.data.items() if k in data.TextInfo._fields}
  info = data.TextInfo(**fields)
  stack = make_model(config, info)
  assert isinstance(stack, Stack), "what takes text is a stack"
  tokenizer = _tokenizer(workdir, config.data, info)
  checkpoint = load_params.newest_params(workdir, init_shapes(stack.init))
  # surrogateescape: bytes of the command line that are no UTF-8 stay what they are.
  document = tokenizer.encode([prompt.encode("utf-8", "surrogateescape")])
  tokens = document.tolist()[:-1] or [tokenizer.separator]
  length, notes = len(tokens) + num_tokens, [*checkpoint.notes]
  if length > info.sequence_length:
    unit = "bytes" if tokenizer.key == "bytes" else "tokens"
    seen = f"the model has seen {info.sequence_length} at a time in training"
    note = f"prompt and text are of up to {length} {unit}, and {seen}"
    notes.append(f"{note}: what is further away it may not use well")
  for note in notes:
    print(f"note: {note}", file=sys.stderr)
  function = functools.partial(sample, stack, num_tokens=num_tokens, **choice)
  batch = jnp.array([tokens], jnp.int32)
  sampled = jax.jit(function)(checkpoint.params, batch, jax.random.key(seed))
  text = itertools.takewhile(lambda i: i != tokenizer.separator, sampled[0].tolist())
  return tokenizer.decode(list(text), tokens if prompt else [])
