"""Layouts: sharding of a model over a mesh, and its train step (FSDP, TP, PP, CP).

`rules` map parameter paths to the mesh axes that split each dim. From them a `Layout`
determines the sharding between steps, the gathering of parameters (fsdp_gather.py) and
the reduction of gradients. `run_stack` runs a model of stacked layers under a layout.
Models do not depend on layouts, and layouts do not depend on `Config`. Names are imported
on first access.
"""

from jaxscale import lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
