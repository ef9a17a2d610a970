"""Files that zarr, xarray and `datasets` write are read with equal values."""

import numpy as np
import pytest

from jaxscale import data

RNG = np.random.default_rng(0)
NUM_ROWS = 53
FIELD = RNG.normal(size=(NUM_ROWS, 6, 4)).astype(np.float32)
WIND = RNG.normal(size=(NUM_ROWS, 6, 4))
LABEL = RNG.integers(0, 5, NUM_ROWS)
LABEL[0] = 4
EXPECTED = {"image": np.stack([FIELD, WIND], -1), "label": LABEL}
COLUMNS = {"image": ("field", "wind"), "label": "label"}
# netCDF's codecs of 16 bits: a scale, an offset and a fill value.
PACKED = {"dtype": "int16", "scale_factor": 0.01, "add_offset": 2.0, "_FillValue": -32768}


def check(source, expected=EXPECTED):
  """Expect every row of both splits, in any order of indices."""
  train, held_out = source.build()
  assert (train.num_examples, held_out.num_examples) == (48, 5)
  order = np.random.default_rng(1).permutation(48)
  for name, array in expected.items():
    array = array.astype(np.float32 if array.dtype.kind == "f" else np.int32)
    np.testing.assert_array_equal(train.load(order, None)[name], array[:48][order])
    np.testing.assert_array_equal(held_out.load(np.arange(5), None)[name], array[48:])
  assert train.info.num_classes == 5
  return train


STORES = {
  "v2": {"zarr_format": 2},
  "v2, blosc": {"zarr_format": 2, "compressors": "Blosc"},
  "v3": {"zarr_format": 3},
  "v3, consolidated": {"zarr_format": 3},
  "v3, sharded": {"zarr_format": 3, "shards": 32},
  "v3, not compressed": {"zarr_format": 3, "compressors": None},
}


@pytest.mark.parametrize("kind", STORES)
def test_stores_of_zarr(kind, tmp_path):
  zarr = pytest.importorskip("zarr")
  options = dict(STORES[kind])
  shards = options.pop("shards", None)
  if options.get("compressors") == "Blosc":
    import numcodecs

    options["compressors"] = numcodecs.Blosc(cname="lz4", shuffle=numcodecs.Blosc.BITSHUFFLE)
  group = zarr.create_group(tmp_path / "store", zarr_format=options.pop("zarr_format"))
  for name, array in {"field": FIELD, "wind": WIND, "label": LABEL}.items():
    shape = array.shape[1:]
    more = {"shards": (shards, *shape)} if shards else {}
    made = group.create_array(
      name, shape=array.shape, dtype=array.dtype, chunks=(8, *shape), **more, **options
    )
    made[:] = array
  if "consolidated" in kind:
    zarr.consolidate_metadata(tmp_path / "store")
  check(data.Zarr(path=tmp_path / "store", columns=COLUMNS, shuffle="chunks"))


def dataset_of_xarray():
  xarray = pytest.importorskip("xarray")
  dims = "time", "y", "x"
  variables = {"field": (dims, FIELD.copy()), "wind": (dims, WIND), "label": ("time", LABEL)}
  time = np.datetime64("2026-01-01", "ns") + np.arange(NUM_ROWS) * np.timedelta64(6, "h")
  return xarray.Dataset(variables, {"time": time, "y": np.arange(6.0), "x": np.arange(4.0)})


@pytest.mark.parametrize("engine", ["netcdf4", "h5netcdf"])
@pytest.mark.parametrize("encoding", ["plain", "compressed"])
def test_netcdf_of_xarray(engine, encoding, tmp_path):
  pytest.importorskip(engine.replace("netcdf4", "netCDF4"))
  dataset, path = dataset_of_xarray(), tmp_path / "data.nc"
  how = {"zlib": True, "chunksizes": (8, 6, 4)} if encoding == "compressed" else {}
  dataset.to_netcdf(path, engine=engine, encoding={"field": how, "wind": how})
  check(data.HDF5(path=path, columns=COLUMNS))


@pytest.mark.parametrize("kind", ["HDF5", "Zarr"])
def test_packed_variables_are_those_that_xarray_unpacks(kind, tmp_path):
  xarray = pytest.importorskip("xarray")
  dataset, path = dataset_of_xarray(), tmp_path / "data"
  dataset["field"][3] = np.nan
  if kind == "HDF5":
    pytest.importorskip("netCDF4")
    path = path.with_suffix(".nc")
    dataset.to_netcdf(path, engine="netcdf4", encoding={"field": PACKED})
    unpacked = xarray.open_dataset(path)
  else:
    pytest.importorskip("zarr")
    dataset.to_zarr(path, encoding={"field": PACKED}, consolidated=False)
    unpacked = xarray.open_zarr(path, consolidated=False)
  columns = {"image": ("field",), "label": "label"}
  train, _ = getattr(data, kind)(path=path, columns=columns).build()
  found = train.load(np.arange(48), None)["image"][..., 0]
  assert np.isnan(found[3]).all() and np.isfinite(np.delete(found, 3, 0)).all()
  # Ours is computed in double precision and rounded once.
  np.testing.assert_allclose(found, unpacked["field"].values[:48], rtol=2e-7, atol=3e-7)


@pytest.mark.parametrize("version", [2, 3])
def test_zarr_of_xarray(version, tmp_path):
  pytest.importorskip("zarr")
  encoding = {name: {"chunks": (8, 6, 4)} for name in ("field", "wind")}
  dataset_of_xarray().to_zarr(tmp_path / "store", zarr_format=version, encoding=encoding)
  check(data.Zarr(path=tmp_path / "store", columns=COLUMNS))


@pytest.mark.parametrize("kind", ["in memory", "saved", "selected", "formatted"])
def test_datasets_of_hugging_face(kind, tmp_path):
  datasets = pytest.importorskip("datasets")
  array = datasets.Array2D((6, 4), "float32")
  classes = datasets.ClassLabel(names=[*"abcde"])
  features = datasets.Features({"field": array, "label": classes, "text": datasets.Value("string")})
  rows = {"field": FIELD, "label": LABEL, "text": [str(i) for i in range(NUM_ROWS)]}
  dataset = datasets.Dataset.from_dict(rows, features=features)
  expected = {"image": FIELD, "label": LABEL}
  if kind == "selected":
    order = np.random.default_rng(2).permutation(NUM_ROWS)
    dataset = dataset.select(np.argsort(order)).select(order)
  elif kind == "formatted":
    dataset = dataset.with_format("numpy")
  elif kind == "saved":
    dataset.save_to_disk(tmp_path / "saved", num_shards=3)
    dataset = str(tmp_path / "saved")
  columns = {"image": "field", "label": "label"}
  train = check(data.HuggingFace(dataset=dataset, columns=columns), expected)
  assert train.info.class_names == tuple("abcde")
