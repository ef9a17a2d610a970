"""Load TensorFlow Datasets by name, without TensorFlow: images and text.

A dataset must be prepared as array_record, which TFDS reads by index, or as TFRecord, which
`tfrecord.py` reads. Only preparing needs TensorFlow (`jaxscale prepare NAME`).
"""

import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxscale.config.validation import closest, nearest
from jaxscale.data.augment import AugmentName, EvalView
from jaxscale.data.dataset import MAX_PIXELS, Dataset
from jaxscale.data.encoded import Record, Source, from_source, image_info
from jaxscale.data.faults import raise_if_system_error
from jaxscale.data.packing import text_windows
from jaxscale.data.stream import Packing, packed
from jaxscale.data.tokenizer import read_tokenizer
from jaxscale.errors import ConfigError
from jaxscale.files import check_regular

_AT_ONCE = 1024  # documents
# A split: the number of examples, and a function from indices to examples as dicts of features.
Examples = tuple[int, Callable[[Sequence[int]], Sequence[Any]]]


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
  max_pixels: int = MAX_PIXELS,
) -> Dataset:
  """Create a dataset of images from a split of a prepared TFDS dataset.

  Opened files are cached, so another `image_size` of the same split costs nothing.

  Args:
    name: the name, as in `tfds.builder(name)`.
    split: the split in TFDS's notation, e.g. "train" or "train[:90%]".
    data_dir: the directory of prepared datasets; None uses TFDS's default.
    image_size: the height and width to resize to; None keeps the stored size.
    channels: the channels that every image is converted to: 1 for grey, 3, or 4 with alpha;
      None uses those that the dataset declares, or 3.
    mean: the mean per channel, or one for all, of values from 0 to 255; None uses ImageNet's
      for three channels and otherwise 127.5.
    std: the standard deviation, in the same form.
    augment: the augmentation in training; see `config.TFDS`.
    cache: True decodes all examples once, now, and keeps them in memory.
    eval_view: the view of resized images in evaluation: "mlperf" or a `CenterCrop`, see
      `jpeg.view`.
    max_pixels: the pixels above which an image counts as damaged and is not decoded.

  Raises:
    ConfigError: the dataset is unknown or not prepared, or the split or the image shape is
      invalid.
  """
  builder = find_builder(name, data_dir)
  image_key, label_key = builder.info.supervised_keys or ("image", "label")
  features = builder.info.features
  is_there = image_key in features and label_key in features
  if not (is_there and hasattr(features[label_key], "num_classes")):
    raise ConfigError(f"TFDS.name={name!r}: has no images with a class; use a different dataset")
  source = _opened(_identity(builder), name, data_dir, split)
  stored = features[image_key].shape
  channels = int(channels or stored[-1] or 3)
  if image_size is None and None in stored[:2]:
    problem = f"images of {name} differ in size; set a size, e.g. 224"
    raise ConfigError(f"TFDS.image_size=None: {problem}")
  shape = image_size or stored[0], image_size or stored[1], channels
  label = features[label_key]
  info = image_info(name, shape, label.num_classes, mean, std)
  if getattr(label, "_int2str", None):  # Otherwise TFDS makes up names from the numbers.
    info = info._replace(class_names=tuple(label.names))
  resized = image_size is not None
  dataset = from_source(info, source, resized, augment, cache, eval_view, max_pixels)
  return dataset._replace(identity=_content(builder, split))


def _content(builder: Any, split: str) -> dict[str, Any]:
  """Return the version of a prepared dataset, and the number of examples in each file."""
  names, splits = re.findall(r"[\w.]+", split), builder.info.splits
  shards = {name: splits[name].shard_lengths for name in names if name in splits}
  return {"version": builder.info.full_name, "shards": shards}


@functools.lru_cache(maxsize=16)
def _opened(identity: tuple[str, int], name: str, data_dir: str | None, split: str) -> Source:
  """Open the examples of a split, with images left encoded."""
  tfds = import_tfds()
  del identity  # Changed files get a new entry in the cache.
  builder = find_builder(name, data_dir)
  image_key, label_key = builder.info.supervised_keys or ("image", "label")
  skip = {image_key: tfds.decode.SkipDecoding()}
  jpegs = getattr(builder.info.features[image_key], "encoding_format", None) == "jpeg"
  size, examples = open_split(builder, name, split, skip)

  def name_of(index: int) -> str:
    return f"{name} {split!r} example {index}"

  def records(indices: Sequence[int]) -> list[Record | None]:
    found: list[Record | None] = [(x[image_key], int(x[label_key])) for x in examples(indices)]
    if not all(record and isinstance(record[0], bytes) for record in found):
      raise ValueError("an example has no image")
    return found

  def read_one(index: int) -> Record | None:
    try:
      return records([index])[0]
    except Exception as e:  # Each format raises its own error for damaged bytes.
      raise_if_system_error(e, name_of(index))

  def read(indices: Sequence[int]) -> Iterable[Record | None]:
    # Read one by one to find the damaged example.
    with contextlib.suppress(Exception):
      return records(list(indices))
    return map(read_one, indices)

  return Source(size, read, name_of, lambda _: jpegs)


def tfds_text(
  name: str,
  split: str,
  *,
  feature: str = "text",
  tokenizer: str = "bytes",
  separator: str | None = None,
  sequence_length: int = 256,
  packing: Packing = "stream",
  data_dir: str | None = None,
  cache_dir: str | None = None,
) -> Dataset:
  """Create a dataset of token windows from a text feature of a prepared TFDS dataset.

  Args:
    name: the name, as in `tfds.builder(name)`, e.g. "lm1b" or "wiki40b/en".
    split: the split in TFDS's notation, e.g. "train" or "train[:90%]".
    feature: the feature with the text; each example is a document.
    tokenizer: "bytes" or the path of a tokenizer.json.
    separator: the tokenizer's token between documents; None finds it by its usual names.
    sequence_length: the tokens per example.
    packing: the way from documents to windows, as for `packing.text_windows`.
    data_dir: the directory of prepared datasets; None uses TFDS's default.
    cache_dir: the directory for the tokens; None uses the user's cache.

  Raises:
    ConfigError: the dataset is unknown or not prepared; the split, the feature or the
      tokenizer is invalid; or an example cannot be read.

  Example:
    >>> tfds_text("lm1b", "test", sequence_length=512)   # doctest: +SKIP
  """
  tokens = read_tokenizer(tokenizer, separator, field="TFDSText.tokenizer")
  builder = find_builder(name, data_dir, "TFDSText.name")
  features = builder.info.features
  known = [n for n in features if _is_text(features[n])]
  if feature not in known:
    hint = nearest(feature, known) if known else "which has no text"
    raise ConfigError(f"TFDSText.feature={feature!r}: not a text feature of {name}, {hint}")
  title = f"{name} {split!r}"
  identity = "tfds", *_identity(builder), split, feature
  examples = open_split(builder, name, split, field="TFDSText.name")
  documents = _documents(examples, title, feature)
  stream = packed(title, documents, tokens, identity, cache_dir)
  dataset = text_windows(title, stream, tokens.vocab_size, sequence_length, packing)
  return dataset._replace(identity={**_content(builder, split), **stream.facts})


def _is_text(feature: Any) -> bool:
  """Return whether a feature is one string, whose dtype TFDS writes as object."""
  shape, dtype = getattr(feature, "shape", None), getattr(feature, "np_dtype", None)
  return shape == () and dtype is not None and np.dtype(dtype).kind in "OSU"


def _documents(examples: Examples, title: str, feature: str) -> Iterator[list[bytes]]:
  """Yield the documents in order, several at a time; `Tokenizer.encode` checks their encoding."""
  size, read = examples
  for first in range(0, size, _AT_ONCE):
    indices = list(range(first, min(first + _AT_ONCE, size)))
    try:
      texts = [example[feature] for example in read(indices)]
    except Exception as e:  # Each format raises its own error for damaged bytes.
      problem = (str(e).splitlines() or [type(e).__name__])[0]
      what = f"an example from {indices[0]} to {indices[-1]} cannot be read ({problem})"
      raise ConfigError(f"{title}: {what}; copy or prepare the dataset again") from None
    yield [t.encode() if isinstance(t, str) else bytes(t) for t in texts]


def find_builder(name: str, data_dir: str | None, field: str = "TFDS.name") -> Any:
  """Return the builder of a prepared dataset.

  Args:
    name: the name, as in `tfds.builder(name)`.
    data_dir: the directory of prepared datasets; None uses TFDS's default.
    field: the name of the setting, for messages.

  Raises:
    ConfigError: the dataset does not exist or is not prepared.
  """
  tfds = import_tfds()  # Takes 0.7 s.
  from absl import logging
  from tensorflow_datasets.core import constants

  folder = Path(data_dir or constants.DATA_DIR, re.split("[/:]", name)[0] or "-").expanduser()
  try:
    check_regular([folder] if folder.is_dir() else [])
    if space := tfds.core.naming.parse_builder_name_kwargs(name)[0].namespace:
      fix = f"prepare it by TFDS, and give the rest of the name, and {space}/ as data_dir"
      raise ConfigError(f"TFDS would download and execute code of {space!r}; {fix}")
    builder = tfds.builder(name, data_dir=data_dir)
  except ConfigError as e:
    raise ConfigError(f"{field}={name!r}: {e}") from None
  except Exception as e:  # Includes ValueErrors for invalid names and damaged files.
    reason = (str(e).splitlines() or [type(e).__name__])[0]
    problem = f"its dataset_info.json or features.json is damaged ({reason:.200}); copy it again"
    if isinstance(e, tfds.core.DatasetNotFoundError) or not folder.is_dir():
      close = closest(name, tfds.list_builders(with_community_datasets=False))
      hint = f"did you mean {close!r}?" if close else "see the TFDS catalogue"
      problem = f"no such dataset, {hint}"
    raise ConfigError(f"{field}={name!r}: {problem}") from None
  level = logging.get_verbosity()
  logging.set_verbosity(logging.ERROR)  # The error below says more than TFDS's warnings.
  is_prepared = builder.is_prepared()
  logging.set_verbosity(level)
  if not is_prepared:
    where = f" --data-dir {data_dir}" if data_dir else ""
    fix = f"once, in an environment with jaxscale[tfds]: jaxscale prepare {name}{where}"
    raise ConfigError(f"{field}={name!r}: not prepared in {builder.data_path}; {fix}")
  return builder


@functools.cache
def import_tfds() -> Any:
  """Import TFDS, and keep it from importing what the files of a dataset name.

  A features.json has the class of each feature, and TFDS imports its module: any that Python
  finds, which runs it. Only TFDS's own classes are imported, and those that the user's code has
  defined can be used.
  """
  import tensorflow_datasets as tfds

  base: Any = tfds.features.FeatureConnector
  find = base.cls_from_name.__func__

  def cls_from_name(cls: Any, name: str) -> Any:
    is_known = name.startswith("tensorflow_datasets.") or name in base._registered_features
    if "." in name and not is_known:
      problem = f"its features.json has the class {name:.200}, which would execute its module"
      raise ConfigError(f"{problem}; import the module in your config file if you trust it")
    return find(cls, name)

  base.cls_from_name = classmethod(cls_from_name)
  return tfds


def _identity(builder: Any) -> tuple[str, int]:
  """Return a value that is equal for the same files of a prepared dataset."""
  info = Path(str(builder.data_path)) / "dataset_info.json"
  written = os.stat(info).st_mtime_ns if info.exists() else 0  # 0 if not on a disk
  return str(builder.data_path), written


def open_split(
  builder: Any, name: str, split: str, decoders: Any = None, field: str = "TFDS.name"
) -> Examples:
  """Open the examples of a split.

  Args:
    builder: the builder, from `find_builder`.
    name: the name of the dataset, for messages.
    split: the split in TFDS's notation.
    decoders: the decoders of features, in TFDS's form.
    field: the name of the setting, for messages.

  Raises:
    ConfigError: the split does not exist, a file is truncated, or the format is unsupported.
  """
  tfds = import_tfds()
  formats: Any = tfds.core.file_adapters.FileFormat  # pyright: ignore
  kind = builder.info.file_format
  try:
    if formats.ARRAY_RECORD in builder.info.available_file_formats():
      source = builder.as_data_source(split, decoders=decoders)
      return len(source), source.__getitems__
    if kind == formats.TFRECORD:
      return _open_tfrecord(builder, split, decoders)
  except ConfigError:
    raise
  except Exception as e:  # For example, a missing split or a truncated file.
    first = (str(e).splitlines() or [type(e).__name__])[0]
    raise ConfigError(f"TFDS split {split!r} of {name}: {first}") from None
  problem = f"which jaxscale cannot read; prepare it again: jaxscale prepare {name}"
  raise ConfigError(f"{field}={name!r}: {builder.data_path} is in the {kind} format, {problem}")


def _open_tfrecord(builder: Any, split: str, decoders: Any) -> Examples:
  from tensorflow_datasets.core.data_sources import base

  from jaxscale.data.tfrecord import Shard, random_access

  instructions: Any = base.file_instructions
  shards = []
  for part in instructions(builder.info, split):
    take = part.take if part.take >= 0 else part.examples_in_shard - part.skip
    shards.append(Shard(str(part.filename), part.examples_in_shard, part.skip, take))
  read, parse = random_access(shards), builder.info.features.deserialize_example_np
  size = sum(shard.take for shard in shards)
  return size, lambda indices: [parse(read(index), decoders=decoders) for index in indices]
