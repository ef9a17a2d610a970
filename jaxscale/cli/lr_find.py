"""Suggest a peak learning rate: train a few steps while it grows exponentially.

The suggestion is where the smoothed loss falls fastest (the range test of Smith,
arXiv:1506.01186). Model, data, batch size and devices are those of the config. Nothing is
saved but the picture of the loss against the learning rate.
"""

from __future__ import annotations

from pathlib import Path

from jaxscale.cli.parser import Namespace, Parser, number, picture, whole
from jaxscale.cli.train import default_workdir


def add_arguments(parser: Parser) -> None:
  """Add the options."""
  parser.config()
  parser.option("--steps N", "the number of steps", whole(10), default=100)
  parser.option("--low LR", "the learning rate of the first step", number("> 0"), default=1e-6)
  parser.option("--high LR", "the learning rate of the last step", number("> 0"), default=10.0)
  parser.option("--out FILE", "the picture to write", picture, missing="try --out rates.png")


def run(args: Namespace) -> None:
  """Run the test, draw its picture and print the suggestion."""
  from jaxscale import cluster
  from jaxscale.config import LearningRateFinder
  from jaxscale.config.loading import load_config
  from jaxscale.jobs.folder import one_line
  from jaxscale.metrics.plot import check_matplotlib
  from jaxscale.run.session import open_session

  ramp = LearningRateFinder(steps=args.steps, low=args.low, high=args.high)
  config = load_config(args.config, args.overrides, trust=args.trust)
  with open_session(config, Path(default_workdir(args.config))) as watch:
    from jaxscale.run import learning_rates  # Imports JAX, once all processes have joined.

    check_matplotlib("--out", args.out)
    tried = learning_rates.find_learning_rate(config, **vars(ramp), at=watch.at)
    with one_line(f"--out={args.out}", "give a different file"):
      line = learning_rates.plot_learning_rates(tried, args.out)
    is_leader = cluster.is_leader()
  if is_leader:  # Outside the session, so that a failed print fails the command.
    print(line)
