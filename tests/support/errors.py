"""Errors of one line."""

import contextlib

import pytest

from jaxscale.errors import ConfigError


@contextlib.contextmanager
def config_error(*parts: str, match: str | None = None):
  """Expect a ConfigError of one line that has these parts, or matches."""
  with pytest.raises(ConfigError, match=match) as error:
    yield error
  line = str(error.value)
  assert "\n" not in line
  assert all(part in line for part in parts), line
