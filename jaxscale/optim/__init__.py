"""Optimizers: optax transformations of whole (global) arrays.

They work on global gradients and parameters and use no mesh axes, so their norms are
correct for every sharding. Each builder takes the learning rate as a number or a
schedule. By default a mask (`kernels`) excludes biases and normalisation scales from
weight decay and trust ratios. `trust_ratios` reads the ratios of the last step from an
optimizer state.
"""

from jaxscale import lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
