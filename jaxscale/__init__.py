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
  from jaxscale.checkpoint import Checkpoints
  from jaxscale.config import Config
  from jaxscale.loop import evaluate
  from jaxscale.losses import classification_loss, classification_totals
  from jaxscale.mesh import make_mesh
  from jaxscale.overrides import load_config
  from jaxscale.run import fit
  from jaxscale.settings import ConfigError
  from jaxscale.state import TrainState, abstract_state, init_state
  from jaxscale.step import make_eval_step, make_train_step
  from jaxscale.weights import export_safetensors, import_safetensors

__all__ = [
  "Checkpoints", "Config", "ConfigError", "TrainState", "abstract_state",
  "classification_loss", "classification_totals", "evaluate", "export_safetensors",
  "fit", "import_safetensors", "init_state", "load_config", "make_eval_step",
  "make_mesh", "make_train_step",
]  # fmt: skip

_HOME = {
  "Checkpoints": "checkpoint",
  "Config": "config",
  "ConfigError": "settings",
  "TrainState": "state",
  "abstract_state": "state",
  "classification_loss": "losses",
  "classification_totals": "losses",
  "evaluate": "loop",
  "export_safetensors": "weights",
  "fit": "run",
  "import_safetensors": "weights",
  "init_state": "state",
  "load_config": "overrides",
  "make_eval_step": "step",
  "make_mesh": "mesh",
  "make_train_step": "step",
}


def __getattr__(name: str):
  if name not in _HOME:
    raise AttributeError(f"module 'jaxscale' has no attribute {name!r}")
  return getattr(importlib.import_module(f"jaxscale.{_HOME[name]}"), name)


def __dir__() -> list[str]:
  return __all__
