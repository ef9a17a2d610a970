"""Phases: what changes size on the way, and that nothing else does."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxscale import metrics
from jaxscale.config.loading import load_config
from jaxscale.experiment import build, phases
from jaxscale.experiment.optimizer import (
  follow_batch_size,
  make_optimizer,
  phase_rate,
  within_phase,
)
from jaxscale.run import adaptive_batch
from jaxscale.run.fit import fit
from support.errors import config_error
from support.trees import assert_same_bits

QUICK = dict(model="MLP", model__hidden="(32,)", mesh__data="8", epochs="4")
QUICK |= dict(schedule__warmup_epochs="0.5", log__every_steps="1", ema_decay="None")
QUICK |= dict(checkpoint__every_epochs="1", log__tensorboard="False")
RAMP = dict(phases__epochs="(0, 1, 2)", phases__batch_sizes="(64, 128, 256)")
ADAPTIVE = dict(phases="AdaptiveBatch", phases__multiple="32", batch_size="64")


def quick(**changes):
  dotted = {k.replace("__", "."): v for k, v in (QUICK | changes).items()}
  return load_config("configs/digits.py", dotted)


def test_plan_counts_examples_not_steps():
  got = phases.plan((0, 1, 3), (10, 30, 60), (1, 1, 2), (None, 8, 8), total_epochs=4, num_train=100)
  assert [(s.start, s.stop, s.examples) for s in got] == [(0, 10, 0), (10, 17, 100), (17, 19, 310)]
  assert [phases.examples_at(got, s) for s in (0, 9, 10, 11, 17, 19)] == [0, 90, 100, 130, 310, 430]
  assert [phases.phase_index(got, s) for s in (0, 9, 10, 16, 17, 19)] == [0, 0, 1, 1, 2, 2]


def test_the_step_of_so_many_examples():
  got = phases.plan((0, 1, 2), (10, 40, 20), (1,) * 3, (None,) * 3, total_epochs=3, num_train=100)
  for examples in range(0, 301):
    step = phases.step_at(got, examples)
    assert phases.examples_at(got, step) >= examples
    assert step == 0 or phases.examples_at(got, step - 1) < examples


def test_momentum_is_corrected_until_the_ramp_of_the_rate_ends(monkeypatch):
  """Warm-up of 2 epochs, 46 steps of 64; run as 23 of 64 and 11 of 128 and so on."""
  warmup = dict(optimizer__momentum_correction="warmup", schedule__warmup_epochs="2")
  config = quick(**RAMP, **warmup, batch_size="64")
  experiment = build.experiment(config)
  assert experiment.derived.warmup_steps == 45
  reported = []

  def noted(config, schedule, warmup, momentum, *rest):
    reported.append(warmup)
    return make_optimizer(config, schedule, warmup, momentum, *rest)

  monkeypatch.setattr(build, "make_optimizer", noted)
  build.at_phase(experiment, experiment.derived.phases[1])
  assert reported == [34]  # 23 x 64 + 11 x 128 = 2,880 = 45 x 64


def test_a_phase_without_room_is_left_out():
  got = phases.plan((0, 1, 1.1), (90, 90, 10), (1,) * 3, (None,) * 3, total_epochs=2, num_train=100)
  # Two steps of 90 pass epoch 1.1 already.
  assert [(s.ordinal, s.start, s.stop) for s in got] == [(0, 0, 2), (2, 2, 4)]


def test_the_schedule_goes_by_epochs_whatever_the_batch():
  base = lambda step: jnp.asarray(step, jnp.float32) / 40  # noqa: E731
  one, two = phases.plan((0, 1), (10, 40), (1, 1), (None,) * 2, total_epochs=4, num_train=100)
  inside = within_phase(base, two, 10, factor=2.0)
  # Step 10 + 3 has seen 100 + 120 examples: 22 steps of 10.
  assert float(inside(13)) == pytest.approx(2.0 * 22 / 40)
  assert float(within_phase(base, one, 10, 1.0)(7)) == pytest.approx(7 / 40)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("size", [64, 256, 1024])
def test_neutral_keeps_rate_an_example_and_time_constant(momentum, size):
  factor, new = follow_batch_size("neutral", size, 256, momentum)
  per_example = factor / (size * (1 - new))
  assert per_example == pytest.approx(1 / (256 * (1 - momentum)))
  if momentum:
    assert size / math.log(new) == pytest.approx(256 / math.log(momentum))


def test_neutral_changes_do_not_show_on_a_constant_gradient():
  """However the batch changes, as many examples move w as far."""

  def distance(sizes, examples=25_600):
    state, w, moved, before = None, jnp.zeros(()), 0, 0.9
    for size in sizes:
      factor, m = follow_batch_size("neutral", size, 256, 0.9)
      tx = optax.sgd(0.01 * factor, m)
      state = tx.init(w) if state is None else phases.scale_velocity(state, (1 - before) / (1 - m))
      before = m
      for _ in range(examples // size):
        updates, state = tx.update(jnp.ones(()), state)
        w = w + updates
      moved += examples
    return float(w)

  constant = distance([256, 256, 256])
  # A few per cent are the granularity of the first steps, from a velocity of 0.
  assert distance([256, 512, 1024]) == pytest.approx(constant, rel=0.002)
  assert distance([256, 512, 128]) == pytest.approx(constant, rel=0.002)
  jumped = distance([256, 256, 256]) * 1.02
  assert distance([256, 512, 1024]) != pytest.approx(jumped, rel=0.002)


def test_follow_rules():
  assert follow_batch_size("none", 512, 256, 0.9) == (1.0, 0.9)
  assert follow_batch_size("linear", 512, 256, 0.9) == (2.0, 0.9)
  assert follow_batch_size("sqrt", 1024, 256, 0.9) == (2.0, 0.9)


@pytest.fixture(scope="module")
def ramped(tmp_path_factory):
  import os

  os.chdir(build.__file__.rsplit("/", 3)[0])
  workdir = tmp_path_factory.mktemp("ramp")
  return fit(quick(**RAMP), workdir), workdir


@pytest.mark.slow
def test_a_batch_ramp_runs_and_follows_the_rate(ramped):
  result, workdir = ramped
  # 1,437 examples: 23 of 64, then of 128 to epoch 2, then of 256 to epoch 4.
  described = json.loads((workdir / "config.json").read_text())
  planned = described["derived"]["phases"]
  assert [(s["start"], s["batch_size"]) for s in planned] == [(0, 64), (23, 128), (34, 256)]
  assert result.summary["step"] == planned[-1]["stop"] == 46
  lines = metrics.read_json_lines(workdir / "metrics.jsonl")
  logged = [line for line in lines if "train/loss" in line]
  assert [x["step"] for x in logged] == [*range(1, 47)]
  # Linear in the batch: per example the rate is the schedule's.
  rates = {x["step"]: x["train/learning_rate"] for x in logged}
  assert rates[24] / rates[23] == pytest.approx(2, rel=0.1)
  assert rates[35] / rates[34] == pytest.approx(2, rel=0.1)
  assert result.summary["accuracy"] > 0.7


@pytest.mark.slow
def test_a_ramp_resumes_bit_for_bit(ramped, tmp_path):
  """Stopped in every phase, at its end, and resumed: the same parameters."""
  result, _ = ramped

  class Stopped(Exception):
    pass

  for stop in (10, 23, 30, 40):
    steps = []

    def log(self, step, values, real=build, stop=stop, steps=steps):
      steps.append(step)
      if step == stop:
        raise Stopped

    from jaxscale.run.reporter import Reporter

    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(Reporter, "trained", log)
      with pytest.raises(Stopped):
        fit(quick(**RAMP, checkpoint__every_epochs="0.01"), tmp_path)
  again = fit(quick(**RAMP), tmp_path)
  assert_same_bits(again.state, result.state)


@pytest.mark.slow
def test_damage_in_a_later_phase_goes_back_to_the_phase_before(ramped, tmp_path, capsys):
  """Steps 35 on are of the third phase; of its checkpoints, none is whole."""
  result, _ = ramped
  fit(quick(**RAMP, checkpoint__every_epochs="0.2", checkpoint__keep_last="60"), tmp_path)
  checkpoints = tmp_path / "checkpoints"
  kept = sorted(int(p.name) for p in checkpoints.iterdir() if p.name.isdigit())
  late = [step for step in kept if step > 30]
  assert late and min(kept) <= 30
  for step in late:
    for file in (checkpoints / str(step)).rglob("*"):
      if file.is_file() and file.stat().st_size > 200:
        file.write_bytes(file.read_bytes()[:100])
  capsys.readouterr()
  again = fit(quick(**RAMP), tmp_path)
  reported = capsys.readouterr().out
  assert "is damaged" in reported and "step 34  batch size is now 256" in reported
  assert_same_bits(again.state, result.state)


def test_short_phases_do_not_put_off_what_is_due():
  """Every 8 steps of 10, in phases of 3 and of 4 steps: by share of an interval."""
  starts = (0, 3, 0, 10), (3, 5, 30, 20), (5, 9, 70, 10)
  planned = [phases.Phase(*start, 1, None) for start in starts]
  steps = {10: 8, 20: 4}

  def due(phase):
    check = phases.every(planned, phase, lambda s: steps[s.batch_size])
    return [t for t in range(phase.start + 1, phase.stop + 1) if check(t)]

  # 3/8 and 2/4 of an interval, then 1/8 to make it whole; the last step is always.
  assert [due(phase) for phase in planned] == [[], [], [6, 9]]
  whole = [phases.Phase(0, 20, 0, 10, 1, None)]
  check = phases.every(whole, whole[0], lambda s: 3)
  assert [t for t in range(1, 21) if check(t)] == [3, 6, 9, 12, 15, 18, 20]


def test_neutral_ramp_follows_momentum_too():
  config = quick(**RAMP, phases__follow="neutral", batch_size="64")
  experiment = build.experiment(config)
  rates = [phase_rate(config, s) for s in experiment.derived.phases]
  assert [m for _, m in rates] == pytest.approx([0.9, 0.81, 0.6561])
  state = experiment.init_state()

  ones = jax.tree.map(lambda x: jnp.ones_like(x) if x.ndim else x, state.opt_state)
  first, second = experiment.derived.phases[:2]
  entered = build.enter_phase(config, first, second, state._replace(opt_state=ones))
  momenta = [x for x in jax.tree.leaves(entered.opt_state) if x.ndim]
  assert len(momenta) == len(jax.tree.leaves(state.params))
  for leaf in momenta:
    np.testing.assert_allclose(leaf, (1 - 0.9) / (1 - 0.81), rtol=1e-6)


@pytest.mark.slow
def test_a_batch_that_a_bn_span_does_not_fit_is_no_candidate(tmp_path, capsys):
  """8 rows per device share statistics at batch 64: not 12 of 96, 16 of 128."""
  cnn = dict(model="CNN", model__features="(4,)", model__dense="0", model__batch_norm="True")
  trials = dict(phases__trial_steps="1", phases__margin="9.0", phases__max_batch_size="128")
  settings = QUICK | ADAPTIVE | cnn | trials | dict(model__bn_span="8", epochs="1.1")
  del settings["model__hidden"]
  dotted = {k.replace("__", "."): v for k, v in settings.items()}
  fit(load_config("configs/digits.py", dotted), tmp_path)
  reported = capsys.readouterr().out
  assert "trial with batch size 128" in reported and "trial with batch size 96" not in reported
  assert json.loads((tmp_path / "batch_sizes.json").read_text()) == [64, 128]


TWO = dict(phases__epochs="(0, 1)")
NEUTRAL = dict(optimizer="AdamW", optimizer__lr="0.1", phases__follow="neutral")
ROWS = r"Phases.batch_sizes=100 .*; give 96 or 104"
MISTAKES = {
  "no start": (dict(phases__epochs="(1, 2)"), "add a phase at 0"),
  "order": (dict(phases__epochs="(0, 3, 2)"), "increasing order"),
  "count": (TWO | dict(phases__batch_sizes="(64,)"), "2 phases"),
  "neutral adam": (NEUTRAL | dict(phases__batch_sizes="(64,)"), "use SGD"),
  "adaptive lars": (dict(optimizer="LARS", phases="AdaptiveBatch"), "use SGD"),
  "rows": (TWO | dict(phases__batch_sizes="(64, 100)"), ROWS),
  "images": (TWO | dict(phases__image_sizes="(4, 8)"), "Digits cannot resize"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_one_line(mistake):
  changes, remedy = MISTAKES[mistake]
  with config_error(match=remedy):
    build.experiment(quick(**changes))


def test_candidates_are_cntks():
  sizes = adaptive_batch.candidates(512, 256, maximum=4096, multiple=64)
  assert sizes == [256, 384, 512, 704, 1024]
  assert adaptive_batch.candidates(256, 256, maximum=300, multiple=64) == [256]
  # A rate of a quarter: not below four times the initial size.
  sizes = adaptive_batch.candidates(1024, 256, maximum=8192, multiple=64, rate_change=0.25)
  assert sizes[0] == 1024 and sizes[-1] == 2048


def test_search_stops_at_the_first_loss_and_refuses_nan():
  losses = {64: 1.0, 128: 1.009, 256: 1.02, 512: 0.5}
  tried = []

  def trial(size):
    tried.append(size)
    return losses[size]

  assert adaptive_batch.search([64, 128, 256, 512], trial, 0.01, previous=64) == 128
  assert tried == [64, 128, 256]
  losses[128] = math.nan
  assert adaptive_batch.search([64, 128, 256], trial, 0.01, previous=64) == 64
  assert adaptive_batch.search([64], lambda s: math.nan, 0.01, previous=96) == 96


@pytest.mark.slow
def test_an_adaptive_run_grows_its_batch_and_resumes(tmp_path):
  trials = dict(phases__trial_steps="4", phases__margin="5.0", phases__max_batch_size="192")
  config = quick(**ADAPTIVE, **trials, epochs="3")
  result = fit(config, tmp_path / "a")
  chosen = json.loads((tmp_path / "a" / "batch_sizes.json").read_text())
  # A margin this wide takes the largest candidate: 64 sqrt(2), where the rate
  # has fallen to 0.95 of its peak, then at most twice that.
  assert chosen == [64, 96, 192]
  assert result.summary["outcome"] == "done"
  # Trials leave no trace: the run is the one that had these sizes from the start.
  fixed = RAMP | dict(phases__batch_sizes="(64, 96, 192)", phases__follow="neutral")
  same = fit(quick(**fixed, batch_size="64", epochs="3"), tmp_path / "b")
  assert_same_bits(result.state, same.state)
