"""Convert documents to tokens and back: bytes, or a Hugging Face tokenizer file."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxscale.config.validation import nearest
from jaxscale.errors import ConfigError, abandon, invalid, message_of, remedy_for
from jaxscale.files import expand, read_bytes

# Usual names of the token that ends a document, in the order of preference.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")


# The largest published vocabularies have a million tokens; a model has a row for each.
_MOST_TOKENS = 1 << 24
_FIRST_S, _SLOWEST = 10.0, 50_000  # seconds, and then characters per second, of an encoding
_MOST_GROWTH = 16  # of a text by its normalizer
_LARGEST_MAP = 1 << 20  # characters; SentencePiece's largest has 0.4 million
# A quantifier of a group that ends in one, or has one before its last alternative's end.
_NESTED = re.compile(r"(?<!\\)(?:[*+]|\{\d+,\d*\})\)(?:[*+]|\{\d+,\d*\})")


Located = tuple[np.ndarray, np.ndarray, np.ndarray]  # Tokens; where each begins and ends.


class Tokenizer(NamedTuple):
  """Conversion between text and tokens.

  Attributes:
    key: a string that is equal for tokenizers that return the same tokens.
    vocab_size: the size of the vocabulary.
    separator: the token after each document.
    encode_each: a function of UTF-8 documents that returns the tokens of each, with the
      separator after them, in the smallest dtype. It raises ConfigError for a document that
      is not UTF-8, unless tokens are bytes.
    decode: a function of (tokens, tokens before them) that returns the text they add.
    locate: a function of texts that returns for each its tokens, without a separator, and
      where their characters begin and end in the text.
  """

  key: str
  vocab_size: int
  separator: int
  encode_each: Callable[[Sequence[bytes]], list[np.ndarray]]
  decode: Callable[[Sequence[int], Sequence[int]], str]
  locate: Callable[[Sequence[str]], list[Located]]

  def encode(self, documents: Sequence[bytes]) -> np.ndarray:
    """Return the tokens of all documents in one array."""
    return np.concatenate(self.encode_each(documents))


def byte_tokenizer() -> Tokenizer:
  """Return the tokenizer whose tokens are bytes, with 0 between documents.

  Example:
    >>> byte_tokenizer().encode([b"ab", b"c"]).tolist()
    [97, 98, 0, 99, 0]
  """

  def encode_each(documents: Sequence[bytes]) -> list[np.ndarray]:
    return [np.frombuffer(d + b"\0", np.uint8) for d in documents]

  def located(text: str) -> Located:
    tokens = np.frombuffer(text.encode(), np.uint8)
    starts = ((tokens & 0xC0) != 0x80).cumsum() - 1  # In UTF-8, other bytes continue one.
    return tokens, starts, starts + 1

  def decode(tokens: Sequence[int], _: Sequence[int]) -> str:
    return bytes(tokens).decode(errors="replace")

  return Tokenizer("bytes", 256, 0, encode_each, decode, lambda texts: [*map(located, texts)])


def read_tokenizer(
  name: str, separator: str | None = None, *, field: str = "tokenizer"
) -> Tokenizer:
  """Return `byte_tokenizer`, or the tokenizer of a tokenizer.json.

  Args:
    name: "bytes", or the path of the file or of its folder.
    separator: the token that ends a document; None finds it by the usual names.
    field: the name of the setting for messages, e.g. "TFDSText.tokenizer".

  Raises:
    ConfigError: the file or the package `tokenizers` is missing, or the separator is not
      a token.
  """
  if name == "bytes":
    return byte_tokenizer()
  content, model = _load(name, field)
  vocabulary = model.get_vocab(with_added_tokens=True)
  end = _end(vocabulary, separator, field)
  if (vocab_size := max(vocabulary.values(), default=0) + 1) > _MOST_TOKENS:
    reason = f"above the limit of {_MOST_TOKENS:,} for a vocabulary; use another tokenizer.json"
    raise ConfigError(f"{field}={name!r}: it has the token {vocab_size - 1:,}, {reason}")
  dtype, run = smallest_dtype(vocab_size), functools.partial(_limited, f"{field}={name!r}")

  def encoded(texts: Sequence[str]) -> Any:
    return run(lambda: model.encode_batch(texts, add_special_tokens=False), sum(map(len, texts)))

  def encode_each(documents: Sequence[bytes]) -> list[np.ndarray]:
    try:
      texts = [document.decode() for document in documents]
    except UnicodeDecodeError as e:
      before = e.object[max(e.start - 40, 0) : e.start].decode(errors="ignore")
      problem = f"needs UTF-8, but a document is not UTF-8 at byte {e.start:,}, after {before!r}"
      raise invalid(field, name, problem, "convert the text, or use 'bytes'") from None
    return [np.array([*one.ids, end], dtype) for one in encoded(texts)]

  def locate(texts: Sequence[str]) -> list[Located]:
    spans = [(one.ids, np.array(one.offsets, int).reshape(-1, 2)) for one in encoded(texts)]
    return [(np.array(ids, dtype), places[:, 0], places[:, 1]) for ids, places in spans]

  key = f"{hashlib.sha256(content).hexdigest()} {end}"
  return Tokenizer(key, vocab_size, end, encode_each, _decoder(model, run), locate)


def tokenizer_file(name: str) -> Path:
  """Return the path of a tokenizer.json that is given by itself or by its folder."""
  path = Path(expand(name))
  return path / "tokenizer.json" if path.is_dir() else path


def _load(name: str, field: str) -> tuple[bytes, Any]:
  """Load a tokenizer.json; return its bytes and the package's object."""
  try:
    content = read_bytes(tokenizer_file(name))
  except (OSError, ValueError) as e:
    problem = getattr(e, "strerror", None) or e
    fix = remedy_for(name, "use 'bytes' or the path of a tokenizer.json")
    raise ConfigError(f"{field}={name!r}: {problem}; {fix}") from None
  try:
    import tokenizers  # pyright: ignore[reportMissingImports]
  except ImportError:
    reason = "needs the package tokenizers: pip install 'jaxscale[tokenizers]', or use 'bytes'"
    raise ConfigError(f"{field}={name!r}: {reason}") from None
  try:
    model = tokenizers.Tokenizer.from_buffer(content)
  except (KeyboardInterrupt, SystemExit):
    raise
  except BaseException as e:  # Plain Exceptions, and Rust panics, which are not Exceptions.
    first = (str(e).splitlines() or ["unreadable"])[0]
    problem = f"not a Hugging Face tokenizer ({first})"
    raise ConfigError(f"{field}={name!r}: {problem}; use a tokenizer.json") from None
  for part in (model.normalizer, model.decoder, model.pre_tokenizer):
    if part is not None and (problem := _problem_of(part.__getstate__())):
      raise ConfigError(f"{field}={name!r}: {problem}; use a different tokenizer")
  model.no_truncation()  # The file may truncate documents to a model's length.
  model.no_padding()
  return content, model


def _problem_of(part: bytes) -> str | None:
  """Describe why a part of a tokenizer, as JSON, could take any time or memory."""
  growth, rules = 1.0, list[dict[str, Any]]()
  json.loads(part, object_hook=lambda x: rules.append(x) or x)
  for x in rules:
    text, pattern = x.get("content") or x.get("prepend") or "", x.get("pattern") or {}
    if _NESTED.search(regex := pattern.get("Regex", "")):
      return f"the pattern {regex!r:.80} repeats a repetition, which can take any time"
    growth *= max(len(text) / max(len(pattern.get("String", "")), 1), 1)
    if growth > _MOST_GROWTH or len(x.get("precompiled_charsmap") or "") > _LARGEST_MAP:
      return "its rules make texts many times longer"
  return None


def _limited(name: str, call: Callable[[], Any], length: int) -> Any:
  """Return the result of a call for a text of some length, which may not take any time.

  Raises:
    ConfigError: the call failed, or took too long. It cannot be interrupted, so its thread
      stays until the process ends.
  """
  results: list[Any] = []
  errors: list[BaseException] = []

  def work() -> None:
    try:
      results.append(call())
    except BaseException as e:  # The package raises plain Exceptions, and Rust's panics.
      errors.append(e)

  thread = threading.Thread(target=work, daemon=True)
  thread.start()
  limit = _FIRST_S + length / _SLOWEST
  for _ in range(10):  # While the process is suspended, at most one of them passes.
    thread.join(limit / 10)
  if results:
    return results[0]
  problem = f"a text of {length:,} characters took more than {limit:.0f} s"
  if errors:
    problem = f"it cannot be used ({message_of(errors[0]):.200})"
  else:
    abandon(thread)
  raise ConfigError(f"{name}: {problem}; use a different tokenizer")


def _decoder(model: Any, run: Callable[[Callable[[], str], int], str]) -> Callable[..., str]:
  """Return a function of (tokens, tokens before them) that returns the text they add."""

  def text_of(tokens: Sequence[int]) -> str:
    return run(lambda: model.decode(list(tokens), skip_special_tokens=False), len(tokens))

  def decode(tokens: Sequence[int], before: Sequence[int]) -> str:
    # Some tokenizers drop the space of the first word they decode.
    head, whole = text_of(before), text_of([*before, *tokens])
    return whole[len(head) :] if whole.startswith(head) else text_of(tokens)

  return decode


def smallest_dtype(vocab_size: int) -> str:
  """Return the dtype in which tokens are saved: unsigned, of 1, 2 or 4 bytes."""
  return "<u1" if vocab_size <= 1 << 8 else "<u2" if vocab_size <= 1 << 16 else "<u4"


def _end(vocabulary: dict[str, int], separator: str | None, field: str) -> int:
  """Return the token that ends a document."""
  known = [name for name in _ENDS if name in vocabulary]
  if separator is None and known:
    return vocabulary[known[0]]
  setting = f"{field.rpartition('.')[0]}.separator".lstrip(".")
  if separator is None:
    problem = f"the tokenizer has none of {', '.join(_ENDS)}; set the token that ends a document"
    raise ConfigError(f"{setting}=None: {problem}")
  if separator not in vocabulary:
    hint = nearest(separator, known or vocabulary)
    raise ConfigError(f"{setting}={separator!r}: not a token of the tokenizer, {hint}")
  return vocabulary[separator]
