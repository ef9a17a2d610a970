"""Submit a run for each combination of values of some settings, as one job array."""

from __future__ import annotations

from jaxscale.cli import submit
from jaxscale.cli.parser import Namespace, Parser


def add_arguments(parser: Parser) -> None:
  """Add the options."""
  text = "a setting and its values; repeat it for combinations (default: get_sweep() in FILE)"
  parser.option("--sweep FIELD=V,V", text, action="append")
  submit.add_sweep_arguments(parser)


def run(args: Namespace) -> None:
  """Submit the trials."""
  from jaxscale.jobs import sweeps

  trials = sweeps.product(args.sweep) if args.sweep else sweeps.from_file(args.config)
  submit.run(args, trials=trials, at_most=args.at_most or 0)
