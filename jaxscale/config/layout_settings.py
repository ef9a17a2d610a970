"""Settings of the sharding of a model over the devices."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from jaxscale.config.bounds import check_pattern
from jaxscale.config.phase_settings import AdaptiveBatch
from jaxscale.config.validation import settings
from jaxscale.errors import ConfigError, invalid


@settings
class Layout:
  """Sharding of model and optimizer over the mesh axes fsdp, stage and model.

  Attributes:
    shard: the part of the training state that is split along mesh axis fsdp; "none", "zero1"
      (optimizer state), "zero2" (also gradients) or "fsdp" (also parameters, gathered layer by
      layer).
    slow_axes: the time at which gradients that are split along mesh axis fsdp are summed over
      axes replica and data; "after" sums once per step, after the backward pass, "in_backward"
      layer by layer in every micro-batch, so that the sum of a layer overlaps with the backward
      pass of the remaining layers.
    model: the dimension that is split along mesh axis model; "layers" (heads, hidden units,
      vocabulary and classes), "layers_and_tokens" (in addition the tokens, outside of attention
      and MLP), or only the tokens, with "ring" attention or with "all_to_all" exchanges of
      heads in attention.
    sum_in: the type in which sums over mesh axis model are communicated; "float32" gives the
      results of layers that are not split, "dtype" rounds to Config.dtype (half the bytes with
      bfloat16).
    reduce_in: the type in which the backward pass sums gradients of matrices over mesh axis fsdp,
      and over slow_axes="in_backward"; "float32" is exact, "dtype" rounds each device's gradients
      and their sums to the type of activations (half the bytes with bfloat16).
    schedule: the pipeline schedule along mesh axis stage, with accumulate_steps micro-batches;
      "gpipe" (all forward passes, then all backward passes) or "1f1b" (each backward pass as
      early as possible, so that fewer activations are stored).
    remat: the activations that the backward pass recomputes; "none", "dots_attention" (all but
      the outputs of products with weights and of attention), "dots" (attention, too), "branches"
      (all but the outputs of attention and MLP), "full" (all in a layer, from its input) or
      "offload" (as "full", with the inputs of layers in host memory). Device memory decreases in
      this order. None chooses the first that fits the memory of the devices, and "none" on CPUs
      and for other models than Transformer and ViT; the log says which. A pipeline stage is
      always recomputed from its input; `remat` then applies to the layers in it. ResNet,
      ConvNeXt, UNet and CNN have "none", "dots", "full" and "offload", and so do models of users
      that name the inputs of their blocks.
    unroll: the number of layers that one iteration of the loop over layers computes, or "all",
      which leaves no loop; None chooses "all" where nothing is recomputed and layers are few
      (6 on CPUs, 32 elsewhere), else 1. Compilation takes longer, and a loop copies all values
      that it stores for the backward pass.
    optimizer: the memory in which the optimizer state is kept between steps; "device", or
      "host", which saves device memory, but copies the state to the device and back in every
      step.
    loss_chunk: the number of a device's targets (tokens, or images) whose logits are in memory
      at a time, e.g. 2048 for a large vocabulary; the backward pass computes the logits again,
      one more product with the head. 0 keeps the logits of all targets.
    rules: the sharding rules that replace the model's, each a pattern of parameter paths and
      the mesh axis that splits each dim, e.g. ("layers/.*/kernel: stage, fsdp, model",), with
      "-" for a dim that is not split; () keeps the model's rules. Each parameter must match
      exactly one pattern. Rules can change what fsdp splits, but not what stage and model
      split.
  """

  shard: Literal["none", "zero1", "zero2", "fsdp"] = "none"
  slow_axes: Literal["after", "in_backward"] = "after"
  model: Literal["layers", "layers_and_tokens", "ring", "all_to_all"] = "layers"
  sum_in: Literal["float32", "dtype"] = "float32"
  reduce_in: Literal["float32", "dtype"] = "float32"
  schedule: Literal["gpipe", "1f1b"] = "gpipe"
  remat: Literal["none", "dots_attention", "dots", "branches", "full", "offload"] | None = None
  unroll: Annotated[int | Literal["all"], ">= 1"] | None = None
  optimizer: Literal["device", "host"] = "device"
  loss_chunk: Annotated[int, ">= 0"] = 0
  rules: tuple[str, ...] = ()

  def __post_init__(self):
    for rule in self.rules:
      field, (pattern, colon, dims) = f"Layout.rules={rule!r}", rule.rpartition(":")
      axes = [dim.strip() for dim in dims.split(",")]
      if not colon or not set(axes) <= {"-", "fsdp", "stage", "model"}:
        form = "'PATTERN: AXIS, AXIS, ...', for each dim fsdp, stage, model"
        raise ConfigError(f"{field}: give {form}, or - if it is not split")
      if twice := [axis for axis in axes if axis != "-" and axes.count(axis) > 1]:
        raise ConfigError(f"{field}: {twice[0]} splits two dims; use it once")
      check_pattern("Layout.rules", pattern, "give e.g. 'layers/.*/kernel'")


def check_layout(config: Any) -> None:
  """Refuse a layout that does not fit the rest of a `Config`.

  Raises:
    ConfigError: two settings contradict each other, or a setting has no effect.
  """
  layout, mesh = config.layout, config.mesh
  shard = f"Layout.shard={layout.shard!r}"
  parts = [f"Mesh.{a}={n}" for a in ("stage", "model") if (n := getattr(mesh, a)) != 1]
  model = type(config.model).__name__
  if layout.shard != "none" and mesh.fsdp == 1:
    remedy = "set mesh.fsdp, e.g. to -1 with mesh.data=1"
    raise ConfigError(f"{shard}: splits along fsdp, which has one device; {remedy}")
  if layout.shard == "none" and mesh.fsdp != 1:
    remedy = "set layout.shard, e.g. to 'fsdp', or use mesh.data"
    raise ConfigError(f"Mesh.fsdp={mesh.fsdp}: splits nothing while {shard}; {remedy}")
  splits_grads, has_slow_axes = layout.shard in ("zero2", "fsdp"), mesh.replica * mesh.data != 1
  splits_layers = mesh.model != 1 and layout.model.startswith("layers")
  is_split, several = mesh.model != 1 or layout.model == "layers", "to 2 or more"
  layers = f"mesh.model {several}, and layout.model to 'layers'"
  halves = "dtype to 'bfloat16' or 'float16'"
  for field, value, needs, remedy in (
    ("slow_axes", "in_backward", splits_grads, "layout.shard to 'zero2' or 'fsdp'"),
    ("slow_axes", "in_backward", has_slow_axes, f"mesh.replica or mesh.data {several}"),
    ("schedule", "1f1b", mesh.stage != 1, f"mesh.stage {several}"),
    ("model", layout.model, is_split, f"mesh.model {several}"),
    ("sum_in", "dtype", splits_layers, layers),
    ("sum_in", "dtype", config.dtype != "float32", halves),
    ("reduce_in", "dtype", splits_grads, "layout.shard to 'zero2' or 'fsdp'"),
    ("reduce_in", "dtype", config.dtype != "float32", halves),
  ):
    if getattr(layout, field) == value and not needs:
      problem = f"has no effect; set {remedy} as well"
      raise ConfigError(f"Layout.{field}={value!r}: {problem}")
  of_stacks = parts + [f"Layout.unroll={layout.unroll!r}"] * (layout.unroll is not None)
  of_stacks += [f"Layout.loss_chunk={layout.loss_chunk}"] * (layout.loss_chunk != 0)
  if of_stacks and not config.model.is_stack:
    problem = f"{model} is not a stack of equal layers"
    remedy = "use Transformer or ViT, or only mesh.fsdp, and the defaults of unroll and loss_chunk"
    raise ConfigError(f"{of_stacks[0]}: {problem}; {remedy}")
  splits_text = config.model.is_stack and config.model.takes_text
  if layout.model != "layers" and not splits_text:
    problem = f"splits tokens of text, and {model} takes images; use 'layers'"
    raise ConfigError(f"Layout.model={layout.model!r}: {problem}")
  if layout.slow_axes == "in_backward" and not config.exchange.is_plain:
    exchange = type(config.exchange).__name__
    problem = f"sums gradients in the backward pass and would bypass Config.exchange={exchange}"
    fix = "use 'after', or exchange=AllReduce with its defaults"
    raise invalid("Layout.slow_axes", "in_backward", problem, fix)
  if config.dtype in ("float16", "float8") and mesh.stage != 1:
    problem = f"a pipeline computes its gradients itself, without the scales of {config.dtype}"
    raise ConfigError(f"Mesh.stage={mesh.stage}: {problem}; use bfloat16, or mesh.stage=1")
  if config.dtype == "float8" and not config.model.is_stack:
    problem = f"is for the layers of Transformer and ViT, and not for {model}"
    raise invalid("Config.dtype", "float8", problem, "use bfloat16")
  if split := [shard] * (layout.shard != "none") + parts:
    _check_whole(config, split[0])


def _check_whole(config: Any, split: str) -> None:
  """Refuse settings that need the whole model on each device if the model is split."""
  is_adaptive = isinstance(config.phases, AdaptiveBatch)
  for what, is_asked, remedy in (
    ("Config.noise_scale=True", config.noise_scale, "set it to False"),
    (f"Config.sync={type(config.sync).__name__}", config.is_local_sgd, "use EveryStep"),
    ("Log.step_report=True", config.log.step_report, "set it to False"),
    ("Config.phases=AdaptiveBatch", is_adaptive, "use Phases"),
  ):
    if is_asked:
      problem = "needs the whole model on each device"
      raise ConfigError(f"{what}: {problem}, which {split} splits; {remedy}")
