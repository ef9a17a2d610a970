"""Print the settings of a large config, by the learning-rate sweep of a small one.

Both configs have the same parametrization (MuP or CompleteP), by which the best learning rate
does not depend on width and depth. Rules for the batch size change learning rate, weight decay,
eps and moments. The command prints the sweep, its optimum, each setting with its rule and source,
and the command that trains.
"""

from __future__ import annotations

from jaxscale.cli.parser import Namespace, Parser
from jaxscale.cli.status import SEE_STATUS
from jaxscale.cli.submit import add_runs
from jaxscale.errors import printable


def add_arguments(parser: Parser) -> None:
  """Add the options."""
  text = "the sweep of optimizer.lr with the small config, or the workdirs of its runs"
  parser.words("names", "RUN", text, missing=SEE_STATUS)
  parser.config()
  add_runs(parser)


def run(args: Namespace) -> None:
  """Print the settings."""
  from jaxscale.config.loading import load_config
  from jaxscale.jobs import rate_transfer

  config = load_config(args.config, args.overrides, trust=args.trust)
  text = rate_transfer.report(args.names, args.runs, config, args.config)
  print(printable(text, keep="\n"))
