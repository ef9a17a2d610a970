"""Fixtures of several files; conftest.py imports them."""

import os
import stat

import pytest

from support.logs import logged


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
  """A command in front of the real one, if there is one; what it was asked.

  In bash: dash begins with no signal blocked, whoever starts it, and scontrol does not.
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
  """A photograph of 400 x 600 pixels, RGB."""
  from skimage import data as photos

  return photos.coffee()


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
  """A cache directory of the test's own, for what is prepared or compiled."""
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def reported():
  """Lines that jaxscale logs, of this process."""
  with logged() as lines:
    yield lines
