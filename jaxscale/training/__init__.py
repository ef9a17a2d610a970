"""Train step and training loop: state, losses, NaN guard, noise scale, replica check.

The functions take a model's `init` and `apply`, an optax optimizer, a mesh and an
exchange. `settings` holds the losses that a config can choose. The package does not
depend on `Config`, files or workdirs: the caller's `LoopControl` decides what happens
between steps. Names are imported on first access.
"""

from jaxscale import lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
