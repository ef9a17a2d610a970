"""Input pipelines of data_input.py by torch's DataLoader.

The classes are on top of a module, so that worker processes that are spawned can load them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch.utils.data as td  # pyright: ignore[reportMissingImports]
from data_input_sides import (
  SIZE,
  ArrowRows,
  Batches,
  ParquetGroups,
  Windows,
  ZarrRows,
  batch_size,
  mixed_rows,
)


class Mixed(td.IterableDataset):
  """Rows of chunks; each worker reads a part of the chunks."""

  def __init__(self, source: Any):
    self.source = source

  def __iter__(self) -> Batches:
    """Yield rows without end."""
    info = td.get_worker_info()
    return mixed_rows(self.source, 0, *((info.id, info.num_workers) if info else (0, 1)))


def batches(workload: str, folder: Path, workers: int) -> Batches:
  """Yield batches as NumPy arrays."""
  source = _source(workload, folder)
  options: dict[str, Any] = {"batch_size": batch_size(workload), "num_workers": workers}
  if workers:
    # Tensorstore's threads do not survive a fork.
    context = "spawn" if workload.startswith("zarr") else "fork"
    options |= {"persistent_workers": True, "multiprocessing_context": context}
  if not isinstance(source, Mixed):
    options |= {"shuffle": True, "drop_last": True}
  loader = td.DataLoader(source, **options)
  while True:
    for batch in loader:
      pairs = (
        batch.items() if isinstance(batch, dict) else zip(("image", "label"), batch, strict=True)
      )
      yield {name: x.numpy() for name, x in pairs}


def _source(workload: str, folder: Path) -> Any:
  kind, _, order = workload.partition("_")
  if kind == "images":
    from torchvision import datasets  # pyright: ignore[reportMissingImports]
    from torchvision.transforms import v2  # pyright: ignore[reportMissingImports]

    steps = [v2.RandomResizedCrop(SIZE), v2.RandomHorizontalFlip(), np.asarray]
    return datasets.ImageFolder(folder / "images", v2.Compose(steps))
  if kind == "tokens":
    return Windows(folder)
  if order == "examples":
    return ZarrRows(folder / "rows.zarr") if kind == "zarr" else ArrowRows(folder)
  return Mixed(ZarrRows(folder / "rows.zarr") if kind == "zarr" else ParquetGroups(folder))
