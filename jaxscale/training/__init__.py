"""The train step and the loop: state, losses, NaN guard, noise scale, replica check.

Pure functions of a model's `init` and `apply`, an optax optimizer, a mesh and an
exchange; `settings` has the losses that a config chooses from. Nothing here knows a
`Config`, a file or a workdir: what happens between steps the caller's `Callbacks` say.
Names load when they are first asked for.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
