"""Slurm's `scontrol`, asked with a time-out."""

from __future__ import annotations

import os
import subprocess


def run_scontrol(*args: str, timeout_s: float = 10.0) -> str | None:
  """What `scontrol` prints; None where there is none, or it fails.

  It waits for a controller that is gone for minutes (MessageTimeout).
  """
  try:
    # Times in one format, whatever the user prefers (scontrol(1)).
    env = os.environ | {"SLURM_TIME_FORMAT": "standard"}
    options = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    done = subprocess.run(["scontrol", *args], timeout=timeout_s, env=env, **options)
  except (OSError, subprocess.TimeoutExpired):
    return None
  return done.stdout if done.returncode == 0 else None
