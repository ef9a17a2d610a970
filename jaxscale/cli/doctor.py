"""Check nodes and disks before a run; print what to fix.

The command checks whether this allocation is ready for a job. Start it with the same `srun`
options as the job, and with at least one process per node:

    srun jaxscale doctor --workdir DIR --config FILE

The next command is `srun jaxscale bench`: its processes join as those of a run do, and it
measures the links between them.
"""

from __future__ import annotations

from pathlib import Path

from jaxscale.cli.parser import Namespace, Parser, directory
from jaxscale.cluster.group import PeerError
from jaxscale.config.validation import nearest
from jaxscale.errors import ConfigError
from jaxscale.jobs import preflight


def add_arguments(parser: Parser) -> None:
  """Add the options."""
  parser.exit_codes = "exit code: 0 ready, 2 not ready; the last lines say what to do"
  parser.option("--workdir DIR", "the workdir of the run", directory, default=".")
  parser.config(" (default: none)")
  checks = [f"{name} ({check.text})" for name, check in preflight.CHECKS.items()]
  skip = f"the checks to skip (default: none): {'; '.join(checks)}"
  parser.option("--skip NAME,NAME", skip, action="append", default=[])


def run(args: Namespace) -> int:
  """Run the checks and print the findings."""
  skip = [name for text in args.skip for name in text.split(",")]
  for name in skip:
    if name not in preflight.CHECKS:
      raise ConfigError(f"--skip={name}: {nearest(name, preflight.CHECKS)}")
  if args.overrides and args.config is None:
    raise ConfigError(f"--config.{next(iter(args.overrides))}: needs --config FILE; add it")
  chosen = Path(args.workdir), args.config, args.overrides
  try:
    return preflight.check(preflight.Options(*chosen, tuple(skip), args.trust))
  except PeerError as e:
    raise ConfigError(f"preflight: {e}") from None  # the job's script knows exit code 2
