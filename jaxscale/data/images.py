"""Any image-classification dataset of TensorFlow Datasets, TensorFlow-free.

Prepared as array_record, which TFDS reads by index, or as TFRecord, which
`tfrecord.py` does; preparing needs TensorFlow once
(`python -m jaxscale.data.prepare NAME`).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxscale.data.dataset import Dataset, DatasetInfo, Record, Source
from jaxscale.data.encoded import (
  IMAGENET_MEAN,
  IMAGENET_STD,
  AugmentName,
  EvalView,
  from_source,
)
from jaxscale.data.faults import raise_if_systems
from jaxscale.settings import ConfigError, closest


def tfds_images(
  name: str,
  split: str,
  *,
  data_dir: str | None = None,
  image_size: int | None = None,
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
    augment: what training draws change; see `config.TFDS`.
    cache: decode everything once, now, and keep it in memory.
    eval_view: what evaluation sees of an image that is resized: "mlperf" or
      "google", see `jpeg.view`.

  Raises:
    ConfigError: unknown or unprepared dataset, split or image shape.
  """
  builder = _builder(name, data_dir)
  image_key, label_key = builder.info.supervised_keys or ("image", "label")
  features = builder.info.features
  if image_key not in features or not hasattr(features[label_key], "num_classes"):
    raise ConfigError(f"TFDS.name={name!r}: not an image-classification dataset")
  source = _opened(_Prepared(builder), name, split, image_key, label_key)
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
  return from_source(
    info, source, resized=image_size is not None, augment=augment, cache=cache,
    eval_view=eval_view,
  )  # fmt: skip


def _builder(name: str, data_dir: str | None) -> Any:
  import tensorflow_datasets as tfds  # 0.7 s, only where TFDS is used

  try:
    builder = tfds.builder(name, data_dir=data_dir)
  except tfds.core.DatasetNotFoundError:
    known = tfds.list_builders(with_community_datasets=False)
    close = closest(name, known)
    hint = f"did you mean {close!r}?" if close else "see the TFDS catalogue"
    raise ConfigError(f"TFDS.name={name!r}: no such dataset, {hint}") from None
  if not builder.is_prepared():
    where = f" --data_dir {data_dir}" if data_dir else ""
    raise ConfigError(
      f"TFDS.name={name!r}: not prepared in {builder.data_path}; once, in an "
      f"environment with jaxscale[tfds]: python -m jaxscale.data.prepare {name}{where}"
    )
  return builder


class _Prepared:
  """A builder that equals another of the same files, so that a cache finds it."""

  def __init__(self, builder: Any):
    self.builder = builder
    info = Path(str(builder.data_path)) / "dataset_info.json"
    written = os.stat(info).st_mtime_ns if info.exists() else 0  # 0: not on a disk
    self.key = (str(builder.data_path), written)

  def __eq__(self, other: object) -> bool:
    return isinstance(other, _Prepared) and self.key == other.key

  def __hash__(self) -> int:
    return hash(self.key)


@functools.lru_cache(maxsize=16)
def _opened(
  prepared: _Prepared, name: str, split: str, image_key: str, label_key: str
) -> Source:
  """The examples of a split, each with its image left encoded."""
  import tensorflow_datasets as tfds

  builder: Any = prepared.builder
  formats: Any = tfds.core.file_adapters.FileFormat  # pyright: ignore
  skip = {image_key: tfds.decode.SkipDecoding()}
  features = builder.info.features
  jpegs = getattr(features[image_key], "encoding_format", None) == "jpeg"
  kind = builder.info.file_format
  try:
    if formats.ARRAY_RECORD in builder.info.available_file_formats():
      examples = builder.as_data_source(split, decoders=skip)
      size, get, get_many = len(examples), examples.__getitem__, examples.__getitems__
    elif kind == formats.TFRECORD:
      size, get = _tfrecord(builder, split, skip)
      get_many = None
    else:
      raise ConfigError(
        f"TFDS.name={name!r}: {builder.data_path} is in the {kind} format, which is "
        f"not read here; prepare it again: python -m jaxscale.data.prepare {name}"
      )
  except ConfigError:
    raise
  except Exception as e:  # a split that is not there, a file that is cut
    first = (str(e).splitlines() or [type(e).__name__])[0]
    raise ConfigError(f"TFDS split {split!r} of {name}: {first}") from None

  def called(index: int) -> str:
    return f"{name} {split!r} example {index}"

  read = functools.partial(_read, get, get_many, image_key, label_key, called)
  return Source(size, read, called, lambda i: jpegs)


def _read(
  get: Any,
  get_many: Any,
  image_key: str,
  label_key: str,
  called: Callable[[int], str],
  indices: Sequence[int],
) -> Iterable[Record | None]:
  """The records, all at once if none is damaged."""

  def one(index: int) -> Record | None:
    try:
      example = get(index)
      return Record(example[image_key], int(example[label_key]))
    except Exception as e:  # each format has its own for bytes that are damaged
      raise_if_systems(e, called(index))
      return None

  if get_many is not None:
    try:
      examples = get_many(list(indices))
      return [Record(e[image_key], int(e[label_key])) for e in examples]
    except Exception:  # one of them is damaged: find out which
      pass
  return map(one, indices)


def _tfrecord(builder: Any, split: str, skip: dict[str, Any]):
  """The examples of TFRecord shards: (how many, index -> example)."""
  from tensorflow_datasets.core.data_sources import base

  from jaxscale.data.tfrecord import Shard, random_access

  instructions: Any = base.file_instructions
  shards = [
    Shard(
      str(part.filename),
      part.examples_in_shard,
      part.skip,
      part.take if part.take >= 0 else part.examples_in_shard - part.skip,
    )
    for part in instructions(builder.info, split)
  ]
  read, parse = random_access(shards), builder.info.features.deserialize_example_np
  size = sum(shard.take for shard in shards)
  return size, lambda index: parse(read(index), decoders=skip)
