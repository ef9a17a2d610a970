"""What a dataset is to the pipeline: a size, and a function that loads rows."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

# "image": uint8 [n, h, w, c] and "label": int32 [n]; of text "tokens" and "targets",
# int32 [n, sequence_length].
Batch = dict[str, np.ndarray]
NUM_DRAWS = 24  # uniform numbers an example's augmentation may use up at most


class DatasetInfo(NamedTuple):
  """What a model has to know of the images.

  Attributes:
    name: for messages.
    image_shape: (height, width, channels) of a loaded example.
    num_classes: labels are 0 … num_classes - 1.
    mean: per channel or one for all, in the units of the stored images.
    std: likewise.
  """

  name: str
  image_shape: tuple[int, int, int]
  num_classes: int
  mean: tuple[float, ...]
  std: tuple[float, ...]


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


def batch_shapes(
  info: DatasetInfo | TextInfo, rows: int
) -> dict[str, tuple[tuple[int, ...], str]]:
  """Shape and dtype of each array of a training batch, by its name.

  Example:
    >>> batch_shapes(TextInfo("bytes", 256, 128), 8)["tokens"]
    ((8, 128), 'int32')
  """
  if isinstance(info, TextInfo):
    shape = rows, info.sequence_length
    return {"tokens": (shape, "int32"), "targets": (shape, "int32")}
  return {"image": ((rows, *info.image_shape), "uint8"), "label": ((rows,), "int32")}


class Damage:
  """What a dataset met of unreadable and of odd examples; threads write to it.

  An example counts once, however often it comes up. Every process has a record
  of its own, of the examples that it read; `update` makes one of several.

  Example:
    >>> damage = Damage()
    >>> damage.add(7, "cat/7.jpg")
    >>> damage.describe()
    '1 damaged example: cat/7.jpg'
  """

  def __init__(self) -> None:
    self._lock = threading.Lock()
    self._damaged: dict[int, str] = {}
    self._rescued: dict[int, str] = {}

  def add(self, index: int, name: str) -> None:
    """An example that cannot be read."""
    with self._lock:
      self._damaged[index] = name

  def rescue(self, index: int, kind: str) -> None:
    """An example that is not what it should be, and was read all the same."""
    with self._lock:
      self._rescued[index] = kind

  def as_dict(self) -> dict[str, dict[str, str]]:
    """As JSON: names of damaged examples and kinds of odd ones, by index."""
    with self._lock:
      return {
        "damaged": {str(i): name for i, name in self._damaged.items()},
        "rescued": {str(i): kind for i, kind in self._rescued.items()},
      }

  def update(self, other: dict[str, dict[str, str]]) -> None:
    """Take in what another record's `as_dict` gave."""
    with self._lock:
      self._damaged |= {int(i): name for i, name in other["damaged"].items()}
      self._rescued |= {int(i): kind for i, kind in other["rescued"].items()}

  @property
  def count(self) -> int:
    """How many examples were found damaged."""
    return len(self._damaged)

  @property
  def indices(self) -> list[int]:
    """The damaged examples, in the dataset's order."""
    with self._lock:
      return sorted(self._damaged)

  @property
  def names(self) -> list[str]:
    """Their names, in the same order."""
    with self._lock:
      return [self._damaged[i] for i in sorted(self._damaged)]

  @property
  def rescued(self) -> dict[str, int]:
    """How many examples of each odd kind were read, e.g. {"CMYK": 22}."""
    with self._lock:
      return dict(sorted(Counter(self._rescued.values()).items()))

  def describe(self) -> str:
    """One line for the log: how many, and the names of the first five."""
    names = self.names
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    line = f"{len(names)} damaged example{'' if len(names) == 1 else 's'}"
    line += f": {', '.join(names[:5])}{more}" if names else ""
    rescued = ", ".join(f"{n} {kind}" for kind, n in self.rescued.items())
    return f"{line}; read although odd: {rescued}" if rescued else line


class Record(NamedTuple):
  """An example as it is stored.

  Attributes:
    image: the encoded image.
    label: its class.
  """

  image: bytes
  label: int


class Source(NamedTuple):
  """Encoded examples by index, whatever they are stored in.

  Attributes:
    num_examples: how many.
    read: indices -> a Record each, or None where it cannot be read; one by one
      where that costs nothing, so that its bytes are decoded while in the
      processor's cache. Any thread may call it.
    name: index -> what to call the example in a message.
    is_jpeg: index -> whether the example claims to be a JPEG.
  """

  num_examples: int
  read: Callable[[Sequence[int]], Iterable[Record | None]]
  name: Callable[[int], str]
  is_jpeg: Callable[[int], bool]


class Dataset(NamedTuple):
  """One split of a dataset.

  Attributes:
    info: of the images, or of the text.
    num_examples: how many there are; of text, windows of `sequence_length` tokens.
    load: (indices [n], draws [n, num_draws] in [0, 1) or None) -> Batch. A pure
      function; it augments from the draws, or shows the plain view for None.
    num_draws: how many of an example's NUM_DRAWS uniform numbers `load` uses.
    damage: what `load` met of damaged examples so far; None: it cannot meet any.
    draws_by_epoch: whether all examples of an epoch have the same draws.
  """

  info: DatasetInfo | TextInfo
  num_examples: int
  load: Callable[[np.ndarray, np.ndarray | None], Batch]
  num_draws: int = 0
  damage: Damage | None = None
  draws_by_epoch: bool = False


class Augment(NamedTuple):
  """A change of decoded images.

  Attributes:
    apply: (images uint8 [n, h, w, c], draws [n, num_draws]) -> images.
    num_draws: how many uniform numbers an example takes.
  """

  apply: Callable[[np.ndarray, np.ndarray], np.ndarray]
  num_draws: int


def from_arrays(
  info: DatasetInfo,
  images: np.ndarray,
  labels: np.ndarray,
  augment: Augment | None = None,
) -> Dataset:
  """A dataset of decoded images in memory.

  Args:
    info: of the images.
    images: uint8 [n, h, w, c].
    labels: int [n].
    augment: done to the images in training.
  """
  labels = labels.astype(np.int32)

  def load(indices, draws):
    batch = images[indices]
    if augment is not None and draws is not None:
      batch = augment.apply(batch, draws)
    return {"image": batch, "label": labels[indices]}

  return Dataset(info, len(images), load, augment.num_draws if augment else 0)
