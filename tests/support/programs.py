"""Print a hash of each program that runs compile, to compare between processes.

python tests/support/programs.py [NAME ...]; the names are those of `RUNS`, all of
which are compiled by default.
"""

import dataclasses
import hashlib
import json
import sys
from pathlib import Path

import jax

from jaxscale import config as cfg
from jaxscale.config.config_file import load_file
from jaxscale.config.loading import load_config
from jaxscale.experiment import build
from jaxscale.mesh import replicated

LANGUAGE, DIGITS = "tests/support/tiny_language.py", "configs/digits.py"
PowerSGD = load_file(Path("configs/exchange_power_sgd.py")).PowerSGD
TopK = load_file(Path("configs/exchange_top_k.py")).TopK


def laid_out(shard="none", steps=1, bf16=False, optimizer=None, layout=(), **mesh):
  parts = dict(mesh=cfg.Mesh(**{"data": 1} | mesh), layout=cfg.Layout(shard=shard, **dict(layout)))
  dtype, optimizer = "bfloat16" if bf16 else "float32", optimizer or cfg.LAMB(lr=1e-3)
  return LANGUAGE, dict(accumulate_steps=steps, dtype=dtype, optimizer=optimizer, **parts)


def exchanged(exchange, **mesh):
  return DIGITS, {"mesh": cfg.Mesh(**mesh), "exchange": exchange}


PARTS, STAGES = "fsdp", dict(stage=2, model=2, steps=4)
SLOW, IN_TURNS = {"slow_axes": "in_backward"}, {"schedule": "1f1b"}
RUNS = {
  "data x fsdp x model": laid_out(PARTS, data=2, fsdp=2, model=2, bf16=True),
  "in backward, accumulated": laid_out(PARTS, replica=2, data=2, fsdp=2, steps=2, layout=SLOW),
  "zero-2 x model, muon": laid_out("zero2", fsdp=2, data=2, model=2, optimizer=cfg.Muon(lr=1e-3)),
  "fsdp x model, soap": laid_out(PARTS, fsdp=4, model=2, optimizer=cfg.SOAP(lr=1e-3)),
  "zero-1, adamw": laid_out("zero1", data=2, fsdp=4, optimizer=cfg.AdamW(lr=1e-3)),
  "tokens too": laid_out(PARTS, data=2, fsdp=2, model=2, layout={"model": "layers_and_tokens"}),
  "ring": laid_out(PARTS, data=2, fsdp=2, model=2, layout={"model": "ring", "remat": "full"}),
  "all-to-all": laid_out(data=2, replica=2, model=2, layout={"model": "all_to_all"}),
  "stage x model": laid_out(data=2, stage=2, model=2, steps=4),
  "fsdp x stage x model, 1f1b": laid_out(PARTS, fsdp=2, **STAGES, layout=IN_TURNS),
  "stage x ring, 1f1b": laid_out(data=2, **STAGES, layout=IN_TURNS | {"model": "ring"}),
  "half precision": exchanged(cfg.HalfPrecision(), replica=2),
  "int8": exchanged(cfg.Int8(), replica=2),
  "one bit": exchanged(cfg.OneBit(), replica=2),
  "top k, delayed": exchanged(TopK(delayed=True), replica=2),
  "power sgd": exchanged(PowerSGD(), replica=2),
  "torus": exchanged(cfg.AllReduce(algorithm="torus"), replica=2),
}


def programs(name):
  """Return each lowered program of a run, by its purpose."""
  path, replaced = RUNS[name]
  made = build.experiment(dataclasses.replace(load_config(path), **replaced))
  state, batch = made.abstract_state(), made.abstract_batch()
  rows, sharding = made.phase.batch_size, jax.tree.leaves(batch)[0].sharding
  seed = jax.ShapeDtypeStruct((), "int32", sharding=replicated(made.mesh))
  mask = jax.ShapeDtypeStruct((rows,), bool, sharding=sharding)
  held_out = {"mask": mask} | batch
  return {
    "init": made._init.lower(seed, {}),
    "train": made.lower_train_step(state),
    "eval": made.eval_step.lower(state.params, state.model_state, held_out),
  }


if __name__ == "__main__":
  for name in sys.argv[1:] or RUNS:
    for what, lowered in programs(name).items():
      digest = hashlib.sha256(lowered.as_text().encode()).hexdigest()
      print(json.dumps({"name": f"{name}, {what}", "hash": digest}))
