"""Two real processes with two devices each: a file of parameters that they share."""

import sys

import pytest

from support.processes import run_group

SCRIPT = """
import os, sys
from jaxscale import cluster
cluster.initialize()
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
folder = sys.argv[1]

from jaxscale.mesh import make_mesh
from jaxscale.weights import UnwrittenError, export_safetensors, import_safetensors
from jaxscale.weights import load

mesh = make_mesh(replica=2, data=2)
shapes = {
  "embed": {"table": (96, 16)},
  "layers": {"q": {"kernel": (4, 16, 8)}, "k": {"kernel": (4, 16, 8)}},
  "head": {"norm": {"scale": (16,)}, "kernel": (16, 96)},
}
rng = np.random.default_rng(0)
whole = jax.tree.map(
  lambda s: rng.standard_normal(s, np.float32), shapes,
  is_leaf=lambda x: isinstance(x, tuple),
)
# Layers lie in one process or the other, each matrix on both of its devices.
specs = {1: P("data"), 2: P(), 3: P("replica", None, "data")}

def place(x):
  sharding = NamedSharding(mesh, specs[x.ndim])
  return jax.make_array_from_callback(x.shape, sharding, lambda i: x[i])

params = jax.tree.map(place, whole)
path = f"{folder}/a.safetensors"
export_safetensors(path, params, naming="huggingface")

read, taken = load._read, []
load._read = lambda *args: taken.append(read(*args).nbytes) or read(*args)
found = import_safetensors(path, params).params
for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(found), strict=True):
  for s, t in zip(a.addressable_shards, b.addressable_shards, strict=True):
    assert s.index == t.index
    assert np.asarray(s.data).tobytes() == np.asarray(t.data).tobytes()
matrices = sum(x.nbytes for x in jax.tree.leaves(whole) if x.ndim == 3)
rest = sum(x.nbytes for x in jax.tree.leaves(whole) if x.ndim != 3)
assert sum(taken) == matrices // 2 + rest, (taken, matrices, rest)

# The disk of process 0 is full: it still gathers with the other, and both report it.
if jax.process_index() == 0:
  opened = os.open

  def full(path, flags, *mode, **options):
    number = opened(path, flags, *mode, **options)
    if flags & os.O_EXCL:
      os.dup2(opened("/dev/full", os.O_WRONLY), number)
    return number

  os.open = full
try:
  export_safetensors(f"{folder}/b", params)
except UnwrittenError as e:
  print("says", e, flush=True)
"""


@pytest.mark.slow
def test_each_process_reads_its_part_and_one_writes(tmp_path):
  group = run_group([sys.executable, "-c", SCRIPT, str(tmp_path)], num_devices=2)
  for out, err, code in group:
    assert code == 0, err
    assert "says " in out and "No space left on device" in out  # and what gloo says
  assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]
