"""Stream of tokens from documents, cut into windows of one length.

As in GPT-3 (arXiv:2005.14165, appendix B), documents follow each other with a separator between
them, a window may contain the end of one document and the beginning of the next, and nothing is
masked. An example is a window, so every token is predicted once per epoch, whatever the lengths
of documents.

The stream is a ring: each document, including the last one, ends with a separator, so the very
first token is predicted from a separator like the first token of any document. Every epoch cuts
the ring at a different position; otherwise the same tokens would always come first in a window
and be predicted without context.

`packed` tokenizes documents once and saves the tokens in a file, in `cache_dir` or else in
$XDG_CACHE_HOME/jaxscale/text or ~/.cache/jaxscale/text, under a name derived from its inputs:
`<name>.bin` has only the tokens of all documents in order, as in nanoGPT, `<name>.lengths` the
number of tokens of each document (uint64), and `<name>.json` the numbers of tokens, documents and
bytes of text. Processes that want the same file wait for the first that began to write it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxscale.data.caches import kept, key_of, user_cache
from jaxscale.data.dataset import Batch, Dataset, Spec, TextInfo
from jaxscale.data.tfrecord import OpenFile
from jaxscale.data.tokenizer import Tokenizer, smallest_dtype
from jaxscale.errors import ConfigError, invalid
from jaxscale.files import (
  TruncatedError,
  read_bytes,
  read_json,
  replace_text,
  replacing,
  require_json,
)
from jaxscale.owners import unsafe_owner

NO_TARGET = -1  # the target of padding and of prompts, which is not learned
PREPARED = "tokens.json"  # the file that `jaxscale prepare tokens` writes last
Packing = Literal["stream", "masked_stream", "best_fit", "none"]


# The numbers of a file of tokens, and lines about its documents.
_COUNTS = {"tokens": int, "documents": int, "bytes": int, "notes": [str]}
Part = tuple[Sequence[np.ndarray], int]  # The tokens of documents, and the bytes of their text.


class Stream(NamedTuple):
  """Sequence of tokens in any storage.

  Attributes:
    num_tokens: the number of tokens, with separators.
    read: a function of (start, stop) that returns these tokens in any integer dtype; any
      thread may call it.
    separator: the token after each document; None if it does not exist or is not known, in
      which case the very first token cannot be predicted.
    bytes_per_token: see `TextInfo`.
    lengths: a function that returns the number of tokens of each document, with its
      separator; None if only the separators tell.
    is_chat: True if documents are conversations: `read` returns ~token (below 0) for a token
      that is not learned, and a first token is not predicted.
    notes: lines about the documents for the log.
    facts: what the identity of the data says about the tokens.
  """

  num_tokens: int
  read: Callable[[int, int], np.ndarray]
  separator: int | None
  bytes_per_token: float | None = None
  lengths: Callable[[], np.ndarray] | None = None
  is_chat: bool = False
  notes: tuple[str, ...] = ()
  facts: Mapping[str, Any] = MappingProxyType({})


def of_array(
  tokens: np.ndarray, separator: int | None, bytes_per_token: float | None = None
) -> Stream:
  """Return a stream of an array in memory, int [tokens]."""
  return Stream(len(tokens), lambda a, b: tokens[a:b], separator, bytes_per_token)


class TokenFile(NamedTuple):
  """File of tokens.

  Attributes:
    path: the path of the file.
    dtype: NumPy's name of the token type, e.g. "<u2".
    offset: the bytes before the first token.
  """

  path: Path
  dtype: str
  offset: int = 0


def of_files(files: Sequence[TokenFile], separator: int | None) -> Stream:
  """Return a stream of the tokens of files, one file after another, read on demand.

  Args:
    files: the files, in order.
    separator: the separator, as in `Stream`.

  Raises:
    ConfigError: the size of a file is not a multiple of the token's.
  """
  opened, ends = [], [0]
  for path, dtype, offset in files:
    opened.append(OpenFile(str(path)))
    size, width = os.fstat(opened[-1].descriptor).st_size, np.dtype(dtype).itemsize
    if (size - offset) % width:
      problem = f"{size} bytes are not a whole number of {dtype} tokens of {width} bytes"
      raise ConfigError(f"{path}: {problem}; the file is truncated or has a different dtype")
    ends.append(ends[-1] + (size - offset) // width)

  def read(start: int, stop: int) -> np.ndarray:
    pieces = []
    for i, (path, dtype, offset) in enumerate(files):
      a, b = max(start, ends[i]), min(stop, ends[i + 1])
      if a < b:
        width = np.dtype(dtype).itemsize
        position = offset + (a - ends[i]) * width
        data = os.pread(opened[i].descriptor, (b - a) * width, position)
        if len(data) != (b - a) * width:
          raise TruncatedError(str(path))
        pieces.append(np.frombuffer(data, dtype))
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

  return Stream(ends[-1], read, separator)


def checked(name: str, tokens: np.ndarray, vocab_size: int) -> np.ndarray:
  """Return tokens that were read, before their conversion to int32.

  Raises:
    ConfigError: a token is not in the vocabulary.
  """
  for token in (tokens.min(), tokens.max()):
    if not 0 <= token < vocab_size:
      fix = "set vocab_size to the size of the tokenizer's vocabulary, or fix the dtype"
      raise ConfigError(f"{name}: token {token} is out of range [0, {vocab_size - 1:,}]; {fix}")
  return tokens


def windows(
  name: str, stream: Stream, vocab_size: int, sequence_length: int, is_masked: bool = False
) -> Dataset:
  """Create examples of `sequence_length` tokens and the tokens that follow each.

  Example i has the targets i * S … i * S + S - 1 of the stream, counted from a random position
  that changes every epoch, and from the beginning in evaluation. The last example is padded
  with targets of -1.

  Args:
    name: the name for messages.
    stream: the tokens.
    vocab_size: the size of the vocabulary; tokens are checked when they are read.
    sequence_length: the tokens per example, S.
    is_masked: also return "documents", int32 [n, S]: the number of each token's document in
      its window. A document begins with the separator before it, which predicts its first
      token, so every token is still predicted once.

  Returns:
    A dataset with batches {"tokens", "targets"}, int32 [n, S].

  Raises:
    ConfigError: the stream is empty.

  Example:
    >>> stream = of_array(np.array([5, 6, 7, 0, 8, 9, 0]), separator=0)
    >>> windows("two", stream, 10, 4).load(np.arange(2), None)["targets"].tolist()
    [[5, 6, 7, 0], [8, 9, 0, -1]]
  """
  total = stream.num_tokens
  if not total:
    raise ConfigError(f"{name}: the text is empty; check the files and the split")

  def load(indices: np.ndarray, draws: np.ndarray | None) -> Batch:
    rows = np.empty((len(indices), sequence_length + 1), np.int32)
    ends = np.empty(len(indices), np.int64)  # the column of the last token of the stream
    for i, index in enumerate(indices):
      first = int(index) * sequence_length
      cut = 0 if draws is None else int(draws[i, 0] * total)
      # The token before the window and its tokens; the last window may be short.
      at, done, count = first + cut - 1, 0, 1 + min(sequence_length, total - first)
      ends[i] = (total - 1 - at) % total
      while done < count:
        at %= total
        part = min(count - done, total - at)
        rows[i, done : done + part] = checked(name, stream.read(at, at + part), vocab_size)
        done, at = done + part, at + part
      rows[i, count:] = NO_TARGET
      if draws is None and first == 0:
        rows[i, 0] = stream.separator or 0
        rows[i, 1] = NO_TARGET if stream.separator is None else rows[i, 1]
    tokens, targets = np.maximum(rows[:, :-1], 0), np.ascontiguousarray(rows[:, 1:])
    batch = {"tokens": tokens, "targets": targets}
    if is_masked:
      # The first document is not the rest of the last one, which may lack its separator.
      is_real = targets != NO_TARGET
      tokens[is_real & (ends[:, None] == np.arange(sequence_length))] = stream.separator
      is_first = tokens == stream.separator
      numbers = (is_first & is_real).cumsum(1) - is_first[:, :1]
      batch["documents"] = np.where(is_real, numbers, numbers[:, -1:] + 1).astype(np.int32)
    return batch

  arrays = documents_spec(sequence_length) if is_masked else {}
  info = TextInfo(name, vocab_size, sequence_length, stream.bytes_per_token, arrays)
  return Dataset(info, -(-total // sequence_length), load, 1, draws_by_epoch=True)


def documents_spec(sequence_length: int) -> dict[str, Spec]:
  """Return the `TextInfo.arrays` of windows with numbered documents."""
  return {"documents": ((sequence_length,), "int32")}


def packed(
  name: str,
  batches: Iterable[Sequence[bytes]],
  tokenizer: Tokenizer,
  identity: Sequence[Any],
  cache_dir: str | None = None,
  notes: Sequence[str] = (),
) -> Stream:
  """Tokenize documents to one stream, with a separator after each; cache it on disk.

  Args:
    name: the name for messages.
    batches: the documents in order, several at a time; only read if they are not cached.
    tokenizer: the tokenizer.
    identity: the identity of the documents, which is part of the file's key.
    cache_dir: the directory for the tokens; None uses the user's cache.
    notes: lines about the documents, complete once `batches` is read; also cached.

  Raises:
    ConfigError: the directory cannot be written.
  """
  dtype, parts = smallest_dtype(tokenizer.vocab_size), encoded(batches, tokenizer)
  return cached(name, parts, dtype, tokenizer, (*identity, tokenizer.key), cache_dir, notes)


def encoded(batches: Iterable[Sequence[bytes]], tokenizer: Tokenizer) -> Iterator[Part]:
  """Yield the tokens of each document, and the bytes of text, several documents at a time."""
  for documents in batches:
    yield tokenizer.encode_each(documents), sum(map(len, documents))


def of_kept(
  files: Sequence[Path], dtype: str, tokenizer: Tokenizer, counts: Mapping[str, Any]
) -> Stream:
  """Return a stream of files that `write_tokens` wrote, from their counts."""

  def lengths() -> np.ndarray:
    with contextlib.suppress(OSError, ValueError):
      most = 8 * stream.num_tokens  # No document is empty: it has a separator.
      parts = [read_bytes(f.with_suffix(".lengths"), most=most) for f in files]
      found = np.concatenate([np.frombuffer(x, "<u8") for x in parts], dtype=int)
      if found.sum() == stream.num_tokens and found.min(initial=0) >= 0:
        return found
    problem = "does not have the lengths of its documents"
    raise invalid(str(files[0].parent), ..., problem, "remove it, or prepare it again")

  stream = of_files([TokenFile(file, dtype) for file in files], tokenizer.separator)
  # With byte tokens, the zero byte between documents counts as a byte.
  is_bytes, ratio = tokenizer.key == "bytes", counts["bytes"] / max(counts["tokens"], 1)
  return stream._replace(
    bytes_per_token=1.0 if is_bytes else ratio or None,
    lengths=lengths,
    notes=(*counts["notes"],),
    facts={"tokens": stream.num_tokens, "tokenizer": tokenizer.key},
  )


def of_prepared(
  folder: Path, files: Sequence[Path], tokenizer: Tokenizer, tokenizer_name: str
) -> Stream:
  """Return the stream of a folder that `jaxscale prepare tokens` wrote.

  Args:
    folder: the folder.
    files: its files of tokens in order.
    tokenizer: the tokenizer that the text was tokenized with.
    tokenizer_name: its name, for messages.

  Raises:
    ConfigError: the text was tokenized by a different tokenizer, or files are missing.
  """
  fix = "run jaxscale prepare tokens again"
  shape = _COUNTS | {"tokenizer": str, "tokenizer_file": str}
  facts = require_json(folder / PREPARED, shape, fix)
  if facts["tokenizer"] != tokenizer.key:
    problem = f"is not the tokenizer (or has not the separator) of the tokens in {folder}"
    fix = f"set it to that file, which was {facts['tokenizer_file']!r}"
    raise invalid("TextFiles.tokenizer", tokenizer_name, problem, fix)
  stream = of_kept(files, smallest_dtype(tokenizer.vocab_size), tokenizer, facts)
  if stream.num_tokens != facts["tokens"]:
    problem = f"has {stream.num_tokens:,} tokens, but {PREPARED} says {facts['tokens']:,}"
    raise invalid(str(folder), ..., problem, fix)
  return stream


def cached(
  name: str,
  parts: Iterable[Part],
  dtype: str,
  tokenizer: Tokenizer,
  identity: Sequence[Any],
  cache_dir: str | None,
  notes: Sequence[str],
) -> Stream:
  """Return the stream of a file of tokens in the cache; write it if it is missing.

  Args:
    name: the name for messages.
    parts: the tokens of documents, several at a time; only read to write the file.
    dtype: the dtype of the file.
    tokenizer: the tokenizer of the tokens.
    identity: the identity of the tokens, from which the file's name is derived.
    cache_dir: the directory; None uses the user's cache.
    notes: as for `packed`.

  Raises:
    ConfigError: the directory cannot be written.
  """
  folder = Path(cache_dir).expanduser() if cache_dir else user_cache() / "text"
  path = folder / f"{key_of((*identity,))}.bin"

  def read() -> dict[str, Any] | None:
    return counts_of(path, dtype)

  def make() -> dict[str, Any]:
    return write_tokens(path, parts, dtype, notes)

  fix = "set cache_dir to a directory with enough space"
  counts = kept(path, read, make, f"{name}: tokens", f"tokenizing {name}", fix)
  return of_kept([path], dtype, tokenizer, counts)


def counts_of(path: Path, dtype: str, **facts: Any) -> dict[str, Any] | None:
  """Return the counts of a file of tokens; None if it is missing, incomplete or different.

  Args:
    path: the file of tokens.
    dtype: the dtype of the file.
    facts: the entries with which `write_tokens` must have written it.
  """
  names = path.with_suffix(".json"), path, path.with_suffix(".lengths")
  counts = read_json(names[0], _COUNTS)
  try:
    if not counts or any(unsafe_owner(name, group=False) for name in names):
      return None
    sizes = counts["tokens"] * np.dtype(dtype).itemsize, counts["documents"] * 8
    is_whole = sizes == (path.stat().st_size, names[2].stat().st_size)
  except OSError:
    return None
  return counts if is_whole and counts == counts | facts else None


def write_tokens(
  path: Path, parts: Iterable[Part], dtype: str, notes: Sequence[str] = (), **facts: Any
) -> dict[str, Any]:
  """Write the three files of a token file, the counts last, and return the counts.

  Args:
    path: the file of tokens.
    parts: the tokens of documents, and the bytes of their text, several at a time.
    dtype: the dtype of the file.
    notes: as for `packed`.
    facts: further entries of the counts.
  """
  counts = {"tokens": 0, "documents": 0, "bytes": 0}
  with replacing(path) as file, replacing(path.with_suffix(".lengths")) as lengths:
    for documents, num_bytes in parts:
      sizes = np.array([*map(len, documents)], "<u8")
      file.write(np.concatenate([np.empty(0, dtype), *documents]).astype(dtype).tobytes())
      lengths.write(sizes.tobytes())
      counts["tokens"] += int(sizes.sum())
      counts["documents"] += len(documents)
      counts["bytes"] += num_bytes
  counts = counts | {"notes": [*notes]} | facts
  replace_text(path.with_suffix(".json"), json.dumps(counts))
  return counts
