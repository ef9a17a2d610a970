"""Callbacks without a run: results, states, changed sets, and the built-in ones' rules."""

import json
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxscale as jxs
from jaxscale import config
from jaxscale.config.loading import load_config
from jaxscale.config.record import from_plain, to_plain
from jaxscale.errors import ConfigError
from jaxscale.metrics.scoring import signed
from jaxscale.run.callbacks import Callbacks
from jaxscale.run.identity import changes
from jaxscale.run.learning_rates import suggest
from jaxscale.training.types import TrainState
from support.configs import small_config
from support.tables import table


def waits(values, patience, min_delta, sign):
  """Return the index at which Keras' rule stops (`keras.callbacks.EarlyStopping`), or None."""
  best, waited = -math.inf, 0
  for i, value in enumerate(values):
    waited += 1
    if sign * value - min_delta > best:
      best, waited = sign * value, 0
    if waited >= patience and i > 0:
      return i
  return None


CONTEXT = types.SimpleNamespace(signed=lambda name, field: signed(name, ["distance"]))


@pytest.mark.parametrize("metric, is_lower", [("val/f1", 0), ("loss", 1), ("val/distance", 1)])
def test_the_direction_is_that_of_the_best_metric(metric, is_lower):
  stopper = config.EarlyStopping(metric=metric, patience=1).build(CONTEXT)
  name = metric.removeprefix("val/")
  assert stopper.on_evaluation(1, None, {name: 1.0}) is None
  assert (stopper.on_evaluation(2, None, {name: 2.0}) is None) == (not is_lower)


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("min_delta", [0.0, 1.0, 2.5])
def test_it_stops_where_keras_stops_also_if_resumed_anywhere(min_delta, mode):
  rng = np.random.default_rng(0)
  for patience in [1, 2, 3, 4] * 25:
    settings = config.EarlyStopping(metric="f1", patience=patience, min_delta=min_delta, mode=mode)
    stopper, stopped = settings.build(CONTEXT), None
    values = rng.integers(-8, 9, rng.integers(13)).tolist()
    for i, value in enumerate(values):
      saved = json.loads(json.dumps(stopper.state_dict()))
      stopper = settings.build(CONTEXT)
      stopper.load_state_dict(saved)
      if stopper.on_evaluation(i, None, {"f1": float(value)}) and stopped is None:
        stopped = i
    assert stopped == waits(values, patience, min_delta, 1 if mode == "max" else -1)


def test_nan_is_no_improvement_and_an_unknown_metric_is_refused():
  stopper = config.EarlyStopping(patience=2).build(CONTEXT)
  results = [stopper.on_evaluation(i, None, {"loss": x}) for i, x in enumerate([math.nan] * 2)]
  assert results[0] is None and "loss has not improved for 2 evaluations" in results[1].reason
  with pytest.raises(
    ConfigError, match=r"^EarlyStopping.metric=f1 is not .*; use loss or f1_macro"
  ):
    stopper = config.EarlyStopping(metric="f1", mode="max").build(CONTEXT)
    stopper.on_evaluation(1, None, {"loss": 1.0, "f1_macro": 1.0})


MISTAKES = table("""
EarlyStopping patience 0 | EarlyStopping.patience=0: give a value >= 1
LearningRateFinder low 20.0 | LearningRateFinder.low=20.0 is not below
""")


@pytest.mark.parametrize("what, says", MISTAKES)
def test_a_wrong_setting_is_one_line(what, says):
  name, field, text = what.split()
  with pytest.raises(ConfigError) as error:
    load_config("configs/digits.py", {"callbacks": name, f"callbacks.{name}.{field}": text})
  assert says in str(error.value) and "\n" not in str(error.value)


def test_they_are_chosen_on_the_command_line_and_recorded():
  chosen = {"callbacks": "EarlyStopping,SampleWriter", "callbacks.EarlyStopping.patience": "7"}
  loaded = load_config("configs/digits.py", chosen)
  assert loaded.callbacks == (config.EarlyStopping(patience=7), config.SampleWriter())
  assert from_plain(config.Config, to_plain(loaded)) == loaded
  with pytest.raises(ConfigError, match="callbacks: EarlyStopping is listed twice; remove one"):
    small_config(callbacks=(config.EarlyStopping(), config.EarlyStopping(patience=2)))


def state_of(value=1.0, **changes):
  params = {"w": jnp.full(3, value)}
  state = TrainState(jnp.int32(5), params, {}, (), (), ())
  return state._replace(**changes)


CHANGES = {
  "w float32[4], not float32[3]": state_of(params={"w": jnp.ones(4)}),
  "w bfloat16[3], not float32[3]": state_of(params={"w": jnp.ones(3, "bfloat16")}),
  "params/v float32[], not None": state_of(params={"v": jnp.float32(1), "w": jnp.ones(3)}),
  "step 6, not 5": state_of(step=jnp.int32(6)),
  "w in a different sharding": state_of(params={"w": np.ones(3, "float32")}),
}


@pytest.mark.parametrize("says", CHANGES)
def test_a_state_of_another_kind_is_refused(says):
  callback = jxs.Callback(on_step=lambda step, state, metrics: CHANGES[says])
  with pytest.raises(ConfigError) as error:
    Callbacks([(callback, None)]).call("on_step", ["Callback"], 5, state_of(), {})
  assert str(error.value).startswith("Callback.on_step returned a state with ")
  assert says in str(error.value) and "\n" not in str(error.value)


def test_results_are_a_state_a_stop_or_none():
  seen = []

  def doubled(step, state, values):
    return state._replace(params=jax.tree.map(lambda x: 2 * x, state.params))

  def stops(step, state, values):
    seen.append(float(state.params["w"][0]))
    values["loss"] = 9.0  # a copy: the next one sees the value of the run
    return jxs.Stop("enough")

  functions = doubled, stops, lambda step, state, values: seen.append(values["loss"]), doubled
  all_ = Callbacks([(jxs.Callback(on_evaluation=f), None) for f in functions])
  assert all_.names("on_evaluation") == ["Callback", *(f"Callback {i}" for i in (2, 3, 4))]
  assert all_.names("on_step") == []
  state = all_.call("on_evaluation", all_.names("on_evaluation"), 5, state_of(), {"loss": 1.0})
  assert seen == [2.0, 1.0] and float(state.params["w"][0]) == 4.0
  assert all_.stop_text() == "Callback 2 at step 5: enough"
  for hook, result in ("on_save", 3), ("on_start", jxs.Stop("now")):
    one = Callbacks([(jxs.Callback(**{hook: lambda step, state, r=result: r}), None)])
    with pytest.raises(ConfigError, match=f"Callback.{hook} returned .*; return None"):
      one.call(hook, ["Callback"], 5, state_of())


def test_unknown_functions_and_intervals_are_refused():
  with pytest.raises(ConfigError, match="on_steps does not exist; did you mean 'on_step'"):
    jxs.Callback(on_steps=print)
  misspelt = type("Mine", (jxs.Callback,), {"on_setp": print})()
  with pytest.raises(ConfigError, match=r"^Mine=on_setp does not exist; did you mean 'on_step'"):
    Callbacks([(misspelt, None)])
  for every in (0, 2.5, "x", None, True):
    with pytest.raises(ConfigError, match=r"Callback.every=.*is not a number of steps; use 1 or"):
      Callbacks([(jxs.Callback(every=every), None)])


@pytest.mark.parametrize("state", [{"a": (1,)}, {1: 2}, {"a": np.float32(1)}, [1], {"a": {1}}])
def test_a_state_that_json_would_change_is_refused(state):
  with pytest.raises(ConfigError, match=r"Callback.state_dict\(\)=.* is not JSON; use dict"):
    Callbacks([(jxs.Callback(state_dict=lambda: state), None)])


def counter():
  own = {"count": 0, "nan": math.nan, "third": 1 / 3}
  functions = dict(state_dict=lambda: own, load_state_dict=own.update)
  return types.SimpleNamespace(own=own, callback=jxs.Callback(**functions))


def test_states_come_back_and_a_changed_set_is_one_line(caplog):
  one, stopping = counter(), config.EarlyStopping(patience=3)
  members = [(one.callback, None), (stopping.build(CONTEXT), stopping)]
  all_ = Callbacks(members)
  one.own["count"] = 4
  all_.stopped = {"step": 8, "callback": "EarlyStopping", "reason": "x"}
  saved = json.loads(json.dumps(all_.saved()))
  one.own["count"] = 99
  with caplog.at_level("INFO", "jaxscale"):
    all_.restore(saved, 8)
    assert one.own["count"] == 4 and one.own["third"] == 1 / 3 and not caplog.records
    assert all_.stop_text() == "EarlyStopping at step 8: x"
    all_.restore(None, 0)  # a rollback to the beginning
    assert one.own["count"] == 0 and all_.stopped is None and not caplog.records
    other = config.EarlyStopping(patience=4)
    finder = config.LearningRateFinder()
    changed = Callbacks([(other.build(CONTEXT), other), (jxs.Callback(), finder)])
    changed.restore(saved, 8)
  assert [r.getMessage() for r in caplog.records] == [
    "note: callbacks: Callback is gone, EarlyStopping has changed and LearningRateFinder is new; "
    "it no longer stops the run"
  ]
  assert changed.stopped is None and Callbacks(()).saved() is None
  with pytest.raises(ConfigError, match=r"callbacks of the checkpoint of step 8: no states in it"):
    changed.restore({"stopped": None, "settings": {}}, 8)


def test_the_suggestion_is_the_steepest_fall_before_the_minimum():
  rates = np.geomspace(1e-5, 1.0, 200)
  x = np.log10(rates)
  falls = 1 / (1 + np.exp(5 * (x + 3))) + np.maximum(x + 1, 0) ** 2  # steepest at 10^-3
  assert suggest(rates, falls) == pytest.approx(1e-3, rel=0.05)
  assert suggest(rates, -falls[::-1]) != pytest.approx(1e-3, rel=0.05)
  assert suggest(rates, 1 + x**3 * 0) is None and suggest(rates[:3], falls[:3]) is None


def test_code_of_a_callback_counts_as_long_as_a_run_has_it():
  def identity(**callbacks):
    own = {f"m:{name}": {f"m:{name}": code} for name, code in callbacks.items()}
    return {"data": {}, "code": {}, "callbacks": own, "environment": {}}

  def texts(*both):
    return [(change.kind, change.text) for change in changes(*both)]

  assert texts(identity(A="1"), identity(A="2", B="1")) == [("code", "A in m differs")]
  assert not texts(identity(A="1", B="1"), identity(B="1"))
  before = identity()
  del before["callbacks"]  # of a version without them
  assert not texts(before, identity(A="1"))
