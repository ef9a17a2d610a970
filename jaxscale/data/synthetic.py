"""Images made on the fly: nothing to download, yet something to learn."""

from __future__ import annotations

import numpy as np

from jaxscale.data.augment import uniform
from jaxscale.data.dataset import NUM_DRAWS, Dataset, DatasetInfo


def synthetic(
  num_examples: int,
  image_shape: tuple[int, int, int],
  num_classes: int,
  *,
  seed: int = 0,
  first: int = 0,
) -> Dataset:
  """A fixed random pattern a class, under noise of twice its spread.

  Args:
    num_examples: how many.
    image_shape: (height, width, channels).
    num_classes: example i has label i mod num_classes.
    seed: of patterns and noise.
    first: index of the first example; another stretch of indices gives a
      held-out set of the same classes.
  """
  size = int(np.prod(image_shape))
  blocks = -(-size // NUM_DRAWS)  # draws come NUM_DRAWS at a time

  def noise(seed, ids):
    places = (ids[:, None] * blocks + np.arange(blocks)).reshape(-1)
    return uniform(seed, places).reshape(len(ids), -1)[:, :size]

  patterns = noise(seed + 1, np.arange(num_classes))

  def load(indices, draws):
    del draws  # every example is new already
    ids = np.asarray(indices) + first
    labels = (ids % num_classes).astype(np.int32)
    pixels = (patterns[labels] + 2 * noise(seed, ids)) / 3
    images = (pixels * 255).astype(np.uint8).reshape(-1, *image_shape)
    return {"image": images, "label": labels}

  info = DatasetInfo("synthetic", image_shape, num_classes, (127.5,), (60.0,))
  return Dataset(info, num_examples, load)
