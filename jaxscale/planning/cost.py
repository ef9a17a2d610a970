"""How much of a program's compute an instruction is: an estimate, never a time.

On TPU the compiler writes its own estimate, `estimated_cycles`, beside what it
schedules; where a program has those they are what is summed. Elsewhere the unit is
bytes of memory traffic by the roofline,

    cost = max(flops / FLOPS_PER_BYTE, bytes read and written)

with the flops of dots and convolutions alone, and for a fusion what crosses its
border: of an array that is only sliced, the slices. Loops count their trips, a
conditional its costliest branch, collectives nothing.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable

from jaxscale.planning.parse import Instruction, Module, called, num_bytes
from jaxscale.planning.trips import trip_count

# TPU v5e: 197 TFLOP/s in bfloat16 over 819 GB/s. An H100 SXM is at 989 / 3.35 = 295.
FLOPS_PER_BYTE = 240
COLLECTIVES = (
  "all-reduce", "reduce-scatter", "all-gather", "collective-permute", "all-to-all",
  "ragged-all-to-all", "collective-broadcast",
)  # fmt: skip
_FREE = (
  "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all",
  "partition-id", "replica-id", "send", "recv", "opt-barrier", "domain",
)  # fmt: skip

Computation = dict[str, Instruction]
Cost = Callable[[Computation, Instruction], float]


def costs(module: Module) -> tuple[Cost, float]:
  """The cost of any instruction of a module, and of the whole of it.

  Returns:
    (computation, instruction) -> cost, and the sum over the entry computation.
  """
  everything = (i for c in module.computations.values() for i in c.values())
  has_cycles = any('"estimated_cycles"' in i.text for i in everything)

  @functools.cache
  def of_computation(name: str) -> float:
    computation = module.computations.get(name, {})
    return sum(cost(computation, i) for i in computation.values())

  def cost(computation: Computation, instruction: Instruction) -> float:
    opcode = instruction.opcode
    inside = [of_computation(name) for name in called(instruction)]
    if opcode == "while":
      trips = trip_count(module, computation, instruction)
      return (1 if trips is None else trips) * sum(inside)
    if opcode == "conditional":
      return max(inside, default=0.0)
    if opcode == "call" or opcode.endswith("-start"):
      return sum(inside) if opcode.removesuffix("-start") not in COLLECTIVES else 0.0
    if (
      opcode in _FREE or opcode in COLLECTIVES or opcode.endswith(("-done", "-update"))
    ):
      return 0.0
    if has_cycles:
      cycles = re.search(r'"estimated_cycles":"(\d+)"', instruction.text)
      return float(cycles.group(1)) if cycles else 0.0
    flops = _flops(module, computation, instruction)
    return max(flops / FLOPS_PER_BYTE, _traffic(module, computation, instruction))

  return cost, of_computation(module.entry)


def _flops(module: Module, computation: Computation, instruction: Instruction) -> float:
  """2 a multiply-add of dots and convolutions, those of vendors' libraries too."""
  opcode = instruction.opcode
  if opcode == "fusion":
    bodies = [module.computations.get(name, {}) for name in called(instruction)]
    return sum(_flops(module, body, i) for body in bodies for i in body.values())
  shapes = [computation[x].shape for x in instruction.operands if x in computation]
  if len(shapes) < 2 or not all(shapes[:2]) or not instruction.shape:
    return 0.0
  (left, *_), (right, *_), out = shapes[0], shapes[1], instruction.shape[0]
  summed = re.search(
    r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)', instruction.text
  )
  if summed:  # a dot, and cuBLAS's
    sizes = (left.dims[int(d)] for d in re.findall(r"\d+", summed.group(1)))
    return 2.0 * math.prod(out.dims) * math.prod(sizes)
  labels = re.search(r"dim_labels=\w+_(\w+)->", instruction.text)
  if labels is None:
    return 0.0
  kernel, pixels = right, out
  if "convBackwardFilter" in instruction.text:  # cuDNN's: (x, dy) -> dw
    kernel, pixels = out, right
  elif "convBackwardInput" in instruction.text:  # cuDNN's: (dy, w) -> dx
    pixels = left
  features = kernel.dims[labels.group(1).index("o")]
  return 2.0 * math.prod(pixels.dims) * math.prod(kernel.dims) / max(features, 1)


def _traffic(
  module: Module, computation: Computation, instruction: Instruction
) -> float:
  """Bytes that an instruction reads and writes."""
  operands = [computation[x] for x in instruction.operands if x in computation]
  if instruction.opcode in ("dynamic-slice", "slice", "gather"):
    return 2.0 * num_bytes(instruction.shape)
  if instruction.opcode == "dynamic-update-slice":
    return 2.0 * sum(num_bytes(x.shape) for x in operands[1:2])
  whole = num_bytes(instruction.shape) + sum(num_bytes(x.shape) for x in operands)
  if instruction.opcode != "fusion":
    return float(whole)
  body = module.computations.get((called(instruction) or [""])[0], {})
  saved = 0
  for inner in body.values():
    uses = [x for x in body.values() if inner.name in x.operands]
    if inner.opcode == "parameter" and uses:
      saved += _unread(inner, uses)
  return float(max(whole - saved, 0))


def _unread(parameter: Instruction, uses: list[Instruction]) -> int:
  """Bytes of a fusion's parameter that are neither read nor written anew."""
  size = num_bytes(parameter.shape)
  if all(x.opcode in ("dynamic-slice", "slice", "gather") for x in uses):
    return max(size - sum(num_bytes(x.shape) for x in uses), 0)
  in_place = [x for x in uses if x.opcode == "dynamic-update-slice"]
  if len(uses) == 1 and in_place and in_place[0].operands[0] == parameter.name:
    return 2 * size  # the result is the parameter, of which a part is written
  return 0
