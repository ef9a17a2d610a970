"""A run on another number of devices: micro-batches, errors, log lines."""

import dataclasses
import json

import jax
import pytest

from jaxscale.config.loading import load_config
from jaxscale.experiment import build
from jaxscale.experiment.derive import derive, device_summary
from jaxscale.experiment.microbatches import micro_batches
from jaxscale.jobs.preflight.devices import fits
from jaxscale.run import adaptive_batch
from jaxscale.run.branches import Branches
from jaxscale.run.workdir import claim_workdir, describe, describe_text, start_devices
from support.digits import BATCH, assert_same, cnn, run
from support.errors import config_error

CNN = {"model": "CNN", "model.features": "(4,)", "model.dense": "0", "model.batch_norm": "True"}


def config(**changes):
  dotted = {k.replace("__", "."): str(v) for k, v in changes.items()}
  return load_config("configs/digits.py", {"mesh.data": "-1", **dotted})


def over(chosen, devices, start, sizes=(), examples=4096):
  return derive(chosen, examples, 360, devices, sizes, start)


def test_none_is_larger_than_at_the_start_and_none_smaller_than_need_be():
  """Against the words of the rule, in every case there is."""
  for batch in (24, 60, 64, 96):
    for start in (n for n in range(1, 13) if batch % n == 0):
      for asked in (n for n in (1, 2, 3) if batch % (start * n) == 0):
        for devices in range(1, start):
          do = [
            n
            for n in range(asked, batch + 1)
            if batch % (devices * n) == 0 and batch / (devices * n) <= batch / (start * asked)
          ]
          assert micro_batches(batch, asked, devices, start) == min(do, default=None)
  # On more devices as many as were asked for, if there is an example for each.
  assert [micro_batches(1024, 4, devices, 16) for devices in (64, 512)] == [4, None]


def test_every_phase_has_its_own():
  sizes = dict(phases__epochs="(0, 1, 2)", phases__batch_sizes="(64, 128, 256)")
  ramp = config(**sizes, phases__accumulate_steps="(1, 1, 2)")
  at_start, fewer = over(ramp, 8, 8), over(ramp, 2, 8)
  assert [s.accumulate_steps for s in fewer.phases] == [4, 4, 8]
  micros = [s._replace(accumulate_steps=0) for s in fewer.phases]
  assert micros == [s._replace(accumulate_steps=0) for s in at_start.phases]
  assert (fewer.start_devices, fewer.num_devices) == (8, 2)
  assert fewer.micro_batch_size == at_start.micro_batch_size == 8
  assert fewer.device_batch_size == 32
  same = {"num_devices", "row_blocks", "start_devices", "device_batch_size", "phases"}
  for name in set(fewer._fields) - same - {"eval_batch_size"}:
    assert getattr(fewer, name) == getattr(at_start, name), name
  assert device_summary(ramp, fewer) == (
    "2 devices, 8 at the start: 4, 4 and 8 micro-batches per step instead of 1, 1 and "
    "2, so that a device still holds 8, 16 and 16 examples at a time; the global batch "
    "and the order of examples stay the same"
  )
  assert over(ramp, 8, 8) == over(ramp, 8, None) and device_summary(ramp, at_start) is None


STAYS = "; the global batch and the order of examples stay the same"
SPLIT = "2 micro-batches per step instead of 1, so that a device still holds 64 examples at a time"
LESS = "1 micro-batch per step, as before, a device holds 8 examples at a time, 32 before"
TWELVE = "a device holds 8 examples at a time, 12 before; "
NORM_CHANGES = "BatchNorm statistics now cover a different number of examples"
STORIES = [
  (dict(batch_size=1024), 8, 16, f"8 devices, 16 at the start: {SPLIT}{STAYS}"),
  (dict(batch_size=64), 1, 2, "1 device, 2 at the start: 2 micro-batches"),
  (dict(batch_size=64), 8, 2, f"8 devices, 2 at the start: {LESS}{STAYS}"),
  (dict(batch_size=96), 3, 8, f"4 micro-batches per step instead of 1, {TWELVE}"),
  (dict(batch_size=96, **CNN), 3, 8, f"stay the same; {NORM_CHANGES}"),
]


@pytest.mark.parametrize("changes, devices, start, wanted", STORIES)
def test_what_it_says(changes, devices, start, wanted):
  chosen = config(**changes)
  reported = device_summary(chosen, over(chosen, devices, start)) or ""
  assert wanted in reported and "\n" not in reported
  assert ("BatchNorm" in reported) == ("BatchNorm" in wanted)


RAMP = dict(phases__epochs="(0, 1)", phases__batch_sizes="(96, 64)")
OVER = "batch_size=64 cannot be divided over"
BEGAN = "and a resumed run keeps the batch size .* on 8; use 1, 2, 4 or 8 devices, or"
KEPT = "same BatchNorm statistics and noise scale cannot be divided over 1 device, .*use 2, 4"
NORM = dict(noise_scale=True, **CNN, model__bn_span="global")
REFUSALS = [
  ({}, 3, 8, f"{OVER} 3 devices, {BEGAN} a different --workdir"),
  (dict(accumulate_steps=4), 32, 8, "in 4 micro-batches cannot be divided over 32 devices"),
  (RAMP, 6, 8, f"{OVER} 6 devices.* use 1, 2, 4 or 8 devices"),
  (dict(mesh__replica=2), 6, 8, "use 2, 4 or 8 devices"),
  (dict(batch_size=4096), 3, 1024, "use 1, 2, 4, 8, 16 or 32 devices"),
  (NORM, 1, 8, f"{KEPT} or 8 devices"),
]


@pytest.mark.parametrize("changes, devices, start, wanted", REFUSALS)
def test_where_it_cannot_be_divided_one_line_says_what_would_do(changes, devices, start, wanted):
  chosen = config(**{"batch_size": 64} | changes)
  with config_error(match=wanted) as error:
    over(chosen, devices, start)
  reported = str(error.value).split("use ")[1].split(" devices")[0]
  for number in reported.replace(" or ", ", ").split(", "):
    over(chosen, int(number), start)


def test_a_grid_that_does_not_fit_is_reported_by_the_grid():
  with config_error(match=r"Mesh.replica=2.* the 3 devices"):
    over(config(batch_size=96, mesh__replica=2), 3, 8)


# bn_span, devices, of 8 -> micro-batches of a batch of 64. Of 32 on two devices 4 x 8 rows
# are not to be had at a time: 2 x 16.
SPANS = [("device", 2, 4), (4, 2, 4), (16, 4, 2), (16, 2, 4), (32, 2, 2), (32, 1, 2)]
SPANS += [("global", 4, 1), (64, 2, 1)]


@pytest.mark.parametrize("span, devices, wanted", SPANS)
def test_batch_norm_keeps_as_many_examples(span, devices, wanted):
  chosen = config(batch_size=64, **CNN, model__bn_span=span)
  derived = over(chosen, devices, 8)
  assert derived.phases[0].accumulate_steps == wanted
  if derived.micro_batch_size != 8:
    held = f"a device holds {derived.micro_batch_size} examples at a time, 8 before"
    assert held in (device_summary(chosen, derived) or "")


def test_a_model_without_batch_norm_needs_no_span_and_the_noise_scale_two_gradients():
  chosen = config(batch_size=64, model="CNN", model__bn_span="global")
  assert over(chosen, 2, 8).phases[0].accumulate_steps == 4
  chosen = config(batch_size=64, noise_scale=True)
  assert over(chosen, 1, 2).phases[0].accumulate_steps == 2


@pytest.mark.slow
def test_batch_norm_of_a_device_sees_the_same_examples():
  """4 devices, or 2 with 2 micro-batches: parameters and running averages."""
  fns, steps = cnn(convs_per_stage=1, dropout=0.5, batch_norm=True), 10
  wanted = run(fns, "lars", num_devices=4, steps=steps)
  micros = micro_batches(BATCH, 1, 2, 4) or 0
  got = run(fns, "lars", num_devices=2, num_microbatches=micros, steps=steps)
  assert_same(got, wanted)
  larger = run(fns, "lars", num_devices=2, steps=steps)
  with pytest.raises(AssertionError):  # that of larger micro-batches is another
    assert_same(larger, wanted, tolerance=1e-5)


def test_sizes_that_an_adaptive_run_chose_resume():
  chosen = config(batch_size=64, phases="AdaptiveBatch", phases__every_epochs=1)
  derived = over(chosen, 2, 8, sizes=(64, 96, 192))
  assert [s.accumulate_steps for s in derived.phases] == [4] * 4
  assert [s.batch_size for s in derived.phases] == [64, 96, 192, 192]
  assert [s.is_decided for s in derived.phases] == [True] * 3 + [False]
  reported = "so that a device still holds 8, 12, 24 and 24 examples"
  assert reported in (device_summary(chosen, derived) or "")


ADAPTIVE = [(8, 8, 24), (16, 8, 48), (32, 8, 96), (4, 8, 24), (5, 8, 120)]


@pytest.mark.parametrize("start, devices, wanted", ADAPTIVE)
def test_an_adaptive_run_tries_what_it_would_have_tried(monkeypatch, start, devices, wanted):
  """Multiples of 24 and of the devices at the start; and what divides over these."""
  adaptive = dict(phases="AdaptiveBatch", phases__multiple=24, model="MLP", mesh__data=devices)
  experiment = build.experiment(config(batch_size=480, **adaptive), start)
  found = []

  def candidates(previous, initial, *, multiple, **_):
    found.append(multiple)
    return [previous]

  monkeypatch.setattr(adaptive_batch, "candidates", candidates)
  state = experiment.init_state()
  adaptive_batch.choose(Branches(experiment, state, lambda tried: iter(())))
  assert found == [wanted]


@pytest.fixture
def chosen():
  return config(batch_size=64, model="MLP")


@pytest.fixture
def began(tmp_path):
  """Write the files of a run on a number of devices; return the workdir."""

  def write(chosen, devices, saved=True, **derived):
    described = describe(build.experiment(chosen, devices))
    described["derived"] |= {"num_devices": devices, "start_devices": devices}
    described["derived"] |= derived
    described["derived"] = {k: v for k, v in described["derived"].items() if v is not None}
    (tmp_path / "config.json").write_text(json.dumps(described))
    if saved:
      (tmp_path / "checkpoints" / "12").mkdir(parents=True, exist_ok=True)
    return tmp_path

  return write


def test_where_a_run_began_is_kept(began, chosen):
  assert start_devices(began(chosen, 16), chosen) == 16
  # Directories of before it was written down have the number of devices alone.
  assert start_devices(began(chosen, 16, start_devices=4), chosen) == 4
  assert start_devices(began(chosen, 4, start_devices=None), chosen) == 4


def test_what_has_not_saved_begins_anew_on_the_most_it_had(began, chosen):
  assert start_devices(began(chosen, 16, saved=False), chosen) == 16
  assert start_devices(began(chosen, 4, saved=False), chosen) == jax.device_count()


def test_another_experiment_or_none_has_not_begun(began, chosen, tmp_path):
  assert start_devices(tmp_path, chosen) is None
  workdir = began(chosen, 16)
  other = dataclasses.replace(chosen, batch_size=128)
  assert start_devices(workdir, other) is None
  micros = dataclasses.replace(chosen, accumulate_steps=2)
  assert start_devices(workdir, micros) is None
  with config_error(match="accumulate_steps is 1 in the workdir and 2 now"):
    claim_workdir(workdir, micros)
  for broken in ("{", "[]", '{"derived": {}}', '{"derived": {"num_devices": null}}'):
    (workdir / "config.json").write_text(broken)
    assert start_devices(workdir, chosen) is None


def test_config_json_and_the_person_who_reads_have_the_numbers(began, chosen, tmp_path):
  experiment = build.experiment(chosen, start_devices(began(chosen, 16), chosen))
  written = describe(experiment)
  assert written["config"]["accumulate_steps"] == 1  # the setting
  assert written["derived"]["phases"][0]["accumulate_steps"] == 2
  numbers = {k: written["derived"][k] for k in ("start_devices", "num_devices")}
  assert numbers == {"start_devices": 16, "num_devices": 8}
  reported = describe_text(experiment, tmp_path)
  assert reported.count("8 devices, 16 at the start: 2 micro-batches per step") == 1
  assert experiment.lower_train_step()  # and it is what the step is made of


def test_the_preflight_of_a_run_that_resumes_knows_where_it_began(began):
  """72 examples over 8 devices are 3 micro-batches of 3, not 2."""
  changes = {"batch_size": "72", "accumulate_steps": "2", "model": "MLP"}
  workdir = began(config(**changes), 12)
  asked = {"config": "configs/digits.py", "overrides": changes}
  assert fits(**asked, workdir=str(workdir))["bytes"] > 0
  error = fits(**asked, workdir=str(workdir / "other"))["error"]
  assert "not divisible by 8 devices x 2 accumulate_steps" in error
