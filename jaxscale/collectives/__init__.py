"""All-reduce algorithms, their costs, and a planner.

For use inside `jax.shard_map`, as functions of (x, axis names):

    psum, hierarchical                  sums by XLA's own collectives
    ring, torus, halving_doubling       sums by permutes of known number and bytes
    sum_tree                            sum of a tree by a `Plan`

Outside of it, `all_reduce(tree, mesh, algorithm)` sums global arrays. `plan` chooses
the algorithm and its dimensions from alpha and beta of the links, which `jaxscale bench`
measures. Axes are ordered from slowest to fastest links, as in a mesh; dimensions from
fastest to slowest, the order of reduction. Only `all_reduce` takes a mesh. Names are
imported on first access.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
