"""Checks of a loss function while a train step is traced.

A `step.LossFn` returns sums over its rows: the step adds them up over micro-batches and
devices and divides by the sum of "examples". With a mean, the gradients would grow with
the number of devices. `check_sums` therefore computes the loss of a few rows, then of the
same rows repeated twice: every total must double.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer, eval_context
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxscale.collectives.typed import vary, varying
from jaxscale.errors import ConfigError, invalid, message_of
from jaxscale.optim.tree_paths import path_name
from jaxscale.training.losses import IS_SUM
from jaxscale.training.model_state import map_queues, queues
from jaxscale.training.types import Batch, StepOptions, TrainState, TrainStep

_WANTED = "(loss, (model_state, totals)), totals a dict with 'examples', sums over rows"
_ELEMENTS = 2**28  # 1 GiB of float32 parameters; larger models are not checked
_TOLERANCE = 1e-3


def checked(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
  """Wrap `loss_fn` to raise a ConfigError when a step cannot use its result."""

  @functools.wraps(loss_fn)
  def call(params: Any, model_state: Any, batch: Any, keys: jax.Array):
    match loss_fn(params, model_state, batch, keys):
      case loss, (new_state, dict(totals)):
        pass
      case result:
        raise invalid("loss_fn", ..., f"returns {type(result).__name__}", f"return {_WANTED}")
    if "examples" not in totals:
      raise without_examples(totals)
    totals = {name: jnp.asarray(x) for name, x in ({"loss": loss} | totals).items()}
    for name, x in {**totals, "loss": jnp.asarray(loss)}.items():
      if x.shape or (name == "loss" and not jnp.issubdtype(x.dtype, jnp.floating)):
        problem = f"returns {name!r} as {x.dtype}{list(x.shape)}"
        raise invalid("loss_fn", ..., problem, "return a scalar, the sum over the rows")
    _check_state(model_state, new_state, len(keys))
    return loss, (new_state, totals)

  return call


def checked_step(step: Any, options: StepOptions) -> TrainStep:
  """Wrap a jitted train step to refuse a state that it cannot use.

  JAX ends the process by a segmentation fault if simulated devices get a donated array.
  """
  kept = "average", "noise", "loss_scale"
  asked = options.ema_decay is not None, options.measure_noise_scale, options.scale_loss
  needed = [name for name, is_asked in zip(kept, asked, strict=True) if is_asked]

  def call(state: Any, batch: Batch):
    if not isinstance(state, TrainState):
      raise invalid("state", ..., f"is a {type(state).__name__}", "give a TrainState, then a batch")
    for name in [name for name in needed if getattr(state, name) == ()]:
      fix = f"create it by init_state(..., {name.replace('noise', 'noise_scale')}=True)"
      raise invalid(f"state.{name}", ..., "is empty, but the options need it", fix)
    if not isinstance(state.step, Tracer) and getattr(state.step, "is_deleted", bool)():
      raise invalid("state", ..., "was donated to an earlier step", "use the one it returned")
    return step(state, batch)

  setattr(call, "lower", step.lower)  # noqa: B010
  return call


def check_rows(batch: Batch, num_blocks: int, num_microbatches: int) -> None:
  """Refuse a batch whose rows cannot be split over devices and micro-batches."""
  names = {jnp.shape(x)[:1]: path_name(path) for path, x in jax.tree.leaves_with_path(batch)}
  if len(names) != 1 or () in names:
    found = ", ".join(f"{name} {list(size)}" for size, name in names.items())
    problem = f"has arrays of different or no rows ({found})"
    raise invalid("batch", ..., problem, "give arrays [rows, ...] with equal numbers of rows")
  ((rows,),), parts = names, num_blocks * num_microbatches
  if rows % parts:
    by = f"{num_blocks} devices x {num_microbatches} micro-batches"
    fix = f"use {rows // parts * parts or parts} rows"
    raise invalid("batch", ..., f"has {rows} rows, which {by} do not divide", fix)


def without_examples(totals: Any) -> ConfigError:
  """Return the error for totals that are no dict, or lack "examples"."""
  if not isinstance(totals, dict):
    fix = "return a dict of sums with 'examples'"
    return invalid("totals", ..., f"are {type(totals).__name__}", fix)
  problem = f"has totals {', '.join(map(repr, totals))} and no 'examples'"
  return invalid("loss_fn", ..., problem, "add the number of rows, such as len(keys)")


def _check_state(old: Any, new: Any, rows: int) -> None:
  """Raise unless the new model state has the old one's leaves, shapes and dtypes.

  A `Queue` has one new row per row of the batch instead of the old rows.
  """
  for kept, pushed in zip(queues(old), queues(new), strict=False):
    kinds = jnp.result_type(kept.rows), (rows, *kept.rows.shape[1:])
    if kinds != (jnp.result_type(pushed.rows), jnp.shape(pushed.rows)):
      problem = f"gets new rows {jnp.shape(pushed.rows)} of {jnp.result_type(pushed.rows)}"
      fix = f"return one for each row of the batch, {kinds[1]} of {kinds[0]}"
      raise invalid("Queue", ..., problem, fix)
  old = map_queues(lambda _, pushed: pushed, old, queues(new))
  leaves = [dict(jax.tree.leaves_with_path(tree)) for tree in (old, new)]
  before, after = ({path_name(path): x for path, x in t.items()} for t in leaves)
  fix = "return the leaves, shapes and dtypes that init returns"
  if before.keys() != after.keys() or jax.tree.structure(old) != jax.tree.structure(new):
    changed = ", ".join(sorted(before.keys() ^ after.keys())) or "its containers"
    raise invalid("model state", ..., f"has different leaves after a step: {changed}", fix)
  for name, x in before.items():
    kinds = [f"{jnp.result_type(y)}{list(jnp.shape(y))}" for y in (x, after[name])]
    if kinds[0] != kinds[1]:
      problem = f"is {kinds[0]} before a step and {kinds[1]} after it"
      raise invalid(f"model state {name}", ..., problem, fix)


def check_sums(
  loss_fn: Callable[..., Any],
  params: Any,
  model_state: Any,
  batch: Any,
  mesh: Mesh,
  *,
  name: str = "loss_fn",
) -> str:
  """Raise if a total is a mean, or contains a term that does not scale with the rows.

  The loss is computed on one device, for random parameters and inputs.

  Args:
    loss_fn: a `step.LossFn`.
    params: shapes and dtypes, or arrays.
    model_state: shapes and dtypes, or arrays.
    batch: shapes and dtypes, or arrays, with any number of rows.
    mesh: the mesh whose axis names the loss may use.
    name: name of the loss in the error.

  Returns:
    "" if the loss was checked, else the reason why it was not.

  Raises:
    ConfigError: a total does not double when the rows are repeated.
  """
  if reason := too_large((params, model_state)):
    return reason
  axes = mesh.axis_names
  one = np.array(jax.local_devices()[:1]).reshape((1,) * len(axes))

  @jax.shard_map(mesh=Mesh(one, axes), in_specs=(P(), P(), P(axes), P(axes)), out_specs=P())
  def sums(params: Any, model_state: Any, batch: Any, keys: jax.Array):
    params, model_state = vary((params, model_state), axes)  # as in a step
    loss, (_, totals) = loss_fn(params, model_state, batch, keys)
    named = {"the loss": loss} | {f"total {k!r}": x for k, x in totals.items()}
    return {k: lax.psum(x, varying(x)) for k, x in named.items()}

  with eval_context():  # a step is being traced
    values = example_values(params, model_state, batch, rows=2)

    def grown(times: int) -> dict[str, float]:
      arguments = *values[:2], *jax.tree.map(lambda x: jnp.concatenate([x] * times), values[2:])
      return {k: float(x) for k, x in compiled(sums, *arguments)(*arguments).items()}

    try:
      single = {k: x for k, x in grown(1).items() if x}
      double = grown(2)
      # The constant part is tested below, because a total may also grow faster than the
      # rows: InfoNCE's loss per row grows with their number.
      if all(_is_near(double[k], 2 * x) for k, x in single.items()):
        is_finite = np.isfinite([*single.values(), *double.values()]).all()
        return "" if is_finite else "it is not finite for random inputs"
      fourfold = grown(4)
    except Exception as e:  # the loss may be written for one batch size
      return one_line(e)
  constant = {
    k
    for k, x in single.items()
    if not _is_near(double[k], 2 * x)
    and np.isclose(fourfold[k] - 4 * x, 3 * (double[k] - 2 * x), rtol=0.1)
  }
  if (count := "total 'examples'") in constant:
    # A mean per device that counts as one example is correct as well.
    constant = {count} if len(constant) < len(single) else set()
  for k in [k for k in single if k in constant][:1]:
    problem = f"returns {k} {single[k]:.6g} for some rows, {double[k]:.6g} for twice as many"
    fix = "sum over the rows, and multiply terms that are not per row by the number of rows"
    raise invalid(name, ..., problem, fix)
  return ""


def check_loss(
  loss_fn: Callable[..., Any], params: Any, model_state: Any, batch: Any, mesh: Mesh
) -> None:
  """Check a step's loss by `check_sums`, and warn if it cannot be checked.

  Losses of this package are marked by `losses.IS_SUM` and are not checked.
  """
  if getattr(loss_fn, IS_SUM, False):
    return
  if reason := check_sums(loss_fn, params, model_state, batch, mesh):
    warnings.warn(f"cannot check that loss_fn sums over rows: {reason}", stacklevel=3)


def too_large(state: Any) -> str:
  """Return the reason why a state is too large to check before the first step, or ""."""
  size = sum(x.size for x in jax.tree.leaves(state))
  return f"it has {size:,} parameters, over {_ELEMENTS:,}" if size > _ELEMENTS else ""


def one_line(error: Exception) -> str:
  """Return an exception's type and message on one line, at most 200 characters."""
  kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
  text = kind + message_of(error)
  return text if len(text) <= 200 else f"{text[:197]}..."


def compiled(function: Callable[..., Any], *args: Any) -> Callable[..., Any]:
  """Compile a function for these arguments, with little optimization on CPU."""
  options: Any = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}
  return jax.jit(function).lower(*args).compile(compiler_options=options)


def example_values(params: Any, model_state: Any, batch: Any, rows: int) -> Any:
  """Return random parameters, a model state of ones, random rows, and a key per row.

  Args:
    params: shapes and dtypes.
    model_state: shapes and dtypes.
    batch: shapes and dtypes, with any number of rows.
    rows: number of rows to return.
  """
  rng = np.random.default_rng(0)

  def value(x: Any, shape: tuple[int, ...], spread: float = 1.0):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
      return jnp.broadcast_to(jax.random.key(0), shape)
    if jnp.issubdtype(x.dtype, jnp.inexact):
      return (spread * rng.standard_normal(shape, np.float32)).astype(x.dtype)
    return rng.integers(0, 256 if x.dtype == np.uint8 else 2, shape).astype(x.dtype)

  def weight(x: Any):  # scaled so that a layer's outputs are as large as its inputs
    return value(x, x.shape, max(math.prod(x.shape[:-1]), 1) ** -0.5)

  def unit(x: Any):  # a variance may be among them
    is_float = jnp.issubdtype(x.dtype, jnp.inexact)
    return np.ones(x.shape, x.dtype) if is_float else value(x, x.shape)

  return (
    jax.tree.map(weight, params),
    jax.tree.map(unit, model_state),
    jax.tree.map(lambda x: value(x, (rows, *x.shape[1:])), batch),
    jax.random.split(jax.random.key(0), rows),
  )


def _is_near(a: float, b: float) -> bool:
  """Return whether two numbers agree up to rounding, or one of them is NaN or Inf."""
  return not np.isfinite([a, b]).all() or abs(a - b) <= _TOLERANCE * (abs(a) + abs(b))
