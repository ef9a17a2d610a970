"""The embedded default: UCI handwritten digits, real, tiny, offline.

1,797 images of 8x8 with values 0 … 16, the test part of E. Alpaydin and C.
Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning
Repository (1998), licence CC BY 4.0; the same arrays as scikit-learn's
`load_digits`, which a test compares bit for bit. The file is in order of
writing; the last 360 images (a fifth) are held-out.
"""

from __future__ import annotations

from importlib import resources
from typing import Literal

import numpy as np

from jaxscale.data.arrays import from_arrays
from jaxscale.data.augment import shift
from jaxscale.data.dataset import Dataset, DatasetInfo

NUM_TEST = 360
# Mean and standard deviation of the 1,437 training images.
INFO = DatasetInfo("digits", (8, 8, 1), 10, mean=(4.89,), std=(6.01,))


def digits(
  split: Literal["train", "test"], *, augment: Literal["none", "shift"] = "shift"
) -> Dataset:
  """The digits: 1,437 to train on or 360 to test on.

  Args:
    split: "train" or "test".
    augment: "shift" moves training images by up to one pixel.

  Example:
    >>> digits("test").num_examples
    360
  """
  with resources.as_file(resources.files("jaxscale.data") / "digits.npz") as path:
    arrays = np.load(path)
    images, labels = arrays["images"], arrays["labels"]
  part = slice(None, -NUM_TEST) if split == "train" else slice(-NUM_TEST, None)
  return from_arrays(
    INFO, images[part], labels[part], shift(1) if augment == "shift" else None
  )
