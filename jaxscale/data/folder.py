"""Dataset of image files in one subdirectory per class, as clusters store ImageNet."""

from __future__ import annotations

import functools
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxscale.config.validation import nearest
from jaxscale.data.augment import AugmentName, EvalView
from jaxscale.data.dataset import MAX_PIXELS, Dataset, names_identity
from jaxscale.data.directory import is_folder, is_visible, kinds, left_out_note, tree
from jaxscale.data.encoded import Record, Source, from_source, image_info
from jaxscale.data.faults import raise_if_system_error
from jaxscale.errors import ConfigError, invalid
from jaxscale.files import open_regular, read_bytes
from jaxscale.metrics.text import few

# File name extensions; the content decides the format. A name may have no extension.
_JPEG = ".jpeg", ".jpg", ".jpe", ".jfif"
SUFFIXES = (*_JPEG, *".png .bmp .webp .gif .avif .tif .tiff .ppm .pgm .pbm .pnm".split())
# First bytes of the formats that `jpeg.decode` reads.
_MAGIC = re.compile(
  rb"\xff\xd8\xff|\x89PNG\r\n|GIF8|BM.{4}\0{4}|RIFF.{4}WEBP|II[*+]\0|MM\0[*+]"
  rb"|P[1-6]\s+[\d#]|.{4}ftypavif",
  re.DOTALL,
)
_TAKEN = f"images end in {' '.join(SUFFIXES)}, or have no ending"
_MOST_LISTINGS = 16


class Folder(NamedTuple):
  """Files in a directory of class subdirectories.

  Attributes:
    root: the directory.
    classes: the names of the subdirectories with images, sorted.
    empty: the names of the subdirectories without images.
    files: the paths within their class, bytes [n], by class, folder and name.
    labels: the index into `classes`, int32 [n].
    left_out: the number of skipped files by kind.
  """

  root: str
  classes: tuple[str, ...]
  empty: tuple[str, ...]
  files: np.ndarray
  labels: np.ndarray
  left_out: Counter[str]


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
  """Create a dataset from class subdirectories of image files: DIRECTORY/CLASS/**/*.JPEG.

  Files in nested folders of a class belong to it. The order is torchvision's, by class, folder
  and file name (by code point, in any locale), so it is the same on every machine. Hidden
  files are skipped; a note counts files with other extensions. The listing is cached until a
  subdirectory changes, so another `image_size` of the same directory costs nothing.

  Args:
    directory: the directory with one subdirectory per class, e.g. "ILSVRC2012/train".
    image_size: the height and width of the views.
    channels: the channels that every image is converted to: 1 for grey, 3, or 4 with alpha.
    mean: the mean per channel, or one for all, of values from 0 to 255; None uses ImageNet's
      for three channels and otherwise 127.5.
    std: the standard deviation, in the same form.
    augment: the augmentation in training; see `config.TFDS`.
    cache: True decodes all examples once, now, and keeps them in memory.
    eval_view: the view in evaluation: "mlperf" or a `CenterCrop`, see `jpeg.view`.
    max_pixels: the pixels above which an image counts as damaged and is not decoded.
    classes: the class names in the order of their labels, e.g. of another split; None uses
      all subdirectories, sorted.

  Raises:
    ConfigError: the directory does not exist, has no images, or has an unknown class.

  Example:
    >>> train = image_folder("train", image_size=224, augment="crop")  # doctest: +SKIP
    >>> train.num_examples  # doctest: +SKIP
    1281167
  """
  folder = listing(directory)
  names = tuple(classes or folder.classes)
  # macOS writes the same name with different code points than Linux.
  labels_of = {unicodedata.normalize("NFC", name): i for i, name in enumerate(names)}
  normal = [unicodedata.normalize("NFC", name) for name in folder.classes]
  for name, known in zip(folder.classes, normal, strict=True):
    if known not in labels_of:
      problem = f"not a class of the training data, {nearest(name, names)}"
      fix = "move it away, or move its images to the directories of their classes"
      raise ConfigError(f"{directory}/{name}: {problem}; {fix}")
  labels = np.array([labels_of[known] for known in normal], np.int32)[folder.labels]
  shape = (image_size, image_size, channels)
  info = image_info(str(directory), shape, len(names), mean, std)
  info = info._replace(class_names=names)
  source = _source(folder, labels, max_pixels)
  dataset = from_source(info, source, True, augment, cache, eval_view, max_pixels)
  lacking = [n for n in labels_of if n not in normal] if classes else folder.empty
  what = "never evaluated" if classes else "left out"
  note = f"{directory}: no image of class {few(lacking)}; "
  left_out = left_out_note(directory, folder.left_out, _TAKEN)
  notes = (note + what,) * bool(lacking) + left_out
  return dataset._replace(notes=notes, identity=functools.partial(_identity, folder, source))


def image_files(
  directory: str | os.PathLike[str], classes: Sequence[str] = ()
) -> tuple[Source, bool]:
  """Return the images in a directory and its subdirectories, whatever these mean.

  Args:
    directory: the directory.
    classes: the class names in the order of their labels.

  Returns:
    The images, named by their paths in the directory; and whether all of them are in
    subdirectories that are classes, which then are their labels.

  Raises:
    ConfigError: the directory has no images.
  """
  files, left_out, _ = _images(root := os.fspath(directory), "")
  if not files:
    raise invalid(root, ..., f"has no images{_others(left_out)}", f"note that {_TAKEN}")
  labels_of = {unicodedata.normalize("NFC", name): i for i, name in enumerate(classes)}
  tops = [unicodedata.normalize("NFC", f).rpartition("/")[0].partition("/")[0] for f in files]
  source = listed_files(files, root, [labels_of.get(top, 0) for top in tops])
  return source, {*tops} <= labels_of.keys()


def listed_files(
  paths: Sequence[str | os.PathLike[str]], root: str = "", labels: Sequence[int] | None = None
) -> Source:
  """Return image files as a source of examples, of class 0 without labels."""
  names = np.array([os.fsencode(path) for path in paths])
  numbers = np.array(labels or [0] * len(names), np.int32)
  return _source(Folder(root, ("",), (), names, np.zeros_like(numbers), Counter()), numbers)


def _identity(folder: Folder, source: Source) -> dict[str, Any]:
  """Return names, sizes and contents of the files, and the number of files per class."""

  def path_of(index: int) -> str:
    return os.path.join(folder.root, source.name(index))

  counts = np.bincount(folder.labels).tolist()
  per_class = dict(zip(folder.classes, counts, strict=True))
  return {"classes": per_class} | names_identity(folder.files, path_of)


def folder_classes(directory: str | os.PathLike[str]) -> tuple[str, ...]:
  """Return the class names of a directory, in the order of their labels."""
  return listing(directory).classes


def listing(directory: str | os.PathLike[str]) -> Folder:
  """List the images in a directory of class subdirectories.

  Raises:
    ConfigError: the directory does not exist, or has no images in subdirectories.
  """
  root = Path(directory)
  if not root.is_dir():
    fix = "use the directory whose subdirectories are the classes, e.g. ILSVRC2012/train"
    raise ConfigError(f"{directory}: no such directory; {fix}")
  folder = _kept_listing(str(root.absolute()))
  if not len(folder.files):
    count = len(folder.empty)
    problem = f"found no images in {count} subdirectories{_others(folder.left_out)}"
    fix = f"images must be at CLASS/**/*.JPEG (or {' '.join(SUFFIXES)})"
    raise ConfigError(f"{directory}: {problem}; {fix}")
  return folder


def _others(left_out: Counter[str]) -> str:
  return f" (other files: {few(f'{n:,} {kind}' for kind, n in left_out.items())})" * bool(left_out)


# By directory: the modification times of all its folders, and its content.
_listings: dict[str, tuple[dict[str, int], Folder]] = {}


def _kept_listing(root: str) -> Folder:
  """Return the listing of a directory, from the cache if no folder of it has changed."""
  folders, folder = _listings.get(root, ({}, None))
  try:
    if folder and all(os.stat(p).st_mtime_ns == t for p, t in folders.items()):
      return folder
  except OSError:  # A folder was deleted.
    pass
  if len(_listings) >= _MOST_LISTINGS:
    _listings.clear()
  folders, folder = _listings[root] = _listed(root)
  return folder


def _listed(root: str) -> tuple[dict[str, int], Folder]:
  folders, left_out = {root: os.stat(root).st_mtime_ns}, Counter()
  with os.scandir(root) as entries:
    shown = [(e.name, is_folder(e)) for e in entries if is_visible(e.name)]
  classes = sorted(name for name, is_folder in shown if is_folder)
  if outside := len(shown) - len(classes):
    left_out["outside of class directories"] = outside

  kept: dict[str, list[str]] = {}
  with ThreadPoolExecutor(16) as threads:  # The threads wait for the file system.
    listings = threads.map(functools.partial(_images, root), classes)
    for name, (files, others, times) in zip(classes, listings, strict=True):
      kept |= {name: files} if files else {}  # Leave out classes without images.
      left_out += others
      folders |= times
  _check_classes(root, kept)
  names = np.array([os.fsencode(f) for files in kept.values() for f in files])
  labels = np.repeat(np.arange(len(kept), dtype=np.int32), [*map(len, kept.values())])
  empty = tuple(name for name in classes if name not in kept)
  return folders, Folder(root, tuple(kept), empty, names, labels, left_out)


def _images(root: str, folder: str) -> tuple[list[str], Counter[str], dict[str, int]]:
  """Return the images below a folder, the other files by kind, and `Tree.folders`."""

  def is_named(name: str) -> bool:
    return name.lower().endswith(SUFFIXES)

  def is_image(path: str) -> bool:
    return is_named(path) or ("." not in os.path.basename(path) and _begins_as_image(path))

  listing = tree(os.path.join(root, folder), is_named)
  files = [f for f in listing.files if is_image(os.path.join(root, folder, f))]
  others = kinds(set(listing.files) - set(files)) if files != listing.files else Counter()
  return files, listing.left_out + others, listing.folders


def _begins_as_image(path: str) -> bool:
  try:
    with open_regular(path) as file:
      return _MAGIC.match(file.read(32)) is not None
  except OSError:
    return False


def _check_classes(root: str, kept: dict[str, list[str]]) -> None:
  """Check that subdirectories are plausible classes."""
  same: dict[str, str] = {}
  for name in kept:
    if (other := same.setdefault(unicodedata.normalize("NFC", name), name)) != name:
      problem = f"has the same name as {other!a} in a different Unicode form ({name!a})"
      raise invalid(f"{root}/{name}", ..., problem, "merge the two directories")
  inner = {f.partition("/")[0] for files in kept.values() for f in files if "/" in f}
  if len(kept) == 1 and len(inner) > 1:
    ((name, files),) = kept.items()
    if all("/" in file for file in files):
      where = f"are all in subdirectories of it ({few(sorted(inner))})"
      fix = f"use {root}/{name} if those are the classes"
      raise invalid(root, ..., f"has only the class {name}, whose images {where}", fix)


def _source(folder: Folder, labels: np.ndarray, max_pixels: int = MAX_PIXELS) -> Source:
  def name(index: int) -> str:
    file = os.fsdecode(bytes(folder.files[index]))
    return os.path.join(folder.classes[folder.labels[index]], file)

  def read(indices: Sequence[int]) -> Iterator[Record | None]:
    for index in indices:
      path = os.path.join(folder.root, name(index))
      try:
        # Files without compression have 3 bytes per pixel, or 4 with alpha.
        record = read_bytes(Path(path), most=4 * max_pixels), int(labels[index])
      except OSError as e:  # It is missing, not a file, or not readable.
        raise_if_system_error(e, path)
        record = None
      yield record

  return Source(len(folder.files), read, name, lambda i: name(i).lower().endswith(_JPEG))
