"""CompleteP under layouts: as on one device; resumed bit for bit; exported and described."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxscale as jxs
from jaxscale import cli, data, models
from jaxscale import config as cfg
from jaxscale.config.record import describe_run
from jaxscale.errors import ConfigError
from jaxscale.experiment import build
from jaxscale.experiment.model import make_model, parametrized
from jaxscale.mesh import batch_sharding
from jaxscale.models.stack import stack_logits
from jaxscale.optim import LeafFactors
from jaxscale.planning.describe import describe
from jaxscale.run.fit import fit
from support.cases import all_slow_except
from support.configs import small_config, tiny_language
from support.trees import assert_same_bits, worst_leaf

BASE = {"width": 16, "num_layers": 1, "hidden": 16}
LAYOUTS = {
  "one device": (cfg.Mesh(), cfg.Layout()),
  "zero1": (cfg.Mesh(data=1, fsdp=8), cfg.Layout(shard="zero1")),
  "fsdp": (cfg.Mesh(data=1, fsdp=8), cfg.Layout(shard="fsdp")),
  "fsdp x model": (cfg.Mesh(data=1, fsdp=2, model=4), cfg.Layout(shard="fsdp")),
  "stage": (cfg.Mesh(data=4, stage=2), cfg.Layout()),
}
# With a small eps, Adam's first steps of rare tokens would be the signs of rounding errors.
OPTIMIZERS = {
  "adamw": cfg.AdamW(lr=3e-3, weight_decay=0.1, eps=1e-4),
  "muon": cfg.Muon(lr=3e-3, eps=1e-4),
}


def config_of(name, optimizer, **fields):
  mesh, layout = LAYOUTS[name]
  micro = 2 if name == "stage" else 1
  parts = dict(mesh=mesh, layout=layout, accumulate_steps=micro, clip_norm=1.0, epochs=None)
  parts |= dict(steps=4, optimizer=OPTIMIZERS[optimizer], log=cfg.Log(plot=False))
  parts |= dict(parametrization=cfg.CompleteP(base=BASE))
  return tiny_language(**parts | fields)


@functools.cache
def trained(name, optimizer):
  """Return the initial parameters and those after four steps."""
  devices = jax.devices()[:1] if name == "one device" else jax.devices()
  parts = build.experiment(config_of(name, optimizer), devices=devices)
  state = parts.init_state()
  started = jax.device_get(state.params)
  tokens = np.random.default_rng(0).integers(0, 256, (16, 17)).astype(np.int32)
  rows = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
  batch = jax.device_put(rows, batch_sharding(parts.mesh))
  for _ in range(4):
    state, _ = parts.train_step(state, batch)
  return started, jax.device_get(state.params)


@pytest.mark.parametrize("name", all_slow_except([*LAYOUTS][1:], "fsdp"))
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_layouts_train_as_one_device(name, optimizer):
  for found, wanted in zip(trained(name, optimizer), trained("one device", optimizer), strict=True):
    assert worst_leaf(found, wanted) <= 2e-6


def test_an_export_needs_no_multiplier():
  """The logits of stored parameters are those of the plain architecture."""
  config = config_of("one device", "adamw")
  info = data.TextInfo("words", 256, 16)
  stack, _ = parametrized(config, info, make_model(config, info))
  params = stack.init(jax.random.key(0))
  plain = models.make_transformer(vocab_size=256, num_layers=2, width=32, num_heads=4, hidden=64)
  batch = {"tokens": jnp.arange(32, dtype=jnp.int32).reshape(2, 16)}
  found = stack_logits(stack, params, batch)
  np.testing.assert_array_equal(found, stack_logits(plain, params, batch))


def test_describe_prints_the_factors():
  parts = build.experiment(config_of("one device", "adamw"), devices=jax.devices()[:1])
  page = describe(parts)
  (row,) = [line for line in page.splitlines() if line.startswith("head/kernel   ")][1:]
  assert row.split() == ["head/kernel", "output", "0.5", "0.5", "2", "2"]
  assert "CompleteP: factors of" in page
  small = config_of("one device", "adamw", parametrization=cfg.Standard())
  assert "factors" not in describe(build.experiment(small, devices=jax.devices()[:1]))


class Halved(cfg.Parametrization):
  """A parametrization of a user: half the rate for all kernels of the head."""

  share: float = 0.5

  def build(self, context):
    return {path: LeafFactors(rate=self.share) for path in context.leaves if path[:4] == "head"}


def test_a_parametrization_of_ones_own():
  config = config_of("one device", "adamw", parametrization=Halved())
  factors = build.experiment(config, devices=jax.devices()[:1]).factors
  assert factors == dict.fromkeys(("head/kernel", "head/norm/scale"), LeafFactors(rate=0.5))
  broken = type("Broken", (cfg.Parametrization,), {"build": lambda self, context: 3})
  with pytest.raises(ConfigError, match=r"Broken\.build returned int; return a dict from paths"):
    build.experiment(small_config(parametrization=broken()))


class KilledError(Exception):
  pass


@pytest.mark.slow
def test_killed_it_resumes_bit_for_bit_and_records_its_base(tmp_path):
  config = config_of("fsdp", "adamw", checkpoint=cfg.Checkpoint(every_epochs=None, every_steps=2))

  def kill(step, state, metrics):
    raise KilledError

  whole = fit(config, tmp_path / "whole").state
  with pytest.raises(KilledError):
    fit(config, tmp_path / "killed", callbacks=[jxs.Callback(every=3, on_step=kill)])
  assert_same_bits(fit(config, tmp_path / "killed").state, whole)
  settings = describe_run(tmp_path / "whole").settings()
  assert settings.parametrization == config.parametrization
  assert cli.main(["export", str(tmp_path / "whole"), "--to", str(tmp_path / "hf")]) == 0
  again = dataclasses.replace(config, init_from=str(tmp_path / "hf"))
  loaded = jax.device_get(build.experiment(again).init_state().params)
  assert_same_bits(loaded, jax.device_get(whole.params))
