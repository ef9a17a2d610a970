"""Datasets of arrays: in memory, embedded in the package, or generated.

The embedded default is the UCI handwritten digits, which are real, small and offline: 1,797
images of 8x8 pixels with values 0 … 16, the test part of E. Alpaydin and C. Kaynak, "Optical
Recognition of Handwritten Digits", UCI Machine Learning Repository (1998), licence CC BY 4.0.
They equal scikit-learn's `load_digits` bit for bit, which a test checks. Images are in the
order of writing; the last 360 (a fifth) are for validation.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib import resources
from typing import Any, Literal

import numpy as np

from jaxscale.data.augment import Augment, shift, uniform_bits
from jaxscale.data.dataset import NO_CLASS, Dataset, DatasetInfo, Spec, array_identity, batch_shapes
from jaxscale.errors import ConfigError, invalid
from jaxscale.metrics.text import few

# Mean and standard deviation of the 1,437 training images.
INFO = DatasetInfo("digits", (8, 8, 1), 10, mean=(4.89,), std=(6.01,))

# Arrays with fields of their own in `DatasetInfo`, and the dtypes of absent ones.
_STANDARD = {"image": "uint8", "label": "int32"}


def from_arrays(
  info: DatasetInfo, inputs: np.ndarray, targets: np.ndarray, augment: Augment | None = None
) -> Dataset:
  """Create a dataset from arrays in memory.

  Args:
    info: the description of the examples; `array_info` creates one.
    inputs: the inputs [n, ...]; images are uint8 [n, h, w, c].
    targets: the targets [n, ...]; classes are integers [n].
    augment: the augmentation of the inputs in training; None for no augmentation.

  Raises:
    ConfigError: the numbers of inputs and targets differ, their shapes are not those of
      `info`, or a class is out of range.

  Example:
    >>> x, y = np.zeros((4, 3), "float32"), np.array([0, 1, 1, 0])
    >>> from_arrays(array_info(x, y), x, y).num_examples
    4
  """
  if len(inputs) != len(targets):
    counts = f"{len(inputs):,} inputs and {len(targets):,} targets"
    raise ConfigError(f"from_arrays: {counts}; give the same number of both")
  shapes = ("inputs", inputs, info.image_shape), ("targets", targets, info.label_shape)
  for name, array, expected in shapes:
    if expected is None or array.shape[1:] != tuple(expected):
      problem = f"but {expected} in info; create info from the same arrays (`array_info`)"
      raise ConfigError(f"from_arrays: {name} have shape {array.shape[1:]} each, {problem}")
  if targets.ndim == 1 and targets.dtype.kind in "iu":
    _check_classes(info.name, targets, NO_CLASS, info.num_classes)
  targets = cast(f"{info.name}: targets", targets, info.label_dtype)

  def load(indices, draws):
    batch = inputs[indices]
    if augment is not None and draws is not None:
      batch = augment.apply(batch, draws)
    return {"image": batch, "label": targets[indices]}

  num_draws = augment.num_draws if augment else 0
  identity = functools.partial(array_identity, inputs, targets)
  return Dataset(info, len(inputs), load, num_draws, identity=identity)


def from_named(name: str, arrays: Mapping[str, Any], **fields: Any) -> Dataset:
  """Create a dataset from named arrays in memory: several inputs, targets, weights.

  "image" is the input of models that take one, "label" the target of the built-in losses,
  and "weight" the weight of each example. Other names are for your own model and loss.

  Args:
    name: the name for messages.
    arrays: the arrays [n, ...] by name.
    fields: further fields of the `DatasetInfo`, such as num_classes.

  Raises:
    ConfigError: an array is not numeric, or the arrays differ in length.

  Example:
    >>> pairs = {"photo": np.zeros((4, 8, 8, 3), "uint8"), "caption": np.zeros((4, 16), int)}
    >>> from_named("pairs", pairs).load(np.arange(2), None)["caption"].shape
    (2, 16)
  """
  held = _named_arrays(f"{name}: ", arrays)
  info = named_info(name, {key: (a.shape[1:], str(a.dtype)) for key, a in held.items()}, **fields)
  kinds = {key: dtype for key, (_, dtype) in batch_shapes(info, 1).items()}
  held = {key: cast(f"{name}: {key}", array, kinds[key]) for key, array in held.items()}
  if (info.label_shape, info.label_dtype, "num_classes" in fields) == ((), "int32", False):
    info = info._replace(num_classes=int(held["label"].max(initial=0)) + 1)

  def load(indices, draws):
    del draws
    return {key: array[indices] for key, array in held.items()}

  identity = functools.partial(array_identity, *held.values())
  return Dataset(info, len(next(iter(held.values()))), load, identity=identity)


def named_info(name: str, specs: Mapping[str, Spec], **fields: Any) -> DatasetInfo:
  """Describe named arrays as batches have them.

  Floats become float32, and integers int32 except uint8, which only labels lose; bool stays.

  Args:
    name: the name for messages.
    specs: the shape of an example and the stored dtype of each array.
    fields: further fields of the `DatasetInfo`.

  Example:
    >>> named_info("fields", {"image": ((8, 8, 3), "float64")}).dtype
    'float32'
  """
  kinds = {key: "float32" if np.dtype(d).kind == "f" else "int32" for key, (_, d) in specs.items()}
  kinds |= {key: dtype for key, (_, dtype) in specs.items() if dtype in ("uint8", "bool")}
  if kinds.get("label") == "uint8":  # Classes have one dtype, whatever they are stored as.
    kinds["label"] = "int32"
  arrays: dict[str, Any] = {key: (tuple(specs[key][0]), kind) for key, kind in kinds.items()}
  image, label = (arrays.pop(key, (None, kind)) for key, kind in _STANDARD.items())
  described = {"image_shape": image[0], "dtype": image[1], "arrays": arrays}
  described |= {"label_shape": label[0], "label_dtype": label[1]}
  return DatasetInfo(name, **(described | fields))


def _named_arrays(prefix: str, arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
  """Return named arrays of finite numbers, after a check that they have the same length."""
  held = {key: as_array(f"{prefix}{key}", values) for key, values in arrays.items()}
  sizes = {key: len(array) for key, array in held.items()}
  if not sizes or len({*sizes.values()}) > 1:
    owner = prefix.rstrip(": .")
    raise ConfigError(f"{owner}: arrays of {sizes} examples; give arrays of the same length")
  for key, array in held.items():
    _check_finite(f"{prefix}{key}", array)
  return held


def _check_classes(name: str, targets: np.ndarray, lowest: int, count: int) -> None:
  """Check that integer targets, one per example, are classes in range."""
  wrong = targets[(targets < lowest) | (targets >= count)]
  if len(wrong):
    fix = "fix the labels or num_classes (use float targets for regression)"
    raise ConfigError(f"{name}: target {wrong[0]} is out of range [0, {count - 1}]; {fix}")


def cast(field: str, array: np.ndarray, dtype: Any) -> np.ndarray:
  """Cast an array; floats may be rounded, but no value may be lost.

  Raises:
    ConfigError: a value is out of the dtype's range, or a fraction would be truncated.
  """
  kind, dtype = array.dtype.kind, np.dtype(dtype)
  if np.can_cast(array.dtype, dtype, "safe"):
    return array.astype(dtype, copy=False)
  with np.errstate(all="ignore"):
    changed = array.astype(dtype)
    if kind == dtype.kind == "f":
      lost = np.isinf(changed) & np.isfinite(array)
    elif dtype.kind == "f":  # Check integers beyond 2^24.
      lost = changed.astype(np.float64) != array
    else:
      limits = np.iinfo(dtype)
      lost = (array < limits.min) | (array > limits.max)
      lost |= array != np.rint(array) if kind == "f" else False
  if lost.any():
    problem = f"has {array[lost][0]}, which {dtype} cannot represent"
    raise invalid(field, ..., problem, f"subtract an offset, scale it or convert it to {dtype}")
  return changed


def check_scaling(
  owner: str, mean: tuple[float, ...], std: tuple[float, ...], channels: int
) -> None:
  """Check that mean or standard deviation fit the channels.

  Raises:
    ConfigError: there is neither one number nor one per channel, or a std is not above 0.
  """
  for name, values in (("mean", mean), ("std", std)):
    is_valid = len(values) in (1, channels) and np.isfinite(values).all()
    if not is_valid or (name == "std" and min(values) <= 0):
      fix = f"give one number, or {channels} for {channels} channels"
      fix += ", all above 0" if name == "std" else ""
      raise ConfigError(f"{owner}{name}={values}: {fix}")


def array_info(
  x: np.ndarray,
  y: np.ndarray,
  *,
  num_classes: int | None = None,
  mean: tuple[float, ...] = (0.0,),
  std: tuple[float, ...] = (1.0,),
) -> DatasetInfo:
  """Describe arrays for a model; integer and bool targets [n] are classes.

  Raises:
    ConfigError: a class is negative, or mean or std do not fit the last dim of x.
  """
  check_scaling("Arrays.", mean, std, x.shape[-1] if x.ndim > 1 else 1)
  is_class = y.ndim == 1 and y.dtype.kind in "iub"
  outputs = 1 if y.ndim == 1 else y.shape[-1]
  if is_class:
    outputs = int(y.max(initial=y.dtype.kind == "b")) + 1
    _check_classes("Arrays", y, 0, num_classes or outputs)
  dtype, label_dtype = ("float32" if a.dtype.kind == "f" else "int32" for a in (x, y))
  kinds = "uint8" if x.dtype == np.uint8 else dtype, y.shape[1:], label_dtype
  return DatasetInfo("Arrays", x.shape[1:], num_classes or outputs, mean, std, *kinds)


def array_splits(
  x: Any, y: Any, x_eval: Any, y_eval: Any, eval_share: float, **options: Any
) -> tuple[Dataset, Dataset]:
  """Create the datasets of `Arrays` in data/settings.py.

  Raises:
    ConfigError: lengths differ, no example is left for training, or x is not numeric.
  """
  is_named, hint = isinstance(x, Mapping), ""
  if not is_named and (x_eval is None) != (y_eval is None):
    raise ConfigError("Arrays.x_eval, y_eval: only one is set; set both or neither")
  train = _numbers("", x, y)
  if x_eval is None:
    kept = num_train("Arrays.eval_share", len(next(iter(train.values()))), eval_share)
    train, held_out = ({k: a[at] for k, a in train.items()} for at in np.s_[:kept, kept:])
    hint = "; validation takes the last examples, so shuffle x and y together"
  else:
    held_out = _numbers("_eval", x_eval, y_eval)
  if is_named:
    options = {name: value for name, value in options.items() if value is not None}
    pair = [from_named("Arrays", arrays, **options) for arrays in (train, held_out)]
    return same_examples("Arrays.x_eval", *pair)
  (x, y), (x_eval, y_eval) = train.values(), held_out.values()
  for name, a, b in (("x", x, x_eval), ("y", y, y_eval)):
    is_alike = name == "x" or (a.dtype.kind == "f") == (b.dtype.kind == "f")
    if a.shape[1:] != b.shape[1:] or not is_alike:
      shown, other = (f"{v.dtype}{[*v.shape[1:]]}" for v in (b, a))
      problem, fix = (
        f"has examples of {shown}, but Arrays.{name} of {other}",
        "use the same for both",
      )
      raise invalid(f"Arrays.{name}_eval", ..., problem, fix)
  _check_same_scale(x, x_eval)
  info = array_info(x, np.concatenate([y, y_eval]), **options)
  x, x_eval = (cast(f"Arrays.{name}", a, info.dtype) for name, a in (("x", x), ("x_eval", x_eval)))
  datasets = from_arrays(info, x, y), from_arrays(info, x_eval, y_eval)
  is_class = y.ndim == 1 and info.label_dtype == "int32"
  notes = _class_notes(y, y_eval, hint) if is_class else ()
  if is_class and options.get("num_classes") is None:
    classes = np.arange(info.num_classes)
    if len(lacking := np.setdiff1d(classes, np.concatenate([y, y_eval]))):
      problem = f"the {info.num_classes:,} classes include all numbers up to the largest target"
      notes += (f"Arrays: no example has target {few(lacking)}; {problem}",)
  return datasets[0]._replace(notes=notes), datasets[1]


def _numbers(ending: str, x: Any, y: Any) -> dict[str, np.ndarray]:
  """Return the arrays of a dict, or of inputs and targets, after the checks of each."""
  if isinstance(x, Mapping):
    return _named_arrays("Arrays: ", x if y is None else {**x, "label": y})
  held = _named_arrays("Arrays.", {f"x{ending}": x, f"y{ending}": y})
  labels = held[f"y{ending}"]
  if labels.dtype.kind in "iu":
    held[f"y{ending}"] = cast(f"Arrays.y{ending}", labels, np.int32)
  return held


def same_examples(field: str, train: Dataset, held_out: Dataset) -> tuple[Dataset, Dataset]:
  """Return two datasets with the same number of classes.

  Raises:
    ConfigError: their examples have different names, shapes or dtypes.
  """
  shapes = [batch_shapes(dataset.info, 1) for dataset in (train, held_out)]
  if shapes[0] != shapes[1]:
    problem = f"has examples of {shapes[1]}, but those for training are {shapes[0]}"
    raise invalid(field, ..., problem, "use the same names, shapes and dtypes for both")
  infos: list[Any] = [train.info, held_out.info]
  count = max(info.num_classes for info in infos)
  first, second = (info._replace(num_classes=count) for info in infos)
  return train._replace(info=first), held_out._replace(info=second)


def num_train(field: str, count: int, eval_share: float) -> int:
  """Return the number of examples that are left for training.

  Raises:
    ConfigError: none is left.
  """
  kept = count - max(round(count * eval_share), 1)
  if kept <= 0:
    problem = "leaves no example for training"
    raise invalid(field, eval_share, problem, "use more examples")
  return kept


def _check_finite(field: str, array: np.ndarray) -> None:
  if array.dtype.kind == "f" and not (is_finite := np.isfinite(array)).all():
    row = int(np.argmin(is_finite.reshape(len(array), -1).all(axis=1)))
    problem = f"has NaN or infinite values, first in row {row}"
    fix = "replace them, e.g. by np.nan_to_num, or remove these rows"
    raise invalid(field, ..., problem, fix)


def as_array(field: str, values: Any) -> np.ndarray:
  """Return values as a numeric array.

  Raises:
    ConfigError: the values are not numeric, or rows differ in length.
  """
  fix = "use a NumPy array of numbers [n, ...]"
  if np.ma.is_masked(values):
    raise invalid(field, ..., "has masked values", "replace them, e.g. by .filled(0)")
  try:
    array = np.asarray(values)
  except (ValueError, TypeError) as e:
    problem = "has rows of different lengths" if isinstance(e, ValueError) else str(e)
    raise invalid(field, ..., problem, fix) from None
  if array.ndim == 0:
    raise invalid(field, type(values).__name__, "is not an array", fix)
  if not array.size:
    raise invalid(field, ..., f"has the shape {array.shape}, without numbers", fix)
  if array.dtype.kind not in "uifb":
    raise invalid(field, ..., f"has the dtype {array.dtype}", fix)
  return array


def _check_same_scale(x: np.ndarray, x_eval: np.ndarray) -> None:
  """Check that inputs are not fractions in one set and whole numbers in the other."""
  largest = [max(float(v.max()), -float(v.min())) for v in (x, x_eval)]
  a, b = (x, x_eval) if largest[0] <= largest[1] else (x_eval, x)
  is_small = a.dtype.kind == "f" and min(largest) <= 1 < b.max()
  if is_small and (b.dtype.kind != "f" or (_is_whole(b) and not _is_whole(a))):
    shown = [f"{v.dtype} values from {v.min():g} to {v.max():g}" for v in (x, x_eval)]
    problem = f"has {shown[1]}, but Arrays.x has {shown[0]}"
    raise invalid("Arrays.x_eval", ..., problem, "scale both in the same way")


def _is_whole(array: np.ndarray) -> bool:
  return bool((array == np.rint(array)).all())


def _class_notes(y: np.ndarray, y_eval: np.ndarray, hint: str) -> tuple[str, ...]:
  """Return notes on targets that only one of the two sets has."""
  new, unseen = np.setdiff1d(y_eval, y), np.setdiff1d(y, y_eval)
  notes = ()
  if len(new):
    share = f"{np.isin(y_eval, new).sum():,} of {len(y_eval):,} validation examples"
    notes += (f"Arrays: no training example has target {few(new)}, but {share} do",)
  if len(unseen):
    notes += (f"Arrays: no validation example has target {few(unseen)}",)
  return tuple(note + hint for note in notes)


def digits(
  split: Literal["train", "test"], *, augment: Literal["none", "shift"] = "shift"
) -> Dataset:
  """Create the digits: 1,437 for training or 360 for validation.

  Args:
    split: "train" or "test".
    augment: "shift" moves training images by up to one pixel.

  Example:
    >>> digits("test").num_examples
    360
  """
  path = resources.files("jaxscale.data") / "digits.npz"
  with resources.as_file(path) as file, np.load(file) as arrays:
    images, labels = arrays["images"], arrays["labels"]
  part = slice(None, -360) if split == "train" else slice(-360, None)
  moved = shift(1) if augment == "shift" else None
  return from_arrays(INFO, images[part], labels[part], moved)


def synthetic(
  num_examples: int,
  image_shape: tuple[int, int, int],
  num_classes: int,
  *,
  seed: int = 0,
  first: int = 0,
) -> Dataset:
  """Create images of one random pattern per class, plus noise with twice its amplitude.

  Args:
    num_examples: the number of examples.
    image_shape: (height, width, channels).
    num_classes: the number of classes; example i has label i mod num_classes.
    seed: the seed of patterns and noise.
    first: the index of the first example; a different range of indices gives a validation
      set of the same classes.
  """
  size = int(np.prod(image_shape))
  words = -(-size // 8)  # Each random number gives eight pixels.

  def noise(seed, ids):
    counters = ids.astype(np.uint64)[:, None] * np.uint64(words)
    bits = uniform_bits(seed, counters + np.arange(words, dtype=np.uint64))
    return bits.astype("<u8").view(np.uint8)[:, :size].astype(np.uint16)

  def load(indices, draws):
    del draws  # Every example is already new.
    ids = np.asarray(indices) + first
    labels = (ids % num_classes).astype(np.int32)
    # Generate patterns each time, as those of 21,841 classes would fill the memory.
    pixels = (noise(seed + 1, labels) + 2 * noise(seed, ids)) // 3
    images = pixels.astype(np.uint8).reshape(-1, *image_shape)
    return {"image": images, "label": labels}

  info = DatasetInfo("synthetic", image_shape, num_classes, (127.5,), (55.0,))
  return Dataset(info, num_examples, load)
