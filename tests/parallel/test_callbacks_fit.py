"""Callbacks of runs on 8 devices: order, changed states, stops, resume, samples, the range test."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxscale as jxs
from jaxscale import cli, config, metrics
from jaxscale.checkpoint.checkpoint_files import read_manifest
from jaxscale.errors import ConfigError
from jaxscale.experiment import build
from jaxscale.run import find_learning_rate, generate, train_phases
from jaxscale.run.fit import fit
from jaxscale.training import loop
from support.cases import all_slow_except
from support.configs import tiny_digits, tiny_language
from support.errors import config_error
from support.trees import assert_same_bits

EVERY_11 = dict(evaluation__every_epochs="1", checkpoint__every_epochs="1")


def with_callbacks(*callbacks, **changes):
  return dataclasses.replace(tiny_digits(**EVERY_11 | changes), callbacks=callbacks)


def recorder(seen):
  """Return a callback that records its calls, and keeps their number as its state."""
  own = {"calls": 0}

  def record(hook):
    def function(step, state, *values):
      assert int(state.step) == step
      own["calls"] += 1
      seen.append((hook, step, *values))

    return function

  hooks = {h: record(h) for h in ("on_start", "on_step", "on_evaluation", "on_save", "on_end")}
  return jxs.Callback(every=9, state_dict=lambda: own, load_state_dict=own.update, **hooks)


def test_they_are_called_in_order_with_the_metrics_of_the_run(tmp_path):
  seen = []
  fit(
    with_callbacks(log__every_steps="9", steps="24", epochs="None"),
    tmp_path,
    callbacks=[recorder(seen)],
  )
  assert [s[:2] for s in seen] == [
    ("on_start", 0), ("on_step", 9), ("on_evaluation", 11), ("on_save", 11), ("on_step", 18),
    ("on_evaluation", 22), ("on_save", 22), ("on_evaluation", 24), ("on_save", 24), ("on_end", 24),
  ]  # fmt: skip
  lines = metrics.read_metrics(tmp_path / "metrics.jsonl")
  for name, hook in ("train/", "on_step"), ("eval/", "on_evaluation"):
    logged = {x["step"]: x for x in lines if f"{name}loss" in x}
    for _, step, values in [s for s in seen if s[0] == hook]:
      assert {n: logged[step][name + n] for n in ("loss", "accuracy")} == {
        n: values[n] for n in ("loss", "accuracy")
      }


def halved(step, state, *_):
  return state._replace(params=jax.tree.map(lambda x: x / 2, state.params)) if step == 11 else None


HOOKS = "on_step", "on_evaluation", "on_save"


@pytest.mark.parametrize("hook", all_slow_except(HOOKS, "on_step"))
def test_a_changed_state_is_trained_on(tmp_path, hook):
  tiny = with_callbacks(steps="15", epochs="None")
  trained = fit(tiny, tmp_path, callbacks=[jxs.Callback(**{hook: halved})]).state
  experiment = build.experiment(tiny)
  state = experiment.init_state()
  batches = train_phases.train_batches(experiment, 0)
  for step, batch in enumerate(itertools.islice(batches, 15), 1):
    state, _ = experiment.train_step(state, batch)
    state = halved(step, state) or state
  assert_same_bits(jax.device_get(trained), jax.device_get(state))


@pytest.mark.parametrize("hook", all_slow_except(HOOKS, "on_step"))
def test_a_stop_ends_the_run_which_stays_stopped(tmp_path, capsys, hook):
  last = 9 if hook == "on_step" else 11

  def stop(step, state, *_):
    return jxs.Stop("enough") if step >= 9 else None

  callbacks = [jxs.Callback(every=9, **{hook: stop})]
  evaluation = dict(evaluation__every_epochs="2") if hook == "on_save" else {}
  tiny, seen = with_callbacks(**evaluation), []
  summary = fit(tiny, tmp_path, callbacks=[*callbacks, recorder(seen)]).summary
  assert (summary["outcome"], summary["step"]) == ("done", last) and summary["accuracy"] > 0
  assert summary["stopped_by"] == f"Callback at step {last}: enough"
  assert seen[-1] == ("on_end", last) and seen[-2][0] in ("on_save", "on_evaluation")
  assert f"stopped by Callback at step {last}: enough\n" in capsys.readouterr().out
  again = fit(tiny, tmp_path, callbacks=[*callbacks, recorder([])]).summary
  assert again["step"] == last and again["stopped_by"] == summary["stopped_by"]
  assert [
    x["step"] for x in metrics.read_metrics(tmp_path / "metrics.jsonl") if "eval/loss" in x
  ] == [last]
  out = capsys.readouterr().out
  assert f"stopped by Callback at step {last}: enough; evaluating again" in out
  longer = fit(tiny, tmp_path).summary  # without the callback
  assert longer["step"] == 45 and longer["stopped_by"] is None
  out = capsys.readouterr().out
  assert (
    "note: callbacks: Callback is gone and Callback 2 is gone; it no longer stops the run" in out
  )


class Counting(config.Callback):
  """Count of the calls but that of the start, of which a resumed run has more."""

  def build(self, context):
    callback = recorder([])
    callback.on_start = lambda step, state: None
    return callback


class Killed(BaseException):
  pass


@pytest.mark.parametrize("local", all_slow_except([False, True], False))
def test_killed_it_resumes_bit_for_bit(tmp_path, local):
  stopping = config.EarlyStopping(metric="accuracy", patience=2, min_delta=0.4)
  tiny = with_callbacks(stopping, Counting())
  if local:  # The copy of step 22 is newer than the shared checkpoint of step 11.
    kept = dataclasses.replace(tiny.checkpoint, local=str(tmp_path), shared_every=9)
    tiny = dataclasses.replace(tiny, checkpoint=kept)

  def kill(step, state, metrics):
    raise Killed

  whole = fit(tiny, tmp_path / "whole").summary
  assert whole["stopped_by"].startswith("EarlyStopping at step 33: accuracy has not improved")
  with pytest.raises(Killed):
    fit(tiny, tmp_path / "killed", callbacks=[jxs.Callback(every=27, on_step=kill)])
  assert fit(tiny, tmp_path / "killed").summary["stopped_by"] == whole["stopped_by"]
  manifests = [read_manifest(tmp_path / x / "checkpoints" / "33") for x in ("whole", "killed")]
  for name in ("callbacks", "leaves", "metrics"):
    assert manifests[0][name] == manifests[1][name]
  states = manifests[1]["callbacks"]["states"]
  assert (
    states["EarlyStopping"]["waited"] == 2 and states["test_callbacks_fit:Counting"]["calls"] == 9
  )


def test_a_rollback_restores_their_states(tmp_path, monkeypatch):
  seen, real = [], train_phases.train_batches

  def batches(experiment, done):
    for step, batch in enumerate(real(experiment, done), done + 1):
      if step == 15:
        batch["label"] = jax.device_put(batch["label"].at[3].set(99), batch["label"].sharding)
      yield batch

  monkeypatch.setattr(train_phases, "train_batches", batches)
  callback = recorder(seen)
  tiny = with_callbacks(checks__nan_policy="roll_back", checkpoint__every_epochs="1")
  counts = []
  callback.on_start = lambda step, state: counts.append((step, callback.state_dict()["calls"]))
  assert fit(tiny, tmp_path, callbacks=[callback]).summary["rolled_back"] == 1
  # Before step 11: step 9, an evaluation, a save. Then the run continues after step 15.
  assert counts == [(0, 0), (11, 3)] and ("on_step", 18) in [s[:2] for s in seen]


def test_a_fault_of_a_users_class_is_one_line_and_nothing_is_saved(tmp_path):
  class Broken(config.Callback):
    def build(self, context):
      return jxs.Callback(every=11, on_step=lambda step, state, metrics: metrics["f1"])

  with pytest.raises(
    ConfigError, match=r"test_callbacks_fit.py:\d+: Broken.on_step: KeyError: 'f1'"
  ) as e:
    fit(with_callbacks(Broken()), tmp_path)
  assert "\n" not in str(e.value) and not list((tmp_path / "checkpoints").glob("[0-9]*"))


def broken(step, state, metrics):
  return metrics["f1"]


def traced(step, state):
  return jax.jit(float)(jnp.float32(1))


class Own(jxs.Callback):
  def on_step(self, step, state, metrics):
    return 1 / 0


FAULTS = [
  (jxs.Callback(on_step=broken), KeyError, "Callback.on_step (broken)"),
  (jxs.Callback(on_step=lambda *_: 1 / 0), ZeroDivisionError, "Callback.on_step"),
  (jxs.Callback(on_step=functools.partial(broken, 0)), TypeError, "Callback.on_step"),
  (Own(), ZeroDivisionError, "Own.on_step"),
  (jxs.Callback(on_start=traced), TypeError, "Callback.on_start (traced)"),
]


@pytest.mark.parametrize("callback, error, name", FAULTS)
def test_a_fault_of_a_callback_from_python_is_its_own_with_a_note(callback, error, name, tmp_path):
  """A library that prunes trials, for example, catches its own exception."""
  with pytest.raises(error) as e:
    fit(with_callbacks(), tmp_path, callbacks=[callback])
  step = 0 if "on_start" in name else 1
  assert e.value.__notes__[-1] == f"raised in {name} at step {step}"


def test_a_wrong_result_of_a_callback_is_one_line(tmp_path):
  with config_error(match=r"^Callback.on_step returned int; return None"):
    fit(with_callbacks(), tmp_path, callbacks=[jxs.Callback(on_step=lambda *_: 3)])


def test_what_is_no_callback_is_refused(tmp_path):
  with pytest.raises(ConfigError, match="callbacks=print is not a jaxscale"):
    fit(with_callbacks(), tmp_path, callbacks=["print"])


def test_nothing_waits_for_a_step_without_callbacks():
  """With a hook that is not due, metrics are read as late as without one."""
  reads = []

  class Value(float):
    def item(self):
      reads.append(int(self))
      return float(self)

  def step(state, batch):
    return state + 1, {"loss": Value(state + 1), "grad_norm": Value(state + 1)}

  def run(*hooks):
    reads.clear()
    marked = (reads.append(-i) or i for i in range(9))
    loop.train(0, step, marked, loop.LoopControl(), hooks, start=0, total_steps=9)
    return list(reads)

  late = loop.Hook(10, lambda step, state, metrics: None, takes_metrics=True)
  assert run() == run(late) and run().index(1) > run().index(-loop.IN_FLIGHT)


def test_images_are_written_at_evaluations(tmp_path):
  sharded = dict(mesh__data="4", mesh__fsdp="2", layout__shard="fsdp")
  tiny = with_callbacks(config.SampleWriter(count=5), steps="12", epochs="None", **sharded)
  fit(tiny, tmp_path)
  names = sorted(path.name for path in (tmp_path / "samples").iterdir())
  assert names == ["000011.png", "000012.png"]


@pytest.mark.slow
def test_texts_are_those_of_the_command(tmp_path):
  texts = config.SampleWriter(prompts=("The ", "In "), num_tokens=5, temperature=0.0)
  split = dict(mesh=config.Mesh(fsdp=-1, data=1), layout=config.Layout(shard="fsdp"))
  language = tiny_language(steps=2, epochs=None, callbacks=(texts,), **split)
  fit(dataclasses.replace(language, log=config.Log(plot=False)), tmp_path)
  options = dict(num_tokens=5, temperature=0.0)
  alone = [p + generate.write(tmp_path, p, **options) for p in texts.prompts]
  written = (tmp_path / "samples" / "000002.txt").read_text()
  assert written == "\n\n".join(alone) + "\n"


def test_the_range_test_trains_as_a_run_does_and_leaves_nothing(tmp_path, capsys, monkeypatch):
  tiny = with_callbacks()
  tried = find_learning_rate(tiny, steps=12, low=1e-3, high=0.1)
  np.testing.assert_allclose(tried.rates, np.geomspace(1e-3, 0.1, 12), rtol=1e-5)
  seen = {}

  class Same(config.Schedule):
    def build(self, peak, context):
      rates = jax.numpy.asarray(tried.rates, "float32")
      return lambda step: rates[step]

  same = dataclasses.replace(tiny, schedule=Same(), lr_scaling="none", steps=12, epochs=None)
  callback = jxs.Callback(on_step=lambda s, state, m: seen.setdefault(s, m["loss"]) and None)
  fit(same, tmp_path / "run", callbacks=[callback])
  np.testing.assert_allclose(tried.losses, list(seen.values()), rtol=1e-5)
  monkeypatch.chdir(tmp_path)
  argv = "lr-find --config digits --config.model=MLP --steps 60 --out a/rates.png"
  assert cli.main(argv.split()) == 0
  out = capsys.readouterr().out.splitlines()[-1]
  assert out.startswith("suggested lr: ") and out.endswith("see a/rates.png)")
  assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "run"]
  assert cli.main([*argv.split(), "--low=20"]) == 2
