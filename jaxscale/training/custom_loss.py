"""Full loss functions from a config: SAM, GANs, teachers, queues, targets of Q-learning.

A `CustomLoss` has a `types.LossFn`, which computes the loss of a device's rows in any way,
and the evaluation. It may keep state of its own beside the model's, in a `LossState`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax

from jaxscale.training.gathered import GatheredObjective
from jaxscale.training.losses import Objective
from jaxscale.training.types import EvalFn, LossFn, Tree


class LossState(NamedTuple):
  """Model state of a run whose loss has a state of its own.

  Attributes:
    model: the state of the model, such as BatchNorm statistics.
    loss: the state of the loss, such as a teacher's parameters, from
      `CustomLoss.init_state`.
  """

  model: Tree
  loss: Tree


class CustomLoss(NamedTuple):
  """A loss function with every freedom, and the evaluation that goes with it.

  Attributes:
    loss_fn: (params, model_state, batch, keys) -> (sum, (model_state, totals)). The sum
      and the totals are sums over the rows of `batch`, and `totals` has "loss" and
      "examples". With `init_state`, `model_state` is a `LossState`. Results do not depend
      on the number of devices if rows are computed by themselves or are gathered over
      the axes in `config.LossContext.axes`.
    evaluation: an `Objective` or a `GatheredObjective` of the model's outputs, or a
      function (params, model_state, batch) -> totals, whose batch has "mask".
    init_state: (params, key) -> the state of the loss before the first step. Every device
      must compute the same new value; a `model_state.Queue` keeps rows of all devices.
  """

  loss_fn: LossFn
  evaluation: Objective | GatheredObjective | EvalFn
  init_state: Callable[[Tree, jax.Array], Tree] | None = None


def state_of_model(model_state: Tree) -> Tree:
  """Return the model's own part of the model state of a run.

  Example:
    >>> state_of_model(LossState(model={"batch_stats": 1}, loss={"teacher": 2}))
    {'batch_stats': 1}
  """
  return model_state.model if isinstance(model_state, LossState) else model_state
