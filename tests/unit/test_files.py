"""Files that other users can write to: no link is followed, and what is read has limits."""

import contextlib
import io
import json
import os
import stat
import subprocess
import sys
import zipfile

import numpy as np
import pytest

from jaxscale import data, files, metrics
from jaxscale.checkpoint import lock
from jaxscale.config.bases import Optimizer
from jaxscale.config.record import from_plain
from jaxscale.data import partial_jpeg, stream, tfrecord
from jaxscale.data.tokenizer import byte_tokenizer
from jaxscale.errors import ConfigError
from jaxscale.files import append_json_line, open_to_append, read_bytes, replacing, write_json
from jaxscale.metrics import plot
from jaxscale.run import provenance
from jaxscale.run.workdir import claim_workdir
from jaxscale.weights.safetensors import read_index, write
from support.errors import config_error
from support.images import write_tfrecord
from support.two_users import give_away, needs_root


@pytest.fixture
def victim(tmp_path):
  path = tmp_path / "victim"
  path.write_text("precious")
  yield path
  assert path.read_text() == "precious"


def draw(path):
  with plot.figure(path, 1, 1, (1, 1)):
    pass


def test_a_link_of_another_user_in_a_workdir_is_refused(tmp_path, monkeypatch):
  """Whoever may write to it could have checkpoints put into a folder of its user."""
  (tmp_path / "checkpoints").symlink_to(tmp_path)
  claim_workdir(tmp_path, None)  # one's own, to a larger disk
  give_away(tmp_path / "checkpoints", monkeypatch)
  with config_error(
    "use another --workdir", match="checkpoints: this link belongs to another user"
  ):
    claim_workdir(tmp_path, None)


def write_array(path):
  write(path, {"w": (np.dtype("f4"), (2,))}, [np.ones(2, "f4")])


@pytest.mark.parametrize("write_file", [lambda path: write_json(path, {"a": 1}), write_array, draw])
def test_what_is_written_replaces_a_link_and_does_not_follow_it(tmp_path, victim, write_file):
  # As programs before wrote, and as whoever knows this one may try.
  for name in ("file", "file.tmp", f".file.tmp-{os.getpid()}"):
    (tmp_path / name).symlink_to(victim)
  write_file(tmp_path / "file")
  assert stat.S_ISREG((tmp_path / "file").lstat().st_mode)


def test_what_is_appended_is_not_appended_to_another_file(tmp_path, victim):
  (tmp_path / "link").symlink_to(victim)
  (tmp_path / provenance.FILE).symlink_to(victim)
  for append, *arguments in (
    (open_to_append, tmp_path / "link"),
    (append_json_line, tmp_path / "link", {}),
    (provenance.record_start, tmp_path, "8 x cpu"),
  ):
    with pytest.raises(OSError, match="symbolic links"):
      append(*arguments)
  workdir = tmp_path / "run"
  workdir.mkdir()
  (workdir / "metrics.jsonl").symlink_to(victim)
  with contextlib.closing(metrics.MetricWriter(workdir, tensorboard=False)) as writer:
    writer.write(1, {"a": 1.0})
  assert len(metrics.read_metrics(workdir / "metrics.jsonl")) == 1


def test_a_pipe_is_not_waited_for(tmp_path):
  """Opening a pipe that nobody reads waits for ever."""
  os.mkfifo(tmp_path / "pipe")
  for path in (tmp_path / "pipe", "/dev/zero"):
    with pytest.raises(OSError, match="not a file"):
      read_bytes(path)
  reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
  with pytest.raises(OSError, match="not a file"):
    open_to_append(tmp_path / "pipe")
  os.close(reader)
  with pytest.raises(OSError, match="No such device"):
    open_to_append(tmp_path / "pipe")


def test_stacks_replace_a_link(tmp_path, victim):
  (tmp_path / "process-0.txt").symlink_to(victim)
  code = "import sys; from jaxscale.cluster.watch.stacks import leave; "
  code += "from pathlib import Path; leave(86, Path(sys.argv[1]), 0, 'why')"
  assert subprocess.run([sys.executable, "-c", code, tmp_path]).returncode == 86
  path = tmp_path / "process-0.txt"
  assert not path.is_symlink() and path.read_text().startswith("why")


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
  path = tmp_path / "a"
  path.write_text("old")
  with pytest.raises(KeyError), replacing(path) as file:
    file.write(b"half")
    raise KeyError
  assert os.listdir(tmp_path) == ["a"] and path.read_text() == "old"
  with pytest.raises(FileNotFoundError) as error:
    write_json(tmp_path / "no" / "a.json", {})
  assert error.value.filename == str(tmp_path / "no" / "a.json")


@pytest.mark.parametrize("mask, mode", [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_the_umask_decides_who_reads_what_is_written(tmp_path, umask, mask, mode):
  umask(mask)
  write_json(tmp_path / "a", {})
  assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == mode


def cached(tmp_path):
  return stream.packed("t", [[b"abc"]], byte_tokenizer(), ("x",), str(tmp_path))


def test_a_cache_of_tokens_is_shared_by_a_group(tmp_path, umask, monkeypatch, capsys):
  needs_root()
  umask(0o002)
  folder = tmp_path / "cache"
  folder.mkdir(mode=0o775)
  assert cached(folder).num_tokens == 4 and "tokenizing" in capsys.readouterr().out
  for path in folder.iterdir():
    assert path.stat().st_mode & 0o060 == 0o060
    give_away(path, monkeypatch)
  assert cached(folder).num_tokens == 4 and not capsys.readouterr().out
  # Where anybody can put files, what is another's is made again.
  folder.chmod(0o1777)
  assert cached(folder).num_tokens == 4 and "tokenizing" in capsys.readouterr().out


def test_a_lock_of_the_cache_is_no_link(tmp_path, victim):
  folder = tmp_path / "cache"
  cached(folder)
  (lock_file,) = folder.glob("*.lock")
  for path in folder.iterdir():
    path.unlink()
  lock_file.symlink_to(victim)
  assert cached(folder).num_tokens == 4


DAMAGED = [b"", b"{", b"[]", b'{"tokens": "4"}', b'{"tokens": 4}', b"[" * 9999, b"\xff"]


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_cache_of_tokens_is_made_again(tmp_path, content, capsys):
  cached(tmp_path)
  (counts,) = tmp_path.glob("*.json")
  counts.write_bytes(content)
  assert cached(tmp_path).num_tokens == 4
  assert capsys.readouterr().out.count("tokenizing") == 2


def npz(**arrays):
  def make(path):
    with path.open("wb") as file:
      np.savez(file, **arrays)

  return make


def npz_of(places, ends=(2,)):
  return npz(places=np.array(places), ends=np.array(ends))


INDEXES = {
  "bytes": lambda path: path.write_bytes(b"PK\x03\x04 no zip"),
  "no places": npz(ends=np.array([2])),
  "of floats": npz_of(np.ones((2, 2))),
  "of one column": npz_of(np.ones((2, 1), int)),
  "too few": npz_of(np.ones((1, 2), int)),
  "another number of files": npz_of(np.ones((2, 2), int), [1, 2]),
  "below zero": npz_of(np.full((2, 2), -5)),
  "objects": npz_of(np.array([{}, {}], object)),
  "deflated and damaged": lambda path: path.write_bytes(torn()),
}


def torn():
  out = io.BytesIO()
  with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
    file.writestr("places.npy", b"\0" * 1000)
    file.writestr("ends.npy", b"\0" * 1000)
  whole = bytearray(out.getvalue())
  whole[42:50] = b"\xff" * 8
  return bytes(whole)


@pytest.mark.parametrize("name", INDEXES)
def test_a_damaged_index_of_records_is_made_again(tmp_path, own_cache, name):
  write_tfrecord(tmp_path / "a", [b"first", b"second"])
  shards = [tfrecord.Shard(str(tmp_path / "a"), 2, 0, 2)]
  assert tfrecord.random_access(shards)(1) == b"second"
  (kept,) = (tmp_path / "cache/jaxscale/tfrecord").iterdir()
  INDEXES[name](kept)
  assert tfrecord.random_access(shards)(0) == b"first"


def test_a_library_that_others_can_replace_is_not_loaded(
  tmp_path, own_cache, monkeypatch, umask, shared_groups
):
  folder = tmp_path / "cache" / "jaxscale"
  folder.mkdir(parents=True, mode=0o755)
  path = folder / f"partial_jpeg-{partial_jpeg._key()}-3.0.so"
  path.write_bytes(b"no library")
  path.chmod(0o755)
  loaded = []
  monkeypatch.setattr(partial_jpeg, "_open", lambda p: loaded.append(p))

  def text():
    partial_jpeg.library.cache_clear()
    return partial_jpeg.library().text

  try:
    assert "only the box" in text() and loaded.pop()
    for mode, of in ((0o775, folder), (0o777, folder), (0o775, path), (0o757, path)):
      of.chmod(mode)
      assert "was not loaded: other users can write to" in text()
      of.chmod(0o755)
    give_away(path, monkeypatch)
    assert "another user" in text() and not loaded
  finally:
    partial_jpeg.library.cache_clear()


CALLED = ["os:system", "builtins:exec", "../../evil:X", "jaxscale.errors:ConfigError", ":"]


@pytest.mark.parametrize("name", CALLED)
def test_a_config_json_calls_no_function(name, tmp_path):
  """`{"class": "os:system", "command": …}` ran a command."""
  (tmp_path / "evil.py").write_text("raise SystemExit")
  values = {"command": f"touch {tmp_path}/ran"}
  with pytest.raises(ConfigError, match=r"cannot be loaded|is not a settings class"):
    from_plain(Optimizer, {"class": name, **values}, tmp_path / "code" / "x")
  assert not (tmp_path / "ran").exists()


def test_a_class_that_anybody_could_have_written_is_not_run(tmp_path, umask):
  copy = tmp_path / "code" / "mine.py"
  copy.parent.mkdir()
  text = "from jaxscale.config import Optimizer\nclass Mine(Optimizer):\n  lr: float = 1.0\n"
  copy.write_text(text)
  assert from_plain(Optimizer, {"class": "mine:Mine"}, tmp_path).lr == 1.0
  copy.chmod(0o666)
  with pytest.raises(ConfigError, match="other users can write to"):
    from_plain(Optimizer, {"class": "mine:Mine"}, tmp_path)


MAPS = [[], {"a": "x\0"}, {"a": "../x"}, {"a": ["x"]}]
INDEX = DAMAGED + [json.dumps({"weight_map": weights}).encode() for weights in MAPS]


@pytest.mark.parametrize("content", INDEX)
def test_a_damaged_index_of_weights_is_one_line(tmp_path, content):
  (tmp_path / "model.safetensors.index.json").write_bytes(content)
  with config_error(match=r"index\.json: "):
    read_index(tmp_path)


def test_a_lock_of_a_stranger_is_no_traceback(tmp_path):
  (tmp_path / "lock").mkdir()
  for content in (b"[]", b"\xff", b"[" * 9999, b'{"pid": "x"}', b""):
    (tmp_path / "lock" / "1").write_bytes(content)
    os.utime(tmp_path / "lock" / "1", (0, 0))
    with lock.acquire(tmp_path, expire_s=0.01):
      pass
  owner = {"host": "h", "pid": 2**62, "job": "", "since": 1e300, "process": ""}
  write_json(tmp_path / "owner", owner)
  assert lock._read(tmp_path / "owner").host == "unknown"
  write_json(tmp_path / "owner", owner | {"since": 1e9})
  read = lock._read(tmp_path / "owner")
  assert "pid" in str(read) and lock.is_alive(read) is None


def test_json_is_bounded():
  assert files.parse_json(b"[" * 100 + b"]" * 100)
  assert files.parse_json(f"[{','.join(['[]'] * 5000)}]")
  for text in ("[" * 101 + "]" * 101, '{"a":' * 101 + "1" + "}" * 101, "[" * 10**6):
    with pytest.raises(ValueError, match="100 levels deep"):
      files.parse_json(text)


def test_shapes():
  others = [(True, int), (2**63, int), ("1", int), (1.0, int), (10**400, float), (None, float)]
  others += [({}, {"a": int}), ({"a": {"b": 1}}, {"a": {"b": str}}), ({"a": 1}, {str: str})]
  others += [([1, "2"], [int]), ({}, []), ([], {}), (None, (int, str))]
  assert [case for case in others if not files.mismatch(*case)] == []
  equal = [(1, int), (1, float), (1.5, float), (None, (int, None)), ({"a": 1}, {"a": int})]
  equal += [({"b": 1, "a": 2}, {"a": int}), ({}, {str: int}), ([[1]], [[int]]), (True, bool)]
  assert [case for case in equal if files.mismatch(*case) is not None] == []


def test_whole_numbers():
  assert [files.whole_number(x) for x in ("0", "007", "9" * 18)] == [0, 7, 10**18 - 1]
  for text in ("", "²", "٣", "-1", "+1", " 1", "1_0", "9" * 19, "9" * 5000, "1\n"):
    assert files.whole_number(text) is None


@pytest.mark.parametrize("size", [0, 3])
def test_text_of_a_few_bytes_is_not_evaluated(tmp_path, size, own_cache):
  """The perplexity of an empty file was 257."""
  (tmp_path / "val.txt").write_text("x" * size)
  with pytest.raises(ConfigError, match="use more text or a smaller length"):
    data.text_files(tmp_path, "val", sequence_length=16)
