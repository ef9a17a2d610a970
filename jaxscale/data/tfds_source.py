"""Prepared datasets of TFDS, TensorFlow-free: what images and text share.

Prepared as array_record, which TFDS reads by index, or as TFRecord, which
`tfrecord.py` does; preparing needs TensorFlow once
(`jaxscale prepare NAME`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxscale.config.validation import closest
from jaxscale.errors import ConfigError


class Examples(NamedTuple):
  """The examples of a split, by index, as dicts of features.

  Attributes:
    size: how many.
    get: index -> one of them.
    get_many: indices -> all of them, where that is faster; else None.
  """

  size: int
  get: Callable[[int], Any]
  get_many: Callable[[Sequence[int]], Any] | None


def find_builder(name: str, data_dir: str | None, field: str = "TFDS.name") -> Any:
  """The builder of a dataset that is prepared.

  Args:
    name: as in `tfds.builder(name)`.
    data_dir: where it is prepared; None: TFDS's default.
    field: for messages.

  Raises:
    ConfigError: there is no such dataset, or it is not prepared.
  """
  import tensorflow_datasets as tfds  # 0.7 s, only where TFDS is used

  try:
    builder = tfds.builder(name, data_dir=data_dir)
  except tfds.core.DatasetNotFoundError:
    known = tfds.list_builders(with_community_datasets=False)
    close = closest(name, known)
    hint = f"did you mean {close!r}?" if close else "see the TFDS catalogue"
    raise ConfigError(f"{field}={name!r}: no such dataset, {hint}") from None
  if not builder.is_prepared():
    where = f" --data-dir {data_dir}" if data_dir else ""
    raise ConfigError(
      f"{field}={name!r}: not prepared in {builder.data_path}; once, in an "
      f"environment with jaxscale[tfds]: jaxscale prepare {name}{where}"
    )
  return builder


class Prepared:
  """A builder that equals another of the same files, so that a cache finds it."""

  def __init__(self, builder: Any):
    self.builder = builder
    info = Path(str(builder.data_path)) / "dataset_info.json"
    written = os.stat(info).st_mtime_ns if info.exists() else 0  # 0: not on a disk
    self.key = (str(builder.data_path), written)

  def __eq__(self, other: object) -> bool:
    return isinstance(other, Prepared) and self.key == other.key

  def __hash__(self) -> int:
    return hash(self.key)


def open_split(
  builder: Any, name: str, split: str, decoders: Any = None, field: str = "TFDS.name"
) -> Examples:
  """The examples of a split.

  Args:
    builder: from `find_builder`.
    name: of the dataset, for messages.
    split: in TFDS's notation.
    decoders: of features, as TFDS has them.
    field: for messages.

  Raises:
    ConfigError: no such split, a file that is cut, or a format that is not read.
  """
  import tensorflow_datasets as tfds

  formats: Any = tfds.core.file_adapters.FileFormat  # pyright: ignore
  kind = builder.info.file_format
  try:
    if formats.ARRAY_RECORD in builder.info.available_file_formats():
      found = builder.as_data_source(split, decoders=decoders)
      return Examples(len(found), found.__getitem__, found.__getitems__)
    if kind == formats.TFRECORD:
      return Examples(*_tfrecord(builder, split, decoders), None)
  except ConfigError:
    raise
  except Exception as e:  # a split that is not there, a file that is cut
    first = (str(e).splitlines() or [type(e).__name__])[0]
    raise ConfigError(f"TFDS split {split!r} of {name}: {first}") from None
  raise ConfigError(
    f"{field}={name!r}: {builder.data_path} is in the {kind} format, which is "
    f"not read here; prepare it again: jaxscale prepare {name}"
  )


def _tfrecord(builder: Any, split: str, decoders: Any):
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
  return size, lambda index: parse(read(index), decoders=decoders)
