"""Parts of the slow tests: together they are all of them (support/cases.py)."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from support.cases import cases_of_other_parts


class Case:
  """A test as pytest collects it, hashable by identity."""

  def __init__(self, name: str, is_slow: bool, params: dict[str, Any]):
    self.path, self.originalname, self.is_slow = "x.py", name, is_slow
    if params:
      self.callspec = SimpleNamespace(params=params)

  def get_closest_marker(self, name):
    assert name == "slow"
    return pytest.mark.slow if self.is_slow else None


def cases(name, is_slow=True, **values) -> list[Any]:
  """Return all cases of a test; the first parameter is the nearest to the function."""
  rows = itertools.product(*values.values())
  return [Case(name, is_slow, dict(zip(values, row, strict=True))) for row in rows]


def kept(items, part, parts=3):
  others = cases_of_other_parts(items, part, parts)
  return [item for item in items if item not in others]


def test_the_parts_together_are_all_tests():
  items = cases("many", layout="abcdefg", optimizer="xy") + cases("few", way="ab") + cases("one")
  found = [kept(items, part) for part in (1, 2, 3)]
  assert {id(i) for part in found for i in part} == {id(i) for i in items}
  assert [len(part) for part in found] == [6 + 1, 4 + 1, 4 + 1]


def test_cases_of_one_layout_stay_together():
  layouts = [i.callspec.params for i in kept(cases("many", layout="abcd", optimizer="xyz"), 1)]
  assert [p["layout"] + p["optimizer"] for p in layouts] == ["ax", "ay", "az", "dx", "dy", "dz"]


def test_quick_tests_are_in_every_part():
  items = cases("quick", is_slow=False, layout="abcdef")
  assert kept(items, 3) == items


@pytest.mark.parametrize("part", [0, 4])
def test_another_part_is_refused(part):
  with pytest.raises(pytest.UsageError, match=f"{part}/3"):
    cases_of_other_parts([], part, 3)
