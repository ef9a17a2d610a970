"""Input: datasets, augmentation, and the deterministic pipeline of batches.

`settings` has what a config chooses from; the functions make `Dataset`s, and
`train_batches` and `eval_batches` make batches of them. It knows the mesh only to put
batches on its devices. Names load when they are first asked for.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
