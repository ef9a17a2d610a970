"""Processes of a run: launch detection, rendezvous, fault detection and a common stop.

`detect` identifies the launcher and the rank, `rendezvous` connects the processes before
the first use of JAX, and `watch` finds faults and agrees on a step to stop after.
`session` combines them for one process, and `host_collectives` lets the processes agree on host
values over sealed links (`group`). This package does not use `Config`, models or checkpoints.
Names are imported on first use.
"""

from jaxscale import lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
