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
`<name>.bin` has only the tokens of all documents in order, as in nanoGPT, and `<name>.json` the
numbers of tokens, documents and bytes of text. Processes that want the same file wait for the
first that began to write it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxscale.data.dataset import Batch, Dataset, TextInfo, user_cache
from jaxscale.data.tfrecord import OpenFile
from jaxscale.data.tokenizer import Tokenizer, smallest_dtype
from jaxscale.errors import ConfigError
from jaxscale.files import read_json, replace_text, replacing, unsafe_owner
from jaxscale.metrics.text import plural

NO_TARGET = -1  # the target of padding, which is not predicted


class Stream(NamedTuple):
  """Sequence of tokens in any storage.

  Attributes:
    num_tokens: the number of tokens, with separators.
    read: a function of (start, stop) that returns these tokens in any integer dtype; any
      thread may call it.
    separator: the token after each document; None if it does not exist or is not known, in
      which case the very first token cannot be predicted.
    bytes_per_token: see `TextInfo`.
  """

  num_tokens: int
  read: Callable[[int, int], np.ndarray]
  separator: int | None
  bytes_per_token: float | None = None


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


def of_files(
  files: Sequence[TokenFile], separator: int | None, bytes_per_token: float | None = None
) -> Stream:
  """Return a stream of the tokens of files, one file after another, read on demand.

  Args:
    files: the files, in order.
    separator: the separator, as in `Stream`.
    bytes_per_token: the average, as in `Stream`.

  Raises:
    ConfigError: a file is missing, or its size is not a multiple of the token's.
  """
  opened, ends = [], [0]
  for path, dtype, offset in files:
    try:
      opened.append(OpenFile(str(path)))
    except OSError as e:
      raise ConfigError(f"{path}: {e.strerror}; give a file of tokens") from None
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
          raise OSError(f"{path} became shorter while it was read")
        pieces.append(np.frombuffer(data, dtype))
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

  return Stream(ends[-1], read, separator, bytes_per_token)


def windows(name: str, stream: Stream, vocab_size: int, sequence_length: int) -> Dataset:
  """Create examples of `sequence_length` tokens and the tokens that follow each.

  Example i has the targets i * S … i * S + S - 1 of the stream, counted from a random position
  that changes every epoch, and from the beginning in evaluation. The last example is padded
  with targets of -1.

  Args:
    name: the name for messages.
    stream: the tokens.
    vocab_size: the size of the vocabulary; tokens are checked when they are read.
    sequence_length: the tokens per example, S.

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

  def read(start: int, stop: int) -> np.ndarray:
    tokens = stream.read(start, stop)  # Checked before the conversion to int32.
    for token in (tokens.min(), tokens.max()):
      if not 0 <= token < vocab_size:
        fix = "set vocab_size to the size of the tokenizer's vocabulary, or fix the dtype"
        raise ConfigError(f"{name}: token {token} is out of range [0, {vocab_size - 1:,}]; {fix}")
    return tokens

  def load(indices: np.ndarray, draws: np.ndarray | None) -> Batch:
    rows = np.empty((len(indices), sequence_length + 1), np.int32)
    for i, index in enumerate(indices):
      first = int(index) * sequence_length
      cut = 0 if draws is None else int(draws[i, 0] * total)
      # The token before the window and its tokens; the last window may be short.
      at, done, count = first + cut - 1, 0, 1 + min(sequence_length, total - first)
      while done < count:
        at %= total
        part = min(count - done, total - at)
        rows[i, done : done + part] = read(at, at + part)
        done, at = done + part, at + part
      rows[i, count:] = NO_TARGET
      if draws is None and first == 0:
        rows[i, 0] = stream.separator or 0
        rows[i, 1] = NO_TARGET if stream.separator is None else rows[i, 1]
    tokens, targets = rows[:, :-1], rows[:, 1:]
    return {"tokens": np.maximum(tokens, 0), "targets": np.ascontiguousarray(targets)}

  info = TextInfo(name, vocab_size, sequence_length, stream.bytes_per_token)
  return Dataset(info, -(-total // sequence_length), load, 1, draws_by_epoch=True)


def text_windows(name: str, stream: Stream, vocab_size: int, sequence_length: int) -> Dataset:
  """Create `windows` of a text with at least one whole example.

  Raises:
    ConfigError: the text is shorter, so metrics would not be meaningful.
  """
  if 0 < stream.num_tokens < sequence_length:
    length = f"--config.data.sequence_length={sequence_length}; use more text or a smaller length"
    count = plural(stream.num_tokens, "token")
    raise ConfigError(f"{name} has {count}, fewer than {length}")
  return windows(name, stream, vocab_size, sequence_length)


def packed(
  name: str,
  batches: Iterable[Sequence[bytes]],
  tokenizer: Tokenizer,
  identity: Sequence[Any],
  cache_dir: str | None = None,
) -> Stream:
  """Tokenize documents to one stream, with a separator after each; cache it on disk.

  Args:
    name: the name for messages.
    batches: the documents in order, several at a time; only read if they are not cached.
    tokenizer: the tokenizer.
    identity: the identity of the documents, which is part of the file's key.
    cache_dir: the directory for the tokens; None uses the user's cache.

  Raises:
    ConfigError: the directory cannot be written.
  """
  folder = Path(cache_dir).expanduser() if cache_dir else user_cache() / "text"
  key = hashlib.sha256(repr((*identity, tokenizer.key)).encode()).hexdigest()[:32]
  kept, dtype = folder / f"{key}.bin", smallest_dtype(tokenizer.vocab_size)
  try:
    folder.mkdir(parents=True, exist_ok=True)
    if (counts := _counts(kept, dtype)) is None:
      with locked(folder / f"{key}.lock"):
        if (counts := _counts(kept, dtype)) is None:  # Another process may have written it.
          print(f"tokenizing {name} once into {kept}", flush=True)
          counts = _write(kept, batches, tokenizer, dtype)
  except OSError as e:
    problem = f"cannot write its tokens to {folder} ({e.strerror})"
    fix = "set cache_dir to a directory with enough space"
    raise ConfigError(f"{name}: {problem}; {fix}") from None
  is_bytes = tokenizer.key == "bytes"
  # With byte tokens, the zero byte between documents counts as a byte.
  ratio = 1.0 if is_bytes else counts["bytes"] / max(counts["tokens"], 1)
  return of_files([TokenFile(kept, dtype)], tokenizer.separator, ratio)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
  """Hold a lock file; if the file system has no locks, all processes work at once.

  Each process then writes its own file, and the last one stays.
  """
  with contextlib.ExitStack() as stack:
    # Another user's lock file can be locked but not written to; a link is never followed.
    for access in (os.O_RDWR, os.O_RDONLY):
      with contextlib.suppress(OSError):
        flags = access | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        number = os.open(path, flags, 0o666)
        stack.callback(os.close, number)  # Closing releases the lock.
        fcntl.flock(number, fcntl.LOCK_EX)
        break
    yield


def _counts(kept: Path, dtype: str) -> dict[str, int] | None:
  """Return the counts of a cached file; None if the file is missing or incomplete."""
  names = kept.with_suffix(".json"), kept
  counts = read_json(names[0], dict.fromkeys(("tokens", "documents", "bytes"), int))
  try:
    if not counts or any(unsafe_owner(name, group=False) for name in names):
      return None
    whole = kept.stat().st_size == counts["tokens"] * np.dtype(dtype).itemsize
  except OSError:
    return None
  return counts if whole else None


def _write(
  kept: Path, batches: Iterable[Sequence[bytes]], tokenizer: Tokenizer, dtype: str
) -> dict[str, int]:
  """Write both files, the counts last, and return the counts."""
  counts = {"tokens": 0, "documents": 0, "bytes": 0}
  with replacing(kept) as file:
    for documents in batches:
      tokens = tokenizer.encode(documents).astype(dtype, copy=False)
      file.write(tokens.tobytes())
      counts["tokens"] += len(tokens)
      counts["documents"] += len(documents)
      counts["bytes"] += sum(map(len, documents))
  replace_text(kept.with_suffix(".json"), json.dumps(counts))
  return counts
