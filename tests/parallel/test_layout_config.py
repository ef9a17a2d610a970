"""Rules of layouts, and what `jaxscale describe` prints of one."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxscale import config as cfg
from jaxscale import models, optim
from jaxscale.experiment import build
from jaxscale.mesh import MeshShape, host_shard, make_mesh, mesh_shape
from jaxscale.models import decoder, vision_transformer
from jaxscale.parallel import Rule, largest, make_layout, partition, rules
from jaxscale.parallel.placement import opt_state_specs
from jaxscale.parallel.specs import replicated_layout
from jaxscale.planning.describe import describe
from support.configs import tiny_language
from support.errors import config_error
from support.stack_layouts import stack_layout

LANGUAGE = dict(vocab_size=256, num_layers=2, width=32, num_heads=4, hidden=64)
SIZES = {"replica": 1, "data": 1, "fsdp": 2, "model": 4}


def shapes(**leaves):
  return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in leaves.items()}


def test_rules_split_what_they_name():
  rules = [Rule("w.", ("fsdp", "model")), Rule("b", ("stage",))]
  specs = partition(shapes(w1=(4, 8), w2=(2, 4), b=(3,)), rules, SIZES)
  # The mesh has no axis `stage`.
  assert specs == {"w1": P("fsdp", "model"), "w2": P("fsdp", "model"), "b": P(None)}


DIVIDES_NOT = "Mesh.model=4 does not divide dim 1 of w, (4, 6); give a divisor of 6"


def test_a_parameter_must_have_one_rule_that_fits():
  params = {"b": shapes(x=(3,)), **shapes(w=(4, 6))}
  whole = Rule("b/x", (None,))
  for says, *fitting in (
    ("b/x: no rule matches this parameter of shape (3,)", Rule("w", ("fsdp", None))),
    (
      "b/x: '.*' and 'b/x' match this parameter",
      Rule(".*", (None,)),
      whole,
      Rule("w", (None, None)),
    ),
    ("w has the shape (4, 6)", Rule("w", ("fsdp",)), whole),
    (DIVIDES_NOT, Rule("w", (None, "model")), whole),
  ):
    with config_error(says):
      partition(params, fitting, SIZES)


def test_the_largest_dim_is_split_and_small_ones_stay_whole():
  dims = largest("fsdp")
  assert dims((3, 3, 64, 128), {"fsdp": 8}) == (None, None, None, "fsdp")
  assert dims((2048, 1001), {"fsdp": 8}) == ("fsdp", None)
  assert dims((1001, 999), {"fsdp": 8}) == (None, None)
  assert dims((64,), {"fsdp": 8}) == (None,)


def test_every_model_has_rules_for_all_its_parameters():
  lm = models.make_transformer(**LANGUAGE, qk_norm=True, qkv_bias=True)
  layers = dict(width=32, num_layers=2, num_heads=4)
  vit = models.make_vit(image_shape=(8, 8, 3), num_classes=8, patch=4, **layers)
  sizes = dict.fromkeys(("fsdp", "stage", "model"), 2)
  for stack, sharding in ((lm, decoder.SHARDING), (vit, vision_transformer.SHARDING)):
    own = [rules.Rule(*rule) for rule in sharding]
    params = jax.eval_shape(stack.init, jax.random.key(0))
    specs = partition(params, own, sizes)
    for name in ("q", "k", "v", "up"):
      assert specs["layers"][name]["kernel"] == P("stage", "fsdp", "model")
    for name in ("o", "down"):
      assert specs["layers"][name]["kernel"] == P("stage", "model", "fsdp")
    assert specs["head"]["kernel"] == P("fsdp", "model")


def test_the_state_of_an_optimizer_is_sharded_like_its_parameters():
  *_, layout = stack_layout({"data": 1, "fsdp": 2, "model": 4}, {"shard": "zero1"})
  assert layout.param_specs["layers"]["q"] == P(None, None, "model")
  stacked = optim.matching("^layers/")
  adam, *rest = opt_state_specs(layout, optim.lamb(1e-3, stacked=stacked))
  assert adam.mu == adam.nu == layout.opt_specs
  assert adam.mu["layers"]["q"] == P(None, "fsdp", "model")
  assert adam.count == P() and set(jax.tree.leaves(rest)) == {P()}


def test_axes_that_would_compute_the_same_are_refused():
  with config_error(match=r"Mesh\.model=4 makes devices compute the same"):
    replicated_layout(make_mesh(data=2, model=4))
  params = shapes(w=(8, 8))
  rules = [Rule("w", ("fsdp", None))]
  with config_error(match=r"Mesh\.model=4 splits nothing of this model"):
    make_layout(make_mesh(data=2, model=4), params, rules)
  with config_error(match="needs several devices along the axis fsdp"):
    make_layout(make_mesh(data=8), params, rules, shard="fsdp")


def test_the_grid():
  assert mesh_shape(16, data=2, fsdp=-1, model=2) == MeshShape(1, 2, 4, 1, 2)
  assert make_mesh(data=2, fsdp=2, model=2).axis_names == ("replica", "data", "fsdp", "model")
  assert host_shard(make_mesh(data=1, stage=2, model=4)) == (0, 1)
  with config_error(match=r"Mesh.replica=1, Mesh.data=3, Mesh.model=2 must"):
    mesh_shape(8, data=3, model=2)


@pytest.mark.parametrize("way", ["ring", "all_to_all", "layers_and_tokens"])
def test_no_token_is_left_out(way):
  split = dict(mesh=cfg.Mesh(model=4), layout=cfg.Layout(model=way))
  config = tiny_language(**split, data=cfg.Text(sequence_length=18))
  experiment = build.experiment(config)
  with config_error(match=r"tokens=18 .* the 4 devices of 'model'"):
    experiment.lower_train_step()


def test_describe_says_what_every_device_holds_and_sends():
  mesh = cfg.Mesh(data=2, fsdp=2, model=2)
  layout = cfg.Layout(shard="fsdp")
  page = describe(build.experiment(tiny_language(mesh=mesh, layout=layout)))
  assert "8 x cpu as replica 1 x data 2 x fsdp 2 x model 2" in page
  lines = {line.split()[0]: line for line in page.splitlines() if line.strip()}
  q = lines["layers/q/kernel"]
  assert "2x32x32" in q and "-, fsdp, model" in q and q.endswith("0.002")
  assert lines["head/norm/scale"].split()[3] == "whole"
  params = jax.eval_shape(models.make_transformer(**LANGUAGE).init, jax.random.key(0))
  count = sum(x.size for x in jax.tree.leaves(params))
  assert f"{count:,} parameters" in page
  found = re.findall(r"^([\w-]+) +([\w,]+) +f32 +(\d+)", page, re.M)
  kinds = {(kind, axes) for kind, axes, _ in found}
  assert {("all-gather", "fsdp"), ("reduce-scatter", "fsdp")} <= kinds
  assert ("all-reduce", "model") in kinds and ("all-reduce", "data") in kinds
  assert "?" not in page.split("collectives")[1].replace("overlap", "")
