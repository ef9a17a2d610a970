"""Memory and seconds of a layout by arithmetic, to know what is worth compiling.

State is exact: shapes and shardings are those that the run would make, and each
device's part is summed. What a backward pass keeps is bounded from below,

    kept >= layers tokens (width + half of what products with weights give) itemsize

the second only where `remat` keeps products; so what does not fit by this does not fit.

Seconds are those of the products of a layer by their local sizes (`kernels`), memory
traffic in passes over the residual stream, and what is sent by `transfer`. They only
order what is compiled: the plan of a program takes their place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxscale.planning import kernels, transfer
from jaxscale.planning.candidates import Candidate
from jaxscale.planning.hlo import Collective
from jaxscale.planning.kernels import Kernel
from jaxscale.planning.machine import Rates, links

# Passes over the residual stream of a layer, of which those within its branches are
# split along model: chosen on compiled steps of llama_1b and llama_7b, docs/plan.md.
_STREAM_PASSES, _BRANCH_PASSES = 67, 33
_HIDDEN_DURING = 0.9  # of compute, that FSDP's collectives may take
_GRADIENT_BYTES = 4
# Of a gradient's element, by the exchange; with the sizes that it has by default.
_SENT_BYTES = {
  "HalfPrecision": 2,
  "Int8": 1,
  "OneBit": 0.2,
  "TopK": 0.5,
  "PowerSGD": 0.2,
}
# Forward passes by remat, next to the two of a backward pass.
_PASSES = {"none": 1.0, "dots": 1.02, "branches": 1.9, "full": 2.0, "offload": 2.0}


class Facts(NamedTuple):
  """What is known of a layout's shapes before it is compiled.

  Attributes:
    state: bytes of a device between steps.
    gradients: elements of a device.
    products: (k, n, times) of a device: products of its layers with weights.
    head: (k, n, times) of the head.
    layers: of a device; 0: the model is no stack.
    layer_elements: of a device's layers, were nothing split along fsdp.
    other_elements: of its other parameters, likewise.
    width: of the residual stream.
    tokens: of an example.
    flops: forwards, of an example, other than those products.
    all_flops: forwards, of an example.
    itemsize: bytes of an activation.
  """

  state: int
  gradients: int
  products: tuple[tuple[int, int, int], ...]
  head: tuple[tuple[int, int, int], ...]
  layers: int
  layer_elements: int
  other_elements: int
  width: int
  tokens: int
  flops: float
  all_flops: float
  itemsize: int


class Estimate(NamedTuple):
  """Of one candidate.

  Attributes:
    least: bytes of a device that it takes at least.
    memory: bytes that it may take.
    seconds: of a step.
  """

  least: float
  memory: float
  seconds: float


def facts_of(experiment: Any) -> Facts:
  """Shapes and shardings of an experiment that is not compiled.

  Args:
    experiment: `build.Experiment`, for devices that need not be here.
  """
  import jax

  from jaxscale.optim.tree_paths import path_name
  from jaxscale.parallel.placement import HOST
  from jaxscale.training.flops import FORWARD_AND_BACKWARD

  state = experiment.abstract_state()
  arrays = [x for x in jax.tree.leaves(state) if hasattr(x.dtype, "itemsize")]
  size = sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for x in arrays
    if x.sharding.memory_kind != HOST
  )
  leaves = jax.tree_util.tree_leaves_with_path(state.params)
  local = [(path_name(path), _without(x, "fsdp")) for path, x in leaves]
  stack = [(name, shape) for name, shape in local if name.startswith("layers/")]
  config, model = experiment.config, experiment.config.model
  products = tuple((*s[1:], s[0]) for _, s in stack if len(s) == 3)
  head = tuple((*s, 1) for name, s in local if name == "head/kernel" and len(s) == 2)
  tokens = getattr(config.data, "sequence_length", 1)
  forward = experiment.example_flops / FORWARD_AND_BACKWARD
  shards = [math.prod(x.sharding.shard_shape(x.shape)) for _, x in leaves]
  splits = config.layout.shard in ("zero2", "fsdp")
  blocks = _size(experiment.mesh, "fsdp") if splits else 1
  whole = sum(math.prod(shape) for _, shape in local)
  in_layers = sum(math.prod(shape) for _, shape in stack)
  if not config.model.is_stack:
    products, stack, head, tokens = (), [], (), 1
  else:
    tokens = tokens if model.takes_text else _patches(experiment, products)
  dense = 2 * tokens * sum(k * n * t for k, n, t in (*products, *head))
  devices = _size(experiment.mesh, "stage") * _size(experiment.mesh, "model")
  return Facts(
    state=size,
    gradients=min(sum(shards), -(-whole // blocks)) if blocks > 1 else whole,
    products=products, head=head,
    layers=stack[0][1][0] if stack else 0,
    layer_elements=in_layers, other_elements=whole - in_layers,
    width=getattr(model, "width", 1), tokens=tokens,
    flops=max(forward - dense * devices, 0.0) if products else forward,
    all_flops=forward, itemsize=2 if config.dtype == "bfloat16" else 4,
  )  # fmt: skip


def _patches(experiment: Any, products: Any) -> int:
  """Tokens of an image, by the FLOPs of its products."""
  from jaxscale.training.flops import FORWARD_AND_BACKWARD

  each = 2 * sum(k * n * t for k, n, t in products)
  each *= _size(experiment.mesh, "stage") * _size(experiment.mesh, "model")
  forward = experiment.example_flops / FORWARD_AND_BACKWARD
  return max(int(forward / max(each, 1)), 1)


def _size(mesh: Any, axis: str) -> int:
  return dict(mesh.shape).get(axis, 1)


def _without(x: Any, axis: str) -> tuple[int, ...]:
  """The shape of a device's part, were it not split along one axis."""
  spec = tuple(x.sharding.spec) + (None,) * (len(x.shape) - len(x.sharding.spec))
  sizes, shape = dict(x.sharding.mesh.shape), []
  for n, axes in zip(x.shape, spec, strict=True):
    names = axes if isinstance(axes, tuple) else (axes,) if axes else ()
    shape.append(n // math.prod(sizes[a] for a in names if a != axis))
  return tuple(shape)


def estimate(facts: Facts, one: Candidate, rates: Rates) -> Estimate:
  """Memory and seconds of a candidate.

  Args:
    facts: of its layout.
    one: the candidate, whose rows divide.
    rates: of the chip and its links.
  """
  mesh = one.mesh
  rows = one.batch_size // (mesh.replica * mesh.data * mesh.fsdp * one.micros)
  least, memory = _bytes(facts, one, rows)
  if facts.layers == 0:
    return Estimate(least, memory, _whole_model(facts, one, rows, rates))
  at = rates.at("expected")
  passes = 2 + _PASSES[one.layout.remat] + (mesh.stage > 1)
  compute = passes * _forward(facts, one, rows, at)
  compute += _traffic(facts, one, rows, at)
  took = _sent(facts, one, rows, rates)
  ticks = _ticks(one)
  hidden = _HIDDEN_DURING * compute * ticks
  seconds = compute * ticks + took["model"] * ticks + took["stage"] * ticks
  seconds += max(took["fsdp"] * ticks - hidden, 0.0) + took["once"]
  update = 7 * 4 * facts.state / 16 / (at["bandwidth"] * at.get("memory", 1.0))
  return Estimate(least, memory, seconds + update + at["host"])


def _ticks(one: Candidate) -> int:
  """Times that a micro-batch's work is done, with the bubbles of a pipeline."""
  if one.mesh.stage == 1:
    return one.micros
  idle = one.mesh.stage - 1
  return one.micros + (2 if one.layout.schedule == "1f1b" else 1) * idle


def _tokens(facts: Facts, one: Candidate, rows: float) -> float:
  """Of a device, between the branches of a layer."""
  splits = one.layout.model != "layers"
  return rows * facts.tokens / (one.mesh.model if splits else 1)


def _bytes(facts: Facts, one: Candidate, rows: float) -> tuple[float, float]:
  """(least, likely) bytes of a device."""
  gradients = _GRADIENT_BYTES * facts.gradients
  tokens, size = _tokens(facts, one, rows), facts.itemsize
  inputs = tokens * facts.width * size  # of one layer
  is_split = one.layout.model in ("ring", "all_to_all")
  inside = tokens if is_split else rows * facts.tokens
  outs = inside * size * sum(n * t for _, n, t in facts.products)
  kept = facts.layers * inputs
  if one.layout.remat in ("none", "dots"):
    kept += outs / 2
  if one.mesh.stage > 1:  # a stage is computed again from its input
    stages, parts = one.mesh.stage, one.micros
    held = parts if one.layout.schedule == "gpipe" else min(parts, 2 * stages - 1)
    least_kept, kept = held * inputs, held * inputs + kept
  else:
    least_kept = kept
  least = facts.state + max(least_kept, gradients)
  layers = max(facts.layers, 1)
  more = 2.5 if one.layout.remat == "none" else 1.0
  logits = 8 * inside * sum(n for _, n, _ in facts.head)
  gathered = 4 * facts.layer_elements / layers + 4 * facts.other_elements
  working = 4 * outs / layers + logits + gathered
  return least, facts.state + 1.2 * (more * kept + gradients) + working


def _forward(facts: Facts, one: Candidate, rows: float, at: Mapping[str, float]):
  """Seconds of the products and the attention of one forward pass of a micro-batch."""
  splits = one.layout.model in ("ring", "all_to_all")
  tokens = rows * facts.tokens / (one.mesh.model if splits else 1)
  took = 0.0
  for k, n, times in (*facts.products, *facts.head):
    flops = 2.0 * tokens * k * n
    traffic = float(facts.itemsize * (tokens * (k + n) + k * n))
    dtype = "bf16" if facts.itemsize == 2 else "f32"
    dims = (tokens, float(n), float(k), 1.0)
    took += times * _seconds(Kernel("matmul", flops, traffic, dims, dtype), at)
  peak = at["peak_bfloat16"] * at.get("attention", 0.5)
  return took + rows * facts.flops / (one.mesh.stage * one.mesh.model) / peak


def _seconds(kernel: Kernel, at: Mapping[str, float]) -> float:
  if "cycles" not in at:
    return kernels.seconds(kernel, at)
  took = kernel.flops / at["peak_bfloat16"] * at["cycles"]  # of a TPU
  return max(took, kernel.bytes / at["bandwidth"])


def _traffic(facts: Facts, one: Candidate, rows: float, at: Mapping[str, float]):
  """Seconds of elementwise kernels in a micro-batch, forwards and backwards."""
  each = facts.width * facts.itemsize * facts.layers
  each /= at["bandwidth"] * at.get("memory", 1.0)
  inside = rows * facts.tokens / one.mesh.model
  return each * (_STREAM_PASSES * _tokens(facts, one, rows) + _BRANCH_PASSES * inside)


def _sent(facts: Facts, one: Candidate, rows: float, rates: Rates):
  """Seconds of collectives: a micro-batch's by axis, and those of a step ("once")."""
  at = rates.at("expected")
  sizes = {a: getattr(one.mesh, a) for a in ("data", "fsdp", "stage", "model")}

  def took(kind: str, axes: tuple[str, ...], payload: float) -> float:
    one = Collective(
      kind, "", (), int(payload), payload, (), 1, axes, 1, True, False, False, None
    )
    return transfer.seconds(one, sizes, rates.per_node, links(at))

  layout, elements = one.layout, facts.layer_elements + facts.other_elements
  size = facts.itemsize
  found = dict.fromkeys(("model", "stage", "fsdp", "once"), 0.0)
  if layout.shard == "fsdp":
    found["fsdp"] += 2 * took("all-gather", ("fsdp",), size * elements)
  if layout.shard in ("fsdp", "zero2"):
    found["fsdp"] += took("reduce-scatter", ("fsdp",), 4 * elements)
  if layout.shard in ("zero1", "zero2"):
    found["once"] += took("all-gather", ("fsdp",), 4 * elements)
  part = 4 * elements / (sizes["fsdp"] if layout.shard in ("fsdp", "zero2") else 1)
  part *= _SENT_BYTES.get(type(one.exchange).__name__, 4) / 4
  whole = ("data",) if layout.shard in ("fsdp", "zero2") else ("data", "fsdp")
  if layout.slow_axes == "in_backward":
    found["model"] += took("all-reduce", whole, part)
  else:
    found["once"] += took("all-reduce", whole, part)
  found["model"] += _along_model(facts, one, rows, took)
  stream = _tokens(facts, one, rows) * facts.width * size
  if sizes["stage"] > 1:
    found["stage"] = 2 * took("collective-permute", ("stage",), stream)
  return found


def _along_model(facts: Facts, one: Candidate, rows: float, took: Any) -> float:
  """Seconds that a micro-batch's layers wait for the axis model."""
  if one.mesh.model == 1:
    return 0.0
  layout, axes, again = one.layout, ("model",), one.layout.remat in ("full", "branches")
  whole = rows * facts.tokens * facts.width
  sums = whole * (4 if layout.sum_in == "float32" else facts.itemsize)
  times = facts.layers * (5 if again else 4)
  if layout.model == "layers":
    return times * took("all-reduce", axes, sums)
  if layout.model == "layers_and_tokens":
    scatter = took("reduce-scatter", axes, sums)
    return times * (scatter + took("all-gather", axes, facts.itemsize * whole))
  part = whole * facts.itemsize / one.mesh.model
  gradients = took("all-reduce", axes, 4.0 * facts.gradients)  # parameters are whole
  if layout.model == "all_to_all":
    return times * 2 * took("all-to-all", axes, part) + gradients
  rounds = facts.layers * (one.mesh.model - 1) * (4 if again else 3)
  return rounds * 2 * took("collective-permute", axes, part) + gradients


def _whole_model(facts: Facts, one: Candidate, rows: float, rates: Rates) -> float:
  """Seconds of a step of a model that is no stack of layers."""
  at = rates.at("expected")
  peak = at["peak_bfloat16" if facts.itemsize == 2 else "peak_float32"]
  share = at.get("convolution", 0.5)
  compute = 3 * one.micros * rows * facts.all_flops / (peak * share)
  took = _sent(facts._replace(layers=0), one, rows, rates)
  exposed = max(one.micros * took["fsdp"] - _HIDDEN_DURING * compute, 0.0)
  return compute + exposed + took["model"] * one.micros + took["once"] + at["host"]
