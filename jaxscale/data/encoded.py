"""Encoded images as a dataset: views, augmentation, and what to do with damage.

A damaged example never stops a run. In training the next readable one takes its
place (index + 1, wrapping around), which depends on nothing but the files, so
hosts and restarts agree. A held-out one keeps its place, as a black image of
class -1 that no model can get right: the score stays that of all examples, and
can only be too low. `Dataset.damage` counts both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple

import numpy as np

from jaxscale.data import augment as augmentation
from jaxscale.data.dataset import (
  NUM_DRAWS,
  Augment,
  Batch,
  Damage,
  Dataset,
  DatasetInfo,
  Record,
  Source,
)
from jaxscale.errors import ConfigError

# Per channel, over the training images of ImageNet, as every published recipe.
IMAGENET_MEAN = (123.675, 116.28, 103.53)
IMAGENET_STD = (58.395, 57.12, 57.375)

AugmentName = Literal["none", "flip", "shift_flip", "crop"]
EvalView = Literal["mlperf", "google"]

NO_CLASS = -1  # label of a held-out example that cannot be read: always wrong
_IN_A_ROW = 1000  # so many unreadable examples are no accident


class _Reader(NamedTuple):
  """What turns a stored example into the pixels of a view."""

  info: DatasetInfo
  source: Source
  damage: Damage
  resized: bool
  crop: bool
  eval_view: EvalView


def from_source(
  info: DatasetInfo,
  source: Source,
  *,
  resized: bool,
  augment: AugmentName = "none",
  cache: bool = False,
  eval_view: EvalView = "mlperf",
) -> Dataset:
  """A dataset of encoded images, wherever they are stored.

  Args:
    info: of the images as they are loaded.
    source: the encoded images.
    resized: views of `info.image_shape` are cut; False: images have that shape.
    augment: what training draws change.
    cache: decode everything once, now, and keep it in memory.
    eval_view: what evaluation sees, "mlperf" or "google".

  Raises:
    ConfigError: there is no example, or with `cache` no readable one.
  """
  if not source.num_examples:
    raise ConfigError(f"{info.name}: there is no example in it")
  crop, damage = augment == "crop", Damage()
  in_arrays = _array_augment(augment, info.image_shape[0])
  reader = _Reader(info, source, damage, resized, crop, eval_view)
  load = functools.partial(_load, reader, in_arrays)
  if cache:
    load = _cached(info, load, source.num_examples, in_arrays, damage)
  num_draws = in_arrays.num_draws if in_arrays else 0
  if crop:
    num_draws = NUM_DRAWS
  return Dataset(info, source.num_examples, load, num_draws, damage)


def _array_augment(augment: AugmentName, height: int) -> Augment | None:
  """What is done to decoded images; crops are cut while decoding."""
  if augment == "flip":
    return augmentation.flip()
  if augment == "shift_flip":
    shift = augmentation.shift(max(height // 14, 1))
    return augmentation.compose(augmentation.flip(), shift)
  return None


def _load(
  reader: _Reader,
  in_arrays: Augment | None,
  indices: np.ndarray,
  draws: np.ndarray | None,
) -> Batch:
  images = np.empty((len(indices), *reader.info.image_shape), np.uint8)
  labels = np.empty(len(indices), np.int32)
  wanted = [int(i) for i in indices]
  for i, record in enumerate(reader.source.read(wanted)):
    drawn = None if draws is None else draws[i]
    if _read(reader, wanted[i], record, drawn, images[i]) and record is not None:
      labels[i] = record.label
    elif draws is not None:
      labels[i] = _replacement(reader, wanted[i], drawn, images[i])
    else:
      images[i], labels[i] = 0, NO_CLASS
  if in_arrays is not None and draws is not None:
    images = in_arrays.apply(images, draws)
  return {"image": images, "label": labels}


def _read(
  reader: _Reader,
  index: int,
  record: Record | None,
  draws: np.ndarray | None,
  out: np.ndarray,
) -> bool:
  """Put the view of one example into `out`; False for a damaged one."""
  from jaxscale.data import jpeg  # OpenCV loads only where images are decoded

  height, _, channels = reader.info.image_shape
  drawn = draws if reader.crop else None
  try:
    if record is None:
      raise ValueError("not to be read")
    if reader.resized:
      _, kind = jpeg.view_any(
        record.image, height, channels, drawn, reader.eval_view, out
      )
    else:
      image, kind = jpeg.decode_any(record.image, channels, exact=drawn is None)
      if image.shape != out.shape:
        raise ValueError(f"an image of shape {image.shape}")
      out[:] = image
  except ValueError:
    reader.damage.add(index, reader.source.name(index))
    return False
  if kind in ("CMYK", "odd JPEG"):
    reader.damage.rescue(index, kind)
  elif kind != "JPEG" and reader.source.is_jpeg(index):
    reader.damage.rescue(index, f"{kind} named JPEG")
  return True


def _replacement(
  reader: _Reader, index: int, draws: np.ndarray | None, out: np.ndarray
) -> int:
  """Put the next readable example after a damaged one into `out`: its label."""
  source = reader.source
  tries = min(source.num_examples - 1, _IN_A_ROW)
  for step in range(1, tries + 1):
    other = (index + step) % source.num_examples
    record = next(iter(source.read([other])))
    if _read(reader, other, record, draws, out) and record is not None:
      return record.label
  raise ConfigError(
    f"{reader.info.name}: {tries + 1} examples in a row cannot be read, from "
    f"{source.name(index)} on; is the disk there?"
  )


def _cached(
  info: DatasetInfo,
  load: Callable[..., Batch],
  num_examples: int,
  augment: Augment | None,
  damage: Damage,
) -> Callable[..., Batch]:
  """The same `load`, out of memory: every example is decoded once, now."""
  chunks = np.array_split(np.arange(num_examples), -(-num_examples // 2048))
  with ThreadPoolExecutor() as threads:
    parts = list(threads.map(lambda chunk: load(chunk, None), chunks))
  images = np.concatenate([part["image"] for part in parts])
  labels = np.concatenate([part["label"] for part in parts])
  readable = np.setdiff1d(np.arange(num_examples), damage.indices)
  if not len(readable):
    raise ConfigError(f"{info.name}: none of its {num_examples} examples can be read")
  after = np.searchsorted(readable, np.arange(num_examples)) % len(readable)
  in_training = readable[after]  # itself, or the next readable one

  def load_cached(indices: np.ndarray, draws: np.ndarray | None) -> Batch:
    rows = indices if draws is None else in_training[indices]
    batch = images[rows]
    if augment is not None and draws is not None:
      batch = augment.apply(batch, draws)
    return {"image": batch, "label": labels[rows]}

  return load_cached
