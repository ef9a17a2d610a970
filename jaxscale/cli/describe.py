"""Print every parameter with its sharding, the memory and the collectives of a step.

Compiles the step for the devices there are, and trains nothing.
"""

from __future__ import annotations

from pathlib import Path

from jaxscale.cli.parser import Namespace, Parser
from jaxscale.cli.train import add_workdir, default_workdir


def add_arguments(parser: Parser) -> None:
  """The options."""
  parser.config()
  add_workdir(parser)


def run(args: Namespace) -> None:
  """Compile the step, and print what it is."""
  from jaxscale import cluster
  from jaxscale.config.loading import load_config
  from jaxscale.run.session import open_session

  config = load_config(args.config, args.overrides)
  with open_session(config, Path(args.workdir or default_workdir(args.config))):
    from jaxscale.experiment import build  # JAX: only once all processes have joined
    from jaxscale.planning import describe

    data = config.data.abstract(config.batch_size)
    page = describe.describe(build.experiment(config, datasets=data))
    is_leader = cluster.is_leader()
  if is_leader:  # outside: a page that cannot be printed fails the command
    print(page)
