"""Any image-classification dataset of TensorFlow Datasets, TensorFlow-free.

How they are stored is in `tfds_source`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

from jaxscale.data.augment import AugmentName, EvalView
from jaxscale.data.dataset import Dataset, Record, Source
from jaxscale.data.encoded import from_source, image_info
from jaxscale.data.faults import raise_if_system_error
from jaxscale.data.tfds_source import Prepared, find_builder, open_split
from jaxscale.errors import ConfigError


def tfds_images(
  name: str,
  split: str,
  *,
  data_dir: str | None = None,
  image_size: int | None = None,
  channels: int | None = None,
  mean: tuple[float, ...] | None = None,
  std: tuple[float, ...] | None = None,
  augment: AugmentName = "none",
  cache: bool = False,
  eval_view: EvalView = "mlperf",
) -> Dataset:
  """A split of a prepared TFDS dataset with an image and a label.

  Another `image_size` of the same split costs nothing: what was opened is kept.

  Args:
    name: as in `tfds.builder(name)`.
    split: in TFDS's notation, e.g. "train" or "train[:90%]".
    data_dir: where it is prepared; None: TFDS's default.
    image_size: resize to this height and width; None: as stored.
    channels: 1 for grey, 3, or 4 with alpha: what every image is converted to;
      None: as the dataset declares, or 3.
    mean: per channel or one for all, of values from 0 to 255; None: ImageNet's of
      three channels, else 127.5.
    std: likewise.
    augment: what training draws change; see `config.TFDS`.
    cache: decode everything once, now, and keep it in memory.
    eval_view: what evaluation sees of an image that is resized: "mlperf" or
      "google", see `jpeg.view`.

  Raises:
    ConfigError: unknown or unprepared dataset, split or image shape.
  """
  builder = find_builder(name, data_dir)
  image_key, label_key = builder.info.supervised_keys or ("image", "label")
  features = builder.info.features
  if image_key not in features or not hasattr(features[label_key], "num_classes"):
    raise ConfigError(f"TFDS.name={name!r}: not an image-classification dataset")
  source = _opened(Prepared(builder), name, split, image_key, label_key)
  stored = features[image_key].shape
  channels = int(channels or stored[-1] or 3)
  if image_size is None and None in stored[:2]:
    raise ConfigError(
      f"TFDS.image_size=None: images of {name} differ in size, give a size, e.g. 224"
    )
  height, width = image_size or stored[0], image_size or stored[1]
  info = image_info(
    name, (height, width, channels), features[label_key].num_classes, mean, std
  )
  return from_source(
    info, source, resized=image_size is not None, augment=augment, cache=cache,
    eval_view=eval_view,
  )  # fmt: skip


@functools.lru_cache(maxsize=16)
def _opened(
  prepared: Prepared, name: str, split: str, image_key: str, label_key: str
) -> Source:
  """The examples of a split, each with its image left encoded."""
  import tensorflow_datasets as tfds

  skip = {image_key: tfds.decode.SkipDecoding()}
  builder = prepared.builder
  jpegs = getattr(builder.info.features[image_key], "encoding_format", None) == "jpeg"
  size, get, get_many = open_split(builder, name, split, skip)

  def called(index: int) -> str:
    return f"{name} {split!r} example {index}"

  def record(example: Any) -> Record:
    return Record(example[image_key], int(example[label_key]))

  def read_one(index: int) -> Record | None:
    try:
      return record(get(index))
    except Exception as e:  # each format has its own for damaged bytes
      raise_if_system_error(e, called(index))
      return None

  def read(indices: Sequence[int]) -> Iterable[Record | None]:
    if get_many is not None:
      try:
        return list(map(record, get_many(list(indices))))
      except Exception:  # one of them is damaged: find out which
        pass
    return map(read_one, indices)

  return Source(size, read, called, lambda _: jpegs)
