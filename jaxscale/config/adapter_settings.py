"""Settings of adapters, which are trained in place of the parameters that they adapt."""

from __future__ import annotations

from jaxscale.config.bounds import Count, Positive, check_pattern
from jaxscale.config.validation import settings


@settings
class NoAdapter:
  """No adapter: the parameters of the model are trained themselves."""


@settings
class LoRA:
  """Low-rank adaptation (LoRA, arXiv:2106.09685): W + scale A B in place of a kernel W.

  The parameters of the model are frozen, except for those that Config.trainable selects.

  Attributes:
    rank: the rank of A B: the number of columns of A.
    alpha: the numerator of the scale, which is alpha / rank.
    targets: the regular expression that selects the adapted kernels by their paths; None selects
      the kernels of attention and MLP in every layer of a Transformer or ViT.
    scale_by_sqrt: whether the scale is alpha / sqrt(rank) (rsLoRA, arXiv:2312.03732).
  """

  rank: Count = 8
  alpha: Positive = 16.0
  targets: str | None = None
  scale_by_sqrt: bool = False

  def __post_init__(self):
    if self.targets is not None:
      check_pattern("LoRA.targets", self.targets, "give e.g. 'layers/(q|v)/kernel'")

  @property
  def scale(self) -> float:
    """Factor of A B."""
    return self.alpha / (self.rank**0.5 if self.scale_by_sqrt else self.rank)
