"""Layout of an experiment's model, and the loss and totals under it."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxscale import config as cfg
from jaxscale import models, parallel
from jaxscale.errors import invalid
from jaxscale.experiment.loss import AnyLoss, loss_of, totals_of
from jaxscale.experiment.model import Model, init_fn
from jaxscale.models.attention import cuda_capability
from jaxscale.optim.tree_paths import path_name
from jaxscale.parallel import rules as sharding_rules
from jaxscale.parallel.pipeline import bubble
from jaxscale.parallel.placement import HOST
from jaxscale.parallel.rules import Rule, partition
from jaxscale.parallel.specs import Layout, Shard
from jaxscale.training.metrics import Metric


def make_layout(config: cfg.Config, mesh: Mesh, model: Model) -> Layout | None:
  """Build the layout of the model; return None if everything is replicated.

  Args:
    config: the config of the run.
    mesh: the mesh of all devices.
    model: the model from `model.make_model`.

  Raises:
    ConfigError: a parameter is matched by no rule or by several, or cannot be divided; or
      the model cannot be computed with the rules.
  """
  check_memory(config, mesh.devices.flat[0])
  chosen, shard = config.layout, shard_on(config, mesh)
  splits = {"stage", "model"} & set(mesh.axis_names) or shard != "none"
  on_host = chosen.optimizer == "host"
  is_dealt = config.optimizer.has_matrix_state  # The shape of its rows depends on the layout.
  if not (splits or on_host or is_dealt or isinstance(model, models.Stack)):
    return None
  own = config.model.sharding()
  rules = tuple(Rule(*r) for r in own) if own else sharding_rules.OTHERS
  shapes = models.init_shapes(init_fn(model))[0]
  half = config.activations if config.dtype != "float32" else None
  _check_divides(config, mesh, shapes)
  if chosen.rules:
    given = tuple(sharding_rules.parse(rule) for rule in chosen.rules)
    _check_rules(shapes, given, rules, mesh, chosen.model)
    rules = given
  return parallel.make_layout(
    mesh,
    shapes,
    rules,
    shard=shard,
    slow_axes=chosen.slow_axes,
    splits=chosen.model,
    dtype=half,
    sum_in=half if chosen.sum_in == "dtype" else None,
    reduce_in=half if chosen.reduce_in == "dtype" else None,
    opt_on_host=on_host,
    loss_chunk=chosen.loss_chunk,
  )


def shard_on(config: cfg.Config, mesh: Mesh) -> Shard:
  """Return `Layout.shard`, or "none" if Mesh.fsdp=-1 found a single device."""
  is_alone = config.mesh.fsdp == -1 and mesh.shape.get("fsdp", 1) == 1
  return "none" if is_alone else config.layout.shard


def notes(config: cfg.Config, mesh: Mesh, micro_batches: int) -> list[str]:
  """Return notes on a layout for the user, one line each."""
  lines = []
  if shard_on(config, mesh) != config.layout.shard:
    lines.append(
      f"Mesh.fsdp=-1 found one device, so that Layout.shard={config.layout.shard!r} splits nothing"
    )
  stages = mesh.shape.get("stage", 1)
  if stages > 1:
    idle = bubble(stages, micro_batches)
    lines.append(
      f"pipeline: {config.layout.schedule}, {stages} stages, {micro_batches} "
      f"micro-batches; every stage is idle for {idle:.0%} of a step"
    )
  has_it = has_bfloat16(device := mesh.devices.flat[0])
  if config.dtype == "float8" and not has_float8(device):
    what = "has no FP8 products; they are computed in bfloat16, with the rounding of FP8"
    lines.append(f"dtype='float8': {device.device_kind} {what}")
  if config.dtype == ("float16" if has_it else "bfloat16"):
    what = "has bfloat16, which needs no loss scale" if has_it else "lacks it; use dtype='float16'"
    lines.append(f"dtype={config.dtype!r}: {device.device_kind} {what}")
  return lines


def has_bfloat16(device: Any) -> bool:
  """Return whether a device computes in bfloat16: all but NVIDIA's GPUs before Ampere."""
  return not (0,) < cuda_capability(device) < (8, 0)


def has_float8(device: Any) -> bool:
  """Return whether XLA computes products of e4m3fn in FP8: NVIDIA's GPUs since Ada (8.9)."""
  return cuda_capability(device) >= (8, 9)


def check_exchange(config: cfg.Config, layout: Layout | None, sizes: Mapping[str, int]) -> None:
  """Raise if a lossy or delayed exchange has nothing to exchange.

  Args:
    config: the config, with the settings of the exchange.
    layout: the layout from `make_layout`.
    sizes: sizes of the axes along which gradients are exchanged.

  Raises:
    ConfigError: gradients are summed along fsdp, and no other axis has several devices.
  """
  exchange, name = config.exchange, type(config.exchange).__name__
  is_exact = exchange.sends_whole and not exchange.delayed
  if layout is None or layout.shard not in ("zero2", "fsdp"):
    return
  if math.prod(sizes.values()) == 1 and not is_exact:
    problem = "has nothing to send, because fsdp sums all gradients"
    fix = "use a plain AllReduce, or set mesh.data or mesh.replica to 2 or more"
    raise invalid("Config.exchange", f"{name}{'(delayed)' * exchange.delayed}", problem, fix)


def check_memory(config: cfg.Config, device: Any) -> None:
  """Raise if a setting needs host memory that the devices cannot access.

  Raises:
    ConfigError: a setting of the layout needs host memory.
  """
  kinds = [memory.kind for memory in device.addressable_memories()]
  if HOST in kinds:
    return
  needs = {"remat": "offload", "optimizer": "host"}
  if not kinds:  # abstract GPUs, for which programs are only compiled
    del needs["remat"]  # compiles anyway
  for field, value in needs.items():
    if getattr(config.layout, field) == value:
      problem = f"needs memory of the kind {HOST!r}, which JAX does not support on this "
      fix = "use a different value"
      raise invalid(f"Layout.{field}", repr(value), f"{problem}{device.platform}", fix)


def _check_rules(
  shapes: Any, user_rules: Sequence[Rule], model_rules: Sequence[Rule], mesh: Mesh, splits: str
) -> None:
  """Raise if the model would compute wrong results with the user's rules.

  Along `stage` and `model` the model's operations require the split of its own rules. If
  a branch's matrices were not split, for example, its output would be added once per
  device.
  """
  sizes = dict(mesh.shape)
  if splits in ("ring", "all_to_all"):
    sizes.pop("model", None)
    for rule in user_rules:
      if not callable(rule.dims) and "model" in rule.dims:
        problem = "splits a parameter along model, but with "
        problem += f"Layout.model={splits!r} this axis splits only tokens"
        raise invalid("Layout.rules", repr(rule.pattern), problem, "write - instead")
  user_specs, model_specs = (partition(shapes, rules, sizes) for rules in (user_rules, model_rules))
  paths = jax.tree_util.tree_leaves_with_path(shapes)
  specs = zip(paths, *map(jax.tree.leaves, (user_specs, model_specs)), strict=True)
  for (path, _), spec, expected in specs:
    name = path_name(path)
    for axis in ("stage", "model"):
      splits, needs = (
        f"dim {tuple(s).index(axis)}" if axis in s else "no dim" for s in (spec, expected)
      )
      if splits != needs:
        problem = f"along {axis} the model splits {needs} of {name}, but the rule for it splits "
        raise invalid("Layout.rules:", ..., f"{problem}{splits}", "change the rule")
    if name.startswith("layers/") and spec[0] == "fsdp":
      problem = f"dim 0 of {name} counts layers and cannot be split along fsdp"
      raise invalid("Layout.rules:", ..., problem, "split a different dim")


def _check_divides(config: cfg.Config, mesh: Mesh, shapes: Any) -> None:
  """Raise if heads, layers or classes cannot be divided over the mesh.

  The columns of heads might be divisible, but not the heads themselves. For layers and
  classes the error reports the setting instead of a parameter's dim.
  """
  size, head = mesh.shape.get("model", 1), shapes.get("head", {})
  classes = head["bias"].size if config.model.is_stack and "bias" in head else 0
  if classes % size and config.layout.model.startswith("layers"):
    fix = f"set {type(config.model).__name__}.pad_classes_to to a multiple of {size}"
    raise invalid("Mesh.model", size, f"does not divide the {classes} classes of the head", fix)
  fields = {"stage": ("num_layers",), "model": ("num_heads", "num_kv_heads")}
  if config.layout.model == "ring":
    del fields["model"]
  for axis, names in fields.items():
    size, m = mesh.shape.get(axis, 1), config.model
    for field in names:
      parts = getattr(m, field, None)
      if parts is not None and parts % size:
        is_text = axis == "model" and m.takes_text
        fix = "give a divisor" + ", or layout.model='ring', which splits no heads" * is_text
        problem = f"does not divide {type(m).__name__}.{field}={parts}"
        raise invalid(f"Mesh.{axis}", size, problem, fix)


def make_loss(
  config: cfg.Config,
  model: Model,
  layout: Layout | None,
  objective: AnyLoss,
  mesh: Mesh,
  remat: str,
) -> Any:
  """Build the loss of a train step: a `step.LossFn` or `PipelineGrads`.

  Args:
    config: the config, for the pipeline schedule and the loop over layers.
    model: the model; a stack applies label smoothing itself.
    layout: the layout from `make_layout`.
    objective: the objective of `Config.loss`, for models that are not stacks.
    mesh: the mesh of all devices.
    remat: the policy from `remat.choose`, for stacks.
  """
  if isinstance(model, models.Stack):
    assert layout is not None
    how: Any = {"remat": remat, "unroll": config.layout.unroll}
    if "stage" not in layout.mesh.axis_names:
      return parallel.stack_loss(model, layout, **how)
    piped = {"gpipe": parallel.gpipe_grads, "1f1b": parallel.one_f_one_b_grads}
    return piped[config.layout.schedule](model, layout, **how)
  return loss_of(model, objective, mesh, _sharded(layout))


def make_totals(
  model: Model, layout: Layout | None, objective: AnyLoss, mesh: Mesh, metrics: Mapping[str, Metric]
) -> Any:
  """Build the totals of an eval step: a `step.EvalFn`."""
  if isinstance(model, models.Stack):
    assert layout is not None
    return parallel.stack_totals(model, layout)
  return _sharded(layout)(totals_of(model, objective, mesh, metrics))


def _sharded(layout: Layout | None) -> Any:
  """Return a wrapper of functions of full parameters."""
  if layout is None:
    return lambda function: function
  return functools.partial(parallel.with_gathered_params, gathers=layout.gathers)
