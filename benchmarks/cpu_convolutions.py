"""The convolutions of ResNets on a CPU: XLA's own and `models.convolution`, in turns.

    python benchmarks/cpu_convolutions.py [--rows 16] [--turns 3] [--kind depthwise]

`--kind depthwise` has those of ConvNeXt-T (7x7, by channel) and `--kind fields` those of a
U-Net in 3-D (3x3x3) instead; all their shapes are kept.

Each shape that ResNet-18 and -50 reach at 28 to 224 pixels, forward and the gradients
by the input and by the kernel: GFLOP/s of processor time on one thread, the best of the
turns. `slowest` has the twenty of our form that are slowest in any of the three.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
from common import report
from jax import lax

from jaxscale.models.convolution import convolve

NUMBERS = ("NHWC", "HWIO", "NHWC")
SIDES = (28, 32, 48, 64, 96, 128, 160, 224)
# Input and output channels, kernel, stride of the convolutions of a stage, and by which
# the side of its input is smaller than that of the first stage.
STAGES = [
  (c_in, c_out, kernel, stride, 2**i)
  for i, width in enumerate((64, 128, 256, 512))
  for c_in, c_out, kernel, stride in [
    (width, width, 3, 1),
    (4 * width, width, 1, 1),
    (width, 4 * width, 1, 1),
    *([(width // 2, width, 3, 2), (width // 2, width, 1, 2)] if i else []),
  ]
]


# Side, channels, kernel and stride of the stages of ConvNeXt-T at 224 pixels, and of a U-Net
# in 3-D at 32^3 with 16 channels in its first stage: within a stage, and up to the last.
KINDS: dict[str, list[tuple[int, ...]]] = {
  "depthwise": [(56 >> i, 96 << i, 96 << i, 7, 1) for i in range(4)],
  "fields": [
    (32, 1, 16, 3, 1),
    *[(32 >> i, 16 << i, 16 << i, 3, 1) for i in range(4)],
    *[(32 >> i, 8 << i, 16 << i, 3, 1) for i in range(1, 4)],
  ],
}


def shapes() -> list[tuple[int, ...]]:
  """Return each (side, in, out, kernel, stride) once."""
  found = {(side, 3, 64, 7, 2) for side in SIDES}
  for side in SIDES:
    first = -(-side // 4)  # the stem and its pool halve it
    for c_in, c_out, kernel, stride, smaller in STAGES:
      before = -(-first // (smaller // stride))  # a stage's first one halves its input
      found.add((before, c_in, c_out, kernel, stride))
  return sorted(found)


def plain(x, kernel, strides, padding, **options):
  options.setdefault("dimension_numbers", NUMBERS)
  return lax.conv_general_dilated(x, kernel, strides, padding, **options)


def rates(forms, rows: int, shape: tuple[int, ...], turns: int, kind: str) -> dict:
  """Return the GFLOP/s of each form: forward, gradient by the input, gradient by the kernel."""
  side, c_in, c_out, size, stride = shape
  dims, inner = (3 if kind == "fields" else 2), (1 if kind == "depthwise" else c_in)
  x = jax.random.normal(jax.random.key(0), (rows, *[side] * dims, c_in))
  kernel = jax.random.normal(jax.random.key(1), (*[size] * dims, inner, c_out))
  around, strides = ((size // 2, size // 2),) * dims, (stride,) * dims
  options: dict[str, Any] = {"feature_group_count": c_in // inner}
  if kind == "fields":
    options["dimension_numbers"] = ("NDHWC", "DHWIO", "NDHWC")
  y = plain(x, kernel, strides, around, **options)
  flops = 2 * y.size * size**dims * inner
  best = {name: [float("inf")] * 3 for name in forms}
  steps = {}
  for name, form in forms.items():

    def forward(x, kernel, y, form=form):
      return form(x, kernel, strides, around, **options)

    def by_input(x, kernel, y, forward=forward):
      return jax.vjp(lambda x: forward(x, kernel, y), x)[1](y)

    def by_kernel(x, kernel, y, forward=forward):
      return jax.vjp(lambda kernel: forward(x, kernel, y), kernel)[1](y)

    parts = [forward] if c_in in (1, 3) else [forward, by_input]  # images need no gradient
    steps[name] = [jax.jit(f) for f in (*parts, by_kernel)]
    best[name] = best[name][: len(steps[name])]
  for turn in range(turns + 1):
    for name in forms:
      for i, step in enumerate(steps[name]):
        began = time.process_time()
        jax.block_until_ready(step(x, kernel, y))
        took = time.process_time() - began
        if turn:
          best[name][i] = min(best[name][i], took)
  return {n: [round(flops / s / 1e9, 1) for s in found] for n, found in best.items()}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--rows", type=int, default=16)
  parser.add_argument("--turns", type=int, default=3)
  parser.add_argument("--kind", choices=["plain", *KINDS], default="plain")
  args = parser.parse_args()
  forms = {"xla": plain, "jaxscale": convolve}
  table = {}
  for shape in KINDS.get(args.kind) or shapes():
    table[shape] = rates(forms, args.rows, shape, args.turns, args.kind)
    print(*shape, table[shape], flush=True)
  slowest = sorted(table, key=lambda shape: min(table[shape]["jaxscale"]))[:20]
  cliffs = sorted(s for s in table if min(table[s]["xla"]) < 10)
  names = "side", "in", "out", "kernel", "stride"
  rows = [dict(zip(names, s, strict=True)) | table[s] for s in slowest]
  report(
    "cpu_convolutions" + f"_{args.kind}" * (args.kind in KINDS),
    rows=args.rows,
    shapes=len(table),
    under_10_before=len(cliffs),
    under_10_now=sum(min(table[s]["jaxscale"]) < 10 for s in table),
    slowest=rows,
  )


if __name__ == "__main__":
  main()
