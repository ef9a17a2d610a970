"""Parameters brought and taken away: safetensors files in the names of others.

    export_safetensors("resnet50.safetensors", params, model_state, naming="timm")
    import_safetensors("vit_small.safetensors", abstract_params).params

One file holds parameters and BatchNorm statistics, nothing else of a run; that is
what checkpoints are for. `python -m jaxscale.run.export` writes one from a checkpoint, and
`Config.init_from` starts a run from one.
"""

from jaxscale.weights.load import Imported, import_safetensors
from jaxscale.weights.names import NAMINGS
from jaxscale.weights.save import (
  Leaf,
  UnwrittenError,
  export_leaves,
  export_safetensors,
)

__all__ = [
  "NAMINGS", "Imported", "Leaf", "UnwrittenError", "export_leaves",
  "export_safetensors", "import_safetensors",
]  # fmt: skip
