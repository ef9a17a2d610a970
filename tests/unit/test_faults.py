"""Errors of the system are not damaged examples; splits share one limit of files."""

import contextlib
import errno
import functools
import os
import resource

import numpy as np
import pytest

from jaxscale import data
from jaxscale.data import folder, tfrecord
from jaxscale.data.faults import raise_if_system_error
from support.images import example, jpeg_bytes, write_folder, write_tfds, write_tfrecord

warnings = pytest.mark.filterwarnings("ignore")  # of protobuf and TFDS
pytestmark = [warnings, pytest.mark.usefixtures("own_cache")]


def descriptors():
  return len(os.listdir("/proc/self/fd")) - 1  # one is of the listing


@contextlib.contextmanager
def few_descriptors(left):
  """So many more files can be opened inside."""
  before = resource.getrlimit(resource.RLIMIT_NOFILE)
  # A new file has the lowest number that is free, and that is what is limited.
  held = [os.open(os.devnull, os.O_RDONLY) for _ in range(left + 1)]
  for number in held:
    os.close(number)
  resource.setrlimit(resource.RLIMIT_NOFILE, (held[left], before[1]))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def prepared(root, file_format, number=8):
  """Return a dataset with one shard per example."""
  image = jpeg_bytes(np.full((24, 32, 3), 90, np.uint8))
  shards = [[example(image, i)] for i in range(number)]
  write_tfds(root, "photos", file_format, {"train": shards})
  return data.tfds_images("photos", "train", data_dir=str(root), image_size=8)


@pytest.mark.parametrize("kind", ["folder", "array_record", "tfrecord"])
def test_a_process_without_descriptors_stops(tmp_path, kind):
  if kind == "folder":
    write_folder(tmp_path, "train", 4)
    dataset = data.image_folder(tmp_path / "train", image_size=8)
  else:
    dataset = prepared(tmp_path, kind)
  dataset.load(np.array([0]), None)  # imports the decoders
  left = 0 if kind == "folder" else 2
  with few_descriptors(left), pytest.raises(OSError, match="ulimit -n") as error:
    dataset.load(np.arange(8), None)
  assert error.value.errno == errno.EMFILE and dataset.damaged.count == 0
  name = str(error.value.filename)
  assert "cat/" in name if kind == "folder" else "photos 'train' example" in name
  if kind != "array_record":  # which remembers that a file did not open
    assert (dataset.load(np.arange(8), None)["label"] >= 0).all()
    assert dataset.damaged.count == 0


AWAY = [errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.EIO, errno.ENOTCONN]


@pytest.mark.parametrize("number", AWAY)
def test_a_disk_that_is_away_stops_the_pipeline(tmp_path, monkeypatch, number):
  write_folder(tmp_path, "train", 8)
  dataset = data.image_folder(tmp_path / "train", image_size=8, augment="flip")

  def away(path, **options):
    raise OSError(number, os.strerror(number))

  monkeypatch.setattr(folder, "read_bytes", away)
  with pytest.raises(OSError, match="a system error, not a damaged example") as error:
    next(data.train_batches(dataset, 8))
  assert error.value.errno == number and dataset.damaged.count == 0


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.EISDIR])
def test_a_file_that_is_gone_or_closed_is_damage(tmp_path, monkeypatch, number):
  write_folder(tmp_path, "train", 4)
  dataset = data.image_folder(tmp_path / "train", image_size=8)
  real = folder.read_bytes

  def closed(path, **options):
    if path.match("cat/001.jpg"):
      raise OSError(number, os.strerror(number))
    return real(path, **options)

  monkeypatch.setattr(folder, "read_bytes", closed)
  assert dataset.load(np.arange(8), None)["label"].tolist()[:3] == [0, -1, 0]
  assert dataset.damaged.names == ["cat/001.jpg"]


def test_errors_without_a_number_are_known_by_their_words():
  with pytest.raises(OSError, match="x 3") as error:
    raise_if_system_error(RuntimeError("pread() failed: Stale file handle; reading"), "x 3")
  assert error.value.errno == errno.ESTALE
  raise_if_system_error(RuntimeError("Corrupted record: hash mismatch"), "x 3")
  raise_if_system_error(OSError("ends in the middle of a record"), "x 3")


def test_all_splits_share_one_limit_of_open_files(tmp_path, monkeypatch):
  few = functools.lru_cache(4)(tfrecord.open_file.__wrapped__)
  monkeypatch.setattr(tfrecord, "open_file", few)
  reads = []
  for split in ("train", "eval"):
    shards = []
    for i in range(6):
      path = tmp_path / f"{split}-{i}"
      write_tfrecord(path, [bytes([i]) * 3])
      shards.append(tfrecord.Shard(str(path), 1, 0, 1))
    reads.append(tfrecord.random_access(shards))
  reads[0](0)  # what other splits of this process held is closed by now
  before = descriptors() - few.cache_info().currsize
  for i in (*range(6), *range(6)):
    for read in reads:
      assert read(i) == bytes([i]) * 3
  assert descriptors() - before == few.cache_info().currsize == 4


def test_a_file_in_place_of_another_is_opened_anew(tmp_path):
  path = tmp_path / "a"
  for content in (b"old", b"newer"):
    write_tfrecord(tmp_path / "next", [content])
    os.replace(tmp_path / "next", path)
    read = tfrecord.random_access([tfrecord.Shard(str(path), 1, 0, 1)])
    assert read(0) == content
