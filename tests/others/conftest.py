"""Programs that others wrote, compared with ours: skipped where they are not installed.

They are the extra `others`; `make test-others` installs it and runs this folder.
"""

import pytest

from others import packages  # noqa: F401  before a test imports one of them


def pytest_collection_modifyitems(items):
  """Their warnings in a test of theirs are no errors of ours."""
  for item in items:
    if item.path.parent.name == "others":
      item.add_marker(pytest.mark.filterwarnings("ignore"))
