"""Text tokenized in advance: equal bits in any number of processes, checked by training."""

import json
import signal

import numpy as np
import pytest

from jaxscale import config as cfg
from jaxscale import data
from jaxscale.data.prepare_tokens import prepare_tokens
from support.commands import error_line, jaxscale, run_python
from support.errors import config_error
from support.tables import columns, fields

pytestmark = pytest.mark.usefixtures("own_cache")

TEXTS = [[f"file {i}, document {j} größe " * (j % 9 + 1) for j in range(1, 30)] for i in range(5)]


@pytest.fixture
def source(tmp_path):
  """Make a directory of splits: five files of rows to train on, one text to validate."""
  folder = tmp_path / "text" / "train"
  folder.mkdir(parents=True)
  for i, texts in enumerate(TEXTS):
    rows = "".join(json.dumps({"content": text}) + "\n" for text in texts)
    (folder / f"{i}.jsonl").write_text(rows)
  (tmp_path / "text" / "val.jsonl").write_text(json.dumps({"content": "validation " * 30}))
  return tmp_path / "text"


def contents(folder):
  return {path.name: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def rows_of(dataset):
  return dataset.load(np.arange(dataset.num_examples), None)


def test_any_number_of_processes_writes_equal_files_that_train_alike(source, tmp_path):
  found = []
  for workers in (1, 2, 4):
    to = tmp_path / f"by_{workers}"
    done = jaxscale(
      "prepare", "tokens", source, "--to", to, "--field", "content", "--workers", workers
    )
    assert done.returncode == 0, done.stderr
    assert f"{to}/train: " in done.stdout and "145 documents in 5 files" in done.stdout
    found.append(contents(to))
  assert found[0] == found[1] == found[2]
  assert {"00000.bin", "00004.bin", "00004.lengths", "tokens.json"} <= found[0].keys()
  for packing in ("stream", "masked_stream", "best_fit", "none"):
    options = {"sequence_length": 128, "packing": packing}
    for split in ("train", "val"):
      one = data.text_files(tmp_path / "by_1", split, **options)
      other = data.text_files(source, split, field="content", **options)
      for name, array in rows_of(one).items():
        np.testing.assert_array_equal(array, rows_of(other)[name])
      assert one.info._replace(name="") == other.info._replace(name="")
  settings = cfg.TextFiles(path=str(tmp_path / "by_1"), packing="best_fit")
  for one, shapes in zip(settings.build(), settings.abstract(8), strict=True):
    assert data.batch_shapes(one.info, 8) == data.batch_shapes(shapes.info, 8)


KILLED = """
import os, signal, sys
from jaxscale.data import prepare_tokens as module

before = module.text_documents
def documents(paths, *options):
  if paths[0].name == "3.jsonl":
    os.kill(os.getpid(), signal.SIGKILL)
  return before(paths, *options)

module.text_documents = documents
module.prepare_tokens(sys.argv[1], "train", sys.argv[2], field="content")
"""


def test_a_killed_process_keeps_what_is_finished(source, tmp_path):
  whole, to = tmp_path / "whole", tmp_path / "killed"
  prepare_tokens(source, "train", whole, field="content")
  assert run_python("-c", KILLED, source, to).returncode == -signal.SIGKILL
  finished = {f"0000{i}.{ending}" for i in range(3) for ending in ("bin", "json", "lengths")}
  assert set(contents(to)) == finished
  with config_error(f"{to}/train is not complete; run jaxscale prepare tokens again"):
    data.text_files(to, "train")
  times = {path: path.stat().st_mtime_ns for path in to.rglob("*.bin")}
  prepare_tokens(source, "train", to, field="content")
  assert contents(to) == contents(whole)
  assert all(path.stat().st_mtime_ns == time for path, time in times.items())
  (source / "train" / "1.jsonl").write_text('{"content": "different"}\n')
  prepare_tokens(source, "train", to, field="content")  # that file alone is done again
  changed = {path for path, time in times.items() if path.stat().st_mtime_ns != time}
  assert changed == {to / "train" / "00001.bin"}


def test_a_killed_worker_is_one_line(source, tmp_path):
  killed = KILLED.replace('field="content"', 'field="content", num_workers=2')
  script = tmp_path / "script.py"
  body, call = killed.rsplit("\n", 2)[0], killed.rsplit("\n", 2)[1]
  script.write_text(f"{body}\nif __name__ == '__main__':\n  {call}\n")
  done = run_python(script, source, tmp_path / "to")
  assert "--workers=2 a process was killed, perhaps for its memory; start again with fewer" in (
    done.stderr
  )


def test_the_tokenizer_is_checked(source, tmp_path):
  to = tmp_path / "to"
  prepare_tokens(source, "train", to, field="content")
  facts = json.loads((to / "train" / "tokens.json").read_text())
  assert facts["tokenizer"] == "bytes" and facts["vocab_size"] == 256
  assert facts["separator"] == 0 and facts["dtype"] == "<u1" and facts["documents"] == 145
  for options, hint in columns(fields, str)("""
    vocab_size=256 | TextFiles.vocab_size=256 is set by
    field='content' | TextFiles.field=content is set by
    dtype='uint8' | TextFiles.dtype=uint8 is set by
"""):
    with config_error(hint):
      data.text_files(to, "train", **options)
  path = to / "train" / "tokens.json"
  for change, hint in (
    (
      {"tokenizer": "abc 0", "tokenizer_file": "/a/tokenizer.json"},
      "set it to that file, which was",
    ),
    ({"tokens": facts["tokens"] + 1}, "tokens.json says"),
    ({"tokens": "many"}, "tokens is 'many'; run jaxscale prepare tokens again"),
  ):
    path.write_text(json.dumps(facts | change))
    with config_error(hint):
      data.text_files(to, "train")
  path.write_text(json.dumps(facts))
  (to / "train" / "00002.bin").unlink()
  with config_error("run jaxscale prepare tokens again"):
    data.text_files(to, "train")


def test_mistakes_are_one_line(source, tmp_path):
  for words, hint in (
    (("tokens", source), "prepare tokens: give a directory of text and --to DIR"),
    (("tokens", "--to", tmp_path / "x"), "prepare tokens: give a directory of text"),
    (("tokens", tmp_path / "no", "--to", tmp_path / "x"), "no such directory"),
    (("tokens", source, "--to", tmp_path / "x"), "has no 'text', but 'content'"),
    (("tokens", source, "--to", tmp_path / "x", "--workers", "0"), "--workers=0"),
    (("tokens", source, "--to", tmp_path / "x", "--tokenizer", "no.json"), "--tokenizer='no.json'"),
  ):
    assert hint in error_line(jaxscale("prepare", *words), 2)
  np.arange(9, dtype="<u2").tofile(source / "bin.bin")
  with config_error("prepare tokens: ", "give a file bin or files"):
    prepare_tokens(source, "bin", tmp_path / "x")
