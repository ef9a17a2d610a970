"""Layouts: which device has which part of a model, and what follows for a step.

`rules` say by paths which dim of a parameter is split along which mesh axis; a
`Layout` makes of that how a model is sharded between steps, how its parameters are
gathered (fsdp_gather.py) and where gradients go. `run_stack` runs a model of stacked
layers under it. Models know nothing of layouts, and layouts no Config. Names
load when they are first asked for.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
