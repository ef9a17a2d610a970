"""Images made on the fly: nothing to download, yet something to learn."""

from __future__ import annotations

import numpy as np

from jaxscale.data.augment import uniform_bits
from jaxscale.data.dataset import Dataset, DatasetInfo


def synthetic(
  num_examples: int,
  image_shape: tuple[int, int, int],
  num_classes: int,
  *,
  seed: int = 0,
  first: int = 0,
) -> Dataset:
  """A fixed random pattern per class, under noise of twice its spread.

  Args:
    num_examples: how many.
    image_shape: (height, width, channels).
    num_classes: example i has label i mod num_classes.
    seed: of patterns and noise.
    first: index of the first example; another stretch of indices gives a
      held-out set of the same classes.
  """
  size = int(np.prod(image_shape))
  words = -(-size // 8)  # eight pixels of each number drawn

  def noise(seed, ids):
    counters = ids.astype(np.uint64)[:, None] * np.uint64(words)
    bits = uniform_bits(seed, counters + np.arange(words, dtype=np.uint64))
    return bits.astype("<u8").view(np.uint8)[:, :size].astype(np.uint16)

  def load(indices, draws):
    del draws  # every example is new already
    ids = np.asarray(indices) + first
    labels = (ids % num_classes).astype(np.int32)
    # Patterns are drawn again each time: those of 21,841 classes fill a memory.
    pixels = (noise(seed + 1, labels) + 2 * noise(seed, ids)) // 3
    images = pixels.astype(np.uint8).reshape(-1, *image_shape)
    return {"image": images, "label": labels}

  info = DatasetInfo("synthetic", image_shape, num_classes, (127.5,), (55.0,))
  return Dataset(info, num_examples, load)
