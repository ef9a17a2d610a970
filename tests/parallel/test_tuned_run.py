"""Runs with frozen parameters and LoRA, as they are configured: resume, predict, export."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import jaxscale as jxs
from jaxscale import config as cfg
from jaxscale import hlo, models, weights
from jaxscale.config.loading import load_config
from jaxscale.errors import ConfigError
from jaxscale.experiment import build
from jaxscale.models import lora
from jaxscale.optim.tree_paths import path_name
from jaxscale.planning.describe import describe
from jaxscale.run.export import export
from support.configs import small_config
from support.images import write_folder
from support.paths import ROOT
from support.trees import assert_same_bits, worst_leaf

CONSTANT = cfg.Steps(boundaries=(), warmup_epochs=0)
LORA = cfg.LoRA(rank=4, targets="layers/(q|down)/kernel")
TOKENS = np.arange(128, dtype=np.int32).reshape(2, 64)


def language(**changed):
  config = load_config(str(ROOT / "tests/support/tiny_language.py"))
  split = dict(mesh=cfg.Mesh(data=2, fsdp=4), layout=cfg.Layout(shard="fsdp"))
  length = dict(steps=4, epochs=None, schedule=CONSTANT)
  rare = dict(
    evaluation=cfg.Evaluation(every_epochs=None, every_steps=4),
    checkpoint=cfg.Checkpoint(every_epochs=None, every_steps=2),
  )
  first = dict(optimizer=cfg.AdamW(lr=1e-2))
  return dataclasses.replace(config, **(first | split | length | rare | changed))


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("adapted")
  return jxs.fit(language(adapter=LORA), workdir), workdir


def by_path(tree):
  return {path_name(path): x for path, x in jax.tree.leaves_with_path(tree)}


def test_only_the_adapter_has_an_average_and_moments(adapted):
  state = adapted[0].state
  own = {f"layers/{n}/kernel_lora_{x}" for n in ("q", "down") for x in "ab"}
  assert set(by_path(state.average[0])) == own == set(by_path(state.opt_state[0][0].mu))
  evaluated = state.evaluated()[0]
  assert jax.tree.structure(evaluated) == jax.tree.structure(state.params)


def test_a_run_resumes_bit_for_bit_and_refuses_other_parts(adapted, tmp_path):
  result, workdir = adapted
  jxs.fit(language(adapter=LORA, steps=2), tmp_path)
  again = jxs.fit(language(adapter=LORA, steps=4), tmp_path)
  assert_same_bits(again.state, result.state)
  for changed in (dict(trainable="norm"), dict(adapter=cfg.LoRA(rank=4))):
    with pytest.raises(ConfigError, match="belongs to a different experiment"):
      jxs.fit(language(**(dict(adapter=LORA) | changed)), workdir)


@pytest.mark.parametrize("take", ["average", "params"])
def test_the_export_has_merged_kernels(adapted, tmp_path, take):
  result, workdir = adapted
  expected = jxs.load(workdir, take=take).predict(TOKENS).outputs
  path = tmp_path / "model.safetensors"
  export(workdir, path, take=take)
  made = build.experiment(language(init_from=str(path)))
  params = made.init_state().params
  whole = result.state.evaluated()[0] if take == "average" else result.state.params
  assert worst_leaf(params, lora.merged(whole, LORA.scale)) <= 1e-6
  base = build.experiment(language()).init_state().params
  assert_same_bits(params["layers"]["k"], base["layers"]["k"])
  assert (
    np.abs(np.asarray(params["layers"]["q"]["kernel"] - base["layers"]["q"]["kernel"])).max() > 0
  )
  trained = jxs.load(workdir, take=take)
  plain = dataclasses.replace(
    trained, model=made.model, params=params, layout=made.layout, mesh=made.mesh
  )
  found = plain.predict(TOKENS).outputs
  assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


def test_an_adapter_is_written_as_peft_reads_it(adapted, tmp_path):
  state, path = adapted[0].state.evaluated()[0], tmp_path / "adapter_model.safetensors"
  export(adapted[1], path, "peft")
  found = weights.safetensors.read_index(path)
  name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
  for layer in range(4):
    for factor in "AB":
      array = weights.safetensors.view(found[name.format(layer, factor)])
      np.testing.assert_array_equal(
        array.T, state["layers"]["q"][f"kernel_lora_{factor.lower()}"][layer]
      )
  assert len(found) == 2 * 2 * 4
  fields = json.loads((tmp_path / "adapter_config.json").read_text())
  assert fields["target_modules"] == ["down_proj", "q_proj"]
  assert (fields["r"], fields["lora_alpha"], fields["use_rslora"]) == (4, 16, False)
  with pytest.raises(ConfigError, match="has a name that PEFT does not read"):
    export(adapted[1], tmp_path / "x.safetensors", "peft")


def test_frozen_parameters_send_nothing_and_have_no_state():
  whole, head = (build.experiment(language(trainable=p, ema_decay=None)) for p in (None, "^head/"))
  sent, kept = {}, {}
  for made in (whole, head):
    state = made.abstract_state()
    table = hlo.collectives(made.lower_train_step(state).compile(), made.mesh)
    sums = [hlo.total(table, kind).wire_bytes for kind in ("all-reduce", "reduce-scatter")]
    sent[made.trainable] = sum(sums)
    kept[made.trainable] = sum(x.size for x in jax.tree.leaves(state.opt_state))
  share = 8224 / 53_536
  assert kept["^head/"] / kept[None] == pytest.approx(share, rel=1e-2)
  assert sent["^head/"] / sent[None] == pytest.approx(share, rel=0.15)
  (note,) = (line for line in head.notes if line.startswith("trained: "))
  assert note.startswith("trained: 8,224 of 53,536 parameters (2 of 12 arrays); frozen: 181.2 KB")
  assert note in describe(head)


@pytest.mark.parametrize(
  ("changed", "problem"),
  [
    (dict(trainable="^tail/"), "Config.trainable='^tail/' matches no parameter; paths are, e.g., "),
    (
      dict(trainable="^head/", optimizer=cfg.AdamW(lr=1.0, include="layers/")),
      "AdamW.include='layers/' matches only frozen parameters; trained are, e.g., head/kernel",
    ),
    (dict(adapter=cfg.LoRA(targets="Dense")), "LoRA.targets=Dense matches no parameter; paths"),
  ],
)
def test_patterns_that_select_nothing_are_refused(changed, problem):
  with pytest.raises(ConfigError) as e:
    build.experiment(language(**changed))
  assert problem in str(e.value)


def test_layer_decay_orders_the_trained_layers_alone():
  order = ("^embed/", "^layers/", "^head/")
  changed = dict(layer_decay=0.5, layer_order=order)
  build.experiment(language(trainable="^(head|layers)/", **changed))
  with pytest.raises(ConfigError, match="must match exactly one"):
    build.experiment(language(**(changed | dict(layer_order=order[1:]))))
  made = build.experiment(language(trainable="^head/", **(changed | dict(layer_order=order[2:]))))
  assert jax.tree.leaves(made.abstract_state().opt_state)


def test_workers_of_local_updates_train_a_part_as_synchronous_steps_do():
  """With SGD without momentum, one local step and a mean are one synchronous step."""
  changed = dict(optimizer=cfg.SGD(lr=0.1, momentum=0.0), steps=3, schedule=CONSTANT)
  made, last = small_config(epochs=None, trainable="Dense_1", **changed), []
  for sync in (cfg.EveryStep(), cfg.LocalSGD(sync_every_steps=1)):
    experiment = build.experiment(dataclasses.replace(made, sync=sync))
    state = experiment.init_state()
    before, rng = jax.device_get(state.params), np.random.default_rng(0)
    for _ in range(3):
      batch = {
        name: jax.device_put(rng.integers(0, 10, x.shape).astype(x.dtype), x.sharding)
        for name, x in experiment.abstract_batch().items()
      }
      state, _ = experiment.train_step(state, batch)
    last.append(jax.device_get(state.params))
    assert_same_bits(last[-1]["Dense_0"], before["Dense_0"])
    assert np.any(last[-1]["Dense_1"]["kernel"] != before["Dense_1"]["kernel"])
  assert worst_leaf(*last) <= 1e-6


@pytest.mark.parametrize("part", ["lora", pytest.param("head", marks=pytest.mark.slow)])
def test_a_vit_is_tuned_on_a_folder_of_images(part, tmp_path):
  """The recipe, with a small network of timm's names that knows other classes."""
  for split, count in (("train", 20), ("val", 4)):
    write_folder(tmp_path / "images", split, count)
  sizes = {"model.patch": 8, "model.width": 32, "model.num_layers": 2, "model.num_heads": 2}
  length = {"batch_size": 16, "epochs": 4, "schedule.warmup_epochs": 0, "log.plot": False}
  image = {"data.path": tmp_path / "images", "data.image_size": 16, "data.augment": "none"}
  path = tmp_path / "vit.safetensors"
  stack = models.make_vit(
    image_shape=(16, 16, 3), num_classes=7, patch=8, width=32, num_layers=2, num_heads=2
  )
  base = stack.init(jax.random.key(1))
  weights.export_safetensors(path, base, naming="timm")
  changed = sizes | length | image | {"init_from": path, "optimizer.lr": 0.02}
  recipe = str(ROOT / f"configs/vit_finetune.py:{part}")
  config = load_config(recipe, {name: str(x) for name, x in changed.items()})
  result = jxs.fit(config, tmp_path / "run")
  assert result.summary["accuracy"] == 1.0  # the classes differ in brightness
  assert_same_bits(result.state.params["layers"]["q"]["bias"], base["layers"]["q"]["bias"])
  assert ("kernel_lora_a" in result.state.params["layers"]["o"]) == (part == "lora")
  to = tmp_path / "tuned.safetensors"
  export(tmp_path / "run", to, "timm")
  assert weights.safetensors.read_index(to)["head.weight"].shape == (2, 32)
  problem = "supports only language models" if part == "lora" else "needs a run with"
  with pytest.raises(ConfigError, match=f"--naming=peft {problem}"):
    export(tmp_path / "run", tmp_path / "adapter_model.safetensors", "peft")
