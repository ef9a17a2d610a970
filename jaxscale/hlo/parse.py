"""Parser of the text of a compiled program (HLO).

A line of the text is

    ROOT %name = shape opcode(operands), attribute=value, attribute={...}

Shapes, operands and attributes contain nested brackets and quoted strings, so that lines
are split by counting brackets. Lines that cannot be parsed as an instruction are skipped,
because compilers may print unknown forms.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

Groups = tuple[tuple[int, ...], ...]

_HEADER = re.compile(r"^\s*(ENTRY\s+)?%?([\w.\-]+)\s*\(.*->.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s*(ROOT\s+)?%?([\w.\-]+) = (.*)$")
_COMMENT = re.compile(r"/\*.*?\*/")
# Kernels on a stream of their own (XLA of jax 0.11); what they compute counts at their start.
_KERNEL_STARTS = "fusion-start", "custom-call-start"
_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,<=\s]*)\]")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(
  r"mesh\[([^\]]*)\](?:,\s*device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?"
  r"\s*\{([^}]*)\}"
)
_CALLS = re.compile(
  r"\b(?:calls|to_apply|called_computations|branch_computations|true_computation|"
  r"false_computation|body|condition)=(\{[^}]*\}|%?[\w.\-]+)"
)


class Array(NamedTuple):
  """Dtype, as an HLO name, and dims of an array."""

  dtype: str
  dims: tuple[int, ...]


class Instruction(NamedTuple):
  """Instruction of a computation; `text` holds all of its attributes."""

  name: str
  shape: tuple[Array, ...]  # the leaves, if it is a tuple
  opcode: str
  operands: tuple[str, ...]  # names, or literal text as in `constant(3)`
  text: str
  is_root: bool


Computation = dict[str, Instruction]  # in the order of the text, which is the schedule


class Module(NamedTuple):
  """A program with its computations by name."""

  computations: dict[str, Computation]
  entry: str
  num_devices: int  # number of partitions times number of replicas
  is_scheduled: bool


def modules(text: str) -> list[Module]:
  """Parse the programs in a text; those without an entry computation are skipped.

  Args:
    text: the result of `jax.stages.Compiled.as_text()`, with one or more modules.

  Example:
    >>> (module,) = modules('''ENTRY %m (p: f32[2]) -> f32[2] {
    ...   ROOT %p = f32[2]{0} parameter(0)
    ... }''')
    >>> module.computations["m"]["p"].opcode
    'parameter'
  """
  found = (_module(part) for part in re.split(r"(?m)^(?=HloModule )", text) if part.strip())
  return [module for module in found if module.entry]


def _module(text: str) -> Module:
  head = text.split("\n", 1)[0]
  computations: dict[str, Computation] = {}
  entry, here = "", None
  for line in text.split("\n"):
    if line.startswith("}") and not line.startswith("}}"):  # "}}" ends metadata of Pallas.
      here = None
    elif here is None and (match := _HEADER.match(line)):
      here = computations.setdefault(match.group(2), {})
      entry = match.group(2) if match.group(1) else entry
    elif here is not None and (found := _instruction(line)):
      here[found.name] = found
  sizes = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", head)
  return Module(computations, entry, math.prod(map(int, sizes)), "is_scheduled=true" in head)


def _instruction(line: str) -> Instruction | None:
  if not (match := _INSTRUCTION.match(_COMMENT.sub("", line))):
    return None
  root, name, rest = match.groups()
  end = _balanced(rest) if rest.startswith("(") else rest.find(" ")
  shape, rest = rest[:end], rest[end:].lstrip()
  opening = rest.find("(")
  if end <= 0 or opening <= 0:
    return None
  opcode, rest = rest[:opening], rest[opening:]
  end = _balanced(rest)
  operands = tuple(x.split(" ")[-1].lstrip("%") for x in _split(rest[1 : end - 1]))
  leaves = arrays(shape)
  if opcode in _KERNEL_STARTS:  # The shape also has the operands, and a context at its end.
    opcode, leaves = opcode.removesuffix("-start"), leaves[len(operands) : -1]
  return Instruction(name, leaves, opcode, operands, rest[end:], bool(root))


def _balanced(text: str) -> int:
  """Return the index after the bracket that closes the text's first bracket."""
  depth = 0
  for i, char in enumerate(text):
    depth += (char in "([{") - (char in ")]}")
    if depth == 0:
      return i + 1
  return len(text)


def _split(text: str) -> Iterator[str]:
  """Yield the parts of a text between commas outside of brackets."""
  depth, start = 0, 0
  for i, char in enumerate(text):
    depth += (char in "([{") - (char in ")]}")
    if char == "," and depth == 0:
      yield text[start:i].strip()
      start = i + 1
  if text[start:].strip():
    yield text[start:].strip()


def arrays(shape: str) -> tuple[Array, ...]:
  """Parse the arrays in the text of a shape; tokens are skipped.

  Example:
    >>> arrays("(f32[2,3]{1,0:T(8,128)}, token[])")
    (Array(dtype='f32', dims=(2, 3)),)
  """
  return tuple(
    Array(dtype, tuple(_numbers(dims)))
    for dtype, dims in _ARRAY.findall(shape)
    if dtype not in ("token", "opaque")
  )


def _numbers(text: str | None) -> list[int]:
  return [int(n) for n in re.findall(r"\d+", text or "")]


def num_bytes(shape: tuple[Array, ...]) -> int:
  """Return the bytes of arrays; 4-bit numbers count as packed, pred as a byte.

  Example:
    >>> num_bytes(arrays("(bf16[3,2]{1,0}, pred[5]{0})"))
    17
  """
  digits = (re.match(r"[a-z]+(\d+)", array.dtype) for array in shape)
  bits = (int(found.group(1)) if found else 8 for found in digits)
  sizes = (math.prod(array.dims) for array in shape)
  return sum(-(-n * k // 8) for n, k in zip(sizes, bits, strict=True))


def num_elements(shape: tuple[Array, ...]) -> int:
  """Return the number of elements of an array, or of the first array in a tuple."""
  return math.prod(shape[0].dims) if shape else 0


def attribute(instruction: Instruction, key: str) -> str | None:
  """Return the text of an attribute's value, including brackets."""
  if not (match := re.search(rf"(?<![\w\"]){key}=", instruction.text)):
    return None
  rest = instruction.text[match.end() :]
  if rest.startswith("{"):
    return rest[: _balanced(rest)]
  if named := _MESH.match(rest):
    return named[0]
  return next(_split(rest), "")


def called(instruction: Instruction) -> list[str]:
  """Return the names of the computations that an instruction calls, by any attribute."""
  names = _CALLS.findall(instruction.text)
  return [name for group in names for name in re.findall(r"[\w.\-]+", group)]


def replica_groups(written: str | None, num_devices: int) -> Groups | None:
  """Parse the groups of devices of a collective, in any form that XLA writes.

  `{{0,1},{2,3}}` lists the groups. `[2,4]<=[8]` and `[4,2]<=[2,4]T(1,0)` count devices
  from 0 in the second shape, transpose it and reshape it to the first.
  `mesh['a'=2,'b'=4] {'b'}` gives a mesh and some of its axes; `'b':(2)2` is the part of b
  with size 2 behind a part of size 2; and `device_ids=([2,4]T(1,0))` before the braces
  counts the mesh's devices as in the second form. `{}` is one group of all devices.

  Args:
    written: the value of `replica_groups` or `source_target_pairs`.
    num_devices: number of devices of the module, for `{}`.

  Returns:
    The groups; None if their form is unknown.

  Example:
    >>> replica_groups("[4,2]<=[2,4]T(1,0)", 8)
    ((0, 4), (1, 5), (2, 6), (3, 7))
  """
  if written is None:
    return None
  if match := _IOTA.match(written):
    cut, shape, order = map(_numbers, match.groups())
    count = np.arange(math.prod(shape)).reshape(shape)
    return tuple(map(tuple, count.transpose(order or None).reshape(cut).tolist()))
  if match := _MESH.fullmatch(written.strip()):
    return _along_axes(*match.groups())
  if not re.fullmatch(r"[{}\d,\s]*", written):
    return None
  parts = re.findall(r"\{([\d,\s]+)\}", written)
  return tuple(tuple(_numbers(part)) for part in parts) or (tuple(range(num_devices)),)


def _along_axes(mesh: str, shape: str | None, order: str | None, axes: str) -> Groups | None:
  """Return groups of devices that differ only along the given axes.

  Args:
    mesh: axis sizes by name, as "'a'=2,'b'=4".
    shape: shape in which devices are counted; None means the shape of the mesh.
    order: order in which the dims of that shape are transposed; None means unchanged.
    axes: axes as "'a', 'b':(2)2", where the latter is the part of b with size 2 behind a
      part of size 2.
  """
  sizes = {n: int(k) for n, k in re.findall(r"'?([\w.\-]+)'?=(\d+)", mesh)}
  wanted = re.findall(r"'?([\w.\-]+)'?(?::\((\d+)\)(\d+))?", axes)
  if not {name for name, *_ in wanted} <= set(sizes) or len(sizes) != mesh.count("="):
    return None
  dims, taken = [], []
  for name, size in sizes.items():
    parts = [(int(k or 1), int(n or size)) for axis, k, n in wanted if axis == name]
    cuts = sorted({1, size, *(k for k, _ in parts), *(k * n for k, n in parts)})
    for low, high in itertools.pairwise(cuts):
      if high % low:
        return None
      taken += [any(k <= low and high <= k * n for k, n in parts)]
      dims += [high // low]
  counted = _numbers(shape) or dims
  turned = _numbers(order) or range(len(counted))
  count = np.arange(math.prod(dims)).reshape(counted).transpose(turned).reshape(dims)
  last = [i for i, is_in in enumerate(taken) if is_in]
  first = [i for i, is_in in enumerate(taken) if not is_in]
  groups = count.transpose(first + last).reshape(-1, math.prod(dims[i] for i in last))
  return tuple(map(tuple, groups.tolist()))
