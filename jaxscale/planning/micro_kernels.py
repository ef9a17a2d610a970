"""Small programs whose seconds say what a machine's kernels cost, for `calibrate`.

Products and convolutions on grids of shapes; on CPUs also loops of every kind that
networks are made of, at sizes that fit into each cache, from which the costs of
`loops` are fitted. None is a model, nor a layer of one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Grid = tuple[tuple[int, ...], ...]


class Micro(NamedTuple):
  """A program to be timed.

  Attributes:
    name: of it.
    function: to be jitted.
    shapes: of its arguments, (dims, dtype).
    times: the same work that it has in it.
  """

  name: str
  function: Callable[..., Any]
  shapes: Sequence[tuple[tuple[int, ...], str]]
  times: int = 1


_FORMS = {"nn": ((1,), (0,)), "nt": ((1,), (1,)), "tn": ((0,), (0,))}


def product(form: str, dtype: str, m: int, n: int, k: int, work: float) -> Micro:
  """A product of m x k by k x n, as often in a batch as makes so many FLOPs.

  Args:
    form: which of the two is turned: "nn", "nt" or "tn".
    dtype: of both.
    m: rows.
    n: columns.
    k: the summed dim.
    work: FLOPs, at least.
  """
  summed = _FORMS[form]
  batch = max(round(work / (2 * m * n * k)), 1)
  left = (k, m) if form == "tn" else (m, k)
  right = (n, k) if form == "nt" else (k, n)
  lead, dims = ((batch,), ((0,), (0,))) if batch > 1 else ((), ((), ()))
  moved = [tuple(d + len(lead) for d in s) for s in summed]

  def function(a, b):
    return lax.dot_general(a, b, ((moved[0], moved[1]), dims))

  shapes = [(lead + left, dtype), (lead + right, dtype)]
  return Micro(f"{form} {m}x{n}x{k}", function, shapes, batch)


def convolution(
  form: str, dtype: str, side: int, c_in: int, c_out: int, size: int, rows: int
) -> Micro:
  """A convolution of images, or a gradient of one.

  Args:
    form: "plain"; "stride" 2; "input", the gradient by the input of stride 2;
      "kernel", the gradient by the kernel; "kernel stride".
    dtype: of both.
    side: of the input, or of what is padded by the holes.
    c_in: channels.
    c_out: features.
    size: of the kernel.
    rows: images.
  """
  pad = ((size - 1) // 2, size // 2)
  numbers = ("NHWC", "HWIO", "NHWC")
  x, kernel = (rows, side, side, c_in), (size, size, c_in, c_out)
  options: dict[str, Any] = {"window_strides": (1, 1), "padding": [pad, pad]}
  if form == "stride":
    options |= {"window_strides": (2, 2)}
  elif form == "input":
    x = (rows, -(-side // 2), -(-side // 2), c_in)
    options |= {"lhs_dilation": (2, 2), "padding": [(pad[0], pad[1] + 1)] * 2}
  elif form.startswith("kernel"):
    x, kernel = (c_in, side, side, rows), (side, side, rows, c_out)
    if form == "kernel stride":
      kernel = (side // 2, side // 2, rows, c_out)
      options |= {"rhs_dilation": (2, 2), "padding": [(pad[0], pad[1] - 1)] * 2}

  def function(x, kernel):
    return lax.conv_general_dilated(x, kernel, dimension_numbers=numbers, **options)

  return Micro(f"{form} {x} {kernel}", function, [(x, dtype), (kernel, dtype)])


def loops(scale: int = 1) -> Iterator[Micro]:
  """Loops of every kind, smaller by `scale`."""
  for count in (2**14, 2**18, 2**20, 2**23):
    yield from _elementwise(max(count // scale, 64))
  for rows, columns in ((128, 64), (1024, 128), (8192, 1024)):
    yield from _matrices(max(rows // scale, 2), columns)
  for rows, side, channels in ((4, 16, 32), (16, 16, 128), (128, 32, 64)):
    yield from _images(max(rows // scale, 1), side, channels)
  count = 160 if scale == 1 else 16
  shapes = [((8 + i,), "float32") for i in range(count)]
  yield Micro("kernels", lambda *xs: [x + 1 for x in xs], shapes)
  yield Micro("buffers", lambda *xs: sum(x[0] for x in xs), shapes)
  yield Micro("empty", lambda x: x, [((1,), "float32")])


def _elementwise(n: int) -> Iterator[Micro]:
  f32 = "float32"
  one: dict[str, Callable[..., Any]] = {
    "add": lambda x: x + 1, "divide": lambda x: 1 / (x + 3), "sqrt": jnp.sqrt,
    "rsqrt": lax.rsqrt, "exp": jnp.exp, "log": jnp.log, "tanh": jnp.tanh,
    "sigmoid": lambda x: x * jax.nn.sigmoid(x), "trig": jnp.cos,
    "steps": lambda x: jnp.where(x > 0, x * 1.5 + 1, x * 0.5 - 1),
    "cast": lambda x: x.astype("bfloat16"), "fill": lambda x: jnp.full(n, x[0]),
    "bits": lambda x: (x > 0).astype("uint8"),
  }  # fmt: skip
  for name, function in one.items():
    yield Micro(f"{name} {n}", function, [((n,), f32)])
  for depth in (4, 16):
    yield Micro(f"chain {depth} {n}", _chain(depth), [((n,), f32)])
  yield Micro(f"bytes {n}", lambda x: x.astype(f32) / 255, [((n,), "uint8")])
  yield Micro(f"sum {n}", jnp.sum, [((n,), f32)])
  yield Micro(f"norm {n}", lambda x: (x * x).sum(), [((n,), f32)])
  yield Micro(f"axpy {n}", lambda x, y: x + 0.1 * y, [((n,), f32)] * 2)
  yield Micro(f"mix {n}", lambda a, b, c, d: a * b + c * d, [((n,), f32)] * 4)
  yield Micro(f"adam {n}", _adam, [((n,), f32)] * 4)
  yield Micro(f"momentum {n}", _momentum, [((n,), f32)] * 3)


def _chain(depth: int) -> Callable[..., Any]:
  def function(x):
    y = x
    for _ in range(depth):
      y = y * x + 0.5
    return y

  return function


def _adam(p, m, v, g):
  m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
  return p - 1e-3 * m / (jnp.sqrt(v) + 1e-8), m, v


def _momentum(p, m, g):
  m = 0.9 * m + g
  return p - 0.1 * m, m


def _matrices(rows: int, columns: int) -> Iterator[Micro]:
  shape = [((rows, columns), "float32")]
  name = f"{rows}x{columns}"
  each: dict[str, Callable[..., Any]] = {
    "sum rows": lambda x: x.sum(1), "sum columns": lambda x: x.sum(0),
    "max rows": lambda x: x.max(1), "squares": lambda x: (x * x).sum(1),
    "turn": lambda x: x.T * 2, "turn more": lambda x: (x + 1).T * x[0, 0],
    "softmax": jax.nn.softmax, "argmax": lambda x: x.argmax(1),
    "normalise": lambda x: x * lax.rsqrt((x * x).mean(1, keepdims=True) + 1e-5),
    "pad": lambda x: jnp.pad(x, ((0, 0), (3, 2))), "halves": _halves,
    "join": lambda x: jnp.concatenate([x, x * 2], 1),
    "slices": lambda x: x[:, 1:-1] * 2,
    "stack": lambda x: jnp.concatenate([x, x * 2], 0),
    "by row": _by_row, "fill": lambda x: jnp.zeros_like(x) + x[0, 0],
    "pack": _pack, "mask": _mask, "together": _together,
  }  # fmt: skip
  for key, function in each.items():
    yield Micro(f"{key} {name}", function, shape)
  index = [((rows,), "int32")]
  yield Micro(f"gather {name}", lambda x, i: x[i % rows], shape + index)
  yield Micro(f"scatter {name}", _scatter, shape + index)
  yield Micro(f"pick {name}", _pick, shape + index)
  cube = [((max(rows // 64, 1), 64, 4, columns // 4), "float32")]
  yield Micro(f"heads {name}", lambda x: x.transpose(0, 2, 1, 3) * 2, cube)
  yield Micro(f"far heads {name}", lambda x: x.transpose(0, 2, 3, 1) * 2, cube)
  yield Micro(f"merge {name}", _merge, cube)


def _merge(x):
  return x.transpose(0, 2, 1, 3).reshape(len(x), x.shape[2], -1) * 2


def _by_row(x):
  return x * x[:, :1] + x[:1]


def _mask(x):
  return jnp.where(jnp.tri(*x.shape, dtype=bool), x, -9.0)


def _together(x):
  x = x.reshape(-1, min(len(x), 32), x.shape[1])
  large, zero = x > 1, jnp.zeros_like(x)
  given = jnp.where(large, x, zero), jnp.where(large, zero, x), large.astype(x.dtype)
  zeros = (np.float32(0),) * len(given)
  return lax.reduce(given, zeros, lambda a, b: tuple(map(lax.add, a, b)), (1,))


def _halves(x):
  half = x.shape[1] // 2
  a, b = x[:, :half], x[:, half:]
  return jnp.concatenate([a * 0.5 - b * 0.3, b * 0.5 + a * 0.3], 1)


def _scatter(x, i):
  return jnp.zeros_like(x).at[i % x.shape[0]].add(x)


def _pick(x, i):
  return jnp.take_along_axis(x, i[:, None] % x.shape[1], 1)


def _pack(x):
  depth = 8 if x.shape[0] % 8 == 0 else 2
  bits = (x > 0).reshape(-1, depth, x.shape[1]).astype("uint8")
  shifts = jnp.arange(depth, dtype="uint8")[None, :, None]
  return (bits << shifts).sum(1, dtype="uint8")


def _images(rows: int, side: int, channels: int) -> Iterator[Micro]:
  shape = [((rows, side, side, channels), "float32")]
  name = f"{rows}x{side}x{channels}"
  each: dict[str, Callable[..., Any]] = {
    "mean": lambda x: x.mean((0, 1, 2)), "var": lambda x: x.var((0, 1, 2)),
    "scale": lambda x: jax.nn.relu(x * x[0, 0, 0] + x[0, 0, 1]),
    "pool": lambda x: x.reshape(rows, side // 2, 2, side // 2, 2, channels).max((2, 4)),
    "window": lambda x: lax.reduce_window(
      x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
    "to front": lambda x: x.transpose(3, 1, 2, 0) * 2,
    "strided": lambda x: x[:, ::2, ::2] * 2,
    "global": lambda x: x.mean((1, 2)), "spread": _spread,
    "flip": lambda x: x[::-1, ::-1] * 2,
  }  # fmt: skip
  for key, function in each.items():
    yield Micro(f"{key} {name}", function, shape)
  yield Micro(f"slope {name}", lambda x, y: jnp.where(x > 0, y, 0.0), shape * 2)
  small = [((rows, side // 2, side // 2, channels), "float32")]
  yield Micro(f"unpool {name}", _unpool, shape + small)


def _spread(x):
  rows, height, width, channels = x.shape
  wide = jnp.broadcast_to(x[:, :, None, :, None], (rows, height, 2, width, 2, channels))
  return wide.reshape(rows, 2 * height, 2 * width, channels) * 0.25


def _unpool(x, g):
  rows, side, _, channels = x.shape
  pairs = x.reshape(rows, side // 2, 2, side // 2, 2, channels)
  biggest = pairs.max((2, 4), keepdims=True)
  return (pairs == biggest) * g[:, :, None, :, None]


def grid(sizes: Grid) -> Iterator[tuple[int, ...]]:
  """All shapes of a grid, the last dim fastest."""
  return itertools.product(*sizes)


def arguments(micro: Micro) -> list[Any]:
  """Numbers of its shapes: small integers, or between 0.5 and 1.5."""
  key = jax.random.key(0)
  made = []
  for dims, dtype in micro.shapes:
    if "int" in dtype:
      count = math.prod(dims)
      made.append((jnp.arange(count) % 199).astype(dtype).reshape(dims))
    else:
      made.append(jax.random.uniform(key, dims, "float32", 0.5, 1.5).astype(dtype))
  return made
