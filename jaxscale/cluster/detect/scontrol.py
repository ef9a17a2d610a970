"""Calls of Slurm's `scontrol` with a timeout."""

from __future__ import annotations

import os
import subprocess


def run_scontrol(*args: str, timeout_s: float = 10.0) -> str | None:
  """Run `scontrol` and return its output; None if it is missing or fails.

  Without the timeout it would wait minutes for a controller that is down (MessageTimeout).
  """
  try:
    # Overrides the user's time format, which the callers could not parse (scontrol(1)).
    env = os.environ | {"SLURM_TIME_FORMAT": "standard"}
    options = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    done = subprocess.run(["scontrol", *args], timeout=timeout_s, env=env, **options)
  except (OSError, subprocess.TimeoutExpired):
    return None
  return done.stdout if done.returncode == 0 else None
