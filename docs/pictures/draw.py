"""Draw the pictures of README and site, in one style: `python docs/pictures/draw.py`.

Each picture is on its own card, light or dark as the reader's system is, so that it can be
read on any page. A test draws them again and compares.
"""

from __future__ import annotations

import json
import math
import textwrap
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
.curve { fill: none; stroke-width: 2.5; }
.teal { fill: #d3f1f0; stroke: #16807d; } .purple { fill: #eadcff; stroke: #7a4bc2; }
.s-red { stroke: #c4372f; } .s-blue { stroke: #2f6fc4; } .s-orange { stroke: #c46f1a; }
.s-green { stroke: #2f8a42; } .s-teal { stroke: #16807d; } .s-purple { stroke: #7a4bc2; }
.t-red { fill: #b3261e; } .t-green { fill: #1f7a33; } .t-blue { fill: #2459a6; }
.t-orange { fill: #9a5410; } .t-teal { fill: #0f6865; } .t-purple { fill: #63379f; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .muted { fill: #a3adb8; } .grid { stroke: #2a313a; }
  .card { fill: #14181d; stroke: #3d444d; }
  .line { stroke: #a3adb8; } .tip { fill: #a3adb8; }
  .blue { fill: #16345e; stroke: #6ea8fe; } .orange { fill: #4d2f10; stroke: #f0a35e; }
  .green { fill: #163d20; stroke: #66c27a; } .grey { fill: #262c34; stroke: #7d8792; }
  .red { fill: #552320; stroke: #ff8a80; }
  .teal { fill: #123c3b; stroke: #55c8c4; } .purple { fill: #372457; stroke: #b794f6; }
  .s-red { stroke: #ff8a80; } .s-blue { stroke: #6ea8fe; } .s-orange { stroke: #f0a35e; }
  .s-green { stroke: #66c27a; } .s-teal { stroke: #55c8c4; } .s-purple { stroke: #b794f6; }
  .t-red { fill: #ff8a80; } .t-green { fill: #66c27a; } .t-blue { fill: #8ab8ff; }
  .t-orange { fill: #f0a35e; } .t-teal { fill: #55c8c4; } .t-purple { fill: #c7a8fa; }
}
"""


class Picture:
  """An SVG image; shapes are added with the class names in `STYLE`."""

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
    """Draw a box with a line of text in its middle, and a smaller line below."""
    self._parts.append(self._box(x, y, width, height, kind, 5))
    middle, down = x + width / 2, y + height / 2
    if text:
      self.text(middle, down + (-2 if note else 5), text, "middle")
    if note:
      self.text(middle, down + 15, note, "middle small muted")

  def text(self, x, y, text, kind=""):
    """Draw a line of text; `y` is its baseline."""
    text = escape(text)
    self._parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}">{text}</text>')

  def line(self, points, kind="line"):
    """Draw a line through points."""
    path = " ".join(f"{x:.4g},{y:.4g}" for x, y in points)
    self._parts.append(f'<polyline class="{kind}" points="{path}"/>')

  def arrow(self, x0, y0, x1, y1):
    """Draw a line with a tip at its end."""
    self.line([(x0, y0), (x1, y1)])
    angle = math.atan2(y1 - y0, x1 - x0)
    tip = [(x1, y1)]
    for turn in (2.7, -2.7):
      tip.append((x1 + 9 * math.cos(angle + turn), y1 + 9 * math.sin(angle + turn)))
    points = " ".join(f"{x:.4g},{y:.4g}" for x, y in tip)
    self._parts.append(f'<polygon class="tip" points="{points}"/>')

  def dot(self, x, y, kind):
    """Draw a data point."""
    self._parts.append(f'<circle class="{kind}" cx="{x:g}" cy="{y:g}" r="4"/>')

  def svg(self) -> str:
    """Return the text of the SVG file."""
    width, height = self._size
    title = escape(self._title)
    head = (
      f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
      f'width="{width}" height="{height}" role="img" aria-label="{title}">'
    )
    about = f"<title>{title}</title>", f"<style>{STYLE}</style>"
    return "\n".join([head, *about, *self._parts, "</svg>", ""])


def step() -> Picture:
  """Draw the three stages of a train step."""
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
        p.box(x, 90 + 36 * i, 172, 28, kind, f"device {i}: {note}")
    if kind == "orange":
      p.box(x, 90, 160, 136, kind, "sum of gradients", "once per step, float32")
    if kind == "green":
      p.box(x, 90, 208, 136, kind, "parameters, optimizer", "norms over whole layers")
  for i in range(4):
    p.arrow(200, 104 + 36 * i, 272, 104 + 36 * i)
  p.arrow(440, 158, 524, 158)
  return p


def layouts() -> Picture:
  """Draw what each of eight devices holds under four layouts."""
  p = Picture(760, 336, "One model on eight devices under four layouts")
  cases = (
    ("data 8", "rows split, weights whole", lambda i: (i, "all")),
    ("fsdp 8", "rows and weights split", lambda i: (i, "1/8")),
    ("fsdp 4 × model 2", "each pair shares rows and splits heads", lambda i: (i // 2, "1/8")),
    ("data 2 × stage 4", "each device has a quarter of the layers", lambda i: (i // 4, "1/4")),
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
  """Draw one batch on four devices, then on two."""
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
  """Draw a preemption: save, requeue, restore."""
  p = Picture(760, 196, "A job is preempted, saves, is requeued and resumes")
  p.text(24, 34, "first start", "strong")
  p.text(24, 118, "second start: the same job and folder", "strong")
  p.box(24, 46, 250, 34, "blue", "steps 1 … 334")
  p.box(274, 46, 70, 34, "orange", "save")
  p.text(356, 60, "SIGTERM, SIGUSR1 or walltime: all processes", "small muted")
  p.text(356, 76, "agree on a step, save it and exit with code 85", "small muted")
  p.box(360, 130, 60, 34, "grey", "queue")
  p.box(420, 130, 76, 34, "orange", "restore")
  p.box(496, 130, 240, 34, "green", "steps 335 … 685")
  p.line([(330, 80), (330, 147)])
  p.arrow(330, 147, 356, 147)
  p.text(
    24, 184, "At step 685 the parameters equal those of an undisturbed run, bit for bit.", "small"
  )
  return p


# Of benchmarks/large_batch.py: the name, and the class of its color.
OPTIMIZERS = {
  "muon": ("Muon", "red"),
  "lamb": ("LAMB", "green"),
  "soap": ("SOAP", "teal"),
  "adamw": ("AdamW", "purple"),
  "lars": ("LARS", "blue"),
  "sgd": ("SGD", "orange"),
}
# Sizes of the ImageNet batch in whose papers the accuracy is that of a small batch, at the same
# share of the 60,000 images here (sources: docs/large_batch.md).
PUBLISHED = (("SGD, linear scaling", 384, "orange"), ("LARS", 1536, "blue"))


def large_batch() -> Picture:
  """Draw the means of benchmarks/large_batch.py by batch size, and what was published."""
  rows = json.loads((ROOT / "benchmarks/results/large_batch.json").read_text())["rows"]
  p = Picture(760, 436, "Six optimizers by batch size, on images and on text")
  images = Panel(p, (60, 352), (96, 320), (256, 16384), (68, 92))
  p.text(18, 30, "CNN on Fashion-MNIST, 10 epochs", "strong")
  p.text(18, 50, "validation accuracy in %, mean of 3 seeds", "small muted")
  images.axes((72, 76, 80, 84, 88, 92), (256, 1536, 4096, 16384))
  for index, (name, size, kind) in enumerate(PUBLISHED):
    y = 382 + 20 * index
    p.line([(images.x(256), y), (images.x(size), y)], f"curve s-{kind}")
    p.text(images.x(size) + 8, y + 4, f"{name}: no loss on ImageNet up to here", "small muted")
  p.text(images.x(256), 424, "(at the same share of the data set per batch)", "small muted")
  text = Panel(p, (460, 670), (96, 320), (16, 512), (4.7, 1.9))
  p.text(420, 30, "Transformer on text, 2 epochs", "strong")
  p.text(420, 50, "bits per byte (better is higher up), mean of 3 seeds", "small muted")
  text.axes((2.0, 2.5, 3.0, 3.5, 4.0, 4.5), (16, 128, 512))
  for panel, task in ((images, "images"), (text, "text")):
    ends = []
    for kind, (name, color) in OPTIMIZERS.items():
      points = [r for r in rows if (r["task"], r["kind"]) == (task, kind) and r["mean"]]
      places = [
        panel.at(r["batch_size"], r["mean"] * (100 if task == "images" else 1)) for r in points
      ]
      p.line(places, f"curve s-{color}")
      for place in places:
        p.dot(*place, color)
      ends.append((places[-1][1], name, color))
    _labels(p, panel.right + 10, ends)
  return p


class Panel:
  """Axes in a picture: the batch size on a logarithmic scale, and a value.

  Args:
    picture: the picture to draw into.
    across: the left and the right end.
    down: the upper and the lower end.
    sizes: the batch sizes at the left and the right end.
    values: the values at the lower and the upper end.
  """

  def __init__(self, picture, across, down, sizes, values):
    self._picture, self._across, self._down = picture, across, down
    self._sizes, self._values = sizes, values
    self.right = across[1]

  def x(self, size: int) -> float:
    """Return the place of a batch size."""
    (left, right), (least, most) = self._across, self._sizes
    return left + (right - left) * math.log(size / least) / math.log(most / least)

  def at(self, size: int, value: float) -> tuple[float, float]:
    """Return the place of a value at a batch size."""
    (upper, lower), (low, high) = self._down, self._values
    return self.x(size), lower + (upper - lower) * (value - low) / (high - low)

  def axes(self, values, sizes) -> None:
    """Draw lines at values, and names of batch sizes."""
    for value in values:
      y = self.at(self._sizes[0], value)[1]
      self._picture.line([(self._across[0] - 8, y), (self.right + 4, y)], "grid")
      self._picture.text(self._across[0] - 14, y + 4, f"{value}", "small muted end")
    for size in sizes:
      self._picture.text(self.x(size), self._down[1] + 22, f"{size:,}", "small middle")
    self._picture.text(self._across[0] - 22, self._down[1] + 22, "batch", "small muted end")


def _labels(p: Picture, x: float, ends: list[tuple[float, str, str]]) -> None:
  """Write the name of each curve beside its end, at least 15 apart."""
  last = -math.inf
  for y, name, color in sorted(ends):
    last = max(y, last + 15)
    p.text(x, last + 4, name, f"small t-{color}")


def hang() -> Picture:
  """Draw a terminal of 72 columns with hang.txt, whose lines a run printed."""
  printed = (HERE / "hang.txt").read_text().rstrip("\n").splitlines()
  hashes = [line.split()[0] for line in printed[-2:]]
  if hashes[0] != hashes[1]:
    raise ValueError("hang.txt: the checkpoints of the two runs differ; record the runs again")
  lines = []
  for line in printed:
    kind = "t-blue" if line[:1] == "$" else "t-red" if line[:6] == "error:" else ""
    kind = "t-green" if line.split()[0] in hashes else kind
    lines += [(part, kind) for part in textwrap.wrap(line, 72, break_on_hyphens=False) or [""]]
  bottom = 32 + 20 * len(lines)
  p = Picture(602, bottom + 40, "A run reports the process that hangs, restarts and resumes")
  for n, (line, kind) in enumerate(lines):
    p.text(18, 32 + 20 * n, line, f"code {kind}")
  p.line([(18, bottom - 6), (584, bottom - 6)], "grid")
  equal = "Equal hashes: the same parameters as without the hang."
  p.text(18, bottom + 20, equal, "strong t-green")
  return p


PICTURES = {f.__name__: f for f in (step, layouts, resize, requeue, large_batch, hang)}


def main() -> None:
  """Write every picture."""
  for name, draw in PICTURES.items():
    (HERE / f"{name}.svg").write_text(draw().svg())


if __name__ == "__main__":
  main()
