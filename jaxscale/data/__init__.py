"""Datasets, augmentation, and the deterministic input pipeline.

`settings` has the data settings of a config. The functions create `Dataset`s, and
`train_batches` and `eval_batches` create batches. The package uses the mesh only to put
batches on its devices. Names are imported on first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
