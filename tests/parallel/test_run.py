"""`fit` and the loop in this process: metrics, evaluation, divergence, workdirs."""

import dataclasses
import errno
import gc
import json
import math
import os
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxscale
from jaxscale import config, data, metrics
from jaxscale.checkpoint import checkpoint_files
from jaxscale.checkpoint.manager import Checkpoints
from jaxscale.errors import NonFiniteError
from jaxscale.experiment import build
from jaxscale.experiment.derive import derive
from jaxscale.mesh import make_mesh
from jaxscale.metrics import tracking as background
from jaxscale.run import efficiency, reporter, tracking, train_phases
from jaxscale.run.fit import fit
from jaxscale.run.goodput import read_activities
from jaxscale.training import loop
from jaxscale.training.losses import classification_totals
from jaxscale.training.step import make_eval_step
from support.configs import tiny_digits
from support.errors import config_error
from support.extending import blocks
from support.tiny_runs import events_of, record
from support.trees import assert_same_bits


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  """One short run, looked at by several tests."""
  os.chdir(build.__file__.rsplit("/", 3)[0])
  workdir = tmp_path_factory.mktemp("run")
  with pytest.MonkeyPatch.context() as patch:  # CPUs have no published peak
    patch.setattr(efficiency, "find_peak", lambda: 2e9)
    return fit(tiny_digits(log__plot="True"), workdir), workdir


def test_a_run_leaves_its_record(finished):
  result, workdir = finished
  files = {"activity.jsonl", "config.json", "metrics.jsonl", "metrics.png", "starts.jsonl"}
  folders = {"checkpoints", "lock", "tensorboard"}
  assert {p.name for p in workdir.iterdir()} == files | folders | {"summary.json"}
  assert json.loads((workdir / "summary.json").read_text()) == result.summary
  assert result.summary["outcome"] == "done" and result.summary["step"] == 45
  seconds = result.summary["goodput_seconds"]
  share = seconds["training"] / sum(seconds.values())
  assert result.summary["goodput"] == pytest.approx(share, abs=1e-3)
  last = read_activities(workdir)[-1]
  assert (last.step, last.resumed, last.done) == (46, [0], True)
  assert {"starting", "compiling", "input", "step", "saving"} < last.seconds.keys()
  assert sum(last.seconds.values()) == pytest.approx(last.time - last.start, abs=0.02)
  assert result.summary["accuracy"] > 0.5
  lines = metrics.read_json_lines(workdir / "metrics.jsonl")
  logged = [line["step"] for line in lines if "train/loss" in line]
  assert logged == [*range(5, 46, 5)]
  assert [line["step"] for line in lines if "eval/loss" in line] == [22, 44, 45]
  perf = [line for line in lines if "perf/mfu" in line]
  assert [line["step"] for line in perf] == logged
  model = 3 * 2 * (64 * 32 + 32 * 10)  # FLOPs of an example
  for line in perf:
    rate = line["perf/examples_per_s"]
    assert line["perf/step_s"] == pytest.approx(128 / rate)
    assert 8 * line["perf/tflops_per_device"] * 1e12 == pytest.approx(model * rate)
  summary = result.summary
  ratio = perf[-1]["perf/tflops_per_device"] / perf[-1]["perf/mfu"]
  assert ratio == pytest.approx(summary["peak_tflops_per_device"], rel=0.05, abs=1e-4)
  assert summary["peak_source"] == "published: cpu, bfloat16"
  assert all(0 < line["perf/mfu"] <= 1 for line in perf) and 0 < summary["mfu"] <= 1
  # The gradient of the images, 64 x 32, is in the model's FLOPs, not in the step's.
  program = 3 * 64 * 32 * 2 + 3 * 32 * 10 * 2 - 2 * 64 * 32
  assert perf[-1]["perf/hfu"] == pytest.approx(perf[-1]["perf/mfu"] * program / model)
  assert summary["hfu"] > 0 and summary["program_memory_gb"] >= 0
  assert 0 < perf[-1]["perf/memory_gb"] <= summary["peak_memory_gb"] + 0.001
  assert (workdir / "metrics.png").read_bytes()[:4] == b"\x89PNG"


def test_the_resolved_config_is_written(finished):
  _, workdir = finished
  described = json.loads((workdir / "config.json").read_text())
  assert described["config"]["optimizer"]["class"] == "SGD"
  assert described["config"]["model"]["hidden"] == [32]
  assert described["derived"]["total_steps"] == 45
  assert described["derived"]["peak_lr"] == 0.1
  assert described["derived"]["device_batch_size"] == 16
  assert described["versions"]["jax"] == jax.__version__


def test_tensorboard_has_the_same_numbers(finished):
  _, workdir = finished
  (path,) = (workdir / "tensorboard").iterdir()
  events = [(event.step, value) for event in events_of(path) for value in event.summary.value]
  scalars = [(step, value.tag, value.simple_value) for step, value in events]
  lines = metrics.read_json_lines(workdir / "metrics.jsonl")
  for line in lines:
    for name, value in line.items():
      if "/" in name:
        assert (line["step"], name, pytest.approx(value)) in scalars


class Keeps(config.Tracker):
  """Keeps what it gets, by the run's id."""

  def build(self, context):
    assert context.config["class"] == "Config" and context.environment["python"]
    got = KEPT.setdefault(context.id, [])

    def log(step, time, values):
      got.extend((step, name) for name in values)

    return metrics.Tracker(log, finish=got.append)


class Hangs(config.Tracker):
  """Never returns."""

  def build(self, context):
    RELEASED.wait()


class Wrong(config.Tracker):
  """Returns something else."""

  def build(self, context):
    return 3


KEPT, RELEASED = {}, threading.Event()


def test_a_run_is_the_same_with_trackers(finished, tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(background, "_TURN_S", 0.01)  # One that hangs keeps nobody waiting.
  tiny, workdir = tiny_digits(), tmp_path / "a"
  trackers = (Keeps(), Hangs(flush_s=0.01), Wrong())
  log = dataclasses.replace(tiny.log, trackers=trackers)
  fit(dataclasses.replace(tiny, log=log), workdir)
  RELEASED.set()
  printed = capsys.readouterr().out
  assert "Hangs did not finish in 0.01 s" in printed
  assert "Wrong: ConfigError: Wrong.build returned int; return a metrics.Track" in printed
  assert record(workdir) == record(finished[1])
  lines = metrics.read_metrics(workdir / "metrics.jsonl")
  wanted = [(x["step"], n) for x in lines for n in x if n not in ("step", "time")]
  assert {tracking.tracked_id(workdir): [*wanted, "done"]} == KEPT


def test_a_finished_run_says_so_and_stays_as_it_is(finished, capsys):
  result, workdir = finished
  again = fit(tiny_digits(), workdir)
  assert "all 45 steps are already done" in capsys.readouterr().out
  assert again.summary["accuracy"] == result.summary["accuracy"]
  assert_same_bits(again.state, result.state)


REMEDIES = {
  errno.ENOSPC: "make room, or use a different directory",
  errno.EROFS: "mount it for writing (dmesg shows why it is not), or use",
  errno.EACCES: "use a different directory",
}


@pytest.mark.parametrize("number", REMEDIES)
@pytest.mark.parametrize("fails", ["checkpoint.lock._create", "metrics.writers.replace_text"])
def test_a_disk_that_takes_no_run_is_named_with_its_remedy(tmp_path, monkeypatch, fails, number):
  def fail(*_, **__):
    raise OSError(number, os.strerror(number))

  monkeypatch.setattr(f"jaxscale.{fails}", fail)
  with config_error() as error:
    fit(tiny_digits(), tmp_path / "run")
  line = f"--workdir={tmp_path}/run cannot be written: {os.strerror(number)}; {REMEDIES[number]}"
  assert str(error.value).startswith(line)


WARMUP = dict(epochs="1.42", schedule__warmup_epochs="1.4", batch_size="1024")
UNFIT = [
  (dict(batch_size="100"), "96 or 104"),
  (dict(batch_size="4"), "give 8"),
  (dict(batch_size="136", accumulate_steps="4"), "128 or 160"),
  (dict(mesh__data="3"), "8 devices"),
  (dict(model="CNN", model__features="(8, 8, 8, 8)"), "use at most"),
  (WARMUP, "takes 2 of the run's 2 steps; make it shorter"),
]


@pytest.mark.parametrize("changes, message", UNFIT)
def test_what_does_not_fit_the_devices_is_refused(changes, message):
  with config_error(match=message):
    build.experiment(tiny_digits(**changes))


def test_evaluation_is_exact_at_any_batch_size_and_device_count(finished):
  """Hits are those of one example after the other, to the last one."""
  result, _ = finished
  state = jax.device_get(result.state)
  dataset = data.digits("test")
  experiment = build.experiment(tiny_digits())
  params, model_state = state.evaluated()
  rows = dataset.load(np.arange(360), None)
  logits, _ = experiment.model.apply(params, model_state, rows["image"], False, None)
  hits = int((logits.argmax(-1) == rows["label"]).sum())
  for num_devices in (1, 2, 8):
    mesh = make_mesh(devices=jax.devices()[:num_devices])
    step = make_eval_step(classification_totals(experiment.model.apply), mesh)
    for batch_size in (1, 7, 64, 1000):
      size = -(-batch_size // num_devices) * num_devices
      batches = data.to_device(data.eval_batches(dataset, size), mesh)
      values = loop.evaluate(step, params, model_state, batches)
      assert values["accuracy"] * 360 == hits
      assert values["loss"] == pytest.approx(result.summary["loss"], rel=1e-5)


def fake_run(losses, total=None, saved=None, stop_at=None):
  """Run the loop over steps that return the given losses; return the recorded calls."""
  calls = []

  def step(state, batch):
    assert batch == state
    metrics = {"loss": jnp.float32(losses[state]), "grad_norm": jnp.float32(1)}
    return state + 1, metrics

  callbacks = loop.LoopControl(
    is_logged=lambda s: True,
    log=lambda s, m: calls.append(("log", s)),
    should_stop=lambda s: s == stop_at,
  )
  hooks = [
    loop.Hook(4, lambda s, state: calls.append(("evaluate", s))),
    loop.Hook(
      lambda s: s % (saved or 100) == 0 or s == stop_at, lambda s, state: calls.append(("save", s))
    ),
  ]
  total = total or len(losses)
  end = loop.train(0, step, iter(range(total)), callbacks, hooks, start=0, total_steps=total)
  return end, calls


def test_the_loop_calls_in_order():
  end, calls = fake_run([1.0] * 8, saved=4)
  assert end == (8, 8)
  assert [c for c in calls if c[0] == "log"] == [("log", s) for s in range(1, 9)]
  # Every step up to a checkpoint has been looked at before it is written.
  before = calls[: calls.index(("save", 4))]
  assert before == [*[("log", s) for s in range(1, 5)], ("evaluate", 4)]


def test_the_loop_stops_and_saves_when_asked():
  end, calls = fake_run([1.0] * 8, stop_at=3)
  assert end == (3, 3) and calls[-1] == ("save", 3)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("at", [1, 5, 6])
def test_a_loss_that_is_no_number_names_its_step_and_saves_nothing(bad, at):
  values = [1.0] * 12
  values[at - 1] = bad
  with pytest.raises(NonFiniteError, match=f"step {at}"):
    fake_run(values, saved=at)


def test_divergence_keeps_the_last_good_checkpoint(tmp_path, capsys):
  config = tiny_digits(optimizer__lr="1e9", checkpoint__every_epochs="0.09")
  with pytest.raises(NonFiniteError, match="last good checkpoint") as error:
    fit(config, tmp_path)
  steps = [int(p.name) for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit()]
  assert all(s < error.value.step for s in steps)


def test_where_nothing_was_saved_the_workdir_takes_another_rate(tmp_path, capsys):
  with pytest.raises(NonFiniteError, match="good checkpoint: none yet") as error:
    fit(tiny_digits(optimizer__lr="1e9"), tmp_path)
  advice = error.value.advice
  assert "clip_norm" in advice and "skip" in advice and "--workdir" not in advice
  assert fit(tiny_digits(epochs="2"), tmp_path).summary["outcome"] == "done"


def test_on_a_slow_disk_a_checkpoint_is_left_out_but_the_last(tmp_path, capsys, monkeypatch):
  start, save, is_fast = checkpoint_files.start_writing, Checkpoints.save, threading.Event()

  def start_slowly(*args):
    written = start(*args)
    return lambda: (is_fast.wait(60), written())

  def save_and_wait(self, *args, is_needed):
    if is_needed:
      is_fast.set()
    save(self, *args, is_needed=is_needed)

  monkeypatch.setattr(checkpoint_files, "start_writing", start_slowly)
  monkeypatch.setattr(Checkpoints, "save", save_and_wait)
  fit(tiny_digits(checkpoint__max_wait_s="0"), tmp_path)
  saved = {p.name for p in (tmp_path / "checkpoints").iterdir()}
  assert saved == {"22", "45"}
  assert capsys.readouterr().out.count("skipping the checkpoint of step 44") == 1


def test_the_metrics_file_forgets_steps_after_the_checkpoint(tmp_path):
  with_later = [{"step": s, "train/loss": 1.0, "time": 0.0} for s in (1, 2, 3)]
  text = "".join(json.dumps(line) + "\n" for line in with_later) + '{"step": 4, "tr'
  (tmp_path / "metrics.jsonl").write_text(text)
  writer = metrics.MetricWriter(tmp_path, start=2, tensorboard=False)
  writer.write(3, {"train/loss": 0.5})
  writer.close()
  lines = metrics.read_json_lines(tmp_path / "metrics.jsonl")
  assert [(line["step"], line["train/loss"]) for line in lines] == [(1, 1), (2, 1), (3, 0.5)]


def test_the_last_evaluation_is_on_record_once(tmp_path):
  """However often a run that is done is started, and also without its summary.json."""
  summary, wanted = fit(tiny_digits(), tmp_path).summary, None
  for lost in ("nothing", "summary.json", "summary.json"):
    (tmp_path / lost).unlink(missing_ok=True)
    again = fit(tiny_digits(), tmp_path).summary
    assert (again["outcome"], again["loss"]) == ("done", summary["loss"])
    lines = metrics.read_metrics(tmp_path / "metrics.jsonl")
    evaluated = [line["step"] for line in lines if "eval/loss" in line]
    wanted = wanted or sorted({*evaluated})
    assert evaluated == wanted and wanted[-1] == summary["step"]
  events = [e for path in (tmp_path / "tensorboard").iterdir() for e in events_of(path)]
  steps = [e.step for e in events if [v.tag for v in e.summary.value] == ["eval/loss"]]
  assert sorted(steps) == wanted


def test_a_run_stops_at_its_target_and_stays_there(tmp_path, capsys):
  options = dict(stop_at_target="True", target_accuracy="0.3", evaluation__every_epochs="1")
  options["epochs"] = "40"
  summary = fit(tiny_digits(**options), tmp_path).summary
  assert summary["outcome"] == "done" and summary["accuracy"] >= 0.3
  assert summary["step"] == summary["target_step"] < summary["total_steps"]
  assert 0 < summary["target_seconds"] <= summary["seconds"]
  capsys.readouterr()
  again = fit(tiny_digits(**options), tmp_path).summary
  reported = capsys.readouterr().out
  assert f"the target was already reached by step {summary['step']}" in reported
  for name in ("step", "target_step", "target_seconds", "accuracy"):
    assert again[name] == summary[name]


@pytest.mark.slow
def test_trust_ratios_and_noise_scale_are_logged(tmp_path):
  options = dict(optimizer="LARS", optimizer__lr="5", log__trust_ratios="True", epochs="2")
  options["noise_scale"] = "True"
  summary = fit(tiny_digits(**options), tmp_path).summary
  lines = metrics.read_json_lines(tmp_path / "metrics.jsonl")
  ratios = [line for line in lines if "trust_ratio/Dense_0/kernel" in line]
  assert ratios and all(0 < r["trust_ratio/Dense_0/kernel"] < 1 for r in ratios)
  assert not any("bias" in name for name in ratios[0])
  scales = [line["train/noise_scale"] for line in lines if "train/noise_scale" in line]
  assert scales[-1] > 0
  assert summary["noise_scale"] == pytest.approx(scales[-1], rel=1e-5)
  assert fit(tiny_digits(**options), tmp_path).summary["noise_scale"] == summary["noise_scale"]


def test_one_gradient_has_no_noise_scale():
  experiment = build.experiment(tiny_digits())
  config = tiny_digits(noise_scale="True", mesh__data="-1")
  sizes = experiment.derived.num_train, experiment.derived.num_eval
  with config_error(match="set accumulate_steps to 2"):
    derive(config, *sizes, num_devices=1)


def test_a_run_that_waits_for_data_says_so(tmp_path, capsys, monkeypatch):
  real, now = train_phases.train_batches, [0.0]

  def slow(*args):
    for batch in real(*args):
      now[0] += 0.03
      yield batch

  # A clock that moves only while the run waits for data.
  monkeypatch.setattr(reporter, "time", SimpleNamespace(perf_counter=lambda: now[0]))

  monkeypatch.setattr(train_phases, "train_batches", slow)
  monkeypatch.setattr(reporter, "INPUT_BOUND_SECONDS", 0.02)
  fit(tiny_digits(), tmp_path)
  reported = [x for x in capsys.readouterr().out.splitlines() if "input-bound" in x]
  assert len(reported) == 1 and "input_threads" in reported[0]
  lines = metrics.read_json_lines(tmp_path / "metrics.jsonl")
  assert [line["perf/input_wait"] for line in lines if "perf/input_wait" in line][-1] > 0.99


def test_progress_lines(capsys):
  progress = metrics.Progress(100, total_examples=3200)
  assert progress.rate(320) > 0
  perf = {"examples_per_s": 1280.0, "step_s": 0.025, "mfu": 0.5, "memory_gb": 61.234}
  progress.train(10, {"loss": 0.5, "learning_rate": 0.1}, perf)
  progress.evaluated(10, {"accuracy": 0.875, "loss": 0.25})
  progress.train(20, {"loss": 0.5, "learning_rate": 0.1}, perf | {"step_s": 3.25})
  progress.close()
  first, second, slow = capsys.readouterr().out.splitlines()
  assert first == (
    "step  10/100  loss 0.5000  lr 0.1  1,280 examples/s  25 ms/step  MFU 50.0%  "
    "memory 61.2 GB  0:02 left"
  )
  assert second == "step  10/100  validation accuracy 87.50%  loss 0.2500"
  assert " 3,250 ms/step " in slow
  assert metrics.duration(7) == "0:07" and metrics.duration(11_100) == "3:05:00"


def test_progress_lines_have_the_metrics_of_the_users_own_loss(capsys):
  progress = metrics.Progress(100, total_examples=3200)
  values = {"loss": 0.5, "learning_rate": 0.1, "grad_norm": 3.0, "recall": 0.25}
  progress.train(10, values, {"examples_per_s": 1280.0, "step_s": 0.025})
  progress.evaluated(10, {"loss": 0.25, "recall": 0.75})
  first, second = capsys.readouterr().out.splitlines()
  assert first.startswith("step  10/100  loss 0.5000  recall 0.25  lr 0.1  1,280 examples/s")
  assert second == "step  10/100  validation loss 0.2500  recall 0.75"


@pytest.mark.slow
def test_many_runs_in_one_process_leave_nothing_behind(tmp_path):
  """A notebook's: threads, open files, and memory of arrays and programs."""
  seen = []
  for number in range(12):
    fit(tiny_digits(epochs="2"), tmp_path / str(number))
    gc.collect()
    arrays = sum(a.nbytes for a in jax.live_arrays())
    seen.append((threading.active_count(), len(os.listdir("/proc/self/fd")), arrays))
  assert seen[2:] == [seen[2]] * 10, seen


def test_callbacks_of_a_notebook_run_before_a_checkpoint(tmp_path, monkeypatch):
  (code,) = blocks("callbacks")
  config = tiny_digits()
  names = {"jxs": jaxscale, "config": config}
  monkeypatch.chdir(tmp_path)
  exec(code, names)
  assert list(names["norms"]) == [10, 20, 30, 40] and min(names["norms"].values()) > 0

  def refuse(step, state, metrics):
    raise ValueError(f"step {step}")

  refusing = jaxscale.Callback(every=22, on_step=refuse)
  with pytest.raises(ValueError, match="step 22"):  # where a checkpoint is due as well
    fit(config, "runs/refused", callbacks=[refusing])
  assert not list((tmp_path / "runs" / "refused" / "checkpoints").glob("[0-9]*"))
