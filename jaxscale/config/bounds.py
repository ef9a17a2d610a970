"""Types of numbers with a bound, which `settings` checks; patterns of paths."""

from __future__ import annotations

import re
from typing import Annotated

from jaxscale.errors import ConfigError

Positive = Annotated[float, "> 0"]
NonNegative = Annotated[float, ">= 0"]
Fraction = Annotated[float, "in [0, 1)"]
Count = Annotated[int, ">= 1"]


def check_pattern(field: str, pattern: str, remedy: str) -> None:
  """Refuse what is not a regular expression.

  Args:
    field: for the message, e.g. "LARS.include".
    pattern: its value, or one of them.
    remedy: what to write instead.

  Raises:
    ConfigError: it does not compile.
  """
  try:
    re.compile(pattern)
  except (re.error, OverflowError, RecursionError) as e:
    why = f"not a regular expression ({e})"
    raise ConfigError(f"{field}={pattern!r}: {why}, {remedy}") from None
