"""ImageNet as TFDS prepares it: array_record and TFRecord, without TensorFlow."""

import functools
import os

import numpy as np
import pytest

from jaxscale import data
from jaxscale.data import jpeg, tfrecord
from support.commands import run_python
from support.errors import config_error
from support.images import crc32c, example, jpeg_bytes, write_tfds, write_tfrecord

# Protobuf and TFDS warn.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("own_cache")]

# Files as TFDS writes them, without TensorFlow and without our own code.


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
  """Write 23 + 6 examples in both formats, in shards of unequal length."""
  from skimage import data as photos

  coffee = photos.coffee()
  records = [example(jpeg_bytes(coffee[i : i + 40 + i, i : i + 60]), i % 10) for i in range(29)]
  splits = {"train": [records[:9], records[9:17], records[17:23]], "validation": [records[23:]]}
  roots = {}
  for file_format in ("array_record", "tfrecord"):
    roots[file_format] = tmp_path_factory.mktemp(file_format)
    write_tfds(roots[file_format], "photos", file_format, splits)
  return roots


def test_the_checksum_is_crc_32c():
  assert crc32c(b"123456789") == 0xE3069283  # RFC 3720's check value, by convention


SPLITS = ("train", "validation", "train[:90%]", "train[8:18]", "train[-3:]", "train+validation")


@pytest.mark.parametrize("split", SPLITS)
def test_tfrecord_gives_what_tfds_gives(prepared, split):
  import tensorflow_datasets as tfds

  builder = tfds.builder("photos", data_dir=str(prepared["array_record"]))
  known = list(builder.as_data_source(split, decoders={"image": tfds.decode.SkipDecoding()}))
  loaded = []
  for root in prepared.values():
    dataset = data.tfds_images("photos", split, data_dir=str(root), image_size=16)
    assert dataset.num_examples == len(known) > 0
    assert dataset.info.image_shape == (16, 16, 3) and dataset.info.num_classes == 10
    loaded.append(dataset.load(np.arange(len(known))[::-1], None))
  for batch in loaded:
    for got, label, item in zip(batch["image"], batch["label"], known[::-1], strict=True):
      np.testing.assert_array_equal(got, jpeg.decode_view(item["image"], 16, 3, None)[0])
      assert label == item["label"]


def test_a_split_that_is_not_there_is_one_line(prepared):
  for root in prepared.values():
    for split in ("trian", "train[:90"):
      with config_error(split):
        data.tfds_images("photos", split, data_dir=str(root), image_size=16)


def test_reading_imports_no_tensorflow(prepared, tmp_path):
  """Not even where it is installed: a stand-in on the path must stay unread."""
  fake = tmp_path / "site" / "tensorflow"
  fake.mkdir(parents=True)
  (fake / "__init__.py").write_text("raise SystemExit('TensorFlow was imported')")
  code = f"""if True:
    import sys; from jaxscale import data
    photos = data.tfds_images(
      "photos", "train[:50%]", data_dir={str(prepared["tfrecord"])!r}, image_size=8,
      augment="crop")
    batch = next(data.train_batches(photos, 8))
    assert batch["image"].shape == (8, 8, 8, 3) and photos.damaged.count == 0
    assert "tensorflow_datasets" in sys.modules and "tensorflow" not in sys.modules
    try: data.tfds_images("mnist", "train", data_dir="/nonexistent")
    except Exception as e: print(e)
    assert "tensorflow" not in sys.modules
    """
  path = os.pathsep.join([str(fake.parent), os.environ.get("PYTHONPATH", "")])
  done = run_python("-c", code, PYTHONPATH=path, PYTHONWARNINGS="ignore")
  assert done.returncode == 0, done.stderr
  assert "jaxscale prepare mnist" in done.stdout


def shard(tmp_path, sizes=(5, 70, 0, 33)):
  records = [bytes([i]) * n for i, n in enumerate(sizes)]
  path = tmp_path / "x.tfrecord-00000-of-00001"
  write_tfrecord(path, records)
  return path, records


def test_records_are_found_where_they_are(tmp_path):
  path, records = shard(tmp_path)
  read = tfrecord.random_access([tfrecord.Shard(str(path), 4, 1, 3)])
  assert [read(i) for i in range(3)] == records[1:]
  with pytest.raises(IndexError):
    read(3)


BROKEN = {
  "is invalid at byte 123 of 171": lambda b: b[:-1],
  "is invalid at byte 21 of 25": lambda b: b[:25],
  "has 1 records, but dataset_info.json says 4": lambda b: b[:21],
  "is invalid at byte 0 of": lambda b: b[:8] + b"\1" + b[9:],
  "has 0 records": lambda b: b"",
  "is missing": lambda b: None,
}


@pytest.mark.parametrize("hint", BROKEN)
def test_a_broken_shard_is_one_line(tmp_path, hint):
  path, _ = shard(tmp_path)
  whole = path.read_bytes()
  path.unlink()
  if (rest := BROKEN[hint](whole)) is not None:
    path.write_bytes(rest)
  with config_error(hint, str(path)):
    tfrecord.random_access([tfrecord.Shard(str(path), 4, 0, 4)])


def test_the_index_is_made_once_and_again_for_another_file(tmp_path, monkeypatch):
  path, records = shard(tmp_path)
  walked = []
  walk = tfrecord.index_shard
  monkeypatch.setattr(tfrecord, "index_shard", lambda p: walked.append(p) or walk(p))
  reads = [tfrecord.random_access([tfrecord.Shard(str(path), 4, 0, 4)]) for _ in range(3)]
  assert len(walked) == 1 and all(read(3) == records[3] for read in reads)
  for kept in (tmp_path / "cache").rglob("*.npz"):
    kept.write_bytes(b"damaged")
  assert tfrecord.random_access([tfrecord.Shard(str(path), 4, 0, 4)])(1) == records[1]
  path, records = shard(tmp_path, (9, 9, 9, 9, 9))
  assert tfrecord.random_access([tfrecord.Shard(str(path), 5, 0, 5)])(4) == records[4]
  assert len(walked) == 3


def test_more_shards_than_descriptors(tmp_path, monkeypatch):
  monkeypatch.setattr(tfrecord, "open_file", functools.lru_cache(2)(tfrecord.open_file.__wrapped__))
  shards = []
  for i in range(7):
    write_tfrecord(tmp_path / f"{i}", [bytes([i]) * 3])
    shards.append(tfrecord.Shard(str(tmp_path / f"{i}"), 1, 0, 1))
  read = tfrecord.random_access(shards)
  before = len(os.listdir("/proc/self/fd"))
  assert [read(i)[0] for i in (*range(7), *range(7))] == [*range(7), *range(7)]
  assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_another_size_opens_no_tfds_split_again(prepared):
  from jaxscale.data.tfds import _opened

  where = str(prepared["tfrecord"])
  data.tfds_images("photos", "train", data_dir=where, image_size=16)
  before = _opened.cache_info().misses
  data.tfds_images("photos", "train", data_dir=where, image_size=24, augment="crop")
  assert _opened.cache_info().misses == before


def test_a_tfds_split_is_known_by_its_version_and_shards(prepared):
  where = {name: str(path) for name, path in prepared.items()}

  def identity(split, name="tfrecord"):
    return data.tfds_images("photos", split, data_dir=where[name], image_size=8).identity

  train = identity("train[:90%]")
  assert train == identity("train", "array_record")  # how many is counted apart
  assert train["shards"] == {"train": [9, 8, 6]} and "photos" in train["version"]
  assert identity("train+validation")["shards"] == {"train": [9, 8, 6], "validation": [6]}


@pytest.mark.parametrize("file_format", ["array_record", "tfrecord"])
def test_a_damaged_record_is_damage_not_the_end(tmp_path, photo, file_format):
  good = [example(jpeg_bytes(photo[: 40 + i, :60]), i) for i in range(6)]
  bad = [example(b"no image", 1), b"\xff no example", example(b"", 3)]
  write_tfds(tmp_path, "torn", file_format, {"train": [[*good[:3], *bad], good[3:]]})
  dataset = data.tfds_images("torn", "train", data_dir=str(tmp_path), image_size=16)
  assert dataset.load(np.arange(9), None)["label"].tolist() == [0, 1, 2, -1, -1, -1, 3, 4, 5]
  assert dataset.damaged.indices == [3, 4, 5]
  assert dataset.damaged.names[0] == "torn 'train' example 3"
