"""Input of one node by 1 to N threads: jaxscale, tf.data, grain's and torch's DataLoader.

    .venv-input/bin/python benchmarks/data_input.py [--folder DIR] [--turns 5] [--only images]

Needs, next to jaxscale: tensorflow-cpu, grain, torch, torchvision, datasets, zarr, pyarrow,
scikit-image, opencv-python-headless and psutil, all in one environment; `jaxscale prepare
jpeg` first builds the decoder of crops, as `decoder` in the result says.

No model trains: batches of NumPy arrays are read as fast as they come. Every library has all
cores of the process. The workloads:

- images: JPEG files of 500x375 and 63 kB in class folders, random crop and flip to 224x224,
  uint8, batches of 64;
- tokens: windows of 1,024 from a file of uint16, as tokens and targets in int32;
- zarr: fields of 128x128 float32 and a class, zarr 3 with the zstd codec, 8 rows in a chunk, in
  random order (`examples`), and by chunks whose rows are mixed in a buffer of 8 (`chunks`); our
  cache of chunks holds a tenth of them;
- parquet: lists of 512 float32 and a class, 2,048 rows in a row group, likewise; our cache holds
  all of them in random order (its default), and three times the buffer by chunks.

Each library runs in a process of its own that lives through the benchmark, and they work in
turns; that of jaxscale keeps freed memory, as its runs on CPUs do. A turn first empties the
queues of batches that were loaded ahead, then reads batches, and then waits until all its
threads and workers are idle. `per_s` is examples per second of time; `per_cpu_s` per second of
processor time of the process and its workers, which other work on the machine disturbs less.
Values are medians over turns by number of threads or workers. `ratio` is that of a turn's
speeds, ours / the best of the others, each by its best number of threads: median, least and
most; `ratio_tf_data` has tf.data alone as the other.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
from common import report
from data_input_sides import SIDES, batch_size, counts
from turns import Side, serve

# A turn reads for so many seconds, at least so many batches; before that, `DRAINED` batches and
# two for each thread or worker empty the queues.
SECONDS, LEAST, DRAINED, TIMEOUT_S = 1.2, 4, 2, 1200
WORKLOADS = "images tokens zarr_examples zarr_chunks parquet_examples parquet_chunks".split()
LIBRARIES = "tensorflow grain torch torchvision datasets zarr tensorstore pyarrow numpy".split()


def write_data(folder: Path) -> None:
  """Write the files of all workloads that the folder lacks."""
  import pyarrow as pa
  import zarr  # pyright: ignore[reportMissingImports]
  from imagenet_input import write_folder
  from pyarrow import parquet

  rng = np.random.default_rng(0)
  if not (root := folder / "images").exists():
    root.mkdir(parents=True)
    write_folder(root)
  if not (root := folder / "tokens").exists():
    root.mkdir()
    for name, count in (("train", 1025 * 48_780), ("val", 10_000)):
      rng.integers(0, 50_257, count, np.uint16).tofile(root / f"{name}.bin")
  if not (root := folder / "rows.zarr").exists():
    group, rows, side = zarr.open_group(root, mode="w", zarr_format=3), 4096, 128
    fields = group.create_array("x", shape=(rows, side, side), chunks=(8, side, side), dtype="f4")
    group.create_array("y", data=rng.integers(0, 10, rows).astype(np.int32), chunks=(rows,))
    grid = np.linspace(0, 6, side, dtype=np.float32)
    for first in range(0, rows, 8):  # Waves with noise in the last digits, as measured fields.
      phase, scale = rng.uniform(0, 6, (2, 8, 1, 1)).astype(np.float32)
      waves = np.sin(scale * grid[:, None] + phase) * np.cos(grid + scale)
      noise = rng.normal(size=(8, side, side)).astype(np.float32)
      fields[first : first + 8] = np.round(280 + 10 * waves + noise, 2)
  if not (file := folder / "rows.parquet").exists():
    rows, width = 65_536, 512
    values = pa.array(rng.normal(size=rows * width).astype(np.float32))
    columns = {"image": pa.FixedSizeListArray.from_arrays(values, width)}
    columns["label"] = pa.array(rng.integers(0, 10, rows).astype(np.int32))
    parquet.write_table(pa.table(columns), file, row_group_size=2048)


def measure(side: str, folder: Path) -> None:
  """Answer requests for turns of one library."""
  import psutil

  own = psutil.Process()
  opened: dict[tuple[str, int], Any] = {}

  def processor_s() -> float:
    times = [own.cpu_times()]
    for child in own.children(recursive=True):
      with contextlib.suppress(psutil.NoSuchProcess):
        times.append(child.cpu_times())
    return sum(t.user + t.system for t in times)

  def wait_idle() -> None:
    before = -1.0
    while processor_s() - before > 0.01:
      before = processor_s()
      time.sleep(0.3)

  def turn(workload: str, count: int, seconds: float) -> tuple[float, float]:
    key = workload, count
    if key not in opened:
      opened[key] = SIDES[side](workload, folder, count)
    read = opened[key]
    for _ in range(DRAINED + 2 * count):
      check(workload, next(read))
    clock, wall = processor_s(), time.perf_counter()
    done = 0
    while done < LEAST or time.perf_counter() - wall < seconds:
      next(read)
      done += 1
    examples, took = done * batch_size(workload), time.perf_counter() - wall
    result = examples / max(processor_s() - clock, 0.01), examples / took
    wait_idle()
    return result

  def close(workload: str) -> None:
    for key in [key for key in opened if key[0] == workload]:
      del opened[key]

  serve({"turn": turn, "close": close})


def check(workload: str, batch: Any) -> None:
  """Check the shapes of a batch."""
  inner = {"images": (224, 224, 3), "tokens": (1024,), "zarr": (128, 128), "parquet": (512,)}
  kind, rows = workload.partition("_")[0], batch_size(workload)
  names = ("tokens", "targets") if kind == "tokens" else ("image", "label")
  for name in names:
    assert isinstance(batch[name], np.ndarray), (workload, name, type(batch[name]))
    shape = (rows,) if name == "label" else (rows, *inner[kind])
    assert batch[name].shape == shape, (workload, name, batch[name].shape)


def best(speeds: dict[tuple[str, int], list[float]], sides: list[str]) -> list[float]:
  """Return the speeds, by turn, of the fastest configuration of some libraries."""
  return max((s for (side, _), s in speeds.items() if side in sides), key=statistics.median)


def summary(measured: dict[tuple[str, int], list[list[float]]]) -> dict[str, Any]:
  """Return medians and ratios of the speeds [per_cpu_s, per_s] of one workload by turn."""
  result: dict[str, Any] = {}
  names = [*dict.fromkeys(side for side, _ in measured)]
  for name, place in (("cpu", 0), ("clock", 1)):
    speeds = {key: [turn[place] for turn in turns] for key, turns in measured.items()}
    unit = "per_cpu_s" if name == "cpu" else "per_s"
    result[unit] = {
      side: {str(n): round(statistics.median(s)) for (x, n), s in speeds.items() if x == side}
      for side in names
    }
    others = {"ratio": [x for x in names if x != "jaxscale"], "ratio_tf_data": ["tf.data"]}
    for key, sides in others.items():
      if "jaxscale" in names and {*sides} & {*names}:
        pairs = zip(best(speeds, ["jaxscale"]), best(speeds, sides), strict=True)
        ratios = sorted(a / b for a, b in pairs)
        found = [statistics.median(ratios), ratios[0], ratios[-1]]
        result[f"{key}_{name}"] = [round(x, 2) for x in found]
  return result


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--folder", type=Path, help="folder of the data; kept for another run")
  parser.add_argument("--turns", type=int, default=5)
  parser.add_argument("--only", nargs="*", default=WORKLOADS, help="workloads")
  parser.add_argument("--sides", nargs="*", default=[*SIDES], help="libraries")
  parser.add_argument("--seconds", type=float, default=SECONDS, help="seconds of a turn")
  parser.add_argument("--side", help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.side:
    measure(args.side, args.folder)
    return
  with contextlib.ExitStack() as stack:
    folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
    write_data(folder)
    sides = {}
    for name in args.sides:
      command = [sys.executable, __file__, "--side", name, "--folder", str(folder)]
      sides[name] = stack.enter_context(contextlib.closing(Side(command)))
      sides[name].wait_ready(TIMEOUT_S)
    results = {}
    for workload in args.only:
      measured: dict[tuple[str, int], list] = {}
      for _, name in itertools.product(range(args.turns), sides):
        for count in counts(name):
          asked = "turn", workload, count, args.seconds
          speeds = sides[name].ask(*asked, timeout_s=TIMEOUT_S)
          measured.setdefault((name, count), []).append(speeds)
      for side in sides.values():
        side.ask("close", workload, timeout_s=TIMEOUT_S)
      results[workload] = summary(measured)
      print(workload, results[workload], file=sys.stderr, flush=True)
  from jaxscale.data import partial_jpeg

  is_whole = (args.only, args.sides, args.seconds) == (WORKLOADS, [*SIDES], SECONDS)
  versions = {name: metadata.version(name) for name in LIBRARIES if name != "tensorflow"}
  versions["tensorflow"] = metadata.version("tensorflow-cpu")
  decoder = partial_jpeg.library().text
  more = {"turns": args.turns, "decoder": decoder, "versions": versions}
  report("data_input", keep=is_whole, **results, **more)


if __name__ == "__main__":
  main()
