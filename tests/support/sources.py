"""Files of each format with the same rows, written by the format's own library."""

import json

import grain
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import tensorstore as ts

from jaxscale import data

NUM_ROWS = 203
RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 255, (NUM_ROWS, 4, 4, 3)).astype(np.uint8)
LABELS = RNG.integers(0, 7, NUM_ROWS)
LABELS[0] = 6  # The number of classes does not depend on the split.
FIELDS = RNG.normal(size=(NUM_ROWS, 5)).astype(np.float32)
ROWS = {"image": IMAGES, "label": LABELS, "field": FIELDS}
COLUMNS = {name: name for name in ROWS}


def zarr_array(path, array, chunk, driver="zarr3"):
  """Write an array in chunks of rows, compressed."""
  shape = [chunk, *array.shape[1:]]
  if driver == "zarr3":
    grid = {"name": "regular", "configuration": {"chunk_shape": shape}}
    metadata = {"data_type": str(array.dtype), "chunk_grid": grid}
    metadata |= {"codecs": [{"name": "bytes"}, {"name": "gzip"}]}
  else:
    metadata = {"dtype": array.dtype.str, "chunks": shape, "compressor": {"id": "zlib"}}
  spec = {"driver": driver, "kvstore": {"driver": "file", "path": str(path)}, "create": True}
  store = ts.open(spec | {"metadata": metadata | {"shape": array.shape}}).result()
  store[...] = array


def zarr_group(path, rows=None, driver="zarr3", chunk=16):
  """Write a group; its arrays have chunks of different lengths."""
  path.mkdir(parents=True)
  node = {"zarr_format": 3, "node_type": "group"}
  if driver == "zarr3":
    (path / "zarr.json").write_text(json.dumps(node))
  else:
    (path / ".zgroup").write_text('{"zarr_format": 2}')
  for name, array in (rows or ROWS).items():
    zarr_array(path / name, array, chunk if name == "image" else 50, driver)


def arrow_table(rows=None):
  """Return the rows as Arrow's table: a tensor, a number and a list."""
  rows = rows or ROWS
  images = rows["image"]
  kind = pa.fixed_shape_tensor(pa.uint8(), images.shape[1:])
  flat = pa.FixedSizeListArray.from_arrays(pa.array(images.ravel()), images[0].size)
  columns = {"image": pa.ExtensionArray.from_storage(kind, flat), "label": pa.array(rows["label"])}
  return pa.table(columns | {"field": pa.array([*rows["field"]])})


def parquet_files(folder, rows=None, group=16):
  """Write two Parquet files, whose rows follow each other."""
  folder.mkdir(parents=True)
  table = arrow_table(rows)
  for i, part in enumerate((table[:80], table[80:])):
    pa.parquet.write_table(part, folder / f"part-{i}.parquet", row_group_size=group)


def arrow_file(path, compression=None):
  options = pa.ipc.IpcWriteOptions(compression=compression)
  with pa.ipc.new_file(path, arrow_table().schema, options=options) as writer:
    writer.write_table(arrow_table(), max_chunksize=16)


def hdf5_file(path, rows=None, **options):
  with h5py.File(path, "w") as file:
    for name, array in (rows or ROWS).items():
      group = file.require_group("inner")
      group.create_dataset(name, data=array, **(options if name == "image" else {}))


def saved_to_disk(folder):
  """Write what `datasets.Dataset.save_to_disk` writes; tests/others compares with it."""
  folder.mkdir()
  table = arrow_table()
  for i, part in enumerate((table[:120], table[120:])):
    with pa.ipc.new_stream(folder / f"data-{i:05d}-of-00002.arrow", table.schema) as writer:
      writer.write_table(part, max_chunksize=16)
  files = [{"filename": f"data-{i:05d}-of-00002.arrow"} for i in range(2)]
  (folder / "state.json").write_text(json.dumps({"_data_files": files}))
  features = {"label": {"names": [*"abcdefg"], "_type": "ClassLabel"}}
  (folder / "dataset_info.json").write_text(json.dumps({"features": features}))


class Elements:
  """Source of a `grain.MapDataset`."""

  def __len__(self):
    return NUM_ROWS

  def __getitem__(self, index):
    return {name: array[index] for name, array in ROWS.items()}


def make_source(kind, folder, **options):
  """Write the rows in a format, and return the settings that read them."""
  options = {"columns": COLUMNS} | options
  path = folder / kind
  if kind in ("zarr2", "zarr3"):
    zarr_group(path, driver="zarr" if kind == "zarr2" else kind)
    return data.Zarr(path=path, **options)
  if kind == "parquet":
    parquet_files(path)
    return data.Parquet(path=path, **options)
  if kind in ("arrow", "feather"):
    arrow_file(path.with_suffix(".arrow"), {"arrow": None, "feather": "zstd"}[kind])
    return data.Parquet(path=path.with_suffix(".arrow"), **options)
  if kind in ("hdf5", "hdf5_plain"):
    hdf5_file(path, **({"chunks": (16, 4, 4, 3), "compression": "gzip"} if kind == "hdf5" else {}))
    return data.HDF5(path=f"{path}::inner", **options)
  if kind == "npz":
    np.savez(path.with_suffix(".npz"), **ROWS)
    return data.Numpy(path=path.with_suffix(".npz"), **options)
  if kind == "npy":
    path.mkdir()
    for name, array in ROWS.items():
      np.save(path / name, array)
    return data.Numpy(path=path, **options)
  if kind == "saved_to_disk":
    saved_to_disk(path)
    return data.HuggingFace(dataset=str(path), **options)
  assert kind == "grain"
  options = {"num_classes": 7} | options
  return data.Grain(dataset=grain.MapDataset.source(Elements()), identity="rows", **options)


KINDS = ["zarr2", "zarr3", "parquet", "arrow", "feather", "hdf5", "hdf5_plain", "npz", "npy"]
KINDS += ["saved_to_disk", "grain"]
