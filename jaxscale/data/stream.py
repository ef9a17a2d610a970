"""Documents as one stream of tokens, cut into windows of one length.

GPT-3's way (arXiv:2005.14165, appendix B): documents follow each other with a separator
between them, a window may hold the end of one and the beginning of the next, and
nothing is masked. So an example is a window, and every token is predicted once an
epoch, whatever the lengths of documents.

The stream is a ring: each document ends with a separator, the last one too, and so
the first token of all is predicted from a separator like that of any document. Every
epoch cuts the ring at another place, else the same tokens would always come first in
a window and be predicted from nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxscale.data.dataset import Batch, Dataset, TextInfo
from jaxscale.data.tfrecord import OpenFile
from jaxscale.errors import ConfigError

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

  def read(start: int, stop: int) -> np.ndarray:
    return tokens[start:stop]

  return Stream(len(tokens), read, separator, bytes_per_token)


def of_files(
  paths: Sequence[Path],
  dtype: str,
  separator: int | None,
  bytes_per_token: float | None = None,
) -> Stream:
  """The tokens of files, one file after another, read where they are asked for.

  Args:
    paths: files of nothing but tokens.
    dtype: theirs, as "<u2".
    separator: as in `Stream`.
    bytes_per_token: as in `Stream`.

  Raises:
    ConfigError: a file is not there, or holds no whole number of tokens.
  """
  width = np.dtype(dtype).itemsize
  files, ends = [], [0]
  for path in paths:
    try:
      files.append(OpenFile(str(path)))
    except OSError as e:
      raise ConfigError(f"{path}: {e.strerror}, give a file of tokens") from None
    size = os.fstat(files[-1].descriptor).st_size
    if size % width:
      raise ConfigError(
        f"{path}: {size} bytes are no whole number of {dtype} tokens of {width} "
        "bytes; cut off, or of another dtype"
      )
    ends.append(ends[-1] + size // width)

  def read(start: int, stop: int) -> np.ndarray:
    pieces = []
    for file, path, first, end in zip(files, paths, ends, ends[1:], strict=False):
      a, b = max(start, first), min(stop, end)
      if a < b:
        data = os.pread(file.descriptor, (b - a) * width, (a - first) * width)
        if len(data) != (b - a) * width:
          raise OSError(f"{path} has become shorter while it was read")
        pieces.append(np.frombuffer(data, dtype))
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

  return Stream(ends[-1], read, separator, bytes_per_token)


def windows(
  name: str, stream: Stream, vocab_size: int, sequence_length: int
) -> Dataset:
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

  def load(indices: np.ndarray, draws: np.ndarray | None) -> Batch:
    rows = np.empty((len(indices), sequence_length + 1), np.int32)
    for i, index in enumerate(indices):
      first = int(index) * sequence_length
      cut = 0 if draws is None else int(draws[i, 0] * total)
      _fill(rows[i], stream, first + cut, min(sequence_length, total - first))
      if draws is None and first == 0:
        before = stream.separator
        rows[i, :1] = 0 if before is None else before
        rows[i, 1] = NO_TARGET if before is None else rows[i, 1]
    return _checked(name, rows, vocab_size)

  info = TextInfo(name, vocab_size, sequence_length, stream.bytes_per_token)
  return Dataset(
    info, -(-total // sequence_length), load, num_draws=1, draws_by_epoch=True
  )


def _fill(row: np.ndarray, stream: Stream, first: int, count: int) -> None:
  """Put the token before place `first` of the ring and `count` more into a row."""
  at, done = (first - 1) % stream.num_tokens, 0
  while done <= count:
    part = min(count + 1 - done, stream.num_tokens - at)
    row[done : done + part] = stream.read(at, at + part)
    done, at = done + part, 0
  row[done:] = NO_TARGET


def _checked(name: str, rows: np.ndarray, vocab_size: int) -> Batch:
  """The batch of rows of sequence_length + 1 tokens."""
  most = int(rows.astype(np.uint32)[rows != NO_TARGET].max(initial=0))
  if most >= vocab_size:
    raise ConfigError(
      f"{name}: token {most} where the vocabulary has {vocab_size:,}; give the "
      "vocab_size of the tokenizer that made it (or it is of another dtype)"
    )
  tokens, targets = rows[:, :-1], rows[:, 1:]
  return {"tokens": np.maximum(tokens, 0), "targets": np.ascontiguousarray(targets)}
