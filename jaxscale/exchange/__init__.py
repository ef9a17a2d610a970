"""Gradient exchanges: the only place where gradients cross the network.

An `Exchange` is a few pure functions, which are called on every device inside
`jax.shard_map`. They use the names of mesh axes, not the mesh. `settings` holds the
exchanges that a config can choose, and each method has its own module. Names are imported
on first access.
"""

from jaxscale import lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
