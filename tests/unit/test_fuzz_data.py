"""Every reader of data and parameters, given anything; see test_fuzz.py."""

import contextlib
import io
import json
import struct
import sys
import zipfile
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import strategies as st
from PIL import Image

from jaxscale import models, weights
from jaxscale.config import ResNet, Transformer, ViT
from jaxscale.data import TextInfo, array_info, jpeg, tfds, tfrecord, token_files
from jaxscale.data.tokenizer import read_tokenizer
from jaxscale.errors import ConfigError
from jaxscale.models.hf_config import llama_config
from jaxscale.optim.tree_paths import path_name
from jaxscale.weights import load
from jaxscale.weights.check import check_source
from jaxscale.weights.names import naming_of
from jaxscale.weights.safetensors import Stored, read_index, view
from support import fuzzing, images
from support.fuzzed import fuzzed
from support.fuzzing import damaged, edit, edited, one_line
from support.images import masked
from support.odd_images import TOO_LARGE, jpeg_441, of_size, png_of_size

limits = pytest.fixture(fuzzing.limits, autouse=True)
place = pytest.fixture(fuzzing.place, scope="module")


MODEL, VIT, RESNET = Transformer(), ViT(), ResNet()
TEXT_INFO = TextInfo("text", 256, 64)
IMAGE_INFO = array_info(np.zeros((2, 8, 8, 3), np.uint8), np.arange(2))
SIZES = dict(hidden=768, vocab_size=256, sequence_length=64)
LLAMA = llama_config(MODEL, **SIZES, dtype="float32", separator=0)
LLAMA |= dict(sliding_window=99, rope_parameters={"rope_type": "default"}, num_classes=9)
LLAMA |= dict(architecture="vit_base_patch16_224")


OF_LLAMA, OF_RESNET, OF_VIT = ("huggingface", MODEL), ("timm", RESNET), ("timm", VIT)


@fuzzed(
  damaged(LLAMA),
  st.sampled_from([OF_LLAMA, ("huggingface", VIT), OF_VIT, OF_RESNET]),
  examples=[
    *((b'{"sliding_window": "4096"}', OF_LLAMA), (b'{"model_type": []}', OF_LLAMA)),
    (b'{"num_classes": 3, "pretrained_cfg": {"mean": ["a"]}}', OF_RESNET),
    (b'{"num_classes": 3, "pretrained_cfg": {"std": [[1]]}}', OF_VIT),
    (b'{"architecture": "x", "model_args": {"global_pool": []}}', OF_VIT),
    (b'{"num_classes": 2, "model_args": {"global_pool": [1]}}', OF_VIT),
    (b'{"num_classes": 2, "mean": ["a", "b", "c"]}', OF_RESNET),
  ],
)
def test_config_of_hugging_face(place, content, kind):
  naming, model = kind
  (place / "config.json").write_bytes(content)
  info = TEXT_INFO if model is MODEL else IMAGE_INFO
  with one_line():
    check_source(place, naming, ["lm_head.weight"], model, info)


HEADER = {"w": dict(dtype="F32", shape=[2, 3], data_offsets=[0, 24]), "__metadata__": {"a": "b"}}
HEADER |= {"b": dict(dtype="I8", shape=[5], data_offsets=[24, 29])}


def with_header(text):
  return len(text).to_bytes(8, "little") + text + bytes(29)


WHOLE = with_header(json.dumps(HEADER).encode())


@fuzzed(st.one_of(damaged(HEADER).map(with_header), edited([WHOLE])))
def test_safetensors(place, content):
  path = place / "a.safetensors"
  path.write_bytes(content)
  with one_line():
    for stored in read_index(path).values():
      view(stored).sum()


def encoded(kind, mode="RGB", **options):
  out, pixels = io.BytesIO(), np.arange(24 * 32 * 3).reshape(24, 32, 3).astype(np.uint8)
  Image.fromarray(pixels).convert(mode).save(out, kind, **options)
  return out.getvalue()


IMAGES = [encoded(kind) for kind in ("JPEG", "PNG", "BMP", "TIFF", "PPM", "WEBP")]
IMAGES += [encoded("JPEG", progressive=True), encoded("JPEG", "CMYK"), encoded("GIF", "P")]
IMAGES += [jpeg_441()]
DRAWS = np.full(64, 0.4)


@fuzzed(
  st.one_of(edited(IMAGES), st.binary(max_size=40)),
  st.booleans(),
  examples=[
    *((content, True) for content in (jpeg_441(), TOO_LARGE["a JPEG"], of_size(0, 0))),
    *((TOO_LARGE[name], False) for name in ("300 scans", "a PNG of 2^62 pixels")),
    (png_of_size(0, 0), False),
    (png_of_size(8, 8)[:25], False),  # up to the depth, 8, and no colour type
  ],
)
@pytest.mark.filterwarnings("ignore")  # Pillow's, of what it reads all the same
def test_images(content, crops):
  with one_line(ValueError):
    draws = DRAWS if crops else None
    jpeg.decode_view(content, 16, 3, draws, max_pixels=1 << 20)


def record(data):
  head = struct.pack("<Q", len(data))
  return head + struct.pack("<I", masked(head)) + data + bytes(4)


@fuzzed(
  st.one_of(edited([record(b"a" * 9) + record(b"") + record(b"b")]), st.binary()),
  examples=[b"\xff" * 12, record(b"a") + struct.pack("<Q", 2**63) + bytes(4)],
)
def test_records_of_tensorflow(place, content):
  (place / "a.tfrecord").write_bytes(content)
  with one_line():
    places = tfrecord.index_shard(str(place / "a.tfrecord"))
    assert (places >= 0).all() and (places.sum(axis=1) <= len(content)).all()


TOKEN = dict(id=3, content="</s>", single_word=False, lstrip=False, rstrip=False)
TOKEN |= dict(normalized=False, special=True)
VOCABULARY = {"[UNK]": 0, "a": 1, "b": 2}
TOKENIZER = dict(version="1.0", truncation=None, padding=None, normalizer=None)
TOKENIZER |= dict(added_tokens=[TOKEN], pre_tokenizer={"type": "Whitespace"}, decoder=None)
TOKENIZER |= dict(post_processor=None)
TOKENIZER |= dict(model=dict(type="WordLevel", vocab=VOCABULARY, unk_token="[UNK]"))


@fuzzed(
  damaged(TOKENIZER),
  examples=[json.dumps(TOKENIZER).replace('"b": 2', f'"b": {2**32 - 1}').encode()],
)
def test_tokenizer(place, content):
  pytest.importorskip("tokenizers")
  path = place / "tokenizer.json"
  path.write_bytes(content)
  with one_line():
    tokens = read_tokenizer(str(path))
    tokens.decode(tokens.encode([b"a b c"]).tolist(), [])


def names_and_shapes(naming, params):
  """Return names and shapes of a file with these parameters."""
  flat = jax.tree_util.tree_leaves_with_path({"params": params})
  ours = {path_name(path): leaf.shape for path, leaf in flat}
  links = naming_of(naming, ours).links
  return {link.theirs: link.shape_in_file(ours[link.ours]) for link in links}


SIZES = dict(num_layers=1, width=8, num_heads=2, hidden=8)
NETWORKS = {
  "huggingface": models.make_transformer(vocab_size=16, pad_vocab_to=1, **SIZES),
  "timm": models.make_vit(image_shape=(8, 8, 3), num_classes=3, patch=4, **SIZES),
}
PARAMS = {n: jax.eval_shape(m.init, jax.random.key(0)) for n, m in NETWORKS.items()}
SHAPES = {naming: names_and_shapes(naming, tree) for naming, tree in PARAMS.items()}


def stored(shapes):
  """Return the header of a file."""
  return {n: Stored(Path("a"), np.dtype("f4"), shape, 0) for n, shape in shapes.items()}


def reshaped(chance):
  """Names and shapes of a network, some of them others."""
  naming = chance.choice([*SHAPES])
  stored = dict(SHAPES[naming])
  for name in chance.sample([*stored], chance.randrange(1, 3)):
    shape = [chance.choice([0, 1, 2, 4, 8, 2**40, n]) for n in stored[name]]
    found = (*shape[chance.randrange(2) :], *[3] * chance.randrange(2))
    match chance.randrange(6):
      case 0:
        del stored[name]
      case 1:
        stored[name + chance.choice([".0", "x", "\x1b", ".weight"])] = found
      case _:
        stored[name] = found
  return naming, stored


@fuzzed(
  fuzzing.by_chance(reshaped),
  st.sampled_from(["auto", "huggingface", "timm"]),
  examples=[
    (("timm", SHAPES["timm"] | {"pos_embed": (1, 0, 8)}), "timm"),
    (("timm", SHAPES["timm"] | {"pos_embed": (2, 10, 8)}), "timm"),
  ],
  share=5,
)  # JAX traces a model
def test_names_and_shapes_of_parameters(network, naming):
  """Read names and shapes of a file that is whole, and of another network."""
  kind, shapes = network
  with pytest.MonkeyPatch.context() as patch, one_line():
    patch.setattr(load, "read_index", lambda _: stored(shapes))
    patch.setattr(load, "_load", lambda *_: None)
    weights.import_safetensors("a", PARAMS[kind], naming=naming)


def archive(*parts):
  """Return a .npz with these bytes as its parts, and valid checksums."""
  out = io.BytesIO()
  with zipfile.ZipFile(out, "w") as file:
    for name, content in zip(("arr_0", "arr_1"), parts, strict=True):
      file.writestr(f"{name}.npy", content)
  return out.getvalue()


def npy(array):
  np.save(out := io.BytesIO(), array)
  return out.getvalue()


PARTS = npy(np.array([[12, 9], [37, 1]])), npy(np.array([[12, 3]]))
LARGE = b"(2, 2), }        ", b"(100000000000,2),"
CLAIMS = (b"(2, 2)", b"(9**99, 2)"), (b"(2, 2)", b"(10**12,2)"), (b"'<i8'", b"'|O'")


def index_file(chance):
  first, second = PARTS
  match chance.randrange(4):
    case 0:
      return edit(archive(first, second), chance)
    case 1:
      first = first.replace(*chance.choice(CLAIMS))
    case 2:
      second = edit(second, chance)
    case _:
      first = edit(first, chance)
  return archive(first, second)


@fuzzed(
  fuzzing.by_chance(index_file),
  examples=[archive(PARTS[0].replace(b"(2, 2), }        ", b"(100000000000,2),"), PARTS[1])],
)
def test_kept_index_of_records(place, content):
  path = place / "kept.npz"
  path.write_bytes(content)
  path.chmod(0o600)
  with one_line():
    found = tfrecord._read_index(path, 2)
  assert found is None or all(x.shape[1] == 2 and (x >= 0).all() for x in found)


@fuzzed(st.data(), share=5)  # TFDS reads many files
def test_metadata_of_tfds(prepared, data):
  folder, whole = prepared
  name = data.draw(st.sampled_from([*whole]))
  for file, content in whole.items():
    (folder / file).write_text(json.dumps(content))
  (folder / name).write_bytes(data.draw(damaged(whole[name])))
  with one_line():
    where = str(folder.parent.parent)
    found = tfds.tfds_images("photos", "train", data_dir=where, image_size=8)
    found.load(np.arange(1), None)


@pytest.mark.parametrize("file", ["dataset_info.json", "features.json"])
@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"a": 1}'])
def test_damaged_metadata_of_tfds_is_no_other_name(prepared, file, content):
  folder, whole = prepared
  for name, value in whole.items():
    (folder / name).write_text(content if name == file else json.dumps(value))
  with pytest.raises(ConfigError, match=r"dataset_info\.json or features\.json is dam"):
    tfds.tfds_images("photos", "train", data_dir=str(folder.parent.parent))


def test_a_class_of_features_imports_no_module(prepared, tmp_path, monkeypatch):
  """TFDS imports the module of each class that features.json has, any that Python finds."""
  folder, whole = prepared
  (tmp_path / "evil_of_tfds.py").write_text("raise SystemExit('executed')")
  monkeypatch.syspath_prepend(tmp_path)
  for name, value in whole.items():
    (folder / name).write_text(json.dumps(value))
  for path in ((), ("featuresDict", "features", "label")):
    changed = node = json.loads(json.dumps(whole["features.json"]))
    for key in path:
      node = node[key]
    node["pythonClassName"] = "evil_of_tfds.Foo"
    (folder / "features.json").write_text(json.dumps(changed))
    with pytest.raises(ConfigError, match=r"features.json has the class evil_of_tfds.Foo") as error:
      tfds.tfds_images("photos", "train", data_dir=str(folder.parent.parent), image_size=8)
    assert str(error.value).startswith("TFDS.name='photos': ")
    assert "evil_of_tfds" not in sys.modules


def test_no_code_of_a_dataset_is_downloaded(prepared, monkeypatch):
  import tensorflow_datasets

  monkeypatch.setattr(tensorflow_datasets, "builder", None)
  with pytest.raises(ConfigError, match=r"TFDS.name='kaggle:x': TFDS would download and execute"):
    tfds.tfds_images("kaggle:x", "train", image_size=8)


@pytest.fixture(scope="module")
def prepared(place):
  """Return the folder of a dataset and the content of its JSON files; import TFDS."""
  pytest.importorskip("tensorflow_datasets")
  records = [images.example(encoded("JPEG"), 1)]
  folder = images.write_tfds(place, "photos", "tfrecord", {"train": [records]})
  files = ("dataset_info.json", "features.json")
  whole = {name: json.loads((folder / name).read_text()) for name in files}
  tfds.tfds_images("photos", "train", data_dir=str(place), image_size=8)
  return folder, whole


@fuzzed(
  st.sampled_from([".txt", ".bin"]),
  edited([b"a few words", b"\0\1\2\3" * 9]),
  examples=[(".txt", b""), (".txt", b"\xff\xfe\0"), (".bin", b"\xff" * 64), (".bin", b"\0" * 7)],
)
def test_files_of_text(place, kind, content):
  folder = place / f"texts{kind}"
  folder.mkdir(exist_ok=True)
  (folder / f"train{kind}").write_bytes(content)
  words = {"vocab_size": 300} if kind == ".bin" else {"cache_dir": str(place / "kept")}
  with one_line(), contextlib.redirect_stdout(None):
    found = token_files.text_files(folder, "train", sequence_length=4, **words)
    batch = found.load(np.arange(min(found.num_examples, 2)), None)
    assert batch["tokens"].max(initial=0) < found.info.vocab_size
