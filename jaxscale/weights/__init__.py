"""Parameters in safetensors files, in our names or those of timm and Hugging Face.

    export_safetensors("resnet50.safetensors", params, model_state, naming="timm")
    import_safetensors("vit_small.safetensors", abstract_params).params

A file holds parameters and BatchNorm statistics, nothing else of a run; checkpoints
hold those. `jaxscale export` writes one from a checkpoint, and `Config.init_from`
starts a run from one. This package knows neither `Config` nor runs. Names
load when they are first asked for.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
