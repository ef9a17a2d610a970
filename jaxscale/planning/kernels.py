"""Predict the time of a kernel from its FLOPs and bytes and a table of rates.

A kernel takes as long as the slower of its arithmetic and its memory traffic, plus a launch:

    t = max(FLOPs / (peak E), bytes / (bandwidth memory)) + launch

E is the share of the peak that b products of m x k by k x n reach:

    E = ceiling * (w / (w + half_waves)) * (k / (k + half_depth))
    w = b ceil(m / 128) ceil(n / 128) / units

Tiles of 128 x 128 fill the units in waves, and the last of the w waves is seldom full. Each
tile also has a start and an end, whatever its depth. A convolution is modelled as a product (m
pixels, n features, k taps and channels) with a ceiling of its own. chips.toml has the constants
and their sources. On TPUs the compiler's own estimate of cycles is used instead, except for
splash attention, for which it has none.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

from jaxscale.hlo import cost, parse
from jaxscale.hlo.parse import Computation, Instruction, Module

Kind = Literal["matmul", "convolution", "attention", "memory"]
_TILE = 128
# Products of fused attention: scores, and their product with the values; in the backward pass
# those for q, k, v, the probabilities, and the scores again (arXiv:2205.14135, appendix B).
_FORWARD, _BACKWARD = 2, 5
# Products of the kernels of JAX's splash attention: those that return gradients compute the
# scores and the gradients of the probabilities again.
_SPLASH = {"fwd": 2, "dq": 3, "dkv": 4}

_Found = tuple[Computation, Instruction]  # an instruction, after the computation it is in


class Kernel(NamedTuple):
  """Instruction that computes.

  Attributes:
    kind: the kind of arithmetic that limits it.
    flops: the FLOPs of products only.
    bytes: the bytes read and written.
    dims: the sizes (m, n, k, b) of the product; () without a product.
    dtype: HLO's name of the dtype of the factors.
    cycles: the compiler's estimate of cycles on TPUs; None on other chips.
    is_full: whether float32 factors are multiplied as they are, and not as TF32 or bfloat16.
  """

  kind: Kind
  flops: float
  bytes: float
  dims: tuple[float, ...] = ()
  dtype: str = "f32"
  cycles: float | None = None
  is_full: bool = False


def kernel_of(module: Module, computation: Computation, instruction: Instruction) -> Kernel:
  """Return the kernel of an instruction; of calls, only fusions are looked into.

  Args:
    module: the module of the instruction.
    computation: the computation that contains it.
    instruction: a fusion, a library call, or an instruction outside of fusions.
  """
  traffic = cost.traffic(module, computation, instruction)
  cycles = cost.cycles_of(instruction)
  if "__cudnn$fmha" in instruction.text:
    flops, dtype = _attention(instruction)
    return Kernel("attention", flops, traffic, (), dtype, cycles)
  if splash := re.match(r"splash_mha_(fwd|dq|dkv)_", instruction.name):
    return Kernel("attention", _splash(splash[1], instruction), traffic, (), "bf16", cycles)
  if not (found := _product(module, computation, instruction)):
    return Kernel("memory", 0.0, traffic, cycles=cycles)
  home, product = found
  flops = cost.flops_of(module, computation, instruction)
  kind: Kind = "convolution" if "dim_labels=" in product.text else "matmul"
  dtype = home[product.operands[0]].shape[0].dtype
  dims = _dims(home, product, cost.flops_of(module, home, product))
  # In the attributes of a product, or in the configuration of a call to cuBLAS.
  is_full = bool(re.search(r"operand_precision\W+highest", product.text, re.IGNORECASE))
  return Kernel(kind, flops, traffic, dims, dtype, cycles, is_full)


def seconds(kernel: Kernel, rates: Mapping[str, float]) -> float:
  """Return the seconds of a kernel.

  Args:
    kernel: the kernel, from `kernel_of`.
    rates: the rates, from `Rates.at`.

  Example:
    >>> product = Kernel("matmul", 2 * 4096.0**3, 1e8, (4096, 4096, 4096, 1), "bf16")
    >>> from jaxscale.planning.machine import rates_of
    >>> rates = rates_of("h100").at("expected")
    >>> round(1e6 * seconds(product, rates))  # 55 % of the peak
    253
  """
  if "cycles" in rates and kernel.kind == "attention":
    return kernel.flops / (rates["peak_bfloat16"] * rates["attention"])
  if "cycles" in rates:
    return (kernel.cycles or 0.0) * rates["cycles"] / rates["clock"]
  took = kernel.bytes / (rates["bandwidth"] * rates["memory"])
  if kernel.flops:
    single = "full_float32" if kernel.is_full else "float32"
    name = single if kernel.dtype in ("f32", "f64") else "bfloat16"
    peak, share = rates[f"peak_{name}"], rates.get(f"{kernel.kind}_{name}", rates[kernel.kind])
    if kernel.dtype.startswith("f8"):
      peak *= 2  # of dense products: the data sheets of H100, B200 and MI300X
    if kernel.dims:
      share *= _filled(kernel.dims, rates)
    took = max(took, kernel.flops / (peak * share))
  return took + rates["launch"]


def _filled(dims: tuple[float, ...], rates: Mapping[str, float]) -> float:
  m, n, k, b = dims
  # A narrow side is oriented so that tiles are fuller; its tiles are smaller.
  tiles = b * max(m / _TILE, 1) * max(n / _TILE, 1)
  # If there are few tiles, the summed dim is split among the units.
  waves = max(tiles, min(tiles * max(k / 1024, 1), rates["units"])) / rates["units"]
  depth = k / (k + rates["half_depth"])
  narrow = min(m, n) / (math.ceil(min(m, n) / 64) * 64)
  return waves / (waves + rates["half_waves"]) * depth * max(narrow, 1 / 64)


def _product(module: Module, computation: Computation, instruction: Instruction) -> _Found | None:
  """Return the largest matrix product of an instruction."""
  if instruction.opcode != "fusion":
    is_product = cost.flops_of(module, computation, instruction) > 0
    return (computation, instruction) if is_product else None
  bodies = [module.computations.get(name, {}) for name in parse.called(instruction)]
  parts = (_product(module, body, inner) for body in bodies for inner in body.values())
  return max(filter(None, parts), key=lambda part: cost.flops_of(module, *part), default=None)


def _dims(home: Computation, product: Instruction, flops: float) -> tuple[float, ...]:
  """Return (m, n, k, b); 2 m n k b are the FLOPs."""
  out = product.shape[0]
  if labels := re.search(r"dim_labels=\w+->(\w+)", product.text):
    features = out.dims[labels[1].find("f")]  # the last dim if there is no f
    if "convBackwardFilter" in product.text:
      kernel = re.search(r"dim_labels=\w+?_(\w+)->", product.text)
      features = out.dims[kernel.group(1).index("o")] if kernel else features
    rows = math.prod(out.dims) / max(features, 1)
    return rows, features, flops / 2 / max(rows * features, 1), 1
  left = home[product.operands[0]].shape[0]
  sizes = (cost.product_sizes(product, left.dims, kind) for kind in ("batch", "contracting"))
  batch, depth = (math.prod(dims or ()) for dims in sizes)
  rows = math.prod(left.dims) / max(depth * batch, 1)
  return rows, math.prod(out.dims) / max(rows * batch, 1), depth, batch


def _attention(instruction: Instruction) -> tuple[float, str]:
  """Return the FLOPs of cuDNN's fused attention, halved for causal masks, and the dtype."""
  shape = re.search(
    r'"intermediate_tensor_shape":.*?"dimensions":\s*\[([\d",\s]+)\]', instruction.text
  )
  if not shape:
    return 0.0, "bf16"
  scores = math.prod(int(d) for d in re.findall(r"\d+", shape.group(1)))
  products = _BACKWARD if "Backward" in instruction.text else _FORWARD
  causal = 0.5 if '"mask_type": "CAUSAL"' in instruction.text else 1.0
  out = instruction.shape[0]
  return 2.0 * products * causal * scores * out.dims[-1], out.dtype


def _splash(kernel: str, instruction: Instruction) -> float:
  """Return the FLOPs of a kernel of splash attention, halved for causal masks.

  Its first operand in bfloat16 is q, [heads, tokens, width], maybe with rows. Its operands in
  int32 are two arrays of documents, if there are any, and the positions of a causal mask.
  """
  operands = instruction.text.partition("operand_layout_constraints={")[2]
  if not (q := re.search(r"bf16\[([\d,]+)\]", operands)):
    return 0.0
  sizes = [int(size) for size in q[1].split(",")]
  causal = 0.5 if operands.count("s32[") % 2 else 1.0
  return 2.0 * _SPLASH[kernel] * causal * math.prod(sizes) * sizes[-2]
