"""Models: Flax modules, and stacks of equal layers as pure functions.

`settings` holds the models that a config can choose. The `make_*` functions and `*Module`
classes are for notebooks, and `functions(module, shape)` turns a Flax module into the
pure functions for state and step. Models do not depend on a mesh; only a synchronised
BatchNorm takes names of mesh axes. Names are imported on first access.
"""

from jaxscale import lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
