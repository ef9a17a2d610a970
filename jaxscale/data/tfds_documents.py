"""Any text dataset of TensorFlow Datasets, by its name, TensorFlow-free.

Its documents are read once, in the dataset's order, and kept as tokens (`packed` says
where); training reads windows of those.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxscale.config.validation import nearest
from jaxscale.data.dataset import Dataset
from jaxscale.data.packed import packed
from jaxscale.data.stream import windows
from jaxscale.data.tfds_source import Examples, Prepared, find_builder, open_split
from jaxscale.data.tokenizer import read_tokenizer
from jaxscale.errors import ConfigError

_AT_ONCE = 1024  # documents


def tfds_text(
  name: str,
  split: str,
  *,
  feature: str = "text",
  tokenizer: str = "bytes",
  separator: str | None = None,
  sequence_length: int = 256,
  data_dir: str | None = None,
  cache_dir: str | None = None,
) -> Dataset:
  """A split of a prepared TFDS dataset with a text feature, as windows of tokens.

  Args:
    name: as in `tfds.builder(name)`, e.g. "lm1b" or "wiki40b/en".
    split: in TFDS's notation, e.g. "train" or "train[:90%]".
    feature: the one that is the text; an example is a document.
    tokenizer: "bytes" or the path of a tokenizer.json.
    separator: the tokenizer's token between documents; None: by its usual names.
    sequence_length: tokens of an example.
    data_dir: where it is prepared; None: TFDS's default.
    cache_dir: where its tokens are kept; None: the user's cache.

  Raises:
    ConfigError: unknown or unprepared dataset, split, feature or tokenizer, or an
      example that cannot be read.

  Example:
    >>> tfds_text("lm1b", "test", sequence_length=512)   # doctest: +SKIP
  """
  tokens = read_tokenizer(tokenizer, separator, field="TFDSText.tokenizer")
  builder = find_builder(name, data_dir, "TFDSText.name")
  _check_feature(builder, name, feature)
  called = f"{name} {split!r}"
  identity = "tfds", *Prepared(builder).key, split, feature
  examples = open_split(builder, name, split, field="TFDSText.name")
  documents = _documents(examples, called, feature)
  stream = packed(called, documents, tokens, identity, cache_dir)
  return windows(called, stream, tokens.vocab_size, sequence_length)


def _check_feature(builder: Any, name: str, feature: str) -> None:
  """Refuse what is no text."""
  features = builder.info.features
  texts = [n for n in features if _is_text(features[n])]
  if feature not in texts:
    raise ConfigError(
      f"TFDSText.feature={feature!r}: no text of {name}, "
      + (nearest(feature, texts) if texts else "which has none")
    )


def _is_text(feature: Any) -> bool:
  """Whether a feature is one string; TFDS writes their dtype as object."""
  shape, dtype = getattr(feature, "shape", None), getattr(feature, "np_dtype", None)
  return shape == () and dtype is not None and np.dtype(dtype).kind in "OSU"


def _documents(examples: Examples, called: str, feature: str) -> Iterator[list[bytes]]:
  """The documents in their order, some at a time."""
  for first in range(0, examples.size, _AT_ONCE):
    indices = list(range(first, min(first + _AT_ONCE, examples.size)))
    try:
      if examples.get_many is not None:
        found = examples.get_many(indices)
      else:
        found = [examples.get(i) for i in indices]
      yield [_bytes(example[feature]) for example in found]
    except Exception as e:  # each format has its own for bytes that are damaged
      why = (str(e).splitlines() or [type(e).__name__])[0]
      raise ConfigError(
        f"{called}: an example from {indices[0]} to {indices[-1]} cannot be read "
        f"({why}); copy or prepare the dataset again"
      ) from None


def _bytes(text: Any) -> bytes:
  return text.encode() if isinstance(text, str) else bytes(text)
