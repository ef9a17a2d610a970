"""Whether ImageNet is there, whole, and what to do next.

    jaxscale doctor imagenet [--data-dir DIR | --folder DIR]
                                       [--manual-dir DIR] [--md5]

Lines in the order in which one acts on them.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxscale import data
from jaxscale.data.folder import listing
from jaxscale.errors import ConfigError
from jaxscale.preflight.finding import Finding, bytes_text

# Examples by split (arXiv:1409.0575, table 2; TFDS imagenet2012 5.1.0).
NUM_EXAMPLES = {"train": 1_281_167, "validation": 50_000}
NUM_CLASSES = 1000


class Archive(NamedTuple):
  """A file that image-net.org gives on registration.

  Attributes:
    size: bytes (TFDS 4.9.10, datasets/imagenet2012/checksums.tsv).
    md5: of the file (torchvision/datasets/imagenet.py, ARCHIVE_META).
  """

  size: int
  md5: str


ARCHIVES = {
  "ILSVRC2012_img_train.tar": Archive(
    147_897_477_120, "1d675b47d978889d74fa0da5fadfb00e"
  ),
  "ILSVRC2012_img_val.tar": Archive(6_744_924_160, "29b22e2961454d5413ddabcf34fc5622"),
}
# TFDS writes what the archives hold once more, and moves nothing.
_SPACE = sum(archive.size for archive in ARCHIVES.values())
_PREPARE = "jaxscale prepare imagenet2012"


def check(
  data_dir: str | None = None,
  folder: str | None = None,
  manual_dir: str | None = None,
  md5: bool = False,
  sample: int = 256,
) -> list[Finding]:
  """ImageNet's 1.28 million training and 50,000 held-out images.

  Args:
    data_dir: where TFDS has it; None: TFDS's own.
    folder: instead of that, a directory with train/CLASS/*.JPEG and val/.
    manual_dir: where the downloaded archives are.
    md5: whether to sum the archives, too.
    sample: images to decode.

  Returns:
    In the order in which a user has to act on them: what something else is made
    from comes before it.
  """
  if folder:
    return [*_folder(Path(folder), sample), _decoder()]
  findings = [*_prepared(data_dir, manual_dir, sample), _decoder()]
  if manual_dir or any(_PREPARE in f.remedy for f in findings if not f.ok):
    findings = [*_archives(data_dir, manual_dir, md5), *findings]
  return findings


def _prepared(
  data_dir: str | None, manual_dir: str | None, sample: int
) -> list[Finding]:
  """The dataset as TFDS prepared it: version, format, counts, files, images."""
  import tensorflow_datasets as tfds
  from absl import logging

  logging.set_verbosity(logging.ERROR)  # it is we who say what is missing
  prepare = f"{_PREPARE} --manual-dir {manual_dir or 'DIR'}" + (
    f" --data-dir {data_dir}" if data_dir else ""
  )
  try:
    builder: Any = tfds.builder("imagenet2012", data_dir=data_dir)
  except Exception as e:  # TFDS raises anything on metadata that is damaged
    first = (str(e).splitlines() or [type(e).__name__])[0]
    return [Finding(False, f"imagenet2012 does not open: {first}", prepare)]
  path = Path(str(builder.data_path))
  if not builder.is_prepared():
    remedy = f"in an environment with jaxscale[tfds] (make tfds): {prepare}"
    return [Finding(False, f"imagenet2012 is not prepared in {path}", remedy)]
  kind = builder.info.file_format.value
  findings = [
    Finding(
      kind in ("array_record", "tfrecord"),
      f"imagenet2012 {builder.version} in {path}, format {kind}",
      prepare,
    )
  ]
  for split, number in NUM_EXAMPLES.items():
    if split not in builder.info.splits:
      findings.append(Finding(False, f"{split}: not there", prepare))
      continue
    info = builder.info.splits[split]
    findings.append(_count(split, info.num_examples, number, prepare))
    findings.append(_shards(split, info))
  if all(f.ok for f in findings):
    for split in NUM_EXAMPLES:
      open_split = lambda s=split: data.tfds_images(  # noqa: E731
        "imagenet2012", s, data_dir=data_dir, image_size=224, augment="crop"
      )
      findings += _sample(split, open_split, sample)
  return findings


def _decoder() -> Finding:
  """How crops of JPEGs are decoded: whole images are slower, and no mistake."""
  from jaxscale.data import partial_jpeg

  return Finding(True, partial_jpeg.library().text)


def _count(split: str, found: int, wanted: int, remedy: str) -> Finding:
  text = f"{split}: {found:,} examples"
  if found == wanted:
    return Finding(True, text)
  return Finding(False, f"{text}, ImageNet has {wanted:,}", remedy)


def _shards(split: str, info: Any) -> Finding:
  """Whether every file of a split is there and together as large as written."""
  paths = [Path(str(path)) for path in info.filepaths]
  missing = [path.name for path in paths if not path.is_file()]
  empty = [path.name for path in paths if path.is_file() and not path.stat().st_size]
  if missing or empty:
    lost = [*missing, *empty]
    text = f"{split}: {len(lost)} of {len(paths)} files missing or empty: {lost[0]}"
    return Finding(False, text, f"copy {lost[0]} and the like again")
  size = sum(path.stat().st_size for path in paths)
  text = f"{split}: {len(paths)} files, {bytes_text(size)}"
  if size < info.num_bytes:  # of the records alone, before any framing
    text += f", dataset_info.json says {bytes_text(info.num_bytes)}"
    return Finding(False, text, "a file is truncated: copy them again")
  return Finding(True, text)


def _folder(root: Path, sample: int) -> list[Finding]:
  """Class subdirectories: their number, the images in them, and a sample."""
  if not root.is_dir():
    remedy = "give the directory that holds train/ and val/ as --folder"
    return [Finding(False, f"{root}: no such directory", remedy)]
  if not any((root / name).is_dir() for name in ("train", "val", "validation")):
    inside = root.name in ("train", "val", "validation")
    remedy = (
      f"give {root.absolute().parent} as --folder"
      if inside
      else "give the directory that holds train/WNID/*.JPEG and val/WNID/*.JPEG as "
      "--folder, or unpack the archives so"
    )
    return [Finding(False, f"{root}: has neither train/ nor val/", remedy)]
  findings = []
  classes: dict[str, tuple[str, ...]] = {}
  for split, names in {
    "train": ("train",),
    "validation": ("val", "validation"),
  }.items():
    found = [root / name for name in names if (root / name).is_dir()]
    directory = found[0] if found else root / names[0]
    try:
      folder = listing(directory)
    except ConfigError as e:
      remedy = "train/WNID/*.JPEG and val/WNID/*.JPEG are needed: unpack the archives"
      findings.append(Finding(False, f"{split}: {e}", remedy))
      continue
    classes[split] = folder.classes
    number = len(folder.classes)
    findings.append(
      Finding(
        number == NUM_CLASSES,
        f"{split}: {number:,} classes in {directory}",
        f"ImageNet has {NUM_CLASSES:,}: unpack the archive of every class",
      )
    )
    remedy = f"unpack what is missing into {directory}"
    findings.append(
      _count(split, len(folder.files), NUM_EXAMPLES[split], remedy)
    )  # fmt: skip
    open_split = lambda d=directory: data.image_folder(  # noqa: E731
      d, image_size=224, augment="crop"
    )
    findings += _sample(split, open_split, sample)
  if len(set(classes.values())) > 1:
    text = "train and validation have classes of different names"
    findings.append(Finding(False, text, "sort the held-out images by WNID as well"))
  return findings


def _sample(split: str, open_split: Callable[[], Any], sample: int) -> list[Finding]:
  """Decode examples spread over a split: speed of a core, and damage."""
  from jaxscale.data.augment import uniform

  try:
    dataset = open_split()
    number = min(sample, dataset.num_examples)
    indices = np.linspace(0, dataset.num_examples - 1, number).astype(int)
    draws = uniform(0, indices, dataset.num_draws)
    dataset.load(indices[:1], draws[:1])  # imports the decoders
    began = time.process_time()
    dataset.load(indices, draws)
    seconds = max(time.process_time() - began, 1e-9)
  except (ConfigError, OSError) as e:
    return [Finding(False, f"{split}: {e}", f"do what the line on {split} says")]
  damaged = dataset.damaged
  return [
    Finding(True, f"{split}: {number / seconds:,.0f} images/s a core, crops of 224"),
    Finding(
      not damaged.count,
      f"{split}, sample of {number}: {damaged.describe()}",
      "copy these again; training passes over them, evaluation counts them as wrong",
    ),
  ]


def _archives(data_dir: str | None, manual_dir: str | None, md5: bool) -> list[Finding]:
  """What preparing needs: space on the disk, and the archives, whole."""
  from tensorflow_datasets.core import constants

  target = Path(data_dir or constants.DATA_DIR).expanduser()
  manual = Path(manual_dir) if manual_dir else target / "downloads" / "manual"
  to_load = sum(_lacking(manual / name, known) for name, known in ARCHIVES.items())
  return [
    *_room(target, manual, to_load),
    *(_archive(manual / name, *known, md5) for name, known in ARCHIVES.items()),
  ]


def _lacking(path: Path, known: Archive) -> int:
  """Bytes of an archive that are still to be downloaded."""
  found = path.stat().st_size if path.is_file() else 0
  return max(known.size - found, 0)


def _room(target: Path, manual: Path, to_load: int) -> list[Finding]:
  """Space for what preparing writes and for archives to come, disk by disk."""
  wants: dict[int, list[tuple[Path, int, str, str]]] = {}
  for path, size, what, option in (
    (manual, to_load, "the archives still to come take", "--manual-dir"),
    (target, _SPACE, "preparing writes", "--data-dir"),
  ):
    there = next(p for p in (path, *path.absolute().parents) if p.exists())
    if size:
      on_disk = wants.setdefault(there.stat().st_dev, [])
      on_disk.append((there, size, f"{what} {bytes_text(size)}", option))
  findings = []
  for on_disk in wants.values():
    needed, (there, *_, option) = sum(size for _, size, *_ in on_disk), on_disk[-1]
    free = shutil.disk_usage(there).free
    parts = ", ".join(part for _, _, part, _ in on_disk)
    remedy = f"make room for {bytes_text(needed)} in {there}, or give another {option}"
    findings.append(
      Finding(free >= needed, f"{bytes_text(free)} free in {there}, {parts}", remedy)
    )
  return findings


def _archive(path: Path, size: int, md5: str, check_md5: bool) -> Finding:
  if not path.is_file():
    remedy = (
      f"register at image-net.org, download {path.name} (ILSVRC2012), and give its "
      "directory as --manual-dir"
    )
    return Finding(False, f"{path} is not there", remedy)
  found = path.stat().st_size
  if found != size:
    text = f"{path} has {found:,} bytes, should have {size:,}"
    return Finding(False, text, f"download {path.name} again, e.g. with wget -c")
  if not check_md5:
    return Finding(True, f"{path}: {bytes_text(size)}, as published (--md5 sums it)")
  with open(path, "rb") as file:
    digest = hashlib.file_digest(file, "md5").hexdigest()
  if digest != md5:
    text = f"{path}: md5 {digest}, should be {md5}"
    return Finding(False, text, f"download {path.name} again")
  return Finding(True, f"{path}: {bytes_text(size)} and md5 as published")
