"""Hostile files for every reader, read in a child process with a limit of memory.

`outcomes` starts the child, which reads one case after another and writes a line for each; a case
that kills it or keeps it waiting is an outcome, too, and the next child goes on with the case
after it. A case is a reader with the files of a valid input, of which one is made hostile.
"""

import contextlib
import io
import json
import os
import random
import resource
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxscale.errors import ConfigError, user_message

MOST_MB = 256  # above what the process has after it has read the valid input
HANG_S = 60.0  # of wall-clock time, in which other programs may have the processors
# "gone" is no file, "loop" a link to itself, "hole" 64 GiB of zeros that take no disk.
SPECIAL = "fifo zero full socket folder loop gone empty hole".split()
# Readers of several files.
SEVERAL = ("TFDS", "tokens: prepared", "table: zarr", "table: npy", "table: parquet")
SEVERAL += ("table: saved", "safetensors folder", "checkpoint")
MAX_PIXELS = 1 << 22


class Reader(NamedTuple):
  """Reader of one kind of files.

  Attributes:
    make: a function of a folder that writes a valid input there.
    read: a function of the folder and of another function, which it calls between opening the
      files and reading them; returns "read", or "skipped" for a damaged example.
  """

  make: object
  read: object


def dataset_read(make):
  """Return a reader of a dataset; `make` returns it for a folder."""

  def read(folder, between):
    dataset = make(folder)
    facts = dataset.identity
    rows = np.arange(min(dataset.num_examples, 2))
    draws = np.full((len(rows), max(dataset.num_draws, 1)), 0.4)
    dataset.load(rows[:1], draws[:1])  # Chunks that are kept may be views of the files.
    between()
    dataset.load(rows, draws)
    facts = facts() if callable(facts) else facts
    return "skipped" if dataset.damaged and dataset.damaged.count else "read"

  return read


# Images


def picture(kind, mode="RGB", **options):
  """Return a picture in a format of Pillow's."""
  from PIL import Image

  out, pixels = io.BytesIO(), np.arange(24 * 32 * 3).reshape(24, 32, 3).astype(np.uint8)
  Image.fromarray(pixels).convert(mode).save(out, kind, **options)
  return out.getvalue()


def deep(suffix, dtype):
  import cv2

  pixels = np.arange(24 * 32 * 3).reshape(24, 32, 3) / (24 * 32 * 3)
  scale = 1 if dtype == np.float32 else 65535
  return cv2.imencode(suffix, (pixels * scale).astype(dtype))[1].tobytes()


PICTURES = {
  "JPEG": lambda: picture("JPEG"),
  "progressive JPEG": lambda: picture("JPEG", progressive=True),
  "CMYK JPEG": lambda: picture("JPEG", "CMYK"),
  "PNG": lambda: picture("PNG"),
  "indexed PNG": lambda: picture("PNG", "P"),
  "16-bit PNG": lambda: deep(".png", np.uint16),
  "WebP": lambda: picture("WEBP"),
  "lossless WebP": lambda: picture("WEBP", lossless=True),
  "AVIF": lambda: picture("AVIF"),
  "GIF": lambda: picture("GIF", "P"),
  "BMP": lambda: picture("BMP"),
  "PPM": lambda: picture("PPM"),
  "TIFF": lambda: picture("TIFF"),
  "deflated TIFF": lambda: picture("TIFF", compression="tiff_deflate"),
  "JPEG in a TIFF": lambda: picture("TIFF", compression="jpeg"),
  "float TIFF": lambda: deep(".tif", np.float32),
}


def image_reader(content):
  def make(folder):
    (folder / "cat").mkdir()
    (folder / "cat" / "0.jpg").write_bytes(content())

  def dataset(folder):
    from jaxscale.data import folder as folders
    from jaxscale.data import image_folder

    folders._listings.clear()
    (folder / "dog").mkdir(exist_ok=True)  # an intact one, in place of the damaged one
    (folder / "dog" / "0.png").write_bytes(PNG)
    options = dict(image_size=16, augment="crop", max_pixels=MAX_PIXELS)
    return image_folder(folder, **options)

  return Reader(make, dataset_read(dataset))


PNG = picture("PNG")


# TFDS and TFRecord


def tfds_reader(file_format):
  def make(folder):
    from support import images

    records = [images.example(picture("JPEG"), label) for label in (1, 2)]
    images.write_tfds(folder, "photos", file_format, {"train": [records]})

  def dataset(folder):
    from jaxscale.data import tfds

    tfds._opened.cache_clear()
    return tfds.tfds_images("photos", "train", data_dir=str(folder), image_size=8)

  return Reader(make, dataset_read(dataset))


# Text and tokens


def text_reader(name, content, **options):
  def make(folder):
    (folder / f"train{name}").write_bytes(content())

  def dataset(folder):
    from jaxscale.data import token_files

    kept = tempfile.mkdtemp(dir=folder.parent)
    kept = {} if "vocab_size" in options else {"cache_dir": kept}
    with contextlib.redirect_stdout(None):
      return token_files.text_files(folder, "train", sequence_length=8, **kept, **options)

  return Reader(make, dataset_read(dataset))


JSONL = b'{"text": "a few words of a text"}\n' * 40
CHAT = {"messages": [{"role": r, "content": "a b c"} for r in ("user", "assistant")]}


def packed(kind):
  import pyarrow as pa

  return pa.compress(JSONL, {"gz": "gzip", "zst": "zstd"}[kind], asbytes=True)


def parquet():
  import pyarrow as pa
  from pyarrow import parquet

  out = io.BytesIO()
  parquet.write_table(pa.table({"text": ["a few words"] * 40}), out)
  return out.getvalue()


def npy(array):
  np.save(out := io.BytesIO(), array)
  return out.getvalue()


def chat_reader():
  def make(folder):
    (folder / "train.jsonl").write_bytes(json.dumps(CHAT).encode() + b"\n")

  def dataset(folder):
    from jaxscale.data.chat import chat_files

    kept = tempfile.mkdtemp(dir=folder.parent)
    with contextlib.redirect_stdout(None):
      return chat_files(folder, "train", sequence_length=16, cache_dir=kept)

  return Reader(make, dataset_read(dataset))


def prepared_reader():
  def make(folder):
    from jaxscale.data import stream, tokenizer

    (folder / "train").mkdir()
    path = folder / "train" / "0.bin"
    parts = stream.encoded([[b"a few words", b"of a text"]], tokenizer.byte_tokenizer())
    counts = stream.write_tokens(path, parts, "<u1")
    path.with_suffix(".json").unlink()
    facts = counts | {"tokenizer": "bytes", "tokenizer_file": "bytes"}
    (folder / "train" / "tokens.json").write_text(json.dumps(facts))

  def dataset(folder):
    from jaxscale.data import token_files

    return token_files.text_files(folder, "train", sequence_length=8, packing="best_fit")

  return Reader(make, dataset_read(dataset))


# Tables


def table_reader(kind):
  def make(folder):
    from support import sources

    with contextlib.suppress(FileExistsError):
      sources.make_source(kind, folder)

  def dataset(folder):
    from jaxscale import data

    options = {"columns": {n: n for n in ("image", "label", "field")}, "num_classes": 7}
    path = folder / next(p.name for p in (folder.parent / "valid").iterdir())
    name = {"hdf5": "HDF5", "hdf5_plain": "HDF5", "npz": "Numpy", "npy": "Numpy"}
    name |= {"zarr2": "Zarr", "zarr3": "Zarr", "saved_to_disk": "HuggingFace"}
    if kind == "saved_to_disk":
      return data.HuggingFace(dataset=str(path), **options).build()[0]
    where = f"{path}::inner" if kind.startswith("hdf5") else str(path)
    return getattr(data, name.get(kind, "Parquet"))(path=where, **options).build()[0]

  return Reader(make, dataset_read(dataset))


# Parameters, tokenizers, checkpoints and files of runs


def weights_reader(is_folder):
  def make(folder):
    from jaxscale.weights import safetensors

    layout = {"w": (np.dtype("f4"), (4, 3)), "b": (np.dtype("i1"), (5,))}
    arrays = [np.ones((4, 3), "f4"), np.ones(5, "i1")]
    safetensors.write(folder / "model.safetensors", layout, arrays, {"a": "b"})
    if is_folder:
      index = {"weight_map": dict.fromkeys(layout, "model.safetensors")}
      (folder / "model.safetensors.index.json").write_text(json.dumps(index))

  def read(folder, between):
    from jaxscale.weights import safetensors

    path = folder if is_folder else folder / "model.safetensors"
    index = safetensors.read_index(path)
    between()
    for stored in index.values():
      safetensors.view(stored).sum()
    return "read"

  return Reader(make, read)


def tokenizer_reader():
  def make(folder):
    token = dict(id=3, content="</s>", single_word=False, lstrip=False, rstrip=False)
    token |= dict(normalized=False, special=True)
    rules = [{"type": "Replace", "pattern": {"String": " "}, "content": "_"}]
    split = {"type": "Split", "pattern": {"Regex": "\\w+|\\s+"}, "behavior": "Isolated"}
    content = dict(version="1.0", truncation=None, padding=None, added_tokens=[token])
    content |= dict(normalizer={"type": "Sequence", "normalizers": rules})
    content |= dict(pre_tokenizer=split | {"invert": False}, post_processor=None, decoder=None)
    model = dict(type="WordLevel", vocab={"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]")
    (folder / "tokenizer.json").write_text(json.dumps(content | {"model": model}))

  def read(folder, between):
    from jaxscale.data.tokenizer import read_tokenizer

    tokens = read_tokenizer(str(folder))
    between()
    tokens.decode(tokens.encode([b"a b c " * 50, b"a" * 200]).tolist(), [])
    return "read"

  return Reader(make, read)


def checkpoint_reader(is_whole):
  def make(folder):
    import jax.numpy as jnp

    from jaxscale.checkpoint import checkpoint_files, checksum

    (path := folder / "5").mkdir()
    state = {"params": {"w": jnp.arange(12.0).reshape(3, 4), "b": jnp.ones((40, 50))}}
    checkpoint_files.start_writing(path, state)()
    checkpoint_files.merge(path)
    manifest = {"step": 5, "metrics": {}, "leaves": checksum.manifest(state)}
    checkpoint_files.finish(path, manifest)

  def read(folder, between):
    import jax

    from jaxscale.checkpoint import checkpoint_files, checksum

    path = folder / "5"
    try:
      leaves = checkpoint_files.read_manifest(path)["leaves"]
      if not is_whole:
        leaf = checkpoint_files.leaf_reader(path)
        between()
        for name in leaves:
          leaf(name)
        return "read"
      where = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
      like = {"w": (3, 4), "b": (40, 50)}
      like = {k: jax.ShapeDtypeStruct(v, "float32", sharding=where) for k, v in like.items()}
      checkpoint_files.check_same_leaves(path, leaves, checksum.describe({"params": like}))
      between()
      checksum.verify(checkpoint_files.load(path, {"params": like}), leaves)
    except checksum.DamagedError as e:
      raise ConfigError(str(e)) from None  # commands add what to do
    return "read"

  return Reader(make, read)


def copy_reader():
  def make(folder):
    from jaxscale.checkpoint import node_file

    w = np.ones((3, 4), "f4")
    footer = dict(run="a", step=1, process=0, processes=1)
    shard = node_file.Shard("w", (3, 4), ((0, 3), (0, 4)), w)
    node_file.write_copy(folder / "copy", footer, [shard])

  def read(folder, between):
    import jax

    from jaxscale.checkpoint import checksum, node_file

    where = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    like = {"w": jax.ShapeDtypeStruct((3, 4), "float32", sharding=where)}
    try:
      with node_file.open_copy(folder / "copy") as file:
        leaves = node_file.read_footer(file)["leaves"]
        between()
        node_file.read_state(file, leaves, like)
    except (checksum.DamagedError, OSError) as e:
      raise ConfigError(str(e)) from None  # `node_copies` skips a copy that it cannot read
    return "read"

  return Reader(make, read)


def json_reader(name, content, read_one):
  def make(folder):
    (folder / name).write_bytes(content)

  def read(folder, between):
    between()
    found = read_one(folder / name)
    return "read" if found else "skipped"

  return Reader(make, read)


def site(path):
  from jaxscale.jobs.site import load_site

  return load_site(str(path))


def described(path):
  from jaxscale.config.record import describe_run

  return describe_run(path.parent)


def metrics(path):
  from jaxscale.metrics import read_metrics

  return read_metrics(path)


def summary(path):
  from jaxscale.files import read_json

  return read_json(path, {"outcome": str})


def plan(path):
  from jaxscale.planning.stored import read_plan

  return read_plan(path)


def preprocessing(path):
  from jaxscale.data.preprocessing import preprocessing_of

  return preprocessing_of(path.parent)


def kept_index(path):
  from jaxscale.data import tfrecord

  path.is_file() and path.chmod(0o600)
  return tfrecord._read_index(path, 1)


def index_file():
  np.savez(out := io.BytesIO(), np.array([[12, 9], [37, 1]]))
  return out.getvalue()


LINE = {"step": 5, "time": 1.0, "train/loss": 0.5}
TIMM = {"pretrained_cfg": {"input_size": [3, 224, 224], "mean": [0.5], "std": [0.5]}}


def plain_readers():
  from jaxscale.config.loading import load_config
  from jaxscale.config.record import FORMAT, to_plain
  from support.plans import PLAN

  run = dict(format=FORMAT, config=to_plain(load_config("configs/digits.py")), derived={})
  run |= dict(data={"name": "digits"}, processes=1, versions={}, python="3", devices=["cpu"])
  lines = b"".join(json.dumps(LINE | {"step": i}).encode() + b"\n" for i in range(50))
  profile = sorted(Path("launch/profiles").glob("*.toml"))[0].read_bytes()
  return {
    "config.json": json_reader("config.json", json.dumps(run).encode(), described),
    "metrics.jsonl": json_reader("metrics.jsonl", lines, metrics),
    "summary.json": json_reader("summary.json", b'{"outcome": "done", "step": 9}', summary),
    "plan.json": json_reader("plan.json", json.dumps(PLAN).encode(), plan),
    "site profile": json_reader("site.toml", profile, site),
    "timm config": json_reader("config.json", json.dumps(TIMM).encode(), preprocessing),
    "kept index": json_reader("kept.npz", index_file(), kept_index),
  }


TABLES = "zarr2 zarr3 parquet arrow feather hdf5 hdf5_plain npz npy saved_to_disk".split()


def has(package):
  import importlib.util

  return importlib.util.find_spec(package) is not None


def readers():
  """Return all readers by their names."""
  found = {f"image folder: {name}": image_reader(x) for name, x in PICTURES.items()}
  if has("tensorflow_datasets"):
    found |= {f"TFDS: {kind}": tfds_reader(kind) for kind in ("tfrecord", "array_record")}
  tokens = np.arange(200, dtype="<u2")
  found |= {
    "text: .txt": text_reader(".txt", lambda: b"a few words of a text " * 9),
    "text: .jsonl": text_reader(".jsonl", lambda: JSONL),
    "text: .jsonl.gz": text_reader(".jsonl.gz", lambda: packed("gz")),
    "text: .jsonl.zst": text_reader(".jsonl.zst", lambda: packed("zst")),
    "text: .parquet": text_reader(".parquet", parquet),
    "tokens: .bin": text_reader(".bin", tokens.tobytes, vocab_size=1000),
    "tokens: .npy": text_reader(".npy", lambda: npy(tokens), vocab_size=1000),
    "tokens: prepared": prepared_reader(),
    "chat": chat_reader(),
  }
  found |= {f"table: {kind}": table_reader(kind) for kind in TABLES}
  found |= {"safetensors": weights_reader(False), "safetensors folder": weights_reader(True)}
  found |= {"tokenizer.json": tokenizer_reader()} if has("tokenizers") else {}
  found |= {"checkpoint: export": checkpoint_reader(False)}
  found |= {"checkpoint: restore": checkpoint_reader(True), "copy on the node": copy_reader()}
  return found | plain_readers()


# Cases


def mutate(whole, chance):
  """Return bytes with bits flipped, parts cut, repeated or replaced, or huge numbers."""
  found = bytearray(whole)
  for _ in range(chance.randrange(1, 4)):
    at, span = chance.randrange(len(found) + 1), 1 << chance.randrange(9)
    match chance.randrange(8):
      case 0 | 1 if found:
        for _ in range(chance.randrange(1, 9)):
          found[chance.randrange(len(found))] ^= 1 << chance.randrange(8)
      case 2:
        del found[at:]
      case 3:
        del found[at : at + span]
      case 4:
        found[at:at] = found[at : at + span] * chance.choice([1, 2, 50])
      case 5:
        found[at : at + span] = chance.randbytes(span)
      case 6:
        huge = chance.choice([0, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**40, 65535, 100_000])
        width = chance.choice([1, 2, 4, 8])
        number = (huge % 256**width).to_bytes(width, chance.choice(["little", "big"]))
        found[at : at + width] = number
      case 7:
        digits = [i for i, x in enumerate(found) if 48 <= x < 58]
        if digits:
          at = chance.choice(digits)
          found[at : at + 1] = chance.choice([b"9" * 9, b"-1", b"1e308", b"0", b"9" * 5000])
  return bytes(found)


def hostile(path, kind):
  """Put something that is not a file, or a strange one, in the place of a file."""
  path.unlink()
  match kind:
    case "fifo":
      os.mkfifo(path)
    case "zero" | "full":
      path.symlink_to(f"/dev/{kind}")
    case "socket":
      folder = os.open(path.parent, os.O_RDONLY)  # a socket's path has at most 107 characters
      with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"/proc/self/fd/{folder}/{path.name}")
      os.close(folder)
    case "folder":
      path.mkdir()
    case "loop":
      path.symlink_to(path.name)
    case "empty":
      path.touch()
    case "hole":
      path.touch()
      os.truncate(path, 64 << 30)


def cases(count, only=None):
  """Return the cases of every reader: special files, files that shrink, and mutations."""
  found = []
  for name in only or readers():
    # Each special case is of a file by chance: enough of them for readers of several files.
    times = 12 if count > 50 and name.startswith(SEVERAL) else 1
    found += [[name, f"{kind} {i}"] for kind in SPECIAL for i in range(times)]
    found += [[name, "shrinks"], *([name, number] for number in range(count))]
  return found


def memory(field):
  text = Path("/proc/self/status").read_text()
  return int(text.partition(f"{field}:")[2].split()[0]) / 1024


def run_case(reader, valid, folder, kind, chance):
  """Read a case; return the outcome and the message."""
  shutil.rmtree(folder, ignore_errors=True)
  shutil.copytree(valid, folder, symlinks=True)
  files = sorted(p for p in folder.rglob("*") if p.is_file())
  path = chance.choice(files)
  shrink = lambda: [os.truncate(p, p.stat().st_size // 2) for p in files]  # noqa: E731
  if str(kind).split()[0] in SPECIAL:
    hostile(path, kind.split()[0])
  elif kind != "shrinks":
    path.write_bytes(mutate(path.read_bytes(), chance))
  try:
    return reader.read(folder, shrink if kind == "shrinks" else lambda: None), path.name
  except BaseException as e:
    text = f"{path.name}: {type(e).__name__}: {e}"
    if (message := user_message(e)) is not None:
      return ("refused" if message.line.isprintable() else "not a line"), text
    return "traceback", text + "\n" + traceback.format_exc()


def child(arguments):
  """Read cases from `start` on, and write a line before and after each."""
  count, seed, start, only = json.loads(arguments)
  os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()
  every, answers = readers(), os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)  # libraries print
  unlimited = resource.getrlimit(resource.RLIMIT_DATA)
  memory_folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
  with tempfile.TemporaryDirectory(dir=memory_folder) as place:
    valid, folder, last = Path(place, "valid"), Path(place, "case"), None
    for number, (name, kind) in enumerate(cases(count, only)):
      if number < start:
        continue
      if name != last:
        resource.setrlimit(resource.RLIMIT_DATA, unlimited)
        shutil.rmtree(valid, ignore_errors=True)
        valid.mkdir()
        every[name].make(valid)
        for _ in range(2):
          shutil.rmtree(folder, ignore_errors=True)
          shutil.copytree(valid, folder)
          assert every[name].read(folder, lambda: None) == "read", name
        limit = int((memory("VmData") + MOST_MB) * 2**20)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, unlimited[1]))
        last = name
      print(json.dumps([number]), file=answers, flush=True)
      Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew: proc(5)
      before, clock, wall = memory("VmRSS"), time.process_time(), time.monotonic()
      chance = random.Random(zlib.crc32(f"{seed} {name} {kind}".encode()))
      outcome, text = run_case(every[name], valid, folder, kind, chance)
      took = [time.process_time() - clock, time.monotonic() - wall]
      grown = memory("VmHWM") - before
      print(json.dumps([number, outcome, text, *took, grown]), file=answers, flush=True)
      for extra in Path(place).iterdir():
        extra in (valid, folder) or shutil.rmtree(extra, ignore_errors=True)


class Outcome(NamedTuple):
  """Outcome of a case: what was read, how it ended, processor and clock time, and memory."""

  reader: str
  kind: object
  outcome: str
  text: str
  cpu_s: float = 0.0
  wall_s: float = 0.0
  grown_mb: float = 0.0


def outcomes(count, seed=0, only=None):
  """Yield the outcome of every case."""
  every, start = cases(count, only), 0
  while start < len(every):
    code = "import sys; sys.path[:0] = ['.', 'tests']; from support import hostile; "
    command = [
      sys.executable,
      "-c",
      f"{code}hostile.child({json.dumps([count, seed, start, only])!r})",
    ]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "RUST_BACKTRACE": "0", "OMP_NUM_THREADS": "2"}
    current, is_hung, buffer = start, False, b""
    with (
      tempfile.TemporaryFile() as log,
      subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=env) as process,
    ):
      while True:
        if not select.select([process.stdout], [], [], HANG_S)[0]:
          is_hung = True
          process.kill()
          break
        if not (data := os.read(process.stdout.fileno(), 1 << 16)):
          break
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
          number, *rest = json.loads(line)
          current = number
          if rest:
            yield Outcome(*every[number], *rest)
            current = number + 1
      if current < len(every):
        process.wait()
        log.seek(0)
        text = log.read()[-2000:].decode(errors="replace")
        how = "hung" if is_hung else f"died {process.returncode}"
        yield Outcome(*every[current], how, text)
    start = current + 1


GOOD = "read", "refused", "skipped"


def table(found):
  """Return a table of outcomes by reader."""
  rows = {}
  for x in found:
    rows.setdefault(x.reader, []).append(x)
  lines = ["| reader | inputs | read | refused | skipped | worse | slowest, s | most memory, MB |"]
  lines += ["|---|---:|---:|---:|---:|---:|---:|---:|"]
  rows |= {"all": found}
  for name, some in rows.items():
    counts = Counter(x.outcome for x in some)
    good = [counts[how] for how in GOOD]
    slow, most = max(x.cpu_s for x in some), max(x.grown_mb for x in some)
    cells = [name, len(some), *good, len(some) - sum(good), f"{slow:.2f}", f"{most:.0f}"]
    lines.append("| " + " | ".join(f"{x:,}" if isinstance(x, int) else x for x in cells) + " |")
  return "\n".join(lines)
