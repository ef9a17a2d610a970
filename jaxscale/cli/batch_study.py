"""Submit runs that train to the config's target at several batch sizes, as one sweep.

The target is target_accuracy or target_loss. A run that misses it ends after `epochs`.
`jaxscale report NAME` prints the steps, epochs and time to the target at each size and the
critical batch size, and writes them as study.json into the folder of the sweep.
"""

from __future__ import annotations

from jaxscale.cli import submit
from jaxscale.cli.parser import Namespace, Parser, distinct, value, whole


def add_arguments(parser: Parser) -> None:
  """Add the options."""
  expected = "whole numbers without repeats, e.g. 256,1024"
  text, hint = "the batch sizes in examples; lr_scaling scales the learning rate", "256,1024"
  sizes = value(distinct, expected)
  parser.option("--batch-sizes N,N", text, sizes, missing=f"try --batch-sizes {hint}")
  counts = value(lambda text: [*map(whole(1), text.split(","))], "e.g. 1,4")
  text = "the numbers of micro-batches per step, one per size (default: the config's)"
  parser.option("--accumulate-steps N,N", text, counts, default=())
  text = "the number of runs per size, with seeds from Config.seed up"
  parser.option("--seeds N", text, whole(1), default=1)
  submit.add_sweep_arguments(parser)


def run(args: Namespace) -> None:
  """Submit the runs of the study."""
  from jaxscale.config.loading import load_config
  from jaxscale.jobs import batch_study

  config = load_config(args.config, args.overrides)
  sizes, counts = args.batch_sizes, args.accumulate_steps
  trials = batch_study.trials(config, sizes, args.seeds, counts)
  submit.run(args, "report", trials=trials, at_most=args.at_most or 0)
