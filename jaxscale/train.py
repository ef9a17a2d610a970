"""The command line: `python -m jaxscale.train --config FILE [--workdir DIR]`."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from jaxscale.overrides import command, help_text, load_config, parse_args
from jaxscale.settings import ConfigError

EXIT_DONE, EXIT_CRASH, EXIT_USER, EXIT_INTERRUPTED = 0, 1, 2, 130


def main(argv: list[str]) -> int:
  """Run what the command line asks for; returns the exit code."""
  try:
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
  except ConfigError as e:
    print(f"error: {e}", file=sys.stderr)
    return EXIT_USER


def default_workdir(path: str) -> str:
  """`runs/digits` for configs/digits.py, `runs/x-8k` for configs/x.py:8k."""
  file, _, arg = path.partition(":")
  return f"runs/{Path(file).stem}" + (f"-{arg}" if arg else "")


def run(config, workdir: Path, argv: list[str]) -> int:
  """Train, and say in one line how it ended."""
  from jaxscale import cluster  # JAX, 1.3 s: not for --help or a typo

  cluster.initialize()
  from jaxscale.loop import NonFiniteError
  from jaxscale.run import fit

  leader = cluster.is_leader()
  try:
    summary = fit(config, workdir).summary
  except NonFiniteError as e:
    print(
      f"error: {e}; lower optimizer.lr or set clip_norm, in a new --workdir",
      file=sys.stderr,
    )
    return EXIT_CRASH
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


def leave(main: Callable[[list[str]], int]) -> NoReturn:
  """End the process with the exit code of a command's `main`."""
  code = EXIT_CRASH
  try:
    code = main(sys.argv[1:])
  except BrokenPipeError:  # `--help | head`: whoever read us has enough
    os._exit(EXIT_DONE)
  except Exception:
    traceback.print_exc()
  sys.stdout.flush()
  sys.stderr.flush()
  if code and any(map(os.environ.get, ("JAXSCALE_NUM_PROCESSES", "SLURM_NTASKS"))):
    # JAX's exit barrier would hold a failed process for 300 s (and with it the
    # whole job), so leave at once; what had to be written is written.
    os._exit(code)
  sys.exit(code)


if __name__ == "__main__":
  leave(main)
