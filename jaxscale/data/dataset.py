"""What a dataset is to the pipeline: a size, and a function that loads rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

Batch = dict[str, np.ndarray]  # "image": uint8 [n, h, w, c], "label": int32 [n]
NUM_DRAWS = 24  # uniform numbers an example's augmentation may use up


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
    load: (indices [n], draws [n, NUM_DRAWS] in [0, 1) or None) -> Batch. A pure
      function; it augments from the draws, or shows the plain view for None.
  """

  info: DatasetInfo
  num_examples: int
  load: Callable[[np.ndarray, np.ndarray | None], Batch]


Augment = Callable[[np.ndarray, np.ndarray], np.ndarray]  # (images, draws)


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
    augment: (images, draws) -> images, in training only.
  """
  labels = labels.astype(np.int32)

  def load(indices, draws):
    batch = images[indices]
    if augment is not None and draws is not None:
      batch = augment(batch, draws)
    return {"image": batch, "label": labels[indices]}

  return Dataset(info, len(images), load)
