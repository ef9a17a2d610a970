"""JSONL and Parquet: rows in order, damaged ones skipped and reported."""

import gzip
import json

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from jaxscale import data
from jaxscale.data import rows
from support.errors import config_error
from support.tables import table

pytestmark = pytest.mark.usefixtures("own_cache")

TEXTS = [f"text {i}, größe " * (i % 7 + 1) for i in range(300)]


def text_of(dataset):
  batch = dataset.load(np.arange(dataset.num_examples), None)
  return batch["targets"][batch["targets"] >= 0].astype(np.uint8).tobytes().decode()


def write(path, texts, field="text"):
  """Write rows with a further field, in the format of the path's ending."""
  path.parent.mkdir(exist_ok=True)
  lines = "".join(json.dumps({"id": i, field: x}) + "\n" for i, x in enumerate(texts)).encode()
  if path.suffix == ".parquet":
    columns = {"id": range(len(texts)), field: texts}
    parquet.write_table(pyarrow.table(columns), path, row_group_size=70)
  elif path.suffix == ".gz":
    path.write_bytes(gzip.compress(lines[:999]) + gzip.compress(lines[999:]))
  elif path.suffix == ".zst":
    with pyarrow.output_stream(str(path), compression="zstd") as file:
      file.write(lines)
  else:
    path.write_bytes(lines)


@pytest.mark.parametrize("ending", rows.ENDINGS)
@pytest.mark.parametrize("field", ["text", "content"])
def test_every_format_gives_the_documents_in_order(ending, field, tmp_path):
  write(tmp_path / f"train{ending}", TEXTS, field)
  write(tmp_path / "val" / f"1{ending}", TEXTS[100:], field)
  write(tmp_path / "val" / f"0{ending}", TEXTS[:100], field)
  expected = "".join(text + "\0" for text in TEXTS)
  for split in ("train", "val"):
    dataset = data.text_files(tmp_path, split, field=field)
    assert text_of(dataset) == expected and dataset.info.bytes_per_token == 1.0
    assert dataset.notes == ()
    packed = data.text_files(tmp_path, split, field=field, packing="best_fit")
    assert sorted(text_of(packed)) == sorted(expected)


GOOD = [json.dumps({"text": f"line {i}"}).encode() for i in range(400)]
DAMAGED = [
  (b"{", "Expecting property name"),
  (b"[1]", "not a JSON object"),
  (b'{"texts": "a", "b": 1}', "has no 'text', but 'texts' and 'b'"),
  (b'{"text": 12}', "'text' is 12, not a string"),
  (b'{"text": null}', "'text' is None, not a string"),
  (b'{"text": ""}', "'text' is empty"),
  (b'{"text": "\\ud800"}', "can't encode character"),
  (b'{"text": "gr\xf6\xdfe"}', "can't decode byte 0xf6"),
  (b'{"a": ' + b"[" * 90_000 + b"]" * 90_000 + b"}", "nested more than 100 levels deep"),
  (b'{"text": ' + b"9" * 5000 + b"}", "Exceeds the limit (4300 digits)"),
  (b'{"text": "' + b"a" * 200_000 + b'"}', "longer than"),
  (b"\0" * 99, "Expecting value"),
]


@pytest.mark.parametrize(("line", "problem"), DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_line_is_skipped_and_named(line, problem, tmp_path, monkeypatch):
  monkeypatch.setattr(rows, "_LONGEST", 1 << 17 if problem == "longer than" else 1 << 26)
  path = tmp_path / "train.jsonl"
  path.write_bytes(b"\n".join([*GOOD[:9], b"", line, *GOOD[9:]]))
  for _ in range(2):  # the second time from the cache
    dataset = data.text_files(tmp_path, "train")
    (note,) = dataset.notes
    kind = "damaged or empty" if "empty" in problem else "damaged"
    assert note.startswith(f"{path}: skipping 1 {kind} row of 402: train.jsonl:11 (")
    assert problem in note and "\n" not in note
    assert text_of(dataset) == "".join(f"line {i}\0" for i in range(400))
  path.write_bytes(b"\n".join([*GOOD, *5 * [line]]))
  if "empty" in problem:
    assert "skipping 5 damaged or empty rows of 405" in data.text_files(tmp_path, "train").notes[0]
    return
  with config_error(
    f"{path} has 5 damaged rows among 405: train.jsonl:401 (", "set TextFiles.field"
  ):
    data.text_files(tmp_path, "train")


def test_a_field_that_no_row_has_is_found_early(tmp_path):
  write(tmp_path / "train.jsonl", TEXTS, "content")
  with config_error("has 101 damaged rows among the first 101: train.jsonl:1 (has no 'text', but"):
    data.text_files(tmp_path, "train")
  write(tmp_path / "val.parquet", TEXTS, "content")
  with config_error("TextFiles.field=text is not a column", "give one of content, id"):
    data.text_files(tmp_path, "val")


def test_damaged_rows_of_parquet(tmp_path):
  texts = [text.encode() for text in TEXTS]
  texts[7], texts[250] = b"gr\xf6\xdfe", None
  array = pyarrow.array(texts, pyarrow.binary())
  for column in (array, array.view(pyarrow.string())):
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "train.parquet")
    dataset = data.text_files(tmp_path, "train")
    (note,) = dataset.notes
    assert "skipping 2 damaged rows of 300: train.parquet:8 (" in note
    assert "train.parquet:251 ('text' is None, not a string)" in note
    kept = [text for i, text in enumerate(TEXTS) if i not in (7, 250)]
    assert text_of(dataset) == "".join(text + "\0" for text in kept)


def test_a_byte_order_mark_is_not_text(tmp_path):
  (tmp_path / "train.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(GOOD) + b"\r\n\r\n")
  assert text_of(data.text_files(tmp_path, "train")).startswith("line 0\0line 1\0")


@pytest.mark.parametrize("ending", rows.ENDINGS[1:])
def test_a_truncated_or_wrong_file_is_one_line(ending, tmp_path):
  path = tmp_path / f"train{ending}"
  write(path, TEXTS)
  path.write_bytes(path.read_bytes()[:-30])
  with config_error(f"{path} cannot be read: ", "copy or decompress it again"):
    data.text_files(tmp_path, "train")
  path.write_bytes(b"no such format " * 9)
  with config_error(f"{path} cannot be read: "):
    data.text_files(tmp_path, "train")
  assert not list((tmp_path / "cache" / "jaxscale" / "text").glob("*.bin"))


def test_settings_of_other_files_are_refused(tmp_path):
  write(tmp_path / "a.jsonl", TEXTS)
  (tmp_path / "b.txt").write_text("text")
  np.arange(99, dtype="<u2").tofile(tmp_path / "c.bin")
  for split, setting, value, problem in table("""
    a | encoding | latin-1 | is for .txt files, but
    b | field | content | is for .jsonl and .parquet files, but
    c | field | content | is for text, but
"""):
    more = {"vocab_size": 99} if split == "c" else {}
    with config_error(f"TextFiles.{setting}={value} {problem} {tmp_path}"):
      data.text_files(tmp_path, split, **{setting: value}, **more)
  with config_error("TextFiles.separator=</s> is not a token ID below 99"):
    data.text_files(tmp_path, "c", vocab_size=99, separator="</s>")


def test_a_separator_makes_documents_of_tokens(tmp_path):
  tokens = np.array([4, 5, 0, 6, 0, 7, 8, 9])
  tokens.astype("<u2").tofile(tmp_path / "a.bin")
  np.save(tmp_path / "b.npy", tokens)
  for split in "ab":
    options = {"vocab_size": 10, "sequence_length": 8, "packing": "best_fit"}
    dataset = data.text_files(tmp_path, split, separator="0", **options)
    batch = dataset.load(np.zeros(1, int), None)
    assert batch["tokens"].tolist() == [[0, 4, 5, 0, 6, 0, 7, 8]]
    assert batch["documents"].tolist() == [[0, 0, 0, 1, 1, 2, 2, 2]]
    with config_error("packing=best_fit needs to know where documents end", "token ID"):
      data.text_files(tmp_path, split, **options)
