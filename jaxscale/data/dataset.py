"""What a dataset is to the pipeline: a size, and a function that loads rows."""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxscale.errors import invalid
from jaxscale.files import whole_number
from jaxscale.metrics.text import few, listed, plural

NO_CLASS = -1  # label of a held-out example that cannot be read: always wrong
# "image": uint8 [n, h, w, c] and "label": int32 [n]; of text "tokens" and "targets",
# int32 [n, sequence_length].
Batch = dict[str, np.ndarray]


# An image of more is refused before it is decoded: Pillow's limit, of 1 GB in memory
# (Image.MAX_IMAGE_PIXELS: 1 GiB // 4 // 3 bytes, rounded to 89,478,485, twice).
MAX_PIXELS = 178_956_970
# ImageNet's examples by split (arXiv:1409.0575, table 2; TFDS imagenet2012 5.1.0).
IMAGENET_EXAMPLES = {"train": 1_281_167, "validation": 50_000}


def user_cache() -> Path:
  """$XDG_CACHE_HOME/jaxscale, or ~/.cache/jaxscale; without a home a temporary one."""
  folder = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
  if (folder := os.path.expanduser(folder)).startswith("~"):
    return Path(_temporary_cache())
  return Path(folder) / "jaxscale"


@functools.cache
def _temporary_cache() -> str:
  """Make the cache of a user without a home, as in a container; it ends with us."""
  made = tempfile.mkdtemp(prefix="jaxscale-")
  atexit.register(shutil.rmtree, made, ignore_errors=True)
  line = f"no home directory, caches are in {made} until the end; set HOME"
  print(f"note: {line}, or XDG_CACHE_HOME", file=sys.stderr)
  return made


class DatasetInfo(NamedTuple):
  """What a model has to know of images, or of any other arrays with targets.

  Attributes:
    name: for messages.
    image_shape: of a loaded example, e.g. (height, width, channels).
    num_classes: labels are 0 … num_classes - 1; of other targets: how many outputs.
    mean: per channel or one for all, in the units of the stored images.
    std: likewise.
    dtype: of "image", as loaded.
    label_shape: of one example's "label"; () for a class.
    label_dtype: of "label".
    class_names: names of the classes in the order of their labels, where there are any.
  """

  name: str
  image_shape: tuple[int, ...]
  num_classes: int
  mean: tuple[float, ...]
  std: tuple[float, ...]
  dtype: str = "uint8"
  label_shape: tuple[int, ...] = ()
  label_dtype: str = "int32"
  class_names: tuple[str, ...] = ()


class TextInfo(NamedTuple):
  """What a model has to know of the text.

  Attributes:
    name: for messages.
    vocab_size: tokens are 0 … vocab_size - 1.
    sequence_length: tokens of an example.
    bytes_per_token: of this text, on average: 1 where tokens are bytes; None: it is
      not known how many bytes the text had.
  """

  name: str
  vocab_size: int
  sequence_length: int
  bytes_per_token: float | None = None


def batch_shapes(info: DatasetInfo | TextInfo, rows: int) -> dict[str, tuple]:
  """Shape and dtype of each array of a training batch, by its name.

  Example:
    >>> batch_shapes(TextInfo("bytes", 256, 128), 8)["tokens"]
    ((8, 128), 'int32')
  """
  if isinstance(info, TextInfo):
    shape = rows, info.sequence_length
    return {"tokens": (shape, "int32"), "targets": (shape, "int32")}
  label = (rows, *info.label_shape), info.label_dtype
  return {"image": ((rows, *info.image_shape), info.dtype), "label": label}


# The contents of files and arrays are hashed whole up to so many bytes; of larger ones
# as much in blocks that are spread evenly.
_HASHED, _BLOCK = 8 << 20, 1 << 16
_MAX_SIZES = 1024  # files whose size is asked for: a cluster's file system is slow
_MAX_READ = 64  # of many files, those whose first block is read


def file_identity(paths: Sequence[Path]) -> dict[str, Any]:
  """Sizes and contents of a few files one after another, wherever they are."""
  sizes = [path.stat().st_size for path in paths]
  total, starts = sum(sizes), np.cumsum([0, *sizes])
  digest = hashlib.sha256(repr(sizes).encode())
  for begin in _block_starts(total):
    index = int(np.searchsorted(starts, begin, "right")) - 1
    with open(paths[index], "rb") as file:
      file.seek(begin - int(starts[index]))
      digest.update(file.read(_BLOCK))
  return {"bytes": total, "content": digest.hexdigest()[:16]}


def _block_starts(total: int) -> list[int]:
  """The first bytes of the blocks that are hashed, the last one at the very end."""
  count = -(-min(total, _HASHED) // _BLOCK)
  if total <= _HASHED:
    return [i * _BLOCK for i in range(count)]
  return np.linspace(0, total - _BLOCK, count).astype(np.int64).tolist()


def names_identity(names: np.ndarray, path_of: Callable[[int], str]) -> dict[str, Any]:
  """Names of many files in their order, sizes of some, and how fewer of them begin.

  Pictures without compression have one size, whatever they show.

  Args:
    names: bytes [n].
    path_of: index -> the path of a file.
  """

  def size_of(index: int) -> int:
    try:
      return os.stat(path_of(index)).st_size
    except OSError:  # a damaged example
      return -1

  def begin_of(index: int) -> bytes:
    try:
      with open(path_of(index), "rb") as file:
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
  """Contents of arrays, of large ones rows that are spread evenly."""
  digest = hashlib.sha256()
  for array in arrays:
    digest.update(f"{array.shape} {array.dtype}".encode())
    if array.nbytes > _HASHED:
      rows = max(_HASHED * len(array) // array.nbytes, 1)
      array = array[np.linspace(0, len(array) - 1, rows).astype(int)]
    digest.update(np.ascontiguousarray(array).view(np.uint8).data)
  return {"content": digest.hexdigest()[:16]}


class DamagedExamples:
  """The unreadable and the unusual examples of a dataset; threads add to it.

  An example counts once, however often it is read. Every process has a record
  of the examples that it read; `update` merges several.

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
    """An example that cannot be read."""
    self._names[index] = name

  def add_unusual(self, index: int, kind: str) -> None:
    """An example that is not of the expected format, but was read."""
    self._unusual[index] = kind

  def as_dict(self) -> dict[str, dict[str, str]]:
    """As JSON: names of damaged and formats of unusual examples, by index."""
    found = {"damaged": self._names, "unusual": self._unusual}
    return {k: {str(i): text for i, text in x.copy().items()} for k, x in found.items()}

  def update(self, other: dict[str, dict[str, str]]) -> None:
    """Add what the `as_dict` of another record returned."""
    for known, key in ((self._names, "damaged"), (self._unusual, "unusual")):
      numbers = ((whole_number(i), text) for i, text in other[key].items())
      known |= {i: text for i, text in numbers if i is not None}

  @property
  def count(self) -> int:
    """How many examples are damaged."""
    return len(self._names)

  @property
  def indices(self) -> list[int]:
    """The damaged examples, in the dataset's order."""
    return sorted(self._names.copy())

  @property
  def names(self) -> list[str]:
    """Their names, in the same order."""
    return [self._names[i] for i in self.indices]

  @property
  def unusual(self) -> dict[str, int]:
    """How many examples of each unusual format were read, e.g. {"CMYK": 22}."""
    return dict(sorted(Counter(self._unusual.copy().values()).items()))

  def describe(self) -> str:
    """One line for the log: how many, and the names of the first five."""
    line = plural(self.count, "damaged example")
    line += f": {few(self.names, most=5)}" if self.count else ""
    unusual = listed(f"{n} {kind}" for kind, n in self.unusual.items())
    return f"{line}; also read: {unusual}" if unusual else line


class Dataset(NamedTuple):
  """One split of a dataset.

  Attributes:
    info: of the images, or of the text.
    num_examples: how many there are; of text, windows of `sequence_length` tokens.
    load: (indices [n], draws [n, num_draws] in [0, 1) or None) -> Batch. A pure
      function; it augments from the draws, or shows the plain view for None.
    num_draws: how many uniform numbers `load` uses, at most `augment.NUM_DRAWS`.
    damaged: examples that `load` could not read so far; None: it can read all.
    draws_by_epoch: whether all examples of an epoch have the same draws.
    notes: worth reading before the first step.
    identity: what tells its contents from others', as JSON, or a function that
      returns that; a run does not resume on contents of another identity. None:
      by the number of examples alone.
  """

  info: DatasetInfo | TextInfo
  num_examples: int
  load: Callable[[np.ndarray, np.ndarray | None], Batch]
  num_draws: int = 0
  damaged: DamagedExamples | None = None
  draws_by_epoch: bool = False
  notes: tuple[str, ...] = ()
  identity: str | Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None


def check_targets(name: str, targets: np.ndarray, limits: tuple[int, int]) -> None:
  """Refuse targets that a loss does not take: they would train on a wrong class.

  Args:
    name: of the targets, for the error.
    targets: [n, ...].
    limits: the lowest and the highest one.

  Raises:
    ConfigError: one is outside, or NaN.
  """
  low, high = limits
  if len(targets) and not (targets.min() >= low and targets.max() <= high):
    wrong = targets[~((targets >= low) & (targets <= high))][0]
    fix = "correct the targets or num_classes, or choose another loss"
    raise invalid(name, wrong.item(), f"is out of range [{low}, {high}]", fix)


def with_target_range(dataset: Dataset, limits: tuple[int, int]) -> Dataset:
  """A dataset that checks the targets of each batch (`check_targets`)."""
  info = dataset.info
  key = "targets" if isinstance(info, TextInfo) else "label"

  def load(indices, draws):
    batch = dataset.load(indices, draws)
    if isinstance(batch, dict) and key in batch:  # else `check_readable` refuses it
      has_none = key == "targets" or (draws is None and dataset.damaged is not None)
      low = NO_CLASS if has_none else limits[0]
      check_targets(f"{info.name}: {key}", np.asarray(batch[key]), (low, limits[1]))
    return batch

  return dataset._replace(load=load)
