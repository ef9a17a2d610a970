"""Generate text with the language model of a run.

    jaxscale generate RUN [--prompt TEXT] [--tokens N] ...

`sample` is the pure function that does the work, for any stack and prompts of token ids.
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale import data
from jaxscale.collectives.cpu_workarounds import one_at_a_time
from jaxscale.config.record import describe_run
from jaxscale.data.tokenizer import Tokenizer, byte_tokenizer, read_tokenizer
from jaxscale.errors import ConfigError
from jaxscale.mesh import replicated
from jaxscale.metrics.log import shown
from jaxscale.models.cached import advance, empty_cache
from jaxscale.models.stack import Stack
from jaxscale.run import model_files
from jaxscale.run.trained import info_of, of_run


def sample(
  stack: Stack, params, prompt: jax.Array, key: jax.Array, *, num_tokens: int, **choice
) -> jax.Array:
  """Sample tokens that follow a prompt; a pure function to be jitted as a whole.

  Args:
    stack: a model that takes tokens.
    params: the parameters, as `stack.init` returns them.
    prompt: the prompts, int32 [rows, length], with at least one token.
    key: the random key for sampling.
    num_tokens: the number of tokens to generate per row.
    choice: `temperature`, `top_k` and `top_p`, as for `choose`.

  Returns:
    The generated tokens, int32 [rows, num_tokens].

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
    return stack.logits(stack.head_of(params.get), h[:, -1]), cache

  def step(carry, key):
    logits, cache = carry
    token = choose(logits, key, **choice)
    return scores(token[:, None], cache), token

  _, tokens = jax.lax.scan(step, scores(prompt, cache), jax.random.split(key, num_tokens))
  return tokens.T


def choose(
  logits: jax.Array,
  key: jax.Array,
  *,
  temperature: float = 1.0,
  top_k: int | None = None,
  top_p: float | None = None,
) -> jax.Array:
  """Sample one token per row.

  Args:
    logits: the logits, float [rows, vocabulary].
    key: the random key.
    temperature: the divisor of the logits; 0 takes the most likely token, or the first of
      several that are equally likely.
    top_k: the number of most likely tokens to sample from (arXiv:1805.04833, §5.4); None
      keeps all.
    top_p: the probability mass to sample from: the fewest most likely tokens whose
      probabilities reach it (arXiv:1904.09751, §3.1); None keeps all.

  Returns:
    The tokens, int32 [rows].
  """
  if temperature == 0:
    return logits.argmax(-1).astype(jnp.int32)
  # In descending order, both rules keep a prefix, also with ties.
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


def run_tokenizer(workdir: Path, source: Any, info: data.TextInfo) -> Tokenizer:
  """Return the tokenizer of the run's text.

  Raises:
    ConfigError: the text has no tokenizer, or the tokenizer no longer exists.
  """
  name, problem = getattr(source, "tokenizer", "bytes"), ""
  if (kept := workdir / model_files.FOLDER / "tokenizer.json").is_file():
    name = str(kept)
  if name == "bytes" and info.vocab_size == byte_tokenizer().vocab_size:
    return byte_tokenizer()
  if name != "bytes":
    field = f"{type(source).__name__}.tokenizer"
    try:
      tokenizer = read_tokenizer(name, getattr(source, "separator", None), field=field)
    except ConfigError as e:
      # The advice in the message is for a new run, and does not apply to an existing one.
      reason = re.sub(r"[;,:] (or )?(give|use|pip) .*", "", str(e))
    else:
      if tokenizer.vocab_size == info.vocab_size:
        return tokenizer
      has, had = tokenizer.vocab_size, info.vocab_size
      reason = f"{field}={name!r}: has {has} tokens, but the run was trained with {had}"
    problem = f", and the tokenizer cannot be loaded ({reason})"
  problem = f"the {info.vocab_size} tokens of {info.name} are not bytes{problem}"
  fix = "call jaxscale.run.generate.sample with token ids"
  raise ConfigError(f"{workdir}: {problem}; {fix}")


def continuer(
  stack: Stack, tokenizer: Tokenizer, sharding: Any, *, num_tokens: int, **choice
) -> Callable[..., str]:
  """Return a function of parameters, a prompt and a seed that continues the prompt.

  Args:
    stack: a model that takes the tokenizer's tokens.
    tokenizer: the tokenizer of the model's text.
    sharding: the sharding of the result, replicated on the devices of the parameters.
    num_tokens: the largest number of tokens to generate.
    choice: `temperature`, `top_k` and `top_p`, as for `choose`.
  """

  def new_tokens(params, tokens, seed):
    return sample(stack, params, tokens, jax.random.key(seed), num_tokens=num_tokens, **choice)

  sampled = one_at_a_time(jax.jit(new_tokens, out_shardings=sharding), sharding.mesh)

  def text_of(params: Any, prompt: str, seed: int) -> str:
    # surrogateescape keeps bytes of the command line that are not valid UTF-8.
    document = tokenizer.encode([prompt.encode("utf-8", "surrogateescape")])
    tokens = document.tolist()[:-1] or [tokenizer.separator]
    new = np.asarray(sampled(params, np.array([tokens], np.int32), np.uint32(seed)))[0]
    text = itertools.takewhile(lambda i: i != tokenizer.separator, new.tolist())
    return tokenizer.decode(list(text), tokens if prompt else [])

  return text_of


def write(
  workdir: Path,
  prompt: str = "",
  *,
  seed: int = 0,
  num_tokens: int = 256,
  step: int | str | None = None,
  trust: bool = False,
  **choice,
) -> str:
  """Continue a prompt with a run's language model, up to the end of a document.

  Args:
    workdir: the run's workdir.
    prompt: the text to continue; "" begins a new document.
    seed: the random seed for sampling.
    num_tokens: the largest number of tokens to generate.
    step: the step of the checkpoint; "best" selects the best by `checkpoint.best_metric`, and
      None the newest intact one.
    trust: whether to execute code of the run although other users could have written it.
    choice: `temperature`, `top_k` and `top_p`, as for `choose`.

  Raises:
    ConfigError: the run has no language model or no checkpoint, or its tokenizer no
      longer exists.
  """
  described = describe_run(workdir, trust=trust)
  if not described.is_text:
    text = f"the run trains on {described.data['name']}, not on text; give a language model's run"
    raise ConfigError(f"{workdir}: {text}")
  config, info = described.settings(), info_of(described)
  tokenizer = run_tokenizer(workdir, config.data, info)
  with shown() as lines:  # Standard output has only the text.
    lines.show = functools.partial(print, file=sys.stderr)
    trained = of_run(described, config, info, step=step)
  document = tokenizer.encode([prompt.encode("utf-8", "surrogateescape")])
  length = max(len(document) - 1, 1) + num_tokens
  if length > info.sequence_length:
    unit = "bytes" if tokenizer.key == "bytes" else "tokens"
    seen = f"the model was trained with {info.sequence_length}"
    note = f"prompt and text have up to {length} {unit}, but {seen}"
    print(f"note: {note}; results may get worse beyond that", file=sys.stderr)
  model: Any = trained.model
  text_of = continuer(model, tokenizer, replicated(trained.mesh), num_tokens=num_tokens, **choice)
  return text_of(trained.params, prompt, seed)
