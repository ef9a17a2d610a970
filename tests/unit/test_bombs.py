"""Small files that would take much memory or time: refused by what their headers say."""

import gzip
import io
import json
import os
import struct
import subprocess
import sys
import threading
import time
import zlib

import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pytest
import tensorstore as ts
from PIL import Image
from pyarrow import parquet

from jaxscale import data
from jaxscale.checkpoint import checkpoint_files, checksum
from jaxscale.checkpoint.checksum import DamagedError
from jaxscale.config.record import describe_run
from jaxscale.data import jpeg, npy_files, token_files, tokenizer
from jaxscale.data.npy_files import StoredArray, stored_array
from jaxscale.errors import ConfigError, user_message
from jaxscale.files import check_regular, open_regular, read_bytes, read_json_lines
from jaxscale.weights.safetensors import read_index, read_part, view, write
from support import fuzzing
from support.errors import config_error
from support.odd_images import NOISE, with_scans
from support.sources import ROWS, zarr_array
from support.two_users import needs_root

limits = pytest.fixture(fuzzing.limits, autouse=True)  # 256 MB each
HOLE = 1 << 40


def hole(path, content=b""):
  path.write_bytes(content)
  os.truncate(path, HOLE)
  return path


# Pictures


def tiff(tags, content, count=1):
  """Return a grey TIFF whose `count` tiles are all the same bytes."""
  tags = {258: 8, 262: 1, 277: 1, **tags}
  start = 10 + 12 * (len(tags) + 2) + 4  # of the tiles' offsets, then sizes, then bytes
  first, size = start + 8 * count, len(content)
  offsets, sizes = (start, start + 4 * count) if count > 1 else (first, size)
  entries = [*((tag, 1, x) for tag, x in tags.items()), (324, count, offsets), (325, count, sizes)]
  head = b"".join(struct.pack("<HHII", tag, 4, n, x) for tag, n, x in sorted(entries))
  numbers = struct.pack(f"<{2 * count}I", *[first] * count, *[size] * count)
  return b"II*\0" + struct.pack("<IH", 8, len(entries)) + head + bytes(4) + numbers + content


def tiled_tiff(width, bits=8):
  """Return a TIFF of 16 x 16 pixels with one tile of width x width."""
  tags = {256: 16, 257: 16, 258: bits, 259: 8, 322: width, 323: width}
  return tiff(tags, zlib.compress(bytes(100)))


def webp(width, height):
  """Return the beginning of a lossless WebP of this size."""
  bits = (width - 1) | (height - 1) << 14
  return b"RIFF\x20\0\0\0WEBPVP8L\x10\0\0\0\x2f" + bits.to_bytes(4, "little") + bytes(16)


def test_a_tile_of_a_tiff_counts_as_pixels():
  with pytest.raises(ValueError, match=r"46,320 x 46,320 pixels, more than"):
    jpeg.decode(tiled_tiff(46_320), 3)
  with pytest.raises(ValueError, match="decoder error"):  # in the limit, and truncated
    jpeg.decode(tiled_tiff(256), 3)


@pytest.mark.parametrize("kind, value", [(1, b"abcd"), (2, b"ab\0"), (7, b"abcd")])
def test_a_text_in_place_of_a_tile_size_is_not_repeated(kind, value):
  """A text times a number took 4 GB for 134 bytes."""
  data = tiled_tiff(2**31 - 1, bits=16)
  width = struct.pack("<HHII", 322, 4, 1, 2**31 - 1)
  assert width in data
  data = data.replace(width, struct.pack("<HHI", 322, kind, len(value)) + value.ljust(4, b"\0"))
  with pytest.raises(ValueError, match="not a readable image"):
    jpeg.decode(data, 3)


def test_a_webp_may_have_a_quarter_of_the_pixels():
  with pytest.raises(ValueError, match=r"13,000 x 13,000 pixels, more than 1/4 of"):
    jpeg.decode(webp(13_000, 13_000), 3)
  for kind in ("WEBP", "AVIF"):
    Image.fromarray(NOISE).save(out := io.BytesIO(), kind)
    assert jpeg.decode(out.getvalue(), 3, max_pixels=4 * 64 * 48)[1] == kind
    with pytest.raises(ValueError, match=r"more than 1/4 of --config\.data\.max_pixels=12287"):
      jpeg.decode(out.getvalue(), 3, max_pixels=4 * 64 * 48 - 1)


@pytest.mark.parametrize("has_simplejpeg", [True, False])
def test_scans_count_by_the_pixels_that_each_passes(has_simplejpeg, monkeypatch):
  if not has_simplejpeg:
    monkeypatch.setattr(jpeg, "simplejpeg", None)
  jpeg.decode(with_scans(30), 3)
  with pytest.raises(ValueError, match="64 x 48 pixels and 40 scans, which is too slow"):
    jpeg.decode(with_scans(30), 3, max_pixels=2 * 64 * 48 - 1)


@pytest.mark.parametrize("count", [1, 9])
def test_scans_of_jpegs_in_a_tiff_count_as_those_of_a_file(count):
  """95 scans of 7,000 x 7,000 pixels took 2.2 s. Nine tiles may be the same bytes."""
  side = 96 if count == 1 else 32
  tags = {256: 96, 257: 96, 259: 7, 322: side, 323: side}
  Image.new("L", (side, side), 99).save(out := io.BytesIO(), "JPEG", progressive=True)
  grey = out.getvalue()
  data = tiff(tags, with_scans(40 - grey.count(b"\xff\xda"), grey), count)
  pixels, _ = jpeg.decode(data, 1, max_pixels=2 * 96 * 96)
  assert pixels.shape == (96, 96, 1) and (pixels == 99).all()
  with pytest.raises(
    ValueError, match=f"a JPEG of {40 * count} scans in a TIFF, which is too slow"
  ):
    jpeg.decode(data, 1, max_pixels=2 * 96 * 96 - 1)


def test_many_strips_of_a_scan_each_are_one_scan():
  picture = Image.fromarray(np.resize(NOISE, (160, 160, 3)))
  picture.save(out := io.BytesIO(), "TIFF", compression="jpeg", tiffinfo={278: 16})
  assert out.getvalue().count(b"\xff\xda") >= 10
  assert jpeg.decode(out.getvalue(), 3, max_pixels=160 * 160)[1] == "TIFF"


def test_pixels_of_16_bits_take_little_more_than_their_levels():
  pixels = np.full((2000, 3000, 3), 0x8000, np.uint16)  # 36 MB; uint64 would be 144 MB
  levels, name = jpeg._to_levels(pixels, 16)
  assert (levels == 128).all() and name == "16-bit"


def test_a_file_of_an_image_folder_may_have_4_bytes_for_each_of_max_pixels(tmp_path):
  (tmp_path / "cat").mkdir()
  Image.fromarray(NOISE).save(tmp_path / "cat" / "0.png")
  hole(tmp_path / "cat" / "1.jpg", b"\xff\xd8\xff")
  os.symlink("/dev/zero", tmp_path / "cat" / "2.jpg")
  os.mkfifo(tmp_path / "pipe")
  os.symlink("../pipe", tmp_path / "cat" / "3.jpg")
  dataset = data.image_folder(tmp_path, image_size=8)
  dataset.load(np.arange(4), None)
  assert dataset.damaged.names == ["cat/1.jpg", "cat/2.jpg", "cat/3.jpg"]


# Files


def test_only_regular_files_are_opened(tmp_path):
  os.mkfifo(tmp_path / "fifo")
  os.symlink("fifo", tmp_path / "link")
  os.symlink("/dev/zero", tmp_path / "zero")
  for name in ("fifo", "link", "zero"):
    for opens in (open_regular, read_bytes, lambda path: check_regular([path])):
      with pytest.raises(OSError, match="not a file"):
        opens(tmp_path / name)
  with pytest.raises(IsADirectoryError):
    open_regular(tmp_path)
  (tmp_path / "file").write_bytes(b"abc")
  os.symlink("file", tmp_path / "to file")
  assert read_bytes(tmp_path / "to file") == b"abc"


def test_a_folder_is_checked_with_all_it_links_to(tmp_path):
  for name in ("a/b", "c"):
    (tmp_path / name).mkdir(parents=True)
  (tmp_path / "a" / "b" / "file").touch()
  os.symlink("..", tmp_path / "a" / "b" / "up")
  os.symlink("missing", tmp_path / "a" / "broken")
  check_regular([tmp_path / "a"])
  os.symlink("../c", tmp_path / "a" / "to c")
  os.mkfifo(tmp_path / "c" / "fifo")
  with pytest.raises(OSError, match=r"not a file: '.*to c/fifo'"):
    check_regular([tmp_path / "a"])


def test_a_hole_is_not_read(tmp_path):
  clock = time.process_time()
  with pytest.raises(OSError, match="larger than 64 MiB"):
    read_bytes(hole(tmp_path / "a"))
  with config_error("config.json", match="larger than 64 MiB"):
    hole(tmp_path / "config.json")
    describe_run(tmp_path)
  assert read_bytes(tmp_path / "a", last_bytes=3) == bytes(3)
  lines = hole(tmp_path / "b.jsonl", b'{"a": 1}\n')
  assert read_json_lines(lines) == [{"a": 1}]
  assert time.process_time() - clock < 30  # not for ever


def test_lines_after_a_damaged_one_are_read(tmp_path):
  text = b'{"a": 1}\n' + bytes(3 << 20) + b'\n{"a": 2}\n{"a": 3}'
  (tmp_path / "a.jsonl").write_bytes(text)
  assert read_json_lines(tmp_path / "a.jsonl") == [{"a": 1}, {"a": 2}, {"a": 3}]
  assert read_json_lines(tmp_path / "a.jsonl", last_bytes=20) == [{"a": 2}, {"a": 3}]


# Parameters and checkpoints


def test_safetensors_are_read_by_part(tmp_path):
  arrays = {"w": np.arange(24, dtype="f4").reshape(2, 3, 4), "s": np.float32(5).reshape(())}
  write(tmp_path / "a", {n: (x.dtype, x.shape) for n, x in arrays.items()}, arrays.values())
  index = read_index(tmp_path / "a")
  parts = [lambda a: a[1], lambda a: a.T[1:3, ::2], lambda a: a[:, 1, 2:], lambda a: a[:0]]
  for part in [*parts, lambda a: a.reshape(6, 4)[::5, 1], lambda a: a.sum(0)]:
    np.testing.assert_array_equal(read_part(index["w"], part), part(arrays["w"]))
  assert view(index["s"]) == 5


def test_a_part_of_a_large_array_takes_its_own_memory(tmp_path):
  """Columns of a matrix of 2 GB."""
  shape = (1 << 12, 1 << 17)
  header = {"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4 * shape[0] * shape[1]]}}
  text = json.dumps(header).encode()
  (path := tmp_path / "a").write_bytes(len(text).to_bytes(8, "little") + text)
  os.truncate(path, 8 + len(text) + 4 * shape[0] * shape[1])
  part = read_part(read_index(path)["w"], lambda a: a.T[5:7])
  assert part.shape == (2, shape[0]) and not part.any()


def test_parameters_whose_owner_truncates_the_file_are_one_error(tmp_path):
  """A memory map would end the process by SIGBUS."""
  write(tmp_path / "a", {"w": (np.dtype("f4"), (1 << 16,))}, [np.ones(1 << 16, "f4")])
  stored = read_index(tmp_path / "a")["w"]
  os.truncate(tmp_path / "a", 1 << 12)
  with pytest.raises(OSError, match="became shorter while it was read") as error:
    view(stored)
  line, code = user_message(error.value)
  assert line.endswith("a'; copy it again") and code == 2
  os.mkfifo(tmp_path / "b.safetensors")
  with config_error("b.safetensors", match="not a file"):
    read_index(tmp_path / "b.safetensors")


def test_a_header_of_many_arrays_is_refused(tmp_path):
  header = {f"{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(200_000)}
  text = json.dumps(header).encode()
  (tmp_path / "a").write_bytes(len(text).to_bytes(8, "little") + text)
  clock = time.process_time()
  with config_error("a", match=r"header of [\d,]+ bytes, more than 8,388,608"):
    read_index(tmp_path / "a")
  assert time.process_time() - clock < 1


@pytest.fixture
def checkpoint(tmp_path):
  """Return the folder of a checkpoint, and a function that replaces its array."""
  (path := tmp_path / "5").mkdir()
  state = {"params": {"w": jnp.arange(12.0).reshape(3, 4)}}
  checkpoint_files.start_writing(path, state)()
  checkpoint_files.merge(path)
  leaves = checksum.manifest(state)
  checkpoint_files.finish(path, {"step": 5, "metrics": {}, "leaves": leaves})

  def replace(shape, compressor, value=0.0):
    base = {"driver": "file", "path": f"{path}/state/"}
    store = {"driver": "ocdbt", "base": base, "path": "params.w/"}
    metadata = {"dtype": "<f4", "shape": shape, "chunks": shape, "compressor": compressor}
    spec = {"driver": "zarr", "kvstore": store, "metadata": metadata}
    array = ts.open(spec, create=True, delete_existing=True).result()
    array[:1].write(np.float32(value)).result()
    shapes = {"params/w": leaves["params/w"] | {"shape": shape}}
    checkpoint_files.finish(path, {"step": 5, "metrics": {}, "leaves": shapes})

  return path, replace


def test_an_array_larger_than_its_checkpoint_is_not_read(checkpoint):
  path, replace = checkpoint
  assert checkpoint_files.leaf_reader(path)("params/w")[2, 3] == 11
  replace([3, 4], None, 7.0)
  with pytest.raises(DamagedError, match="checksum of params/w"):
    checkpoint_files.leaf_reader(path)("params/w")
  with open(path / "state" / "more", "wb") as more:  # The array is not written as a whole.
    more.write(b"1")
  base = {"driver": "file", "path": f"{path}/state/"}
  store = {"driver": "ocdbt", "base": base, "path": "params.w/.zarray"}
  kv = ts.KvStore.open(store).result()
  node = json.loads(kv.read("").result().value)
  kv.write("", json.dumps(node | {"shape": [1 << 20, 1 << 20]}).encode()).result()
  with pytest.raises(DamagedError, match="larger than the files"):
    checkpoint_files.leaf_reader(path)("params/w")


def test_a_compressed_array_of_another_user_is_not_unpacked(checkpoint):
  path, replace = checkpoint
  replace([64, 4], {"id": "zlib", "level": 1}, 1.0)
  needs_root()
  with pytest.raises(DamagedError, match="checksum"):  # in one's own folder it is read
    checkpoint_files.leaf_reader(path)("params/w")
  os.chown(path / "state", 12345, -1)
  with pytest.raises(DamagedError, match="compressed, and its folder belongs to another user"):
    checkpoint_files.leaf_reader(path)("params/w")


def test_a_checkpoint_with_a_pipe_does_not_wait(checkpoint):
  path, _ = checkpoint
  (index := path / "state" / "manifest.ocdbt").unlink()
  os.mkfifo(index)
  with pytest.raises(DamagedError, match="not a file"):
    checkpoint_files.leaf_reader(path)("params/w")


# Tables and texts


def test_an_archive_that_unpacks_to_much_more_is_refused(tmp_path):
  np.savez_compressed(tmp_path / "a.npz", x=np.zeros((1, 100 << 20), np.uint8))
  with config_error("path", match=r"unpack to [\d,]+, more than 200 times \(write it without"):
    data.Numpy(path=str(tmp_path / "a.npz")).build()
  np.savez_compressed(tmp_path / "b.npz", x=np.zeros((8, 1 << 20), np.uint8))
  assert npy_files.arrays_of(tmp_path / "b.npz")["x"].shape == (8, 1 << 20)  # few bytes


def test_rows_of_a_large_file_are_read_one_by_one(tmp_path, monkeypatch):
  array = np.arange(60, dtype=np.int16).reshape(20, 3)
  np.save(tmp_path / "a", array)
  monkeypatch.setattr(npy_files, "_SMALL", 10)
  stored = stored_array(tmp_path / "a.npy")
  assert isinstance(stored, StoredArray) and len(stored) == 20
  rows = np.array([3, 4, 19, 0, 3])
  np.testing.assert_array_equal(stored[rows], array[rows])
  np.testing.assert_array_equal(stored[5:9], array[5:9])
  os.truncate(tmp_path / "a.npy", 130)
  with pytest.raises(OSError, match="became shorter"):
    stored[rows]
  np.save(tmp_path / "f", np.asfortranarray(array))
  np.testing.assert_array_equal(stored_array(tmp_path / "f.npy"), array)


def test_a_header_of_numpy_claims_no_memory(tmp_path):
  for order in ("False", "True"):
    text = f"{{'descr': '<f4', 'fortran_order': {order}, 'shape': (8, 999999999999), }}"
    content = b"\x93NUMPY\1\0" + struct.pack("<H", len(text) + 1) + text.encode() + b"\n"
    (tmp_path / "a.npy").write_bytes(content + bytes(64))
    with config_error("path", match="truncated"):
      data.Numpy(path=str(tmp_path / "a.npy")).build()


@pytest.mark.parametrize("driver", ["zarr", "zarr3"])
@pytest.mark.parametrize("bad", ["fifo", "hole"])
def test_a_chunk_of_zarr_is_checked_before_it_is_read(driver, bad, tmp_path):
  (tmp_path / "z").mkdir()
  for name in ("image", "label"):
    zarr_array(tmp_path / "z" / name, ROWS[name], 50, driver)
  train, _ = data.Zarr(path=str(tmp_path / "z"), num_classes=7).build()
  chunk = tmp_path / "z" / "label" / ("c/1" if driver == "zarr3" else "1")
  chunk.unlink()
  os.mkfifo(chunk) if bad == "fifo" else hole(chunk)
  train.load(np.array([10, 60, 110]), np.zeros((3, 1)))
  assert train.damaged.indices == [60]


def test_a_zarr_of_too_many_chunks_is_refused(tmp_path):
  zarr_array(tmp_path / "z", np.zeros((4, 2), np.float32), 2, "zarr")
  node = json.loads((tmp_path / "z" / ".zarray").read_text())
  node |= {"shape": [4, 1 << 40], "chunks": [2, 1]}
  (tmp_path / "z" / ".zarray").write_text(json.dumps(node))
  with config_error("path", match="a row is in more than 1,048,576 chunks"):
    data.Zarr(path=str(tmp_path / "z")).build()


def test_rows_of_parquet_that_unpack_to_much_more_are_refused(tmp_path):
  table = pa.table({"x": np.zeros(10 << 20, np.int64)})
  parquet.write_table(table, tmp_path / "a.parquet", row_group_size=10 << 20, compression="zstd")
  with config_error("path", match="more than 200 times"):
    data.Parquet(path=str(tmp_path / "a.parquet")).build()


def test_an_arrow_file_that_shrinks_is_a_damaged_row(tmp_path):
  """It is mapped into memory; its size is checked before each chunk is read."""
  table = pa.table({"x": np.arange(4000.0)})
  with pa.ipc.new_file(path := tmp_path / "a.arrow", table.schema) as writer:
    writer.write_table(table, max_chunksize=1000)
  train, _ = data.Parquet(path=str(path), columns={"image": "x"}).build()
  assert train.load(np.array([10]), np.zeros((1, 1)))["image"] == 10  # Its chunk is kept.
  os.truncate(path, path.stat().st_size // 2)
  with pytest.raises(ConfigError, match="in a row cannot be read"):
    train.load(np.array([10]), np.zeros((1, 1)))


def test_an_hdf5_file_names_no_other_files_that_are_not_files(tmp_path):
  h5py = pytest.importorskip("h5py")
  os.mkfifo(tmp_path / "fifo")
  with h5py.File(tmp_path / "a.h5", "w") as file:
    file["x"] = h5py.ExternalLink("fifo", "x")
  with h5py.File(tmp_path / "b.h5", "w") as file:
    file.create_dataset("x", (4, 2), "f4", external=[(str(tmp_path / "fifo"), 0, 32)])
  with h5py.File(tmp_path / "c.h5", "w") as file:
    layout = h5py.VirtualLayout((4, 2), "f4")
    layout[...] = h5py.VirtualSource("fifo", "x", (4, 2))
    file.create_virtual_dataset("x", layout)
  for name, problem in (("a", "not a file"), ("b", "in other files"), ("c", "not a file")):
    with config_error("path", match=problem):
      data.HDF5(path=str(tmp_path / f"{name}.h5")).build()


def test_a_compressed_line_without_an_end_is_not_read_for_days(tmp_path):
  with gzip.open(tmp_path / "train.jsonl.gz", "wb", 1) as file:
    for _ in range(300):
      file.write(bytes(1 << 20))
  with config_error("train.jsonl.gz", match="line 1 does not end"):
    token_files.text_files(tmp_path, "train", cache_dir=str(tmp_path / "kept"))


# Tokenizers

WORDS = {"type": "WordLevel", "vocab": {"[UNK]": 0, "a": 1}, "unk_token": "[UNK]"}
END = dict(id=2, content="</s>", single_word=False, lstrip=False, rstrip=False)
BASE = dict(version="1.0", truncation=None, padding=None, normalizer=None, pre_tokenizer=None)
BASE |= dict(post_processor=None, decoder=None, model=WORDS)
BASE["added_tokens"] = [END | {"normalized": False, "special": True}]


def rules(*pairs):
  made = [{"type": "Replace", "pattern": {"String": a}, "content": b} for a, b in pairs]
  return {"normalizer": {"type": "Sequence", "normalizers": made}}


def splits(regex):
  split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated"}
  return {"pre_tokenizer": split | {"invert": False}}


def read_with(tmp_path, parts):
  pytest.importorskip("tokenizers")
  (tmp_path / "tokenizer.json").write_text(json.dumps(BASE | parts))
  return tokenizer.read_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
  "parts, problem",
  [
    (rules(*[("a", "aaaa")] * 16), "make texts many times longer"),
    ({"normalizer": {"type": "Prepend", "prepend": "x" * 99}}, "make texts many times longer"),
    (splits("(a+)+$"), "repeats a repetition"),
    (splits("([a-z]*){2,}!"), "repeats a repetition"),
    (splits("(a|aa)+$"), "cannot be used .*retry-limit"),  # Oniguruma's panic
  ],
  ids=["growing", "prefix", "nested", "counted", "alternatives"],
)
def test_a_tokenizer_that_takes_any_time_is_one_line(parts, problem, tmp_path):
  clock = time.process_time()
  with config_error("tokenizer", match=problem):
    read_with(tmp_path, parts).encode([b"a" * 200 + b"!"])
  assert time.process_time() - clock < 30  # not for ever


GPT_4O = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}]*[\p{Ll}\p{M}]+(?i:'s|'t|'re)?|\p{N}{1,3}| ?[^\s\p{L}"
GPT_4O += r"\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@pytest.mark.parametrize("regex", [GPT_4O, r"(?=(\d{3})+(?!\d))", r"\)+\(*|a"])
def test_the_patterns_of_published_tokenizers_are_taken(regex, tmp_path):
  llama = rules((" ", "▁"))
  assert read_with(tmp_path, splits(regex) | llama).encode([b"a b 1234567"]).size > 1


def test_a_tokenizer_that_does_not_end_is_left_behind(tmp_path):
  """The process ends all the same."""
  code = """
import sys, threading
from jaxscale import errors
from jaxscale.data import tokenizer
tokenizer._FIRST_S = 0.1
def main(_):
  tokenizer._limited("tokenizer='x'", threading.Event().wait, 7)
errors.leave(main)
"""
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
  assert done.returncode == 2 and done.stderr.count("\n") == 1
  assert "a text of 7 characters took more than 0 s; use a different tokenizer" in done.stderr


def test_a_suspended_process_is_not_a_slow_tokenizer(monkeypatch):
  """Slurm may suspend a job for hours, and the first wait then ends without any work done."""

  class Thread(threading.Thread):
    waits = 0

    def join(self, timeout=None):
      Thread.waits += 1
      if Thread.waits == 2:
        go_on.set()
        super().join(60)

  go_on = threading.Event()
  monkeypatch.setattr(threading, "Thread", Thread)
  assert tokenizer._limited("tokenizer='x'", lambda: go_on.wait(60) and "text", 7) == "text"
