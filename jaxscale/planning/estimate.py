"""Estimate memory and time of a layout by arithmetic, to choose what to compile first.

A device needs at least its part of the state, and the activations kept for the backward pass:

    kept >= layers tokens (width + half of the products' outputs) itemsize

The second term only applies where `remat` keeps products. Programs need more, so this bound
never excludes a layout that fits. The likely memory and the time (products at the chip's usual
share of its peak, collectives by `transfer`) only set the order of compilation.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from jaxscale import collectives
from jaxscale import config as cfg
from jaxscale.hlo import Collective
from jaxscale.planning import transfer
from jaxscale.planning.machine import Rates, links

_HIDDEN_DURING = 0.9  # of compute, which can hide collectives of single layers
_SLOW_AXES = "replica", "data"
# Forward passes by remat, in addition to the two products of a backward pass; else as "dots".
_PASSES = {"none": 1.0, "branches": 1.9, "full": 2.0, "offload": 2.0}
_PASSES_OF_DOTS = 1.02
# Kept activations per layer without remat, as a multiple of the products' outputs. Calibrated
# by 78 GiB for llama_7b on 64 H100 with 2 rows per micro-batch.
_KEPT_BY_NONE = 4.8


class Candidate(NamedTuple):
  """Settings that a search tries.

  Attributes:
    mesh: the sizes of the axes, none of them -1.
    layout: the layout, which sets what is split along them.
    num_microbatches: the number of micro-batches per step.
  """

  mesh: cfg.Mesh
  layout: cfg.Layout
  num_microbatches: int


class Shapes(NamedTuple):
  """Sizes of a model over all devices.

  Attributes:
    parameters: the number of parameters.
    others: the number of parameters outside the stack of layers.
    moments: the bytes of the optimizer state.
    matrices: the number of parameters in matrices that the optimizer deals out (`parallel.deal`).
    matrix_flops: the FLOPs of the optimizer for all of these matrices in a step.
    matrix_dtype: the dtype of their products, "float32" or "bfloat16".
    layers: the number of layers in the stack; 1 if the model has no stack.
    outputs: the elements per token in the outputs of all products with weights of the
      stack; 0 if the model is not a stack.
    vocab: the outputs of the head per token; 0 if unknown.
    width: the width of the residual stream.
    tokens: the tokens per example.
    flops: the FLOPs of an example's forward pass.
    itemsize: the bytes of an activation.
    sent_size: the bytes of an element of a layer's parameters that is gathered.
  """

  parameters: int
  others: int
  moments: int
  matrices: int
  matrix_flops: float
  matrix_dtype: str
  layers: int
  outputs: int
  vocab: int
  width: int
  tokens: int
  flops: float
  itemsize: int
  sent_size: int


class Estimate(NamedTuple):
  """Bytes that a device needs at least and probably, and seconds of a step."""

  least: float
  memory: float
  seconds: float


def shapes_of(experiment: Any) -> Shapes:
  """Return the sizes of an experiment's model; nothing is compiled.

  Args:
    experiment: the `build.Experiment`, for devices that need not be present.
  """
  import jax

  from jaxscale.optim.matrices import dealt_matrices
  from jaxscale.optim.tree_paths import path_name
  from jaxscale.parallel.trainable import trainable_part
  from jaxscale.training.flops import FORWARD_AND_BACKWARD

  config, state = experiment.config, experiment.abstract_state()
  leaves = jax.tree_util.tree_leaves_with_path(state.params)
  params = [(path_name(path), x.shape) for path, x in leaves]
  stack = [shape for name, shape in params if name.startswith("layers/")]
  parameters = sum(math.prod(shape) for _, shape in params)
  flops = experiment.example_flops / FORWARD_AND_BACKWARD
  trained = trainable_part(state.params, experiment.trainable)
  dealt = [] if experiment.sync else dealt_matrices(experiment.tx, trained)
  tokens = 1
  if config.model.is_stack:
    products = 2 * sum(math.prod(shape) for shape in stack if len(shape) == 3)
    tokens = getattr(config.data, "sequence_length", 0) or max(int(flops / products), 1)
  return Shapes(
    parameters=parameters,
    moments=collectives.payload_bytes(state.opt_state),
    matrices=sum(math.prod(x.leaf.shape) for x in dealt),
    matrix_flops=sum(x.leaf.count * x.flops for x in dealt),
    matrix_dtype=getattr(config.optimizer, "ns_dtype", "float32"),
    others=parameters - sum(math.prod(shape) for shape in stack),
    layers=stack[0][0] if stack else 1,
    outputs=sum(shape[0] * shape[2] for shape in stack if len(shape) == 3),
    vocab=getattr(config.data, "vocab_size", None) or 0,
    width=getattr(config.model, "width", 1),
    tokens=tokens,
    flops=flops,
    itemsize=4 if config.dtype == "float32" else 2,
    sent_size={"float32": 4, "float8": 1}.get(config.dtype, 2),
  )


def estimate(shapes: Shapes, one: Candidate, batch_size: int, rates: Rates) -> Estimate:
  """Estimate memory and time of a candidate.

  Args:
    shapes: the sizes of the model.
    one: the candidate, whose rows must divide.
    batch_size: the examples per step.
    rates: the rates of the chip and its links.
  """
  part = _Part(shapes, one, batch_size)
  at, ticks = rates.at("expected"), part.ticks
  peak = at["peak_bfloat16" if shapes.itemsize == 2 else "peak_float32"]
  peak *= at.get("matmul" if shapes.outputs else "convolution", 0.5)
  passes = 2 + _PASSES.get(str(one.layout.remat), _PASSES_OF_DOTS) + (one.mesh.stage > 1)
  compute = ticks * passes * part.rows * shapes.flops / (one.mesh.stage * one.mesh.model) / peak
  exposed = hidden = 0.0
  sizes = dataclasses.asdict(one.mesh)
  peak = at[f"peak_{shapes.matrix_dtype}"] * at.get("matmul", 0.5)
  compute += shapes.matrix_flops / math.prod(sizes.values()) / peak
  for kind, axes, payload, times in _sent(part):
    sent = Collective(kind, "", (), int(payload), payload, (), 1, axes, 1, True, False, False, None)
    took = times * transfer.seconds(sent, sizes, rates.per_node, links(at))
    in_backward = axes == _SLOW_AXES and one.layout.slow_axes == "in_backward"
    if in_backward or (axes == ("fsdp",) and times > 1):
      hidden += took
    else:
      exposed += took
  exposed += max(hidden - _HIDDEN_DURING * compute, 0.0) + at["contention"] * hidden
  return Estimate(*part.bytes(), compute + exposed + at["host"])


class _Part:
  """One device's part of a step, in elements and bytes."""

  def __init__(self, shapes: Shapes, one: Candidate, batch_size: int):
    mesh, layout = one.mesh, one.layout
    self.shapes, self.one = shapes, one
    self.rows = batch_size / (mesh.replica * mesh.data * mesh.fsdp * one.num_microbatches)
    is_whole = layout.model in ("ring", "all_to_all")  # parameters along the axis model
    self.blocks = mesh.stage * (1 if is_whole else mesh.model)
    self.parameters = shapes.parameters / self.blocks
    self.grads = self.parameters / (mesh.fsdp if layout.shard in ("zero2", "fsdp") else 1)
    self.state = shapes.moments / self.blocks / (mesh.fsdp if layout.shard != "none" else 1)
    self.state += 4 * self.parameters / (mesh.fsdp if layout.shard == "fsdp" else 1)
    self.tokens = self.rows * shapes.tokens / (mesh.model if is_whole else 1)
    # Between branches:
    self.between = self.rows * shapes.tokens / (1 if layout.model == "layers" else mesh.model)

  @property
  def ticks(self) -> int:
    """Return the number of micro-batch slots in a step, including pipeline bubbles."""
    idle = self.one.mesh.stage - 1
    return self.one.num_microbatches + idle * (1 + (self.one.layout.schedule == "1f1b"))

  def bytes(self) -> tuple[float, float]:
    """Return the (least, likely) bytes of a device."""
    shapes, mesh, layout = self.shapes, self.one.mesh, self.one.layout
    inputs = self.between * shapes.width * shapes.itemsize  # of one layer
    outputs = self.tokens * shapes.itemsize * shapes.outputs / self.blocks
    kept = 0.0 if shapes.outputs == 0 else shapes.layers / mesh.stage * inputs
    if layout.remat in ("none", "dots_attention", "dots"):
      kept += outputs / 2
    least = kept
    if mesh.stage > 1:  # A stage is recomputed from its input.
      longest = 2 * mesh.stage - 1 if layout.schedule == "1f1b" else math.inf
      held = min(self.one.num_microbatches, longest)
      least, kept = held * inputs, held * inputs + kept
    kept *= _KEPT_BY_NONE if layout.remat == "none" else 1.0
    logits = 8 * self.tokens * shapes.vocab / mesh.model
    layer = (shapes.parameters - shapes.others) / shapes.layers + shapes.others
    working = 4 * outputs * mesh.stage / shapes.layers + logits + 4 * layer / self.blocks
    likely = self.state + 1.2 * (kept + 4 * self.grads) + working
    return self.state + max(least, 4 * self.grads), likely


def _sent(part: _Part) -> Iterator[tuple[str, tuple[str, ...], float, float]]:
  """Yield (collective, axes, bytes, times) of a step."""
  shapes, layout, mesh = part.shapes, part.one.layout, part.one.mesh
  size, num_microbatches, ticks = shapes.itemsize, part.one.num_microbatches, part.ticks
  if layout.shard == "fsdp":
    others = shapes.others / part.blocks
    sent = size * others + shapes.sent_size * (part.parameters - others)
    yield "all-gather", ("fsdp",), sent, 2 * ticks
  if layout.shard in ("fsdp", "zero2"):
    reduced = 4 if layout.reduce_in == "float32" else size
    yield "reduce-scatter", ("fsdp",), reduced * part.parameters, ticks
  if layout.shard in ("zero1", "zero2"):
    yield "all-gather", ("fsdp",), 4 * part.parameters, 1
  axes = _SLOW_AXES if layout.shard in ("fsdp", "zero2") else (*_SLOW_AXES, "fsdp")
  times = num_microbatches if layout.slow_axes == "in_backward" else 1
  yield "all-reduce", axes, 4 * part.grads, times
  if shapes.matrices:
    yield from _dealt(part)
  if mesh.stage > 1:
    yield "collective-permute", ("stage",), part.between * shapes.width * size, 2 * ticks
  if mesh.model == 1:
    return
  axes, again = ("model",), layout.remat in ("full", "branches")
  whole = part.rows * shapes.tokens * shapes.width
  sums = whole * (4 if layout.sum_in == "float32" else size)
  times = ticks * shapes.layers / mesh.stage * (5 if again else 4)
  if layout.model == "layers":
    yield "all-reduce", axes, sums, times
  elif layout.model == "layers_and_tokens":
    yield "reduce-scatter", axes, sums, times
    yield "all-gather", axes, size * whole, times
  else:
    yield "all-reduce", axes, 4 * part.grads, 1
    block = whole * size / mesh.model
    if layout.model == "all_to_all":
      yield "all-to-all", axes, block, 2 * times
    else:
      yield "collective-permute", axes, block, 2 * times * (mesh.model - 1) * 0.8


def _dealt(part: _Part) -> Iterator[tuple[str, tuple[str, ...], float, float]]:
  """Yield the collectives of an optimizer that deals matrices out (`parallel.deal`)."""
  layout, sizes = part.one.layout, dataclasses.asdict(part.one.mesh)
  splits = {"fsdp": layout.shard != "none", "model": part.blocks > part.one.mesh.stage}
  across = tuple(a for a, is_split in splits.items() if is_split and sizes[a] > 1)
  others = tuple(a for a, n in sizes.items() if n > 1 and a not in (*across, "stage"))
  held = 4 * part.shapes.matrices / part.one.mesh.stage / math.prod(sizes[a] for a in across)
  if across:
    yield "all-to-all", across, held / math.prod(sizes[a] for a in others), 2
  if others:
    yield "all-gather", others, held, 1
