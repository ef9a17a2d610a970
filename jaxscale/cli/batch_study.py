"""Submit runs that train to the config's target at several batch sizes, as one sweep.

The target is target_accuracy or target_loss. A run that misses it ends after `epochs`.
`jaxscale report NAME` prints the steps, epochs and time to the target at each size and the
critical batch size, and writes them as study.json into the folder of the sweep.

With --branch and a run as --config, nothing is submitted: from each checkpoint of the run,
copies of its state train at every size on the same next examples, in this process. That costs
a fraction, and shows which sizes are as good per example at which part of the run. The table
is also written as branches.json into the workdir of the run.
"""

from __future__ import annotations

from jaxscale.cli import submit
from jaxscale.cli.parser import Namespace, Parser, distinct, value, whole
from jaxscale.errors import invalid


def add_arguments(parser: Parser) -> None:
  """Add the options."""
  sizes = value(distinct, "whole numbers without repeats, e.g. 256,1024")
  text = "the batch sizes in examples; lr_scaling scales the learning rate"
  parser.option("--batch-sizes N,N", text, sizes, missing="try --batch-sizes 256,1024")
  counts = value(lambda text: [*map(whole(1), text.split(","))], "e.g. 1,4")
  text = "the numbers of micro-batches per step, one per batch size (default: the config's)"
  parser.option("--accumulate-steps N,N", text, counts, default=())
  text = "the number of runs per batch size, with the seeds Config.seed, Config.seed + 1, …"
  parser.option("--seeds N", text, whole(1), default=1)
  text = "the examples of each branch from the checkpoints of the run in --config (default: none)"
  parser.option("--branch N", text, whole(1))
  submit.add_sweep_arguments(parser)


def run(args: Namespace) -> None:
  """Submit the runs of the study."""
  from jaxscale.config.loading import load_config
  from jaxscale.jobs import batch_study

  if args.branch:
    return _branch(args)
  config = load_config(args.config, args.overrides, trust=args.trust)
  trials = batch_study.trials(config, args.batch_sizes, args.seeds, args.accumulate_steps)
  submit.run(args, "report", trials=trials, at_most=args.at_most or 0)


def _branch(args: Namespace) -> None:
  """Train branches from the checkpoints of a run, and print their table."""
  from jaxscale import cluster
  from jaxscale.config.loading import load_config, recorded_run
  from jaxscale.run.session import open_session

  if (workdir := recorded_run(args.config)) is None:
    raise invalid("--config", args.config, "is not a run", "give the workdir of a run to --branch")
  names = "name", "at_most", "site", "executor", "requeue", "spares", "preflight"
  several = dict(seeds=args.seeds > 1, accumulate_steps=args.accumulate_steps, nodes=args.nodes > 1)
  if ignored := [*submit.given(args, *names), *(name for name, found in several.items() if found)]:
    name, problem = ignored[0], "has no effect with --branch, which submits nothing"
    raise invalid(f"--{name.replace('_', '-')}", getattr(args, name), problem, "leave it out")
  config = load_config(args.config, args.overrides, trust=args.trust)
  with open_session(config, workdir) as watch:
    from jaxscale.run.branch_study import branch_study  # Imports JAX, once all have joined.

    page = branch_study(config, workdir, args.batch_sizes, args.branch, watch.at)
    if cluster.is_leader():
      print(page)
