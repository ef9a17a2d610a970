"""Windows of one length from documents of any length.

`text_windows` is the entry for every kind of text. With the packing "stream" and
"masked_stream", windows cut one stream of all documents (`stream.windows`). With "best_fit",
whole documents share a window (best-fit decreasing, arXiv:2404.10830), and with "none" each
document has a window of its own. A window with several documents numbers them in "documents",
from which models derive the attention mask and the positions.

The packing depends on nothing but the lengths of the documents and the length of a window.
"""

from __future__ import annotations

import bisect
from collections import defaultdict

import numpy as np

from jaxscale.data.dataset import Batch, Dataset, TextInfo
from jaxscale.data.stream import NO_TARGET, Packing, Stream, checked, documents_spec, windows
from jaxscale.errors import ConfigError, invalid
from jaxscale.metrics.text import plural

_SCANNED = 1 << 24  # tokens that are searched for separators at a time


def text_windows(
  name: str,
  stream: Stream,
  vocab_size: int,
  sequence_length: int,
  packing: Packing = "stream",
  setting: str = "packing",
) -> Dataset:
  """Create windows of a text with at least one whole example.

  Args:
    name: the name for messages.
    stream: the tokens.
    vocab_size: the size of the vocabulary.
    sequence_length: the tokens per example, S.
    packing: the way from documents to windows.
    setting: the name of the setting for messages, e.g. "TextFiles.packing".

  Returns:
    A dataset with batches {"tokens", "targets"}, and "documents" unless `packing` is
    "stream", int32 [n, S].

  Raises:
    ConfigError: the text is shorter than one window, so metrics would not be meaningful; or
      the documents are not known.
  """
  if packing != "stream" and stream.separator is None and stream.lengths is None:
    problem = "needs to know where documents end, but these are tokens without a separator"
    raise invalid(setting, packing, problem, "set separator to its token ID, or packing='stream'")
  if 0 < stream.num_tokens < sequence_length and packing in ("stream", "masked_stream"):
    length = f"--config.data.sequence_length={sequence_length}; use more text or a smaller length"
    count = plural(stream.num_tokens, "token")
    raise ConfigError(f"{name} has {count}, fewer than {length}")
  if packing in ("best_fit", "none"):
    return _document_windows(name, stream, vocab_size, sequence_length, packing == "best_fit")
  is_masked = packing == "masked_stream"
  dataset = windows(name, stream, vocab_size, sequence_length, is_masked)
  return dataset._replace(notes=stream.notes)


def best_fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
  """Assign sizes to bins by best-fit decreasing.

  Each size, the largest first, goes to the bin with the least room that has enough, or to a
  new one, in O(n log n) for n sizes (a second for a million).

  Args:
    sizes: the sizes, int [n], each from 1 to `capacity`.
    capacity: the capacity of a bin.

  Returns:
    The number of each size's bin, int [n].

  Example:
    >>> best_fit(np.array([2, 6, 3, 4, 5]), 10).tolist()
    [1, 0, 1, 0, 1]
  """
  order = np.argsort(-sizes, kind="stable")
  bins: list[int] = []
  num_bins = 0
  rooms: list[int] = []  # The rooms of open bins, each once in ascending order.
  open_bins: dict[int, list[int]] = defaultdict(list)  # The bins that have a room.
  for size in sizes[order].tolist():
    at = bisect.bisect_left(rooms, size)
    if at == len(rooms):
      room, number, num_bins = capacity, num_bins, num_bins + 1
    else:
      room = rooms[at]
      number = open_bins[room].pop()
      if not open_bins[room]:
        del rooms[at]
    bins.append(number)
    if room > size:
      if not open_bins[room - size]:
        bisect.insort(rooms, room - size)
      open_bins[room - size].append(number)
  result = np.empty(len(sizes), np.int64)
  result[order] = bins
  return result


def _lengths(stream: Stream) -> np.ndarray:
  """Return the number of tokens of each document, with its separator."""
  if stream.lengths is not None:
    return stream.lengths()
  ends = [np.zeros(1, np.int64)]
  for first in range(0, stream.num_tokens, _SCANNED):
    tokens = stream.read(first, min(first + _SCANNED, stream.num_tokens))
    ends.append(first + 1 + np.flatnonzero(tokens == stream.separator))
  return np.diff(np.unique([*np.concatenate(ends), stream.num_tokens]))


def _document_windows(
  name: str, stream: Stream, vocab_size: int, sequence_length: int, is_shared: bool
) -> Dataset:
  """Create windows of whole documents; longer ones are cut."""
  lengths = _lengths(stream)
  # The targets of document i are tokens[starts[i] : ends[i]], predicted from those before them.
  ends = lengths.cumsum()
  starts = ends - lengths + stream.is_chat
  counts = -(-(ends - starts) // sequence_length)  # pieces of each document
  firsts = counts.cumsum() - counts
  within = np.arange(counts.sum()) - np.repeat(firsts, counts)
  begins = np.repeat(starts, counts) + within * sequence_length
  sizes = np.minimum(np.repeat(ends, counts) - begins, sequence_length)
  if not len(sizes):
    raise ConfigError(f"{name}: the text is empty; check the files and the split")
  bins = best_fit(sizes, sequence_length) if is_shared else np.arange(len(sizes))
  order = bins.argsort(kind="stable")
  edges = np.searchsorted(bins[order], np.arange(bins.max() + 2))

  def load(indices: np.ndarray, draws: np.ndarray | None) -> Batch:
    shape = len(indices), sequence_length
    batch = {"tokens": np.zeros(shape, np.int32), "targets": np.full(shape, NO_TARGET, np.int32)}
    batch["documents"] = np.zeros(shape, np.int32)
    for row, index in enumerate(indices):
      at = 0
      for number, i in enumerate(order[edges[index] : edges[index + 1]]):
        begin, size = int(begins[i]), int(sizes[i])
        read = stream.read(max(begin - 1, 0), begin + size)
        tokens = checked(
          name, np.where(read < 0, ~read, read) if stream.is_chat else read, vocab_size
        )
        if begin == 0:
          tokens = np.concatenate([[stream.separator or 0], tokens])
        place = slice(at, at + size)
        batch["tokens"][row, place] = tokens[:-1]
        is_learned = read[-size:] >= 0
        batch["targets"][row, place] = np.where(is_learned, tokens[1:], NO_TARGET)
        batch["documents"][row, place] = number
        at += size
      batch["documents"][row, at:] = edges[index + 1] - edges[index]
    return batch

  info = TextInfo(name, vocab_size, sequence_length, stream.bytes_per_token)
  info = info._replace(arrays=documents_spec(sequence_length))
  num_windows = len(edges) - 1
  share = sizes.sum() / (num_windows * sequence_length)
  note = f"{name}: {plural(len(lengths), 'document')} in {plural(num_windows, 'window')} of "
  note += f"{sequence_length}, {share:.1%} full"
  if cut := int((counts > 1).sum()):
    note += (
      f"; {plural(cut, 'document')} longer than a window cut into {counts[counts > 1].sum():,}"
    )
  return Dataset(info, num_windows, load, notes=(*stream.notes, note))
