"""Datasets, augmentation, and the deterministic input pipeline.

`settings` has the data settings of a config. The functions create `Dataset`s, and
`train_batches` and `eval_batches` create batches. The package uses the mesh only to put
batches on its devices. Names are imported on first use.
"""

from jaxscale import lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
