"""Limits of how much of a checkpoint is written and read at once."""

import jax
import numpy as np
import pytest
from jax import NamedSharding, P

from jaxscale.checkpoint import write_limit
from jaxscale.checkpoint.read_back import open_leaves
from jaxscale.mesh import make_mesh
from jaxscale.training.types import TrainState
from support.paths import ROOT
from support.saving import restore, save


def abstract(shape, *spec, **sizes):
  mesh = make_mesh(**sizes)
  where: NamedSharding = NamedSharding(mesh, P(*spec))
  return jax.ShapeDtypeStruct(shape, np.float32, sharding=where)


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
  array = open_leaves(tmp_path / "1" / "state", ["params/w"])["params/w"].result()
  assert 4 * np.prod(array.chunk_layout.read_chunk.shape) <= write_limit.CHUNK
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
      # The array that is read back, and a chunk of it as it is stored and decoded.
      bound = 2.5 * told["whole_mb"] / checkpoint_memory.PROCESSES
      assert told["save_mb"] <= bound + fixed, name
    else:
      assert told["restore_mb"] <= 1.7 * told["held_mb"] + fixed, name
