"""The command line: `python -m jaxscale.train --config FILE [--workdir DIR]`."""

from __future__ import annotations

import errno
import sys
from pathlib import Path

from jaxscale import cluster
from jaxscale.exits import (
  EXIT_CRASH,
  EXIT_DONE,
  EXIT_GIVE_UP,
  EXIT_INTERRUPTED,
  leave,
  one_line_errors,
)
from jaxscale.overrides import command, help_text, load_config, parse_args
from jaxscale.settings import ConfigError

# What a disk or its server does, and not a fault of the program.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE)


@one_line_errors
def main(argv: list[str]) -> int:
  """Run what the command line asks for; returns the exit code."""
  options, overrides, wants_help = parse_args(argv)
  path = options.get("config")
  config = load_config(path, overrides) if path else None
  if wants_help:
    print(help_text(config))
    return EXIT_DONE
  if config is None or path is None:
    raise ConfigError("--config: missing; try --config configs/digits.py")
  workdir = Path(options.get("workdir", default_workdir(path)))
  return run(config, workdir, argv)


def default_workdir(path: str) -> str:
  """`runs/digits` for configs/digits.py, `runs/x-8k` for configs/x.py:8k."""
  file, _, arg = path.partition(":")
  return f"runs/{Path(file).stem}" + (f"-{arg}" if arg else "")


def run(config, workdir: Path, argv: list[str]) -> int:
  """Train, and say in one line how it ended."""
  cluster.initialize(config)
  from jaxscale.checkpoint import UnsavedError
  from jaxscale.lease import LostError
  from jaxscale.loop import NonFiniteError
  from jaxscale.replicas import ReplicaDivergenceError
  from jaxscale.run import fit

  leader = cluster.is_leader()
  try:
    summary = fit(config, workdir).summary
  except (NonFiniteError, ReplicaDivergenceError) as e:
    print(f"error: {e}; {e.advice}", file=sys.stderr)
    return EXIT_CRASH
  except LostError as e:
    return _failed(f"{e}", leader, EXIT_GIVE_UP)
  except UnsavedError as e:
    return _failed(f"{e}; {e.advice}", leader, EXIT_CRASH)
  except OSError as e:
    if e.errno not in DISK_ERRORS:
      raise
    where = f"{e.filename}: " if e.filename else ""
    return _failed(f"{where}{e.strerror}; {UnsavedError.advice}", leader, EXIT_CRASH)
  if summary["outcome"] == "interrupted":
    if leader:
      print(f"saved step {summary['step']}; to go on: {command(argv)}")
    return EXIT_INTERRUPTED
  if leader:
    target = summary["target_accuracy"]
    reached = "" if target is None else f" (target {target:.2%}: " + (
      "reached)" if summary["accuracy"] >= target else "missed)"
    )  # fmt: skip
    print(
      f"done: held-out accuracy {summary['accuracy']:.2%}{reached} after "
      f"{summary['step']} steps, {summary['seconds']} s; see {workdir}/metrics.png"
    )
  return EXIT_DONE


def _failed(line: str, leader: bool, code: int) -> int:
  """Say a failure that all processes know of once."""
  if leader:
    print(f"error: {line}", file=sys.stderr)
  return code


if __name__ == "__main__":
  leave(main, cluster.leave_last)
