"""When a batch grows: rules against schedules that are computed by hand, in float64."""

import itertools
import math
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale import config as cfg
from jaxscale.experiment.derive import derive
from jaxscale.experiment.optimizer import phase_schedule
from jaxscale.run.branches import Branches, compare_branches
from support.errors import config_error


def growing(num_train=6_400, batch_size=64, epochs=10, schedule=None, noise_scale=False, **phases):
  config = cfg.Config(
    model=cfg.MLP(),
    data=cfg.Digits(),
    optimizer=cfg.SGD(lr=0.1),
    schedule=schedule or cfg.Cosine(),
    batch_size=batch_size,
    epochs=epochs,
    noise_scale=noise_scale,
    accumulate_steps=1 + noise_scale,
    phases=cfg.Growing(**phases),
  )
  return config, derive(config, num_train, 100, 1)


def cosine(share):
  return 0.05 * (1 + np.cos(np.pi * np.float64(share)))


def test_seesaw_doubles_where_a_cosine_has_halved():
  """1,000 steps of 64. Half the rate at step 500, a quarter at 667, an eighth at 770."""
  _, derived = growing(max_batch_size=512)
  halved = [math.ceil(1000 * math.acos(2 / 2**k - 1) / math.pi) for k in (1, 2, 3)]
  assert halved == [500, 667, 770]
  starts, examples, steps = [], 0, 0
  for k, end in enumerate([*halved, 1000]):
    starts.append((steps, 64 << k))
    count = math.ceil((64 * end - examples) / (64 << k))
    steps, examples = steps + count, examples + count * (64 << k)
  assert [(p.start, p.batch_size) for p in derived.phases] == starts
  assert derived.total_steps == steps == 639  # of 1,000


@pytest.mark.parametrize("follow, power", [("sqrt", 0.5), ("linear", 1.0), ("none", 0.0)])
def test_the_rate_is_the_schedules_times_the_factor(follow, power):
  config, derived = growing(max_batch_size=256, follow=follow)
  for phase in derived.phases:
    rate = phase_schedule(config, derived, phase)
    for step in (phase.start, phase.stop - 1):
      examples = phase.examples + (step - phase.start) * phase.batch_size
      wanted = cosine(examples / 64_000) * (phase.batch_size / 64) ** power
      assert float(rate(step)) == pytest.approx(wanted, rel=1e-5)


def test_seesaw_divides_the_rate_of_a_step_schedule_by_the_root_of_2():
  """At each halving by the schedule: Smith's rule keeps the rate, Seesaw divides by sqrt(2)."""

  class Halving(cfg.Schedule):
    def build(self, peak, context):
      return lambda step: peak * jnp.exp2(-jnp.floor(jnp.float32(step) / 250))

  config, derived = growing(schedule=Halving())
  assert [(p.start, p.batch_size) for p in derived.phases] == [
    (0, 64),
    (250, 128),
    (375, 256),
    (438, 512),
  ]
  rates = [float(phase_schedule(config, derived, p)(p.start)) for p in derived.phases]
  np.testing.assert_allclose(rates, 0.1 / np.sqrt([1, 2, 4, 8]), rtol=1e-6)
  linear, derived = growing(schedule=Halving(), follow="linear")
  rates = [float(phase_schedule(linear, derived, p)(p.start)) for p in derived.phases]
  np.testing.assert_allclose(rates, [0.1] * 4, rtol=1e-6)


def test_a_growing_batch_has_the_phases_that_are_written_out():
  config, derived = growing(when=cfg.AtExamples(epochs=(1.3, 2.7), examples=(20_000,)), epochs=4)
  starts = (0.0, 1.3, 2.7, 3.125)
  explicit = cfg.Phases(epochs=starts, batch_sizes=(64, 128, 256, 512), follow="sqrt")
  fixed = derive(
    cfg.Config(
      model=config.model,
      data=config.data,
      optimizer=config.optimizer,
      schedule=config.schedule,
      batch_size=64,
      epochs=4,
      phases=explicit,
    ),
    6_400,
    100,
    1,
  )
  assert derived.phases == fixed.phases


def test_micro_batches_keep_their_size_or_their_number():
  _, derived = growing(max_batch_size=256, more_micro_batches=True)
  assert [p.accumulate_steps for p in derived.phases] == [1, 2, 4]
  _, derived = growing(max_batch_size=256)
  assert [p.accumulate_steps for p in derived.phases] == [1, 1, 1]
  _, derived = growing(max_batch_size=1_000, factor=3)
  assert [p.batch_size for p in derived.phases] == [64, 192, 576]


def test_measured_sizes_are_joined_and_the_next_one_is_open():
  config, first = growing(when=cfg.ByBranch(every_epochs=2))
  assert [(p.start, p.batch_size, p.is_decided) for p in first.phases] == [
    (0, 64, True),
    (200, 64, False),
  ]
  later = derive(config, 6_400, 100, 1, [64, 64, 128])
  assert [(p.start, p.batch_size, p.is_decided) for p in later.phases] == [
    (0, 64, True),
    (400, 128, True),
    (500, 128, False),
  ]
  assert later.total_steps == 700


def point(**more):
  values = dict(step=1, examples=64, batch_size=64, larger=128, branch=lambda steps: None)
  return cfg.GrowthPoint(**values | dict(noise_scale=(None, None, None)) | more)


NOISE = {
  (200.0, 150.0, 300.0): (True, "150 to 300 examples (95 %); its lower end is at least 128"),
  (None, 150.0, None): (True, "above 150 examples (95 %); its lower end is at least 128"),
  (200.0, 100.0, 300.0): (False, "100 to 300 examples (95 %); its lower end must be at least 128"),
  (None, 3.0, None): (False, "above 3 examples (95 %); its lower end must be at least 128"),
  (50.0, 30.0, 90.0): (False, "30 to 90 examples (95 %); its lower end must be at least 128"),
  (None, None, None): (False, "not measured yet; its lower end must be at least 128"),
}


@pytest.mark.parametrize("noise", NOISE)
def test_the_noise_scale_decides_by_its_interval(noise):
  grows, why, _ = cfg.ByNoiseScale().decide(point(noise_scale=noise))
  assert (grows, why) == (NOISE[noise][0], f"the noise scale is {NOISE[noise][1]}")


def test_a_branch_has_two_steps_in_flight():
  """If it had all of them, their batches would fill the memory of the devices."""
  in_flight, most = set(), []

  class Loss:
    def __init__(self):
      in_flight.add(self)
      most.append(len(in_flight))

    def block_until_ready(self):
      in_flight.discard(self)
      return self

    def item(self):
      return 0.5

  config, derived = growing()
  same = SimpleNamespace(config=config, phase=derived.phases[0])
  same.compile_train_step = lambda: lambda state, batch: (state, {"loss": Loss()})
  branches = Branches(same, jnp.ones(2), lambda _: itertools.repeat({}))
  assert branches.losses(same, 9).tolist() == [0.5] * 9
  assert max(most) == 2


def test_a_branch_decides_with_its_standard_error():
  rng = np.random.default_rng(0)
  small = 2 + 0.5 * rng.normal(size=20)  # noise of the examples, which both branches see
  off = 0.01 * rng.normal(size=20)
  found = compare_branches(np.stack([small, small + off]))
  late = off[10:]
  assert found.difference == pytest.approx(late.mean())
  assert found.error == pytest.approx(late.std(ddof=1) / math.sqrt(10))
  rule = cfg.ByBranch(margin=0.01)
  grows, why, values = rule.decide(point(branch=lambda n: np.stack([small, small + off])))
  assert grows and values["larger_loss"] == pytest.approx((small + off)[10:].mean())
  assert values["bound"] == pytest.approx(0.01 * small[10:].mean())
  assert why == (
    f"copies trained on the same 2,560 examples end at loss {found.larger_loss:.4f} with 128 and "
    f"{found.loss:.4f} with 64; {found.difference:+.4f} ± {found.error:.4f} (standard error) is "
    f"at most the allowed {0.01 * found.loss:+.4f}"
  )
  # A mean within the margin whose error is not.
  wide = 0.01 * small[10:].mean() - 0.002 + 0.02 * np.array([1, -1] * 10)
  grows, why, _ = rule.decide(point(branch=lambda n: np.stack([small, small + wide])))
  assert not grows and "is perhaps above the allowed +" in why
  grows, why, _ = rule.decide(point(branch=lambda n: np.stack([small, small + wide + 0.1])))
  assert not grows and "is above the allowed +" in why
  grows, _, _ = rule.decide(point(branch=lambda n: np.stack([small, small * np.nan])))
  assert not grows


class Rising(cfg.Schedule):
  def build(self, peak, context):
    return lambda step: peak * (1 - jnp.float32(step % 500) / 1000)


class Flat(cfg.Schedule):
  def build(self, peak, context):
    return lambda step: jnp.float32(peak) + 0 * jnp.float32(step)


class Unsorted(cfg.Growth):
  def build(self, context):
    return (500.0, 300.0)


def rule_with(*points):
  return type("Points", (cfg.Growth,), {"build": lambda self, context: points})()


MISTAKES = {
  "late": (
    dict(when=cfg.AtExamples(epochs=(10,))),
    r"it may grow after \[64000.0\] of 64,000 examples.* before the end",
  ),
  "words": (dict(when=rule_with("a", "b")), r"Points\.build returned tuple; return .* numbers"),
  "nan": (
    dict(when=rule_with(math.nan, 64.0)),
    r"Points\.build returned tuple; return a tuple of numbers",
  ),
  "rising": (dict(schedule=Rising()), r"this one rises at step 500; use AtExamples"),
  "constant": (dict(schedule=Flat()), "never grows: it may grow after"),
  "most": (dict(max_batch_size=100), "examples, to 100; give .* a larger max_batch_size"),
  "unsorted": (dict(when=Unsorted()), "give positive, increasing points"),
  "noise": (dict(when=cfg.ByNoiseScale()), "set Config.noise_scale=True"),
  "neutral": (dict(follow="neutral"), None),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_of_growing_batches_are_one_line(mistake):
  changes, remedy = MISTAKES[mistake]
  if remedy is None:
    assert growing(**changes)  # SGD allows it
    return
  with config_error(match=remedy):
    growing(**changes)
