"""A run whose devices part ends with one line, also where there are two processes."""

import dataclasses
import sys
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.config import Checks
from jaxscale.config.loading import load_config
from jaxscale.experiment import build
from jaxscale.mesh import make_mesh
from jaxscale.run import fit, hooks, train_phases
from jaxscale.run.callbacks import Callbacks
from jaxscale.training import loop
from jaxscale.training.replica_check import ReplicaDivergenceError
from support.bad_values import flipped
from support.commands import error_line, own_lines, run_python, train_command
from support.processes import run_group
from support.tables import assignments

CONFIG = assignments("""
  model=MLP model.hidden=(16,) epochs=2 log.tensorboard=False schedule.warmup_epochs=0
  checks.replicas_every_steps=8 checkpoint.every_epochs=0.5 checkpoint.keep_last=9 log.plot=False
""")


def break_at(monkeypatch, first, part, device=3):
  """From that step on, one device's copy has a bit that the others have not."""
  compile_step = build.Experiment.compile_train_step

  def flip(tree):
    leaves, structure = jax.tree.flatten(tree)
    largest = max(range(len(leaves)), key=lambda i: leaves[i].size)
    x = leaves[largest]
    on = [(np.asarray(s.data), s.device) for s in x.addressable_shards]
    on[device] = flipped(on[device][0], 5), on[device][1]
    on = [jax.device_put(*copy) for copy in on]
    leaves[largest] = jax.make_array_from_single_device_arrays(x.shape, x.sharding, on)
    return jax.tree.unflatten(structure, leaves)

  def broken(self, *args):
    step = compile_step(self, *args)

    def run_step(state, batch):
      state, metrics = step(state, batch)
      if int(state.step) == first:
        state = state._replace(**{part: flip(getattr(state, part))})
      return state, metrics

    return run_step

  monkeypatch.setattr(build.Experiment, "compile_train_step", broken)


@pytest.mark.parametrize("part, at", [("params", 10), ("opt_state", 16)])
def test_a_run_stops_and_names_the_last_good_checkpoint(tmp_path, monkeypatch, part, at):
  """Saved at 6 and 12, checked at 8 and 16: what broke at 10 may be in 12."""
  break_at(monkeypatch, at, part)
  with pytest.raises(ReplicaDivergenceError) as error:
    fit.fit(load_config("configs/digits.py", CONFIG), tmp_path)
  line = str(error.value)
  assert f"cpu:3) differs from 7 of 8 devices in {part}/" in line
  assert "after step 16; last good checkpoint: step 6 (move 12 away" in line
  assert line.endswith(f" in {tmp_path}") and "\n" not in line


def test_the_settings_say_when():
  assert Checks().replicas_every_steps == 1000
  experiment = build.experiment(load_config("configs/digits.py", CONFIG))
  one = experiment.replace(mesh=make_mesh(devices=jax.devices()[:1]))
  never = dataclasses.replace(experiment.config, checks=Checks(replicas_every_steps=0))
  compares = train_phases._compares_replicas
  assert compares(experiment, 0) and compares(experiment, 9)
  assert not compares(experiment, 16)  # 23 steps: none is left
  assert not compares(one, 0)
  assert not compares(experiment.replace(config=never), 0)
  for fingerprint, wanted in (Future(), [8, 16]), (None, []):
    run: Any = SimpleNamespace(experiment=experiment, callbacks=Callbacks(()))
    first, *_ = hooks.run_hooks(run, fingerprint)
    checks = getattr(first.run, "func", None) is hooks.check_replicas
    assert [s for s in range(1, 24) if checks and first.is_due(s)] == wanted


def test_what_was_saved_later_may_be_bad():
  assert fit._last_good([], 100) == "none yet"
  assert fit._last_good([10, 20], 20) == "step 20"
  assert fit._last_good([10, 20, 30], 10).startswith("step 10 (move 20 and 30 away")
  assert fit._last_good([30], 10).startswith("none (move 30 away")


def test_the_loop_checks_before_it_saves():
  calls = []

  def step(state, batch):
    return state + 1, {"loss": jnp.float32(1), "grad_norm": jnp.float32(1)}

  made = [
    loop.Hook(2, lambda s, state: calls.append(("check", s))),
    loop.Hook(lambda s: s == 2, lambda s, state: calls.append(("save", s))),
  ]
  loop.train(0, step, iter(range(4)), loop.LoopControl(), made, start=0, total_steps=4)
  assert calls == [("check", 2), ("save", 2), ("check", 4)]


PROCESS = """
import sys
import jax, numpy as np
from jaxscale import cluster
cluster.initialize()
from jaxscale.training import replica_check
from jaxscale.mesh import make_mesh, replicated
mesh = make_mesh()
here = jax.local_devices()
assert jax.process_count() == 2 and len(here) == 2

def check(bad):
  def put(i):
    w = np.arange(6, dtype=np.float32)
    if jax.process_index() == 1 and i in bad:
      w[4] += 1
    return jax.device_put(w, here[i])
  w = jax.make_array_from_single_device_arrays((6,), replicated(mesh), [put(0), put(1)])
  b = jax.device_put(np.ones(3, np.float32), replicated(mesh))
  try:
    replica_check.check(
      {"b": b, "dense": {"w": w}}, replica_check.make_fingerprint(mesh), step=7)
    return "same"
  except replica_check.ReplicaDivergenceError as e:
    return str(e)

for bad in ((), (1,), (0, 1)):
  print(check(bad), flush=True)
"""


@pytest.mark.slow
def test_two_real_processes_name_the_one_that_differs():
  results = run_group([sys.executable, "-c", PROCESS], num_devices=2)
  assert [code for *_, code in results] == [0, 0], results
  reported = [own_lines(out) for out, *_ in results]
  assert reported[0] == reported[1]
  same, one, all_of_it = reported[0]
  assert same == "same"
  assert one.startswith("process 1 (") and ") differs from 3 of 4 devices in dense/w" in one
  assert "process 0" not in one and one.endswith("after step 7")
  assert all_of_it.startswith("process 0 (") and " and process 1 (" in all_of_it
  assert " differ in dense/w: 4 devices hold 2 versions, and no majority" in all_of_it


BROKEN_TRAIN = """
import sys
from jaxscale import errors, train
from jaxscale.experiment import build
from jaxscale.exchange.wrappers import silent
make = build.steps.make_train_step
def broken(loss, tx, mesh, exchange, **options):
  return make(loss, tx, mesh, silent(exchange, mesh.axis_names), **options)
build.steps.make_train_step = broken
sys.argv = sys.argv[1:]
errors.leave(train.main)
"""


@pytest.mark.slow
def test_the_command_ends_with_one_line_and_exit_code_1(tmp_path):
  args = [f"--config.{name}={value}" for name, value in CONFIG.items()]
  command = train_command(tmp_path / "run", *args)
  done = run_python("-c", BROKEN_TRAIN, *command[2:], num_devices=2)
  line = error_line(done, 1)
  assert line.startswith("error: process 0 (")
  assert ", cpu:0 and cpu:1) differ in " in line
  assert "after step 8; last good checkpoint: none yet" in line
  # Each device wrote a part of it: what they disagree on is not committed.
  assert "or devices hold different values" in done.stdout
  assert line.endswith(ReplicaDivergenceError.advice)
