"""Datasets of new inputs for a trained model: arrays, image files, and paths of them."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxscale import data
from jaxscale.config import Config
from jaxscale.config.record import MissingData
from jaxscale.data.arrays import cast
from jaxscale.data.encoded import Source, from_source
from jaxscale.data.folder import SUFFIXES, image_files, listed_files
from jaxscale.data.npy_files import StoredArray, arrays_of
from jaxscale.errors import ConfigError, invalid
from jaxscale.files import expand
from jaxscale.metrics.text import listed

_FORMATS = ".npy", ".npz", *SUFFIXES  # of any run
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


def of_inputs(config: Config, info: Any, inputs: Any) -> data.Dataset:
  """Return the dataset of the arguments of `Trained.predict`.

  Raises:
    ConfigError: the inputs do not fit the model.
  """
  if isinstance(inputs, str | os.PathLike):
    return of_path(config, info, Path(expand(inputs)))[0]
  if hasattr(inputs, "convert"):
    raise invalid("inputs", ..., "is a single image", "give [image]")
  items = inputs if isinstance(inputs, list | tuple) else ()
  if items and all(isinstance(x, str | os.PathLike) for x in items):
    for missing in [x for x in items if not os.path.isfile(x)]:
      raise invalid("inputs", str(missing), "is no such file", "correct the path")
    return _of_images(config, info, listed_files(items))
  if items and all(hasattr(x, "convert") for x in items):
    return _of_images(config, info, _pictures(items, info))
  return _of_arrays(info, inputs if isinstance(inputs, Mapping) else {_input(info): inputs})


def of_path(config: Config, info: Any, path: Path) -> tuple[data.Dataset, bool]:
  """Return the dataset of a path of the run's format, or of images, or a .npy or .npz file.

  Returns:
    The dataset, and whether it has targets: classes of subdirectories, or an array.

  Raises:
    ConfigError: the path has no inputs for the model.
  """
  try:
    return _of_files(config, info, path)
  except ConfigError as e:
    # The path may have the run's own format.
    if isinstance(config.data, MissingData) and path.suffix.lower() not in _FORMATS:
      raise ConfigError(f"{e}; {config.data.reason}") from None
    raise


def _of_files(config: Config, info: Any, path: Path) -> tuple[data.Dataset, bool]:
  is_array, is_image = path.suffix in (".npy", ".npz"), path.suffix.lower() in SUFFIXES
  is_table = isinstance(config.data, data.Numpy) or not (is_array or is_image)
  if is_table and (of_path := getattr(config.data, "of_path", None)):  # For example zarr.
    return _of_table(info, of_path(str(path), data.batch_shapes(info, 1).keys() - {_input(info)}))
  if path.is_dir():
    source, has_classes = image_files(path, getattr(info, "class_names", ()))
    return _of_images(config, info, source), has_classes
  if path.is_file() and is_image:
    return _of_images(config, info, listed_files([path])), False
  if not path.is_file() or not is_array:
    fix = "give a folder of images, an image, or arrays in a .npy or .npz file"
    problem = "is of no known kind" if path.exists() else "is no such file"
    raise invalid(str(path), ..., problem, fix)
  try:
    named: Any = arrays_of(path)
  except Exception as e:  # NumPy and zipfile raise any for damaged bytes.
    raise invalid(str(path), ..., f"cannot be read ({e})", "write it again") from None
  names = {"x": _input(info), "y": "targets" if isinstance(info, data.TextInfo) else "label"}
  named = {names.get(name, name): array for name, array in named.items()}
  return _of_arrays(info, named), data.batch_shapes(info, 1).keys() <= named.keys()


def _of_table(info: Any, table: data.Dataset) -> tuple[data.Dataset, bool]:
  """Check the rows of a table; return them, and whether they have targets."""
  known, arrays = (data.batch_shapes(x, 1) for x in (info, table.info))
  for name, spec in arrays.items():
    if spec != known.get(name):
      problem = f"has {name!r} of {spec[0][1:]}, {spec[1]}"
      raise invalid("--data", table.info.name, problem, f"the model takes {known.get(name)}")
  return table, known.keys() <= arrays.keys()


def _input(info: Any) -> str:
  return "tokens" if isinstance(info, data.TextInfo) else "image"


def _of_arrays(info: Any, values: Mapping[str, Any]) -> data.Dataset:
  """Return a dataset of named arrays [n, ...]; text may have any length."""
  known, arrays = data.batch_shapes(info, 1), {}
  for name, value in values.items():
    if name not in known:
      raise invalid(f"inputs[{name!r}]", ..., "is unknown", f"give {listed(known, 'or')}")
    (_, *shape), dtype = known[name]
    array = arrays[name] = value if isinstance(value, StoredArray) else np.asarray(value)
    is_alike = array.shape[1:] == tuple(shape) or isinstance(info, data.TextInfo)
    is_alike &= array.ndim == len(shape) + 1 and array.dtype.kind in "uifb"
    if not (is_alike and array.size):
      problem, sizes = f"is {array.dtype}{[*array.shape]}", ", ".join(["n", *map(str, shape)])
      raise invalid(f"inputs[{name!r}]", ..., problem, f"the model takes {dtype}[{sizes}]")
  if _input(info) in known and _input(info) not in arrays:
    raise invalid("inputs", [*arrays], f"lack {_input(info)!r}", "give it as well")
  if len(counts := {len(array) for array in arrays.values()}) != 1:
    raise invalid("inputs", sorted(counts), "are different lengths", "give a row per example")

  def load(indices: np.ndarray, draws: Any) -> data.dataset.Batch:
    del draws
    return {n: cast(f"inputs[{n!r}]", x[indices], known[n][1]) for n, x in arrays.items()}

  return data.Dataset(info, counts.pop(), load)


def _of_images(config: Config, info: Any, source: Source) -> data.Dataset:
  """Return a dataset of encoded images, in the run's view for validation."""
  shape = getattr(info, "image_shape", None) or ()
  if len(shape) != 3 or shape[-1] not in _MODES or info.dtype != "uint8":
    raise ConfigError(f"the run's model takes no images but {info.name}; give arrays of these")
  if of_source := getattr(config.data, "of_source", None):
    return of_source(info, source)
  return from_source(info, source, False, "none", False, "mlperf")


def _pictures(pictures: Sequence[Any], info: Any) -> Source:
  """Return pictures of Pillow as encoded images."""
  reading = threading.Lock()

  def content(index: int) -> tuple[bytes, int]:
    picture, file = pictures[index], io.BytesIO()
    with reading:  # Padding repeats a picture, which another thread may be reading from its file.
      picture.load()
    if picture.mode not in ("1", "L", "LA", "I", "I;16", "P", "RGB", "RGBA"):  # PNG's
      picture = picture.convert(_MODES[info.image_shape[-1]])
    picture.save(file, "PNG", compress_level=1)
    return file.getvalue(), 0

  return Source(len(pictures), lambda indices: map(content, indices), str, lambda index: False)
