"""jaxscale: train neural networks at very large batch on HPC clusters.

The names below are the public functions for notebooks; the parts they take are
in the submodules `data`, `exchange`, `models` and `optim`. Each is imported
when it is first asked for, so that `--help`, or a typo in a config, is answered
without waiting for JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from jaxscale.checkpoint.manager import Checkpoints
  from jaxscale.config import Config
  from jaxscale.config.loading import load_config
  from jaxscale.errors import ConfigError
  from jaxscale.mesh import make_mesh
  from jaxscale.run.fit import fit
  from jaxscale.training.loop import evaluate
  from jaxscale.training.losses import classification_loss, classification_totals
  from jaxscale.training.state import TrainState, abstract_state, init_state
  from jaxscale.training.step import make_eval_step, make_train_step
  from jaxscale.weights import export_safetensors, import_safetensors

__all__ = [
  "Checkpoints", "Config", "ConfigError", "TrainState", "abstract_state",
  "classification_loss", "classification_totals", "evaluate", "export_safetensors",
  "fit", "import_safetensors", "init_state", "load_config", "make_eval_step",
  "make_mesh", "make_train_step",
]  # fmt: skip

_HOME = {
  "Checkpoints": "checkpoint.manager",
  "Config": "config",
  "ConfigError": "errors",
  "TrainState": "training.state",
  "abstract_state": "training.state",
  "classification_loss": "training.losses",
  "classification_totals": "training.losses",
  "evaluate": "training.loop",
  "export_safetensors": "weights",
  "fit": "run.fit",
  "import_safetensors": "weights",
  "init_state": "training.state",
  "load_config": "config.loading",
  "make_eval_step": "training.step",
  "make_mesh": "mesh",
  "make_train_step": "training.step",
}


def __getattr__(name: str):
  if name not in _HOME:
    raise AttributeError(f"module 'jaxscale' has no attribute {name!r}")
  return getattr(importlib.import_module(f"jaxscale.{_HOME[name]}"), name)


def __dir__() -> list[str]:
  return __all__
