"""The arithmetic of the report by a clock of our own, and real runs of it."""

import sys

import jax
import numpy as np
import pytest

from jaxscale import data, hlo, metrics
from jaxscale.collectives import measurements
from jaxscale.config.loading import load_config
from jaxscale.config.record import to_plain
from jaxscale.exchange import plain
from jaxscale.exchange.wrappers import delayed, past_warm_start, silent, warm_start
from jaxscale.experiment import build
from jaxscale.jobs import prediction
from jaxscale.mesh import batch_sharding, make_mesh, submesh
from jaxscale.run import fit, step_report
from jaxscale.run.step_report import Alone
from support.digits import digits_batch
from support.plans import plan_with
from support.processes import run_group
from support.saving import restore
from support.steps import on_mesh
from support.tiny_runs import record
from support.trees import assert_same_bits

MLP = {"model": "MLP", "model.hidden": "(16,)"}
CONFIG = {"epochs": "1", "log.every_steps": "1", "log.tensorboard": "False", "log.plot": "False"}
CONFIG |= {"schedule.warmup_epochs": "0", "ema_decay": "None"}


class Clock:
  """Time that passes only when a step is called."""

  def __init__(self, monkeypatch):
    self.now = 0.0
    monkeypatch.setattr(measurements.time, "perf_counter", lambda: self.now)

  def step(self, seconds):
    """Return a step that takes these seconds, one value per call."""
    left = iter(seconds)

    def call(state, batch):
      self.now += next(left)
      return state + 1, {"batch": batch}

    return call


def test_compute_and_exposed_by_a_clock_of_our_own(monkeypatch):
  clock = Clock(monkeypatch)
  warm = [99.0, 99.0]  # compiling and the first call are not counted
  real = clock.step([*warm, 12.0, 14.0, 90.0, 13.0, 13.0])
  silent = clock.step([*warm, 10.0, 10.0, 10.0, 11.0, 9.0])
  steps = {"with": real, "without": silent}
  seconds, state = step_report.time_steps(steps, 0, 7, rounds=5)
  assert state == 14  # one state for both
  assert seconds["with"] == [12.0, 14.0, 90.0, 13.0, 13.0]
  local, _ = step_report.time_steps({"alone": clock.step([9, 9, 1, 2, 3])}, 0, 7, rounds=3)
  alone = step_report.gather_alone(local["alone"])
  assert alone == (Alone(0, step_report.platform.node(), 2.0),)
  report = step_report.make_report(*seconds.values(), alone)
  assert (report.compute, report.exposed, report.give_or_take) == (10.0, 3.0, 1.0)
  wanted = dict(compute_s=10.0, exposed_s=3.0, exposed_noise_s=1.0, slowest_process=0, spread=0.0)
  assert report.metrics() == wanted | {"exposed_share": pytest.approx(3 / 13)}


def test_the_slowest_process_is_named():
  processes = [Alone(0, "a", 0.010), Alone(1, "b", 0.011), Alone(2, "c", 0.022)]
  report = step_report.make_report([0.030], [0.020], processes)
  assert report.slowest().process == 2
  assert report.spread() == pytest.approx(12 / 11)
  *_, last = step_report.text(report, rows=8192, num_devices=24).splitlines()
  assert "10 ms to 22 ms, median 11 ms" in last
  assert "slowest is process 2 (c), 200% of the median" in last


def test_what_people_read_calls_nothing_communication_that_is_not():
  report = step_report.make_report([0.4, 0.4], [0.3, 0.3], [Alone(0, "a", 0.3)])
  text = step_report.text(report, rows=8192, num_devices=1)
  head, compute, exchange, processes = text.splitlines()
  assert head == "step report: 400 ms per step of 8,192 examples on 1 device, " + (
    "median of 2 rounds"
  )
  assert "300 ms: the same step without its exchange, but with sums of metrics" in compute
  assert "communication and compression not hidden by compute" in exchange
  assert "100 ms (25%), give or take 0 ms" in exchange
  assert processes.endswith("only one process, so none to compare")


def test_an_exchange_faster_than_none_is_noise_and_not_negative():
  report = step_report.make_report([0.1], [0.2], [Alone(0, "a", 0.1)])
  assert report.exposed < 0 and report.metrics()["exposed_s"] == 0
  assert " 0 ms (0%)" in step_report.text(report, rows=8, num_devices=2)


def experiment(exchange=None, **model):
  made = build.experiment(load_config("configs/digits.py", CONFIG | (model or MLP)))
  return made if exchange is None else made.replace(exchange=exchange)


def first_batch(made):
  batches = data.train_batches(made.train_data, made.phase.batch_size, seed=0)
  return on_mesh(made.mesh, next(batches))


def test_the_silent_step_sends_metrics_and_nothing_else():
  real = experiment()
  quiet = silent(real.exchange, real.mesh.axis_names)
  quiet = real.replace(exchange=quiet)
  lowered = [e.lower_train_step().compile() for e in (real, quiet)]
  sent = [hlo.total(hlo.collectives(c, real.mesh)).payload_bytes for c in lowered]
  params = jax.tree.leaves(real.abstract_state().params)
  assert sent[0] - sent[1] == sum(p.size * 4 for p in params)
  assert sent[1] <= 64


def test_the_state_of_the_exchange_is_left_as_it_is():
  axes = make_mesh().axis_names
  quiet = silent(delayed(plain(axes)), axes)
  grads = {"w": np.ones(3, np.float32)}
  state = quiet.init(grads)
  assert set(state) == {"grads", "inner"}
  assert quiet.exchange({}, state)[1] is state


def test_measuring_leaves_state_and_batch_alone():
  made = experiment(delayed(plain(make_mesh().axis_names)))
  state = made.init_state()
  before = jax.device_get(state)
  batch = first_batch(made)
  step = made.compile_train_step()
  report = step_report.measure(made, step, state, batch, rounds=3)
  assert report.compute > 0 and len(report.processes) == 1 and report.rounds == 3
  jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state))
  # What a process has on its devices, without a copy: here all of it.
  own = submesh(made.mesh, [*made.mesh.devices.flat])
  local, rows = step_report._on(own, state, batch)
  for a, b in zip(*map(jax.tree.leaves, ((local, rows), (state, batch))), strict=True):
    assert a.sharding.mesh == own
    np.testing.assert_array_equal(a, b)
    pointers = [[s.data.unsafe_buffer_pointer() for s in x.addressable_shards] for x in (a, b)]
    assert pointers[0] == pointers[1]
  step(state, batch)  # neither was donated


def test_the_exchange_that_most_steps_have_is_timed():
  axes = make_mesh().axis_names
  made = experiment(delayed(warm_start(plain(axes), axes, steps=1000)))
  own = past_warm_start(made.init_state().exchange_state)
  assert (own["inner"]["step"] > 2**29).all() and own["inner"]["step"].dtype == "int32"
  assert own["inner"]["step"].sharding == batch_sharding(made.mesh)


def test_a_synchronization_is_paid_for_once_in_so_many_steps(monkeypatch):
  """0.8 s longer, every fourth step."""
  local = MLP | {"sync": "LocalSGD", "sync.sync_every_steps": "4", "ema_decay": "None"}
  made = experiment(**local)
  state = made.init_state()
  batch = first_batch(made)
  seen = []

  def time_steps(steps, copy, batch, rounds):
    for each in steps.values():
      before = jax.device_get(copy.params)
      copy, _ = each(copy, batch)
      after = jax.device_get(copy.params)
      seen.append(any(map(np.any, jax.tree.leaves(jax.tree.map(np.subtract, after, before)))))
    return {"with": [1.0] * rounds, "without": [0.2] * rounds}, copy

  monkeypatch.setattr(step_report, "time_steps", time_steps)
  report = step_report.measure(made, None, state, batch, rounds=3)
  assert seen == [True, False]  # the anchor moves where workers synchronize
  assert report.exposed == pytest.approx(0.2) and report.compute == 0.2


def test_some_devices_under_the_same_axes():
  whole = make_mesh(replica=2)
  own = submesh(whole, jax.devices()[2:6])
  assert own.shape == {"replica": 1, "data": 4} and own.axis_types == whole.axis_types
  split = submesh(make_mesh(bn_devices=4), jax.devices()[6:])
  assert split.shape == {"replica": 1, "data": 1, "bn": 2}


def test_statistics_over_more_devices_than_a_process_has():
  """A process with 2 of the 4 devices of a span computes its part."""
  model = {"model": "CNN", "model.features": "(4,)", "model.dense": "0"}
  bn = {"model.batch_norm": "True", "model.bn_span": "64"}
  made = experiment(**model, **bn)
  assert made.mesh.shape["bn"] == 4
  own = submesh(made.mesh, jax.devices()[:2])
  quiet = silent(made.exchange, made.mesh.axis_names)
  small = made.replace(exchange=quiet, mesh=own)
  _, values = small.train_step(small.init_state(), on_mesh(own, digits_batch(32)))
  assert np.isfinite(values["loss"])


@pytest.mark.slow
def test_the_run_says_it_and_changes_in_no_bit(tmp_path, capsys):
  """Four devices, the checks that dropout and order are as without."""
  texts, finals = [], []
  for report in ("False", "True"):
    config = load_config("configs/digits.py", CONFIG | MLP | {"log.step_report": report})
    step = {"devices": 8, "batch_size": 128}
    plan = plan_with(chips="knl-8", config=to_plain(config), step=step)
    kept = plan if report == "True" else None
    finals.append(fit.fit(config, tmp_path / report, plan=kept).state)
    texts.append(capsys.readouterr().out)
  assert_same_bits(*finals)
  assert record(tmp_path / "True") == record(tmp_path / "False")
  reported = [x for x in texts[1].splitlines() if x.startswith("step report: ")]
  assert len(reported) == 1 and " of 128 examples on 8 devices" in reported[0]
  assert "step report" not in texts[0]
  lines = metrics.read_json_lines(tmp_path / "True" / "metrics.jsonl")
  line = next(x for x in lines if "perf/compute_s" in x)
  assert line["step"] == 0 and line["perf/compute_s"] > 0
  names = step_report.make_report([1.0], [1.0], [Alone(0, "a", 1.0)]).metrics()
  assert {x for x in line if x.startswith("perf/")} == {f"perf/{name}" for name in names}
  found = prediction.comparison(tmp_path / "True")
  measured = {row.name.strip(): row.measured for row in found.rows}
  assert measured["compute"] == line["perf/compute_s"]
  assert measured["exposed exchange"] == line["perf/exposed_s"]
  assert prediction.comparison(tmp_path / "False") is None


PROCESS = """
import sys
from pathlib import Path
from jaxscale import cluster
cluster.initialize()
from jaxscale.config.loading import load_config
from jaxscale.run.fit import fit
for report in ("False", "True"):
  config = load_config("configs/digits.py", {config!r} | {{"log.step_report": report}})
  fit(config, Path({workdir!r}) / report)
"""


@pytest.mark.slow
def test_two_processes_time_themselves_alone(tmp_path):
  code = PROCESS.format(config=CONFIG | MLP, workdir=str(tmp_path))
  results = run_group([sys.executable, "-c", code], num_devices=2)
  assert [code for *_, code in results] == [0, 0], results[0][1] + results[1][1]
  lines = results[0][0].splitlines()
  at = next(i for i, x in enumerate(lines) if x.startswith("step report: "))
  assert " of 128 examples on 4 devices" in lines[at]
  assert "alone on their own devices" in lines[at + 3]
  assert "slowest is process " in lines[at + 3]
  assert "step report" not in results[1][0]  # one of them talks
  kept = [tmp_path / report / "checkpoints" for report in ("False", "True")]
  assert_same_bits(*(restore(folder, experiment().abstract_state()) for folder in kept))
  assert record(tmp_path / "True") == record(tmp_path / "False")
