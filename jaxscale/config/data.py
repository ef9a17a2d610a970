"""Settings of the data."""

from __future__ import annotations

from typing import Annotated, Literal

from jaxscale.config.bounds import Count
from jaxscale.config.validation import settings
from jaxscale.errors import ConfigError


@settings
class Digits:
  """UCI handwritten digits, 8x8, embedded in the package (1,437 + 360).

  Attributes:
    augment: "none", or "shift" by up to one pixel.
  """

  augment: Literal["none", "shift"] = "shift"


@settings
class TFDS:
  """Any image-classification dataset of TensorFlow Datasets, by its name.

  Attributes:
    name: the dataset, as in `tfds.builder(name)`, e.g. "fashion_mnist".
    train_split: examples trained on, in TFDS's split notation.
    eval_split: examples evaluated on.
    data_dir: where it is prepared; None: $TFDS_DATA_DIR or TFDS's own default.
    image_size: height and width to crop and resize to; None: as stored, which
      needs images of one size.
    augment: "none", "flip", "shift_flip" (by up to image/14 pixels) or "crop"
      (random resized crop and flip; needs image_size).
    eval_view: what evaluation sees of images that are resized: "mlperf" (shorter
      side to 256/224 of the size, centre crop) or "google" (the centre 7/8,
      bicubic).
    cache: decode everything once and keep it in memory.
  """

  name: str
  train_split: str = "train"
  eval_split: str = "test"
  data_dir: str | None = None
  image_size: Annotated[int | None, ">= 1"] = None
  augment: Literal["none", "flip", "shift_flip", "crop"] = "none"
  eval_view: Literal["mlperf", "google"] = "mlperf"
  cache: bool = False

  def __post_init__(self):
    if self.augment == "crop" and self.image_size is None:
      raise ConfigError("TFDS.augment='crop': set image_size too, e.g. 224")
    if self.augment == "crop" and self.cache:
      raise ConfigError(
        "TFDS.cache=True: crops are cut from whole images, set it to False"
      )


@settings
class ImageFolder:
  """Image files in one directory a class, as clusters keep ImageNet.

  Attributes:
    path: directory of the splits, each of one subdirectory a class.
    train_split: the subdirectory trained on.
    eval_split: the subdirectory evaluated on.
    image_size: height and width to crop and resize to.
    augment: "none", "flip" or "crop" (random resized crop and flip).
    eval_view: what evaluation sees; see TFDS.
  """

  path: str
  train_split: str = "train"
  eval_split: str = "val"
  image_size: Count = 224
  augment: Literal["none", "flip", "crop"] = "crop"
  eval_view: Literal["mlperf", "google"] = "mlperf"


@settings
class Synthetic:
  """Learnable images made on the fly: a pattern a class, plus noise.

  Attributes:
    num_examples: training examples; evaluation has a tenth of them.
    image_size: height and width.
    channels: colour channels.
    num_classes: number of classes.
  """

  num_examples: Count = 4096
  image_size: Count = 32
  channels: Count = 3
  num_classes: Count = 10


@settings
class Text:
  """Documentation of Python, byte by byte, embedded in the package (1.1 + 0.1 MB).

  Attributes:
    sequence_length: bytes of an example.
  """

  sequence_length: Count = 256


@settings
class TFDSText:
  """Any text dataset of TensorFlow Datasets, by its name.

  Attributes:
    name: the dataset, as in `tfds.builder(name)`, e.g. "lm1b" or "wiki40b/en".
    feature: the one that is the text; an example is a document.
    train_split: documents trained on, in TFDS's split notation.
    eval_split: documents evaluated on.
    tokenizer: "bytes", or the path of a tokenizer.json of Hugging Face.
    separator: the tokenizer's token between documents; None: by its usual names.
    sequence_length: tokens of an example.
    data_dir: where it is prepared; None: $TFDS_DATA_DIR or TFDS's own default.
    cache_dir: where its tokens are kept; None: ~/.cache/jaxscale/text.
  """

  name: str
  feature: str = "text"
  train_split: str = "train"
  eval_split: str = "test"
  tokenizer: str = "bytes"
  separator: str | None = None
  sequence_length: Count = 256
  data_dir: str | None = None
  cache_dir: str | None = None

  def __post_init__(self):
    _check_separator(self)


@settings
class TextFiles:
  """Text in files: NAME.txt, or NAME.bin of tokens as nanoGPT keeps them.

  Attributes:
    path: directory of the splits.
    train_split: NAME of a file without its ending, or of a directory of files.
    eval_split: likewise, of what is evaluated on.
    tokenizer: of .txt files: "bytes", or the path of a tokenizer.json.
    separator: the tokenizer's token between documents; None: by its usual names.
    vocab_size: of .bin files, whose tokens are below it (uint16 up to 65,536).
    sequence_length: tokens of an example.
    cache_dir: where tokens of .txt files are kept; None: ~/.cache/jaxscale/text.
  """

  path: str
  train_split: str = "train"
  eval_split: str = "val"
  tokenizer: str = "bytes"
  separator: str | None = None
  vocab_size: Annotated[int | None, ">= 1"] = None
  sequence_length: Count = 256
  cache_dir: str | None = None

  def __post_init__(self):
    _check_separator(self)


def _check_separator(data: TFDSText | TextFiles) -> None:
  if data.separator is not None and data.tokenizer == "bytes":
    raise ConfigError(
      f"{type(data).__name__}.separator={data.separator!r}: bytes are separated by "
      "byte 0, leave it out or give a tokenizer"
    )
