"""Mean and standard deviation per channel of a dataset's images, computed once."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from jaxscale.data.caches import kept, key_of, user_cache
from jaxscale.data.dataset import Dataset
from jaxscale.errors import invalid
from jaxscale.files import read_json, replace_text
from jaxscale.owners import unsafe_owner

_READ = 1 << 25  # bytes of images per read
_SHAPE = {"mean": [float], "std": [float]}

Statistics = tuple[tuple[float, ...], tuple[float, ...]]


def kept_statistics(
  dataset: Dataset, images: Callable[[np.ndarray], np.ndarray], key: Any
) -> Statistics:
  """Return mean and standard deviation per channel, from the user's cache if they are there.

  Args:
    dataset: the dataset.
    images: a function of indices that returns the images [n, ..., channels] of those that
      can be read.
    key: all that decides the images besides the identity of the dataset, as JSON.

  Raises:
    ConfigError: there is no image, a value is NaN or infinite, or the cache cannot be
      written.
  """
  name, identity = dataset.info.name, dataset.identity
  if getattr(dataset.info, "image_shape", None) is None:
    raise invalid(f"{name}.statistics", True, "needs an array 'image'", "name one in columns")
  whole = json.dumps([identity() if callable(identity) else identity, key], sort_keys=True)
  path = user_cache() / "statistics" / f"{key_of(whole)}.json"

  def read() -> dict[str, Any] | None:
    is_safe = path.exists() and not unsafe_owner(path, group=False)
    return (read_json(path, _SHAPE) if is_safe else None) or None

  def make() -> dict[str, Any]:
    values = _statistics(dataset, images)
    replace_text(path, json.dumps(values))
    return values

  fix = "set XDG_CACHE_HOME to a directory with space, or give mean and std"
  work = f"computing mean and std of {name}"
  values = kept(path, read, make, f"{name}.statistics", work, fix)
  return tuple(values["mean"]), tuple(values["std"])


def _statistics(
  dataset: Dataset, images: Callable[[np.ndarray], np.ndarray]
) -> dict[str, list[float]]:
  """Compute both in float64, from deviations from the first images, whose sums stay small."""
  shape: Any = dataset.info.image_shape  # pyright: ignore[reportAttributeAccessIssue]
  rows = max(_READ // (4 * math.prod(shape)), 1)
  parts = [
    np.arange(a, min(a + rows, dataset.num_examples)) for a in range(0, dataset.num_examples, rows)
  ]

  def values(part: np.ndarray) -> np.ndarray:
    return images(part).reshape(-1, shape[-1] if shape else 1).astype(np.float64)

  shift = values(parts[0]).mean(0)

  def sums(part: np.ndarray) -> tuple[float, ...]:
    x = values(part) - shift
    if not np.isfinite(x).all():
      problem = f"has NaN or infinite values in examples {part[0]:,} to {part[-1]:,}"
      fix = "replace them, or give mean and std"
      raise invalid(f"{dataset.info.name}: image", ..., problem, fix)
    return len(x), *x.sum(0), *(x * x).sum(0)

  with ThreadPoolExecutor() as threads:
    columns = [*zip(*threads.map(sums, parts), strict=True)]
  count, *totals = map(math.fsum, columns)
  first, second = np.reshape(totals, (2, -1)) / count
  mean, std = shift + first, np.sqrt(second - first**2)
  return {"mean": mean.tolist(), "std": std.tolist()}
