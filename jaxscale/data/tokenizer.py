"""Convert documents to tokens and back: bytes, or a Hugging Face tokenizer file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxscale.config.validation import nearest
from jaxscale.errors import ConfigError, invalid
from jaxscale.files import read_bytes

# Usual names of the token that ends a document, in the order of preference.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")


# The largest published vocabularies have a million tokens; a model has a row for each.
_MOST_TOKENS = 1 << 24


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
    name: "bytes", or the path of the file.
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
  dtype = smallest_dtype(vocab_size)

  def encoded(texts: Sequence[str]) -> Any:
    try:
      return model.encode_batch(texts, add_special_tokens=False)
    except Exception as e:  # The package raises plain Exceptions.
      problem = f"it cannot be used ({e})"
      raise ConfigError(f"{field}={name!r}: {problem}; use a different tokenizer") from None

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
  return Tokenizer(key, vocab_size, end, encode_each, _decoder(model), locate)


def _load(name: str, field: str) -> tuple[bytes, Any]:
  """Load a tokenizer.json; return its bytes and the package's object."""
  try:
    content = read_bytes(Path(name))
  except (OSError, ValueError) as e:
    problem = getattr(e, "strerror", None) or e
    fix = "use 'bytes' or the path of a tokenizer.json"
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
  model.no_truncation()  # The file may truncate documents to a model's length.
  model.no_padding()
  return content, model


def _decoder(model: Any) -> Callable[..., str]:
  """Return a function of (tokens, tokens before them) that returns the text they add."""

  def text_of(tokens: Sequence[int]) -> str:
    return model.decode(list(tokens), skip_special_tokens=False)

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
