"""Sums over devices: the algorithms, what they cost, and which to take.

Inside `jax.shard_map`, functions of (x, axis names), each equal to `lax.psum`:

    psum, hierarchical                  by XLA's own collectives
    ring, torus, halving_doubling       by permutes, whose number and bytes are known
    reduce_scatter, all_gather          the two halves of `torus`
    sum_tree                            of a tree, by a `Plan`

Outside of it, `all_reduce(tree, mesh, algorithm)` sums global arrays. `plan` chooses
algorithm and dimensions from alpha and beta of the links;
`jaxscale bench` measures them. Axes go slowest link first, as in a mesh;
dimensions fastest first, as they are reduced. They know axis names, never a mesh but in
`all_reduce`. Names load when they are first asked for.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
