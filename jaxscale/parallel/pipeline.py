"""Layers shared out over the stages of a pipeline: GPipe and 1F1B.

Layers stacked [L, ...] are sharded on their first dim over a mesh axis: a stage has
L/S consecutive ones. The batch is cut into M micro-batches that pass through the
stages one behind the other; a stage hands its output to the next by a permute. All
this stands inside a fully manual `jax.shard_map(check_vma=True)`, as functions of a
device's own pieces.

    gpipe        (arXiv:1811.06965) all forwards, then, by autodiff, all backwards:
                 to be differentiated. Keeps the inputs of all M micro-batches.
    one_f_one_b  (PipeDream-flush, arXiv:2006.15704; arXiv:2104.04473, section 2.2)
                 a micro-batch backwards as soon as it is through: makes the
                 gradients itself. Keeps the inputs of at most 2S-1.

All devices run one program, in ticks with a permute at the end of each. In tick t
stage s works

    forwards    on micro-batch t - s
    backwards   on micro-batch t - 2(S-1) + s     (`one_f_one_b`)

so that 1F1B takes M+2(S-1) ticks. A stage keeps an input from its forward to its
backward, 2(S-1-s)+1 ticks: nearly twice the S-s of the paper, whose stages go on by
themselves and need no common tick. Where a stage has nothing to do, its work stands
in a branch not taken; see `bubble` for what that is worth.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.collectives import vary
from jaxscale.collectives.typed import axis_sizes, in_mesh_order, varying
from jaxscale.errors import ConfigError
from jaxscale.parallel.branches import check_branch, type_axes, zeros_like

RunLayers = Callable[[Any, jax.Array], jax.Array]  # (this stage's layers, h) -> h


def bubble(
  schedule: Literal["gpipe", "1f1b"],
  stages: int,
  micro_batches: int,
  *,
  skip: bool = True,
) -> float:
  """The share of a step's time in which a stage does nothing of use.

  Of GPipe (S-1)/(M+S-1): M of the M+S-1 ticks are of use to a stage, forwards and
  backwards (arXiv:1811.06965, section 2.3). 1F1B has the same (arXiv:2104.04473,
  section 2.2, which divides by the time of use: (S-1)/M). So has ours, for all M:
  M+S-1 of its ticks have a forward on some stage, and M+S-1 a backward; a tick takes
  as long as the longest in it, and those without one or the other are short. Without
  branches every tick has both, and of M+2(S-1) ticks M are of use. Embedding and
  head, which stand on one stage each, are not in this.

  Args:
    schedule: "gpipe" or "1f1b".
    stages: S.
    micro_batches: M, of one device.
    skip: as of `one_f_one_b`; of no effect on GPipe's time, where in every tick
      some stage has work.

  Raises:
    ConfigError: there is no such schedule.

  Example:
    >>> bubble("gpipe", 4, 12), bubble("1f1b", 4, 12, skip=False)
    (0.2, 0.3333333333333333)
  """
  if schedule not in ("gpipe", "1f1b"):
    raise ConfigError(f"schedule={schedule!r}: give 'gpipe' or '1f1b'")
  fill = stages - 1
  if schedule == "1f1b" and not skip:
    fill *= 2
  return fill / (micro_batches + fill)


def split_micros(batch: Any, micro_batches: int) -> Any:
  """A device's rows [rows, ...] as micro-batches [M, rows/M, ...].

  Raises:
    ConfigError: they do not divide.
  """

  def split(x):
    if len(x) % micro_batches:
      raise ConfigError(
        f"micro_batches={micro_batches}: does not divide the {len(x)} rows of a "
        "device, give a divisor"
      )
    return x.reshape(micro_batches, -1, *x.shape[1:])

  return jax.tree.map(split, batch)


def gpipe(
  run_layers: RunLayers,
  layers: Any,
  micros: jax.Array,
  *,
  axis: str = "stage",
  skip: bool = True,
  remat: bool = True,
) -> jax.Array:
  """What comes out of all stages' layers, shared out over the stages.

  With `own_micros` the head and the loss are shared out likewise: each stage works
  on M/S of the micro-batches, and a sum over `axis` makes the totals. Where S does
  not divide M, all stages have all outputs, typed invariant over `axis`, and do the
  same work on them; differentiation counts it once. What is made of `micros` and of
  parameters that are invariant over `axis` has the right gradients, by the types.

  Args:
    run_layers: (layers, h) -> h, for this device's layers; shape, dtype and type of
      h stay.
    layers: this device's, of which every leaf varies over `axis`.
    micros: [M, rows, tokens, width], what goes into the first layer; the same on all
      stages, and only the first one's is used.
    axis: mesh axis of the stages.
    skip: leave out the ticks without work by a branch. It saves no time, but energy
      and what the layers gather. False where they permute, as a ring does; then they
      run on the first micro-batch, and what comes of it reaches neither output nor
      gradient.
    remat: keep a stage's inputs alone and compute its layers again in the backward
      pass, as the paper does (section 2.3). False: keep what `run_layers` keeps.

  Returns:
    [M/S, rows, tokens, width], of `own_micros`; [M, ...] where S does not divide M.

  Raises:
    ConfigError: no such axis; or `skip`, and the layers permute.

  Example:
    >>> h = gpipe(run, params["layers"], embedded)         # doctest: +SKIP
    >>> totals = finish(h, own_micros(batch))              # doctest: +SKIP
  """
  stages, stage = axis_sizes((axis,))[axis], lax.axis_index(axis)
  count = len(micros)
  axes = carried_axes(run_layers, layers, micros[0], axis)
  micros = vary(micros, axes)
  if skip:
    check_branch("run_layers", axis, run_layers, layers, micros[0])

  def work(is_work, layers, h):
    if skip:
      return lax.cond(is_work, run_layers, lambda _, h: zeros_like(h), layers, h)
    # The value is the same; of what is computed without use no gradient is left,
    # not even NaN.
    layers = jax.tree.map(lambda w: jnp.where(is_work, w, lax.stop_gradient(w)), layers)
    h = run_layers(layers, jnp.where(is_work, h, lax.stop_gradient(micros[0])))
    return jnp.where(is_work, h, zeros_like(h))

  if remat:
    work = jax.checkpoint(work, prevent_cse=False)

  def tick(received, now):
    t, fresh = now
    is_work = (stage <= t) & (t < stage + count)
    h = work(is_work, layers, jnp.where(stage == 0, fresh, received))
    return pass_on(h, axis, +1), h

  # The inputs are scanned over, not indexed: the gradient of an index is as large
  # as all of them, each tick.
  fill = vary(jnp.zeros((stages - 1, *micros.shape[1:]), micros.dtype), axes)
  ticks = jnp.arange(count + stages - 1), jnp.concatenate([micros, fill])
  _, out = lax.scan(tick, zeros_like(micros[0]), ticks)
  out = jnp.where(stage == stages - 1, out[stages - 1 :], 0)
  if count % stages:
    return lax.psum(out, axis)
  return lax.psum_scatter(out, axis, scatter_dimension=0, tiled=True)


def own_micros(micros: Any, *, axis: str = "stage") -> Any:
  """Those micro-batches whose outputs `gpipe` hands to this stage.

  Args:
    micros: tree of [M, ...], the same on all stages.
    axis: mesh axis of the stages.

  Returns:
    tree of [M/S, ...]; as given where S does not divide M.
  """
  stages = axis_sizes((axis,))[axis]

  def own(x):
    if len(x) % stages:
      return x
    size = len(x) // stages
    start = lax.axis_index(axis) * size
    return lax.dynamic_slice_in_dim(vary(x, (axis,)), start, size)

  return jax.tree.map(own, micros)


def carried_axes(
  run_layers: RunLayers, layers: Any, h: Any, axis: str
) -> tuple[str, ...]:
  """The axes over which the activations between the layers vary."""
  given = type_axes(h) if isinstance(h, jax.ShapeDtypeStruct) else varying(h)
  axes = in_mesh_order((axis, *given))

  def run():
    return run_layers(layers, vary(jnp.zeros(h.shape, h.dtype), axes))

  return in_mesh_order((*axes, *type_axes(jax.eval_shape(run))))


def pass_on(h: jax.Array, axis: str, by: int) -> jax.Array:
  """To the next stage, or back; where none sends, zeros arrive."""
  stages = lax.axis_size(axis)
  pairs = [(s, s + by) for s in range(stages) if 0 <= s + by < stages]
  return lax.ppermute(h, axis, pairs) if pairs else h
