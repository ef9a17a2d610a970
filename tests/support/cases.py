"""Which cases of a test are run: by `make test`, and by a part of `make test-slow`."""

from collections.abc import Iterable
from typing import Any

import pytest


def all_slow_except(values: Iterable, *names) -> list:
  """Return parameters for `pytest.mark.parametrize`; those not named are marked slow."""
  values = list(values)
  assert set(names) <= set(values), f"no such parameters: {set(names) - set(values)}"
  return [v if v in names else pytest.param(v, marks=pytest.mark.slow) for v in values]


def cases_of_other_parts(
  items: Iterable[pytest.Function], part: int, parts: int
) -> set[pytest.Function]:
  """Return the cases of slow tests that are not of this part, of 1 to `parts`.

  Cases of one value of the parameter that stands nearest to the function stay together: most
  files compute once what these have in common.
  """
  if not 1 <= part <= parts:
    raise pytest.UsageError(f"no such part: {part}/{parts}")
  rows: dict[Any, list[pytest.Function]] = {}
  for item in items:
    if item.get_closest_marker("slow"):
      params = item.callspec.params.values() if hasattr(item, "callspec") else ()
      nearest = id(next(iter(params), None))
      rows.setdefault((item.path, item.originalname, nearest), []).append(item)
  return {item for i, row in enumerate(rows.values()) if i % parts != part - 1 for item in row}
