"""Compiled programs, read: collectives, compute and memory of a step.

`collectives` has what a program sends and what hides it, `program_flops` what it
computes, `memory_of` the bytes of a device. All read what the compiler made (`parse`),
and nothing runs. Names load when they are first asked for.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
