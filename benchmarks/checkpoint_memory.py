"""Host memory that a checkpoint takes when it is saved, and restored in another layout.

    python benchmarks/checkpoint_memory.py

Four processes of two simulated devices each hold the state of a transformer under
AdamW, 503 MB in all, in one of three layouts. Every case is a group of processes of
its own, so that none finds memory that another has left. `held_mb` is what a process
holds of the state, most of all processes; `save_mb` and `restore_mb` are by how much
its resident memory rose at most above what it was before, by the kernel's count
(VmHWM). To restore means to end with `held_mb` more, so 1.0 times that is the least.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import free_address, report

ROOT = Path(__file__).parent.parent
PROCESSES, DEVICES = 4, 2
PARAMETERS = {"shard": "fsdp"}
LAYOUTS: dict[str, Any] = {
  "replicated": ({"data": 8}, {}),
  "fsdp 8": ({"data": 1, "fsdp": 8}, PARAMETERS),
  "data 2 x fsdp 2 x model 2": ({"data": 2, "fsdp": 2, "model": 2}, PARAMETERS),
}
# What is saved, and as what it is restored.
CASES = {
  "fsdp 8": ("fsdp 8", "data 2 x fsdp 2 x model 2", "replicated"),
  "data 2 x fsdp 2 x model 2": ("fsdp 8",),
  "replicated": ("fsdp 8",),
}
SIZE = {"width": 512, "num_layers": 8, "hidden": 2048, "vocab_size": 8192}
MARK = "@memory "


def resident(name: str) -> int:
  """Return this process's resident bytes: now, or the peak since `forget_peak`."""
  status = Path("/proc/self/status").read_text()
  line = next(x for x in status.splitlines() if x.startswith(name))
  return 1024 * int(line.split()[1])


def forget_peak() -> int:
  """Reset the peak of resident memory; return the resident bytes."""
  Path("/proc/self/clear_refs").write_text("5")
  return resident("VmRSS:")


def abstract_of(layout_name: str, size: dict[str, int]) -> Any:
  """Return the abstract state of a transformer in a layout."""
  import jax

  from jaxscale import optim
  from jaxscale.exchange import plain
  from jaxscale.mesh import make_mesh
  from jaxscale.models.decoder import SHARDING, make_transformer
  from jaxscale.parallel import make_layout, rules
  from jaxscale.parallel.layout_exchange import exchange_axes
  from jaxscale.training.state import abstract_state

  sizes, options = LAYOUTS[layout_name]
  mesh = make_mesh(**sizes)
  stack = make_transformer(num_heads=8, **size)  # pyright: ignore
  shapes = jax.eval_shape(stack.init, jax.random.key(0))
  layout = make_layout(mesh, shapes, [rules.Rule(*r) for r in SHARDING], **options)
  exchange = plain(exchange_axes(layout))
  return abstract_state(
    lambda key: (stack.init(key), {}), optim.adamw(1e-3), mesh, exchange, layout=layout
  )


def filled(abstract: Any) -> Any:
  """Return a state of ones; each process makes its own part."""
  import jax
  import numpy as np

  def fill(x):
    def part(index):
      shape = x.sharding.shard_shape(x.shape)
      if not np.issubdtype(x.dtype, np.floating):
        return np.full(shape, 1, x.dtype)
      seed = [s.start or 0 for s in index]
      return np.random.default_rng(seed).standard_normal(shape, np.float32)

    return jax.make_array_from_callback(x.shape, x.sharding, part)

  return jax.tree.map(fill, abstract)


def held(state: Any) -> int:
  """Return the bytes that this process holds on all of its devices."""
  import jax

  return sum(s.data.nbytes for x in jax.tree.leaves(state) for s in x.addressable_shards)


def work(directory: str, what: str, layout: str, size: dict[str, int]) -> None:
  """Save or restore a state, as one process of the group."""
  from jaxscale import cluster

  cluster.initialize()
  import jax
  import orbax.checkpoint  # noqa: F401  its code is no part of what is measured

  from jaxscale.checkpoint.manager import Checkpoints

  abstract = abstract_of(layout, size)
  with Checkpoints(directory) as checkpoints:
    if what == "save":
      state = jax.block_until_ready(filled(abstract))
      before = forget_peak()
      checkpoints.save(state)
      checkpoints.wait()
    else:
      before = forget_peak()
      state = checkpoints.restore(abstract)
      assert state is not None
    rose = resident("VmHWM:") - before
  found = {
    "held": held(state),
    "rose": rose,
    "whole": sum(x.nbytes for x in jax.tree.leaves(state)),
  }
  print(MARK + json.dumps(found), flush=True)


def group(directory: Path, what: str, layout: str, size: dict[str, int]) -> Any:
  """Return the answers of all processes of a group."""
  command = [
    sys.executable,
    str(ROOT / "benchmarks" / "checkpoint_memory.py"),
    "--directory",
    str(directory),
    "--what",
    what,
  ]
  command += ["--layout", layout, "--size", json.dumps(size)]
  env = os.environ | {
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": str(DEVICES),
    "JAXSCALE_COORDINATOR": free_address(),
    "JAXSCALE_NUM_PROCESSES": str(PROCESSES),
    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
  }
  processes = [
    subprocess.Popen(
      command,
      env=env | {"JAXSCALE_PROCESS_ID": str(i)},
      text=True,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
    )
    for i in range(PROCESSES)
  ]
  told = []
  for process in processes:
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    line = next(x for x in out.splitlines() if x.startswith(MARK))
    told.append(json.loads(line.removeprefix(MARK)))
  return told


def measure(size: dict[str, int], cases: dict[str, tuple[str, ...]]) -> Any:
  """Return, by case, the MB that a process holds and the peak growth of its memory."""
  results = {}
  for there, others in cases.items():
    with tempfile.TemporaryDirectory() as folder:
      for here in (None, *others):
        what = "save" if here is None else "restore"
        told = group(Path(folder), what, here or there, size)
        name = f"save {there}" if here is None else f"{there} -> {here}"
        most = max(told, key=lambda x: x["rose"])
        results[name] = {
          "whole_mb": round(most["whole"] / 1e6, 1),
          "held_mb": round(max(x["held"] for x in told) / 1e6, 1),
          f"{what}_mb": round(most["rose"] / 1e6, 1),
          "times_held": round(most["rose"] / max(x["held"] for x in told), 2),
        }
        print(name, results[name], file=sys.stderr, flush=True)
  return results


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  for name in ("directory", "what", "layout"):
    parser.add_argument(f"--{name}")
  parser.add_argument("--size", type=json.loads, default=SIZE)
  args = parser.parse_args()
  if args.what:
    work(args.directory, args.what, args.layout, args.size)
    return
  report(
    "checkpoint_memory",
    cases=measure(args.size, CASES),
    processes=PROCESSES,
    devices_a_process=DEVICES,
    size=args.size,
  )


if __name__ == "__main__":
  main()
