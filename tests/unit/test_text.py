"""Text: the embedded documents, and windows of one stream."""

import dataclasses
import hashlib
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxscale import config as cfg
from jaxscale import data
from jaxscale.config.loading import load_config
from jaxscale.data.python_docs import SHA256, documents
from jaxscale.data.stream import TokenFile, of_array, of_files, windows
from jaxscale.errors import ConfigError
from jaxscale.experiment import build
from jaxscale.experiment.derive import derive
from support.errors import config_error

pytestmark = pytest.mark.usefixtures("own_cache")

RNG = np.random.default_rng(0)


def take(batches, n):
  return [next(batches) for _ in range(n)]


def join(batches, name="targets"):
  return np.concatenate([batch[name] for batch in batches])


# The embedded text.


def test_the_embedded_text_is_as_described():
  found = documents()
  assert hashlib.sha256(b"\0".join(found)).hexdigest() == SHA256
  assert len(found) == 308 and sum(map(len, found)) == 1_221_483 - 307
  titles = [document.split(b"\n")[0] for document in found]
  assert titles == sorted(titles) and {b"difflib", b"yield"} < set(titles)
  licence = Path(data.__file__).parent / "python_docs.LICENSE"
  assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in licence.read_text()


@pytest.mark.filterwarnings("ignore")  # of old sources
def test_the_embedded_text_is_this_interpreters():
  from support import python_docs

  theirs = python_docs.documents()
  if sys.version_info[:3] == (3, 11, 7):
    assert tuple(theirs) == documents()
  # Another release has the same topics and modules, in words that change slowly.
  mine, other = ({line for d in ds for line in d.split(b"\n")} for ds in (documents(), theirs))
  assert len(mine & other) > 0.6 * len(mine)


def test_nothing_held_out_is_trained_on():
  texts = {}
  for split in ("train", "test"):
    dataset = data.text(split, sequence_length=100)
    batch = dataset.load(np.arange(dataset.num_examples), None)
    targets = batch["targets"][batch["targets"] >= 0]
    texts[split] = targets.astype(np.uint8).tobytes().split(b"\0")
    assert texts[split].pop() == b"" and dataset.info.vocab_size == 256
  assert texts["test"] == list(documents()[9::10])
  assert sorted(texts["train"] + texts["test"]) == sorted(documents())
  mine, other = ({p for d in ds for p in re.split(rb"\n\s*\n", d)} for ds in texts.values())
  assert not mine & other
  assert sum(map(len, texts["test"])) == pytest.approx(116_000, rel=0.01)


# Windows.


def naive_windows(tokens, length, cut):
  """Every example as a loop over its tokens."""
  total = len(tokens)
  for first in range(0, total, length):
    row = [-1] * length, [0] * length
    for j in range(min(length, total - first)):
      row[0][j] = int(tokens[(cut + first + j) % total])
      row[1][j] = int(tokens[(cut + first + j - 1) % total])
    yield row


@pytest.mark.parametrize("total, length", [(23, 5), (20, 5), (3, 8), (1, 4), (7, 1)])
def test_windows_equal_the_plain_loop(total, length):
  tokens = RNG.integers(1, 200, total).astype(np.uint8)
  tokens[-1] = 0
  dataset = windows("x", of_array(tokens, 0), 256, length)
  assert dataset.num_examples == -(-total // length)
  rows = np.arange(dataset.num_examples)
  for cut in (None, 0, total // 2, total - 1):
    draws = None if cut is None else np.full((len(rows), 1), (cut + 0.5) / total)
    batch = dataset.load(rows, draws)
    targets, inputs = zip(*naive_windows(tokens, length, cut or 0), strict=True)
    counts = batch["targets"] >= 0
    np.testing.assert_array_equal(batch["targets"], targets)
    np.testing.assert_array_equal(batch["tokens"][counts], np.array(inputs)[counts])
    assert batch["tokens"].dtype == batch["targets"].dtype == np.int32
    assert counts.sum() == total and batch["tokens"].min() >= 0


def test_an_epoch_predicts_every_token_once_cut_elsewhere_each_time():
  stream = np.arange(103)  # each token is its own place
  dataset = windows("x", of_array(stream, 102), 103, 8)
  batches = take(data.train_batches(dataset, 13, seed=5), 3)
  for batch in batches:  # 13 windows: an epoch each
    counts = batch["targets"] >= 0
    assert sorted(batch["targets"][counts]) == list(range(103))
    follows = (batch["tokens"][counts] + 1) % 103
    np.testing.assert_array_equal(follows, batch["targets"][counts])
  firsts = [set(batch["targets"][:, 0] % 8) for batch in batches]
  assert len(set(map(frozenset, firsts))) > 1
  other = next(data.train_batches(dataset, 13, seed=6))
  assert not np.array_equal(other["targets"], batches[0]["targets"])


@pytest.mark.parametrize("num_hosts", [2, 4])
def test_hosts_split_the_same_global_batch_and_one_integer_resumes(num_hosts):
  dataset = data.text("train", sequence_length=4096)  # 271 windows: epochs end inside
  whole = take(data.train_batches(dataset, 16, seed=3), 40)
  shards = [(i, num_hosts) for i in range(num_hosts)]
  hosts = [take(data.train_batches(dataset, 16, seed=3, shard=s), 40) for s in shards]
  for step, batch in enumerate(whole):
    for name in ("tokens", "targets"):
      np.testing.assert_array_equal(batch[name], join([h[step] for h in hosts], name))
  resumed = take(data.train_batches(dataset, 16, seed=3, position=16 * 23), 17)
  np.testing.assert_array_equal(join(whole[23:]), join(resumed))


def test_files_are_read_as_the_array(tmp_path):
  tokens = RNG.integers(0, 60_000, 1000).astype("<u2")
  paths = [tmp_path / f"{i}.bin" for i in range(4)]
  for path, part in zip(paths, np.split(tokens, [0, 300, 301]), strict=True):
    path.write_bytes(part.tobytes())
  files = [TokenFile(path, "<u2") for path in paths]
  stream = of_files(files, None)
  assert stream.num_tokens == 1000
  for start, stop in ((0, 1000), (299, 302), (300, 301), (990, 1000), (0, 1)):
    np.testing.assert_array_equal(stream.read(start, stop), tokens[start:stop])
  dataset = windows("files", stream, 60_000, 64)
  batch = dataset.load(np.arange(16), None)
  # What is before the first token is not known: it alone is not predicted.
  np.testing.assert_array_equal(batch["targets"][batch["targets"] >= 0], tokens[1:])
  assert batch["targets"][0, 0] == -1
  with config_error(match=r"out of range \[0, 49\]; set"):
    windows("files", stream, 50, 64).load(np.arange(16), None)
  paths[1].write_bytes(b"123")
  with pytest.raises(ConfigError, match=r"1\.bin: 3 bytes are not a whole number"):
    of_files(files, None)
  with pytest.raises(OSError, match=r"became shorter while it was read: '.*1\.bin'"):
    stream.read(0, 300)


# Config.


def test_an_example_longer_than_the_text_is_named(tmp_path):
  """The error names the length and not the batch, which is as it always was."""
  for split in ("train", "val"):
    (tmp_path / f"{split}.txt").write_text("x" * 500)
  config = load_config("configs/digits.py", {"batch_size": "8"})

  def derived(length):
    files = cfg.TextFiles(path=str(tmp_path), sequence_length=length, cache_dir=str(tmp_path))
    chosen = dataclasses.replace(config, data=files)
    return derive(chosen, *(d.num_examples for d in build.make_data(chosen)), 1)

  assert derived(50).num_train > 8
  too_long = r"^data\.sequence_length=501 .*; .* smaller"
  for length, says in ((501, too_long), (300, r"^Config\.batch_size=8 .*; give 2 or less")):
    with pytest.raises(ConfigError, match=says):
      derived(length)


def test_data_of_a_config(tmp_path):
  config = load_config("configs/digits.py", {"data": "Text"})
  train, held_out = build.make_data(config)
  assert train.num_examples == 4320 and held_out.num_examples == 452
  for split, size in (("val", 30), ("train", 50)):
    (tmp_path / f"{split}.txt").write_text("x" * size)
  files = cfg.TextFiles(path=str(tmp_path), sequence_length=10, cache_dir=str(tmp_path))
  train, held_out = build.make_data(dataclasses.replace(config, data=files))
  assert (train.num_examples, held_out.num_examples) == (6, 4)
