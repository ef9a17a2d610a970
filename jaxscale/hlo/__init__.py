"""Analysis of compiled programs: collectives, compute and memory of a step.

`collectives` lists a program's communication and its overlap with compute,
`program_flops` counts operations, and `memory_of` returns bytes per device. All analyse
the compiler's output (`parse`) without running it. Names are imported on first access.
"""

from jaxscale import lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
