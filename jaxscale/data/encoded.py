"""Dataset of encoded images: views, augmentation, and damaged examples.

`from_source` creates a `Dataset` from any `Source` of encoded images, such as the files of
folder.py or the records of tfds.py.

A damaged example never stops a run. In training, the next readable one replaces it (index + 1,
wrapping around), which depends only on the files, so hosts and restarts agree. In validation
it stays, as a black image of class -1 that no model can get right: the score covers all
examples, and can only be too low. `Dataset.damaged` counts both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from jaxscale.data.arrays import check_scaling, from_arrays
from jaxscale.data.augment import NUM_DRAWS, Augment, AugmentName, EvalView, augment_of
from jaxscale.data.dataset import MAX_PIXELS, NO_CLASS, Batch, DamagedExamples, Dataset, DatasetInfo
from jaxscale.data.faults import next_readable
from jaxscale.errors import ConfigError
from jaxscale.files import refuse_pointer

# Mean and standard deviation per channel of ImageNet's training images, as in published recipes.
IMAGENET_MEAN = (123.675, 116.28, 103.53)
IMAGENET_STD = (58.395, 57.12, 57.375)

Record = tuple[bytes, int]  # an encoded image and its class


class Source(NamedTuple):
  """Encoded examples by index, in any storage.

  Attributes:
    num_examples: the number of examples.
    read: a function of indices that returns a Record for each, or None if it cannot be
      read. It should be lazy where possible, so that bytes are decoded while they are in the
      processor's cache. Any thread may call it.
    name: a function of the index that returns the example's name for messages.
    is_jpeg: a function of the index that returns whether the example should be a JPEG by
      its name or feature.
  """

  num_examples: int
  read: Callable[[Sequence[int]], Iterable[Record | None]]
  name: Callable[[int], str]
  is_jpeg: Callable[[int], bool]


def image_info(
  name: str,
  shape: tuple[int, int, int],
  num_classes: int,
  mean: tuple[float, ...] | None = None,
  std: tuple[float, ...] | None = None,
) -> DatasetInfo:
  """Describe images of values 0 to 255; mean and std default to ImageNet's for 3 channels.

  Images with other numbers of channels are scaled to -1 … 1 by default.

  Raises:
    ConfigError: mean or std has neither one value nor one per channel.
  """
  channels = shape[-1]
  mean = mean or (IMAGENET_MEAN if channels == 3 else (127.5,))
  std = std or (IMAGENET_STD if channels == 3 else (127.5,))
  check_scaling("", mean, std, channels)
  return DatasetInfo(name, shape, num_classes, tuple(mean), tuple(std))


def from_source(
  info: DatasetInfo,
  source: Source,
  resized: bool,
  augment: AugmentName,
  cache: bool,
  eval_view: EvalView,
  max_pixels: int = MAX_PIXELS,
) -> Dataset:
  """Create a dataset of encoded images.

  Args:
    info: the description of the loaded images, see `image_info`; 1, 3 or 4 channels.
    source: the encoded images.
    resized: True to cut views of `info.image_shape`; False if images have that shape.
    augment: the augmentation of decoded images in training.
    cache: True decodes all examples once, now, and keeps them in memory.
    eval_view: the view in evaluation, see `jpeg.view`.
    max_pixels: the pixels above which an image counts as damaged and is not decoded.

  Raises:
    ConfigError: there is no example, or with `cache` no readable one.

  Example:
    >>> import io
    >>> from PIL import Image
    >>> Image.new("RGB", (8, 8)).save(file := io.BytesIO(), "PNG")
    >>> records = [(file.getvalue(), 0), (file.getvalue(), 1)]
    >>> read = lambda indices: (records[i] for i in indices)
    >>> source = Source(2, read, name=str, is_jpeg=lambda index: False)
    >>> info = image_info("squares", (8, 8, 3), num_classes=2)
    >>> dataset = from_source(info, source, False, "flip", False, "mlperf")
    >>> dataset = dataset._replace(identity="squares, version 1")  # compared on resume
    >>> dataset.load(np.arange(2), None)["image"].shape
    (2, 8, 8, 3)
  """
  from jaxscale.data import jpeg  # noqa: F401  Here a missing package ends a run, not in a step.

  if not source.num_examples:
    raise ConfigError(f"{info.name}: has no examples; check the path and the split")
  assert info.image_shape is not None, "encoded examples are images"
  crop, damaged = augment == "crop", DamagedExamples()
  in_arrays = augment_of(augment, info.image_shape[0])
  loader = _Loader(info, source, damaged, resized, crop, eval_view, in_arrays, max_pixels)
  load = loader.cached() if cache else loader.load
  num_draws = NUM_DRAWS if crop else in_arrays.num_draws if in_arrays else 0
  return Dataset(info, source.num_examples, load, num_draws, damaged, name=source.name)


class _Loader(NamedTuple):
  """Loader of batches from stored examples."""

  info: DatasetInfo
  source: Source
  damaged: DamagedExamples
  resized: bool
  crop: bool
  eval_view: EvalView
  in_arrays: Augment | None  # for decoded images; crops happen during decoding
  max_pixels: int

  def load(self, indices: np.ndarray, draws: np.ndarray | None) -> Batch:
    images = np.empty((len(indices), *(self.info.image_shape or ())), np.uint8)
    labels = np.empty(len(indices), np.int32)
    numbers = [int(i) for i in indices]
    for i, record in enumerate(self.source.read(numbers)):
      at, drawn = (numbers[i], images[i]), None if draws is None else draws[i]
      if (label := self._read(record, drawn, *at)) is None:
        images[i] = 0
        label = NO_CLASS if draws is None else self._replacement(drawn, *at)
      labels[i] = label
    if self.in_arrays is not None and draws is not None:
      images = self.in_arrays.apply(images, draws)
    return {"image": images, "label": labels}

  def _read(
    self, record: Record | None, draws: np.ndarray | None, index: int, out: np.ndarray
  ) -> int | None:
    """Write the view of one example to `out`; return its label, or None if it is damaged."""
    if record is not None:
      refuse_pointer(f"{self.info.name}/{self.source.name(index)}", record[0])
    try:
      label, kind = self._decode(record, draws, out)
    except ValueError:
      self.damaged.add(index, self.source.name(index))
      return None
    if kind == "CMYK" or " " in kind:  # For example "odd JPEG" or "16-bit PNG".
      self.damaged.add_unusual(index, kind)
    elif kind != "JPEG" and self.source.is_jpeg(index):
      self.damaged.add_unusual(index, f"{kind} named JPEG")
    return label

  def _decode(
    self, record: Record | None, draws: np.ndarray | None, out: np.ndarray
  ) -> tuple[int, str]:
    """Write the view of one example to `out`; return its label and format, or raise ValueError."""
    from jaxscale.data import jpeg  # OpenCV is imported only where images are decoded.

    if record is None:
      raise ValueError("missing or unreadable")
    (data, label), (size, _, channels) = record, out.shape
    drawn, most = draws if self.crop else None, self.max_pixels
    if self.resized:
      seen = self.eval_view
      image, kind = jpeg.decode_view(data, size, channels, drawn, seen, max_pixels=most)
    else:
      image, kind = jpeg.decode(data, channels, exact=drawn is None, max_pixels=most)
    if image.shape != out.shape:
      raise ValueError(f"an image of shape {image.shape}, not {out.shape}")
    out[:] = image
    return label, kind

  def _replacement(self, draws: np.ndarray | None, index: int, out: np.ndarray) -> int:
    """Write the next readable example after a damaged one to `out`; return its label."""
    source = self.source

    def read(other: int) -> int | None:
      return self._read(next(iter(source.read([other]))), draws, other, out)

    def first() -> str:
      error = "another attempt could read it"
      try:
        self._decode(next(iter(source.read([index]))), draws, out)
      except ValueError as e:
        error = str(e)
      return f"{source.name(index)} ({error})"

    count = source.num_examples
    return next_readable(self.info.name, index, count, read, lambda i: i + 1, first)

  def cached(self) -> Callable[[np.ndarray, np.ndarray | None], Batch]:
    """Return a `load` from memory, after decoding every example once."""
    every = np.arange(self.source.num_examples)
    with ThreadPoolExecutor() as threads:
      chunks = np.array_split(every, -(-len(every) // 2048))
      parts = list(threads.map(lambda chunk: self.load(chunk, None), chunks))
    whole = {k: np.concatenate([part[k] for part in parts]) for k in ("image", "label")}
    decoded = from_arrays(self.info, whole["image"], whole["label"], self.in_arrays)
    readable = np.setdiff1d(every, self.damaged.indices)
    if not len(readable):
      raise ConfigError(f"{self.info.name}: none of {len(every)} examples is readable; check them")
    # The index of the example itself, or of the next readable one.
    in_training = readable[np.searchsorted(readable, every) % len(readable)]

    def load(indices: np.ndarray, draws: np.ndarray | None) -> Batch:
      return decoded.load(indices if draws is None else in_training[indices], draws)

    return load
