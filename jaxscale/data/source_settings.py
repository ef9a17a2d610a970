"""Settings of tables: zarr, Parquet, HDF5, NumPy, Hugging Face, Grain. Imports no JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from jaxscale import data
from jaxscale.config.bases import Data
from jaxscale.config.bounds import Positive
from jaxscale.errors import ConfigError

__all__ = ["HDF5", "Grain", "HuggingFace", "Numpy", "Parquet", "Zarr"]


class _Table(Data):
  """Rows by index of named variables.

  Attributes:
    columns: the variable of each array of a batch, e.g. {"image": "temperature", "label":
      "target"}; several variables, as in {"image": ("u", "v")}, are stacked as channels, and
      one in a tuple gets a dimension of one channel. None takes all variables that are numbers,
      with "x" as the image and "y" as the label.
    transform: a function of an example (a dict of arrays) and of its random generator, which
      is None in validation, that returns the example to train on, or None if it is damaged.
    eval_share: the fraction of the rows, the last ones, that is used for validation if there
      is no source for validation.
    shuffle: the order of training; "examples" shuffles all rows, "chunks" shuffles the chunks,
      and the rows of 8 chunks at a time, which reads compressed data once per epoch.
    num_classes: the number of classes or outputs; None reads it from the labels.
    mean: the mean to subtract from the images, one value or one per channel.
    std: the standard deviation to divide the images by, one value or one per channel.
    statistics: whether mean and std are computed per channel of the training images, once, and
      kept in ~/.cache/jaxscale/statistics.
  """

  columns: dict | None = None
  transform: Callable[..., Any] | None = None
  eval_share: Annotated[float, "in (0, 1)"] = 0.1
  shuffle: Literal["examples", "chunks"] = "examples"
  num_classes: Annotated[int | None, ">= 1"] = None
  mean: tuple[float, ...] = (0.0,)
  std: tuple[float, ...] = (1.0,)
  statistics: bool = False

  def __post_init__(self):
    kind = type(self).__name__
    if self.statistics and (*self.mean, *self.std) != (0.0, 1.0):
      raise ConfigError(f"{kind}.statistics=True: computes mean and std, so leave both out")
    for name, variables in (self.columns or {}).items():
      listed = [variables] if isinstance(variables, str) else variables
      is_valid = isinstance(listed, list | tuple) and listed and isinstance(name, str)
      if not (is_valid and all(isinstance(v, str) for v in listed)):
        problem = f"{name!r}: {variables!r} is not the name of a variable, or a tuple of names"
        raise ConfigError(f"{kind}.columns: {problem}; give e.g. {{'image': 'temperature'}}")

  def build(self) -> tuple[data.Dataset, data.Dataset]:
    """Return the datasets for training and validation."""
    from jaxscale.data.table_splits import table_splits

    openers = [partial(self._open, x) for x in self._sources() if x is not None]
    return table_splits(openers, self._rules())

  def abstract(self, batch_size: int) -> tuple[data.Dataset, data.Dataset]:
    """Return the datasets for `jaxscale plan`, without statistics, which read all rows."""
    return dataclasses.replace(self, statistics=False).build()

  def of_path(self, path: str, optional: Iterable[str]) -> data.Dataset:
    """Return the rows of another path, without the `optional` arrays that it lacks."""
    from jaxscale.data.table_splits import whole_table

    return whole_table(partial(self._open, path), self._rules(), optional)

  def _rules(self) -> Any:
    from jaxscale.data.columns import Columns

    return Columns(type(self).__name__, *(getattr(self, name) for name in Columns._fields[1:]))

  def _open(self, source: Any, names: Sequence[str] | None) -> Any:
    raise NotImplementedError

  def _sources(self: Any) -> tuple[Any, Any]:
    return self.path, self.eval_path


class _Files(_Table):
  """Rows in files.

  Attributes:
    path: the file or folder with the training rows, or a pattern of several, such as
      "data/train-*"; files follow each other in the order of their names.
    eval_path: the file, folder or pattern with the validation rows; None uses the last
      `eval_share` of `path`.
  """

  path: str
  eval_path: str | None = None


class _Chunks(_Files):
  """Rows in compressed chunks.

  Attributes:
    cache_gb: the memory in GB for decoded chunks, per process and source.
  """

  cache_gb: Positive = 1.0

  @property
  def _cache_bytes(self) -> int:
    return round(self.cache_gb * 1e9)


class Zarr(_Chunks):
  """Zarr stores, version 2 or 3: an array, or a group whose arrays are the variables."""

  def _open(self, source: Any, names: Sequence[str] | None) -> Any:
    from jaxscale.data.array_files import open_zarr

    return open_zarr(source, names, self._cache_bytes)


class Parquet(_Chunks):
  """Parquet files, or Arrow IPC (Feather) files, whose columns are the variables.

  Lists of one length become arrays; other values, such as encoded images, need `transform`.
  """

  def _open(self, source: Any, names: Sequence[str] | None) -> Any:
    from jaxscale.data.arrow_files import SUFFIXES, open_arrow
    from jaxscale.data.directory import matching_paths

    return open_arrow(source, matching_paths(source, SUFFIXES), names, self._cache_bytes)


class HDF5(_Chunks):
  """HDF5 or netCDF4 files, whose datasets are the variables; needs jaxscale[science].

  A path may end in a group of the file, as in "data.h5::train".
  """

  def _open(self, source: Any, names: Sequence[str] | None) -> Any:
    from jaxscale.data.array_files import open_hdf5

    return open_hdf5(source, names, self._cache_bytes)


class Numpy(_Files):
  """NumPy files: a .npy file (variable "x"), an .npz file, or a folder of .npy files by name."""

  def _open(self, source: Any, names: Sequence[str] | None) -> Any:
    from jaxscale.data.array_files import open_numpy

    return open_numpy(source, names)


class HuggingFace(_Table):
  """Dataset of Hugging Face's `datasets`; nothing is downloaded.

  Attributes:
    dataset: the training rows: a `datasets.Dataset`, or the folder that its `save_to_disk`
      wrote (of one split), which is read without the package.
    eval_dataset: the validation rows; None uses the last `eval_share` of `dataset`.
  """

  dataset: Any
  eval_dataset: Any = None

  def _sources(self) -> tuple[Any, Any]:
    return self.dataset, self.eval_dataset

  def _open(self, source: Any, names: Sequence[str] | None) -> Any:
    from jaxscale.data.arrow_files import open_hugging_face

    return open_hugging_face(source, names)


class Grain(_Table):
  """Pipeline of Grain: a `grain.MapDataset` of dicts, of pairs (x, y) or of arrays (x).

  Random transforms of the pipeline repeat in each epoch; `transform` has new draws.

  Attributes:
    dataset: the training examples, or a function that returns them.
    eval_dataset: the validation examples, or a function; None uses the last `eval_share`.
    identity: a name that you choose for the pipeline, which a resumed run compares; None needs
      a function as `dataset`, whose source is compared.
  """

  dataset: Any
  eval_dataset: Any = None
  identity: str | None = None

  def _sources(self) -> tuple[Any, Any]:
    return self.dataset, self.eval_dataset

  def _open(self, source: Any, names: Sequence[str] | None) -> Any:
    from jaxscale.data.grain_data import open_grain

    return open_grain(source, names)
