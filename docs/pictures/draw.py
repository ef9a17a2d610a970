"""The pictures of README and site, in one style: `python docs/pictures/draw.py`.

Each is on a card of its own, light or dark as the reader's system is, so that it can
be read on any page. A test draws them again and compares.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

STYLE = """
text { font: 14px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #24292f; }
.small { font-size: 12px; } .muted { fill: #59636e; } .strong { font-weight: 600; }
.middle { text-anchor: middle; } .end { text-anchor: end; }
.code { font-family: ui-monospace, "DejaVu Sans Mono", Menlo, monospace;
  font-size: 13px; white-space: pre; }
.card { fill: #ffffff; stroke: #d1d9e0; } .grid { stroke: #e4e8ec; }
.line { stroke: #59636e; fill: none; stroke-width: 1.5; } .tip { fill: #59636e; }
.blue { fill: #d8e8ff; stroke: #2f6fc4; } .orange { fill: #ffe6cc; stroke: #c46f1a; }
.green { fill: #d9f2dc; stroke: #2f8a42; } .grey { fill: #eef1f4; stroke: #8b949e; }
.red { fill: #ffdcd8; stroke: #c4372f; }
.curve { fill: none; stroke-width: 2.5; } .dashed { stroke-dasharray: 6 5; }
.s-blue { stroke: #2f6fc4; } .s-orange { stroke: #c46f1a; }
.s-green { stroke: #2f8a42; }
.t-red { fill: #b3261e; } .t-green { fill: #1f7a33; } .t-blue { fill: #2459a6; }
.t-orange { fill: #9a5410; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .muted { fill: #a3adb8; } .grid { stroke: #2a313a; }
  .card { fill: #14181d; stroke: #3d444d; }
  .line { stroke: #a3adb8; } .tip { fill: #a3adb8; }
  .blue { fill: #16345e; stroke: #6ea8fe; } .orange { fill: #4d2f10; stroke: #f0a35e; }
  .green { fill: #163d20; stroke: #66c27a; } .grey { fill: #262c34; stroke: #7d8792; }
  .red { fill: #552320; stroke: #ff8a80; }
  .s-blue { stroke: #6ea8fe; } .s-orange { stroke: #f0a35e; }
  .s-green { stroke: #66c27a; }
  .t-red { fill: #ff8a80; } .t-green { fill: #66c27a; } .t-blue { fill: #8ab8ff; }
  .t-orange { fill: #f0a35e; }
}
"""


class Picture:
  """An SVG of some size; shapes are added by class names of `STYLE`."""

  def __init__(self, width: int, height: int, title: str):
    self._size, self._title = (width, height), title
    self._parts = [self._box(0.5, 0.5, width - 1, height - 1, "card", 10)]

  @staticmethod
  def _box(x, y, width, height, kind, radius):
    return (
      f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" '
      f'height="{height:g}" rx="{radius}"/>'
    )

  def box(self, x, y, width, height, kind, text="", note=""):
    """A box with a line of text in its middle, and a smaller one below."""
    self._parts.append(self._box(x, y, width, height, kind, 5))
    middle, down = x + width / 2, y + height / 2
    if text:
      self.text(middle, down + (-2 if note else 5), text, "middle")
    if note:
      self.text(middle, down + 15, note, "middle small muted")

  def text(self, x, y, text, kind=""):
    """A line of text; `y` is its base."""
    text = escape(text)
    self._parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}">{text}</text>')

  def line(self, points, kind="line"):
    """A line through points."""
    path = " ".join(f"{x:.4g},{y:.4g}" for x, y in points)
    self._parts.append(f'<polyline class="{kind}" points="{path}"/>')

  def arrow(self, x0, y0, x1, y1):
    """A line with a tip at its end."""
    self.line([(x0, y0), (x1, y1)])
    angle = math.atan2(y1 - y0, x1 - x0)
    tip = [(x1, y1)]
    for turn in (2.7, -2.7):
      tip.append((x1 + 9 * math.cos(angle + turn), y1 + 9 * math.sin(angle + turn)))
    points = " ".join(f"{x:.4g},{y:.4g}" for x, y in tip)
    self._parts.append(f'<polygon class="tip" points="{points}"/>')

  def dot(self, x, y, kind):
    """A point of a curve."""
    self._parts.append(f'<circle class="{kind}" cx="{x:g}" cy="{y:g}" r="4"/>')

  def svg(self) -> str:
    """The file."""
    width, height = self._size
    title = escape(self._title)
    head = (
      f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
      f'width="{width}" height="{height}" role="img" aria-label="{title}">'
    )
    about = f"<title>{title}</title>", f"<style>{STYLE}</style>"
    return "\n".join([head, *about, *self._parts, "</svg>", ""])


def step() -> Picture:
  """The three stages of a step."""
  p = Picture(760, 250, "The three stages of a train step")
  stages = (
    (24, "blue", "1  local gradients", "each device: its own rows", "jax.shard_map"),
    (276, "orange", "2  the exchange", "gradients cross the network", "psum, 1-bit, PowerSGD …"),
    (528, "green", "3  the update", "optax, on global arrays", "SGD, LARS, LAMB …"),
  )
  for x, kind, title, what, how in stages:
    p.text(x, 36, title, "strong")
    p.text(x, 56, what, "small muted")
    p.text(x, 74, how, "small muted")
    for i in range(4):
      note = ("rows 0–31", "rows 32–63", "rows 64–95", "rows 96–127")[i]
      if kind == "blue":
        p.box(x, 90 + 36 * i, 160, 28, kind, f"device {i}:  {note}")
    if kind == "orange":
      p.box(x, 90, 160, 136, kind, "sum of gradients", "once per step, float32")
    if kind == "green":
      p.box(x, 90, 208, 136, kind, "parameters, optimizer", "norms are of whole layers")
  for i in range(4):
    p.arrow(188, 104 + 36 * i, 272, 104 + 36 * i)
  p.arrow(440, 158, 524, 158)
  return p


def layouts() -> Picture:
  """What a device has, under four layouts of eight devices."""
  p = Picture(760, 336, "One model on eight devices under four layouts")
  cases = (
    ("data 8", "rows are split, weights are whole", lambda i: (i, "all")),
    ("fsdp 8", "rows and weights are split", lambda i: (i, "1/8")),
    ("fsdp 4 × model 2", "pairs share rows, and split heads", lambda i: (i // 2, "1/8")),
    ("data 2 × stage 4", "a quarter of the layers each", lambda i: (i // 4, "1/4")),
  )
  kinds = ("blue", "orange", "green", "grey")
  for n, (title, note, has) in enumerate(cases):
    x0, y0 = 24 + 372 * (n % 2), 30 + 158 * (n // 2)
    p.text(x0, y0, title, "strong")
    p.text(x0, y0 + 18, note, "small muted")
    for i in range(8):
      rows, weights = has(i)
      x, y = x0 + 86 * (i % 4), y0 + 28 + 46 * (i // 4)
      p.box(x, y, 80, 40, kinds[rows % 4])
      p.text(x + 40, y + 17, f"rows {rows}", "middle small")
      p.text(x + 40, y + 32, f"weights {weights}", "middle small")
  return p


def resize() -> Picture:
  """The same batch on four devices, then on two."""
  p = Picture(760, 238, "The same batch on four devices, then on two")
  kinds = ("blue", "orange", "green", "grey")
  for x0, count, title in (
    (24, 4, "4 devices: 1 micro-batch"),
    (404, 2, "2 devices: 2 micro-batches"),
  ):
    p.text(x0, 34, title, "strong")
    p.text(x0, 53, "a step of 128 rows, in the same order", "small muted")
    for i in range(4):
      device, micro = (i, 0) if count == 4 else divmod(i, 2)
      x, y = x0 + (83 if count == 4 else 170) * device, 68 + 44 * micro
      p.box(x, y, 74 if count == 4 else 160, 38, kinds[i], f"{32 * i}–{32 * i + 31}")
      if micro == 0:
        p.text(x, 182, f"device {device}", "small muted")
    p.text(x0, 216, "one sum of gradients, one update", "small")
  p.arrow(366, 106, 394, 106)
  return p


def requeue() -> Picture:
  """A preemption."""
  p = Picture(760, 196, "A job is preempted, saves, is requeued and resumes")
  p.text(24, 34, "first start", "strong")
  p.text(24, 118, "second start: the same job and folder", "strong")
  p.box(24, 46, 250, 34, "blue", "steps 1 … 334")
  p.box(274, 46, 70, 34, "orange", "save")
  p.text(356, 60, "SIGTERM, SIGUSR1 or walltime: all processes", "small muted")
  p.text(356, 76, "agree on a step, save it and leave with 85", "small muted")
  p.box(360, 130, 60, 34, "grey", "queue")
  p.box(420, 130, 76, 34, "orange", "restore")
  p.box(496, 130, 240, 34, "green", "steps 335 … 685")
  p.line([(330, 80), (330, 147)])
  p.arrow(330, 147, 356, 147)
  p.text(
    24, 184, "The parameters of step 685 are those of an undisturbed run, bit for bit.", "small"
  )
  return p


# Top-1 accuracies of ResNet-50 on ImageNet after 90 epochs, as published.
# Goyal et al. 2017 (arXiv:1706.02677: errors 23.60, 23.74, 24.79, 27.55, 33.96 %), and
# You et al. 2017 (arXiv:1709.05011); as recalled, their tables were not at hand.
# (75.4 and 73.2 % are also quoted by arXiv:1807.11205.)
GOYAL = {256: 76.40, 8192: 76.26, 16384: 75.21, 32768: 72.45, 65536: 66.04}
YOU = {8192: 75.3, 16384: 75.3, 32768: 75.4, 65536: 73.2}


def large_batch() -> Picture:
  """Accuracy against batch size: published lines, and what was measured."""
  rows = json.loads((ROOT / "benchmarks/results/large_batch.json").read_text())["rows"]
  measured = {}
  for row in rows:
    name = "SGD" if row["optimizer"].startswith("SGD") else row["optimizer"]
    if row["accuracy"] and not row["diverged"]:
      measured.setdefault(name, {})[row["batch_size"]] = 100 * row["accuracy"]
  first = measured["SGD"][256]
  p = Picture(760, 330, "Held-out accuracy against batch size: published, and measured")
  axes = _Axes(p, 56, (64, 78), "Published: ResNet-50, ImageNet, 90 epochs", (64, 68, 72, 76))
  axes.curve(GOYAL, "orange", "SGD (Goyal et al.)", dashed=True, at=-2, side=-1)
  axes.curve(YOU, "blue", "LARS (You et al.)", dashed=True, at=0, side=-1)
  axes = _Axes(p, 428, (80, 92), "Measured: MLP, Fashion-MNIST, 30 epochs", (80, 84, 88))
  for name, kind in (("LAMB", "green"), ("LARS", "blue"), ("SGD", "orange")):
    points = measured[name] if name == "SGD" else {256: first} | measured[name]
    label = "SGD, tuned" if name == "SGD" else name
    axes.curve(points, kind, label, at=-1, side=0, marks=measured[name])
  return p


class _Axes:
  """A plot of percents against the logarithm of batch sizes."""

  def __init__(self, p: Picture, x: int, bounds, title: str, ticks: Sequence[int]):
    self._p, self._x, self._bounds = p, x, bounds
    p.text(x - 32, 30, title, "strong")
    for tick in ticks:
      y = self._at(256, tick)[1]
      p.line([(x, y), (x + 300, y)], "grid")
      p.text(x - 6, y + 4, f"{tick}", "small muted end")
    for size in (256, 1024, 4096, 16384, 65536):
      p.text(self._at(size, 0)[0], 292, f"{size:,}", "small muted middle")
    p.text(x + 150, 314, "batch size", "small muted middle")
    p.text(x - 32, 52, "held-out accuracy, %", "small muted")

  def _at(self, size, percent):
    low, high = self._bounds
    x = self._x + 10 + 280 * math.log2(size / 256) / 8
    return x, 274 - 210 * (percent - low) / (high - low)

  def curve(self, points, kind, label, *, dashed=False, at, side, marks=None):
    path = [self._at(*point) for point in sorted(points.items())]
    self._p.line(path, f"curve s-{kind}" + " dashed" * dashed)
    for size, percent in (points if marks is None else marks).items():
      self._p.dot(*self._at(size, percent), kind)
    x, y = path[at]
    dx, dy, end = (10, 4, "") if side == 0 else (-10, 22, "end")
    self._p.text(x + dx, y + dy, label, f"small t-{kind} {end}")


def hang() -> Picture:
  """The still of a terminal: hang.txt, whose lines were printed by a run."""
  lines = (HERE / "hang.txt").read_text().rstrip("\n").splitlines()
  p = Picture(760, 34 + 20 * len(lines), "A run names the process that hangs, and resumes")
  for n, line in enumerate(lines):
    kind = "t-blue" if line[:1] == "$" else "t-red" if line[:6] == "error:" else ""
    p.text(18, 32 + 20 * n, line, f"code {kind}")
  return p


PICTURES = {f.__name__: f for f in (step, layouts, resize, requeue, large_batch, hang)}


def main() -> None:
  """Write them all."""
  for name, draw in PICTURES.items():
    (HERE / f"{name}.svg").write_text(draw().svg())


if __name__ == "__main__":
  main()
