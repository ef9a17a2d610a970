"""Train several seeds to target_accuracy; print steps, epochs and seconds to it.

That is the mean of the runs without the best and the worst, as MLPerf counts.

Logs in MLPerf's format are DIR/result_0.txt and on; the result is
DIR/time_to_accuracy.json. What is done already is not done again.
"""

from __future__ import annotations

from jaxscale.cli.batch_study import add_study_arguments, run_study
from jaxscale.cli.parser import Namespace, Parser


def add_arguments(parser: Parser) -> None:
  """The options."""
  add_study_arguments(parser, seeds=5, least=3)


def run(args: Namespace) -> int:
  """Run the study."""
  from jaxscale.studies import time_to_accuracy

  return run_study(args, "time-to-accuracy", time_to_accuracy.study, seeds=args.seeds)
