"""Copies on the nodes: resumed from bit for bit, or not at all."""

import contextlib
import json
import os
import resource
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.checkpoint import checkpoint_files, node_file
from jaxscale.checkpoint.checksum import DamagedError
from jaxscale.checkpoint.lock import LockLostError, acquire
from jaxscale.checkpoint.manager import Checkpoints
from jaxscale.config import Checkpoint
from jaxscale.errors import NonFiniteError
from support.bad_values import flipped
from support.errors import config_error
from support.leaves import assert_like
from support.saving import save_steps
from support.states import at_step, make_states
from support.trees import assert_same_bits


@pytest.fixture(scope="module")
def states():
  return make_states(2)


@pytest.fixture
def node(tmp_path):
  folder = tmp_path / "node"
  folder.mkdir()
  return folder


@contextlib.contextmanager
def opened(tmp_path, node, *, killed=False, **options):
  """Checkpoints, every third one shared; `killed`: left as by a kill."""
  options = dict(shared_every=3) | options
  checkpoints = Checkpoints(tmp_path / "shared", local=node, **options)
  with checkpoints if not killed else contextlib.nullcontext():
    yield checkpoints
  if killed:
    checkpoints.__exit__(KeyboardInterrupt)


def save(checkpoints, state, *steps):
  save_steps(checkpoints, state, *steps, is_needed=False)


def copies(node):
  return sorted(p.name.rpartition("-")[2] for p in node.rglob("*") if p.is_file())


@pytest.fixture
def left(tmp_path, node, states):
  """Return the workdir of a killed run: step 1 is shared, 2 and 3 are on the node."""
  with opened(tmp_path, node, killed=True) as checkpoints:
    save(checkpoints, states[1], 1, 2, 3)
  return tmp_path


def test_a_restart_resumes_from_the_copies(left, node, states):
  abstract, state = states
  assert copies(node) == ["2", "3"]  # two at most
  (folder,) = node.iterdir()
  assert folder.stat().st_mode & 0o777 == 0o700
  assert all(p.stat().st_mode & 0o777 == 0o600 for p in folder.iterdir())
  with opened(left, node) as checkpoints:
    assert checkpoints.newest() == 3 and checkpoints.steps() == [1]
    restored = checkpoints.restore(abstract)
    assert_same_bits(restored, at_step(state, 3))
    assert_like(restored, abstract)
    for step in (4, 5):  # the first of a start is shared
      save(checkpoints, state, step)
      assert len(copies(node)) == 2 and checkpoints.steps() == [1, 4]
    assert_same_bits(checkpoints.restore(abstract), at_step(state, 5))
    checkpoints.save(at_step(state, 6), is_needed=True)
  assert checkpoints.steps() == [4, 6]
  assert not list(node.iterdir())  # it has ended well
  assert not (left / "shared" / "local.json").exists()


def flip(path, where):
  path.write_bytes(flipped(np.frombuffer(path.read_bytes(), np.uint8), where, bit=4))


def linked(path):
  path.rename(path.parents[2] / "elsewhere")
  path.symlink_to(path.parents[2] / "elsewhere")


def instead(make):
  return lambda path: (path.unlink(), make(path))


# What becomes of a copy, and why it is not used then.
DAMAGE = {
  "flipped data": (lambda p: flip(p, 900), "checksum of params/Dense_0/"),
  "flipped footer": (lambda p: flip(p, -60), "footer has changed"),
  "flipped mark": (lambda p: flip(p, -1), "it is truncated"),
  "cut": (lambda p: p.write_bytes(p.read_bytes()[:-99]), "it is truncated"),
  "longer": (lambda p: p.write_bytes(p.read_bytes() + b"x"), "it is truncated"),
  "empty": (lambda p: p.write_bytes(b""), "it is truncated"),
  "gone": (lambda p: p.unlink(), "the file does not exist"),
  "a link": (linked, "symbolic link"),
  "a pipe": (instead(os.mkfifo), "not a file of this user"),
  "a folder": (instead(os.mkdir), "Is a directory"),
}


def test_a_damaged_copy_is_passed_over(left, node, states, reported):
  abstract, state = states
  (newest,) = node.glob("*/*-3")
  whole = newest.read_bytes()
  for damage, (do, why) in DAMAGE.items():
    do(newest)
    reported.clear()
    with opened(left, node, killed=True) as checkpoints:
      assert_same_bits(checkpoints.restore(abstract), at_step(state, 1))
      (line,) = reported
      assert line.startswith("the local copy of step 3 cannot be used: "), damage
      assert why in line and "(process 0 on " in line, damage
    if damage == "a folder":
      newest.rmdir()
    newest.unlink(missing_ok=True)
    newest.write_bytes(whole)
  newest.unlink()
  with acquire(left) as lock, opened(left, node, lock=lock) as checkpoints:
    checkpoints.restore(abstract)
    newest.write_bytes(whole)
    assert checkpoints.newest() == 1  # what was passed over once is never used again
    save(checkpoints, state, 2)
    assert checkpoints.steps() == [1, 2] and copies(node) == ["2"]


def test_only_what_the_record_names_is_used(left, node, states):
  """Files of an older start, of another run, and records that somebody has edited."""
  abstract, state = states
  record = left / "shared" / "local.json"
  written = json.loads(record.read_text())
  runs = [{"run": run} for run in ("0" * 32, "../../x", "a\0b", "x" * 999)]
  for other in (*runs, {"step": 2**62}, {"step": "3"}, [], {"step": -3}):
    record.write_text(json.dumps(written | other if other else other))
    with opened(left, node, killed=True) as checkpoints:
      assert_same_bits(checkpoints.restore(abstract), at_step(state, 1))
  for instead in (os.mkfifo, os.mkdir):
    record.unlink()
    instead(record)
    with opened(left, node, killed=True) as checkpoints:
      assert checkpoints.newest() == 1
  record.rmdir()
  record.write_text(json.dumps(written))
  (file,) = node.glob("*/*-3")
  named = file.with_name(file.name.removesuffix("3") + "2")
  named.unlink()
  shutil.copy(file, named)  # step 3 by the name of step 2
  record.write_text(json.dumps(written | {"step": 2}))
  with opened(left, node, killed=True) as checkpoints:
    assert_same_bits(checkpoints.restore(abstract), at_step(state, 1))
  # Another run in the same folder of the node, and a copy of the workdir.
  shutil.copytree(left / "shared", left / "other" / "shared")
  with opened(left / "other", node, killed=True) as checkpoints:
    assert checkpoints.newest() == 1


def test_a_copy_is_of_this_experiment(left, node, states, reported):
  """Without a shared checkpoint nothing says which it is of."""
  abstract, state = states
  wide = jax.tree.map(lambda x: x.update(shape=(*x.shape, 1)), abstract)
  with opened(left, node, killed=True) as checkpoints:
    with config_error(match="saved by a different experiment"):
      checkpoints.restore(wide)
    assert "it belongs to a different model, optimizer or exchange" in reported[0]
    (left / "shared" / "1").rename(left / "moved")
    assert checkpoints.newest() == 0 and checkpoints.restore(abstract) is None
    (left / "moved").rename(left / "shared" / "1")
    assert_same_bits(checkpoints.restore(abstract), at_step(state, 3))


def test_shards_of_any_dtype_are_what_they_were(tmp_path):
  mesh = jax.make_mesh((2, 4), ("a", "b"), (jax.sharding.AxisType.Auto,) * 2)
  rng, state = np.random.default_rng(0), {}
  for dtype in (jnp.float32, jnp.bfloat16, jnp.int8, jnp.bool):
    for spec in ((), ("a",), (None, "b"), ("b", "a")):
      host = rng.integers(0, 9, (8, 4)).astype(dtype)
      where = jax.NamedSharding(mesh, jax.P(*spec))
      state[f"{host.dtype}{spec}"] = jax.device_put(host, where)
  state["empty"], state["step"] = map(jax.device_put, (np.zeros((0, 3)), np.int32(4)))
  whole = {"run": "x", "step": 4, "process": 0, "processes": 1}
  shards = node_file.held_shards(state)
  size = sum(x.nbytes for x in jax.tree.leaves(state))
  assert sum(s.data.nbytes for s in shards) == size  # replicas once
  node_file.write_copy(tmp_path / "copy", whole, shards)
  like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
  with node_file.open_copy(tmp_path / "copy") as file:
    footer = node_file.read_footer(file)
    assert {name: footer[name] for name in whole} == whole
    assert_same_bits(node_file.read_state(file, footer["leaves"], like), state)
    where = jax.NamedSharding(mesh, jax.P("b"))
    like["int8()"] = jax.ShapeDtypeStruct((8, 4), jnp.int8, sharding=where)
    with pytest.raises(DamagedError, match="from different devices"):
      node_file.read_state(file, footer["leaves"], like)


def test_a_full_folder_costs_the_copies_and_one_line(tmp_path, node, states, reported):
  abstract, state = states
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  with opened(tmp_path, node, shared_every=9) as checkpoints:
    save(checkpoints, state, 1, 2)
    try:
      resource.setrlimit(resource.RLIMIT_FSIZE, (9000, limits[1]))
      save(checkpoints, state, 3)
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (line,) = reported
    assert line.startswith("local copies are disabled: File too large, in process 0 on ")
    assert copies(node) == ["2"] and checkpoints.newest() == 2
    save(checkpoints, state, 4, 5)
    assert checkpoints.steps() == [4, 5] and len(reported) == 1
    assert_same_bits(checkpoints.restore(abstract), at_step(state, 5))


def test_a_folder_that_others_write_to_is_not_used(tmp_path, node, states, reported):
  with opened(tmp_path, node) as checkpoints:
    checkpoints._local.folder.mkdir()
    checkpoints._local.folder.chmod(0o777)
    checkpoints.save(at_step(states[1], 1))
  assert "other users can write to" in reported[0] and checkpoints.steps() == [1]


def test_nan_makes_no_copy(tmp_path, node, states):
  _, state = states
  bad = state._replace(params=jax.tree.map(lambda x: x * jnp.nan, state.params))
  with opened(tmp_path, node) as checkpoints:
    save(checkpoints, state, 1, 2)
    for step in (3, 4):  # only copied, and shared as well
      checkpoints.save(at_step(bad, step), is_needed=step == 4)
      with pytest.raises(NonFiniteError, match=f"not finite at step {step}"):
        checkpoints.wait()
      checkpoints.wait()  # reported once
    assert checkpoints.newest() == 2 and checkpoints.steps() == [1]


def test_no_save_runs_into_the_next(tmp_path, node, states, monkeypatch, reported):
  """A slow shared disk costs no copy; a slow node costs copies, and no time."""
  _, state = states
  start, write = checkpoint_files.start_writing, node_file.write_copy
  shared_ends, copy_ends = threading.Event(), threading.Event()
  copy_ends.set()
  writing, most = [], []

  def start_slowly(*args):
    written = start(*args)
    return lambda: (shared_ends.wait(60), written())

  def write_slowly(*args):
    writing.append(args)
    most.append(len(writing))
    copy_ends.wait(60)
    write(*args)
    writing.pop()

  monkeypatch.setattr(checkpoint_files, "start_writing", start_slowly)
  monkeypatch.setattr(node_file, "write_copy", write_slowly)
  options = dict(shared_every=1, max_wait_s=0.01)
  with opened(tmp_path, node, **options) as checkpoints:
    for step in (1, 2, 3):  # the first is shared, slowly
      checkpoints.save(at_step(state, step), is_needed=False)
      checkpoints._local.finish()
      assert len(os.listdir(tmp_path / "shared")) == 2  # one and the record
      assert max(map(int, copies(node))) == step
    assert checkpoints.steps() == [] and not reported
    shared_ends.set()
    checkpoints.wait()
    save(checkpoints, state, 4)
    assert checkpoints.steps() == [1, 4]  # the newest, once it can be
    copy_ends.clear()
    checkpoints.save(at_step(state, 5), is_needed=False)
    checkpoints._finish(60)
    checkpoints.save(at_step(state, 6), is_needed=False)
    checkpoints._finish(60)
    assert checkpoints.steps() == [5, 6] and copies(node)[-1] != "6"
    copy_ends.set()
    checkpoints.save(at_step(state, 7))
  assert checkpoints.steps() == [6, 7] and set(most) == {1}


def test_a_stranger_start_loses_the_folder(left, node, states):
  """One that was suspended has lost the lock: it records nothing more."""
  with acquire(left) as lock, opened(left, node, lock=lock, killed=True) as checkpoints:
    copy = checkpoints._local
    assert copy.save(at_step(states[1], 7), 0)
    copy.finish()
    lock.path.rename(lock.path.with_name("99"))
    before = (left / "shared" / "local.json").read_text()
    copy.save(at_step(states[1], 8), 0)
    with pytest.raises(LockLostError, match="taken over"):
      copy.finish()
    assert (left / "shared" / "local.json").read_text() == before


def test_settings_that_cannot_be():
  with config_error("give an absolute path"):
    Checkpoint(local="shm")
  with config_error("set Checkpoint.local as well"):
    Checkpoint(shared_every=4)
