"""Settings of the built-in data. Imports no JAX."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from jaxscale import data
from jaxscale.config.bases import Data
from jaxscale.config.bounds import Count
from jaxscale.config.plain import to_plain
from jaxscale.config.validation import UnsetError
from jaxscale.data import mixture_settings, source_settings
from jaxscale.data.mixture_settings import *  # noqa: F403
from jaxscale.data.source_settings import *  # noqa: F403
from jaxscale.errors import ConfigError

# The names for --config.data= (HOMES in config/choice.py lists this module).
__all__ = [
  "TFDS",
  "Arrays",
  "Chat",
  "Digits",
  "ImageFolder",
  "Synthetic",
  "TFDSText",
  "Text",
  "TextFiles",
]
__all__ += mixture_settings.__all__
__all__ += source_settings.__all__

Split = tuple["data.Dataset", "data.Dataset"]  # To train on, and to validate on.


class Digits(Data):
  """UCI handwritten digits, 8x8 pixels, in the package (1,437 to train, 360 to validate).

  Attributes:
    augment: the augmentation of training images; "none", or "shift" by up to one pixel in each
      direction.
  """

  augment: Literal["none", "shift"] = "shift"

  def build(self) -> Split:
    return data.digits("train", augment=self.augment), data.digits("test")


class _Images(Data):
  """Encoded images that are decoded to one size.

  Attributes:
    eval_view: the resizing and cropping of validation images to the image size; "mlperf"
      (shorter side to 256/224 of the image size, bilinear, center crop), or "bilinear" or
      "bicubic" (as in torchvision and timm: shorter side to image size / eval_crop,
      antialiased, center crop).
    eval_crop: the fraction of the resized shorter side that the center crop keeps (crop_pct in
      timm), for eval_view="bilinear" and "bicubic"; None uses 0.875 (224/256).
    mean: the mean of the pixels to subtract, from 0 to 255, one value or one per channel; None
      uses ImageNet's for color images and 127.5 for others.
    std: the standard deviation to divide the pixels by, in the same form; None as for `mean`.
  """

  eval_view: Literal["mlperf", "bilinear", "bicubic"] = "mlperf"
  eval_crop: Annotated[float | None, "in (0, 1]"] = None
  mean: tuple[float, ...] | None = None
  std: tuple[float, ...] | None = None

  def __post_init__(self):
    if self.eval_crop is not None and self.eval_view == "mlperf":
      field = f"{type(self).__name__}.eval_crop={self.eval_crop}"
      remedy = "omit eval_crop, or use eval_view='bilinear' or 'bicubic'"
      raise ConfigError(f"{field}: eval_view={self.eval_view!r} sets the crop; {remedy}")

  def _eval_view(self) -> Any:
    if self.eval_view == "mlperf":
      return self.eval_view
    return data.CenterCrop(self.eval_view, self.eval_crop or 0.875)

  def _options(self: Any, image_size: int | None, augment: Any) -> dict[str, Any]:
    options = {name: getattr(self, name) for name in ("mean", "std", "max_pixels")}
    return options | {"image_size": image_size, "augment": augment, "eval_view": self._eval_view()}

  def of_source(self: Any, info: Any, source: Any) -> data.Dataset:
    """Return a dataset of other encoded images, viewed as those for validation."""
    from jaxscale.data.encoded import from_source

    is_resized, view = self.image_size is not None, self._eval_view()
    return from_source(info, source, is_resized, "none", False, view, self.max_pixels)

  def build(self: Any) -> Split:
    held_out = self._split(self.eval_split, self.image_size, "none")
    return self.resized(self.image_size), held_out

  def resized(self: Any, image_size: int) -> data.Dataset:
    return self._split(self.train_split, image_size, self.augment)


class TFDS(_Images):
  """Image-classification dataset of TensorFlow Datasets.

  Attributes:
    name: the name of the dataset, as in `tfds.builder(name)`, e.g. "fashion_mnist".
    train_split: the split of the training examples in TFDS's notation, e.g. "train" or
      "train[:90%]".
    eval_split: the split of the validation examples in TFDS's notation, e.g. "test" or
      "train[90%:]".
    data_dir: the directory of prepared TFDS datasets; None uses $TFDS_DATA_DIR, or TFDS's
      default directory if that is not set.
    image_size: the height and width in pixels to which images are cropped and resized; None
      keeps the stored size, which must be the same for all images.
    augment: the augmentation of training images; "none", "flip" (random left-right flip),
      "shift_flip" (flip, and shift by up to 1/14 of the height) or "crop" (random resized crop
      and flip; needs image_size).
    cache: whether to decode all examples once and keep them in memory.
    max_pixels: the largest number of pixels of an image that is decoded, a quarter of it for
      WebP and AVIF; larger images are treated as damaged.
  """

  name: str
  train_split: str = "train"
  eval_split: str = "test"
  data_dir: str | None = None
  image_size: Annotated[int | None, ">= 1"] = None
  augment: Literal["none", "flip", "shift_flip", "crop"] = "none"
  cache: bool = False
  max_pixels: Count = 178_956_970

  def __post_init__(self):
    super().__post_init__()
    if self.augment == "crop" and self.image_size is None:
      raise ConfigError("TFDS.augment='crop': needs image_size; set it, e.g. 224")
    if self.augment == "crop" and self.cache:
      raise ConfigError("TFDS.cache=True: crops need whole images, set it to False")

  def abstract(self, batch_size: int) -> Split | None:
    """Return ImageNet's shapes, so that `plan` compiles programs without the data; else None."""
    from jaxscale.data.dataset import IMAGENET_EXAMPLES
    from jaxscale.data.encoded import image_info

    sizes = [IMAGENET_EXAMPLES.get(s) for s in (self.train_split, self.eval_split)]
    if self.name != "imagenet2012" or self.image_size is None or None in sizes:
      return None
    shape = (self.image_size, self.image_size, 3)
    info = image_info(self.name, shape, 1000, self.mean, self.std)
    train, held_out = (data.Dataset(info, size or 0, _no_rows) for size in sizes)
    return train, held_out

  def _split(self, split: str, image_size: int | None, augment: Any) -> data.Dataset:
    options = self._options(image_size, augment) | {"data_dir": self.data_dir, "cache": self.cache}
    return data.tfds_images(self.name, split, **options)


class ImageFolder(_Images):
  """Image files in one directory per class, as in ImageNet on clusters.

  Images in subdirectories of a class are included. EXIF orientation is not applied. Pixels
  of more than 8 bits are scaled by the range of their type, floats from 0 … 1.

  Attributes:
    path: the directory of the splits, with image files as PATH/SPLIT/CLASS/*.
    train_split: the name of the subdirectory with the training images.
    eval_split: the name of the subdirectory with the validation images.
    image_size: the height and width in pixels to which images are cropped and resized.
    augment: the augmentation of training images; "none", "flip" (random left-right flip) or
      "crop" (random resized crop and flip).
    max_pixels: the largest number of pixels of an image that is decoded, a quarter of it for
      WebP and AVIF; larger images are treated as damaged.
  """

  path: str
  train_split: str = "train"
  eval_split: str = "val"
  image_size: Count = 224
  augment: Literal["none", "flip", "crop"] = "crop"
  max_pixels: Count = 178_956_970

  def _split(self, split: str, image_size: int, augment: Any) -> data.Dataset:
    # Labels count the classes of training, even if validation lacks some.
    is_train, root = split == self.train_split, f"{self.path}/{self.train_split}"
    for name in ("path", "train_split", "eval_split"):
      value = getattr(self, name)
      if not os.path.isdir(os.path.join(self.path, "" if name == "path" else value)):
        where = f" in {self.path}" * (name != "path")
        problem = f"no such directory{where}; image files are PATH/SPLIT/CLASS/*"
        raise ConfigError(f"--config.data.{name}={value}: {problem}")
    options = self._options(image_size, augment)
    options["classes"] = None if is_train else data.folder_classes(root)
    return data.image_folder(f"{self.path}/{split}", **options)


class Synthetic(Data):
  """Generated images that a model can learn: one pattern per class, plus noise.

  Attributes:
    num_examples: the number of training examples; there are a tenth as many validation
      examples.
    image_size: the height and width in pixels.
    channels: the number of color channels.
    num_classes: the number of classes.
  """

  num_examples: Count = 4096
  image_size: Count = 32
  channels: Count = 3
  num_classes: Count = 10

  def build(self) -> Split:
    like = (self.image_size, self.image_size, self.channels), self.num_classes
    n = self.num_examples
    return data.synthetic(n, *like), data.synthetic(max(n // 10, 1), *like, first=n)


class Arrays(Data):
  """NumPy arrays of inputs and targets, for notebooks.

  Targets are classes (integers [n]), several classes (0 and 1, [n, classes]) or numbers
  (floats [n] or [n, outputs]); the loss must fit them. config.json records a checksum of
  the arrays, or `identity`.

  Attributes:
    x: the training inputs [n, ...], uint8, other integers or floats; or a dict of named
      arrays [n, ...], such as {"image": …, "depth": …, "weight": …}.
    y: the training targets: classes (integers [n]), 0 or 1 for each class ([n, classes]), or
      numbers (floats [n] or [n, outputs]); None if `x` is a dict with all targets.
    x_eval: the validation inputs; None uses the last `eval_share` of x and y for validation
      instead of training.
    y_eval: the validation targets; required with `x_eval`.
    eval_share: the fraction of x and y that is used for validation if `x_eval` is None.
    num_classes: the number of classes or outputs; None derives it from the targets.
    mean: the mean to subtract from the inputs, one value or one per channel.
    std: the standard deviation to divide the inputs by, one value or one per channel.
    identity: a name that you choose for the contents of the arrays, recorded instead of their
      checksums; for arrays that are too large to read at each start. None records checksums.
  """

  x: Any
  y: Any = None
  x_eval: Any = None
  y_eval: Any = None
  eval_share: Annotated[float, "in (0, 1)"] = 0.1
  num_classes: Annotated[int | None, ">= 1"] = None
  mean: tuple[float, ...] = (0.0,)
  std: tuple[float, ...] = (1.0,)
  identity: str | None = None

  def __post_init__(self):
    from jaxscale.data.arrays import as_array

    if self.y is None and not isinstance(self.x, Mapping):
      raise UnsetError("Arrays.y is not set; give the targets, or a dict of named arrays as x")
    for name in ARRAYS:
      values = getattr(self, name)
      if values is not None and not isinstance(values, Mapping):  # `build` checks a dict
        as_array(f"Arrays.{name}", values)

  def build(self) -> Split:
    from jaxscale.data.arrays import array_splits

    options = {name: v for name, v in vars(self).items() if name != "identity"}
    return array_splits(**options)

  def __eq__(self, other: object) -> bool:
    return type(other) is Arrays and to_plain(self) == to_plain(other)

  def __hash__(self) -> int:
    return id(self)

  def as_plain(self) -> dict[str, Any]:
    """Return the fields as `to_plain` records them."""
    import numpy as np

    def plain(value: Any) -> Any:
      if isinstance(value, Mapping):
        return {name: plain(array) for name, array in value.items()}
      array = None if value is None else np.asarray(value)
      if array is None or self.identity is None:
        return array
      return {"shape": [*array.shape], "dtype": str(array.dtype)}

    return {n: plain(v) if n in ARRAYS else v for n, v in vars(self).items()}

  def __repr__(self) -> str:
    arrays = {n: v for n in ARRAYS if (v := getattr(self, n)) is not None}
    lists = {n: [*v] for n, v in arrays.items() if isinstance(v, Mapping)}
    shapes = [f"{n}={lists.get(n, getattr(v, 'shape', len(v)))}" for n, v in arrays.items()]
    return f"Arrays({', '.join(shapes)})"


ARRAYS = ("x", "y", "x_eval", "y_eval")


class _Text(Data):
  """Windows of text whose shapes and vocabulary are known without reading the text."""

  def abstract(self: Any, batch_size: int) -> Split:
    from jaxscale.data.tokenizer import read_tokenizer

    name, options = type(self).__name__, vars(self)
    if (vocab_size := options.get("vocab_size")) is None:
      names = options.get("tokenizer", "bytes"), options.get("separator")
      vocab_size = read_tokenizer(*names, field=f"{name}.tokenizer").vocab_size
    # Long enough for one step; the program does not depend on the number of examples.
    info = data.TextInfo(name, vocab_size, self.sequence_length)
    if options.get("packing", "stream") != "stream":
      info = info._replace(arrays={"documents": ((self.sequence_length,), "int32")})
    some = data.Dataset(info, 1000 * batch_size, _no_rows)
    return some, some


def _no_rows(indices: Any, draws: Any) -> Any:
  raise AssertionError("data that only describe shapes cannot be read")


class Text(_Text):
  """Python documentation as bytes, included in the package (1.1 MB training, 0.1 MB validation).

  Attributes:
    sequence_length: the number of bytes per example.
  """

  sequence_length: Count = 256

  tokenizer = "bytes"

  def build(self) -> Split:
    return data.text("train", **vars(self)), data.text("test", **vars(self))


class _TokenizedText(_Text):
  """Text that is tokenized once and cached.

  Attributes:
    tokenizer: the tokenizer; "bytes", or the path of a Hugging Face tokenizer.json, or of the
      folder of a model that has one.
    separator: the token that follows each document, e.g. "</s>"; None uses the tokenizer's
      end-of-text token ("<|endoftext|>", "</s>" or similar). The tokenizer "bytes" uses byte 0.
      For .bin and .npy files, the token ID, e.g. "50256"; None if it is not known.
    sequence_length: the number of tokens per example.
    packing: the way from documents to examples; "stream" (one stream of all documents, cut into
      examples), "masked_stream" (the stream, with attention inside a document only), "best_fit"
      (whole documents share an example, with attention inside a document only) or "none" (one
      document per example, padded).
    cache_dir: the directory in which tokenized text is cached; None uses
      ~/.cache/jaxscale/text.
  """

  tokenizer: str = "bytes"
  separator: str | None = None
  sequence_length: Count = 256
  packing: Literal["stream", "masked_stream", "best_fit", "none"] = "stream"
  cache_dir: str | None = None

  def __post_init__(self):
    is_bytes = self.tokenizer == "bytes" and getattr(self, "vocab_size", None) is None
    if self.separator is not None and is_bytes:
      problem = "bytes are separated by byte 0, so leave it out or set a tokenizer"
      raise ConfigError(f"{type(self).__name__}.separator={self.separator!r}: {problem}")

  def _splits(self, make: Any, where: str) -> Split:
    options = vars(self).copy()
    names = (where, "train_split", "eval_split")
    source, train, held_out = (options.pop(name) for name in names)
    return make(source, train, **options), make(source, held_out, **options)


class TFDSText(_TokenizedText):
  """Text dataset of TensorFlow Datasets.

  Attributes:
    name: the name of the dataset, as in `tfds.builder(name)`, e.g. "lm1b" or "wiki40b/en".
    feature: the name of the feature that holds the text; each example is a document.
    train_split: the split of the training documents in TFDS's notation, e.g. "train[:90%]".
    eval_split: the split of the validation documents in TFDS's notation, e.g. "train[90%:]".
    data_dir: the directory of prepared TFDS datasets; None uses $TFDS_DATA_DIR, or TFDS's
      default directory if that is not set.
  """

  name: str
  feature: str = "text"
  train_split: str = "train"
  eval_split: str = "test"
  data_dir: str | None = None

  def build(self) -> Split:
    return self._splits(data.tfds_text, "name")


class TextFiles(_TokenizedText):
  """Text files (.txt, .jsonl or .parquet), or files of tokens (.bin or .npy).

  Attributes:
    path: the directory that contains the files or directories of both splits.
    train_split: the training files: the name of a file in `path` without its extension, or of a
      directory of files.
    eval_split: the validation files: the name of a file in `path` without its extension, or of
      a directory of files.
    vocab_size: the vocabulary size, larger than every token; required for .bin and .npy files.
      None, for text, uses that of the tokenizer.
    dtype: the NumPy type of tokens in .bin files, e.g. "uint32", or ">u2" for big-endian;
      "auto" reads it from llm.c's header, or without one uses uint16 for vocabularies up to
      65,536 and uint32 above. A .npy file states its own type.
    encoding: the Python name of the encoding of .txt files, e.g. "latin-1"; "bytes" (only with
      tokenizer "bytes") reads files without decoding.
    field: the field of the objects in .jsonl files, and the column of .parquet files, that has
      the text of a document.
  """

  path: str
  train_split: str = "train"
  eval_split: str = "val"
  vocab_size: Annotated[int | None, ">= 1"] = None
  dtype: str = "auto"
  encoding: str = "utf-8"
  field: str = "text"

  def build(self) -> Split:
    return self._splits(data.text_files, "path")


class Chat(_TokenizedText):
  """Conversations in .jsonl or .parquet files, with the loss on the answers alone.

  A row has "messages" ([{"role", "content"}]), "prompt" and "completion", or "conversations"
  ([{"from", "value"}]). Each target outside of answers is -1, which is not learned.

  Attributes:
    path: the directory that contains the files or directories of both splits.
    train_split: the training files: the name of a file in `path` without its ending, or of a
      directory of files.
    eval_split: the validation files: the name of a file in `path` without its ending, or of a
      directory of files.
    separator: the token at which `jaxscale generate` ends an answer, e.g. "<|im_end|>"; None
      uses the tokenizer's end-of-text token.
    template: the chat template, in Jinja2: its text, or the path of a file; None uses that of
      the tokenizer (chat_template.jinja or tokenizer_config.json next to tokenizer.json), or if
      it has none, "role: content" for each message.
    packing: the way from conversations to examples; "best_fit" (whole conversations share an
      example, with attention inside a conversation only) or "none" (one per example, padded).
  """

  path: str
  train_split: str = "train"
  eval_split: str = "val"
  template: str | None = None
  packing: Literal["best_fit", "none"] = "best_fit"

  def build(self) -> Split:
    return self._splits(data.chat_files, "path")
