"""Sources by index: the order, the examples, damage, transforms and statistics."""

import base64
import dataclasses
import json
import shutil
import struct
import sys

import grain
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from jaxscale import ConfigError, data
from jaxscale.data import table_splits
from jaxscale.data.pipeline import shuffled
from jaxscale.data.table_splits import chunk_order
from jaxscale.data.tables import even_starts
from support.sources import (
  COLUMNS,
  FIELDS,
  IMAGES,
  KINDS,
  LABELS,
  NUM_ROWS,
  ROWS,
  arrow_table,
  hdf5_file,
  make_source,
  parquet_files,
  zarr_array,
  zarr_group,
)

NUM_TRAIN = NUM_ROWS - 20  # eval_share is 0.1
BATCH, SEED = 24, 5
ROW_OF = {image.tobytes(): row for row, image in enumerate(IMAGES)}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def batches(dataset, count, position=0, hosts=1):
  """Return global batches, of which each host loads its rows."""
  shards = [
    data.train_batches(dataset, BATCH, seed=SEED, position=position, shard=(i, hosts))
    for i in range(hosts)
  ]
  whole = []
  for _ in range(count):
    parts = [next(shard) for shard in shards]
    whole.append({name: np.concatenate([part[name] for part in parts]) for name in parts[0]})
  return whole


def rows_of(parts):
  """Return the numbers of the rows in batches, which have to hold these rows exactly."""
  rows = [ROW_OF[image.tobytes()] for part in parts for image in part["image"]]
  for name, stored in ROWS.items():
    array = np.concatenate([part[name] for part in parts])
    np.testing.assert_array_equal(array, stored[rows])
    assert str(array.dtype) == {"image": "uint8", "label": "int32", "field": "float32"}[name]
  return rows


@pytest.mark.parametrize("shuffle", ["examples", "chunks"])
@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_hosts_reads_one_order_and_resumes_in_it(kind, shuffle, tmp_path):
  train, held_out = make_source(kind, tmp_path, shuffle=shuffle).build()
  assert (train.num_examples, held_out.num_examples) == (NUM_TRAIN, 20)
  assert (train.info.num_classes, train.info.image_shape) == (7, (4, 4, 3))
  assert train.info.arrays == {"field": ((5,), "float32")}
  data.check_readable(train)
  whole = batches(train, 16)
  order = rows_of(whole)
  for epoch in range(2):
    assert sorted(order[epoch * NUM_TRAIN : (epoch + 1) * NUM_TRAIN]) == [*range(NUM_TRAIN)]
  assert order[:NUM_TRAIN] != order[NUM_TRAIN : 2 * NUM_TRAIN]
  if shuffle == "examples":
    assert order[:NUM_TRAIN] == shuffled(NUM_TRAIN, SEED, 0).tolist()
  for hosts in (1, 2, 4):  # From the first step, and from the middle of the second epoch.
    for first in (0, 10):
      again = batches(train, 16 - first, first * BATCH, hosts)
      assert rows_of(again) == order[first * BATCH : 16 * BATCH]
  for hosts in (1, 2, 4):
    shards = [data.eval_batches(held_out, 8, shard=(i, hosts)) for i in range(hosts)]
    seen = [
      {n: x[part["mask"]] for n, x in part.items()} for s in zip(*shards, strict=True) for part in s
    ]
    assert rows_of(seen) == [*range(NUM_TRAIN, NUM_ROWS)]
  (tmp_path / "copy").mkdir()
  copy = make_source(kind, tmp_path / "copy", shuffle=shuffle).build()[0]
  assert copy.identity() == train.identity() != held_out.identity()


def test_the_order_by_chunks_mixes_eight_chunks_at_a_time_and_covers_all():
  starts = np.unique([0, *np.random.default_rng(0).integers(1, 5000, 99), 5000])
  order = chunk_order(starts)
  for epoch in (0, 1, 7):
    rows = order(5000, 3, epoch)
    assert sorted(rows.tolist()) == [*range(5000)]
    chunks = np.searchsorted(starts, rows, "right") - 1
    for a in range(0, 5000, 50):  # Chunks that have begun and have not ended.
      assert len({*chunks[:a].tolist()} & {*chunks[a:].tolist()}) <= 8
    assert len({*chunks[:200].tolist()}) >= 5
  assert not np.array_equal(order(5000, 3, 0), order(5000, 3, 1))
  order = chunk_order(even_starts(64, 8))
  assert len({tuple(order(64, seed, 0)) for seed in range(50)}) == 50


def one_transform(example, rng):
  """Scale the field by a random number, and drop one image for another shape."""
  scale = 1.0 if rng is None else rng.uniform(1, 2)
  return {"image": example["image"][:2] * 1.0, "label": example["label"], "scale": scale}


@pytest.mark.parametrize("kind", ["zarr3", "grain"])
def test_a_transform_has_a_generator_of_each_example_at_its_position(kind, tmp_path):
  settings = make_source(kind, tmp_path, transform=one_transform, num_classes=7)
  train, held_out = settings.build()
  assert (train.info.image_shape, train.info.dtype) == ((2, 4, 3), "float32")
  assert train.info.arrays == {"scale": ((), "float32")}
  data.check_readable(train)
  whole = batches(train, 16)
  scales = np.concatenate([batch["scale"] for batch in whole])
  assert (
    len({*scales.tolist()}) == 16 * BATCH and 1 <= scales.min() < 1.05 < 1.95 < scales.max() < 2
  )
  for hosts in (2, 4):
    again = batches(train, 6, 10 * BATCH, hosts)
    np.testing.assert_array_equal(np.concatenate([b["scale"] for b in again]), scales[10 * BATCH :])
  other = data.train_batches(train, BATCH, seed=SEED + 1)
  assert {*next(other)["scale"].tolist()}.isdisjoint(scales.tolist())
  seen = next(data.eval_batches(held_out, 20))
  assert (seen["scale"] == 1).all()
  np.testing.assert_array_equal(seen["image"], IMAGES[NUM_TRAIN:, :2].astype("float32"))


def test_a_transform_takes_values_that_are_no_arrays(tmp_path):
  table = pa.table(
    {"file": [b"%d" % i for i in range(30)], "n": [[1] * (i % 3) for i in range(30)]}
  )
  pa.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=7)

  def parse(example, rng):
    return {"image": np.full(2, int(example["file"])), "label": len(example["n"]) / 2}

  train, _ = data.Parquet(path=tmp_path / "a.parquet", transform=parse).build()
  batch = next(data.train_batches(train, 27))
  assert sorted(batch["image"][:, 1].tolist()) == [*range(27)]
  np.testing.assert_array_equal(batch["label"], batch["image"][:, 0] % 3 / 2)
  assert (train.info.label_dtype, train.info.num_classes) == ("float32", 1)


def damage(kind, path):
  """Damage the chunk of rows 32 to 47, or the row group of rows 32 to 47."""
  if kind == "zarr3":
    chunk = path / "image" / "c" / "2" / "0" / "0" / "0"
    chunk.write_bytes(chunk.read_bytes()[:-40])
  elif kind == "hdf5":
    with h5py.File(path) as file:
      place = file["inner/image"].id.get_chunk_info(2)
    content = bytearray(path.read_bytes())
    content[place.byte_offset + 20 : place.byte_offset + 200] = bytes(180)
    path.write_bytes(content)
  else:
    file = path / "part-0.parquet"
    column = pa.parquet.read_metadata(file).row_group(2).column(0)
    content, start = bytearray(file.read_bytes()), column.dictionary_page_offset
    start = start or column.data_page_offset
    content[start : start + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    file.write_bytes(content)


@pytest.mark.parametrize("kind", ["zarr3", "hdf5", "parquet"])
def test_a_damaged_chunk_is_counted_and_replaced_by_the_next_row(kind, tmp_path):
  settings = make_source(kind, tmp_path)
  damage(kind, tmp_path / kind)
  settings = dataclasses.replace(settings, num_classes=7)
  train, _ = settings.build()
  whole = batches(train, 8)
  rows = [ROW_OF[image.tobytes()] for batch in whole for image in batch["image"]]
  ideal = shuffled(NUM_TRAIN, SEED, 0)
  assert rows[:NUM_TRAIN] == [48 if 32 <= row < 48 else row for row in ideal.tolist()]
  assert train.damaged.indices == [*range(32, 48)] and " row 32" in train.damaged.names[0]
  again = settings.build()[0]  # Another process, which meets the damage elsewhere.
  for hosts in (1, 2, 4):
    parts = batches(again, 3, 5 * BATCH, hosts)
    for name in ROWS:
      expected = np.concatenate([b[name] for b in whole[5:]])
      np.testing.assert_array_equal(np.concatenate([b[name] for b in parts]), expected)
  held_out = dataclasses.replace(settings, eval_path=settings.path).build()[1]
  seen = [*data.eval_batches(held_out, 64)]
  labels = np.concatenate([batch["label"][batch["mask"]] for batch in seen])
  np.testing.assert_array_equal(labels[:32], LABELS[:32])
  np.testing.assert_array_equal(labels[48:], LABELS[48:])
  assert (labels[32:48] == -1).all() and held_out.damaged.count == 16
  assert not np.concatenate([batch["image"] for batch in seen])[32:48].any()


def test_an_example_that_a_transform_refuses_is_damaged(tmp_path):
  def refuse(example, rng):
    return None if example["label"] == 3 else example

  train, held_out = make_source("npy", tmp_path, transform=refuse, num_classes=7).build()
  labels = np.concatenate([batch["label"] for batch in batches(train, 8)])
  assert not (labels == 3).any()
  order, count = shuffled(NUM_TRAIN, SEED, 0), NUM_TRAIN
  expected = [
    next(LABELS[(r + i) % count] for i in range(count) if LABELS[(r + i) % count] != 3)
    for r in order
  ]
  np.testing.assert_array_equal(labels[:NUM_TRAIN], expected)
  assert train.damaged.count == (LABELS[:NUM_TRAIN] == 3).sum()
  seen = next(data.eval_batches(held_out, 20))
  wanted = LABELS[NUM_TRAIN:]
  np.testing.assert_array_equal(seen["label"], np.where(wanted == 3, -1, wanted))


def test_statistics_are_those_of_the_training_rows_and_are_computed_once(tmp_path, capsys):
  fields = np.random.default_rng(1).normal(3e4, 2.0, (90, 4, 4, 4, 2)) * [1, 100]
  rows = {"image": fields.astype("float32"), "label": fields[:, :, :, :, :1].astype("float32")}
  zarr_group(tmp_path / "z", rows)
  settings = data.Zarr(path=tmp_path / "z", statistics=True)
  train, held_out = settings.build()
  exact = rows["image"][:81].astype(np.float64)
  np.testing.assert_allclose(train.info.mean, exact.mean((0, 1, 2, 3)), rtol=1e-12)
  np.testing.assert_allclose(train.info.std, exact.std((0, 1, 2, 3)), rtol=1e-9)
  assert held_out.info.mean == train.info.mean
  assert (train.info.image_shape, train.info.label_shape) == ((4, 4, 4, 2), (4, 4, 4, 1))
  assert "once" in capsys.readouterr().out
  assert settings.build()[0].info == train.info and not capsys.readouterr().out
  other = dataclasses.replace(settings, eval_share=0.5).build()[0]
  assert other.info.mean != train.info.mean
  rows["image"][5, 0] = np.nan
  zarr_group(tmp_path / "nan", rows)
  with pytest.raises(ConfigError, match=r"Zarr: image has NaN or infinite values in examples 0 to"):
    dataclasses.replace(settings, path=tmp_path / "nan").build()


def test_variables_are_stacked_as_channels(tmp_path):
  u, v = FIELDS.reshape(NUM_ROWS, 5, 1), FIELDS.reshape(NUM_ROWS, 5, 1) * 2
  np.savez(tmp_path / "a.npz", u=u, v=v, t=LABELS * 1.0)
  columns = {"image": ("u", "v"), "label": ("t",)}
  train, _ = data.Numpy(path=tmp_path / "a.npz", columns=columns, mean=(0.0, 1.0)).build()
  assert (train.info.image_shape, train.info.label_shape) == ((5, 1, 2), (1,))
  batch = train.load(np.arange(9), None)
  np.testing.assert_array_equal(batch["image"], np.stack([u[:9], v[:9]], -1))
  np.testing.assert_array_equal(batch["label"], LABELS[:9, None])


def test_packed_variables_are_unpacked_by_the_cf_conventions(tmp_path):
  raw = np.arange(60, dtype=np.int16).reshape(20, 3)
  raw[3, 1] = -999
  with h5py.File(tmp_path / "a.nc", "w") as file:
    # As netCDF4 writes: dimensions are scales, and the variables have attributes.
    variable = file.create_dataset("x", data=raw, chunks=(5, 3), shuffle=True, compression="gzip")
    attributes = {"scale_factor": 0.5, "add_offset": 10.0, "_FillValue": np.int16(-999)}
    for name, value in attributes.items():
      variable.attrs[name] = [value]
    file["lat"] = np.zeros(3)
    file["lat"].make_scale("lat")
    variable.dims[1].attach_scale(file["lat"])
    file["crs"] = 1
  train, _ = data.HDF5(path=tmp_path / "a.nc", columns={"image": "x"}).build()
  expected = np.where(raw == -999, np.nan, raw * 0.5 + 10).astype("float32")
  np.testing.assert_array_equal(train.load(np.arange(18), None)["image"], expected[:18])


def packed_zarr(folder, values, attributes, fill=None):
  """Write the variable x to a group of zarr 2, as xarray does; `fill` is in .zarray."""
  zarr_array(folder / "x", values, 5, "zarr")
  fields = json.loads((folder / "x" / ".zarray").read_text())
  (folder / "x" / ".zarray").write_text(json.dumps(fields | {"fill_value": fill}))
  (folder / "x" / ".zattrs").write_text(json.dumps(attributes))


def test_files_of_packed_variables_may_differ_in_their_scales(tmp_path):
  raw = np.arange(60, dtype=np.int16).reshape(20, 3)
  packed_zarr(tmp_path / "a-0", raw, {"scale_factor": 0.5})
  packed_zarr(tmp_path / "a-1", raw, {"scale_factor": 2.0, "add_offset": 1.0})
  train, _ = data.Zarr(path=tmp_path / "a-*").build()
  expected = np.concatenate([raw * 0.5, raw * 2.0 + 1])[:36].astype("float32")
  np.testing.assert_array_equal(train.load(np.arange(36), None)["image"], expected)


@pytest.mark.parametrize(
  ("attributes", "fill", "dtype"),
  [
    ({"scale_factor": 0.5, "missing_value": 3}, None, "int16"),
    ({"scale_factor": 0.5, "_FillValue": 3}, None, "int16"),
    ({"scale_factor": 0.5}, 3, "int16"),
    ({"_FillValue": 3.0}, None, "float32"),
    ({"_FillValue": base64.b64encode(struct.pack("<d", 3.0)).decode()}, None, "float64"),
  ],
)
def test_missing_values_are_nan(attributes, fill, dtype, tmp_path):
  raw = np.arange(60).astype(dtype).reshape(20, 3)
  packed_zarr(tmp_path / "a", raw, attributes, fill)
  train, _ = data.Zarr(path=tmp_path / "a").build()
  scale = attributes.get("scale_factor", 1.0)
  expected = np.where(raw == 3, np.nan, raw * scale).astype("float32")[:18]
  np.testing.assert_array_equal(train.load(np.arange(18), None)["image"], expected)


def test_values_that_would_be_read_wrong_are_refused(tmp_path):
  packed_zarr(tmp_path / "a", np.zeros((9, 2), np.int8), {"_Unsigned": "true"})
  with pytest.raises(ConfigError, match="x has _Unsigned=true; write it with an unsigned dtype"):
    data.Zarr(path=tmp_path / "a").build()


def test_a_link_to_another_file_is_followed(tmp_path):
  with h5py.File(tmp_path / "far.h5", "w") as file:
    file["x"] = IMAGES
  with h5py.File(tmp_path / "a.h5", "w") as file:
    file["padding"] = np.zeros(1 << 16, np.uint8)  # The rows of the other file would fit.
    file["x"] = h5py.ExternalLink("far.h5", "/x")
    file["y"] = LABELS
  train, _ = data.HDF5(path=tmp_path / "a.h5", columns={"image": "x", "label": "y"}).build()
  np.testing.assert_array_equal(train.load(np.arange(9), None)["image"], IMAGES[:9])
  with pytest.raises(ConfigError, match="x is not a group; name it in columns"):
    data.HDF5(path=f"{tmp_path}/a.h5::x").build()


def test_classes_may_be_bytes(tmp_path):
  labels = np.arange(20, dtype=np.uint8) % 3
  np.savez(tmp_path / "a.npz", x=np.zeros((20, 2)), y=labels)
  train, _ = data.Numpy(path=tmp_path / "a.npz").build()
  assert (train.info.num_classes, train.info.label_dtype) == (3, "int32")
  np.testing.assert_array_equal(train.load(np.arange(18), None)["label"], labels[:18])


def test_lists_have_the_type_of_the_first_rows_in_every_batch(tmp_path):
  """Rows of other lengths are an error without a transform, and lists with one."""
  lists = [[1.0, 2.0]] * 8 + [[1.0, 2.0, 3.0]] * 12
  pa.parquet.write_table(pa.table({"x": lists}), tmp_path / "late.parquet", row_group_size=4)
  train, _ = data.Parquet(path=tmp_path / "late.parquet").build()
  for rows in ([9, 10], [1, 9]):
    with pytest.raises(ConfigError, match="or lists of different lengths"):
      train.load(np.array(rows), None)
  pa.parquet.write_table(pa.table({"x": lists}), tmp_path / "early.parquet", row_group_size=10)
  kinds = []

  def transform(example, rng):
    kinds.append(type(example["image"]))
    return {"image": np.float32(len(example["image"]))}

  train, _ = data.Parquet(path=tmp_path / "early.parquet", transform=transform).build()
  assert train.load(np.arange(18), np.zeros((18, 2)))["image"].tolist() == [2] * 8 + [3] * 10
  assert set(kinds) == {list}


def test_rows_of_several_files_follow_each_other_in_the_order_of_their_names(tmp_path):
  halves = [{n: x[a:b] for n, x in ROWS.items()} for a, b in ((0, 90), (90, NUM_ROWS))]
  for i, rows in enumerate(halves):
    zarr_group(tmp_path / f"z-{i}", rows)
    hdf5_file(tmp_path / f"h-{i}.h5", rows, chunks=(7, 4, 4, 3))
  zarr = data.Zarr(path=tmp_path / "z-*", columns=COLUMNS)
  hdf5 = data.HDF5(path=f"{tmp_path}/h-*.h5::inner", columns=COLUMNS, shuffle="chunks")
  for settings in (zarr, hdf5):
    train, held_out = settings.build()
    every = rows_of([train.load(np.arange(NUM_TRAIN), None), held_out.load(np.arange(20), None)])
    assert every == [*range(NUM_ROWS)]
    order = rows_of(batches(train, 16))
    assert sorted(order[:NUM_TRAIN]) == [*range(NUM_TRAIN)]


def test_a_source_for_validation_may_be_its_own(tmp_path):
  zarr_group(tmp_path / "s" / "train")
  zarr_group(tmp_path / "s" / "test", {n: x[:30] for n, x in ROWS.items()})
  train, held_out = data.Zarr(path=tmp_path / "s/train", eval_path=tmp_path / "s/test").build()
  assert (train.num_examples, held_out.num_examples, train.notes) == (NUM_ROWS, 30, ())
  assert held_out.info == train.info


def test_chunks_are_read_once_per_epoch(tmp_path, monkeypatch):
  rows = {"image": np.zeros((4000, 8, 8, 3), np.uint8), "label": np.arange(4000) % 5}
  rows["field"] = np.zeros((4000, 1))
  parquet_files(tmp_path / "p", rows, group=100)
  reads = []
  read = pa.parquet.ParquetFile.read_row_group
  monkeypatch.setattr(
    pa.parquet.ParquetFile,
    "read_row_group",
    lambda file, i, *args, **options: reads.append(i) or read(file, i, *args, **options),
  )
  chunk = 100 * (8 * 8 * 3 + 8)
  settings = data.Parquet(
    path=tmp_path / "p",
    columns={"image": "image", "label": "label"},
    num_classes=5,
    shuffle="chunks",
    eval_share=0.1,
    cache_gb=20 * chunk / 1e9,
  )
  train, _ = settings.build()
  reads.clear()
  batches(train, 3600 // BATCH)
  # The threads load some batches more, and the last chunks of the epoch are read for these.
  assert 36 <= len(reads) <= 36 + 16


@pytest.fixture
def wrong(tmp_path):
  """Make sources that cannot be read."""
  zarr_group(tmp_path / "good")
  zarr_group(tmp_path / "short", {"image": IMAGES, "label": LABELS[:9]})
  zarr_array(tmp_path / "alone", IMAGES, 16)
  (tmp_path / "folder").mkdir()
  (tmp_path / "folder" / "a.txt").write_text("text")
  (tmp_path / "a.zip").write_bytes(b"PK\x03\x04" + bytes(200))
  (tmp_path / "pointer.parquet").write_text("version https://git-lfs.github.com/spec/v1")
  pa.parquet.write_table(arrow_table()[:0], tmp_path / "empty.parquet")
  ragged = {
    "image": [[1.0]] * 5 + [[1.0, 2.0]] * 5,
    "label": [*range(9), None],
    "name": [*"abcdefghij"],
  }
  pa.parquet.write_table(pa.table(ragged), tmp_path / "ragged.parquet")
  np.save(tmp_path / "object.npy", np.array([{}], object), allow_pickle=True)
  np.save(tmp_path / "complex.npy", np.zeros((9, 2), complex))
  with h5py.File(tmp_path / "text.h5", "w") as file:
    file["image"] = [b"a", b"b"]
    file["record"] = np.zeros(2, [("a", "<f4")])
  (tmp_path / "splits").mkdir()
  (tmp_path / "splits" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
  return tmp_path


@pytest.mark.parametrize(
  ("kind", "options", "message"),
  [
    ("Zarr", {"path": "none"}, "none does not exist; correct it"),
    ("Zarr", {"path": "none-*"}, "matches no file; correct it"),
    ("Zarr", {"path": "folder"}, "folder has no variables; check the path"),
    ("Zarr", {"path": "short"}, "different numbers of rows: image has 203 and label has 9; choose"),
    ("Zarr", {"path": "good", "columns": {"image": "imag"}}, "did you mean 'image'?"),
    ("Zarr", {"path": "good", "columns": {"image": 3}}, "is not the name of a variable"),
    (
      "Zarr",
      {"path": "good", "columns": {"image": ("field", "label")}},
      "has the shapes [(), (5,)]",
    ),
    ("Zarr", {"path": "good", "mean": (1.0, 2.0)}, "Zarr.mean=(1.0, 2.0): give one number, or 3"),
    ("Zarr", {"path": "good", "mean": (1.0,), "statistics": True}, "leave both out"),
    (
      "Zarr",
      {"path": "good", "columns": {"f": "field"}, "statistics": True},
      "needs an array 'image'",
    ),
    ("Zarr", {"path": "good", "eval_share": 0.999}, "leaves no example for training"),
    ("Zarr", {"path": "good", "eval_path": "alone"}, "columns=field is not in"),
    ("Parquet", {"path": "folder"}, "has no files that end in .parquet or .arrow"),
    ("Parquet", {"path": "a.zip"}, "a.zip has another format; give files in Parquet"),
    ("Parquet", {"path": "pointer.parquet"}, "is a Git LFS pointer"),
    ("Parquet", {"path": "empty.parquet"}, "empty.parquet has no rows"),
    (
      "Parquet",
      {"path": "ragged.parquet", "columns": {"image": "image"}},
      "or lists of different lengths; convert it",
    ),
    ("Parquet", {"path": "ragged.parquet", "columns": {"label": "label"}}, "missing values (null)"),
    ("Parquet", {"path": "ragged.parquet", "columns": {"n": "name"}}, "n has text, records"),
    ("HDF5", {"path": "a.zip"}, "cannot be opened (Unable to"),
    ("HDF5", {"path": "text.h5::none"}, "cannot be opened ("),
    ("HDF5", {"path": "text.h5", "columns": {"image": "image"}}, "image has text, records"),
    ("HDF5", {"path": "text.h5", "columns": {"image": "record"}}, "image has text, records"),
    ("Numpy", {"path": "a.zip"}, "cannot be opened"),
    ("Numpy", {"path": "complex.npy"}, "complex.npy has no variables that are numbers; name"),
    ("Numpy", {"path": "object.npy"}, "cannot be opened (it has Python objects"),
    ("Numpy", {"path": "complex.npy", "columns": {"image": "x"}}, "has the dtype complex128"),
    (
      "HuggingFace",
      {"dataset": "splits"},
      "give the folder of one split that Dataset.save_to_disk",
    ),
    (
      "HuggingFace",
      {"dataset": "folder"},
      "give the folder of one split that Dataset.save_to_disk wrote",
    ),
    (
      "HuggingFace",
      {"dataset": [1, 2]},
      "dataset=list has no rows by index; give a datasets.Dataset",
    ),
    ("Grain", {"dataset": 3}, "dataset=int has no index; give a grain.MapDataset"),
  ],
)
def test_a_source_that_does_not_fit_is_refused_in_one_line(kind, options, message, wrong):
  places = {
    n: str(wrong / x)
    for n, x in options.items()
    if n in ("path", "eval_path", "dataset") and isinstance(x, str)
  }
  with pytest.raises(ConfigError) as error:
    getattr(data, kind)(**options | places).build()
  assert message in str(error.value) and "\n" not in str(error.value)


def test_columns_that_are_no_numbers_are_skipped_in_a_note(wrong):
  pa.parquet.write_table(pa.table({"x": [1.0] * 9, "name": [*"abcdefghi"]}), wrong / "b.parquet")
  train, _ = data.Parquet(path=wrong / "b.parquet").build()
  assert train.info.image_shape == () and not train.info.arrays
  assert any("skipping name, not numbers" in note for note in train.notes)


@pytest.mark.parametrize(
  ("transform", "message"),
  [
    (lambda example, rng: 1 / 0, "failed on "),
    (lambda example, rng: [1], "transform returned [1] for "),
    (lambda example, rng: {}, "transform returned {} for "),
    (lambda example, rng: {"image": 1.0 if rng is None else "a"}, "Numpy: image has text, records"),
    (
      lambda example, rng: {"image": np.zeros(1 + (rng is not None))},
      "but {'image': (1,)} for the",
    ),
    (lambda example, rng: {"image": "text"}, "Numpy: image has the dtype <U4"),
  ],
)
def test_a_wrong_transform_is_reported_with_its_line(transform, message, tmp_path):
  settings = make_source("npy", tmp_path, transform=transform, num_classes=7)
  with pytest.raises(ConfigError) as error:
    next(data.train_batches(settings.build()[0], 4))
  assert message in str(error.value) and "\n" not in str(error.value)
  if message == "failed on ":
    assert f"{__file__}:" in str(error.value) and "ZeroDivisionError" in str(error.value)


def test_labels_of_a_transform_or_of_grain_need_a_number_of_classes(tmp_path):
  for kind, options in (("grain", {"num_classes": None}), ("npy", {"transform": lambda x, rng: x})):
    with pytest.raises(ConfigError, match=r"num_classes is not set; give the number of classes"):
      make_source(kind, tmp_path, **options).build()


def test_grain_takes_functions_pairs_and_refuses_endless_pipelines():
  pairs = grain.MapDataset.range(50).map(lambda i: (np.full(3, i, np.float32), np.float32(i)))
  train, _ = data.Grain(dataset=lambda: pairs).build()
  batch = next(data.train_batches(train, 9))
  np.testing.assert_array_equal(batch["image"][:, 0], batch["label"])
  with pytest.raises(ConfigError, match=r"leave out repeat"):
    data.Grain(dataset=pairs.repeat()).build()
  with pytest.raises(ConfigError, match=r"has no index; give a grain.MapDataset"):
    data.Grain(dataset=pairs.to_iter_dataset()).build()


def test_h5py_is_named_if_it_is_missing(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "h5py", None)
  with pytest.raises(
    ConfigError, match=r"needs the package h5py; install it .*jaxscale\[science\]"
  ):
    data.HDF5(path=tmp_path / "a.h5").build()


def test_a_changed_file_changes_the_identity(tmp_path):
  settings = make_source("zarr3", tmp_path)
  before = settings.build()[0].identity()
  (tmp_path / "zarr3" / "label" / "c" / "1").unlink()  # The chunk has the fill value then.
  assert settings.build()[0].identity() != before
  shutil.rmtree(tmp_path / "zarr3")


def test_a_plan_reads_no_rows_for_statistics(tmp_path, monkeypatch):
  settings = make_source("zarr3", tmp_path, statistics=True)
  monkeypatch.setattr(table_splits, "kept_statistics", None)  # Not called.
  train, _ = settings.abstract(16)
  assert train.info.image_shape == (4, 4, 3) and train.num_examples == NUM_TRAIN
