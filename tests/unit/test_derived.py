"""Settings that only data, the model and devices can refuse."""

import dataclasses

import pytest

from jaxscale import config as cfg
from jaxscale.config.loading import load_config
from jaxscale.errors import ConfigError
from jaxscale.experiment import build
from jaxscale.experiment.derive import derive
from jaxscale.experiment.optimizer import make_schedule
from jaxscale.mesh import batch_norm_span
from support.errors import config_error
from support.tables import assignments, columns

DERIVED = columns(assignments, int, str, str)(rf"""
batch_size=1440 | 8 | Config.batch_size=1440 | give 1432 or less
batch_size={10**23} | 8 | Config.batch_size=1000 | give 1432 or less
phases.epochs=0,5 phases.batch_sizes=128,2048 | 8 | Phases.batch_sizes=2048 | give 1432 or less
epochs=1e300 | 8 | Config.epochs=1e\+300 | give fewer
epochs=None steps={2**31} | 8 | Config.steps=2147483648 | give fewer
schedule.warmup_epochs=0 schedule.warmup_steps=999 | 8 | schedule.warmup_steps=999 | shorter
noise_scale=True phases.epochs=0,5 phases.accumulate_steps=2,1 | 1 | Config.noise_scale | 2 or more
""")


@pytest.mark.parametrize("overrides, devices, where, remedy", DERIVED)
def test_what_data_and_devices_refuse(overrides, devices, where, remedy):
  config = load_config("configs/digits.py", overrides)
  with config_error(match=f"^{where}.*[:;] .*{remedy}"):
    derive(config, 1437, 360, devices)


def test_a_run_can_be_counted_in_steps():
  """Expect the counts of epochs, 12 steps of 128 each among 1,437 examples, without fractions."""
  in_steps = assignments("""
    epochs=None steps=36 schedule.warmup_epochs=0 schedule.warmup_steps=12
    evaluation.every_steps=7 evaluation.every_epochs=None
    checkpoint.every_steps=5 checkpoint.every_epochs=None
""")
  config = load_config("configs/digits.py", in_steps)
  got = derive(config, 1437, 360, 8)
  assert (got.total_steps, got.warmup_steps, got.eval_every, got.save_every) == (36, 12, 7, 5)
  epochs = {"epochs": str(35.5 * 128 / 1437), "schedule.warmup_epochs": "1.07"}
  as_epochs = load_config("configs/digits.py", epochs)
  wanted = derive(as_epochs, 1437, 360, 8)
  assert got._replace(eval_every=0, save_every=0) == wanted._replace(eval_every=0, save_every=0)
  for step in (0, 5, 12, 20, 35):
    rate = make_schedule(config, got)(step)
    assert rate == make_schedule(as_epochs, wanted)(step)


def test_phases_can_be_counted_in_steps():
  """Two phases of 3 and 7 steps, of 128 and 256 examples: 17 steps of 128."""
  steps = (
    "epochs=None steps=10 phases.steps=0,3 schedule.warmup_epochs=0 phases.batch_sizes=128,256"
  )
  config = load_config("configs/digits.py", assignments(steps))
  derived = derive(config, 1437, 360, 8)
  assert [(p.start, p.stop, p.examples) for p in derived.phases] == [(0, 3, 0), (3, 10, 3 * 128)]
  schedule = make_schedule(config, derived)
  assert schedule(16) > 0 and schedule(17) == schedule(30)  # the end of the decay


def test_a_batch_may_have_every_example():
  config = load_config("configs/digits.py", {"batch_size": "64"})
  assert derive(config, 64, 8, 8).total_steps == 40
  with pytest.raises(ConfigError, match="use more data or fewer devices"):
    derive(config, 7, 8, 8)
  both = {"phases.epochs": "0,5", "phases.accumulate_steps": "2,4"}
  config = load_config("configs/digits.py", both | {"noise_scale": "True"})
  assert len(derive(config, 1437, 360, 1).phases) == 2


PATTERNS = columns(assignments, str)("""
optimizer=LARS optimizer.include=nosuch | 'nosuch' matches no .* Conv_0/bias, .*Dense_1/kernel
layer_decay=0.5 layer_order=('nosuch',) | Config.layer_order='nosuch' matches no .*Conv_0/bias
layer_decay=0.5 layer_order=('Conv_0','Conv_1') | Dense_0/bias matches none of them
layer_decay=0.5 layer_order=('Conv','Conv_1','Dense') | Conv_1/bias matches 'Conv' and 'Conv_1'
""")


@pytest.mark.parametrize("overrides, says", PATTERNS)
def test_patterns_that_fit_no_parameter_are_refused_in_time(overrides, says):
  config = load_config("configs/digits.py", overrides)
  with config_error(match=says):
    build.experiment(config)


def test_patterns_that_fit_are_taken():
  fitting = {"optimizer": "LARS", "optimizer.include": "kernel$", "layer_decay": "0.5"}
  fitting |= {"layer_order": "('Conv', 'Dense_0', 'Dense_1')"}
  config = load_config("configs/digits.py", fitting)
  build.experiment(config).abstract_state()
  everything = dataclasses.replace(config.optimizer, include="all")
  build.experiment(dataclasses.replace(config, optimizer=everything))


SPANS = [(2, 5, 8, '"device"'), (2, 9, 1, "3"), (2, 1, 7, "7"), (5, 16, 8, "4")]


@pytest.mark.parametrize("span, rows, data, remedy", SPANS)
def test_the_span_that_is_advised_is_one_that_is_taken(span, rows, data, remedy):
  with config_error(match=f"give {remedy}$"):
    batch_norm_span(span, rows, replica=1, data=data)
  advised = "device" if remedy == '"device"' else int(remedy)
  batch_norm_span(advised, rows, replica=1, data=data)
  cfg.ResNet(bn_span=advised)
