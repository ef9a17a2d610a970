"""Marks that decide which parameters of a test `make test` runs."""

from collections.abc import Iterable

import pytest


def all_slow_except(values: Iterable, *names) -> list:
  """Return parameters for `pytest.mark.parametrize`; those not named are marked slow."""
  values = list(values)
  assert set(names) <= set(values), f"no such parameters: {set(names) - set(values)}"
  return [v if v in names else pytest.param(v, marks=pytest.mark.slow) for v in values]
