"""Number types with a bound, which `settings` checks, and a check of regular expressions."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated

from jaxscale.errors import ConfigError

Positive = Annotated[float, "> 0"]
NonNegative = Annotated[float, ">= 0"]
Fraction = Annotated[float, "in [0, 1)"]
Count = Annotated[int, ">= 1"]


def check_pattern(field: str, pattern: str, remedy: str) -> None:
  """Refuse a pattern that is not a regular expression.

  Args:
    field: the name of the setting, e.g. "LARS.include".
    pattern: the value, or one of the values, of the setting.
    remedy: the advice at the end of the error.

  Raises:
    ConfigError: the pattern does not compile.
  """
  try:
    re.compile(pattern)
  except (re.error, OverflowError, RecursionError) as e:
    problem = f"not a regular expression ({e})"
    raise ConfigError(f"{field}={pattern!r}: {problem}, {remedy}") from None


def check_distinct(field: str, items: Iterable[object]) -> None:
  """Refuse several settings of one class, which the command line could not tell apart.

  Raises:
    ConfigError: a class occurs twice.
  """
  names = [type(item).__name__ for item in items]
  for name in names:
    if names.count(name) > 1:
      raise ConfigError(f"{field}: {name} is listed twice; remove one")
