"""Runs that kill, interrupt or hold themselves at a step, which a fast run cannot pass.

The functions return environment variables, with which Python imports
`at_step_site/sitecustomize.py` before everything else.
"""

import os
import signal
from pathlib import Path

from support.paths import ROOT

_SITE = Path(__file__).with_name("at_step_site")


def kill(step, activity="input", *, count=1):
  """Make a run kill itself when it begins an activity of a step for the `count`-th time."""
  return _env(signal.SIGKILL, step, activity, count)


def interrupt(step):
  """Make a run press Ctrl-C before a step, and go on to train it once the run has taken note."""
  return _env(signal.SIGINT, step)


def hold(step):
  """Make a run wait before a step until it is killed or asked to stop."""
  return _env(0, step)


def hold_save(step):
  """Make a run write the checkpoint of a step, or of the next saved one, but never commit it."""
  return _env(0, step, "commit")


def _env(number, step, activity="input", count=1):
  """Return the variables; signal 0 is none."""
  # Commands are also run in other folders, where Python finds the package by its path.
  path = os.pathsep.join([str(_SITE), str(ROOT)])
  return {"PYTHONPATH": path, "AT_STEP": f"{int(number)} {activity} {step} {count}"}
