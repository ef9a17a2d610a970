"""Documents as one stream of tokens, cut into windows of one length.

GPT-3's way (arXiv:2005.14165, appendix B): documents follow each other with a separator
between them, a window may hold the end of one and the beginning of the next, and
nothing is masked. So an example is a window, and every token is predicted once an
epoch, whatever the lengths of documents.

The stream is a ring: each document ends with a separator, the last one too, and so
the first token of all is predicted from a separator like that of any document. Every
epoch cuts the ring at another place, else the same tokens would always come first in
a window and be predicted from nothing.

`packed` tokenizes documents once and keeps the tokens in one file, in `cache_dir`, or
else in $XDG_CACHE_HOME/jaxscale/text or ~/.cache/jaxscale/text, under a name made of
what went into it: `<name>.bin` has the tokens of all documents in their order and
nothing else, as nanoGPT keeps them, and `<name>.json` how many tokens, documents and
bytes of text that is. Processes that want the same file wait for the first that began
to write it.
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
from jaxscale.files import read_json, replacing, who_else_writes
from jaxscale.metrics.text import plural

NO_TARGET = -1  # where nothing is to be predicted


class Stream(NamedTuple):
  """Tokens one after another, wherever they are stored.

  Attributes:
    num_tokens: how many, separators included.
    read: (start, stop) -> those tokens, any integer dtype. Any thread may call it.
    separator: the token after each document; None: there is none, or it is not
      known, and then the first token of all cannot be predicted.
    bytes_per_token: see `TextInfo`.
  """

  num_tokens: int
  read: Callable[[int, int], np.ndarray]
  separator: int | None
  bytes_per_token: float | None = None


def of_array(
  tokens: np.ndarray, separator: int | None, bytes_per_token: float | None = None
) -> Stream:
  """A stream in memory: int [tokens]."""

  return Stream(len(tokens), lambda a, b: tokens[a:b], separator, bytes_per_token)


class TokenFile(NamedTuple):
  """A file of tokens.

  Attributes:
    path: of the file.
    dtype: NumPy's name of the tokens' type, as "<u2".
    offset: bytes before the first token.
  """

  path: Path
  dtype: str
  offset: int = 0


def of_files(
  files: Sequence[TokenFile], separator: int | None, bytes_per_token: float | None = None
) -> Stream:
  """The tokens of files, one file after another, read where they are asked for.

  Args:
    files: in their order.
    separator: as in `Stream`.
    bytes_per_token: as in `Stream`.

  Raises:
    ConfigError: a file is not there, or holds no whole number of tokens.
  """
  opened, ends = [], [0]
  for path, dtype, offset in files:
    try:
      opened.append(OpenFile(str(path)))
    except OSError as e:
      raise ConfigError(f"{path}: {e.strerror}, give a file of tokens") from None
    size, width = os.fstat(opened[-1].descriptor).st_size, np.dtype(dtype).itemsize
    if (size - offset) % width:
      why = f"{size} bytes are not a whole number of {dtype} tokens of {width} bytes"
      raise ConfigError(f"{path}: {why}; cut off, or of another dtype")
    ends.append(ends[-1] + (size - offset) // width)

  def read(start: int, stop: int) -> np.ndarray:
    pieces = []
    for i, (path, dtype, offset) in enumerate(files):
      a, b = max(start, ends[i]), min(stop, ends[i + 1])
      if a < b:
        width = np.dtype(dtype).itemsize
        place = offset + (a - ends[i]) * width
        data = os.pread(opened[i].descriptor, (b - a) * width, place)
        if len(data) != (b - a) * width:
          raise OSError(f"{path} has become shorter while it was read")
        pieces.append(np.frombuffer(data, dtype))
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

  return Stream(ends[-1], read, separator, bytes_per_token)


def windows(name: str, stream: Stream, vocab_size: int, sequence_length: int) -> Dataset:
  """The stream as examples of `sequence_length` tokens and what follows each.

  Example i has the targets i * S … i * S + S - 1 of the stream, counted from a place
  that is drawn anew every epoch, and from its beginning in evaluation. The last one
  is filled up with targets of -1.

  Args:
    name: for messages.
    stream: the tokens.
    vocab_size: tokens are below it; those that are read are checked.
    sequence_length: S.

  Returns:
    A dataset of batches {"tokens", "targets"}, int32 [n, S].

  Raises:
    ConfigError: there is no token in it.

  Example:
    >>> stream = of_array(np.array([5, 6, 7, 0, 8, 9, 0]), separator=0)
    >>> windows("two", stream, 10, 4).load(np.arange(2), None)["targets"].tolist()
    [[5, 6, 7, 0], [8, 9, 0, -1]]
  """
  total = stream.num_tokens
  if not total:
    raise ConfigError(f"{name}: there is no text in it")

  def read(start: int, stop: int) -> np.ndarray:
    tokens = stream.read(start, stop)  # of any width: checked before they become int32
    for token in (tokens.min(), tokens.max()):
      if not 0 <= token < vocab_size:
        fix = "give the vocab_size of the tokenizer that made it (or it is of another dtype)"
        raise ConfigError(f"{name}: token {token} where the vocabulary has {vocab_size:,}; {fix}")
    return tokens

  def load(indices: np.ndarray, draws: np.ndarray | None) -> Batch:
    rows = np.empty((len(indices), sequence_length + 1), np.int32)
    for i, index in enumerate(indices):
      first = int(index) * sequence_length
      cut = 0 if draws is None else int(draws[i, 0] * total)
      # The token before and those of the window, of which the last may be short.
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
  """`windows` of a text that has at least one whole example.

  Raises:
    ConfigError: it is shorter: what is measured on some bytes means nothing.
  """
  if 0 < stream.num_tokens < sequence_length:
    length = f"--config.data.sequence_length={sequence_length}; give more text or a smaller length"
    count = plural(stream.num_tokens, "token")
    raise ConfigError(f"{name}: {count}, fewer than an example of {length}")
  return windows(name, stream, vocab_size, sequence_length)


def packed(
  name: str,
  batches: Iterable[Sequence[bytes]],
  tokenizer: Tokenizer,
  identity: Sequence[Any],
  cache_dir: str | None = None,
) -> Stream:
  """The documents as one stream of tokens, each with the separator after it.

  Args:
    name: for messages.
    batches: the documents in their order, several at a time; read only if they
      are not kept yet.
    tokenizer: makes the tokens.
    identity: what the documents are of; another one is another file.
    cache_dir: where to keep the tokens; None: in the user's cache.

  Raises:
    ConfigError: the directory cannot be written to.
  """
  folder = Path(cache_dir).expanduser() if cache_dir else user_cache() / "text"
  key = hashlib.sha256(repr((*identity, tokenizer.key)).encode()).hexdigest()[:32]
  kept, dtype = folder / f"{key}.bin", smallest_dtype(tokenizer.vocab_size)
  try:
    folder.mkdir(parents=True, exist_ok=True)
    if (counts := _counts(kept, dtype)) is None:
      with _locked(folder / f"{key}.lock"):
        if (counts := _counts(kept, dtype)) is None:  # not written meanwhile
          print(f"packing {name} once into {kept}", flush=True)
          counts = _write(kept, batches, tokenizer, dtype)
  except OSError as e:
    why = f"its tokens cannot be kept in {folder} ({e.strerror})"
    fix = "set cache_dir to a directory with room for them"
    raise ConfigError(f"{name}: {why}; {fix}") from None
  is_bytes = tokenizer.key == "bytes"
  # A byte 0 between documents counts as a byte where bytes are the tokens.
  ratio = 1.0 if is_bytes else counts["bytes"] / max(counts["tokens"], 1)
  return of_files([TokenFile(kept, dtype)], tokenizer.separator, ratio)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
  """Wait for others that have this lock; without locks all do their work at once.

  Each then writes its own file, and the last stays.
  """
  with contextlib.ExitStack() as stack:
    # A colleague's lock can be taken but not written to; a link is nobody's lock.
    for access in (os.O_RDWR, os.O_RDONLY):
      with contextlib.suppress(OSError):
        flags = access | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        number = os.open(path, flags, 0o666)
        stack.callback(os.close, number)  # which releases it
        fcntl.flock(number, fcntl.LOCK_EX)
        break
    yield


def _counts(kept: Path, dtype: str) -> dict[str, int] | None:
  """What is in the file, or None if it is missing or not whole."""
  names = kept.with_suffix(".json"), kept
  counts = read_json(names[0], dict.fromkeys(("tokens", "documents", "bytes"), int))
  try:
    if not counts or any(who_else_writes(name, group=False) for name in names):
      return None
    whole = kept.stat().st_size == counts["tokens"] * np.dtype(dtype).itemsize
  except OSError:
    return None
  return counts if whole else None


def _write(
  kept: Path, batches: Iterable[Sequence[bytes]], tokenizer: Tokenizer, dtype: str
) -> dict[str, int]:
  """Write both files, the counts last; returns them."""
  counts = {"tokens": 0, "documents": 0, "bytes": 0}
  with replacing(kept) as file:
    for documents in batches:
      tokens = tokenizer.encode(documents).astype(dtype, copy=False)
      file.write(tokens.tobytes())
      counts["tokens"] += len(tokens)
      counts["documents"] += len(documents)
      counts["bytes"] += sum(map(len, documents))
  with replacing(kept.with_suffix(".json")) as file:
    file.write(json.dumps(counts).encode())
  return counts
