"""Fixtures of several files; conftest.py imports them."""

import os
import stat

import pytest


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
