"""Data settings, and the datasets that they build. Does not import JAX."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any, Literal

from jaxscale import data
from jaxscale.config.bases import Data
from jaxscale.config.bounds import Count
from jaxscale.config.plain import to_plain
from jaxscale.errors import ConfigError

if TYPE_CHECKING:
  from jaxscale.data.augment import EvalView
  from jaxscale.data.dataset import Dataset

# The names that --config.data= accepts (by HOMES in config/choice.py).
__all__ = ["TFDS", "Arrays", "Digits", "ImageFolder", "Synthetic", "TFDSText", "Text", "TextFiles"]

Split = tuple["Dataset", "Dataset"]  # for training and for validation


class Digits(Data):
  """UCI handwritten digits, 8x8, embedded in the package (1,437 + 360).

  Attributes:
    augment: "none", or "shift" by up to one pixel.
  """

  augment: Literal["none", "shift"] = "shift"

  def build(self) -> Split:
    return data.digits("train", augment=self.augment), data.digits("test")


class _Images(Data):
  """Encoded images, of which `_split` makes views of a size.

  Attributes:
    eval_view: what evaluation sees of images that are resized: "mlperf" (shorter
      side to 256/224 of the size, centre crop), "google" (the centre 7/8, bicubic),
      or what torchvision and timm do (shorter side to the size / eval_crop,
      antialiased, centre crop): "bilinear" or "bicubic".
    eval_crop: share of the resized shorter side that those two keep, timm's crop_pct;
      None: 0.875, which is 224/256.
  """

  eval_view: Literal["mlperf", "google", "bilinear", "bicubic"] = "mlperf"
  eval_crop: Annotated[float | None, "in (0, 1]"] = None

  def __post_init__(self):
    if self.eval_crop is not None and self.eval_view in ("mlperf", "google"):
      field = f"{type(self).__name__}.eval_crop={self.eval_crop}"
      remedy = "use 'bilinear' or 'bicubic', or leave it out"
      raise ConfigError(f"{field}: eval_view={self.eval_view!r} has its own; {remedy}")

  def _eval_view(self) -> EvalView:
    if self.eval_view in ("mlperf", "google"):
      return self.eval_view
    return data.CenterCrop(self.eval_view, self.eval_crop or 0.875)

  def build(self: Any) -> Split:
    held_out = self._split(self.eval_split, self.image_size, "none")
    return self.resized(self.image_size), held_out

  def resized(self: Any, image_size: int) -> Dataset:
    return self._split(self.train_split, image_size, self.augment)


class TFDS(_Images):
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
    cache: decode everything once and keep it in memory.
    max_pixels: larger images are not decoded, and count as damaged.
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
      raise ConfigError("TFDS.augment='crop': set image_size too, e.g. 224")
    if self.augment == "crop" and self.cache:
      raise ConfigError("TFDS.cache=True: crops need whole images, set it to False")

  def abstract(self, batch_size: int) -> Split | None:
    """Return ImageNet's shapes, so that programs compile before the data is available."""
    from jaxscale.data.dataset import IMAGENET_EXAMPLES, Dataset
    from jaxscale.data.encoded import image_info

    sizes = [IMAGENET_EXAMPLES.get(s) for s in (self.train_split, self.eval_split)]
    if self.name != "imagenet2012" or self.image_size is None or None in sizes:
      return None
    shape = (self.image_size, self.image_size, 3)
    info = image_info(self.name, shape, 1000, None, None)
    train, held_out = (Dataset(info, size or 0, _no_rows) for size in sizes)
    return train, held_out

  def _split(self, split: str, image_size: int | None, augment: Any) -> Dataset:
    options: Any = {"data_dir": self.data_dir, "cache": self.cache, "image_size": image_size}
    options |= {"augment": augment, "eval_view": self._eval_view(), "max_pixels": self.max_pixels}
    return data.tfds_images(self.name, split, **options)


class ImageFolder(_Images):
  """Image files in one directory per class, as clusters keep ImageNet.

  Images in folders of a class count, too. EXIF orientation is not applied. Pixels of
  more than 8 bits are scaled by the range of their type, floats from 0 … 1.

  Attributes:
    path: directory of the splits, each of one subdirectory per class.
    train_split: the subdirectory trained on.
    eval_split: the subdirectory evaluated on.
    image_size: height and width to crop and resize to.
    augment: "none", "flip" or "crop" (random resized crop and flip).
    max_pixels: larger images are not decoded, and count as damaged.
  """

  path: str
  train_split: str = "train"
  eval_split: str = "val"
  image_size: Count = 224
  augment: Literal["none", "flip", "crop"] = "crop"
  max_pixels: Count = 178_956_970

  def _split(self, split: str, image_size: int, augment: Any) -> Dataset:
    try:
      # Labels follow the classes of training, whichever classes evaluation has.
      classes = None
      if split != self.train_split:
        classes = data.folder_classes(f"{self.path}/{self.train_split}")
      options: Any = {"classes": classes, "image_size": image_size, "augment": augment}
      options |= {"eval_view": self._eval_view(), "max_pixels": self.max_pixels}
      return data.image_folder(f"{self.path}/{split}", **options)
    except ConfigError:
      self._check_directories()
      raise

  def _check_directories(self) -> None:
    """Report the setting whose directory does not exist."""
    for name in ("path", "train_split", "eval_split"):
      value = getattr(self, name)
      inside = "" if name == "path" else value
      if not os.path.isdir(os.path.join(self.path, inside)):
        where = f" in {self.path}" * (name != "path")
        why = f"no such directory{where}; images are PATH/SPLIT/CLASS/*.JPEG"
        raise ConfigError(f"--config.data.{name}={value}: {why}")


class Synthetic(Data):
  """Learnable images made on the fly: a pattern per class, plus noise.

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

  def build(self) -> Split:
    like = (self.image_size, self.image_size, self.channels), self.num_classes
    n = self.num_examples
    return data.synthetic(n, *like), data.synthetic(max(n // 10, 1), *like, first=n)


class Arrays(Data):
  """Examples in memory, from a notebook: numpy arrays of inputs and targets.

  Targets are classes (integers [n]), several of them (0 and 1, [n, classes]) or numbers
  (floats [n] or [n, outputs]); the `Loss` must be for such. config.json keeps a
  checksum of the arrays in their place, or `identity`.

  Attributes:
    x: inputs [n, ...], uint8, another integer or float32.
    y: targets.
    x_eval: held-out inputs; None: the last `eval_share` of x, which are then not
      trained on.
    y_eval: their targets.
    eval_share: held-out share of x and y.
    num_classes: classes, or outputs; None: as the targets show.
    mean: per channel, subtracted from the inputs.
    std: per channel, the inputs are divided by it.
    identity: a name of the arrays' contents that is recorded in place of their
      checksums, for arrays too large to be read at each start; None: checksums.
  """

  x: Any
  y: Any
  x_eval: Any = None
  y_eval: Any = None
  eval_share: Annotated[float, "in (0, 1)"] = 0.1
  num_classes: Annotated[int | None, ">= 1"] = None
  mean: tuple[float, ...] = (0.0,)
  std: tuple[float, ...] = (1.0,)
  identity: str | None = None

  def __post_init__(self):
    from jaxscale.data.arrays import as_array

    for name in ARRAYS:
      if (values := getattr(self, name)) is not None:
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
      array = None if value is None else np.asarray(value)
      if array is None or self.identity is None:
        return array
      return {"shape": [*array.shape], "dtype": str(array.dtype)}

    return {n: plain(v) if n in ARRAYS else v for n, v in vars(self).items()}

  def __repr__(self) -> str:
    given = {n: v for n in ARRAYS if (v := getattr(self, n)) is not None}
    shapes = [f"{n}={getattr(v, 'shape', len(v))}" for n, v in given.items()]
    return f"Arrays({', '.join(shapes)})"


ARRAYS = ("x", "y", "x_eval", "y_eval")


class _Text(Data):
  """Windows of text, which say without being read what a model has to know."""

  def abstract(self: Any, batch_size: int) -> Split:
    from jaxscale.data.dataset import Dataset, TextInfo
    from jaxscale.data.tokenizer import read_tokenizer

    name, options = type(self).__name__, vars(self)
    if (vocab_size := options.get("vocab_size")) is None:
      found = options.get("tokenizer", "bytes"), options.get("separator")
      vocab_size = read_tokenizer(*found, field=f"{name}.tokenizer").vocab_size
    # The number of examples does not change the program, but the run needs steps.
    info = TextInfo(name, vocab_size, self.sequence_length)
    some = Dataset(info, 1000 * batch_size, _no_rows)
    return some, some


def _no_rows(indices: Any, draws: Any) -> Any:
  raise AssertionError("these data have a shape alone")


class Text(_Text):
  """Documentation of Python, byte by byte, embedded in the package (1.1 + 0.1 MB).

  Attributes:
    sequence_length: bytes of an example.
  """

  sequence_length: Count = 256

  def build(self) -> Split:
    return data.text("train", **vars(self)), data.text("test", **vars(self))


class _TokenizedText(_Text):
  """Text whose tokens are made once and kept.

  Attributes:
    tokenizer: "bytes", or the path of a tokenizer.json of Hugging Face.
    separator: the tokenizer's token between documents; None: by its usual names.
    sequence_length: tokens of an example.
    cache_dir: where its tokens are kept; None: ~/.cache/jaxscale/text.
  """

  tokenizer: str = "bytes"
  separator: str | None = None
  sequence_length: Count = 256
  cache_dir: str | None = None

  def __post_init__(self):
    if self.separator is not None and self.tokenizer == "bytes":
      why = "bytes are separated by byte 0, so leave it out or set a tokenizer"
      raise ConfigError(f"{type(self).__name__}.separator={self.separator!r}: {why}")

  def _splits(self, make: Any, where: str) -> Split:
    options = vars(self).copy()
    names = (where, "train_split", "eval_split")
    place, train, held_out = (options.pop(name) for name in names)
    return make(place, train, **options), make(place, held_out, **options)


class TFDSText(_TokenizedText):
  """Any text dataset of TensorFlow Datasets, by its name.

  Attributes:
    name: the dataset, as in `tfds.builder(name)`, e.g. "lm1b" or "wiki40b/en".
    feature: the one that is the text; an example is a document.
    train_split: documents trained on, in TFDS's split notation.
    eval_split: documents evaluated on.
    data_dir: where it is prepared; None: $TFDS_DATA_DIR or TFDS's own default.
  """

  name: str
  feature: str = "text"
  train_split: str = "train"
  eval_split: str = "test"
  data_dir: str | None = None

  def build(self) -> Split:
    return self._splits(data.tfds_text, "name")


class TextFiles(_TokenizedText):
  """Text in files: NAME.txt, or tokens in NAME.bin or NAME.npy.

  Attributes:
    path: directory of the splits.
    train_split: NAME of a file without its ending, or of a directory of files.
    eval_split: NAME of what is evaluated on.
    vocab_size: of .bin and .npy files, whose tokens are below it.
    dtype: NumPy's name of the type of tokens in .bin files, e.g. "uint32", or ">u2" for
      big-endian; "auto" takes that of llm.c's header, else uint16 for a vocabulary up
      to 65,536, else uint32. A .npy file has its own.
    encoding: the encoding of .txt files, by Python's name, e.g. "latin-1"; "bytes",
      with the tokenizer of this name, takes them as they are.
  """

  path: str
  train_split: str = "train"
  eval_split: str = "val"
  vocab_size: Annotated[int | None, ">= 1"] = None
  dtype: str = "auto"
  encoding: str = "utf-8"

  def build(self) -> Split:
    return self._splits(data.text_files, "path")
