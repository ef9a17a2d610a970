"""Train states to save and restore, in one process or two."""

import sys

import jax
import jax.numpy as jnp

from jaxscale import models, optim
from jaxscale.exchange import plain
from jaxscale.mesh import make_mesh
from jaxscale.training.state import abstract_state, init_state
from support.commands import own_lines
from support.processes import run_group


def make_states(num_devices=8, hidden=(64,), tx=None, average=False):
  """Return an abstract state and a state that differs in every leaf from a new one."""
  mesh = make_mesh(devices=jax.devices()[:num_devices])
  fns = models.functions(models.MLPModule(num_classes=10, hidden=hidden), (8, 8, 1))
  parts = fns.init, tx or optim.sgd(0.1), mesh, plain(mesh.axis_names)
  state = init_state(*parts, seed=5, average=average)
  return abstract_state(*parts, average=average), state


def at_step(state, step):
  bumped = jax.tree.map(lambda x: x + jnp.asarray(step / 7, x.dtype), state)
  return bumped._replace(step=jnp.asarray(step, jnp.int32))


def save(checkpoints, state, *steps, is_needed=True):
  """Save the state of each step, and wait until it is committed."""
  for step in steps:
    checkpoints.save(at_step(state, step), is_needed=is_needed)
    checkpoints.wait()


# One process of two has a fault, at one moment of a save after the other, and
# then as both restore; `full` in the place of a function is a disk that is full.
# Then the disk of one is slow, and its state holds NaN.
PAIR = """
import sys, threading; sys.path[:0] = ["tests"]
from jaxscale import cluster
cluster.initialize()
import jax; jax.config.update("jax_num_cpu_devices", 1)
from jaxscale.checkpoint import checkpoint_files
from jaxscale.checkpoint.manager import Checkpoints
from jaxscale.errors import NonFiniteError
from jaxscale.metrics.log import LineHandler, logger
from support.states import at_step, make_states

directory, faults, me = sys.argv[1], sys.argv[2], jax.process_index()
logger.addHandler(LineHandler()); logger.setLevel("CRITICAL" if me else "INFO")
abstract, state = make_states(2)
shardings = jax.tree.map(lambda x: x.sharding, state)
start, finish, load = checkpoint_files.start_writing, checkpoint_files.finish, checkpoint_files.load
go_on = threading.Event()

def state_at(step):
  return jax.jit(lambda s: at_step(s, step), out_shardings=shardings)(state)

def full(*args, **kwargs): raise OSError(28, "No space left on device")
def later(*args): start(*args)(); return full
def slow(*args): written = start(*args); return lambda: (go_on.wait(), written())
def lose(*args):
  written = start(*args)
  def lost():
    written()
    for p in args[0].glob(f"state/ocdbt.process_{me}/d/*"):
      p.write_bytes(bytes(len(p.read_bytes())))
  return lost
def of_two(path, *args, **kwargs):
  return (full if path.name == "2" else load)(path, *args, **kwargs)

options = dict(on_failure="continue", max_wait_s=0.1)
with Checkpoints(directory, **options) as checkpoints:
  for step in (1, 2):
    checkpoints.save(state_at(step)); checkpoints.wait()
  if faults:
    for step, who, name, fault in (
      (3, 1, "start_writing", full), (4, 1, "start_writing", later),
      (5, 0, "finish", full), (5, 1, "start_writing", lose),
    ):
      if me == who: setattr(checkpoint_files, name, fault)
      checkpoints.save(state_at(step))
      for _ in range(3): checkpoints.poll()
      checkpoints.wait()
      assert checkpoints.unsaved and checkpoints.steps() == [1, 2]
      checkpoint_files.start_writing, checkpoint_files.finish = start, finish
    if me == 1: checkpoint_files.load = of_two
    print("restored", int(checkpoints.restore(abstract).step))
    if me == 1: checkpoint_files.start_writing = slow
    checkpoints.save(state_at(6))
    for _ in range(3): checkpoints.poll()
    checkpoints.save(state_at(7), is_needed=False)
    assert checkpoints.steps() == [1]
    go_on.set(); checkpoints.wait()
    assert not checkpoints.unsaved and checkpoints.steps() == [1, 6]
    bad = jax.tree.map(lambda x: x * float("nan"), state_at(8).params)
    checkpoints.save(state_at(8)._replace(params=bad))
    try: checkpoints.wait()
    except NonFiniteError as e: print(e)
cluster.barrier("end")
"""


def run_pair(directory, faults=""):
  """Return the output of two processes that run PAIR."""
  ended = run_group([sys.executable, "-c", PAIR, str(directory), faults])
  assert [code for *_, code in ended] == [0, 0], ended
  assert not any("Traceback" in err for _, err, _ in ended)
  return [own_lines(out) for out, *_ in ended]
