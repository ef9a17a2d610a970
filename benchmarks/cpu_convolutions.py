"""The convolutions of ResNets on a CPU: XLA's own and `models.convolution`, in turns.

    python benchmarks/cpu_convolutions.py [--rows 16] [--turns 3]

Each shape that ResNet-18 and -50 reach at 28 to 224 pixels, forward and the gradients
by the input and by the kernel: GFLOP/s of processor time on one thread, the best of the
turns. `slowest` has the twenty of our form that are slowest in any of the three.
"""

from __future__ import annotations

import argparse
import os
import time

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


def shapes() -> list[tuple[int, ...]]:
  """Return each (side, in, out, kernel, stride) once."""
  found = {(side, 3, 64, 7, 2) for side in SIDES}
  for side in SIDES:
    first = -(-side // 4)  # the stem and its pool halve it
    for c_in, c_out, kernel, stride, smaller in STAGES:
      before = -(-first // (smaller // stride))  # a stage's first one halves its input
      found.add((before, c_in, c_out, kernel, stride))
  return sorted(found)


def plain(x, kernel, strides, padding):
  return lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=NUMBERS)


def rates(forms, rows: int, shape: tuple[int, ...], turns: int) -> dict:
  """Return the GFLOP/s of each form: forward, gradient by the input, gradient by the kernel."""
  side, c_in, c_out, size, stride = shape
  x = jax.random.normal(jax.random.key(0), (rows, side, side, c_in))
  kernel = jax.random.normal(jax.random.key(1), (size, size, c_in, c_out))
  around = ((size // 2, size // 2),) * 2
  y = plain(x, kernel, (stride, stride), around)
  flops = 2 * y.size * size * size * c_in
  best = {name: [float("inf")] * 3 for name in forms}
  steps = {}
  for name, form in forms.items():

    def forward(x, kernel, y, form=form):
      return form(x, kernel, (stride, stride), around)

    def by_input(x, kernel, y, forward=forward):
      return jax.vjp(lambda x: forward(x, kernel, y), x)[1](y)

    def by_kernel(x, kernel, y, forward=forward):
      return jax.vjp(lambda kernel: forward(x, kernel, y), kernel)[1](y)

    parts = [forward] if c_in == 3 else [forward, by_input]  # images need no gradient
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
  args = parser.parse_args()
  forms = {"xla": plain, "jaxscale": convolve}
  table = {}
  for shape in shapes():
    table[shape] = rates(forms, args.rows, shape, args.turns)
    print(*shape, table[shape], flush=True)
  slowest = sorted(table, key=lambda shape: min(table[shape]["jaxscale"]))[:20]
  cliffs = sorted(s for s in table if min(table[s]["xla"]) < 10)
  names = "side", "in", "out", "kernel", "stride"
  rows = [dict(zip(names, s, strict=True)) | table[s] for s in slowest]
  report(
    "cpu_convolutions",
    rows=args.rows,
    shapes=len(table),
    under_10_before=len(cliffs),
    under_10_now=sum(min(table[s]["jaxscale"]) < 10 for s in table),
    slowest=rows,
  )


if __name__ == "__main__":
  main()
