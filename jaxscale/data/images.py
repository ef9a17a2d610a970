"""Any image-classification dataset of TensorFlow Datasets, TensorFlow-free.

TFDS reads `array_record` files by index without TensorFlow; preparing them
needs it once (`python -m jaxscale.data.prepare NAME`).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np

from jaxscale.data import augment as augmentation
from jaxscale.data.dataset import (
  NUM_DRAWS,
  Augment,
  Batch,
  Dataset,
  DatasetInfo,
  from_arrays,
)
from jaxscale.settings import ConfigError, nearest

# Per channel, over the training images of ImageNet, as every published recipe.
IMAGENET_MEAN = (123.675, 116.28, 103.53)
IMAGENET_STD = (58.395, 57.12, 57.375)


def tfds_images(
  name: str,
  split: str,
  *,
  data_dir: str | None = None,
  image_size: int | None = None,
  augment: Literal["none", "flip", "shift_flip", "crop"] = "none",
  cache: bool = False,
) -> Dataset:
  """A split of a prepared TFDS dataset with an image and a label.

  Args:
    name: as in `tfds.builder(name)`.
    split: in TFDS's notation, e.g. "train" or "train[:90%]".
    data_dir: where it is prepared; None: TFDS's default.
    image_size: resize to this height and width; None: as stored.
    augment: what training draws change; see `config.TFDS`.
    cache: decode everything once, now, and keep it in memory.

  Raises:
    ConfigError: unknown or unprepared dataset, split or image shape.
  """
  builder = _builder(name, data_dir)
  image_key, label_key = builder.info.supervised_keys or ("image", "label")
  features = builder.info.features
  if image_key not in features or not hasattr(features[label_key], "num_classes"):
    raise ConfigError(f"TFDS.name={name!r}: not an image-classification dataset")
  source = _source(builder, name, split, image_key)
  stored = features[image_key].shape
  channels = stored[-1] or 3
  if image_size is None and None in stored:
    raise ConfigError(
      f"TFDS.image_size=None: images of {name} differ in size, give a size, e.g. 224"
    )
  shape = (image_size, image_size, channels) if image_size else stored
  colour = channels == 3
  info = DatasetInfo(
    name,
    shape,
    features[label_key].num_classes,
    IMAGENET_MEAN if colour else (127.5,),
    IMAGENET_STD if colour else (127.5,),
  )

  array_augment: Augment | None = {
    "none": None,
    "crop": None,  # done while decoding
    "flip": augmentation.flip(),
    "shift_flip": augmentation.compose(
      augmentation.flip(), augmentation.shift(max(shape[0] // 14, 1))
    ),
  }[augment]

  def load(indices: np.ndarray, draws: np.ndarray | None) -> Batch:
    # OpenCV and simplejpeg load only where images are decoded.
    from jaxscale.data.jpeg import decode, decode_view

    records = source.__getitems__([int(i) for i in indices])
    crops = draws if augment == "crop" else None
    images = np.empty((len(records), *shape), np.uint8)
    for i, record in enumerate(records):
      data = record[image_key]
      if image_size is None:
        images[i] = decode(data, channels)
      else:
        view = None if crops is None else crops[i]
        images[i] = decode_view(data, image_size, channels, view)
    if array_augment is not None and draws is not None:
      images = array_augment.apply(images, draws)
    labels = np.array([record[label_key] for record in records], np.int32)
    return {"image": images, "label": labels}

  if not cache:
    num_draws = array_augment.num_draws if array_augment else 0
    if augment == "crop":
      num_draws = NUM_DRAWS
    return Dataset(info, len(source), load, num_draws)
  chunks = np.array_split(np.arange(len(source)), -(-len(source) // 2048))
  with ThreadPoolExecutor() as threads:
    parts = list(threads.map(lambda chunk: load(chunk, None), chunks))
  whole = {key: np.concatenate([p[key] for p in parts]) for key in parts[0]}
  return from_arrays(info, whole["image"], whole["label"], array_augment)


def _builder(name: str, data_dir: str | None) -> Any:
  import tensorflow_datasets as tfds  # 0.7 s, only where TFDS is used

  try:
    builder = tfds.builder(name, data_dir=data_dir)
  except tfds.core.DatasetNotFoundError:
    known = tfds.list_builders(with_community_datasets=False)
    raise ConfigError(
      f"TFDS.name={name!r}: no such dataset, "
      + (nearest(name, known) if known else "see the TFDS catalogue")
    ) from None
  if not builder.is_prepared():
    where = f" --data_dir {data_dir}" if data_dir else ""
    raise ConfigError(
      f"TFDS.name={name!r}: not prepared in {builder.data_path}; once, in an "
      f"environment with jaxscale[tfds]: python -m jaxscale.data.prepare {name}{where}"
    )
  return builder


def _source(builder: Any, name: str, split: str, image_key: str) -> Any:
  import tensorflow_datasets as tfds

  skip = {image_key: tfds.decode.SkipDecoding()}
  try:
    return builder.as_data_source(split, decoders=skip)
  except NotImplementedError:
    raise ConfigError(
      f"TFDS.name={name!r}: {builder.data_path} is not in the array_record "
      f"format; prepare it again: python -m jaxscale.data.prepare {name}"
    ) from None
  except ValueError as e:
    first = str(e).splitlines()[0]
    raise ConfigError(f"TFDS split {split!r} of {name}: {first}") from None
