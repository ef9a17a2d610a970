"""All-reduce algorithms, their costs, and a planner.

Inside `jax.shard_map`, `sum_tree` sums a tree by a `Plan`, whose algorithm is one of

    psum, hierarchical                  XLA's own collectives
    ring, torus, halving_doubling       permutes of known number and bytes

Outside of it, `all_reduce(tree, mesh, algorithm)` sums global arrays. `plan` chooses
the algorithm and its dimensions from alpha and beta of the links, which `jaxscale bench`
measures. Axes are ordered from slowest to fastest links, as in a mesh; dimensions from
fastest to slowest, the order of reduction. Only `all_reduce` takes a mesh. Names are
imported on first access.
"""

from jaxscale import lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
