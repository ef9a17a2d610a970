"""A directory of class subdirectories of image files, as clusters hold ImageNet."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxscale.config.validation import nearest
from jaxscale.data.augment import AugmentName, EvalView
from jaxscale.data.dataset import MAX_PIXELS, Dataset, names_identity
from jaxscale.data.encoded import Record, Source, from_source, image_info
from jaxscale.data.faults import raise_if_system_error
from jaxscale.errors import ConfigError
from jaxscale.metrics.text import few

# What a file may be called; what it is, its bytes say.
SUFFIXES = (".jpeg", ".jpg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm")


class Folder(NamedTuple):
  """The files in a directory of class subdirectories.

  Attributes:
    root: the directory.
    classes: names of the subdirectories with images, sorted.
    empty: names of those without.
    files: file names within their class, bytes [n]: by class, then by name.
    labels: int32 [n], index into `classes`.
  """

  root: str
  classes: tuple[str, ...]
  empty: tuple[str, ...]
  files: np.ndarray
  labels: np.ndarray


def image_folder(
  directory: str | os.PathLike[str],
  *,
  image_size: int,
  channels: int = 3,
  mean: tuple[float, ...] | None = None,
  std: tuple[float, ...] | None = None,
  augment: AugmentName = "none",
  cache: bool = False,
  eval_view: EvalView = "mlperf",
  max_pixels: int = MAX_PIXELS,
  classes: Sequence[str] | None = None,
) -> Dataset:
  """A dataset of class subdirectories of image files: DIRECTORY/CLASS/*.JPEG.

  Sorted by class, then by file name (by code point, whatever the locale), so the
  order is the same on every machine. Another `image_size` of the same directory
  costs nothing: the listing is kept until a subdirectory changes.

  Args:
    directory: with one subdirectory per class, e.g. "ILSVRC2012/train".
    image_size: height and width of the views.
    channels: 1 for grey, 3, or 4 with alpha: what every image is converted to.
    mean: per channel or one for all, of values from 0 to 255; None: ImageNet's of
      three channels, else 127.5.
    std: likewise.
    augment: what training draws change; see `config.TFDS`.
    cache: decode everything once, now, and keep it in memory.
    eval_view: "mlperf", "google" or a `CenterCrop`, see `jpeg.view`.
    max_pixels: larger images are not decoded, and count as damaged.
    classes: names in the order of their labels, e.g. those of another split;
      None: all subdirectories, sorted.

  Raises:
    ConfigError: no such directory, no images in it, or an unknown class.

  Example:
    >>> train = image_folder("train", image_size=224, augment="crop")  # doctest: +SKIP
    >>> train.num_examples  # doctest: +SKIP
    1281167
  """
  folder = listing(directory)
  names, labels = tuple(classes or folder.classes), folder.labels
  for name in folder.classes:
    if name not in names:
      raise ConfigError(
        f"{directory}/{name}: not a class that is trained on, {nearest(name, names)}; "
        "move it away, or add images of it to those"
      )
  labels = np.array([names.index(c) for c in folder.classes], np.int32)[labels]
  shape = (image_size, image_size, channels)
  info = image_info(str(directory), shape, len(names), mean, std)
  info = info._replace(class_names=names)
  source = _source(folder, labels)
  made = from_source(info, source, True, augment, cache, eval_view, max_pixels)
  lacking = [name for name in (classes or folder.empty) if name not in folder.classes]
  what = "never evaluated" if classes else "left out"
  note = f"{directory}: no image of class {few(lacking)}; "
  identity = functools.partial(_identity, folder, source)
  return made._replace(notes=(note + what,) if lacking else (), identity=identity)


def _identity(folder: Folder, source: Source) -> dict[str, Any]:
  """Names and sizes of the files, and how many each class has."""

  def size_of(index: int) -> int:
    try:
      return os.stat(os.path.join(folder.root, source.name(index))).st_size
    except OSError:  # a damaged example
      return -1

  counts = np.bincount(folder.labels).tolist()
  per_class = dict(zip(folder.classes, counts, strict=True))
  return {"classes": per_class} | names_identity(folder.files, size_of)


def folder_classes(directory: str | os.PathLike[str]) -> tuple[str, ...]:
  """The class names of a directory, in the order of their labels."""
  return listing(directory).classes


def listing(directory: str | os.PathLike[str]) -> Folder:
  """The images in a directory of class subdirectories.

  Raises:
    ConfigError: no such directory, or no images in subdirectories of it.
  """
  root = Path(directory)
  if not root.is_dir():
    raise ConfigError(
      f"{directory}: no such directory of images; give the one "
      "whose subdirectories are the classes, e.g. ILSVRC2012/train"
    )
  with os.scandir(root) as entries:
    classes = sorted(e.name for e in entries if e.is_dir() and e.name[0] != ".")
  changed = tuple(os.stat(root / name).st_mtime_ns for name in classes)
  folder = _listing(str(root.absolute()), tuple(classes), changed)
  if not len(folder.files):
    raise ConfigError(
      f"{directory}: no images in "
      f"{len(classes)} subdirectories; it takes CLASS/*.JPEG (or {' '.join(SUFFIXES)})"
    )
  return folder


@functools.lru_cache(maxsize=16)
def _listing(root: str, classes: tuple[str, ...], changed: tuple[int, ...]) -> Folder:
  del changed  # a file more or less changes it, and so what the cache finds

  def images(name: str) -> list[str]:
    with os.scandir(os.path.join(root, name)) as entries:
      found = [e.name for e in entries if e.name.lower().endswith(SUFFIXES)]
    return sorted(f for f in found if f[0] != ".")

  with ThreadPoolExecutor(16) as threads:  # they wait for the file system
    found = zip(classes, threads.map(images, classes), strict=True)
    kept = {name: files for name, files in found if files}  # no class without images
  names = np.array([os.fsencode(f) for files in kept.values() for f in files])
  labels = np.repeat(np.arange(len(kept), dtype=np.int32), [*map(len, kept.values())])
  empty = tuple(name for name in classes if name not in kept)
  return Folder(root, tuple(kept), empty, names, labels)


def _source(folder: Folder, labels: np.ndarray) -> Source:
  def name(index: int) -> str:
    file = os.fsdecode(bytes(folder.files[index]))
    return f"{folder.classes[folder.labels[index]]}/{file}"

  def read(indices: Sequence[int]) -> Iterator[Record | None]:
    for index in indices:
      path = os.path.join(folder.root, name(index))
      try:
        with open(path, "rb") as file:
          record = file.read(), int(labels[index])
      except OSError as e:  # missing, no file, or not allowed
        raise_if_system_error(e, path)
        record = None
      yield record

  jpeg = (".jpeg", ".jpg")
  return Source(len(folder.files), read, name, lambda i: name(i).lower().endswith(jpeg))
