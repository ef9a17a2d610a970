"""The file format: against the package of its name, and damaged in all ways."""

import errno
import json
import os
import unittest.mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from PIL import Image

from jaxscale import config, models
from jaxscale.data.tokenizer import read_tokenizer
from jaxscale.errors import ConfigError
from jaxscale.models.config_json import read_config_json
from jaxscale.weights import UnwrittenError, export_safetensors, import_safetensors
from jaxscale.weights.safetensors import DTYPES, read_header, read_index, view, write
from support.errors import config_error
from support.tables import columns, literal

F4 = np.dtype("f4")


def some(dtype, shape, seed=0):
  bits = np.random.default_rng(seed).integers(0, 2, (*shape, dtype.itemsize), np.uint8)
  return bits.view(dtype).reshape(shape)


def written(path, arrays, metadata=None):
  layout = {name: (x.dtype, x.shape) for name, x in arrays.items()}
  write(path, layout, iter(arrays.values()), metadata)
  return path


def test_the_package_reads_what_we_write_and_we_what_it_writes(tmp_path):
  arrays = {f"a.{n}": some(d, (3, 2, 5), i) for i, (n, d) in enumerate(DTYPES.items())}
  arrays |= {"scalar": np.float32(2.5).reshape(()), "empty": np.zeros((0, 3), "f4")}
  arrays["ö/α"] = np.arange(6, dtype="f8").reshape(2, 3).T  # not contiguous
  plain = {n: x for n, x in arrays.items() if not n.startswith("a.F8")}
  ours = written(tmp_path / "ours", arrays, {"who": "jaxscale"})
  with safetensors.safe_open(ours, "numpy") as file:
    assert file.metadata() == {"who": "jaxscale"}
    assert set(file.keys()) == set(arrays)
    for name in plain:
      found = file.get_tensor(name)
      assert found.tobytes() == plain[name].tobytes() and found.shape == plain[name].shape
  theirs = tmp_path / "theirs"
  # The package writes an array's memory as it is.
  whole = {name: np.array(x, order="C") for name, x in plain.items()}
  safetensors.numpy.save_file(whole, theirs, {"a": "b"})
  index = read_index(theirs)
  assert index.keys() == plain.keys() and read_header(theirs)[1] == {"a": "b"}
  for name, x in plain.items():
    found = view(index[name])
    assert (found.dtype, found.shape) == (x.dtype, x.shape)
    assert found.tobytes() == x.tobytes()


@pytest.fixture
def file(tmp_path):
  return written(tmp_path / "a.safetensors", {"x": np.ones((4, 3), F4)})


def with_header(path, header, data=b"\0" * 48):
  text = header if isinstance(header, bytes) else json.dumps(header).encode()
  path.write_bytes(len(text).to_bytes(8, "little") + text + data)


GOOD = {"dtype": "F32", "shape": [4, 3], "data_offsets": [0, 48]}


def beside(start):
  """Two arrays, the second of two bytes from this one on."""
  return {"x": GOOD, "y": {"dtype": "U8", "shape": [2], "data_offsets": [start, start + 2]}}


def of_shape(shape, size):
  return {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}


DAMAGE = {
  "cut in its data": (lambda f: os.truncate(f, f.stat().st_size - 1), "truncated .*not full"),
  "cut in its header": (lambda f: os.truncate(f, 20), "truncated .*header length"),
  "cut in its length": (lambda f: os.truncate(f, 5), "not a safetensors file"),
  "empty": (lambda f: os.truncate(f, 0), "not a safetensors file"),
  "longer": (lambda f: f.write_bytes(f.read_bytes() + b"1"), "not fully covered"),
  "other": (lambda f: f.write_bytes(b"\x89PNG" * 20), "not a safetensors file"),
  "zip": (lambda f: f.write_bytes(b"PK\3\4" + b"\0" * 99), "safetensors.torch.save"),
  "pickle": (lambda f: f.write_bytes(b"\x80\2" + b"}" * 99), "safetensors.torch.save"),
  "no JSON": (lambda f: with_header(f, b"{" * 30), "damaged header"),
  "no UTF-8": (lambda f: with_header(f, b"{\xff"), "damaged header"),
  "a list": (lambda f: with_header(f, [1]), "not a safetensors file"),
  "no entry": (lambda f: with_header(f, {"x": 3}), "damaged header"),
  "metadata": (lambda f: with_header(f, {"__metadata__": 3}), "damaged header"),
  "dtype": (lambda f: with_header(f, {"x": GOOD | {"dtype": "F99"}}), "damaged header"),
  "shape": (lambda f: with_header(f, {"x": GOOD | {"shape": [4, -3]}}), "damaged"),
  "size": (lambda f: with_header(f, {"x": GOOD | {"shape": [4, 4]}}), "damaged header"),
  "offset": (lambda f: with_header(f, {"x": GOOD | {"data_offsets": [-8, 40]}}), "damaged"),
  "a hole": (lambda f: with_header(f, beside(49), b"\0" * 51), "damaged header .*`y`"),
  "overlap": (lambda f: with_header(f, beside(46)), "damaged header .*`y`"),
  "65 dims": (lambda f: with_header(f, {"x": of_shape([1] * 65, 4)}), "damaged header"),
  "2^120": (lambda f: with_header(f, {"x": of_shape([0, 2**60, 2**60], 0)}, b""), "damaged header"),
  "no offsets": (lambda f: with_header(f, {"x": {"dtype": "F32", "shape": [1]}}), "damaged header"),
  "deep": (lambda f: with_header(f, b'{"a":' * 13_107), "damaged header|not a safetensors"),
  "2^63 long": (
    lambda f: f.write_bytes(b"\xff" * 7 + b"\x7f{"),
    "damaged header|not a safetensors",
  ),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_file_is_one_line(how, file):
  damage, says = DAMAGE[how]
  damage(file)
  with config_error(str(file), match=says):
    view(read_index(file)["x"])


def in_folder(folder, files, weight_map=None):
  folder.mkdir()
  for name, arrays in files.items():
    written(folder / name, arrays)
  found = {x: name for name, arrays in files.items() for x in arrays}
  index = {"metadata": {"total_size": 1}, "weight_map": weight_map or found}
  (folder / "model.safetensors.index.json").write_text(json.dumps(index))
  return folder


def test_a_folder_of_several_files_is_one(tmp_path):
  x, y = np.arange(6, dtype="f4").reshape(2, 3), np.ones(2, np.int8)
  files = {"model-00001-of-00002.safetensors": {"x": x}, "b.safetensors": {"y": y}}
  index = read_index(in_folder(tmp_path / "two", files))
  assert (view(index["x"]) == x).all() and (view(index["y"]) == y).all()
  for name in ("one", "none"):
    (tmp_path / name).mkdir()
  written(tmp_path / "one" / "model.safetensors", {"x": x})
  assert (view(read_index(tmp_path / "one")["x"]) == x).all()
  for i, (place, says) in enumerate(
    columns(literal, str)("""
    'b.safetensors' | has no x, which
    'c.safetensors' | c.safetensors: No such file
    '../two/b.safetensors' | is not a file name
    3 | weight_map.x is 3
""")
  ):
    folder = in_folder(tmp_path / str(i), {"b.safetensors": {"y": y}}, {"x": place})
    with pytest.raises(ConfigError, match=says):
      read_index(folder)
  missing = "No such file or directory; check the path"
  for name, says in (("none", "has neither model"), ("nowhere", missing)):
    with pytest.raises(ConfigError, match=says):
      read_index(tmp_path / name)


def test_the_old_file_stays_until_the_new_one_is_whole(tmp_path, monkeypatch):
  path = tmp_path / "a.safetensors"
  export_safetensors(path, {"w": jnp.ones(1000)})
  before, full = path.read_bytes(), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
  monkeypatch.setattr(os, "fsync", unittest.mock.Mock(side_effect=full))
  with pytest.raises(UnwrittenError, match="No space left on device") as e:
    export_safetensors(path, {"w": jnp.zeros(1000)})
  assert "KB needed" in str(e.value) and "\n" not in str(e.value)
  assert path.read_bytes() == before and os.listdir(tmp_path) == [path.name]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has it")
def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
  """The kernel's own answer, at the first byte that it has no room for."""
  path = tmp_path / "a.safetensors"
  opened = os.open

  def full(path, flags, *mode, **options):
    number = opened(path, flags, *mode, **options)
    if flags & os.O_EXCL:
      os.dup2(disk := opened("/dev/full", os.O_WRONLY), number)
      os.close(disk)
    return number

  monkeypatch.setattr(os, "open", full)
  with pytest.raises(UnwrittenError, match="No space left on device"):
    export_safetensors(path, {"w": jnp.ones(100_000)})
  assert not os.listdir(tmp_path)


def test_missing_folders_are_made_and_a_tilde_is_the_home(tmp_path, monkeypatch):
  monkeypatch.setenv("HOME", str(tmp_path))
  export_safetensors("~/new/folder/a", {"w": jnp.ones(1)})
  assert import_safetensors("~/new/folder/a", {"w": jnp.zeros(1)}).params["w"] == 1


def test_names_that_do_not_fit_are_named_and_counted(tmp_path):
  path = tmp_path / "a"
  first = {"kernel": jnp.ones((3, 4)), "bias": jnp.ones(4)}
  made = {"Dense_0": first, "Dense_1": {"kernel": jnp.ones((4, 2))}}
  export_safetensors(path, made)

  def line(wanted, **options):
    with config_error() as e:
      import_safetensors(path, wanted, **options)
    return str(e.value)

  reported = line({"Norm": dict.fromkeys(["scale", "shift"], jnp.ones(2)), "Dense_0": first})
  assert "2 missing, first params/Norm/scale" in reported
  assert "1 unexpected, first params/Dense_1/kernel" in reported
  assert "use the settings of the model" in reported
  reported = line(made | {"Dense_0": {"kernel": jnp.ones((3, 5)), "bias": jnp.ones(5)}})
  assert "2 of a different shape, first params/Dense_0/bias is [4] in the file and [5]" in reported
  assert "init_head" not in reported
  reported = line(made | {"Dense_0": first | {"bias": jnp.ones(4, jnp.int32)}})
  assert "1 of a different dtype, first params/Dense_0/bias is float32 in the file" in reported
  head = {"kernel": 7 * jnp.ones((4, 9))}
  reported = line(made | {"Dense_1": head})
  assert reported.endswith("set init_head=True to initialize the classifier anew")
  found = import_safetensors(path, made | {"Dense_1": head}, init_head=True)
  assert found.params["Dense_1"]["kernel"] is head["kernel"]
  assert "the classifier is newly initialized" in found.summary
  assert "24 numbers" not in found.summary and "16 numbers in 2 arrays" in found.summary
  assert "did you mean 'timm'" in line(made, naming="tim")
  assert "no name for params/Dense_0/" in line(made, naming="timm")
  assert "no classifier with a known name" in line({"Norm": {"scale": jnp.ones(2)}}, init_head=True)
  write(path, {"a.b": (F4, (1,))}, [np.ones(1, F4)])
  assert "its names (such as a.b) match none of jaxscale, timm, torchvision, huggingface" in line(
    made
  )


def test_what_has_a_scale_elsewhere_is_not_cast(tmp_path):
  path = tmp_path / "a"
  eight = np.ones(3, ml_dtypes.float8_e4m3fn)
  written(path, {"params/w": eight})
  with pytest.raises(ConfigError, match="float8_e4m3fn in the file and float32 in the model"):
    import_safetensors(path, {"w": jnp.ones(3)})


@pytest.fixture
def language(tmp_path):
  """Parameters of a language model, and the arrays of their file."""
  params = {
    "embed": {"table": jnp.arange(12.0).reshape(4, 3)},
    "layers": {"attn_norm": {"scale": jnp.ones((2, 3))}},
    "head": {"norm": {"scale": jnp.ones(3)}, "kernel": jnp.zeros((3, 4))},
  }
  export_safetensors(tmp_path / "a", params, naming="huggingface")
  return params, {name: np.array(view(x)) for name, x in read_index(tmp_path / "a").items()}


def test_tied_embeddings_and_derived_buffers_of_hugging_faces(tmp_path, language):
  params, arrays = language
  del arrays["lm_head.weight"]
  arrays["model.layers.1.self_attn.rotary_emb.inv_freq"] = np.ones(1, F4)
  found = import_safetensors(written(tmp_path / "b", arrays), params).params
  assert (found["head"]["kernel"] == params["embed"]["table"].T).all()


@pytest.mark.parametrize("place", ["a file/x.safetensors", "a file/no/x.safetensors"])
def test_a_path_that_cannot_be_does_not_blame_the_disk(tmp_path, place):
  (tmp_path / "a file").touch()
  with pytest.raises(ConfigError, match="; give a path that can be written") as e:
    export_safetensors(tmp_path / place, {"w": jnp.ones(3)})
  assert " free in " not in str(e.value)


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod."])
def test_prefixes_of_wrapped_modules_are_left_out(tmp_path, language, prefix):
  """`torch.compile` and DistributedDataParallel put them before all names."""
  params, arrays = language
  wrapped = {f"{prefix}{name}": x for name, x in arrays.items()}
  zeros = jax.tree.map(lambda x: x - 1, params)
  found = import_safetensors(written(tmp_path / "b", wrapped), zeros).params
  assert jax.tree.all(jax.tree.map(lambda x, y: (x == y).all(), found, params))


def test_a_padded_vocabulary_names_its_setting(tmp_path):
  """Qwen's tables have 151,936 rows, and its tokenizers fewer tokens."""
  sizes = dict(num_layers=1, width=16, num_heads=2, hidden=32)

  def params_of(words, rows):
    stack = models.make_transformer(vocab_size=words, pad_vocab_to=rows, **sizes)
    return stack.init(jax.random.key(0))

  export_safetensors(tmp_path / "a", params_of(272, 1), naming="huggingface")
  with pytest.raises(ConfigError, match=r"\[272, 16\] in the file .*; set .*pad_vocab_to"):
    import_safetensors(tmp_path / "a", params_of(256, 128), num_classes=256)
  import_safetensors(tmp_path / "a", params_of(256, 272), num_classes=256)
  with pytest.raises(ConfigError, match=r"\[272, 16\] in the file and \[300, 16\] in the model"):
    import_safetensors(tmp_path / "a", params_of(300, 1), num_classes=300)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 123\n"


def of_text(folder, vocab_size=None):
  config.TextFiles(path=str(folder), sequence_length=8, vocab_size=vocab_size).build()


def of_photos(folder):
  train, _ = config.ImageFolder(path=str(folder), image_size=8).build()
  train.load(np.arange(1), np.zeros((1, train.num_draws)))


LFS = {
  "model.safetensors": import_safetensors,
  "model.safetensors.index.json": import_safetensors,
  "tokenizer.json": lambda folder: read_tokenizer(str(folder / "tokenizer.json")),
  "config.json": lambda folder: read_config_json(folder / "config.json"),
  "train.txt": of_text,
  "train.bin": lambda folder: of_text(folder, vocab_size=9),
  "train/cat/1.jpg": of_photos,
}


@pytest.mark.parametrize("name", LFS)
def test_a_pointer_of_git_lfs_is_named(tmp_path, name):
  """The package says HeaderTooLarge; a picture was a damaged one."""
  for split in ("train", "val"):
    (tmp_path / split / "cat").mkdir(parents=True)
    if name.startswith("train."):
      (tmp_path / split / "cat").rmdir()
      (tmp_path / split).rmdir()
      (tmp_path / f"{split}.{name[6:]}").write_bytes(b"some text" * 20)
    else:
      Image.new("RGB", (9, 9)).save(tmp_path / split / "cat" / "2.jpg")
  (tmp_path / name).write_bytes(POINTER)
  read = LFS[name]
  with config_error(str(tmp_path), match=r"Git LFS pointer.* `git lfs pull`"):
    read(tmp_path, {"w": jnp.ones(1)}) if "safe" in name else read(tmp_path)
