"""Checkpoints: exact, on any mesh, refused when foreign, distrusted when damaged."""

import itertools
import math
import os
import re
import shutil
import threading
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale import optim
from jaxscale.checkpoint import checkpoint_files, checksum
from jaxscale.checkpoint.manager import Checkpoints, UnsavedError
from jaxscale.errors import NonFiniteError
from support.errors import config_error
from support.saving import restore, save, save_steps
from support.states import at_step, make_states
from support.trees import assert_same_bits


def test_keeps_the_last_and_the_best(tmp_path):
  _, state = make_states(1)
  with Checkpoints(tmp_path, keep_last=2, keep_best=1) as checkpoints:
    for step, accuracy in enumerate([math.nan, 0.9, None, 0.9, 0.5, None], 1):
      metrics = None if accuracy is None else {"accuracy": accuracy}
      checkpoints.save(at_step(state, step), metrics)
    checkpoints.wait()
    assert checkpoints.steps() == [2, 5, 6]
    checkpoints.save(at_step(state, 6))  # there already: left alone
    checkpoints.wait()
    assert checkpoints.steps() == [2, 5, 6]


def test_a_directory_may_have_dots_and_symlinks(tmp_path):
  abstract, state = make_states(1)
  (tmp_path / "real" / "runs").mkdir(parents=True)
  (tmp_path / "link").symlink_to(tmp_path / "real" / "runs")
  for path, is_shown in ("link/../a", "real/a"), ("link/b", "link/b"):
    with Checkpoints(tmp_path / path) as checkpoints:
      save_steps(checkpoints, state, 1)
      assert checkpoints.directory == tmp_path / is_shown
      assert_same_bits(checkpoints.restore(abstract), at_step(state, 1))


def test_a_copy_under_another_number_is_set_aside(tmp_path, reported):
  """It would be the newest for ever, and each start begin at its step again."""
  abstract, state = make_states(1)
  with Checkpoints(tmp_path, keep_last=1) as checkpoints:
    save_steps(checkpoints, state, 1)
    shutil.copytree(tmp_path / "1", tmp_path / "500")
    save_steps(checkpoints, state, 2)
    assert checkpoints.steps() == [2, 500]  # it does not count as the last one kept
  for name in ("500", "7"):  # a copy, and another name
    with Checkpoints(tmp_path) as checkpoints:
      restored = checkpoints.restore(abstract)
      assert_same_bits(restored, at_step(state, 2))
    line = f"checkpoint {name} is damaged (it is a renamed copy of the checkpoint of step"
    assert line in "\n".join(reported)
    assert sorted(checkpoints.steps()) == [2]
    (tmp_path / f"{name}.damaged").rename(tmp_path / "7")


def test_a_link_or_file_in_the_place_of_a_step_leaves_nothing(tmp_path):
  _, state = make_states(1)
  (tmp_path / "c").mkdir()
  (tmp_path / "c" / "x.removed").write_text("")
  with Checkpoints(tmp_path / "c", keep_last=1) as checkpoints:
    save_steps(checkpoints, state, 1)
    (tmp_path / "c" / "1").rename(tmp_path / "elsewhere")
    (tmp_path / "c" / "1").symlink_to(tmp_path / "elsewhere")
    save_steps(checkpoints, state, 2)
  assert os.listdir(tmp_path / "c") == ["2"] and (tmp_path / "elsewhere").is_dir()


def data_of(directory, pattern="d/*"):
  """Return the largest file that has array bytes."""
  files = [p for p in directory.rglob(pattern) if p.is_file()]
  return max(files, key=lambda p: p.stat().st_size)


def flip_bit(path, where):
  content = bytearray(path.read_bytes())
  content[int(where * len(content))] ^= 0x10
  path.write_bytes(content)


def zero(path):
  path.write_bytes(bytes(path.stat().st_size))


DAMAGE = {
  **{f"bit flipped at {w}": lambda p, w=w: flip_bit(p, w) for w in (0.1, 0.3, 0.5, 0.9)},
  "cut": lambda p: p.write_bytes(p.read_bytes()[: p.stat().st_size // 2]),
  "zeroed": lambda p: zero(p),
  "gone": lambda p: p.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_newest_is_reported_and_the_one_before_used(tmp_path, damage, reported):
  abstract, state = make_states(2)
  save(tmp_path, at_step(state, 1), at_step(state, 2))
  DAMAGE[damage](data_of(tmp_path / "2"))
  with Checkpoints(tmp_path) as checkpoints:
    restored = checkpoints.restore(abstract)
    out = "\n".join(reported)
    if "flipped" in damage and int(restored.step) == 2:
      # Writers at the same time may leave bytes in a file that nothing reads.
      assert_same_bits(restored, at_step(state, 2))
      assert "damaged" not in out
      return
    assert_same_bits(restored, at_step(state, 1))
    assert "checkpoint 2 is damaged" in out and "resuming from 1" in out
    # Nothing is deleted, and the step can be saved again.
    assert (tmp_path / "2.damaged").is_dir()
    checkpoints.save(at_step(state, 2))
  assert_same_bits(restore(tmp_path, abstract), at_step(state, 2))


OTHERS = {
  "width": (dict(hidden=(32,)), "[64] in the checkpoint and float32[32] now"),
  "depth": (dict(hidden=(64, 10)), "it lacks opt_state/1/trace/Dense_2/bias"),
  "fewer": (dict(hidden=(), tx=optim.sgd(0.1)), "float32[10] now"),
  "optimizer": (dict(tx=optim.adamw(0.1)), "it lacks "),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_experiment_is_refused_in_one_line(tmp_path, other):
  options, difference = OTHERS[other]
  _, state = make_states(1)
  save(tmp_path, at_step(state, 1))
  abstract, _ = make_states(1, **options)
  with Checkpoints(tmp_path) as checkpoints:
    with config_error(difference):
      checkpoints.restore(abstract)
    assert checkpoints.steps() == [1]


def test_a_state_that_is_not_finite_is_never_saved(tmp_path):
  _, state = make_states(1)
  bad = jax.tree.map(lambda x: x, state.params)
  bad["Dense_0"]["kernel"] = bad["Dense_0"]["kernel"].at[3, 4].set(jnp.nan)
  with Checkpoints(tmp_path) as checkpoints:
    checkpoints.save(at_step(state._replace(params=bad), 3))
    found = "1 values of params/Dense_0/kernel are not finite at step 3"
    with pytest.raises(NonFiniteError, match=found) as error:
      checkpoints.save(at_step(state, 4))
    assert error.value.good_until == 3
    checkpoints.wait()
    assert os.listdir(tmp_path) == []


def test_a_state_may_be_donated_while_it_is_saved(tmp_path, monkeypatch):
  """Steps write over what they are given; checksums and bytes are those at the save."""
  abstract, state = make_states(2)
  state = at_step(state, 3)
  before = jax.device_get(jax.tree.map(jnp.copy, state))
  trained, start = threading.Event(), checkpoint_files.start_writing
  sum_shards = checksum.sum_shards

  def late(function):
    return lambda *args: (trained.wait(60), function(*args))[1]

  monkeypatch.setattr(checkpoint_files, "start_writing", lambda *args: late(start(*args)))
  monkeypatch.setattr(checksum, "sum_shards", late(sum_shards))
  train = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
  with Checkpoints(tmp_path) as checkpoints:
    checkpoints.save(state)
    for _ in range(3):
      state = train(state)
    jax.block_until_ready(state)
    trained.set()
    checkpoints.wait()
    assert_same_bits(checkpoints.restore(abstract), before)
  naive = {p: naive_checksum(x) for p, x in jax.tree_util.tree_leaves_with_path(before)}
  saved = checkpoint_files.read_manifest(tmp_path / "3")["leaves"].values()
  assert [leaf["checksum"] for leaf in saved] == list(naive.values())


@pytest.mark.parametrize("name", ["hidden=[8]", "r?", "r*", "[", "[!a]", "a\nb[c]*"])
def test_no_character_of_a_path_is_a_pattern(tmp_path, name):
  """Orbax looked for `[8]` among files, found none, and committed empty checkpoints."""
  abstract, state = make_states(2)
  decoy = tmp_path / "rb" / "c"  # what `r?` and `r*` match
  save(decoy, at_step(state, 1))
  (decoy / "1").rename(decoy / "2.tmp-0")
  local = tmp_path / f"{name} local"
  local.mkdir()
  with Checkpoints(tmp_path / name / "c", local=local) as checkpoints:
    save_steps(checkpoints, state, 2)
    assert_same_bits(checkpoints.restore(abstract), at_step(state, 2))
  with Checkpoints(tmp_path / name / "c") as checkpoints:
    assert_same_bits(checkpoints.restore(abstract), at_step(state, 2))
    leaf = checkpoint_files.leaf_reader(tmp_path / name / "c" / "2")("params/Dense_0/bias")
    np.testing.assert_array_equal(leaf, at_step(state, 2).params["Dense_0"]["bias"])


def test_a_checkpoint_whose_parts_were_never_merged_is_completed(tmp_path):
  """Restore what runs below folders with brackets in their name have left."""
  abstract, state = make_states(2)
  save(tmp_path, at_step(state, 1))
  (tmp_path / "1" / "state" / "manifest.ocdbt").unlink()
  shutil.rmtree(tmp_path / "1" / "state" / "d")
  assert_same_bits(restore(tmp_path, abstract), at_step(state, 1))


def part_of(state):
  """Return a data file written by one process."""
  return data_of(state, "ocdbt.process_*/d/*")


# What goes wrong after a process has written its part: what the line says of it.
LOST = {
  "flipped": (lambda s: flip_bit(part_of(s), 0.5), "differs between the disk and memory"),
  "cut": (lambda s: os.truncate(part_of(s), 9000), r"cannot be read|is truncated"),
  "emptied": (lambda s: os.truncate(part_of(s), 0), "is empty"),
  # A file of the index, or of data.
  "zeroed": (lambda s: zero(part_of(s)), "cannot be read|differs between the disk and memory"),
  "gone": (lambda s: part_of(s).unlink(), "could not be saved"),
  "metadata emptied": (lambda s: os.truncate(s / "_METADATA", 0), "_METADATA is empty"),
}


@pytest.mark.parametrize("lost", LOST)
def test_what_the_disk_does_not_have_is_not_committed(tmp_path, monkeypatch, lost, reported):
  _, state = make_states(2)
  start = checkpoint_files.start_writing

  def start_and_lose(directory, state):
    written = start(directory, state)
    return lambda: (written(), LOST[lost][0](directory / "state"))

  options = dict(keep_last=1, on_failure="continue")
  with Checkpoints(tmp_path, **options) as checkpoints:
    save_steps(checkpoints, state, 1)
    monkeypatch.setattr(checkpoint_files, "start_writing", start_and_lose)
    save_steps(checkpoints, state, 2)
    assert checkpoints.steps() == [1] and os.listdir(tmp_path) == ["1"]
    (line,) = reported
    assert line.startswith("checkpoint of step 2 could not be saved: "), line
    assert re.search(LOST[lost][1], line) and "\n" not in line and "make room" not in line
    monkeypatch.undo()
    save_steps(checkpoints, state, 3)
    assert checkpoints.steps() == [3] and checkpoints.unsaved is None


def without_bias(start):
  def start_writing(directory, state):
    params = {"Dense_0": {"kernel": state.params["Dense_0"]["kernel"]}}
    return start(directory, state._replace(params=params))

  return start_writing


UNNOTICED = {
  "merge": (lambda merge: lambda directory: None, None),
  "start_writing": (without_bias, "params/Dense_0/bias cannot be read"),
}


@pytest.mark.parametrize("function", UNNOTICED)
def test_arrays_that_are_missing_are_noticed(tmp_path, monkeypatch, function):
  _, state = make_states(1)
  replaced, line = UNNOTICED[function]
  real = getattr(checkpoint_files, function)
  monkeypatch.setattr(checkpoint_files, function, replaced(real))
  with Checkpoints(tmp_path) as checkpoints:
    checkpoints.save(at_step(state, 1))
    with pytest.raises(UnsavedError, match=line):
      checkpoints.wait()
    assert checkpoints.steps() == []


def test_all_is_synced_before_the_commit_and_older_ones_deleted_after(tmp_path, monkeypatch):
  """A loss of power at any moment leaves the newest checkpoint that was committed."""
  _, state = make_states(2)
  events, fsync, rename = [], os.fsync, type(tmp_path).rename

  def sync(number):
    fsync(number)
    events.append(("sync", os.readlink(f"/proc/self/fd/{number}")))

  def move(path, target):
    if str(path).endswith((".tmp-0", "/1")):
      files = [p for p in path.rglob("*") if p.is_file()]
      events.append(("rename", str(path), [str(p) for p in (path, *files)]))
    return rename(path, target)

  with Checkpoints(tmp_path / "run" / "c", keep_last=1) as checkpoints:
    save_steps(checkpoints, state, 1)
    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(type(tmp_path), "rename", move)
    save_steps(checkpoints, state, 2)
  partial = str(tmp_path / "run" / "c" / "2.tmp-0")
  commit, prune = (i for i, event in enumerate(events) if event[0] == "rename")
  assert events[commit][1] == partial and events[prune][1].endswith("/c/1")
  synced = {event[1] for event in events[:commit] if event[0] == "sync"}
  there = set(events[commit][2])
  small = {"_METADATA", "process_0", "manifest.ocdbt", "manifest.json"}
  assert small <= {os.path.basename(p) for p in there}
  assert there <= synced, there - synced
  parents = {event[1] for event in events[commit + 1 : prune]}
  assert {str(tmp_path / "run" / "c"), str(tmp_path / "run")} <= parents


def naive_checksum(array):
  """Compute the checksum with Python's integers, one element at a time."""

  def mixed(x):
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
      x = (x ^ (x >> 33)) * factor % 2**64
    return x ^ (x >> 33)

  bits = array.reshape(-1).view(f"u{array.dtype.itemsize}").tolist()
  values = map(lambda x: mixed(x + 1), bits) if array.itemsize == 8 else bits
  total = sum(x * (mixed(place) | 1) for place, x in enumerate(values))
  return f"linear-{total % 2**64:016x}"


DTYPES = (np.uint8, np.float16, np.float32, np.float64)


def test_checksums_are_the_naive_ones_and_are_verified(monkeypatch):
  rng = np.random.default_rng(0)
  shapes = [(3, 50), (3, 4, 5), (5,), (0, 3), ()]
  for dtype, shape, chunk in itertools.product(DTYPES, shapes, (2**18, 7)):
    monkeypatch.setattr(checksum, "_CHUNK", chunk)
    host = rng.integers(0, 100, shape).astype(dtype)
    whole = (slice(None),) * host.ndim
    (total,) = checksum.shard_checksums([host], whole, shape)
    named = naive_checksum(host)
    assert int(named.removeprefix("linear-"), 16) == int(total), (dtype, shape)
    assert checksum.is_of(host, named)
    if host.ndim > 1 and host.size:  # a part has the places that it has in the whole
      cut = slice(0, 1), slice(1, shape[0])
      halves = [(host[rows], (rows, *whole[1:])) for rows in cut]
      sums = [checksum.shard_checksums([x], at, shape)[0] for x, at in halves]
      assert sum(map(int, sums)) % 2**64 == int(total)
    if host.size:
      host.reshape(-1).view(np.uint8)[-1] ^= 1
      assert not checksum.is_of(host, named)
  tree = {"w": jnp.arange(9.0)}
  leaves = checksum.manifest(tree)
  assert leaves["w"]["checksum"] == naive_checksum(np.asarray(tree["w"]))
  checksum.verify(tree, leaves)
  with pytest.raises(checksum.DamagedError, match="checksum of w does not match"):
    checksum.verify({"w": tree["w"].at[3].set(7)}, leaves)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "uint32", "float16"])
def test_checksums_do_not_depend_on_the_sharding(dtype):
  rng = np.random.default_rng(0)
  host = jnp.array(rng.integers(-9, 9, (16, 24)), dtype)
  mesh = jax.make_mesh((2, 4), ("a", "b"), (jax.sharding.AxisType.Auto,) * 2)
  specs = [(), ("a",), ("b",), (None, "b"), ("b", "a"), (("a", "b"),)]
  found = set()
  for spec in specs:
    sharding = jax.NamedSharding(mesh, jax.P(*spec))
    found.add(checksum.manifest(jax.device_put(host, sharding))[""]["checksum"])
  assert len(found) == 1
  for other in (host.at[3, 5].add(1), host[::-1], host[:, ::-1], host.at[0, 0].set(host[1, 1] + 3)):
    assert checksum.manifest(other)[""]["checksum"] not in found


def test_a_checksum_takes_little_memory():
  data = np.ones((8, 2**19), np.float32)
  index = tuple(slice(None) for _ in data.shape)
  tracemalloc.start()
  checksum.shard_checksums([data], index, data.shape)
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert peak < data.nbytes
