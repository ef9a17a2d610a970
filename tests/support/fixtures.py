"""Fixtures that several files use; conftest.py imports them."""

import os
import stat

import pytest

from jaxscale import owners
from support.logs import logged


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
  """Put a fake scontrol in front of the real one; return its record of calls.

  The fake uses bash: dash unblocks all signals when it starts, and scontrol does not.
  """
  asked = tmp_path / "asked"

  def install(script):
    path = tmp_path / "bin" / "scontrol"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'#!/bin/bash\necho "$@" >> {asked}\n{script}\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
    return asked

  return install


@pytest.fixture(scope="session")
def photo():
  """Return a photograph of 400 x 600 pixels, RGB."""
  from skimage import data as photos

  return photos.coffee()


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
  """Give the test its own cache directory for prepared and compiled files."""
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def umask():
  """Set the usual umask, and return the function that sets another."""
  before = os.umask(0o022)
  yield os.umask
  os.umask(before)


@pytest.fixture
def shared_groups(monkeypatch):
  """Make all groups have other members, also those of one user."""
  monkeypatch.setattr(owners, "_is_private", lambda group: False)


@pytest.fixture
def reported():
  """Return the lines that jaxscale logs in this process."""
  with logged() as lines:
    yield lines
