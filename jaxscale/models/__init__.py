"""Models that know nothing of meshes: Flax modules, and stacks of equal layers.

`settings` has what a config chooses from; `make_*` and the `*Module` classes are for
notebooks, and `functions(module, shape)` turns a Flax module into the pure functions
that the state and the step take. Of the modules only a synchronised BatchNorm knows
the names of mesh axes. Names load when they are first asked for.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
