"""Local updates: workers train alone and synchronize every H steps.

Between synchronizations every worker k has its own parameters w_k. All workers start from
an anchor W. When they synchronize, the averaged pseudo-gradient is

    D = mean_k (W - w_k)

An outer optimizer uses D as a gradient, and all workers start from the new W. The methods
differ only in the outer optimizer, which is an optax transformation of D:

    local SGD        W = W - D                             mean of the workers
    DiLoCo           v = m v + D;  W = W - r (D + m v)     Nesterov, arXiv:2311.08105
    block momentum   S = n S + z D;  W = W - S - n S       with Nesterov, else W - S
    elastic          W = W - b D                           Sync EASGD, arXiv:1708.02983

Block momentum (BMUF; Chen and Huo, ICASSP 2016) follows Microsoft CNTK,
Source/1BitSGD/V2BlockMomentumSGD.h, where the stored anchor includes the Nesterov step.
CNTK sums over the N workers: S = n S + (1 - n) b N D. With its defaults n = 1 - 1/N and
b = 1 this equals z = 1 on the mean, the definition used here.

With elastic averaging (Zhang, Choromanska and LeCun, arXiv:1412.6651, eq. 5 and 6; in every
step and synchronously in Sync EASGD of You, Buluc and Demmel, SC17, eq. 1 and 2) the N workers
do not start from W, which is their moving average. In the step of a synchronization, with
a = b / N, the gradient g_k and both W and w_k of before the step,

    w_k = w_k - r g_k - a (w_k - W)
    W   = W + a sum_k (w_k - W)

with b = 0.9 in arXiv:1412.6651, section 5.

Streaming DiLoCo (arXiv:2501.18512) splits the parameters into F fragments, each with its own
outer state. Fragment p is sent after the steps t with t mod H = p H // F. With a delay of d
steps, D of these parameters is exchanged beside step t + 1, W moves after it, and after step
t + d each worker takes over the fragment, w_k = c w_k + (1 - c) W. The train step is in
`jaxscale.training.local_step`.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxscale.errors import ConfigError
from jaxscale.exchange.base import zero_residuals

# In CNTK's SGD block: blockSize = 120000 * #workers samples.
BLOCK_SAMPLES = 120_000


class LocalUpdate(NamedTuple):
  """Method of local updates: when and how workers synchronize.

  Attributes:
    every: number of steps H between synchronizations.
    outer: optimizer for the gradient D; its state has the size of the parameters.
    reset_momentum: set the momentum of the workers' inner optimizers to 0 when they
      synchronize.
    elastic: share a of its distance from the anchor by which a worker moves towards it when
      they synchronize; None: all workers start again from the anchor.
    worker_steps: for each worker, the steps that it takes of the H between two
      synchronizations, the first ones; () takes all. A worker that takes fewer steps comes
      less far, and D is still the plain mean over the workers. Metrics are then means over all
      steps since the last exchange (`training.rounds`), so that no other step has a collective.
    fragments: number of fragments F that are exchanged at different steps; at most H.
    delay: number of steps d from the end of a step whose parameters are sent to the end of the
      step after which workers take over the result; less than H. 0 exchanges between steps.
    mixing: share c of its own parameters that a worker keeps when it takes over a result.
  """

  every: int
  outer: optax.GradientTransformation
  reset_momentum: bool = False
  elastic: float | None = None
  worker_steps: tuple[int, ...] = ()
  fragments: int = 1
  delay: int = 0
  mixing: float = 0.0

  @property
  def is_streamed(self) -> bool:
    """True if fragments are exchanged at different steps, or beside a step."""
    return self.fragments > 1 or self.delay > 0

  @property
  def offsets(self) -> list[int]:
    """Return the step of a round after which each fragment is sent, 0 to H - 1."""
    return [number * self.every // self.fragments for number in range(self.fragments)]

  def fragment_due(self, steps: jax.Array) -> jax.Array:
    """Return 1 + the number of the fragment that is sent after these steps, or 0; int32 [].

    Example:
      >>> method = diloco(10)._replace(fragments=2)
      >>> [int(method.fragment_due(jnp.int32(t))) for t in (0, 5, 9, 10, 15)]
      [0, 2, 0, 1, 2]
    """
    is_due = jnp.asarray(self.offsets, jnp.int32) == steps % self.every
    return jnp.where(is_due.any() & (steps > 0), jnp.argmax(is_due).astype(jnp.int32) + 1, 0)

  def arrived(self, last_step: int) -> list[int]:
    """Return the fragments that workers exchange once more after the last step.

    Those sent after the last step itself are left out, and those whose result workers have yet
    to take over.

    Example:
      >>> diloco(10)._replace(fragments=2, delay=3).arrived(17)
      [0]
      >>> diloco(10)._replace(fragments=2).arrived(20)
      [1]
    """
    last = last_step - bool(self.delay)
    sent = [last - (last - offset) % self.every for offset in self.offsets]
    return [i for i, t in enumerate(sent) if t <= 0 or t + max(self.delay, 1) <= last_step]


class BlockMomentumState(NamedTuple):
  """State of block momentum: S, a float32 tree like the parameters."""

  smoothed: Any


def local_sgd(every: int) -> LocalUpdate:
  """Return local SGD: workers average their parameters (arXiv:1805.09767).

  Args:
    every: number of steps H between synchronizations.

  Example:
    >>> local_sgd(8).every
    8
  """
  return LocalUpdate(every, optax.sgd(1.0))


def diloco(every: int = 500, *, rate: float = 0.7, momentum: float = 0.9) -> LocalUpdate:
  """Return DiLoCo: an outer SGD with Nesterov momentum (arXiv:2311.08105, Algorithm 1).

  DiLoCo's workers train with AdamW and keep its state when they synchronize.

  Args:
    every: number of steps H between synchronizations.
    rate: outer learning rate r.
    momentum: outer momentum m.

  Example:
    >>> diloco(50).reset_momentum
    False
  """
  return LocalUpdate(every, optax.sgd(rate, momentum=momentum, nesterov=True))


def block_momentum(
  every: int,
  num_workers: int,
  *,
  momentum: float | None = None,
  rate: float = 1.0,
  nesterov: bool = True,
  reset_momentum: bool = True,
) -> LocalUpdate:
  """Return block momentum with CNTK's defaults.

  Use the learning rate of a single worker, and a momentum of at most 0.9 in the inner
  optimizer (CNTK's documentation advises against 0.99).

  Args:
    every: number of steps H between synchronizations; see `block_steps`.
    num_workers: number of workers N.
    momentum: block momentum n; None means 1 - 1/N. CNTK's time constant T, in samples of all
      workers, corresponds to n = exp(-block / T).
    rate: block learning rate z for the mean D. CNTK's blockLearningRate b corresponds to
      z = (1 - n) N b.
    nesterov: use Nesterov momentum: look ahead by n S.
    reset_momentum: set the momentum of the inner optimizers to 0 at every synchronization.

  Example:
    >>> block_momentum(100, 8).every
    100
  """
  decay = 1 - 1 / num_workers if momentum is None else momentum
  ahead = 1 + decay if nesterov else 1.0

  def init(params: Any):
    return BlockMomentumState(zero_residuals(params))

  def update(updates: Any, state: Any, params: Any = None):
    # Optax calls this with D as `updates` and a BlockMomentumState as `state`.

    def smooth(s: jax.Array, d: jax.Array):
      return decay * s + rate * d.astype(s.dtype)

    smoothed = jax.tree.map(smooth, state.smoothed, updates)
    way = jax.tree.map(lambda s, d: (-ahead * s).astype(d.dtype), smoothed, updates)
    return way, BlockMomentumState(smoothed)

  return LocalUpdate(every, optax.GradientTransformation(init, update), reset_momentum)


def elastic_averaging(every: int, num_workers: int, *, rate: float = 0.9) -> LocalUpdate:
  """Return elastic averaging: workers are pulled towards their moving average.

  Args:
    every: number of steps H between synchronizations; 1 in Sync EASGD.
    num_workers: number of workers N.
    rate: moving rate b of the anchor; each worker is pulled by b / N.

  Example:
    >>> elastic_averaging(4, 10, rate=0.9).elastic
    0.09
  """
  return LocalUpdate(every, optax.sgd(rate), elastic=rate / num_workers)


def block_steps(worker_batch: int, block_samples: int = BLOCK_SAMPLES) -> int:
  """Return the steps H after which a worker has seen `block_samples` samples.

  Args:
    worker_batch: examples per worker and step.
    block_samples: samples tau per worker between synchronizations.

  Example:
    >>> block_steps(256)
    469
  """
  return max(math.ceil(block_samples / worker_batch), 1)


def check_samples(num_samples: int, every: int, worker_batch: int, num_workers: int) -> str | None:
  """Return a note if a data set is too small for block momentum.

  With n = 1 - 1/N the filter remembers about N blocks of N workers with tau samples each,
  so CNTK recommends at least tau N^2 different samples.

  Args:
    num_samples: number of different samples in the training set.
    every: number of steps H between synchronizations; tau is H times `worker_batch`.
    worker_batch: examples per worker and step.
    num_workers: number of workers N.

  Returns:
    None, or one line with the recommended number of samples and what to do.

  Raises:
    ConfigError: the training set is smaller than one block.

  Example:
    >>> check_samples(1_281_167, every=40, worker_batch=256, num_workers=8)
  """
  block = every * worker_batch * num_workers
  target = block * num_workers
  fits = max(num_samples // (worker_batch * num_workers**2), 1)
  needs = f"needs {target:,} different samples (tau N^2), but the data set has {num_samples:,}"
  text = f"BlockMomentum.sync_every_steps={every} with {num_workers} workers {needs}"
  text += f"; give {fits} or less, or use fewer workers"
  if num_samples < block:
    raise ConfigError(text)
  return text if num_samples < target else None


def reset_momentum(opt_state: Any) -> Any:
  """Set the momentum in an optimizer's state to 0 and keep its counts.

  Momentum is stored as `trace` in optax and as `velocity` in jaxscale.

  Raises:
    ConfigError: the state has no momentum. Adam's moments do not count, because their
      bias correction would not account for moments that were set to 0.

  Example:
    >>> state = optax.sgd(0.1, momentum=0.9).init({"w": jnp.ones(2)})
    >>> reset_momentum(state)[0].trace["w"].tolist()
    [0.0, 0.0]
  """
  momentum = {jax.tree_util.GetAttrKey(name) for name in ("trace", "velocity")}
  leaves, structure = jax.tree.flatten_with_path(opt_state)
  if not any(momentum & {*path} for path, _ in leaves):
    problem = "does not work with an optimizer without momentum; give False"
    raise ConfigError(f"LocalUpdate.reset_momentum=True {problem}")
  return structure.unflatten([jnp.zeros_like(x) if momentum & {*path} else x for path, x in leaves])
