"""Datasets of arrays: given in memory, embedded in the package, or made on the fly.

The embedded default are the UCI handwritten digits: real, tiny, offline. 1,797 images
of 8x8 with values 0 … 16, the test part of E. Alpaydin and C. Kaynak, "Optical
Recognition of Handwritten Digits", UCI Machine Learning Repository (1998), licence CC
BY 4.0; the same arrays as scikit-learn's `load_digits`, which a test compares bit for
bit. The file is in order of writing; the last 360 images (a fifth) are held-out.
"""

from __future__ import annotations

import functools
from importlib import resources
from typing import Any, Literal

import numpy as np

from jaxscale.data.augment import Augment, shift, uniform_bits
from jaxscale.data.dataset import NO_CLASS, Dataset, DatasetInfo, array_identity
from jaxscale.errors import ConfigError

# Mean and standard deviation of the 1,437 training images.
INFO = DatasetInfo("digits", (8, 8, 1), 10, mean=(4.89,), std=(6.01,))


def from_arrays(
  info: DatasetInfo,
  inputs: np.ndarray,
  targets: np.ndarray,
  augment: Augment | None = None,
) -> Dataset:
  """A dataset of arrays in memory.

  Args:
    info: of the examples; `array_info` makes one.
    inputs: [n, ...], for images uint8 [n, h, w, c].
    targets: [n, ...], for classes integers [n].
    augment: done to the inputs in training.

  Raises:
    ConfigError: there are not as many targets as inputs, they are not of the shapes of
      `info`, or classes are not among those that it has.

  Example:
    >>> x, y = np.zeros((4, 3), "float32"), np.array([0, 1, 1, 0])
    >>> from_arrays(array_info(x, y), x, y).num_examples
    4
  """
  if len(inputs) != len(targets):
    raise ConfigError(
      f"from_arrays: {len(inputs):,} inputs and {len(targets):,} targets; give as many "
      "of both"
    )
  for name, array, wanted in (
    ("inputs", inputs, info.image_shape), ("targets", targets, info.label_shape)
  ):  # fmt: skip
    if array.shape[1:] != tuple(wanted):
      raise ConfigError(
        f"from_arrays: {name} of {array.shape[1:]} each, and {tuple(wanted)} in info; "
        "make it of the same arrays (`array_info`)"
      )
  if targets.ndim == 1 and targets.dtype.kind in "iu":
    _check_classes(info.name, targets, NO_CLASS, info.num_classes)
  targets = targets.astype(info.label_dtype)

  def load(indices, draws):
    batch = inputs[indices]
    if augment is not None and draws is not None:
      batch = augment.apply(batch, draws)
    return {"image": batch, "label": targets[indices]}

  num_draws = augment.num_draws if augment else 0
  identity = functools.partial(array_identity, inputs, targets)
  return Dataset(info, len(inputs), load, num_draws, identity=identity)


def _check_classes(name: str, targets: np.ndarray, lowest: int, count: int) -> None:
  """Integer targets, one for each example, are classes from 0 on."""
  wrong = targets[(targets < lowest) | (targets >= count)]
  if len(wrong):
    raise ConfigError(
      f"{name}: the target {wrong[0]} is no class of 0 to {count - 1}; correct it, or "
      "num_classes; numbers that are no classes give as floats"
    )


def array_info(
  x: np.ndarray,
  y: np.ndarray,
  *,
  num_classes: int | None = None,
  mean: tuple[float, ...] = (0.0,),
  std: tuple[float, ...] = (1.0,),
) -> DatasetInfo:
  """What a model has to know of arrays; integer and bool targets [n] are classes.

  Raises:
    ConfigError: one of them is negative.
  """
  is_class = y.ndim == 1 and y.dtype.kind in "iub"
  outputs = 1 if y.ndim == 1 else y.shape[-1]
  if is_class:
    outputs = int(y.max(initial=y.dtype.kind == "b")) + 1
    _check_classes("Arrays", y, 0, num_classes or outputs)
  dtype, label_dtype = ("float32" if a.dtype.kind == "f" else "int32" for a in (x, y))
  return DatasetInfo(
    "Arrays", x.shape[1:], num_classes or outputs, mean, std,
    "uint8" if x.dtype == np.uint8 else dtype, y.shape[1:], label_dtype,
  )  # fmt: skip


def array_splits(
  x: Any, y: Any, x_eval: Any, y_eval: Any, eval_share: float, **options: Any
) -> tuple[Dataset, Dataset]:
  """The datasets of `Arrays` in data/settings.py.

  Raises:
    ConfigError: lengths differ, nothing is left to train on, or x is not numeric.
  """
  x, y = np.asarray(x), np.asarray(y)
  if (x_eval is None) != (y_eval is None):
    raise ConfigError("Arrays.x_eval, y_eval: give both or neither")
  if x_eval is None:
    kept = len(x) - max(round(len(x) * eval_share), 1)
    x, x_eval, y, y_eval = x[:kept], x[kept:], y[:kept], y[kept:]
  x_eval, y_eval = np.asarray(x_eval), np.asarray(y_eval)
  for name, a, b in (("x, y", x, y), ("x_eval, y_eval", x_eval, y_eval)):
    if a.ndim == 0 or len(a) != len(b) or not len(a):
      raise ConfigError(
        f"Arrays.{name}: shapes {a.shape} and {b.shape}; give as many targets as "
        "inputs, one of each at least"
      )
    if a.dtype.kind not in "uifb" or b.dtype.kind not in "uifb":
      raise ConfigError(f"Arrays.{name}: {a.dtype} and {b.dtype}; give numbers")
  info = array_info(x, np.concatenate([y, y_eval]), **options)
  x, x_eval = (a.astype(info.dtype, copy=False) for a in (x, x_eval))
  return from_arrays(info, x, y), from_arrays(info, x_eval, y_eval)


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
  path = resources.files("jaxscale.data") / "digits.npz"
  with resources.as_file(path) as file, np.load(file) as arrays:
    images, labels = arrays["images"], arrays["labels"]
  part = slice(None, -360) if split == "train" else slice(-360, None)
  moved = shift(1) if augment == "shift" else None
  return from_arrays(INFO, images[part], labels[part], moved)


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
