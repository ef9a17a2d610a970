"""Settings of a run: definition, checks, loading and recording.

`Config` holds all settings of a run. `Model`, `Data`, `Optimizer`, `Schedule`, `Exchange`,
`Sync`, `Loss`, `Metric`, `Tracker`, `Callback` and `Growth` are bases that a user's classes
extend (docs/extending.md).
The built-in classes (`SGD`, `CNN`, ...) are defined in the packages that they configure
and are also names of this package. They are imported on first use, so that this package
imports neither JAX nor the packages that it configures.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from jaxscale.config.adapter_settings import LoRA, NoAdapter
from jaxscale.config.bases import *
from jaxscale.config.bounds import Count, Fraction, NonNegative, Positive
from jaxscale.config.choice import HOMES
from jaxscale.config.config import Config
from jaxscale.config.layout_settings import Layout
from jaxscale.config.phase_settings import AdaptiveBatch, Growing, Phases
from jaxscale.config.running import Checkpoint, Checks, Compilation, Evaluation, Faults, Log, Mesh
from jaxscale.errors import ConfigError

if TYPE_CHECKING:
  from jaxscale.data.settings import *
  from jaxscale.exchange.settings import *
  from jaxscale.metrics.settings import *
  from jaxscale.models.settings import *
  from jaxscale.optim.settings import *
  from jaxscale.run.settings import *
  from jaxscale.training.settings import *


def __getattr__(name: str):
  is_class = name == "__all__" or name[:1].isupper()  # A module need not load every class.
  homes = [importlib.import_module(home) for home in dict.fromkeys(HOMES.values()) if is_class]
  if name == "__all__":
    own = [n for n in globals() if n[0].isupper() and not n.isupper()]
    return own + [n for home in homes for n in home.__all__]
  for home in homes:
    if name in home.__all__:
      return getattr(home, name)
  raise AttributeError(f"module 'jaxscale.config' has no attribute {name!r}")
