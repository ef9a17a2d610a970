"""The train step as JAX hands it to the compilers of TPUs and GPUs, which need not be there."""

import jax
import pytest

from jaxscale import config as cfg
from jaxscale.experiment import build
from support.cases import all_slow_except
from support.configs import tiny_language

PLATFORMS = "tpu", "cuda", "rocm"
OPTIMIZERS = {
  "SGD": cfg.SGD(lr=0.1),
  "LARS": cfg.LARS(lr=0.1),
  "LAMB": cfg.LAMB(lr=1e-3),
  "AdamW": cfg.AdamW(lr=1e-3),
  "Muon": cfg.Muon(lr=1e-3),
  "Muon in bfloat16": cfg.Muon(lr=1e-3, ns_dtype="bfloat16"),
  "SOAP": cfg.SOAP(lr=1e-3),
}
FSDP = {"mesh": cfg.Mesh(data=1, fsdp=8), "layout": cfg.Layout(shard="fsdp")}
SPLIT = {
  "data": {},
  "zero-1": FSDP | {"layout": cfg.Layout(shard="zero1")},
  "fsdp": FSDP,
  "data x model": {"mesh": cfg.Mesh(data=2, model=4)},
  "data x stage": {"mesh": cfg.Mesh(data=2, stage=4), "accumulate_steps": 4},
}
APART = {
  "HalfPrecision": {"exchange": cfg.HalfPrecision()},
  "Int8": {"exchange": cfg.Int8()},
  "OneBit": {"exchange": cfg.OneBit()},
  "TwoBit": {"exchange": cfg.TwoBit()},
  "LocalSGD": {"sync": cfg.LocalSGD(sync_every_steps=4)},
  "DiLoCo": {"sync": cfg.DiLoCo(sync_every_steps=4), "exchange": cfg.TwoBit()},
  "BlockMomentum": {"sync": cfg.BlockMomentum(sync_every_steps=4, reset_momentum=False)},
  "SyncEASGD": {"sync": cfg.SyncEASGD(sync_every_steps=4)},
}


def lower(**fields):
  """Lower the step of a Transformer with matrices that are wider than 256."""
  # Above it, `jnp.linalg.eigh` has another algorithm on TPUs.
  model = cfg.Transformer(num_layers=4, width=320, num_heads=4, hidden=384)
  made = build.experiment(tiny_language(model=model, **fields))
  step = jax.jit(made.train_step).trace(made.abstract_state(), made.abstract_batch())
  for platform in PLATFORMS:
    step.lower(lowering_platforms=(platform,))


@pytest.mark.parametrize("layout", all_slow_except(SPLIT, "fsdp"))
@pytest.mark.parametrize("name", all_slow_except(OPTIMIZERS, "Muon", "SOAP"))
def test_optimizers_under_layouts(name, layout):
  lower(optimizer=OPTIMIZERS[name], **SPLIT[layout])


@pytest.mark.parametrize("name", all_slow_except(APART, "DiLoCo"))
def test_exchanges_and_local_updates(name):
  lower(optimizer=cfg.SOAP(lr=1e-3), **APART[name])
