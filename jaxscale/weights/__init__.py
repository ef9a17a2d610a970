"""Parameters in safetensors files, in our names or those of timm and Hugging Face.

    export_safetensors("resnet50.safetensors", params, model_state, naming="timm")
    import_safetensors("vit_small.safetensors", abstract_params).params

A file holds parameters and BatchNorm statistics, nothing else of a run; checkpoints
hold those. `jaxscale export` writes one from a checkpoint, and `Config.init_from`
starts a run from one. This package knows neither `Config` nor runs.
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
