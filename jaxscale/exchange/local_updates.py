"""Local updates: workers train alone and synchronize every H steps.

In between every worker k has parameters w_k of its own. When they synchronize, with
the anchor W that all started from, the averaged pseudo-gradient is

    D = mean_k (W - w_k)

and an outer optimizer takes it for a gradient; then all start from the new W. The
methods differ in the outer optimizer alone, so each is an optax one on D:

    local SGD        W = W - D                             the mean of the workers
    DiLoCo           v = m v + D;  W = W - r (D + m v)     Nesterov, arXiv:2311.08105
    block momentum   S = n S + z D;  W = W - S - n S       with Nesterov, else W - S

Block momentum (BMUF; Chen and Huo, ICASSP 2016) is as in Microsoft CNTK,
Source/1BitSGD/V2BlockMomentumSGD.h, where the anchor kept is the one that has
looked ahead. CNTK sums over the N workers, S = n S + (1 - n) b N D; with its
defaults n = 1 - 1/N and b = 1 that is z = 1 on the mean, which is how it is
defined here. `jaxscale.training.local_step` has the train step.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxscale.errors import ConfigError
from jaxscale.exchange.base import zero_residuals

# CNTK's SGD block: blockSize = 120000 * #workers samples.
BLOCK_SAMPLES = 120_000


class LocalUpdate(NamedTuple):
  """A method for workers that train alone to synchronize.

  Attributes:
    every: H, steps from one synchronization to the next.
    outer: optimizer whose gradient is D; its state is like one set of parameters.
    reset_momentum: set the workers' own momentum to 0 when they synchronize.
  """

  every: int
  outer: optax.GradientTransformation
  reset_momentum: bool = False


class BlockMomentumState(NamedTuple):
  """State of block momentum: S, float32, like the parameters."""

  smoothed: Any


def local_sgd(every: int) -> LocalUpdate:
  """Workers take the mean of their parameters (arXiv:1805.09767).

  Args:
    every: H, steps from one synchronization to the next.

  Raises:
    ConfigError: `every` is below 1.

  Example:
    >>> local_sgd(8).every
    8
  """
  return LocalUpdate(_at_least_one(every), optax.sgd(1.0))


def diloco(every: int = 500, *, rate: float = 0.7, momentum: float = 0.9) -> LocalUpdate:
  """DiLoCo's outer step: SGD with Nesterov momentum (arXiv:2311.08105, Algorithm 1).

  Its workers train by AdamW, whose state they keep.

  Args:
    every: H, steps from one synchronization to the next.
    rate: r, outer learning rate.
    momentum: m.

  Raises:
    ConfigError: `every` is below 1.

  Example:
    >>> diloco(50).reset_momentum
    False
  """
  outer = optax.sgd(rate, momentum=momentum, nesterov=True)
  return LocalUpdate(_at_least_one(every), outer)


def block_momentum(
  every: int,
  num_workers: int,
  *,
  momentum: float | None = None,
  rate: float = 1.0,
  nesterov: bool = True,
  reset_momentum: bool = True,
) -> LocalUpdate:
  """Block momentum with CNTK's defaults.

  The workers' learning rate stays that of one worker; their own momentum is 0.9 or
  less (0.99 hurts, says CNTK's documentation).

  Args:
    every: H, steps from one synchronization to the next; see `block_steps`.
    num_workers: N.
    momentum: n; None: 1 - 1/N. A time constant T of CNTK, in samples of all
      workers, is n = exp(-block / T).
    rate: z, on the mean D. CNTK's blockLearningRate b is z = (1 - n) N b.
    nesterov: look ahead by n S.
    reset_momentum: set the workers' own momentum to 0 at every synchronization.

  Raises:
    ConfigError: `every` or `num_workers` below 1, or `momentum` not in [0, 1).

  Example:
    >>> block_momentum(100, 8).every
    100
  """
  if num_workers < 1:
    raise ConfigError(f"block_momentum.num_workers={num_workers}: give 1 or more")
  decay = 1 - 1 / num_workers if momentum is None else momentum
  if not 0 <= decay < 1:
    why = "S would grow for ever, give at least 0 and less than 1"
    usual = f"{1 - 1 / num_workers:g} is the default of {num_workers} workers"
    raise ConfigError(f"block_momentum.momentum={decay}: {why}; {usual}")
  ahead = 1 + decay if nesterov else 1.0

  def init(params: Any):
    return BlockMomentumState(zero_residuals(params))

  def update(updates: Any, state: Any, params: Any = None):
    # optax's names: `updates` are D, `state` is a BlockMomentumState.

    def smooth(s: jax.Array, d: jax.Array):
      return decay * s + rate * d.astype(s.dtype)

    smoothed = jax.tree.map(smooth, state.smoothed, updates)
    way = jax.tree.map(lambda s, d: (-ahead * s).astype(d.dtype), smoothed, updates)
    return way, BlockMomentumState(smoothed)

  outer = optax.GradientTransformation(init, update)
  return LocalUpdate(_at_least_one(every), outer, reset_momentum)


def _at_least_one(every: int) -> int:
  if every < 1:
    raise ConfigError(f"every={every}: steps between synchronizations, give >= 1")
  return every


def block_steps(worker_batch: int, block_samples: int = BLOCK_SAMPLES) -> int:
  """H for CNTK's block: steps until a worker has seen so many samples.

  Args:
    worker_batch: examples of one worker in a step.
    block_samples: tau, of one worker from one synchronization to the next.

  Example:
    >>> block_steps(256)
    469
  """
  return max(math.ceil(block_samples / worker_batch), 1)


def check_samples(num_samples: int, every: int, worker_batch: int, num_workers: int) -> str | None:
  """Return a note where a data set is too small for block momentum.

  With n = 1 - 1/N the filter remembers N blocks of N workers with tau samples
  each, so CNTK asks for tau N^2 different samples at least.

  Args:
    num_samples: different samples in the training set.
    every: H; tau is H times `worker_batch`.
    worker_batch: examples of one worker in a step.
    num_workers: N.

  Returns:
    None, or one line: the samples wanted, and what to do.

  Raises:
    ConfigError: an epoch has less than a single block.

  Example:
    >>> check_samples(1_281_167, every=40, worker_batch=256, num_workers=8)
  """
  block = every * worker_batch * num_workers
  wanted = block * num_workers
  fits = max(num_samples // (worker_batch * num_workers**2), 1)
  field, fix = f"BlockMomentum.sync_every_steps={every}", f"give {fits} or less"
  if num_samples < block:
    why = f"one block of {num_workers} workers is {block:,} samples"
    raise ConfigError(f"{field}: {why}, more than the {num_samples:,} there are; {fix}")
  if num_samples >= wanted:
    return None
  why = f"block momentum of {num_workers} workers wants {wanted:,} different samples (tau N^2)"
  return f"{field}: {why}, there are {num_samples:,}; {fix}, or fewer workers"


def reset_momentum(opt_state: Any) -> Any:
  """The state of an optimizer with its momentum at 0 and its counts as they are.

  Momentum is what optax calls `trace` and jaxscale `velocity`.

  Raises:
    ConfigError: there is none. Adam's moments are not momentum in this sense:
      their bias correction would take the emptied ones for full.

  Example:
    >>> state = optax.sgd(0.1, momentum=0.9).init({"w": jnp.ones(2)})
    >>> reset_momentum(state)[0].trace["w"].tolist()
    [0.0, 0.0]
  """
  found = []

  def field(node: Any) -> str | None:
    names = getattr(node, "_fields", ())
    return next((name for name in ("trace", "velocity") if name in names), None)

  def reset(node: Any):
    name = field(node)
    if name is None:
      return node
    found.append(name)
    return node._replace(**{name: jax.tree.map(jnp.zeros_like, getattr(node, name))})

  state = jax.tree.map(reset, opt_state, is_leaf=lambda node: field(node) is not None)
  if not found:
    why = "the optimizer keeps no momentum, give False"
    raise ConfigError(f"LocalUpdate.reset_momentum=True: {why}")
  return state
