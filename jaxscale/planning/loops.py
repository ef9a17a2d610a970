"""What the loops of a program on a CPU do, counted: the unknowns are seconds of each.

XLA makes one loop of a fusion and computes in it what an element of the result needs,
again for every element that needs it. What vectorizes ("v"), what does not ("s", where
an inner dim is padded, gathered, turned or summed along) and what the library YNNPACK
does ("y") cost differently. Loads are counted by element, traffic by bytes and by the
cache that all a kernel touches fits into. `calibrate` fits seconds of each to kernels
that have many of one and few of the others.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping

from jaxscale.planning import cost, parse
from jaxscale.planning.parse import Computation, Instruction, Module

# Bytes that a kernel touches, up to which they are in a cache of that name.
_CACHES = (("near", 2**19), ("middle", 2**23))
_FAR = "far"
_SAME = (
  "bitcast", "reshape", "copy", "bitcast-convert", "tuple", "get-tuple-element",
  "transpose", "slice", "reverse", "broadcast", "parameter", "constant", "iota",
)  # fmt: skip
_CLASSES = {
  "divide": "divide", "sqrt": "sqrt", "rsqrt": "rsqrt", "exponential": "exp",
  "exponential-minus-one": "exp", "logistic": "exp", "log": "log",
  "log-plus-one": "log", "tanh": "tanh", "erf": "tanh", "power": "power",
  "sine": "trig", "cosine": "trig", "remainder": "divide", "sort": "sort",
  "cbrt": "power", "atan2": "trig", "convert": "convert",
}  # fmt: skip
_UNEVEN = ("pad", "concatenate", "gather", "scatter", "dynamic-slice", "reduce-window")
_APART = ("dot", "convolution")  # timed by tables

Work = Mapping[str, float]


def work(
  module: Module,
  computation: Computation,
  instruction: Instruction,
  footprint: float = 0.0,
) -> Work:
  """How much of what an instruction does, by names that costs have.

  Args:
    module: of the instruction.
    computation: that it is in.
    instruction: a fusion, or one that is not fused.
    footprint: bytes of all buffers of the program: what is large is no longer in a
      cache when it is needed again, if other buffers have been in it since.

  Example:
    >>> (module,) = parse.modules('''ENTRY %m (p: f32[2,8]) -> f32[2,8] {
    ...   %p = f32[2,8]{1,0} parameter(0)
    ...   ROOT %e = f32[2,8]{1,0} exponential(%p)
    ... }''')
    >>> home = module.computations["m"]
    >>> work(module, home, home["e"])["v.exp"]
    16.0
  """
  found: defaultdict[str, float] = defaultdict(float)
  found["kernel"] = 1.0
  traffic = cost.traffic(module, computation, instruction)
  far = _cache(max(traffic, footprint) if traffic > _CACHES[0][1] else traffic)
  found[f"bytes.{far}"] += traffic
  if instruction.opcode == "fusion":
    body = module.computations.get((parse.called(instruction) or [""])[0], {})
  else:
    used = [computation[x] for x in instruction.operands if x in computation]
    body = {x.name: x._replace(opcode="parameter", operands=()) for x in used}
    body[instruction.name] = instruction
  if not body:
    return dict(found)
  mode = _mode(instruction, body)
  for inner, demand, is_turned in _demands(body):
    _count(found, mode, body, inner, demand, is_turned)
  return dict(found)


def _cache(num_bytes: float) -> str:
  return next((name for name, size in _CACHES if num_bytes <= size), _FAR)


def _size(instruction: Instruction) -> int:
  return parse.num_elements(instruction.shape)


def _mode(instruction: Instruction, body: Computation) -> str:
  if "ynn_fusion" in instruction.text:
    return "y"
  for inner in body.values():
    if inner.opcode in _UNEVEN and _size(inner) > 64:
      return "s"
    if inner.opcode == "reduce" and _is_minor(body, inner):
      return "s"
    if inner.opcode in ("transpose", "reverse") and _moves_minor(inner):
      return "s"
  return "v"


def _dimensions(instruction: Instruction) -> list[int]:
  found = re.search(r"dimensions=\{([\d,]*)\}", instruction.text)
  return [int(d) for d in found.group(1).split(",") if d] if found else []


def _is_minor(body: Computation, reduce: Instruction) -> bool:
  """Whether it sums along the dim whose elements are next to each other."""
  summed = body.get(reduce.operands[0]) if reduce.operands else None
  if summed is None or not summed.shape:
    return False
  dims = summed.shape[0].dims
  last = max((i for i, n in enumerate(dims) if n > 1), default=-1)
  return last in _dimensions(reduce)


def _moves_minor(instruction: Instruction) -> bool:
  order, dims = _dimensions(instruction), instruction.shape[0].dims
  if instruction.opcode == "reverse":
    return len(dims) - 1 in order
  # Dims of one element are nowhere.
  kept = [d for d, n in zip(order, dims, strict=False) if n > 1]
  return bool(kept) and kept[-1] != max(kept)


def _merges(body: Computation, reshape: Instruction) -> bool:
  """Whether it joins dims that a transpose brought together.

  Elements in a row come from several places then, and nothing is vectorized.
  """
  source = body.get(reshape.operands[0]) if reshape.operands else None
  while source is not None and source.opcode == "copy":
    source = body.get(source.operands[0])
  if source is None or source.opcode != "transpose" or _moves_minor(source):
    return False
  return source.shape[0].dims[-1:] != reshape.shape[0].dims[-1:]


def _demands(body: Computation):
  """(instruction, elements of it that are computed, whether across its minor dim)."""
  wanted: defaultdict[str, float] = defaultdict(float)
  sliced: defaultdict[str, float] = defaultdict(float)
  turned: defaultdict[str, bool] = defaultdict(bool)
  found = list(body.values())
  for inner in found:
    if inner.is_root or inner is found[-1]:
      wanted[inner.name] = float(_size(inner))
  for inner in reversed(found):
    demand = wanted[inner.name]
    if not demand:
      continue
    yield inner, demand, turned[inner.name]
    for x in (body[n] for n in inner.operands if n in body):
      need = _needed(inner, x, demand)
      if inner.opcode == "slice":  # each of other elements
        need = sliced[x.name] = sliced[x.name] + need
      wanted[x.name] = max(wanted[x.name], need)
      if turned[inner.name] or (inner.opcode == "transpose" and _moves_minor(inner)):
        turned[x.name] = True


def _needed(user: Instruction, operand: Instruction, demand: float) -> float:
  """Elements of an operand that so many of its user need."""
  size, whole = _size(operand), max(_size(user), 1)
  opcode = user.opcode
  if opcode in _APART or opcode in ("scatter", "sort"):
    return float(size)
  if opcode == "broadcast":
    dims = user.shape[0].dims
    inner = math.prod(dims[max(_dimensions(user), default=-1) + 1 :])
    return max(demand / max(inner, 1), 1.0)
  if opcode in ("pad", "concatenate", "reduce"):
    return demand * size / whole if size > 1 else 1.0
  if opcode == "reduce-window":
    window = re.search(r"window=\{size=([\dx]+)", user.text)
    taps = math.prod(int(n) for n in window.group(1).split("x")) if window else 1
    return demand * taps if size > 1 else 1.0
  if opcode == "dynamic-update-slice":
    return float(size) if size < whole else 0.0
  if opcode == "tuple":
    return float(size)
  return min(demand, float(size)) if size == 1 else demand


def _count(found, mode, body, inner, demand, is_turned) -> None:
  opcode = inner.opcode
  if opcode == "parameter":
    if _size(inner) > 1:
      far = _cache(parse.num_bytes(inner.shape))
      # One that is read again and again, as a vector of features, is near anyhow.
      is_turned = is_turned and demand <= _size(inner)
      found[f"turned.{far}" if is_turned else f"{mode}.load"] += demand
  elif opcode == "reduce":
    along = "minor" if mode != "y" and _is_minor(body, inner) else "major"
    if mode == "y":
      along = "rows" if _is_minor(body, inner) else "columns"
    arrays = 1
    if len(inner.shape) > 1 and along == "major":  # the index of a maximum is "minor"
      along, arrays = "several", len(inner.shape)
    found[f"reduce.{along}"] += demand * arrays * _summed(body, inner)
  elif opcode == "reduce-window":
    found["window"] += _needed(inner, body[inner.operands[0]], demand)
  elif opcode in ("gather", "scatter", "sort", "pad", "concatenate", "dynamic-slice"):
    size = demand
    if opcode == "scatter":
      size = _size(body[inner.operands[-1]]) if inner.operands[-1] in body else demand
    if opcode == "sort":
      size = demand * math.log2(max(inner.shape[0].dims[-1], 2))
    found[opcode] += size
  elif opcode in ("bitcast", "reshape") and _merges(body, inner):
    found["merge"] += demand
  elif opcode in _APART or opcode in _SAME:
    return
  elif opcode == "dynamic-update-slice":
    found["v.simple"] += sum(_size(body[x]) for x in inner.operands[1:2] if x in body)
  else:
    found[f"{mode}.{_CLASSES.get(opcode, 'simple')}"] += demand


def _summed(body: Computation, reduce: Instruction) -> float:
  whole = body.get(reduce.operands[0]) if reduce.operands else None
  return _size(whole) / max(_size(reduce), 1) if whole else 1.0
