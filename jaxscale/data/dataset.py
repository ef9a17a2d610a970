"""What a dataset is to the pipeline: a size, and a function that loads rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

Batch = dict[str, np.ndarray]  # "image": uint8 [n, h, w, c], "label": int32 [n]
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


class Dataset(NamedTuple):
  """One split of a dataset.

  Attributes:
    info: of the images.
    num_examples: how many there are.
    load: (indices [n], draws [n, num_draws] in [0, 1) or None) -> Batch. A pure
      function; it augments from the draws, or shows the plain view for None.
    num_draws: how many of an example's NUM_DRAWS uniform numbers `load` uses.
  """

  info: DatasetInfo
  num_examples: int
  load: Callable[[np.ndarray, np.ndarray | None], Batch]
  num_draws: int = 0


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
