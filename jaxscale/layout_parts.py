"""From a Config to what a layout makes of a model: its parts, its loss and its totals.

The part of `parts` that is about models that are spread over devices; what it makes
are pure functions.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh

from jaxscale import config as cfg
from jaxscale import losses, models, parallel
from jaxscale.parallel import model_rules
from jaxscale.parallel.layout import HOST, Layout
from jaxscale.settings import ConfigError

Model = models.ModelFns | models.Stack


def init_fn(model: Model) -> Any:
  """The function key -> (params, model_state) of any model."""
  if isinstance(model, models.Stack):
    return lambda key: (model.init(key), {})
  return model.init


def make_layout(config: cfg.Config, mesh: Mesh, model: Model) -> Layout | None:
  """How the model lies on the mesh; None: all of it on every device.

  Raises:
    ConfigError: a parameter that no rule fits, or several, or that does not divide.
  """
  chosen = config.layout
  splits = {"stage", "model"} & set(mesh.axis_names) or chosen.shard != "nothing"
  on_host = chosen.optimizer == "host"
  if not splits and not on_host and not isinstance(model, models.Stack):
    return None
  rules = {cfg.Transformer: model_rules.TRANSFORMER, cfg.ViT: model_rules.VIT}.get(
    type(config.model), model_rules.OTHERS
  )
  if chosen.rules:
    rules = tuple(model_rules.parse(rule) for rule in chosen.rules)
  shapes = jax.eval_shape(init_fn(model), jax.random.key(0))[0]
  check_memory(config, mesh.devices.flat[0])
  half = config.dtype if config.dtype != "float32" else None
  _check_divides(config, mesh)
  return parallel.make_layout(
    mesh, shapes, rules, shard=chosen.shard, slow=chosen.slow_axes,
    splits=chosen.model, dtype=half,
    sum_in=half if chosen.sum_in == "dtype" else None,
    opt_on_host=on_host,
  )  # fmt: skip


def check_memory(config: cfg.Config, device: Any) -> None:
  """Refuse what needs the host's memory where devices cannot reach it."""
  kinds = [memory.kind for memory in device.addressable_memories()]
  if HOST in kinds:
    return
  asked = {
    "remat": config.layout.remat == "offload",
    "optimizer": config.layout.optimizer == "host",
  }
  if not kinds:  # of GPUs that are not here
    asked["remat"] = False  # compiles all the same
  for field, is_asked in asked.items():
    if is_asked:
      raise ConfigError(
        f"Layout.{field}={getattr(config.layout, field)!r}: JAX knows of no memory of "
        f"the kind {HOST!r} here ({device.platform}); use another"
      )


def _check_divides(config: cfg.Config, mesh: Mesh) -> None:
  """Refuse to split a head: the columns would divide, and be other heads.

  Layers likewise: the line then names the setting, not a parameter's dim.
  """
  fields = {"stage": ("num_layers",), "model": ("num_heads", "num_kv_heads")}
  if config.layout.model == "ring":
    del fields["model"]
  for axis, names in fields.items():
    size, m = mesh.shape.get(axis, 1), config.model
    for field in names:
      parts = getattr(m, field, None)
      if parts is not None and parts % size:
        raise ConfigError(
          f"Mesh.{axis}={size}: does not divide {type(m).__name__}.{field}={parts}; "
          "give a divisor"
          + (", or layout.model='ring'" * (config.layout.model == "all_to_all"))
        )


def make_loss(config: cfg.Config, model: Model, layout: Layout | None) -> Any:
  """The loss of a train step: a `step.LossFn`, or what makes gradients itself.

  Args:
    config: says how a pipeline goes and what layers keep.
    model: whose smoothing of labels, where it is a stack, is its own.
    layout: of `make_layout`.
  """
  if isinstance(model, models.Stack):
    assert layout is not None
    remat = config.layout.remat
    if "stage" not in layout.mesh.axis_names:
      return parallel.stack_loss(model, layout, remat=remat)
    piped = {"gpipe": parallel.gpipe_grads, "1f1b": parallel.one_f_one_b_grads}
    return piped[config.layout.schedule](model, layout, remat=remat)
  loss = losses.classification_loss(model.apply, label_smoothing=config.label_smoothing)
  return loss if layout is None else parallel.entered(loss, layout.entries)


def make_totals(model: Model, layout: Layout | None) -> Any:
  """The totals of an eval step: a `step.EvalFn`."""
  if isinstance(model, models.Stack):
    assert layout is not None
    if "stage" in layout.mesh.axis_names:
      return parallel.piped_totals(model, layout)
    return parallel.stack_totals(model, layout)
  totals = losses.classification_totals(model.apply)
  return totals if layout is None else parallel.entered(totals, layout.entries)
