"""Limit of how much of a checkpoint is written at once, computed by hand."""

import jax
import numpy as np
import pytest
from jax import NamedSharding, P

from jaxscale.checkpoint import checkpoint_files, write_limit
from jaxscale.mesh import make_mesh
from jaxscale.training.types import TrainState
from support.paths import ROOT
from support.saving import restore, save

MIB = 2**20


def abstract(shape, *spec, **sizes):
  mesh = make_mesh(**sizes)
  where: NamedSharding = NamedSharding(mesh, P(*spec))
  return jax.ShapeDtypeStruct(shape, np.float32, sharding=where)


def limit(tree, chunks):
  """Return the limit in MiB."""
  return write_limit.limit_to_read(tree, chunks) * 1e9 / MIB


def test_little_is_never_held_up():
  tree = {"w": abstract((8, 8), "data")}
  assert limit(tree, {"w": (8, 8)}) == pytest.approx(32)


def test_a_quarter_of_what_is_held_is_read_at_once():
  """256 MiB in small chunks, each device a part: all of it is here, a quarter goes."""
  tree = {f"w{i}": abstract((8 * MIB, 1), "data") for i in range(8)}
  chunks = {name: (MIB // 4, 1) for name in tree}
  assert limit(tree, chunks) == pytest.approx(64)
  # Copies on several devices are read once.
  tree = {f"w{i}": abstract((8 * MIB, 1)) for i in range(8)}
  assert limit(tree, chunks) == pytest.approx(64)


def test_one_part_with_all_chunks_that_it_touches_is_let_through():
  """Rows are read, columns were saved: every part touches all of the array."""
  rows = abstract((8, 4 * MIB), "data")
  assert limit({"w": rows}, {"w": (8, MIB)}) == pytest.approx(1.01 * 128)
  assert limit({"w": rows}, {"w": (1, MIB)}) == pytest.approx(32)
  # Rows 2 and 3 of chunks of three: six are touched.
  pairs = abstract((8, 4 * MIB), "data", replica=2, data=4)
  assert limit({"w": pairs}, {"w": (3, 4 * MIB)}) == pytest.approx(1.01 * 96)


def state_of(w):
  return TrainState(np.int32(1), {"w": w}, (), (), (), ())


def test_arrays_lie_in_chunks_that_others_can_read(tmp_path):
  """A whole array of 16 MiB is saved, and read by parts of its other dims."""
  shape = (2, 1024, 2048)
  values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
  where = abstract(shape, data=1, fsdp=2, model=4).sharding
  step = jax.device_put(np.int32(1), where)
  state = state_of(jax.device_put(values, where))._replace(step=step)
  save(tmp_path, state)
  ocp, path = checkpoint_files._orbax()
  chunks = checkpoint_files._chunks(ocp, path(tmp_path / "1" / "state"))
  assert 4 * np.prod(chunks["params/w"]) <= write_limit.CHUNK
  for spec in ((None, "model", "fsdp"), ("fsdp", "model")):
    wanted = abstract(shape, *spec, data=1, fsdp=2, model=4)
    like = state_of(wanted)._replace(step=jax.ShapeDtypeStruct((), np.int32, sharding=where))
    found = restore(tmp_path, like)
    np.testing.assert_array_equal(found.params["w"], values)


@pytest.mark.slow
def test_a_process_takes_no_more_memory_than_what_it_holds_asks_for(monkeypatch):
  """Four processes that hold a quarter each: never near the whole.

  Read in whole arrays, all at once, the replicated one took 3.9 times what is held.
  """
  monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
  import checkpoint_memory

  cases = {"replicated": ("fsdp 8",), "fsdp 8": ("data 2 x fsdp 2 x model 2",)}
  found = checkpoint_memory.measure(checkpoint_memory.SIZE, cases)
  fixed = 40  # MB: threads, caches, what an allocator keeps
  for name, told in found.items():
    if name.startswith("save"):
      bound = 2 * told["whole_mb"] / checkpoint_memory.PROCESSES
      assert told["save_mb"] <= bound + fixed, name
    else:
      assert told["restore_mb"] <= 1.7 * told["held_mb"] + fixed, name
