"""Input pipelines of data_input.py: each workload by jaxscale, tf.data, grain and torch.

A function of a library and a workload is called with a folder of data and a number of
threads or worker processes, and returns endless batches. Each is written as the library's
documentation advises: decoding in `map`, reads in `__getitem__` or in a generator.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

SIZE = 224  # of images
SEQUENCE, VOCABULARY = 1024, 50_257
MIXED = 8  # chunks whose rows are shuffled together
BATCH = {"images": 64, "tokens": 64, "zarr": 64, "parquet": 256}
# The cache of decoded chunks that ours gets, in GB; None is the default, 1 GB. That of zarr
# holds a tenth of the data, as of data that do not fit in memory.
CACHE_GB = {"zarr_examples": 0.03, "zarr_chunks": 0.03, "parquet_examples": 1.0}
CACHE_GB |= {"parquet_chunks": 0.1}

Batches = Iterator[Any]


def batch_size(workload: str) -> int:
  """Return the examples of a batch."""
  return BATCH[workload.partition("_")[0]]


# Readers of rows and chunks that torch, tf.data and grain share.


class ZarrRows:
  """Rows of the zarr arrays by tensorstore; opened in the process that reads."""

  def __init__(self, folder: Path):
    self.folder, self.opened = folder, None
    self.length = self.open()[0].shape[0]
    self.chunk = self.open()[0].chunk_layout.read_chunk.shape[0]
    self.opened = None  # Worker processes are forked or get this by pickling.

  def open(self) -> Any:
    """Return the stores."""
    import tensorstore as ts

    if self.opened is None:
      paths = [{"driver": "file", "path": str(self.folder / name)} for name in "xy"]
      specs = [{"driver": "zarr3", "kvstore": path} for path in paths]
      self.opened = [ts.open(spec, read=True).result() for spec in specs]
    return self.opened

  def __len__(self) -> int:
    return self.length

  def rows(self, index: Any) -> dict[str, np.ndarray]:
    """Return a row, a slice or several rows."""
    futures = [store[index].read() for store in self.open()]
    return dict(zip(("image", "label"), (f.result() for f in futures), strict=True))

  __getitem__ = rows

  @property
  def num_chunks(self) -> int:
    """The number of chunks."""
    return -(-self.length // self.chunk)

  def read_chunk(self, number: int) -> dict[str, np.ndarray]:
    """Return the rows of a chunk."""
    return self.rows(slice(number * self.chunk, min((number + 1) * self.chunk, self.length)))


class ParquetGroups:
  """Row groups of the Parquet file by pyarrow."""

  def __init__(self, folder: Path):
    from pyarrow import parquet

    self.path = folder / "rows.parquet"
    self.num_chunks = parquet.read_metadata(self.path).num_row_groups

  def read_chunk(self, number: int) -> dict[str, np.ndarray]:
    """Return the rows of a row group."""
    from pyarrow import parquet

    file = parquet.ParquetFile(self.path, memory_map=True)  # Threads cannot share one.
    table = file.read_row_group(number, use_threads=False).combine_chunks()
    values = table.column("image").chunk(0).flatten().to_numpy()
    return {"image": values.reshape(len(table), -1), "label": table.column("label").to_numpy()}


def mixed_rows(source: Any, seed: int = 0, part: int = 0, parts: int = 1) -> Batches:
  """Yield rows without end: chunks in random order, the rows of a few shuffled together."""
  rng = np.random.default_rng(seed)
  while True:
    chunks = rng.permutation(source.num_chunks)[part::parts]
    for first in range(0, len(chunks), MIXED):
      read = [source.read_chunk(int(i)) for i in chunks[first : first + MIXED]]
      arrays = {name: np.concatenate([x[name] for x in read]) for name in read[0]}
      for i in rng.permutation(len(arrays["label"])):
        yield {name: x[i] for name, x in arrays.items()}


# jaxscale


def ours(workload: str, folder: Path, threads: int) -> Batches:
  """Return batches of jaxscale; `threads` is the setting input_threads."""
  from jaxscale import data
  from jaxscale.cluster import cpu_settings

  cpu_settings.keep_memory()  # As every run on CPUs does.
  kind, _, order = workload.partition("_")
  if kind == "images":
    train = data.image_folder(str(folder / "images"), image_size=SIZE, augment="crop")
  elif kind == "tokens":
    text = data.TextFiles(
      path=str(folder / "tokens"), vocab_size=VOCABULARY, sequence_length=SEQUENCE
    )
    train, _ = text.build()
  else:
    columns = {"image": "x", "label": "y"} if kind == "zarr" else None
    options = {"columns": columns, "num_classes": 10, "eval_share": 1e-3, "shuffle": order}
    name, options["cache_gb"] = folder / "rows.zarr", CACHE_GB[workload]
    source = data.Zarr if kind == "zarr" else data.Parquet
    name = name if kind == "zarr" else folder / "rows.parquet"
    train, _ = source(path=str(name), **options).build()
  return data.train_batches(train, batch_size(workload), num_threads=threads)


# tf.data


def tensorflow(workload: str, folder: Path, threads: int) -> Batches:
  """Return batches of tf.data, with a pool of so many threads."""
  import tensorflow as tf

  dataset = {
    "images": _tf_images,
    "tokens": _tf_tokens,
    "zarr_examples": _tf_zarr,
    "zarr_chunks": _tf_chunks,
    "parquet_examples": _tf_parquet,
    "parquet_chunks": _tf_chunks,
  }[workload](tf, workload, folder, threads)
  options = tf.data.Options()
  options.threading.private_threadpool_size = threads
  return dataset.prefetch(2).with_options(options).as_numpy_iterator()


def _tf_images(tf, workload: str, folder: Path, threads: int):
  """Return the usual ImageNet pipeline: decode the box of a distorted bounding box."""
  paths = sorted((folder / "images").glob("*/*.JPEG"))
  classes = sorted({path.parent.name for path in paths})
  labels = np.array([classes.index(path.parent.name) for path in paths], np.int32)

  def load(path, label):
    content = tf.io.read_file(path)
    begin, size, _ = tf.image.sample_distorted_bounding_box(
      tf.image.extract_jpeg_shape(content),
      bounding_boxes=tf.zeros([1, 0, 4]),
      aspect_ratio_range=(3 / 4, 4 / 3),
      area_range=(0.08, 1.0),
      max_attempts=10,
      use_image_if_no_bounding_boxes=True,
    )
    box = tf.concat([begin[:2], size[:2]], 0)
    image = tf.image.decode_and_crop_jpeg(content, box, channels=3)
    image = tf.image.random_flip_left_right(tf.image.resize(image, (SIZE, SIZE)))
    return {"image": tf.cast(image, tf.uint8), "label": label}

  dataset = tf.data.Dataset.from_tensor_slices(([*map(str, paths)], labels))
  dataset = dataset.shuffle(len(paths)).repeat()
  return dataset.map(load, num_parallel_calls=threads).batch(batch_size(workload))


def _tf_tokens(tf, workload: str, folder: Path, threads: int):
  """Return windows as records of fixed length, through a buffer that shuffles."""
  files = str(folder / "tokens" / "train.bin")
  dataset = tf.data.FixedLengthRecordDataset(files, 2 * (SEQUENCE + 1)).repeat().shuffle(10_000)

  def split(records):
    tokens = tf.cast(tf.io.decode_raw(records, tf.uint16), tf.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}

  batches = dataset.batch(batch_size(workload), drop_remainder=True)
  return batches.map(split, num_parallel_calls=threads)


def _tf_zarr(tf, workload: str, folder: Path, threads: int):
  """Return batches of shuffled indices, whose rows a NumPy function reads."""
  source = ZarrRows(folder / "rows.zarr")

  def read(indices):
    rows = source.rows(indices)
    return rows["image"], rows["label"]

  def load(indices):
    image, label = tf.numpy_function(read, [indices], [tf.float32, tf.int32])
    return {"image": image, "label": label}

  dataset = tf.data.Dataset.range(len(source)).shuffle(len(source)).repeat()
  batches = dataset.batch(batch_size(workload), drop_remainder=True)
  return batches.map(load, num_parallel_calls=threads)


def _tf_parquet(tf, workload: str, folder: Path, threads: int):
  """Return rows of the table in memory, as pandas users have it."""
  source = ParquetGroups(folder)
  read = [source.read_chunk(i) for i in range(source.num_chunks)]
  arrays = {name: np.concatenate([x[name] for x in read]) for name in read[0]}
  dataset = tf.data.Dataset.from_tensor_slices(arrays).shuffle(len(arrays["label"])).repeat()
  return dataset.batch(batch_size(workload), num_parallel_calls=threads)


def _tf_chunks(tf, workload: str, folder: Path, threads: int):
  """Return chunks of a generator, interleaved, whose rows a buffer shuffles."""
  kind = workload.partition("_")[0]
  source = ZarrRows(folder / "rows.zarr") if kind == "zarr" else ParquetGroups(folder)
  first = source.read_chunk(0)
  label = first["label"].dtype

  def load(number):
    def read(number):
      chunk = source.read_chunk(int(number))
      return chunk["image"], chunk["label"]

    image, labels = tf.numpy_function(read, [number], [tf.float32, label])
    image.set_shape([None, *first["image"].shape[1:]])
    labels.set_shape([None])
    return {"image": image, "label": labels}

  dataset = tf.data.Dataset.range(source.num_chunks).shuffle(source.num_chunks).repeat()
  dataset = dataset.map(load, num_parallel_calls=threads).unbatch()
  return dataset.shuffle(MIXED * len(first["label"])).batch(batch_size(workload))


# grain


def grain(workload: str, folder: Path, workers: int) -> Batches:
  """Return batches of grain's DataLoader, with its default of 16 threads that read."""
  import grain.python as pg
  from absl import flags

  flags.FLAGS.mark_as_parsed()  # Worker processes read them.
  source, operations = _GRAIN[workload](pg, folder)
  loader = pg.DataLoader(
    data_source=source,
    sampler=pg.IndexSampler(len(source), shard_options=pg.NoSharding(), shuffle=True, seed=0),
    operations=[*operations, pg.Batch(batch_size(workload), drop_remainder=True)],
    worker_count=workers,
  )
  return iter(loader)


class Files:
  """Encoded images by index."""

  def __init__(self, folder: Path):
    self.paths = sorted((folder / "images").glob("*/*.JPEG"))
    classes = sorted({path.parent.name for path in self.paths})
    self.labels = [classes.index(path.parent.name) for path in self.paths]

  def __len__(self) -> int:
    return len(self.paths)

  def __getitem__(self, index: int) -> dict[str, Any]:
    return {"image": self.paths[index].read_bytes(), "label": self.labels[index]}


class Windows:
  """Windows of memory-mapped tokens by index."""

  def __init__(self, folder: Path):
    self.tokens = np.memmap(folder / "tokens" / "train.bin", np.uint16, "r")

  def __len__(self) -> int:
    return (len(self.tokens) - 1) // SEQUENCE

  def __getitem__(self, index: int) -> dict[str, np.ndarray]:
    window = self.tokens[index * SEQUENCE : (index + 1) * SEQUENCE + 1].astype(np.int32)
    return {"tokens": window[:-1], "targets": window[1:]}


class Chunks:
  """Whole chunks by index, of a reader of chunks."""

  def __init__(self, source: Any):
    self.source = source

  def __len__(self) -> int:
    return self.source.num_chunks

  def __getitem__(self, index: int) -> dict[str, np.ndarray]:
    return self.source.read_chunk(int(index))


class ArrowRows:
  """Rows of the Parquet file by the package datasets, which keeps them as Arrow on disk."""

  def __init__(self, folder: Path):
    import datasets  # pyright: ignore[reportMissingImports]

    datasets.disable_progress_bars()
    options = {"split": "train", "cache_dir": str(folder / "datasets")}
    loaded = datasets.load_dataset("parquet", data_files=str(folder / "rows.parquet"), **options)
    self.rows = loaded.with_format("numpy")

  def __len__(self) -> int:
    return len(self.rows)

  def __getitem__(self, index: int) -> dict[str, np.ndarray]:
    return self.rows[int(index)]


def _grain_images(pg, folder: Path):
  import cv2

  class Crop(pg.RandomMapTransform):
    """Decode, cut a random box and resize it by OpenCV."""

    def random_map(self, element, rng):
      image = cv2.imdecode(np.frombuffer(element["image"], np.uint8), cv2.IMREAD_COLOR_RGB)
      assert image is not None
      height, width = image.shape[:2]
      for _ in range(10):
        area = height * width * rng.uniform(0.08, 1.0)
        ratio = np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
        w, h = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if 0 < w <= width and 0 < h <= height:
          break
      else:
        w = h = min(height, width)
      top, left = rng.integers(0, height - h + 1), rng.integers(0, width - w + 1)
      image = cv2.resize(image[top : top + h, left : left + w], (SIZE, SIZE))
      image = image[:, ::-1] if rng.random() < 0.5 else image
      return {"image": image, "label": element["label"]}

  cv2.setNumThreads(0)
  return Files(folder), [Crop()]


def _grain_chunks(pg, source: Any):
  class Rows(pg.experimental.FlatMapTransform):
    """Split a chunk in its rows, in random order."""

    max_fan_out = 1 << 14

    def flat_map(self, element):
      for i in np.random.default_rng(0).permutation(len(element["label"])):
        yield {name: x[i] for name, x in element.items()}

  return Chunks(source), [Rows()]


_GRAIN: dict[str, Callable[..., Any]] = {
  "images": _grain_images,
  "tokens": lambda pg, folder: (Windows(folder), []),
  "zarr_examples": lambda pg, folder: (ZarrRows(folder / "rows.zarr"), []),
  "zarr_chunks": lambda pg, folder: _grain_chunks(pg, ZarrRows(folder / "rows.zarr")),
  "parquet_examples": lambda pg, folder: (ArrowRows(folder), []),
  "parquet_chunks": lambda pg, folder: _grain_chunks(pg, ParquetGroups(folder)),
}


def torch(workload: str, folder: Path, workers: int) -> Batches:
  """Return batches of torch's DataLoader."""
  import data_input_torch

  return data_input_torch.batches(workload, folder, workers)


SIDES: dict[str, Callable[[str, Path, int], Batches]] = {
  "jaxscale": ours,
  "tf.data": tensorflow,
  "grain": grain,
  "torch": torch,
}


def counts(side: str) -> list[int]:
  """Return the numbers of threads (jaxscale, tf.data) or worker processes that are measured."""
  cores = len(os.sched_getaffinity(0))
  return [0, cores] if side in ("grain", "torch") else [*range(1, cores + 1)]
