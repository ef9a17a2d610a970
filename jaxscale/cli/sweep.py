"""Submit one run for each combination of values of some settings, as one job array."""

from __future__ import annotations

from jaxscale.cli import submit
from jaxscale.cli.parser import Namespace, Parser, whole
from jaxscale.errors import ConfigError


def add_arguments(parser: Parser) -> None:
  """The options."""
  text = "values of a setting; several: all combinations (default: get_sweep() of FILE)"
  parser.option("--sweep FIELD=V,V", text, action="append")
  text = "trials at a time (default: all; on this machine 1)"
  parser.option("--at-most N", text, whole(1))
  parser.option("--nodes N", "of each run", whole(1), default=1)
  submit.add_job_arguments(parser)


def run(args: Namespace) -> None:
  """Submit the trials."""
  from jaxscale.launch import sweeps

  trials = sweeps.product(args.sweep) if args.sweep else sweeps.from_file(args.config)
  if not trials:
    raise ConfigError(f"{args.config}: its get_sweep() yields nothing")
  submit.run(args, trials=trials, at_most=args.at_most or 0)
