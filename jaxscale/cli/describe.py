"""Print parameters with their sharding, memory use and collectives of a train step.

The step is compiled for the available devices; nothing is trained.
"""

from __future__ import annotations

from pathlib import Path

from jaxscale.cli.parser import Namespace, Parser
from jaxscale.cli.train import add_workdir, default_workdir


def add_arguments(parser: Parser) -> None:
  """Add the options."""
  parser.config()
  add_workdir(parser)


def run(args: Namespace) -> None:
  """Compile the step and print the description."""
  from jaxscale import cluster
  from jaxscale.config.loading import load_config
  from jaxscale.run.session import open_session

  config = load_config(args.config, args.overrides, trust=args.trust)
  with open_session(config, Path(args.workdir or default_workdir(args.config))):
    from jaxscale.experiment import build  # Imports JAX, once all processes have joined.
    from jaxscale.planning import describe

    data = config.data.abstract(config.batch_size)
    page = describe.describe(build.experiment(config, datasets=data))
    is_leader = cluster.is_leader()
  if is_leader:  # Outside the session, so that a failed print fails the command.
    print(page)
