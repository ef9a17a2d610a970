"""The gradient exchange: the one place where gradients cross the network.

An `Exchange` is a few pure functions, called on every device inside `jax.shard_map`.
`settings` has what a config chooses from; each method is a module of its own. It knows
axis names, never a mesh. Names load when they are first asked for.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
