"""What is stored for the backward pass, and loops over layers, change no loss."""

import functools
import math
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from jaxscale import config as cfg
from jaxscale import models
from jaxscale.data.dataset import DatasetInfo
from jaxscale.experiment import build
from jaxscale.experiment import remat as choice
from jaxscale.models.remat import INPUT, REMAT, functions_with_remat
from jaxscale.parallel.stored import POLICIES, layer_bytes, step_bytes
from support import parity_table
from support.cases import all_slow_except
from support.configs import small_config, tiny_language
from support.errors import config_error
from support.parity_table import OPTIMIZERS, Case, runs
from support.steps import on_mesh

FSDP, STAGES = {"data": 1, "fsdp": 8}, {"data": 2, "stage": 2}
CASES = {
  f"{remat}, {unroll}": Case({"data": 1}, how={"remat": remat, "unroll": unroll})
  for remat in REMAT
  for unroll in (1, 2, "all")
}
CASES |= {
  f"fsdp, {remat}, {unroll}": Case(FSDP, {"shard": "fsdp"}, how={"remat": remat, "unroll": unroll})
  for remat, unroll in (("none", "all"), ("dots_attention", "all"), ("full", "all"), ("dots", 3))
}
CASES["zero-2, none, all"] = Case(FSDP, {"shard": "zero2"}, how={"unroll": "all"})
CASES |= {
  f"{schedule}, {remat}, all": Case(STAGES, (), schedule, 4, how={"remat": remat, "unroll": "all"})
  for schedule, remat in (("gpipe", "dots_attention"), ("1f1b", "full"), ("1f1b", "none"))
}


@pytest.fixture
def twenty_steps(monkeypatch):
  monkeypatch.setattr(parity_table, "STEPS", 20)
  parity_table.batches.cache_clear()
  yield
  parity_table.batches.cache_clear()


@functools.cache
def plain():
  return runs(CASES["none, 1"], "float32", None)[0]


@pytest.mark.parametrize(
  "name", all_slow_except(CASES, "dots_attention, all", "fsdp, dots_attention, all")
)
def test_losses_of_20_steps(name, twenty_steps):
  found, wanted = runs(CASES[name], "float32", None)[0], plain()
  assert len(found.losses) == 20
  for optimizer in OPTIMIZERS:
    losses = ([step[optimizer] for step in run.losses] for run in (found, wanted))
    np.testing.assert_allclose(*losses, rtol=1e-6, err_msg=optimizer)


def test_a_layer_stores_what_the_table_says():
  """Bytes in units of b, the layer's input, as the table in models/remat.py."""
  width, tokens = 64, 16
  config = tiny_language(model=cfg.Transformer(num_layers=2, width=width, num_heads=4, hidden=168))
  made = build.experiment(config, devices=jax.devices()[:1])
  shapes = {n: jax.ShapeDtypeStruct((1, tokens), jnp.int32) for n in ("tokens", "targets")}
  found = layer_bytes(made.model, made.layout, shapes)
  b = 4 * tokens * width
  assert found["full"] == b and found["branches"] == 2 * b
  # q, k, v, gate, up and both branches' sums.
  assert found["dots"] == b + (3 * width + 2 * 168) * 4 * tokens + b
  assert found["dots_attention"] == found["dots"] + b
  assert found["none"] > 2 * found["dots"]


def chosen(monkeypatch, memory, shard="none", **fields):
  """Return the policy of a language model on devices that are not CPUs, and the note."""
  monkeypatch.setattr(choice, "on_cpu", lambda mesh: False)
  mesh = {"data": 1, "fsdp": -1} if shard != "none" else {}
  layout = cfg.Layout(shard=shard, **fields)
  config = tiny_language(mesh=cfg.Mesh(**mesh), layout=layout)
  made = build.experiment(config, devices=jax.devices(), memory=memory)
  return made.remat, [line for line in made.notes if line.startswith("remat")], made


def test_the_policy_that_stores_most_and_fits_is_chosen(monkeypatch):
  policy, notes, made = chosen(monkeypatch, 2**40)
  assert policy == "none" and re.fullmatch(
    r"remat: none \(a step needs about 0.0 GiB of 1024.0 GiB\)", notes[0]
  )
  batch = {n: jax.ShapeDtypeStruct((8, 16), jnp.int32) for n in ("tokens", "targets")}
  needs = step_bytes(made.model, made.layout, made.tx, batch, 2)
  assert list(needs) == list(POLICIES) and [*needs.values()] == sorted(needs.values())[::-1]
  for name, size in needs.items():
    assert chosen(monkeypatch, size)[0] == name
  assert chosen(monkeypatch, 1)[0] == "full"
  assert chosen(monkeypatch, 2**40, "fsdp")[0] == "dots_attention"
  (line,) = chosen(monkeypatch, needs["dots"])[1]
  assert line.startswith("remat: dots (a step needs about") and ", none 0.0 GiB)" in line


def test_what_the_config_says_and_what_is_unknown(monkeypatch):
  assert chosen(monkeypatch, 1, remat="none")[:2] == ("none", [])
  policy, notes, _ = chosen(monkeypatch, None)
  assert policy == "none" and notes == [
    "remat: none, because the devices do not report their memory"
  ]
  monkeypatch.undo()
  assert build.experiment(tiny_language(), devices=jax.devices(), memory=1).remat == "none"


def test_processes_agree_on_the_memory(monkeypatch):
  devices = [SimpleNamespace(memory_stats=lambda n=n: {"bytes_limit": n}) for n in (7, 5)]
  monkeypatch.setattr(jax, "local_devices", lambda: devices)
  monkeypatch.setattr(choice.cluster, "gather", lambda value: [value, 6])
  assert choice.device_memory() == 5
  monkeypatch.setattr(choice.cluster, "gather", lambda value: [value, 0])
  assert choice.device_memory() is None


def test_the_state_of_a_step_counts_exactly():
  made = build.experiment(
    tiny_language(mesh=cfg.Mesh(data=1, fsdp=-1), layout=cfg.Layout(shard="fsdp")),
    devices=jax.devices(),
  )
  state = made.abstract_state()
  leaves = jax.tree.leaves((state.params, state.opt_state))
  sizes = [math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves]
  batch = {n: jax.ShapeDtypeStruct((8, 16), jnp.int32) for n in ("tokens", "targets")}
  each = layer_bytes(made.model, made.layout, batch)
  more = step_bytes(made.model, made.layout, made.tx, batch, 1)["full"] - 2 * each["full"]
  shapes = made.layout.shapes
  loss = 12 * 16 * 256 + 6 * shapes["head"]["kernel"].size
  backward = sum(sizes[: len(jax.tree.leaves(state.params))]) + each["none"]
  backward += 2 * sum(4 * x.size for x in jax.tree.leaves(shapes["layers"])) // 2
  assert more == sum(sizes) + max(loss, backward)


IMAGES = {
  "ResNet": cfg.ResNet(depth=18, width=8, bn_span="global"),
  "ConvNeXt": cfg.ConvNeXt(depths=(1, 2), dims=(8, 16), drop_path=0.1),
  "CNN": cfg.CNN(batch_norm=True, dropout=0.1),
}


def image_losses(model, remat, shard="none"):
  rng = np.random.default_rng(0)
  x, y = rng.integers(0, 255, (16, 16, 16, 3)), np.arange(16) % 4
  x, y = x.astype(np.uint8), y.astype(np.int32)
  mesh = cfg.Mesh(data=2, fsdp=4) if shard != "none" else cfg.Mesh(data=8)
  arrays = cfg.Arrays(x=x, y=y, x_eval=x, y_eval=y, num_classes=4)
  config = small_config(
    model=model, data=arrays, mesh=mesh, layout=cfg.Layout(shard=shard, remat=remat), seed=1
  )
  made = build.experiment(config)
  state, batch = made.init_state(), on_mesh(made.mesh, {"image": x, "label": y})
  losses = []
  for _ in range(5):
    state, metrics = made.train_step(state, batch)
    losses.append(float(metrics["loss"]))
  return losses, jax.device_get(state.model_state)


@functools.cache
def plain_images(name):
  return image_losses(IMAGES[name], "none")


RUNS = [(name, remat, "none") for name in IMAGES for remat in ("dots", "full", "offload")]
RUNS += [("ResNet", "dots", "fsdp"), ("ResNet", "offload", "fsdp")]


@pytest.mark.parametrize("run", all_slow_except(RUNS, RUNS[2], RUNS[-2]))
def test_images_train_the_same(run):
  name, remat, shard = run
  (losses, stats), (plain_losses, plain_stats) = (
    image_losses(IMAGES[name], remat, shard),
    plain_images(name),
  )
  np.testing.assert_allclose(losses, plain_losses, rtol=1e-5)
  close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
  jax.tree.map(close, stats, plain_stats)


def image_functions(model):
  info = DatasetInfo("x", (16, 16, 3), 4)
  context = cfg.ModelContext(info=info, dtype=jnp.dtype("float32"))
  return models.functions(model.build(context), (16, 16, 3), dtype="float32")


BATCH = {"image": jax.ShapeDtypeStruct((2, 16, 16, 3), "float32")}


@pytest.mark.parametrize("remat", ["dots", "full", "offload"])
def test_blocks_of_images_wait_for_their_gradients_and_on_the_host(remat):
  model = functions_with_remat(image_functions(cfg.ResNet(depth=18, width=8)), remat, BATCH)
  params, stats = models.init_shapes(model.init)

  def loss(params, image):
    return model.apply(params, stats_of(stats), image, True, None)[0].sum()

  image = BATCH["image"]
  text = jax.jit(jax.grad(loss)).lower(params, image).as_text()
  # One for each of 8 blocks and the stem; copies to the host have one more.
  assert text.count("optimization_barrier") == 9 + 8 * (remat == "offload")
  assert str(jax.make_jaxpr(jax.grad(loss))(params, image)).count("<host>") >= 16 * (
    remat == "offload"
  )


def stats_of(shapes):
  return jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), shapes)


class Named(nn.Module):
  """A user's model that names the input of its second block, or a constant."""

  name_of: str | None

  @nn.compact
  def __call__(self, x, train, keys=None):
    x = nn.relu(nn.Dense(8)(x.reshape(len(x), -1)))
    if self.name_of:
      x = checkpoint_name(x, self.name_of)
    return nn.Dense(4)(x)


def test_models_of_users_name_their_blocks():
  def functions(name):
    return models.functions(Named(name), (16, 16, 3), dtype="float32")

  named = functions_with_remat(functions(INPUT), "full", BATCH)
  params, _ = named.init(jax.random.key(0))
  image = jax.random.normal(jax.random.key(1), BATCH["image"].shape)

  def grads(model):
    return jax.grad(lambda p: jnp.square(model.apply(p, {}, image, True, None)[0]).sum())(params)

  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-5), grads(named), grads(functions(None))
  )
  with config_error(match="Layout.remat='offload' needs values that the model names 'input'"):
    functions_with_remat(functions(None), "offload", BATCH)
  with config_error(match="names 'product'"):
    functions_with_remat(functions(INPUT), "dots", BATCH)
  with config_error(match="stores parts of a stack's layers"):
    functions_with_remat(functions(INPUT), "branches", BATCH)


def test_a_built_in_model_without_blocks_is_refused():
  with config_error(match="Layout.remat='full'.*names none"):
    build.experiment(small_config(layout=cfg.Layout(remat="full")))
  with config_error(match="is not a stack of equal layers"):
    small_config(layout=cfg.Layout(unroll="all"))
