"""How often the body of a while loop runs, from a program's text.

XLA on CPU and GPU writes `known_trip_count` beside a loop it understands; on TPU
it does not. Then a loop that counts is recognised: the condition compares element
k of the carried tuple with a constant, the body adds a constant to it, and it
starts as a constant. Values are followed through copies, tuples and fusions.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from jaxscale.planning.parse import Instruction, Module, attribute, called

_SAME = ("copy", "bitcast", "convert", "reshape", "copy-start", "copy-done")
_FLIPPED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE", "EQ": "EQ"}


class _Affine(NamedTuple):
  """`element` of the computation's tuple + `offset`; None: the offset alone."""

  element: int | None
  offset: int


def trip_count(
  module: Module, computation: dict[str, Instruction], loop: Instruction
) -> int | None:
  """Times that the body of a `while` runs; None where the text does not tell.

  Args:
    module: of the loop.
    computation: that the loop is in.
    loop: an instruction with the opcode `while`.
  """
  if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.text):
    return int(known.group(1))
  condition = module.computations.get((attribute(loop, "condition") or "").lstrip("%"))
  body = module.computations.get((attribute(loop, "body") or "").lstrip("%"))
  if not condition or not body or not loop.operands:
    return None
  compared = _comparison(module, condition)
  start = computation.get(loop.operands[0])
  if compared is None or start is None or start.opcode != "tuple":
    return None
  element, direction, bound = compared
  root = _root(body)
  if root.opcode != "tuple" or element >= min(len(start.operands), len(root.operands)):
    return None
  first = _affine(module, computation, start.operands[element])
  after = _affine(module, body, root.operands[element])
  if first is None or first.element is not None:
    return None
  if after is None or after.element != element:
    return None
  return _count(first.offset, bound, after.offset, direction)


def _count(first: int, bound: int, step: int, direction: str) -> int | None:
  inclusive = direction in ("LE", "GE")
  if direction in ("GT", "GE"):
    first, bound, step = -first, -bound, -step
  elif direction == "NE" and step and (bound - first) % step == 0:
    return max((bound - first) // step, 0)
  elif direction not in ("LT", "LE"):
    return None
  return None if step <= 0 else max(-(-(bound + inclusive - first) // step), 0)


def _root(computation: dict[str, Instruction]) -> Instruction:
  rooted = [i for i in computation.values() if i.is_root]
  return rooted[0] if rooted else list(computation.values())[-1]


def _comparison(module, condition) -> tuple[int, str, int] | None:
  """(element of the tuple, direction, constant) that a condition compares."""
  here, arguments, root = condition, None, _root(condition)
  while root.opcode in ("fusion", "call") and called(root):
    arguments = [_affine(module, here, name, arguments) for name in root.operands]
    here = module.computations.get(called(root)[0], {})
    if not here:
      return None
    root = _root(here)
  direction = attribute(root, "direction")
  if root.opcode != "compare" or direction not in _FLIPPED:
    return None
  left, right = (_affine(module, here, name, arguments) for name in root.operands)
  if left and right and left.element is None:
    left, right, direction = right, left, _FLIPPED[direction]
  if not left or not right or left.element is None or right.element is not None:
    return None
  return left.element, direction, right.offset - left.offset


def _affine(module, computation, name: str, arguments=None) -> _Affine | None:
  """A scalar as a tuple element plus a constant.

  Args:
    module: of it.
    computation: that it is in.
    name: of the instruction.
    arguments: what the parameters are, in the computation of a fusion.
  """
  instruction = computation.get(name)
  if instruction is None:
    return None
  opcode, operands = instruction.opcode, instruction.operands
  if opcode == "constant" and re.fullmatch(r"-?\d+", operands[0] if operands else ""):
    return _Affine(None, int(operands[0]))
  if opcode == "parameter" and arguments is not None:
    index = int(operands[0])
    return arguments[index] if index < len(arguments) else None
  if opcode == "get-tuple-element" and operands[0] in computation:
    index, source = int(attribute(instruction, "index") or 0), computation[operands[0]]
    if source.opcode == "parameter":
      return _Affine(index, 0)
    if source.opcode == "tuple":
      return _affine(module, computation, source.operands[index], arguments)
    return None
  if opcode in _SAME and operands:
    return _affine(module, computation, operands[0], arguments)
  if opcode in ("fusion", "call") and called(instruction):
    inner = module.computations.get(called(instruction)[0], {})
    given = [_affine(module, computation, x, arguments) for x in operands]
    return _affine(module, inner, _root(inner).name, given) if inner else None
  if opcode in ("add", "subtract") and len(operands) == 2:
    parts = [_affine(module, computation, x, arguments) for x in operands]
    return _sum(parts[0], parts[1], 1 if opcode == "add" else -1)
  return None


def _sum(a: _Affine | None, b: _Affine | None, sign: int) -> _Affine | None:
  if a is None or b is None:
    return None
  if b.element is None:
    return _Affine(a.element, a.offset + sign * b.offset)
  if a.element is None and sign == 1:
    return _Affine(b.element, a.offset + b.offset)
  return None
