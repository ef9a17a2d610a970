"""Check ImageNet by counts and a sample of its images: `jaxscale doctor imagenet`."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxscale import data
from jaxscale.data.dataset import IMAGENET_EXAMPLES
from jaxscale.data.folder import listing
from jaxscale.errors import ConfigError
from jaxscale.jobs.preflight.finding import Finding
from jaxscale.metrics.text import byte_size

NUM_CLASSES = 1000


def check(
  data_dir: str | None = None, folder: str | None = None, sample: int = 256
) -> list[Finding]:
  """Check ImageNet's 1.28 million training and 50,000 validation images.

  Args:
    data_dir: the directory of TFDS; None means the default of TFDS.
    folder: a directory with train/CLASS/*.JPEG and val/ to check instead of TFDS.
    sample: the number of images to decode.

  Returns:
    The findings, in the order in which the user must act on them.
  """
  from jaxscale.data import partial_jpeg

  findings = _folder(Path(folder), sample) if folder else _prepared(data_dir, sample)
  # Without the library whole images are decoded, which is slower but correct.
  return [*findings, Finding(True, partial_jpeg.library().text)]


def _prepared(data_dir: str | None, sample: int) -> list[Finding]:
  """Check the dataset prepared by TFDS: version, format, counts, files, images."""
  import tensorflow_datasets as tfds
  from absl import logging

  logging.set_verbosity(logging.ERROR)  # the findings already report missing parts
  prepare = "register at image-net.org, download ILSVRC2012_img_train.tar and "
  prepare += "ILSVRC2012_img_val.tar into DIR, then, with jaxscale[tfds] (make tfds): "
  prepare += "jaxscale prepare imagenet2012 --manual-dir DIR"
  prepare += f" --data-dir {data_dir}" if data_dir else ""
  try:
    builder: Any = tfds.builder("imagenet2012", data_dir=data_dir)
  except Exception as e:  # TFDS raises various types for damaged metadata
    first = (str(e).splitlines() or [type(e).__name__])[0]
    return [Finding(False, f"cannot open imagenet2012: {first}", prepare)]
  path = Path(str(builder.data_path))
  if not builder.is_prepared():
    return [Finding(False, f"imagenet2012 is not prepared in {path}", prepare)]
  kind = builder.info.file_format.value
  text = f"imagenet2012 {builder.version} in {path}, format {kind}"
  findings = [Finding(kind in ("array_record", "tfrecord"), text, prepare)]
  for split, number in IMAGENET_EXAMPLES.items():
    if info := builder.info.splits.get(split):
      count = _count(split, info.num_examples, number, prepare)
      findings += [count, _shards(split, info)]
    else:
      findings.append(Finding(False, f"{split}: missing", prepare))
  if all(f.ok for f in findings):
    for split in IMAGENET_EXAMPLES:
      open_split = partial(data.tfds_images, "imagenet2012", split, data_dir=data_dir)
      findings += _sample(split, open_split, sample)
  return findings


def _count(split: str, count: int, expected: int, remedy: str) -> Finding:
  more = "" if count == expected else f", ImageNet has {expected:,}"
  return Finding(not more, f"{split}: {count:,} examples{more}", remedy)


def _shards(split: str, info: Any) -> Finding:
  """Check that all files of a split exist and have the recorded size."""
  paths = [Path(str(path)) for path in info.filepaths]
  sizes = {path.name: path.stat().st_size if path.is_file() else 0 for path in paths}
  if lost := [name for name, size in sizes.items() if not size]:
    text = f"{split}: {len(lost)} of {len(paths)} files missing or empty: {lost[0]}"
    return Finding(False, text, f"copy {lost[0]} and the other missing files again")
  size = sum(sizes.values())
  text = f"{split}: {len(paths)} files, {byte_size(size)}"
  if size < info.num_bytes:  # the recorded size excludes the framing of records
    text += f", but dataset_info.json has {byte_size(info.num_bytes)}"
    return Finding(False, text, "a file is truncated: copy the files again")
  return Finding(True, text)


def _folder(root: Path, sample: int) -> list[Finding]:
  """Check class subdirectories: their number, their images, and a sample."""
  if not root.is_dir():
    remedy = "give the directory that holds train/ and val/ as --folder"
    return [Finding(False, f"{root}: no such directory", remedy)]
  names = ("train", "val", "validation")
  if not (present := [name for name in names if (root / name).is_dir()]):
    remedy = "give the directory that holds train/WNID/*.JPEG and val/WNID/*.JPEG as "
    remedy += "--folder, or unpack the archives in this form"
    if root.name in names:
      remedy = f"give {root.absolute().parent} as --folder"
    return [Finding(False, f"{root}: has neither train/ nor val/", remedy)]
  findings = []
  classes: dict[str, tuple[str, ...]] = {}
  validation = next((name for name in present if name != "train"), "val")
  for split, name in {"train": "train", "validation": validation}.items():
    directory = root / name
    try:
      folder = listing(directory)
    except ConfigError as e:
      remedy = "train/WNID/*.JPEG and val/WNID/*.JPEG are needed: unpack the archives"
      findings.append(Finding(False, f"{split}: {e}", remedy))
      continue
    classes[split] = folder.classes
    number = len(folder.classes)
    text = f"{split}: {number:,} classes in {directory}"
    remedy = f"ImageNet has {NUM_CLASSES:,}: unpack the archive of every class"
    findings.append(Finding(number == NUM_CLASSES, text, remedy))
    remedy = f"unpack what is missing into {directory}"
    findings.append(_count(split, len(folder.files), IMAGENET_EXAMPLES[split], remedy))
    findings += _sample(split, partial(data.image_folder, directory), sample)
  if len(set(classes.values())) > 1:
    text = "train and validation have different class names"
    findings.append(Finding(False, text, "sort the validation images by WNID, too"))
  return findings


def _sample(split: str, open_split: Callable[..., Any], sample: int) -> list[Finding]:
  """Decode examples from a whole split; report the speed of a core, and damage."""
  from jaxscale.data.augment import uniform

  try:
    dataset = open_split(image_size=224, augment="crop")
    number = min(sample, dataset.num_examples)
    indices = np.linspace(0, dataset.num_examples - 1, number).astype(int)
    draws = uniform(0, indices, dataset.num_draws)
    dataset.load(indices[:1], draws[:1])  # imports the decoders before the measurement
    began = time.process_time()
    dataset.load(indices, draws)
    seconds = max(time.process_time() - began, 1e-9)
  except (ConfigError, OSError) as e:
    return [Finding(False, f"{split}: {e}", f"follow the advice in the line about {split}")]
  speed = f"{split}: {number / seconds:,.0f} images/s per core, crops of 224"
  text = f"{split}, sample of {number}: {dataset.damaged.describe()}"
  remedy = "copy these again; training skips them, evaluation counts them as wrong"
  return [Finding(True, speed), Finding(not dataset.damaged.count, text, remedy)]
