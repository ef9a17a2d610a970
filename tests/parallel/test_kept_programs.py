"""Programs that are kept on disk: which are loaded, which are not, and what they do."""

import errno
import os
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxscale.config import Compilation
from jaxscale.experiment import build
from jaxscale.run import programs
from jaxscale.run.train_phases import train_batches
from support.bad_values import flipped
from support.compilations import watched
from support.configs import tiny_digits
from support.trees import assert_same_bits


@pytest.fixture(autouse=True)
def _no_cache(own_cache, monkeypatch):
  """Unset JAX's own cache, which all other tests use."""
  monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", raising=False)
  before = jax.config.jax_compilation_cache_dir
  jax.config.update("jax_compilation_cache_dir", None)
  compilation_cache.reset_cache()
  yield
  assert jax.config.jax_compilation_cache_dir is None
  jax.config.update("jax_compilation_cache_dir", before)
  compilation_cache.reset_cache()


@pytest.fixture
def start(tmp_path, reported):
  """Compiles a program as a start would; whether it was loaded, and the lines."""

  def start(workdir=tmp_path, constant=1.5, **settings):
    reported.clear()
    found = []
    with (
      programs.kept_programs(Compilation(**settings), workdir, 1) as kept,
      watched(lambda what, _: found.append(what)),
      kept.turn(),
    ):
      made = jax.jit(lambda x: jnp.sin(x) * constant).lower(1.0).compile()
    assert made(1.0) == jnp.sin(1.0) * jnp.float32(constant)
    return found, [*reported]

  return start


def kept_in(folder):
  """Return the stored programs in a folder; each must have its checksum."""
  found = sorted(p for p in folder.iterdir() if p.name.endswith("-cache"))
  assert {f"{p.name}.sha256" for p in found} <= set(os.listdir(folder))
  return found


COMPILED, LOADED = ["compiled"], ["loaded"]


def test_the_second_start_loads(start, tmp_path):
  assert start() == (COMPILED, [])
  assert (tmp_path / "compiled").stat().st_mode & 0o777 == 0o700
  assert start() == (LOADED, [])
  moved = (tmp_path / "other").resolve()
  moved.mkdir()
  (tmp_path / "compiled").rename(moved / "compiled")
  assert start(moved) == (LOADED, [])
  assert start(cache=False) == (COMPILED, [])
  assert start(moved, constant=2.5) == (COMPILED, [])
  assert len(kept_in(moved / "compiled")) == 2
  shared = tmp_path / "shared" / "deep"
  assert start(cache_dir=str(shared)) == (COMPILED, [])
  assert start(moved, cache_dir=str(shared)) == (LOADED, [])


def test_what_the_user_set_counts(start, tmp_path):
  jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
  start()
  jax.config.update("jax_compilation_cache_dir", None)
  jax.config.update("jax_enable_compilation_cache", False)
  start()
  jax.config.update("jax_enable_compilation_cache", True)
  assert "compiled" not in os.listdir(tmp_path)


def linked(path):
  path.rename(path.with_name("elsewhere"))
  path.symlink_to(path.with_name("elsewhere"))


DAMAGE = {
  "cut": lambda path: path.write_bytes(path.read_bytes()[:100]),
  "a bit": lambda path: path.write_bytes(flipped(np.fromfile(path, np.uint8), element=50)),
  "garbage": lambda path: path.write_bytes(b"\0" * 10_000),
  "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
  "a link": linked,
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_program_is_compiled_again(name, start, tmp_path):
  start()
  (path,) = kept_in(tmp_path / "compiled")
  DAMAGE[name](path)
  line = f"{tmp_path}/compiled: deleted 1 damaged programs; compiling again"
  assert start() == (COMPILED, [line])
  assert start() == (LOADED, [])


def test_a_program_under_the_name_of_another_is_compiled_again(start, tmp_path):
  """It would be run in its place, as one with another learning rate."""
  start()
  start(constant=2.5)
  pair = kept_in(tmp_path / "compiled")
  for paths in (pair, [p.with_name(f"{p.name}.sha256") for p in pair]):
    contents = [p.read_bytes() for p in paths]
    for path, content in zip(paths, reversed(contents), strict=True):
      path.write_bytes(content)
  line = f"{tmp_path}/compiled: deleted 2 damaged programs; compiling again"
  assert start() == (COMPILED, [line])
  assert start(constant=2.5) == (COMPILED, [])


def test_what_a_kill_has_cut_short_is_compiled_again(start, tmp_path):
  start()
  (path,) = kept_in(tmp_path / "compiled")
  path.with_name(path.name + ".sha256").unlink()
  path.write_bytes(path.read_bytes()[:100])
  assert start() == (COMPILED, [])
  assert start() == (LOADED, [])
  path.unlink()
  path.mkdir()  # of which JAX warns, and which nothing replaces
  assert start() == (COMPILED, [])
  assert start() == (COMPILED, [])


def test_nothing_is_loaded_that_others_could_have_written(start, tmp_path, shared_groups):
  start()
  kept = tmp_path / "compiled"
  users = tmp_path / "cache" / "jaxscale" / "compiled"
  kept.chmod(0o770)
  moved = f"other users can write to {kept}: saving compiled programs in {users}"
  assert start()[1] == [moved]
  kept.chmod(0o700)
  tmp_path.chmod(0o770)  # as in a project's folder: others can only rename the programs' folder
  assert start() == (LOADED, [])
  tmp_path.chmod(0o700)
  kept.rename(tmp_path / "elsewhere")
  kept.symlink_to(tmp_path / "elsewhere")
  assert start() == (LOADED, [f"{kept}: Not a directory: saving compiled programs in {users}"])
  users.chmod(0o777)
  kept.unlink()
  kept.write_text("a file")
  off = "not saving compiled programs (compilation.cache_dir)"
  assert start() == (COMPILED, [f"{kept}: Not a directory: {off}"])


def test_a_full_disk_is_one_line(start, tmp_path, monkeypatch):
  def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")

  def put(cache, key, value):
    (cache.path / f"{key}-cache").write_bytes(value[:100])
    full()

  monkeypatch.setattr(programs, "replace_text", full)
  monkeypatch.setattr("jax._src.lru_cache.LRUCache.put", put)
  kept, why = f"{tmp_path}/compiled", "No space left on device"
  assert start() == (COMPILED, [f"cannot save compiled programs in {kept}: {why}"])
  monkeypatch.undo()
  assert start() == (COMPILED, [])


def test_the_programs_longest_out_of_use_are_deleted(start, tmp_path):
  for constant in (1.5, 2.5, 3.5):
    start(constant=constant)
  paths = kept_in(tmp_path / "compiled")
  for age, path in enumerate(paths):
    os.utime(path, (1e9 - age, 1e9 - age))
  start(constant=4.5, cache_gb=2.5 * paths[0].stat().st_size / 1e9)
  assert [p.exists() for p in paths] == [True, True, False]


def test_a_loaded_step_takes_the_same_steps(tmp_path):
  """Bit for bit, on 8 devices: collectives, donated buffers, sharded parameters."""
  sharded = {"mesh__data": "2", "mesh__fsdp": "4", "layout__shard": "fsdp"}
  made = build.experiment(tiny_digits(**sharded))
  found, results = Counter(), []
  for cache in (False, True, True):
    settings = Compilation(cache=cache)
    with (
      programs.kept_programs(settings, tmp_path, 1) as kept,
      watched(lambda what, name: found.update([(what, name)])),
    ):
      again = build.at_phase(made, made.phase)  # of which JAX has compiled nothing
      step = again.compile_train_step(turn=kept.turn())
      state, batches = again.init_state(kept.turn()), train_batches(made, 0)
      for _ in range(3):
        state, metrics = step(state, next(batches))
      results.append(jax.device_get((state, metrics)))
  for name in ("jit(train_step)", "jit(init)"):
    assert [found[what, name] for what in ("compiled", "loaded")] == [2, 1]
  for result in results[1:]:
    assert_same_bits(result, results[0])
