"""Optimizers: optax transformations of whole (global) arrays.

They see global gradients and parameters, never a mesh axis, so their norms
are right under every sharding. Each builder takes the learning rate as a
number or a schedule and masks the leaves that no decay and no trust ratio
belong to: biases and normalisation scales (`kernels`). `learning_rate` and
`trust_ratios` read what the last step applied out of a state.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
