"""Settings of a mixture of data. Imports no JAX."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

from jaxscale import data
from jaxscale.config.bases import Data
from jaxscale.errors import invalid
from jaxscale.metrics.text import listed, plural

__all__ = ["Mixture"]

Split = tuple["data.Dataset", "data.Dataset"]  # To train on, and to validate on.


class Mixture(Data):
  """Examples of several sources, in shares that are exact to one example at every step.

  An epoch has as many examples as all sources together; a source with a larger share than its
  size begins again, in a new order, before the others. Validation sees all validation examples
  of all sources as one set. Metrics data/NAME/epoch and data/NAME/examples say how much of each
  source was used. All sources need the same shapes, vocabulary and classes.

  Attributes:
    sources: the data by name, such as {"web": TextFiles(...), "code": TextFiles(...)}.
    weights: the share of training examples by name of source, such as {"web": 0.7, "code":
      0.3}, divided by their sum and rounded to 1/10,000; with `changes_at`, a tuple of shares.
    changes_at: the numbers of training examples after which the next shares apply, so that
      shares do not depend on batch sizes; step s of a constant batch size is s * batch_size
      examples.
  """

  sources: dict[str, Data]
  weights: dict[str, float | tuple[float, ...]]
  changes_at: tuple[int, ...] = ()

  def __post_init__(self):
    names, count = [*self.sources], len(self.changes_at) + 1
    for name in names:
      if not re.fullmatch(r"[\w-]+", name):
        raise invalid("Mixture.sources", name, "is not a name", "use letters, digits, _ and -")
    if not names or self.weights.keys() != self.sources.keys():
      problem = f"has the names {listed(self.weights) or 'none'}, but sources has "
      raise invalid("Mixture.weights", ..., problem + (listed(names) or "none"), "use the same")
    if any(a >= b for a, b in itertools.pairwise((0, *self.changes_at))):
      problem, fix = "does not increase from above 0", "give numbers of examples in order"
      raise invalid("Mixture.changes_at", self.changes_at, problem, fix)
    for name, shares in self._shares().items():
      if len(shares) != count:
        fix = f"give {plural(count, 'share')}, one more than changes_at has numbers"
        raise invalid(f"Mixture.weights.{name}", shares, f"has {len(shares)}", fix)
      if not all(math.isfinite(share) and share >= 0 for share in shares):
        raise invalid(f"Mixture.weights.{name}", shares, "is not a share", "give numbers >= 0")
    if not all(map(sum, zip(*self._shares().values(), strict=True))):
      raise invalid("Mixture.weights", ..., "are 0 for all sources", "raise one of them")
    tokenizers = {getattr(source, "tokenizer", None) for source in self.sources.values()}
    if len(tokenizers) > 1:
      problem = f"have different tokenizers, {listed(sorted(map(repr, tokenizers)))}"
      raise invalid("Mixture.sources", ..., problem, "use one tokenizer")

  def __hash__(self) -> int:
    return id(self)

  def _shares(self) -> dict[str, tuple[float, ...]]:
    shares = self.weights.items()
    return {name: x if isinstance(x, tuple) else (x,) for name, x in shares}

  def _shared(self, field: str, default: Any) -> Any:
    """Return the value of a setting of the sources, if it is the same in all that have it."""
    values = [getattr(source, field, default) for source in self.sources.values()]
    return values[0] if all(value == values[0] for value in values) else default

  @property
  def tokenizer(self) -> str:
    """The tokenizer of all sources."""
    return self._shared("tokenizer", "bytes")

  @property
  def separator(self) -> str | None:
    """The separator of documents, if all sources have the same."""
    return self._shared("separator", None)

  @property
  def sequence_length(self) -> int | None:
    """The number of tokens per example, if the sources are text."""
    return self._shared("sequence_length", None)

  def mixed(self, splits: dict[str, Split]) -> Split:
    """Return the mixtures of the datasets of the sources, for training and validation."""
    from jaxscale.data.mixture import mix

    train, held_out = ({name: pair[i] for name, pair in splits.items()} for i in (0, 1))
    equal = {name: [1.0] for name in held_out}  # Validation has no order.
    return mix(train, self._shares(), self.changes_at), mix(held_out, equal)

  def build(self) -> Split:
    """Return the mixtures for training and validation."""
    return self.mixed({name: source.build() for name, source in self.sources.items()})

  def abstract(self, batch_size: int) -> Split | None:
    """Return mixtures without data if all sources can describe theirs."""
    splits = {name: source.abstract(batch_size) for name, source in self.sources.items()}
    return None if None in splits.values() else self.mixed(splits)

  def resized(self, image_size: int) -> data.Dataset:
    """Return the mixture for training with images of a different size."""
    from jaxscale.data.mixture import mix

    sources = {name: source.resized(image_size) for name, source in self.sources.items()}
    return mix(sources, self._shares(), self.changes_at)
