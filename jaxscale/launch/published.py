"""Scaling efficiencies that others published, drawn next to what was measured.

Other models, chips and networks: they show what has been reached, not what a study
should reach. Where a source leaves its base open, it is from memory ("recalled").
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Published(NamedTuple):
  """An efficiency.

  Attributes:
    name: of the system.
    base: devices that it is relative to.
    devices: that it was reached on.
    efficiency: a share.
    kind: "weak" (the batch grows with the devices) or "strong".
    what: was trained, and on what.
    source: of the number.
    short: the source in a word or two, for a picture.
  """

  name: str
  base: int
  devices: int
  efficiency: float
  kind: str
  what: str
  source: str
  short: str

  def as_plot(self) -> dict[str, Any]:
    """What `metrics.plot_scaling` draws of it."""
    label = f"{self.name}, {self.devices:,}: {self.efficiency:.0%}, {self.kind} "
    return {
      "label": f"{label}({self.short})", "times": self.devices / self.base,
      "efficiency": self.efficiency,
    }  # fmt: skip

  def __str__(self) -> str:
    base = f"{self.efficiency:.1%} at {self.devices:,}, relative to {self.base:,}"
    return f"{self.name}: {base}, {self.kind} scaling, {self.what}; {self.source}"


PUBLISHED = (
  Published(
    "IBM DDL", 4, 256, 0.95, "weak", "ResNet-50 in Caffe on P100",
    "IBM's announcement of August 2017, with arXiv:1708.02188 (its base is recalled)",
    "IBM 2017",
  ),
  Published(
    "Goyal et al.", 8, 256, 0.9, "weak", "ResNet-50 on P100",
    "arXiv:1706.02677, abstract: about 90 %", "arXiv:1706.02677",
  ),
  Published(
    "You et al.", 512, 2048, 0.75, "strong",
    "ResNet-50 at batch 32,768 on Knights Landing nodes of TACC",
    "arXiv:1709.05011: 90 epochs in 60 minutes on 512 and 20 on 2,048, divided",
    "arXiv:1709.05011",
  ),
  Published(
    "torchtitan", 8, 128, 833_792 / 53_336 / 16, "weak", "Llama 3.1 8B on H100",
    "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md", "its benchmarks",
  ),
  Published(
    "Megatron-LM", 96, 4608, 42 / 47, "strong", "GPT-3 175B at batch 1,152 on H100",
    "NVIDIA/Megatron-LM, README.md: MFU from 47 % to 42 %", "its README",
  ),
)  # fmt: skip
