"""Encoded images as a dataset: views, augmentation, and damaged examples.

`from_source` makes a `Dataset` of any `Source` of encoded images, such as the files of
folder.py and the records of tfds.py: images of another kind start here.

A damaged example never stops a run. In training the next readable one takes its
place (index + 1, wrapping around), which depends on nothing but the files, so
hosts and restarts agree. A held-out one keeps its place, as a black image of
class -1 that no model can get right: the score stays that of all examples, and
can only be too low. `Dataset.damaged` counts both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from jaxscale.data.arrays import check_scaling, from_arrays
from jaxscale.data.augment import NUM_DRAWS, Augment, AugmentName, EvalView, augment_of
from jaxscale.data.dataset import MAX_PIXELS, NO_CLASS, Batch, DamagedExamples, Dataset, DatasetInfo
from jaxscale.errors import ConfigError
from jaxscale.files import refuse_pointer

# Per channel, over the training images of ImageNet, as every published recipe.
IMAGENET_MEAN = (123.675, 116.28, 103.53)
IMAGENET_STD = (58.395, 57.12, 57.375)

_MAX_UNREADABLE = 1000  # so many unreadable examples in a row are not an accident


Record = tuple[bytes, int]  # an example as it is stored: an encoded image, its class


class Source(NamedTuple):
  """Encoded examples by index, whatever they are stored in.

  Attributes:
    num_examples: how many.
    read: indices -> a Record for each, or None where it cannot be read; lazily
      where that costs nothing, so that bytes are decoded while in the processor's
      cache. Any thread may call it.
    name: index -> the example's name in messages.
    is_jpeg: index -> whether its name or feature says that it is a JPEG.
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
  """Of images from 0 to 255; mean and std by default: ImageNet's of three channels.

  Images of other channels are scaled to -1 … 1 by default.

  Raises:
    ConfigError: as many means or deviations as channels are needed, or one for all.
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
  """A dataset of encoded images, wherever they are stored.

  Args:
    info: of the images as they are loaded, see `image_info`; 1, 3 or 4 channels.
    source: the encoded images.
    resized: views of `info.image_shape` are cut; False: images have that shape.
    augment: what training draws change.
    cache: decode everything once, now, and keep it in memory.
    eval_view: what evaluation sees, see `jpeg.view`.
    max_pixels: larger images are not decoded, and count as damaged.

  Raises:
    ConfigError: there is no example, or with `cache` no readable one.
  """
  if not source.num_examples:
    raise ConfigError(f"{info.name}: there is no example in it")
  crop, damaged = augment == "crop", DamagedExamples()
  in_arrays = augment_of(augment, info.image_shape[0])
  loader = _Loader(info, source, damaged, resized, crop, eval_view, in_arrays, max_pixels)
  load = loader.cached() if cache else loader.load
  num_draws = NUM_DRAWS if crop else in_arrays.num_draws if in_arrays else 0
  return Dataset(info, source.num_examples, load, num_draws, damaged)


class _Loader(NamedTuple):
  """Turns stored examples into batches."""

  info: DatasetInfo
  source: Source
  damaged: DamagedExamples
  resized: bool
  crop: bool
  eval_view: EvalView
  in_arrays: Augment | None  # done to decoded images; crops are cut while decoding
  max_pixels: int

  def load(self, indices: np.ndarray, draws: np.ndarray | None) -> Batch:
    images = np.empty((len(indices), *self.info.image_shape), np.uint8)
    labels = np.empty(len(indices), np.int32)
    wanted = [int(i) for i in indices]
    for i, record in enumerate(self.source.read(wanted)):
      at, drawn = (wanted[i], images[i]), None if draws is None else draws[i]
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
    """Put the view of one example into `out`: its label, or None if it is damaged."""
    if record is not None:
      refuse_pointer(f"{self.info.name}/{self.source.name(index)}", record[0])
    try:
      label, kind = self._decode(record, draws, out)
    except ValueError:
      self.damaged.add(index, self.source.name(index))
      return None
    if kind == "CMYK" or " " in kind:  # "odd JPEG", "16-bit PNG"
      self.damaged.add_unusual(index, kind)
    elif kind != "JPEG" and self.source.is_jpeg(index):
      self.damaged.add_unusual(index, f"{kind} named JPEG")
    return label

  def _decode(
    self, record: Record | None, draws: np.ndarray | None, out: np.ndarray
  ) -> tuple[int, str]:
    """Put the view of one example into `out`: its label and format, or ValueError."""
    from jaxscale.data import jpeg  # OpenCV loads only where images are decoded

    if record is None:
      raise ValueError("missing, or not to be read")
    (data, label), (size, _, channels) = record, out.shape
    drawn, most = draws if self.crop else None, self.max_pixels
    if self.resized:
      seen = self.eval_view
      found = jpeg.decode_view(data, size, channels, drawn, seen, out, max_pixels=most)
      return label, found[1]
    image, kind = jpeg.decode(data, channels, exact=drawn is None, max_pixels=most)
    if image.shape != out.shape:
      raise ValueError(f"an image of shape {image.shape}")
    out[:] = image
    return label, kind

  def _replacement(self, draws: np.ndarray | None, index: int, out: np.ndarray) -> int:
    """Put the next readable example after a damaged one into `out`: its label."""
    source = self.source
    tries = min(source.num_examples - 1, _MAX_UNREADABLE)
    for other in range(index + 1, index + 1 + tries):
      other %= source.num_examples
      record = next(iter(source.read([other])))
      if (label := self._read(record, draws, other, out)) is not None:
        return label
    why = "it was read at last"
    try:
      self._decode(next(iter(source.read([index]))), draws, out)
    except ValueError as e:
      why = str(e)
    reason = f"the first is {source.name(index)} ({why}); copy them again, or check --config.data"
    raise ConfigError(f"{self.info.name}: {tries + 1} examples in a row cannot be read, {reason}")

  def cached(self) -> Callable[[np.ndarray, np.ndarray | None], Batch]:
    """`load` out of memory: every example is decoded once, now."""
    every = np.arange(self.source.num_examples)
    with ThreadPoolExecutor() as threads:
      chunks = np.array_split(every, -(-len(every) // 2048))
      parts = list(threads.map(lambda chunk: self.load(chunk, None), chunks))
    whole = {k: np.concatenate([part[k] for part in parts]) for k in ("image", "label")}
    decoded = from_arrays(self.info, whole["image"], whole["label"], self.in_arrays)
    readable = np.setdiff1d(every, self.damaged.indices)
    if not len(readable):
      raise ConfigError(f"{self.info.name}: none of {len(every)} examples is readable")
    # Itself, or the next readable one.
    in_training = readable[np.searchsorted(readable, every) % len(readable)]

    def load(indices: np.ndarray, draws: np.ndarray | None) -> Batch:
      return decoded.load(indices if draws is None else in_training[indices], draws)

    return load
