"""Sums over devices: the algorithms, what they cost, and which to take.

Inside `jax.shard_map`, functions of (x, axis names), each equal to `lax.psum`:

    psum, hierarchical                  by XLA's own collectives
    ring, torus, halving_doubling       by permutes, whose number and bytes are known
    reduce_scatter, all_gather          the two halves of `torus`
    sum_tree                            of a tree, by a `Plan`

Outside of it, `all_reduce(tree, mesh, algorithm)` sums global arrays. `plan` chooses
algorithm and dimensions from alpha and beta of the links; `python -m
jaxscale.cli.bench` measures them. Axes go slowest link first, as in a mesh;
dimensions fastest first, as they are reduced.
"""

from __future__ import annotations

from jaxscale.collectives.api import (
  all_reduce,
  joined,
  payload_bytes,
  reducer,
  sum_tree,
)
from jaxscale.collectives.dims import Dim
from jaxscale.collectives.native import hierarchical, psum
from jaxscale.collectives.plan import (
  ALGORITHMS,
  Link,
  Measured,
  Plan,
  default_links,
  measured_on,
  plan,
  torus_seconds,
)
from jaxscale.collectives.records import read_measurements
from jaxscale.collectives.torus import (
  all_gather,
  halving_doubling,
  reduce_scatter,
  ring,
  torus,
)
from jaxscale.collectives.typed import add_rows, same_everywhere, vary

__all__ = [
  "ALGORITHMS",
  "Dim",
  "Link",
  "Measured",
  "Plan",
  "add_rows",
  "all_gather",
  "all_reduce",
  "default_links",
  "halving_doubling",
  "hierarchical",
  "joined",
  "measured_on",
  "payload_bytes",
  "plan",
  "psum",
  "read_measurements",
  "reduce_scatter",
  "reducer",
  "ring",
  "same_everywhere",
  "sum_tree",
  "torus",
  "torus_seconds",
  "vary",
]
