"""Estimated relative cost of instructions in a compiled program.

On TPU the compiler annotates instructions with its own estimate, `estimated_cycles`. If a
program has these annotations, they are summed. Otherwise the unit is bytes of memory
traffic, by the roofline

    cost = max(flops / FLOPS_PER_BYTE, bytes read and written)

where only dots and convolutions count as flops, and a fusion counts its inputs and
outputs (only the slices of an array that is only sliced). Loops count their iterations,
and a conditional counts its most expensive branch. Collectives cost nothing.

XLA on CPU and GPU annotates loops with `known_trip_count` if it can; on TPU it does not.
The loop's integers are then evaluated here, iteration by iteration.
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

from jaxscale.hlo import parse
from jaxscale.hlo.parse import Computation, Instruction, Module

# TPU v5e has 197 TFLOP/s in bfloat16 per 819 GB/s. An H100 SXM has 989 / 3.35 = 295.
FLOPS_PER_BYTE = 240
COLLECTIVES = (
  *("all-reduce", "reduce-scatter", "all-gather", "collective-permute"),
  *("all-to-all", "ragged-all-to-all", "collective-broadcast"),
)
_FREE = """
parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id send recv
opt-barrier domain
""".split()
_SAME = ("copy", "bitcast", "convert", "reshape", "copy-start", "copy-done")
_COMPARISONS = {name: getattr(operator, name.lower()) for name in "LT LE GT GE EQ NE".split()}
_INTEGERS = {"add": operator.add, "subtract": operator.sub} | _COMPARISONS
_SLICES, _UPDATE = {"dynamic-slice", "slice", "gather"}, "dynamic-update-slice"
# Operations whose output elements depend on input elements at other positions.
_MIXED = f"""
dot convolution reduce reduce-window scatter sort pad fusion call custom-call while conditional
{_UPDATE}
"""
_MOST_TRIPS = 10_000  # limit for evaluating a loop without `known_trip_count`

Cost = Callable[[Computation, Instruction], float]


def costs(module: Module) -> tuple[Cost, float]:
  """Return a cost function for a module, and the module's total cost.

  Returns:
    (computation, instruction) -> cost, and the sum over the entry computation.
  """
  everything = (i for c in module.computations.values() for i in c.values())
  has_cycles = any('"estimated_cycles"' in i.text for i in everything)

  def weight(computation: Computation, instruction: Instruction) -> float:
    if has_cycles:
      return cycles_of(instruction) or 0.0
    flops = flops_of(module, computation, instruction)
    return max(flops / FLOPS_PER_BYTE, traffic(module, computation, instruction))

  return _summed(module, weight)


def cycles_of(instruction: Instruction) -> float | None:
  """Return the compiler's estimate of an instruction's cycles on TPUs; None without one."""
  cycles = re.search(r'"estimated_cycles":"(\d+)"', instruction.text)
  return float(cycles.group(1)) if cycles else None


def program_flops(text: str) -> float:
  """Return the FLOPs of one device in one execution of a compiled program.

  Dots and convolutions in the compiled program are counted, with two operations per
  multiply-add. This includes recomputation in the backward pass, and padding of tiles and
  pipelines. Calls of libraries that the text does not describe are not counted.

  Args:
    text: the result of `jax.stages.Compiled.as_text()`.

  Example:
    >>> product = jax.jit(jnp.dot).lower(jnp.ones((2, 3)), jnp.ones((3, 4)))
    >>> program_flops(product.compile().as_text())
    48.0
  """
  return sum(_summed(m, functools.partial(flops_of, m))[1] for m in parse.modules(text))


def _summed(module: Module, weight: Cost) -> tuple[Cost, float]:
  """Extend a weight of instructions to called computations; return it and the total."""

  @functools.cache
  def of_computation(name: str) -> float:
    computation = module.computations.get(name, {})
    return sum(cost(computation, i) for i in computation.values())

  def cost(computation: Computation, instruction: Instruction) -> float:
    opcode = instruction.opcode
    inside = [of_computation(name) for name in parse.called(instruction)]
    if opcode == "while":
      trips = trip_count(module, computation, instruction)
      return (1 if trips is None else trips) * sum(inside)
    if opcode == "conditional":
      return max(inside, default=0.0)
    if opcode == "call" or opcode.endswith("-start"):
      return sum(inside) if opcode.removesuffix("-start") not in COLLECTIVES else 0.0
    if is_free(instruction) or opcode in COLLECTIVES:
      return 0.0
    return weight(computation, instruction)

  return cost, of_computation(module.entry)


def is_free(instruction: Instruction) -> bool:
  """Return whether an instruction computes nothing, such as a tuple or a `-done`."""
  opcode = instruction.opcode
  # `-update` belongs to an asynchronous operation, unlike dynamic-update-slice.
  return opcode in _FREE or opcode.endswith(("-done", "-update"))


def flops_of(module: Module, computation: Computation, instruction: Instruction) -> float:
  """Return the FLOPs of an instruction, also of dots and convolutions by libraries."""
  if instruction.opcode == "fusion":
    bodies = [module.computations.get(name, {}) for name in parse.called(instruction)]
    return sum(flops_of(module, body, i) for body in bodies for i in body.values())
  shapes = [computation[x].shape for x in instruction.operands if x in computation]
  if len(shapes) < 2 or not all(shapes[:2]) or not instruction.shape:
    return 0.0
  (left, *_), (right, *_), out = shapes[0], shapes[1], instruction.shape[0]
  if (summed := product_sizes(instruction, left.dims, "contracting")) is not None:
    return 2.0 * math.prod(out.dims) * math.prod(summed)
  if not (labels := re.search(r"dim_labels=\w+_(\w+)->", instruction.text)):
    return 0.0
  kernel, pixels = right, out
  if "convBackwardFilter" in instruction.text:  # cuDNN: (x, dy) -> dw
    kernel, pixels = out, right
  elif "convBackwardInput" in instruction.text:  # cuDNN: (dy, w) -> dx
    pixels = left
  features = kernel.dims[labels.group(1).index("o")]
  return 2.0 * math.prod(pixels.dims) * math.prod(kernel.dims) / max(features, 1)


def product_sizes(product: Instruction, left: Sequence[int], kind: str) -> list[int] | None:
  """Return the sizes of the "contracting" or "batch" dims of a dot, or of a call of cuBLAS.

  Args:
    product: the instruction; the result is None for others.
    left: the dims of its first factor.
    kind: the kind of dims.
  """
  dims = re.search(rf'lhs_{kind}_dim(?:s=\{{|ensions":\[)([\d,"]*)', product.text)
  return [left[int(d)] for d in re.findall(r"\d+", dims.group(1))] if dims else None


def traffic(module, computation: Computation, instruction: Instruction) -> float:
  """Return the bytes that an instruction reads and writes."""
  operands = [computation[x] for x in instruction.operands if x in computation]
  if instruction.opcode in _SLICES:
    return 2.0 * parse.num_bytes(instruction.shape)
  if instruction.opcode == _UPDATE:
    return 2.0 * sum(parse.num_bytes(x.shape) for x in operands[1:2])
  whole = sum(parse.num_bytes(x.shape) for x in (instruction, *operands))
  if instruction.opcode != "fusion":
    return float(whole)
  body = module.computations.get((parse.called(instruction) or [""])[0], {})
  shares = _shares_read(body)
  for parameter in (x for x in body.values() if x.opcode == "parameter"):
    uses = [x for x in body.values() if parameter.name in x.operands]
    size = parse.num_bytes(parameter.shape)
    if {(x.opcode, x.operands[0]) for x in uses} == {(_UPDATE, parameter.name)}:
      # The parameter is updated in place, so that only the update is written.
      updates = [body[x.operands[1]].shape for x in uses if x.operands[1] in body]
      whole -= 2 * size - sum(map(parse.num_bytes, updates))
    else:
      whole -= (1 - shares[parameter.name]) * size
  return float(max(whole, 0))


def _shares_read(body: Computation) -> dict[str, float]:
  """Return the share of each value's elements that a fusion reads.

  For a value that is only sliced, possibly after elementwise operations, it is the share
  of the slices.
  """
  found: dict[str, float] = {}
  used = {name: [0.0, 0.0] for name in body}  # shares read as a whole, and by slices
  for user in reversed(body.values()):
    share = 1.0 if user.is_root else min(max(used[user.name]), 1.0)
    found[user.name], size = share, parse.num_elements(user.shape)
    for x in (body[name] for name in user.operands if name in body):
      shares, own = used[x.name], max(parse.num_elements(x.shape), 1)
      if user.opcode in _SLICES:
        shares[1] += share * size / own
      else:
        is_in_place = size == own and user.opcode not in _MIXED.split()
        shares[0] = max(shares[0], share if is_in_place else 1.0)
  return found


def trip_count(module: Module, computation: Any, loop: Instruction) -> int | None:
  """Return the number of iterations of a `while`; None if it is unknown.

  Args:
    module: the module of the loop.
    computation: the computation that contains the loop.
    loop: an instruction with the opcode `while`.
  """
  if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.text):
    return int(known.group(1))
  condition, body = (
    module.computations.get((parse.attribute(loop, key) or "").lstrip("%"))
    for key in ("condition", "body")
  )
  start = computation.get(loop.operands[0]) if loop.operands else None
  if not condition or not body or start is None:
    return None
  root = _root(body)
  if start.opcode != "tuple" or root.opcode != "tuple":
    return None
  # Maps elements of the carried tuple to their integers, if they are known.
  carried = dict(enumerate(_value(module, computation, x) for x in start.operands))
  for trips in range(_MOST_TRIPS):
    known = {i: x for i, x in carried.items() if x is not None}
    continues = _value(module, condition, _root(condition).name, [known])
    if not continues:
      return None if continues is None else trips
    carried = {i: _value(module, body, root.operands[i], [known]) for i in known}
  return None


def _root(computation: Computation) -> Instruction:
  return next((i for i in computation.values() if i.is_root), [*computation.values()][-1])


def _value(
  module: Module, computation: Computation, name: str, arguments: Sequence[Any] = ()
) -> Any:
  """Evaluate a scalar to an integer, or a tuple to {element: integer}; None if unknown.

  Args:
    module: the module.
    computation: the computation that contains the instruction.
    name: name of the instruction.
    arguments: values of the computation's parameters.
  """
  instruction = computation.get(name)
  if instruction is None:
    return None
  opcode, operands = instruction.opcode, instruction.operands
  if opcode == "parameter":
    index = int(operands[0])
    return arguments[index] if index < len(arguments) else None
  if any(array.dims for array in instruction.shape):  # only scalars are evaluated
    return None
  if opcode == "constant":
    is_integer = operands and re.fullmatch(r"-?\d+", operands[0])
    return int(operands[0]) if is_integer else None
  if opcode == "get-tuple-element":
    source, index = operands[0], int(parse.attribute(instruction, "index") or 0)
    if source in computation and computation[source].opcode == "tuple":
      return _value(module, computation, computation[source].operands[index], arguments)
    elements = _value(module, computation, source, arguments)
    return elements.get(index) if isinstance(elements, dict) else None
  values = [_value(module, computation, x, arguments) for x in operands]
  if opcode in _SAME and values:
    return values[0]
  if opcode in ("fusion", "call") and parse.called(instruction):
    inner = module.computations.get(parse.called(instruction)[0])
    return _value(module, inner, _root(inner).name, values) if inner else None
  compute = _INTEGERS.get(parse.attribute(instruction, "direction") or opcode)
  if compute is None or len(values) != 2 or None in values:
    return None
  return compute(*values)
