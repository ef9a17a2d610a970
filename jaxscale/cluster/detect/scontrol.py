"""Slurm's `scontrol`, asked with a time-out."""

from __future__ import annotations

import os
import subprocess


def run_scontrol(*args: str, timeout_s: float = 10.0) -> str | None:
  """What `scontrol` prints; None where there is none, or it fails.

  It waits for a controller that is gone for minutes (MessageTimeout).
  """
  try:
    done = subprocess.run(
      ["scontrol", *args],
      capture_output=True,
      text=True,
      timeout=timeout_s,
      stdin=subprocess.DEVNULL,
      # Times in one format, whatever the user prefers (scontrol(1)).
      env=os.environ | {"SLURM_TIME_FORMAT": "standard"},
    )
  except (OSError, subprocess.TimeoutExpired):
    return None
  return done.stdout if done.returncode == 0 else None
