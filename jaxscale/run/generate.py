"""Text from a language model: of a run, or of a folder as Hugging Face's.

    jaxscale generate --workdir DIR [--prompt TEXT] [--tokens N] ...

`sample` is the pure function behind it, for any model and prompts of any tokens.
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxscale import config as cfg
from jaxscale import data, weights
from jaxscale.checkpoint import load_params
from jaxscale.config.record import describe_run
from jaxscale.data.tokenizer import (
  Tokenizer,
  byte_tokenizer,
  read_prompt_tokenizer,
  read_tokenizer,
)
from jaxscale.errors import ConfigError
from jaxscale.experiment.model import make_model
from jaxscale.files import mismatch
from jaxscale.models.cached import advance, empty_cache
from jaxscale.models.flax_apply import init_shapes
from jaxscale.models.stack import Stack
from jaxscale.weights import config_json
from jaxscale.weights.check import check_source
from jaxscale.weights.hf_config import transformer_settings

_MOST_LAYERS = 1000  # each is some ten names; Llama 3 405B has 126


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
  raise ConfigError(
    f"--workdir={workdir}: the {info.vocab_size} tokens of {info.name} are not "
    f"bytes{why}; give jaxscale.run.generate.sample tokens of your own"
  )


class _Source(NamedTuple):
  """A language model, and a prompt as its tokens.

  Attributes:
    stack: the model.
    params: its parameters.
    prompt: tokens.
    has_text: whether the prompt has text: what follows an empty one begins a document.
    ends: tokens that end a document.
    decode: as of a `Tokenizer`.
    seen: tokens at a time in training.
    unit: what tokens are called.
    notes: lines for the user.
  """

  stack: Stack
  params: Any
  prompt: list[int]
  has_text: bool
  ends: frozenset[int]
  decode: Callable[[Sequence[int], Sequence[int]], str]
  seen: int
  unit: str
  notes: list[str]


def write(
  place: Path, prompt: str = "", *, seed: int = 0, num_tokens: int = 256, **choice
) -> str:
  """The text that a model continues a prompt with, to the end of its document.

  Args:
    place: directory of a run, or a folder as Hugging Face's: config.json,
      tokenizer.json and files of parameters.
    prompt: "": a new document.
    seed: of the choices.
    num_tokens: at most so many.
    choice: as in `choose`.

  Raises:
    ConfigError: there is no language model, its tokenizer is not there, or no
      checkpoint.
  """
  found = _config_json(place)
  if "model_type" in found:
    source = _of_folder(place, found, prompt, num_tokens)
  else:
    source = _of_run(place, prompt)
  length, notes = len(source.prompt) + num_tokens, source.notes
  if length > source.seen:
    notes.append(
      f"prompt and text are of up to {length} {source.unit}, and the model has seen "
      f"{source.seen} at a time in training: what is further away it may not use well"
    )
  for note in notes:
    print(f"note: {note}", file=sys.stderr)
  function = functools.partial(sample, source.stack, num_tokens=num_tokens, **choice)
  tokens = jnp.array([source.prompt], jnp.int32)
  made = jax.jit(function)(source.params, tokens, jax.random.key(seed))
  text = itertools.takewhile(lambda i: i not in source.ends, made[0].tolist())
  return source.decode(list(text), source.prompt if source.has_text else [])


def _config_json(place: Path) -> dict[str, Any]:
  """What is in the config.json; that of a run is read again, with its own messages."""
  try:
    return config_json.read_config_json(place / "config.json") or {}
  except ConfigError:
    return {}


def _of_run(workdir: Path, prompt: str) -> _Source:
  """The newest intact checkpoint of a run."""
  described = describe_run(workdir)
  if not described.is_text:
    raise ConfigError(
      f"--workdir={workdir}: its run is of {described.data['name']}, not of text; "
      "give one of a language model"
    )
  config = described.settings()
  fields = {k: v for k, v in described.data.items() if k in data.TextInfo._fields}
  info = data.TextInfo(**fields)
  stack = make_model(config, info)
  assert isinstance(stack, Stack), "what takes text is a stack"
  tokenizer = _tokenizer(workdir, config.data, info)
  shapes = init_shapes(stack.init)
  found = load_params.newest_params(workdir, shapes)
  # surrogateescape: bytes of the command line that are no UTF-8 stay what they are.
  document = tokenizer.encode([prompt.encode("utf-8", "surrogateescape")])
  tokens = document.tolist()[:-1] or [tokenizer.separator]
  unit = "bytes" if tokenizer.key == "bytes" else "tokens"
  return _Source(
    stack, found.params, tokens, bool(prompt), frozenset({tokenizer.separator}),
    tokenizer.decode, info.sequence_length, unit, [*found.notes],
  )  # fmt: skip


def _of_folder(
  folder: Path, found: dict[str, Any], prompt: str, num_tokens: int
) -> _Source:
  """A folder as Hugging Face's."""
  tokenizer = read_prompt_tokenizer(folder)
  generation = config_json.read_config_json(folder / "generation_config.json") or {}

  def tokens_of(role: str) -> list[int]:
    field = f"{role}_token_id"
    value = next(
      (c[field] for c in (generation, found) if c.get(field) is not None), None
    )
    value = tokenizer.special(role) if value is None else value
    values = value if isinstance(value, list) else [] if value is None else [value]
    if mismatch(values, [int]) or min(values, default=0) < 0:
      raise ConfigError(f"{folder}: {field} is {value!r:.40}; copy its files again")
    return values

  tokens = tokenizer.encode(prompt) or tokens_of("bos")[:1]
  if not tokens:
    raise ConfigError(f"{folder}: its documents begin with no token; give --prompt")
  settings, words = _settings(folder, found)
  info = data.TextInfo(folder.name, words, len(tokens) + num_tokens)
  if max(tokens) >= words:
    raise ConfigError(
      f"{folder}: its tokenizer has the token {max(tokens)}, and its model {words} "
      "words; copy both again"
    )
  context = cfg.ModelContext(info=info, dtype=jnp.dtype("float32"), label_smoothing=0.0)
  stack, notes = settings.build(context), []

  def check(naming, names):
    notes.extend(check_source(folder, naming, names, settings, info))

  into = init_shapes(stack.init)
  params = weights.import_safetensors(
    folder, into, naming="huggingface", num_classes=words, check=check
  ).params
  seen = found.get("max_position_embeddings", 0)
  seen = info.sequence_length if mismatch(seen, int) or seen < 1 else seen
  return _Source(
    stack, params, tokens, bool(prompt), frozenset(tokens_of("eos")), tokenizer.decode,
    seen, "tokens", notes,
  )  # fmt: skip


def _settings(folder: Path, found: dict[str, Any]) -> tuple[cfg.Transformer, int]:
  """The model that a config.json describes, and its words."""
  sizes = {
    "num_layers": "num_hidden_layers",
    "width": "hidden_size",
    "hidden": "intermediate_size",
  }
  options = {k: v for k, (_, v) in transformer_settings(found).items()}
  problem = mismatch(found, dict.fromkeys((*sizes.values(), "vocab_size"), int))
  if not problem and found["num_hidden_layers"] > _MOST_LAYERS:
    problem = f"num_hidden_layers is {found['num_hidden_layers']}"
  if problem:
    raise ConfigError(
      f"{folder / 'config.json'}: of no language model, {problem}; give the folder "
      "of a Llama, Mistral, Qwen2 or Qwen3"
    )
  options |= {setting: found[field] for setting, field in sizes.items()}
  return cfg.Transformer(**options, pad_vocab_to=1), found["vocab_size"]
