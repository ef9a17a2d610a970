"""Datasets of arrays in memory: images, tables, signals; classes or numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxscale.data.augment import Augment
from jaxscale.data.dataset import Dataset, DatasetInfo
from jaxscale.errors import ConfigError


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

  Example:
    >>> x, y = np.zeros((4, 3), "float32"), np.array([0, 1, 1, 0])
    >>> from_arrays(array_info(x, y), x, y).num_examples
    4
  """
  targets = targets.astype(info.label_dtype)

  def load(indices, draws):
    batch = inputs[indices]
    if augment is not None and draws is not None:
      batch = augment.apply(batch, draws)
    return {"image": batch, "label": targets[indices]}

  return Dataset(info, len(inputs), load, augment.num_draws if augment else 0)


def array_info(
  x: np.ndarray,
  y: np.ndarray,
  *,
  num_classes: int | None = None,
  mean: tuple[float, ...] = (0.0,),
  std: tuple[float, ...] = (1.0,),
) -> DatasetInfo:
  """What a model has to know of arrays; integer targets [n] are classes."""
  is_class = y.ndim == 1 and np.issubdtype(y.dtype, np.integer)
  outputs = int(y.max()) + 1 if is_class else (1 if y.ndim == 1 else y.shape[-1])
  dtype = "uint8" if x.dtype == np.uint8 else (
    "float32" if np.issubdtype(x.dtype, np.floating) else "int32"
  )  # fmt: skip
  return DatasetInfo(
    "Arrays", x.shape[1:], num_classes or outputs, mean, std,
    dtype=dtype, label_shape=y.shape[1:],
    label_dtype="float32" if np.issubdtype(y.dtype, np.floating) else "int32",
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
