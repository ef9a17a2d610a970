"""Open `grain.MapDataset`s: pipelines of Grain with an index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxscale.data.tables import Table, chosen_names, spread_identity
from jaxscale.errors import invalid


def open_grain(dataset: Any, names: Sequence[str] | None) -> Table:
  """Open a dataset whose elements are dicts of arrays, pairs ("x" and "y") or arrays ("x").

  Args:
    dataset: the dataset, or a function that returns it.
    names: the arrays to use; None uses all.

  Raises:
    ConfigError: it is something else, is endless or has no elements.
  """
  import grain

  if callable(dataset) and not isinstance(dataset, grain.MapDataset):
    dataset = dataset()
  if not isinstance(dataset, grain.MapDataset):
    fix = "give a grain.MapDataset, or a function that returns one (before to_iter_dataset)"
    raise invalid("dataset", type(dataset).__name__, "has no index", fix)
  count = len(dataset)
  if not 0 < count < 1 << 48:
    raise invalid("dataset", ..., f"has {count:,} elements", "leave out repeat()")

  def example(row: int) -> Mapping[str, Any]:
    element = dataset[row]
    if element is None:
      raise invalid("dataset", ..., f"has no element {row:,}", "filter it before Grain")
    if isinstance(element, Mapping):
      return element
    return dict(zip("xy", element if isinstance(element, tuple) else (element,), strict=False))

  first = {name: np.asarray(value) for name, value in example(0).items()}
  specs = {name: (array.shape, str(array.dtype)) for name, array in first.items()}
  names = chosen_names("the dataset", names, specs)

  def read(rows: np.ndarray) -> dict[str, np.ndarray]:
    examples = [example(row) for row in rows.tolist()]
    return {name: np.stack([np.asarray(x[name]) for x in examples]) for name in names}

  table = Table("Grain", {name: specs[name] for name in names}, np.arange(count + 1), read, dict)
  return table._replace(identity=lambda: spread_identity(table), is_selective=False)
