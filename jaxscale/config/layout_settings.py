"""Settings of how a model is sharded over the devices."""

from __future__ import annotations

from typing import Any, Literal

from jaxscale.config.bounds import check_pattern
from jaxscale.config.phase_settings import AdaptiveBatch
from jaxscale.config.validation import settings
from jaxscale.errors import ConfigError, invalid


@settings
class Layout:
  """What is split over the devices along the mesh's axes fsdp, stage and model.

  Attributes:
    shard: what is split along fsdp: "none", "zero1": the optimizer state,
      "zero2": and gradients, "fsdp": and parameters, which are then gathered
      layer by layer.
    slow_axes: where gradients that are split along fsdp are summed over replica and
      data: "after" the backward pass, once a step, or "in_backward", layer by layer
      and in every micro-batch, where the layers that are left can hide it.
    model: what is split along model: "layers" (heads, hidden units, vocabulary and
      classes), "layers_and_tokens" (and between the branches of a layer the tokens),
      or tokens alone, whose attention goes by "ring" or "all_to_all".
    sum_in: what devices along model sum: "float32", so that a layer that is split gives
      what a whole one does, or rounded to Config.dtype, half the bytes of bfloat16.
    schedule: of a pipeline along stage, whose micro-batches are accumulate_steps:
      "gpipe" (all forwards first) or "1f1b" (each backwards at once).
    remat: what a layer computes again in its backward pass: "none" of it, all but
      products with weights ("dots"), all but what its branches add ("branches"), or
      all of it from its input ("full"), which keeps the least in memory; "offload" is
      as "full", and what comes into a layer, which every other keeps as well, waits in
      the host's memory. A stage of a pipeline is always computed again from its input;
      there this is about the layers within it.
    optimizer: where its state is between steps: on the "device", or on the "host",
      from where it is brought for the update.
    rules: in place of the model's own, which axis splits which dim of a parameter:
      ("layers/.*/kernel: stage, fsdp, model",), with "-" for a dim that nothing
      splits. Exactly one pattern must fit each parameter. What fsdp splits is free;
      what stage and model split is what the model computes with, and stays.
  """

  shard: Literal["none", "zero1", "zero2", "fsdp"] = "none"
  slow_axes: Literal["after", "in_backward"] = "after"
  model: Literal["layers", "layers_and_tokens", "ring", "all_to_all"] = "layers"
  sum_in: Literal["float32", "dtype"] = "float32"
  schedule: Literal["gpipe", "1f1b"] = "gpipe"
  remat: Literal["none", "dots", "branches", "full", "offload"] = "none"
  optimizer: Literal["device", "host"] = "device"
  rules: tuple[str, ...] = ()

  def __post_init__(self):
    for rule in self.rules:
      field, (pattern, colon, dims) = f"Layout.rules={rule!r}", rule.rpartition(":")
      axes = [dim.strip() for dim in dims.split(",")]
      if not colon or not set(axes) <= {"-", "fsdp", "stage", "model"}:
        form = "'PATTERN: axis, axis', an axis of fsdp, stage, model for each dim"
        raise ConfigError(f"{field}: give {form}, or - for one that nothing splits")
      if twice := [axis for axis in axes if axis != "-" and axes.count(axis) > 1]:
        raise ConfigError(f"{field}: {twice[0]} splits two dims; name it once")
      check_pattern("Layout.rules", pattern, "give e.g. 'layers/.*/kernel'")


def check_layout(config: Any) -> None:
  """Refuse a layout that does not fit the rest of a `Config`.

  Raises:
    ConfigError: two settings contradict each other, or one changes nothing.
  """
  layout, mesh = config.layout, config.mesh
  shard = f"Layout.shard={layout.shard!r}"
  parts = [f"Mesh.{a}={n}" for a in ("stage", "model") if (n := getattr(mesh, a)) != 1]
  model = type(config.model).__name__
  if layout.shard != "none" and mesh.fsdp == 1:
    remedy = "set mesh.fsdp, e.g. to -1 with mesh.data=1"
    raise ConfigError(f"{shard}: is split along fsdp, which has one device; {remedy}")
  if layout.shard == "none" and mesh.fsdp != 1:
    remedy = "set layout.shard, e.g. to 'fsdp', or use mesh.data"
    raise ConfigError(f"Mesh.fsdp={mesh.fsdp}: splits nothing while {shard}; {remedy}")
  splits_grads = layout.shard in ("zero2", "fsdp")
  splits_layers = mesh.model != 1 and layout.model.startswith("layers")
  is_split, several = mesh.model != 1 or layout.model == "layers", "to 2 or more"
  layers = f"mesh.model {several}, and layout.model to 'layers'"
  for field, value, needs, remedy in (
    ("slow_axes", "in_backward", splits_grads, "layout.shard to 'zero2' or 'fsdp'"),
    (
      "slow_axes",
      "in_backward",
      mesh.replica * mesh.data != 1,
      f"mesh.replica or mesh.data {several}",
    ),
    ("schedule", "1f1b", mesh.stage != 1, f"mesh.stage {several}"),
    ("model", layout.model, is_split, f"mesh.model {several}"),
    ("sum_in", "dtype", splits_layers, layers),
    ("sum_in", "dtype", config.dtype != "float32", "dtype to 'bfloat16'"),
  ):
    if getattr(layout, field) == value and not needs:
      why = f"changes nothing here; set {remedy} as well"
      raise ConfigError(f"Layout.{field}={value!r}: {why}")
  of_stacks = parts + [f"Layout.remat={layout.remat!r}"] * (layout.remat != "none")
  if of_stacks and not config.model.is_stack:
    why = f"{model} is not a stack of equal layers"
    remedy = "use Transformer or ViT, or split it along fsdp alone"
    raise ConfigError(f"{of_stacks[0]}: {why}; {remedy}")
  splits_text = config.model.is_stack and config.model.takes_text
  if layout.model != "layers" and not splits_text:
    why = f"splits the tokens of text, and {model} has images; use 'layers'"
    raise ConfigError(f"Layout.model={layout.model!r}: {why}")
  if layout.slow_axes == "in_backward" and not config.exchange.is_plain:
    exchange = type(config.exchange).__name__
    why = f"sums gradients by itself, Config.exchange={exchange} would not be asked"
    fix = "use 'after', or the exchange AllReduce as it is"
    raise invalid("Layout.slow_axes", "in_backward", why, fix)
  if split := [shard] * (layout.shard != "none") + parts:
    _check_whole(config, split[0])


def _check_whole(config: Any, split: str) -> None:
  """Refuse what compares or copies whole models, where devices have parts."""
  is_adaptive = isinstance(config.phases, AdaptiveBatch)
  for what, is_asked, remedy in (
    ("Config.noise_scale=True", config.noise_scale, "set it to False"),
    (f"Config.sync={type(config.sync).__name__}", config.is_local_sgd, "use EveryStep"),
    ("Log.step_report=True", config.log.step_report, "set it to False"),
    ("Config.phases=AdaptiveBatch", is_adaptive, "use Phases"),
  ):
    if is_asked:
      why = "needs the whole model on each device"
      raise ConfigError(f"{what}: {why}, {remedy}; here {split}")
