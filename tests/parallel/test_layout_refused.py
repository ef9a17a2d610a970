"""Layouts that would be wrong, or change nothing in silence, are refused or logged."""

import dataclasses
import json
import re

import jax
import pytest

from jaxscale import cli
from jaxscale import config as cfg
from jaxscale.experiment import build
from jaxscale.planning.describe import describe
from jaxscale.run.workdir import claim_workdir
from support.configs import recorded, tiny_language
from support.errors import config_error

OWN = {
  "embed/table": "model, fsdp",
  "layers/(?:q|k|v|gate|up)/kernel": "stage, fsdp, model",
  "layers/(?:o|down)/kernel": "stage, model, fsdp",
  "layers/.*norm/scale": "stage, -",
  "head/norm/scale": "-",
  "head/kernel": "fsdp, model",
}


def made(devices=None, **fields):
  config = tiny_language(**fields)
  datasets = config.data.abstract(config.batch_size)
  return build.experiment(config, devices=devices, datasets=datasets)


def ruled(mesh, changes, **options):
  rules = tuple(f"{name}: {dims}" for name, dims in (OWN | changes).items())
  return made(mesh=mesh, layout=cfg.Layout(rules=rules, **options))


FSDP = {"mesh": cfg.Mesh(data=4, fsdp=2), "shard": "fsdp"}
MODEL = {"mesh": cfg.Mesh(data=4, model=2)}
STAGE = {"mesh": cfg.Mesh(data=4, stage=2)}
Q, O = list(OWN)[1:3]  # noqa: E741


RULES = [
  (MODEL, {Q: "stage, fsdp, -"}, "the model splits dim 2 of layers/gate/kernel"),
  (MODEL, {"embed/table": "-, model"}, "the model splits dim 0 of embed/table"),
  (MODEL, {"head/norm/scale": "model"}, "the model splits no dim of head/norm/scale"),
  (STAGE, {Q: "-, stage, -"}, "along stage the model splits dim 0 of "),
  (FSDP, {O: "fsdp, -, -"}, "dim 0 of layers/down/kernel counts layers"),
  (MODEL | {"model": "ring"}, {}, "with Layout.model='ring' this axis splits only tokens; wri"),
]


@pytest.mark.parametrize("layout, changes, says", RULES)
def test_rules_that_the_model_does_not_compute_with(layout, changes, says):
  with config_error(says):
    ruled(changes=changes, **layout)


def test_what_fsdp_splits_is_free():
  found = ruled(changes={O: "stage, model, -", "head/kernel": "-, model"}, **FSDP)
  assert found.layout is not None
  rest = found.layout.param_specs
  assert "fsdp" in rest["layers"]["q"]["kernel"]
  assert "fsdp" not in (*rest["layers"]["o"]["kernel"], *rest["head"]["kernel"])


IMAGES = dict(model=cfg.ViT(patch=4, num_layers=2, width=32, num_heads=4), data=cfg.Digits())
DIGITS = dict(model=cfg.MLP(), data=cfg.Digits())
MANY_CLASSES = cfg.Synthetic(num_examples=64, image_size=8, num_classes=21_841)
IN_BACKWARD = dict(layout=cfg.Layout(shard="fsdp", slow_axes="in_backward"))
REDUCED = cfg.Layout(shard="fsdp", reduce_in="dtype")
TWO, IN_DTYPE = cfg.Mesh(model=2), cfg.Layout(sum_in="dtype")
FOUR, EIGHT = dict(mesh=cfg.Mesh(fsdp=4)), dict(mesh=cfg.Mesh(data=1, fsdp=8))
TOKENS_TOO = cfg.Layout(model="layers_and_tokens")
# Refused when the config is made.
SETTINGS = [
  (dict(layout=cfg.Layout(shard="zero1")), "which has one device; set mesh.fsdp"),
  (FOUR, "Mesh.fsdp=4: splits nothing while Layout.shard"),
  (IMAGES | dict(mesh=TWO, layout=TOKENS_TOO), "splits tokens of text, and ViT takes images"),
  (dict(layout=cfg.Layout(schedule="1f1b")), "has no effect; set mesh.stage"),
  (dict(layout=cfg.Layout(model="ring")), "has no effect; set mesh.model"),
  (dict(layout=cfg.Layout(slow_axes="in_backward")), "set layout.shard to 'zero2'"),
  (DIGITS | dict(layout=cfg.Layout(loss_chunk=8)), "loss_chunk=8: MLP is not a stack of equal"),
  (DIGITS | dict(mesh=TWO), "Mesh.model=2: MLP is not a stack of equal layers"),
  (IN_BACKWARD | FOUR | dict(exchange=cfg.Int8()), "would bypass Config.exchange=Int8"),
  (IN_BACKWARD | EIGHT, "slow_axes='in_backward': has no effect; set mesh.replica or"),
  (dict(mesh=TWO, noise_scale=True), "the whole model on each"),
  (dict(mesh=cfg.Mesh(stage=2), sync=cfg.LocalSGD(sync_every_steps=4)), "=2 splits; use EveryStep"),
  (dict(layout=IN_DTYPE), "sum_in='dtype': has no effect"),
  (
    dict(layout=cfg.Layout(reduce_in="dtype")),
    "reduce_in='dtype': has no effect; set layout.shard",
  ),
  (EIGHT | dict(layout=REDUCED), "reduce_in='dtype': has no effect; set dtype to 'bfloat16'"),
  (dict(mesh=TWO, layout=IN_DTYPE), "set dtype to 'bfloat16' or 'float16' as well"),
]
ALONE = [
  (lambda: cfg.Mesh(data=-1, fsdp=-1), "only one can be -1"),
  (lambda: cfg.Layout(rules=("layers/.*: rows",)), "give 'PATTERN: AXIS, AXIS, ...'"),
  (lambda: cfg.Layout(rules=("layers/(: fsdp",)), "not a regular expression"),
  (lambda: cfg.Layout(rules=("head/kernel: model, model",)), "two dims; use it once"),
  (lambda: cfg.Layout(rules=("head/kernel: data, -",)), "for each dim fsdp, stage, model"),
]
# Refused when the model is built.
ONE_RULE = cfg.Layout(shard="fsdp", rules=("layers/.*: -, fsdp, -",))
HEADS = dict(mesh=cfg.Mesh(data=1, model=8), layout=cfg.Layout(model="all_to_all"))
STAGES = dict(mesh=cfg.Mesh(data=1, stage=8))
CLASSES = "Mesh.model=2 does not divide the 21841 classes of the head; set ViT.pad_cl"
MODELS = [
  (dict(mesh=cfg.Mesh(model=8)), "Mesh.model=8 does not divide Transformer.num_h"),
  (STAGES, "Mesh.stage=8 does not divide Transformer.num_layers=2; give a divisor"),
  (HEADS, "Transformer.num_heads=4; give a divisor, or layout.model='ring'"),
  (dict(mesh=cfg.Mesh(fsdp=8), layout=ONE_RULE), "embed/table: no rule matches"),
  (IMAGES | dict(data=MANY_CLASSES, mesh=TWO), CLASSES),
]


@pytest.mark.parametrize("make, says", ALONE)
def test_settings_of_one_part_that_cannot_be_are_refused(make, says):
  with config_error(says):
    make()


@pytest.mark.parametrize("fields, says", SETTINGS)
def test_settings_that_do_not_go_together_are_refused(fields, says):
  with config_error(says):
    tiny_language(**fields)


@pytest.mark.parametrize("fields, says", MODELS)
def test_a_model_that_cannot_be_split_so_is_refused(fields, says):
  config = tiny_language(**fields)
  with config_error(says):
    build.experiment(config)


def test_what_is_not_sent_is_not_rounded():
  for exchange in (cfg.OneBit(), cfg.HalfPrecision(), cfg.AllReduce(delayed=True)):
    fsdp = {"layout": cfg.Layout(shard="fsdp"), "exchange": exchange}
    with config_error("has nothing to send, because fsdp sums all"):
      made(mesh=cfg.Mesh(data=1, fsdp=8), **fsdp)
    assert made(mesh=cfg.Mesh(data=2, fsdp=4), **fsdp).layout is not None


def test_a_config_for_many_devices_runs_on_one():
  layout = cfg.Layout(shard="fsdp")
  fields = {"mesh": cfg.Mesh(data=1, fsdp=-1), "layout": layout}
  alone = made(jax.devices()[:1], **fields)
  (note,) = alone.notes
  assert note.startswith("Mesh.fsdp=-1 found one device, so that Layout.shard=")
  assert "layout.shard (along fsdp): none" in describe(alone)
  together = made(**fields)
  assert together.notes == () and together.layout.shard == "fsdp"
  with config_error(match=r"which has one device; set mesh\.fsdp"):
    tiny_language(mesh=cfg.Mesh(fsdp=1), layout=layout)


def test_describe_touches_no_data(monkeypatch, capsys, tmp_path):
  def read(config):
    raise AssertionError("it was read")

  monkeypatch.setattr(build, "make_data", read)
  argv = ["describe", "--config", "configs/text.py", f"--workdir={tmp_path / 'run'}"]
  argv += ["--config.model.num_layers=1", "--config.mesh.data=4"]
  argv += ["--config.mesh.model=2", "--config.dtype=bfloat16"]
  assert cli.main(argv) == 0
  page = capsys.readouterr().out
  assert "layers/q/kernel" in page and "XLA on CPU sends bfloat16 as float32" in page
  assert not (tmp_path / "run").exists()


def test_describe_says_what_waits_on_the_host():
  waits = cfg.Layout(shard="fsdp", optimizer="host")
  page = describe(made(mesh=cfg.Mesh(data=1, fsdp=8), layout=waits))
  rows = dict(re.findall(r"^(\S[^:\n]*?) +([\d.]+)$", page, re.M))
  on_host, on_device = rows["opt state, on the host"], rows["opt state"]
  assert float(on_host) == pytest.approx(2 * float(rows["params"]), rel=0.05)
  assert float(on_device) < 0.05 * float(on_host)


def test_a_run_resumes_as_a_pipeline(tmp_path):
  """A pipeline needs micro-batches, with which these models compute the same."""
  (tmp_path / "checkpoints" / "1").mkdir(parents=True)
  before = tiny_language()
  (tmp_path / "config.json").write_text(json.dumps(recorded(before)))
  pipeline = dict(mesh=cfg.Mesh(data=4, stage=2), layout=cfg.Layout(schedule="1f1b"))
  claim_workdir(tmp_path, dataclasses.replace(before, **pipeline, accumulate_steps=4))
  images = {"model": cfg.CNN(), "data": cfg.Digits()}
  before = tiny_language(**images)
  (tmp_path / "config.json").write_text(json.dumps(recorded(before)))
  with config_error(match="accumulate_steps is 1 in the workdir and 4 now"):
    claim_workdir(tmp_path, tiny_language(**images, accumulate_steps=4))
