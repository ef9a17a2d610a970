"""Programs of Python in a process of their own."""

import subprocess
import sys

from support.commands import child_env
from support.paths import ROOT


def python(*argv, cwd=ROOT, env=None, timeout=300):
  """Run Python with these arguments and return the process that ended."""
  command, env = [sys.executable, *argv], env or child_env()
  return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout)
