"""Text of TFDS and of files, packed once; tokenizers."""

import bz2
import concurrent.futures
import gzip
import io
import json
import lzma
import re
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from jaxscale import data
from jaxscale.data import token_files
from jaxscale.data.python_docs import documents
from jaxscale.data.stream import packed
from jaxscale.data.tokenizer import byte_tokenizer, read_tokenizer
from jaxscale.errors import ConfigError
from support.errors import config_error
from support.images import write_tfds
from support.tables import assignments, columns, fields, table, words

pytestmark = pytest.mark.usefixtures("own_cache")

RNG = np.random.default_rng(0)


def predicted(dataset):
  """Return the targets that count."""
  batch = dataset.load(np.arange(dataset.num_examples), None)
  return batch["targets"][batch["targets"] >= 0]


def text_of(dataset):
  """Return the predicted bytes."""
  return predicted(dataset).astype(np.uint8).tobytes()


# Packing.


def test_documents_are_packed_once_and_kept(tmp_path, capsys):
  texts = [b"one", b"", "zwölf".encode()]
  reads = []

  def batches():
    reads.append(1)
    yield texts[:2]
    yield texts[2:]

  where = str(tmp_path / "kept")
  for _ in range(2):
    stream = packed("x", batches(), byte_tokenizer(), ("x", 1), where)
    assert stream.read(0, stream.num_tokens).tobytes() == b"one\0\0zw\xc3\xb6lf\0"
  assert reads == [1] and capsys.readouterr().out.count("tokenizing x once") == 1
  (kept,) = Path(where).glob("*.json")
  assert json.loads(kept.read_text()) == {"tokens": 12, "documents": 3, "bytes": 9, "notes": []}
  kept.with_suffix(".bin").write_bytes(b"torn")
  packed("x", batches(), byte_tokenizer(), ("x", 1), where)
  packed("x", batches(), byte_tokenizer(), ("x", 2), where)  # of another dataset
  assert len(reads) == 3


def test_one_of_many_packs_and_the_others_wait(tmp_path):
  reads, barrier = [], threading.Barrier(6)

  def batches():
    reads.append(1)
    time.sleep(0.2)  # the others come meanwhile
    yield [b"a" * 1000] * 50

  def work(_):
    barrier.wait()
    return packed("x", batches(), byte_tokenizer(), ("x",), str(tmp_path))

  with concurrent.futures.ThreadPoolExecutor(6) as threads:
    found = list(threads.map(work, range(6)))
  assert reads == [1] and [s.num_tokens for s in found] == [50_050] * 6


def test_a_failed_packing_leaves_nothing(tmp_path):
  def batches():
    yield [b"a"]
    raise ConfigError("document 1 is torn")

  with pytest.raises(ConfigError, match="torn"):
    packed("x", batches(), byte_tokenizer(), ("x",), str(tmp_path))
  assert {p.suffix for p in tmp_path.iterdir()} <= {".lock"}
  (tmp_path / "file").touch()
  with pytest.raises(ConfigError, match="set cache_dir to a directory with enough space"):
    packed("x", batches(), byte_tokenizer(), ("x",), str(tmp_path / "file"))


# TFDS.


def text_dataset(root, file_format, texts):
  """Write a dataset of texts as TFDS prepares it, in shards of different lengths."""
  from tensorflow_datasets.proto import tf_example_pb2, tf_feature_pb2

  records = []
  for i, text in enumerate(texts):
    value = tf_feature_pb2.Feature(bytes_list={"value": [text]})
    feature = {"text": value, "id": tf_feature_pb2.Feature(int64_list={"value": [i]})}
    records.append(tf_example_pb2.Example(features={"feature": feature}).SerializeToString())
  splits = {"train": [records[:3], records[3:10]], "test": [records[10:]]}
  folder = write_tfds(root, "essays", file_format, splits)
  core = "tensorflow_datasets.core.features."
  number = {"shape": {}, "dtype": "int64", "encoding": "none"}
  features = json.loads((folder / "features.json").read_text())
  features["featuresDict"]["features"] = {
    "text": {"pythonClassName": core + "text_feature.Text", "text": {}},
    "id": {"pythonClassName": core + "scalar.Scalar", "tensor": number},
  }
  (folder / "features.json").write_text(json.dumps(features))
  info = json.loads((folder / "dataset_info.json").read_text())
  del info["supervisedKeys"]
  (folder / "dataset_info.json").write_text(json.dumps(info))
  return root


@pytest.mark.filterwarnings("ignore")  # protobuf and TFDS warn of each other
@pytest.mark.parametrize("file_format", ["array_record", "tfrecord"])
def test_tfds_text_by_name(tmp_path, file_format):
  texts = [document[: 50 + 31 * i] for i, document in enumerate(documents()[:14])]
  root = text_dataset(tmp_path / file_format, file_format, texts)
  options = {"data_dir": str(root), "sequence_length": 33}
  for split, expected in (("train", texts[:10]), ("test", texts[10:]), ("train[2:6]", texts[2:6])):
    dataset = data.tfds_text("essays", split, **options)
    assert text_of(dataset) == b"".join(text + b"\0" for text in expected)
    assert dataset.info.bytes_per_token == 1.0
  for wrong, hint in columns(assignments, str)("""
    feature=txt | did you mean 'text'
    feature=id | TFDSText.feature='id'
    split=trian | 'trian'
"""):
    with config_error(hint):
      data.tfds_text("essays", **{"split": "train"} | options | wrong)


@pytest.mark.filterwarnings("ignore")
def test_a_torn_document_is_one_line(tmp_path):
  root = text_dataset(tmp_path, "tfrecord", [b"some text"] * 14)
  (file,) = (root / "essays" / "1.0.0").glob("essays-test*")
  raw = file.read_bytes()
  file.write_bytes(raw[:12] + b"\xff" * 12 + raw[24:])  # the first record's first field
  with config_error(match="copy or prepare the dataset again"):
    data.tfds_text("essays", "test", data_dir=str(root))
  assert not list((tmp_path / "cache" / "jaxscale" / "text").glob("*.bin"))


@pytest.mark.filterwarnings("ignore")
def test_tfds_text_that_is_not_there_is_one_line(tmp_path):
  for name, hint in (("wiki40", "TFDSText.name='wiki40'"), ("lm1b", "jaxscale prepare lm1b")):
    with config_error(match=hint):
      data.tfds_text(name, "train", data_dir=str(tmp_path))


# Files.


def test_text_files_of_every_kind(tmp_path):
  (tmp_path / "train").mkdir()
  for name, text in (("b.txt", "second"), ("a.txt", "first"), ("README.md", "no")):
    (tmp_path / "train" / name).write_text(text)
  (tmp_path / "val.txt").write_text("held-out")
  for split, expected in (("train", b"first\0second\0"), ("val", b"held-out\0")):
    assert text_of(data.text_files(tmp_path, split, sequence_length=4)) == expected
  for kind, vocab_size in (("u2", 50257), ("u4", 70_000)):
    tokens = RNG.integers(0, 70_000, 90) % vocab_size
    tokens.astype(f"<{kind}").tofile(tmp_path / f"{kind}.bin")
    dataset = data.text_files(tmp_path, kind, vocab_size=vocab_size, sequence_length=16)
    np.testing.assert_array_equal(predicted(dataset), tokens[1:])
    assert dataset.info.bytes_per_token is None


def test_mistakes_with_text_files_are_one_line(tmp_path):
  np.arange(9, dtype="<u2").tofile(tmp_path / "train.bin")
  (tmp_path / "val.txt").write_text("x")
  (tmp_path / "both").mkdir()
  for name in ("both/0.bin", "both/1.txt", "none.txt"):
    (tmp_path / name).touch()
  for options, hint in columns(fields, str)("""
    split='train' | TextFiles.vocab_size=None
    split='train' vocab_size=9 tokenizer='x.json' | omit it
    split='val' vocab_size=9 | is for token files, but
    split='test' | contains both, none.txt, train.bin and val.txt; give a file test or files in
    split='both' | keep only one kind
    split='val' directory='no' | no such directory
    split='val' tokenizer='no.json' | TextFiles.tokenizer='no.json'
"""):
    with config_error(hint):
      data.text_files(**{"directory": tmp_path} | options)


def test_a_folder_of_text_has_the_rule_of_one_of_images(tmp_path):
  train = tmp_path / "train"
  names = words(
    "b/2.txt a.txt E.TXT b/._2.txt ._a.txt .DS_Store __MACOSX/a.txt c.json d.txt.gz e.json .f"
  )
  for name in names:
    (train / name).parent.mkdir(parents=True, exist_ok=True)
    (train / name).write_text(name)
  dataset = data.text_files(tmp_path, "train", sequence_length=4)
  assert text_of(dataset) == b"E.TXT\0a.txt\0b/2.txt\0"
  left = "skipping 4 files (2 .json, 1 .gz and 1 hidden); text files end in .bin, .npy, .txt"
  assert [note.startswith(f"{train}: {left}") for note in dataset.notes] == [True]
  for target, reason in (("/nonexistent", "No such file"), ("z.txt", "Too many levels")):
    (train / "z.txt").symlink_to(target)
    with pytest.raises(ConfigError, match=rf"z\.txt cannot be read: {reason}"):
      data.text_files(tmp_path, "train", sequence_length=4)
    (train / "z.txt").unlink()


@pytest.mark.parametrize("name", ["train.json", "train/0.json", "train.npz"])
def test_files_of_other_endings_are_named_whole(name, tmp_path):
  (tmp_path / name).parent.mkdir(exist_ok=True)
  (tmp_path / name).touch()
  shown = f"the directory {tmp_path}/train contains 1 .json;"
  shown = shown if "/" in name else f"{tmp_path} contains {name};"
  with config_error(f"TextFiles: {shown} give a file train or files in a directory train that end"):
    data.text_files(tmp_path, "train")


# Types of tokens.

TOKENS = RNG.integers(0, 50_257, 4096)
TOKENS[:3] = 50_256, 300, 9
RAW = TOKENS.astype("<u2").tobytes()


def llm_c(magic, version, count, dtype):
  head = np.zeros(256, "<i4")
  head[:3] = magic, version, count
  return head.tobytes() + TOKENS.astype(dtype).tobytes()


def npy(dtype, tokens=TOKENS):
  np.save(out := io.BytesIO(), tokens.astype(dtype))
  return out.getvalue()


def seen(directory, split, **options):
  """Return the predicted tokens: all but the first."""
  options = {"vocab_size": 50_257, "sequence_length": 64} | options
  return predicted(data.text_files(directory, split, **options))


NPY = words("<u2 >u2 <u4 <i4 <i8 >i8 <u8")
WITH_HEADER = {
  "uint16.bin": RAW,
  "llm_c.bin": llm_c(20240520, 1, 4096, "<u2"),
  "llama.bin": llm_c(20240801, 7, 4096, "<u4"),
  "named_otherwise.bin": npy("<i8"),
} | {f"{kind[1:]}{kind[0] == '>'}.npy": npy(kind) for kind in NPY}


@pytest.mark.parametrize("name", WITH_HEADER)
def test_tokens_say_their_type_in_a_header(name, tmp_path):
  (tmp_path / name).write_bytes(WITH_HEADER[name])
  np.testing.assert_array_equal(seen(tmp_path, Path(name).stem), TOKENS[1:])
  (*notes,) = data.text_files(tmp_path, Path(name).stem, vocab_size=50_257).notes
  assert [note.endswith(", as the headers say") for note in notes] == [True] * (
    name != "uint16.bin"
  )


@pytest.mark.parametrize("vocab_size", [50_257, 128_256])
@pytest.mark.parametrize("kind", ["<u2", "<u4", "<i4", "<i8", "<u8", ">u2", ">u4", ">i8"])
def test_tokens_of_another_width_are_refused_with_their_own(kind, vocab_size, tmp_path):
  tokens = RNG.integers(0, vocab_size if kind[1:] != "u2" else 50_257, 4096)
  tokens.astype(kind).tofile(tmp_path / "a.bin")
  assumed = "uint16" if vocab_size == 50_257 else "uint32"
  options = {"vocab_size": vocab_size}
  if np.dtype(kind) not in (assumed, np.dtype("i4") if assumed == "uint32" else ""):
    with pytest.raises(ConfigError, match=r"looks like .* and not uint") as error:
      seen(tmp_path, "a", **options)
    options["dtype"] = re.search(r"TextFiles.dtype='(.*?)' ", str(error.value))[1]
  np.testing.assert_array_equal(seen(tmp_path, "a", **options), tokens[1:])
  for own in (kind, np.dtype(kind).name if kind[0] == "<" else kind):
    options["dtype"] = own
    np.testing.assert_array_equal(seen(tmp_path, "a", **options), tokens[1:])


def with_token(kind, token):
  """-1 was taken for a target that is not learned, 2**32 for 0."""
  return npy(kind, np.where(np.arange(4096) == 3000, token, TOKENS))


NO_TOKENS = [
  (gzip.compress(RAW, mtime=0), "is gzip; gunzip it"),
  (b"plain words, and more of them " * 9, "is text and not tokens; rename it to .txt"),
  (RNG.random(999).astype("f4").tobytes(), "but the vocabulary has 50,257"),
  (llm_c(20240520, 1, 4097, "<u2"), "has 4,096 tokens, but its header says 4,097"),
  (npy("f4"), "is not an integer type"),
  (npy("<i8")[:-9], "is damaged ("),
  (RNG.integers(0, 65_536, 999).astype("<u2").tobytes(), "set TextFiles.vocab_size"),
  (with_token("<i8", -1), "is out of range [0, 50,256]"),
  (with_token("<i8", 2**32), "is out of range [0, 50,256]"),
  (with_token("<u4", -1), "is out of range [0, 50,256]"),
  (npy("<i8", TOKENS.reshape(64, 64)), "has shape (64, 64), but must have one dimension; save the"),
]


@pytest.mark.parametrize(("content", "hint"), NO_TOKENS, ids=range(11))
def test_what_are_no_tokens_is_one_line(content, hint, tmp_path):
  (tmp_path / "a.bin").write_bytes(content)
  with config_error(hint):
    seen(tmp_path, "a")


def test_a_type_that_a_header_contradicts_is_refused(tmp_path):
  (tmp_path / "a.npy").write_bytes(npy("<i8"))
  integers = "is not an integer type"
  for dtype, hint in (("uint16", "=uint16 is not int64"), ("float32", integers), ("u17", integers)):
    with config_error(hint):
      seen(tmp_path, "a", dtype=dtype)


# Encodings.

GERMAN = "größe und Maß, " * 30


ENCODINGS = words("utf-8 utf-8-sig latin-1 cp1252 utf-16 utf-16-le utf-32 utf-7")


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_text_is_read_by_its_encoding(encoding, tmp_path, monkeypatch):
  monkeypatch.setattr(token_files, "_AT_ONCE", 7)  # characters are cut
  (tmp_path / "a.txt").write_bytes(GERMAN.encode(encoding))
  (tmp_path / "b.txt").write_bytes(("\ufeff" + GERMAN).encode(encoding, "ignore"))
  for split in "ab":
    options = {"encoding": encoding, "sequence_length": 16}
    dataset = data.text_files(tmp_path, split, **options)
    assert text_of(dataset).decode() == GERMAN + "\0"
  (tmp_path / "c.txt").write_bytes(b"\xef\xbb\xbf" + GERMAN.encode())
  assert text_of(data.text_files(tmp_path, "c", sequence_length=16)).decode() == GERMAN + "\0"


NOT_UTF8 = [
  (b"a" * 99 + "größe".encode("latin-1"), "at byte 101; set TextFiles.enc"),
  (GERMAN.encode("utf-16"), "is not utf-8 at byte 0; set TextFiles.encoding, e"),
  (GERMAN.encode("utf-16-le"), "a.txt"),
  (("plain words " * 9).encode("utf-16-le"), "set TextFiles.encoding='utf-16-le'"),
  (gzip.compress(b"words", mtime=0), "is not utf-8 at byte 1; gunzip it"),
  (lzma.compress(b"words"), "is not utf-8 at byte 0; unxz it"),
  (bz2.compress(b"words"), "; bunzip2 it"),
  ("größe".encode()[:-1] + b"\xc3", "is not utf-8 at byte 6"),
]


@pytest.mark.parametrize(("content", "hint"), NOT_UTF8, ids=range(8))
def test_text_that_is_not_utf8_is_refused_with_its_place(content, hint, tmp_path):
  (tmp_path / "a.txt").write_bytes(content)
  with config_error(str(tmp_path / "a.txt"), hint):
    data.text_files(tmp_path, "a", sequence_length=4)
  dataset = data.text_files(tmp_path, "a", sequence_length=4, encoding="bytes")
  assert text_of(dataset) == content + b"\0"


def test_an_encoding_that_does_not_fit_is_refused(tmp_path, tokenizer_file):
  (tmp_path / "a.txt").write_bytes("words".encode("utf-16") + b"a")
  for encoding in ("utf-9", "base64", "rot13", "bytes", "undefined", "a\0b"):
    options = {"tokenizer": str(tokenizer_file[0])} if encoding == "bytes" else {}
    with config_error(f"TextFiles.encoding={encoding} "):
      data.text_files(tmp_path, "a", encoding=encoding, **options)
  for encoding in ("undefined", "a\0b", ""):
    with config_error("is not a text encoding"):
      data.text_files(tmp_path, "a", encoding=encoding)
  with config_error("is not utf-16 at byte 12; fix the file"):  # not what is set already
    data.text_files(tmp_path, "a", encoding="utf-16")


def test_a_setting_of_other_files_is_not_ignored(tmp_path):
  for name, setting, value, kind in table("""
    a.txt | dtype | uint32 | token files
    b.bin | encoding | latin-1 | text
"""):
    (tmp_path / name).write_bytes(b"\1\0" * 99)
    options = {setting: value} | ({"vocab_size": 9} if name == "b.bin" else {})
    with config_error(f"TextFiles.{setting}={value} is for {kind}, but {tmp_path / name}"):
      data.text_files(tmp_path, name[0], **options)


def test_a_tokenizer_takes_no_text_that_is_not_utf8(tokenizer_file):
  tokens = read_tokenizer(str(tokenizer_file[0]), field="TFDSText.tokenizer")
  with pytest.raises(ConfigError, match="not UTF-8 at byte 6, after 'the gr'"):
    tokens.encode([b"fine", "the größe".encode("latin-1")])


# Tokenizers.


@pytest.fixture
def tokenizer_file(tmp_path):
  tokenizers = pytest.importorskip("tokenizers")
  model = tokenizers.Tokenizer(tokenizers.models.BPE())
  model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  model.decoder = tokenizers.decoders.ByteLevel()
  letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
  options = dict(special_tokens=["<|endoftext|>", "<pad>"], show_progress=False)
  trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, initial_alphabet=letters, **options)
  model.train_from_iterator([d.decode() for d in documents()[:30]], trainer)
  model.enable_truncation(5)  # as files of encoder models have it
  path = tmp_path / "tokenizer.json"
  model.save(str(path))
  return path, model


def test_a_tokenizer_file_gives_what_the_package_gives(tokenizer_file, tmp_path):
  path, model = tokenizer_file
  model.no_truncation()
  (tmp_path / "val.txt").write_bytes(documents()[3])
  dataset = data.text_files(tmp_path, "val", tokenizer=str(path), sequence_length=64)
  found = predicted(dataset)
  end = model.token_to_id("<|endoftext|>")
  assert found.tolist() == [*model.encode(documents()[3].decode()).ids, end]
  assert dataset.load(np.arange(1), None)["tokens"][0, 0] == end and dataset.info.vocab_size == 400
  assert model.decode(found[:-1].tolist()).encode() == documents()[3]
  tokens, text = read_tokenizer(str(path)), documents()[3].decode()
  for i in (0, 1, 7, len(found) - 1):
    head, rest = found[:i].tolist(), found[i:-1].tolist()
    assert model.decode(head) + tokens.decode(rest, head) == text
  ratio = len(documents()[3]) / len(found)
  assert dataset.info.bytes_per_token == pytest.approx(ratio)
  assert read_tokenizer(str(path), "<pad>").separator == model.token_to_id("<pad>")
  with pytest.raises(ConfigError, match=r"separator='</s>': not a token of the tokenizer"):
    read_tokenizer(str(path), "</s>", field="TextFiles.tokenizer")
  path.write_text("{}")
  with config_error(match="not a Hugging Face tokenizer"):
    read_tokenizer(str(path))


def test_without_the_package_it_is_one_line(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "tokenizers", None)
  (tmp_path / "tokenizer.json").write_text("{}")
  with pytest.raises(ConfigError, match=r"pip install 'jaxscale\[tokenizers\]'"):
    read_tokenizer(str(tmp_path / "tokenizer.json"))
