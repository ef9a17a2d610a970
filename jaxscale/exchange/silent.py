"""An exchange that sends nothing: what a step costs without one."""

from __future__ import annotations

import jax

from jaxscale.collectives.typed import same_everywhere
from jaxscale.exchange import Exchange


def silent(inner: Exchange, axes: tuple[str, ...]) -> Exchange:
  """Each device's own gradients in place of their mean; never to train with.

      result_i = g_i

  The replicas part with the first step: this is for timing. What is left of the
  network in such a step is sums of metrics and means of the model state
  (BatchNorm's statistics). The state is that of `inner`, untouched, so that one
  state fits both steps.

  Args:
    inner: the exchange that is left out.
    axes: mesh axes that it averages over.

  Example:
    >>> exchange = silent(plain(("replica", "data")), ("replica", "data"))
    >>> exchange.init({"w": 0.0})
    ()
  """

  def exchange(grads, state):
    return jax.tree.map(lambda g: same_everywhere(g, axes), grads), state

  return Exchange(inner.init, exchange)
