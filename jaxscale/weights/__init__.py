"""Read and write parameters in safetensors files, in names of jaxscale, timm or Hugging Face.

    export_safetensors("resnet50.safetensors", params, model_state, naming="timm")
    import_safetensors("vit_small.safetensors", abstract_params).params

A file has parameters and BatchNorm statistics, and nothing else of a run; the rest is in
checkpoints. `jaxscale export` writes a file from a checkpoint, and `Config.init_from` starts
a run from a file. This package depends neither on `Config` nor on runs. Names are imported
on first use.
"""

from jaxscale import lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
