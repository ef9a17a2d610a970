"""Dataset interface of the input pipeline: a size, and a function that loads examples."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from jaxscale.data.faults import raise_if_system_error
from jaxscale.errors import invalid
from jaxscale.files import open_regular, whole_number
from jaxscale.metrics.log import logger
from jaxscale.metrics.text import few, listed, plural

NO_CLASS = -1  # label of an unreadable validation example, which is always wrong
# Images have "image": uint8 [n, h, w, c] and "label": int32 [n]; text has "tokens" and
# "targets": int32 [n, sequence_length]; a target of -1 is not learned. Packed text also has
# "documents", int32 [n, sequence_length]. Any dataset may have further arrays [n, ...].
Batch = dict[str, np.ndarray]
Spec = tuple[tuple[int, ...], str]  # shape and dtype
# Positions in the training stream [n] -> the indices of the examples [n], and the numbers [n]
# whose random draws they use: the epoch of each if all its examples share their draws.
Order = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


# Larger images are rejected before decoding. This is Pillow's error limit, 1 GB in memory
# (Image.MAX_IMAGE_PIXELS: 1 GiB // 4 // 3 bytes, rounded to 89,478,485, times two).
MAX_PIXELS = 178_956_970
# ImageNet's examples by split (arXiv:1409.0575, table 2; TFDS imagenet2012 5.1.0).
IMAGENET_EXAMPLES = {"train": 1_281_167, "validation": 50_000}


class DatasetInfo(NamedTuple):
  """Description of examples for a model: images, or any named arrays.

  Attributes:
    name: the name for messages.
    image_shape: the shape of a loaded "image", e.g. (height, width, channels); None if
      examples have no "image".
    num_classes: the number of classes, with labels 0 … num_classes - 1; for other targets
      the number of outputs.
    mean: the mean per channel, or one for all, in the units of the stored images.
    std: the standard deviation, in the same form.
    dtype: the dtype of a loaded "image".
    label_shape: the shape of an example's "label"; () for a class, None if examples have
      no "label".
    label_dtype: the dtype of "label".
    class_names: the names of the classes in the order of their labels, if they have names.
    arrays: the shape and the dtype of an example's further arrays, by name.

  Example:
    >>> pairs = {"photo": ((32, 32, 3), "uint8"), "caption": ((16,), "int32")}
    >>> list(batch_shapes(DatasetInfo("pairs", None, label_shape=None, arrays=pairs), 8))
    ['photo', 'caption']
  """

  name: str
  image_shape: tuple[int, ...] | None
  num_classes: int = 0
  mean: tuple[float, ...] = (0.0,)
  std: tuple[float, ...] = (1.0,)
  dtype: str = "uint8"
  label_shape: tuple[int, ...] | None = ()
  label_dtype: str = "int32"
  class_names: tuple[str, ...] = ()
  arrays: Mapping[str, Spec] = MappingProxyType({})


class TextInfo(NamedTuple):
  """Description of text for a model.

  Attributes:
    name: the name for messages.
    vocab_size: the size of the vocabulary; tokens are 0 … vocab_size - 1.
    sequence_length: the tokens per example.
    bytes_per_token: the average bytes per token of this text; 1 for byte tokens, None if
      the size of the text is not known.
    arrays: the shape and the dtype of an example's further arrays, by name.
  """

  name: str
  vocab_size: int
  sequence_length: int
  bytes_per_token: float | None = None
  arrays: Mapping[str, Spec] = MappingProxyType({})


def batch_shapes(info: DatasetInfo | TextInfo, rows: int) -> dict[str, Spec]:
  """Return the shape and dtype of each array of a training batch, by its name.

  Example:
    >>> batch_shapes(TextInfo("bytes", 256, 128), 8)["tokens"]
    ((8, 128), 'int32')
  """
  shapes: dict[str, Any] = {}
  if isinstance(info, TextInfo):
    shapes |= dict.fromkeys(("tokens", "targets"), ((info.sequence_length,), "int32"))
  else:
    shapes |= {"image": (info.image_shape, info.dtype)}
    shapes |= {"label": (info.label_shape, info.label_dtype)}
  shapes = {name: spec for name, spec in shapes.items() if spec[0] is not None} | {**info.arrays}
  return {name: ((rows, *shape), dtype) for name, (shape, dtype) in shapes.items()}


# Files and arrays up to this many bytes are hashed as a whole; of larger ones as many bytes
# are hashed in blocks that are spread evenly.
_HASHED, _BLOCK = 8 << 20, 1 << 16
_MAX_SIZES = 1024  # files whose size is read, as a cluster's file system is slow
_MAX_READ = 64  # files whose first block is read


def file_identity(paths: Sequence[Path]) -> dict[str, Any]:
  """Return the sizes and contents of a few files in order, without their paths."""
  try:
    sizes = [path.stat().st_size for path in paths]
    total, starts = sum(sizes), np.cumsum([0, *sizes])
    digest = hashlib.sha256(repr(sizes).encode())
    for begin in _block_starts(total):
      index = int(np.searchsorted(starts, begin, "right")) - 1
      with open_regular(paths[index]) as file:
        file.seek(begin - int(starts[index]))
        digest.update(file.read(_BLOCK))
  except OSError as e:
    raise_if_system_error(e, str(e.filename))
    raise invalid(str(e.filename), ..., f"cannot be read: {e.strerror}", "restore it") from None
  return {"bytes": total, "content": digest.hexdigest()[:16]}


def _block_starts(total: int) -> list[int]:
  """Return the starts of the blocks to hash; the last block is at the end."""
  count = -(-min(total, _HASHED) // _BLOCK)
  if total <= _HASHED:
    return [i * _BLOCK for i in range(count)]
  return np.linspace(0, total - _BLOCK, count).astype(np.int64).tolist()


def names_identity(names: np.ndarray, path_of: Callable[[int], str]) -> dict[str, Any]:
  """Return the names of many files in order, the sizes of some, and the first bytes of fewer.

  Contents are needed as well: uncompressed pictures of different content have equal sizes.

  Args:
    names: the names, bytes [n].
    path_of: a function of the index that returns the path of a file.
  """

  def size_of(index: int) -> int:
    try:
      return os.stat(path_of(index)).st_size
    except OSError:  # It is a damaged example.
      return -1

  def begin_of(index: int) -> bytes:
    try:
      with open_regular(path_of(index)) as file:
        return hashlib.sha256(file.read(_BLOCK)).digest()
    except OSError:
      return b""

  def some(count: int) -> list[int]:
    return np.unique(np.linspace(0, len(names) - 1, count).astype(int)).tolist()

  sizes = ",".join(str(size_of(i)) for i in some(_MAX_SIZES))
  content = b"".join(begin_of(i) for i in some(_MAX_READ))
  texts = {"files": names.tobytes(), "sizes": sizes.encode(), "content": content}
  return {name: hashlib.sha256(text).hexdigest()[:16] for name, text in texts.items()}


def array_identity(*arrays: np.ndarray) -> dict[str, Any]:
  """Return the contents of arrays; of large ones, evenly spread rows."""
  digest = hashlib.sha256()
  for array in arrays:
    digest.update(f"{array.shape} {array.dtype}".encode())
    if array.nbytes > _HASHED:
      rows = max(_HASHED * len(array) // array.nbytes, 1)
      array = array[np.linspace(0, len(array) - 1, rows).astype(int)]
    digest.update(np.ascontiguousarray(array).view(np.uint8).data)
  return {"content": digest.hexdigest()[:16]}


class DamagedExamples:
  """Damaged and unusual examples of a dataset; threads may add to it.

  An example counts once, however often it is read. Every process has a record of the
  examples that it read; `update` merges records.

  Example:
    >>> damaged = DamagedExamples()
    >>> damaged.add(7, "cat/7.jpg")
    >>> damaged.describe()
    '1 damaged example: cat/7.jpg'
  """

  def __init__(self) -> None:
    self._names: dict[int, str] = {}
    self._unusual: dict[int, str] = {}

  def add(self, index: int, name: str) -> None:
    """Add an example that cannot be read."""
    self._names[index] = name

  def add_unusual(self, index: int, kind: str) -> None:
    """Add an example that was read but has an unexpected format."""
    self._unusual[index] = kind

  def copy_to(self, other: DamagedExamples, first: int, prefix: str) -> None:
    """Add all examples to a record of more datasets.

    Args:
      other: the other record.
      first: the index of example 0 there.
      prefix: the text before each name and format.
    """
    for known, add in ((self._names, other.add), (self._unusual, other.add_unusual)):
      for index, text in known.copy().items():
        add(first + index, prefix + text)

  def as_dict(self) -> dict[str, dict[str, str]]:
    """Return the names of damaged and the formats of unusual examples, by index, for JSON."""
    result = {"damaged": self._names, "unusual": self._unusual}
    return {k: {str(i): text for i, text in x.copy().items()} for k, x in result.items()}

  def update(self, other: dict[str, dict[str, str]]) -> None:
    """Merge the `as_dict` of another record."""
    for known, key in ((self._names, "damaged"), (self._unusual, "unusual")):
      numbers = ((whole_number(i), text) for i, text in other[key].items())
      known |= {i: text for i, text in numbers if i is not None}

  @property
  def count(self) -> int:
    """The number of damaged examples."""
    return len(self._names)

  @property
  def indices(self) -> list[int]:
    """The indices of damaged examples in the dataset's order."""
    return sorted(self._names.copy())

  @property
  def names(self) -> list[str]:
    """The names of damaged examples in the dataset's order."""
    return [self._names[i] for i in self.indices]

  @property
  def unusual(self) -> dict[str, int]:
    """The number of examples of each unusual format, e.g. {"CMYK": 22}."""
    return dict(sorted(Counter(self._unusual.copy().values()).items()))

  def describe(self) -> str:
    """Return one line for the log: the number, and the names of the first five."""
    line = plural(self.count, "damaged example")
    line += f": {few(self.names, most=5)}" if self.count else ""
    unusual = listed(f"{n} {kind}" for kind, n in self.unusual.items())
    return f"{line}; also read: {unusual}" if unusual else line


class Dataset(NamedTuple):
  """One split of a dataset.

  Attributes:
    info: the description of the images or the text.
    num_examples: the number of examples; for text, the number of windows of
      `sequence_length` tokens.
    load: a pure function of (indices [n], draws [n, num_draws] in [0, 1) or None) that
      returns a Batch. It augments by the draws, or returns the plain view for None.
    num_draws: the number of uniform draws that `load` uses, at most `augment.NUM_DRAWS`.
    damaged: the examples that `load` could not read so far; None if all are readable.
    draws_by_epoch: True if all examples of an epoch share their draws.
    notes: lines to log before the first step.
    identity: the identity of the contents as JSON, or a function that returns it; a run
      does not resume on contents with a different identity. None compares the number of
      examples alone.
    name: a function of an index that returns the name of the example, such as its file;
      None if examples have no names.
    order: a function of the seed that returns the order of training; None shuffles all
      examples anew in each epoch (`pipeline.epochs`).
    progress: a function of a position in the training stream that returns values to log as
      data/NAME; None logs none.
    parts: the datasets that this one is made of.
  """

  info: DatasetInfo | TextInfo
  num_examples: int
  load: Callable[[np.ndarray, np.ndarray | None], Batch]
  num_draws: int = 0
  damaged: DamagedExamples | None = None
  draws_by_epoch: bool = False
  notes: tuple[str, ...] = ()
  identity: str | Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None
  name: Callable[[int], str] | None = None
  order: Callable[[int], Order] | None = None
  progress: Callable[[int], dict[str, float]] | None = None
  parts: tuple[Dataset, ...] = ()


def facts_of(dataset: Dataset) -> dict[str, Any]:
  """Return the number of examples and the identity of a dataset, as JSON."""
  content = dataset.identity() if callable(dataset.identity) else dataset.identity
  if not isinstance(content, Mapping):
    content = {} if content is None else {"identity": content}
  return {"examples": dataset.num_examples, **content}


def check_targets(name: str, targets: np.ndarray, limits: tuple[int, int]) -> None:
  """Check targets that a loss would silently take for a wrong class.

  Args:
    name: the name of the targets, for the error.
    targets: the targets [n, ...].
    limits: the lowest and the highest allowed target.

  Raises:
    ConfigError: a target is out of range or NaN.
  """
  low, high = limits
  if len(targets) and not (targets.min() >= low and targets.max() <= high):
    wrong = targets[~((targets >= low) & (targets <= high))][0]
    fix = "fix the targets or num_classes, or choose another loss"
    raise invalid(name, wrong.item(), f"is out of range [{low}, {high}]", fix)


def with_target_range(dataset: Dataset, limits: tuple[int, int]) -> Dataset:
  """Return a dataset that checks the targets of each batch (`check_targets`)."""
  info = dataset.info
  key = "targets" if isinstance(info, TextInfo) else "label"

  def load(indices, draws):
    batch = dataset.load(indices, draws)
    if isinstance(batch, dict) and key in batch:  # `check_readable` reports other batches.
      has_none = key == "targets" or (draws is None and dataset.damaged is not None)
      low = NO_CLASS if has_none else limits[0]
      check_targets(f"{info.name}: {key}", np.asarray(batch[key]), (low, limits[1]))
    return batch

  return dataset._replace(load=load)


def with_checked_weights(dataset: Dataset) -> Dataset:
  """Return a dataset that checks the array "weight" of each batch.

  Loading raises a ConfigError for weights below 0, NaN and Inf. A training batch in which
  all rows of this process have the weight 0 is reported once.
  """
  name, noted = f"{dataset.info.name}: weight", []

  def load(indices, draws):
    batch = dataset.load(indices, draws)
    if isinstance(batch, dict) and "weight" in batch:  # `check_readable` reports other batches.
      weight = np.asarray(batch["weight"])
      if len(wrong := weight[~(np.isfinite(weight) & (weight >= 0))]):
        raise invalid(name, wrong[0].item(), "is not a weight", "give numbers of 0 or more")
      if draws is not None and not (weight.any() or noted):
        noted.append(logger.warning(f"{name} is 0 in a whole batch: its loss and gradient are 0"))
    return batch

  return dataset._replace(load=load)
