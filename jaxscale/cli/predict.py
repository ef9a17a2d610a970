"""Write the predictions of a run's model for new examples to a file.

Every example is one row, in order: its id (the file, or the number of the row), the predicted
label, class and probability, the target if the data have one, and all probabilities (not in
.csv); or the model's outputs, if the loss is not one of classes. Damaged files are reported and
have no prediction. Start it as `train`, e.g. by srun, to use several nodes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxscale.cli.evaluate import add_evaluated, in_session
from jaxscale.cli.parser import Namespace, Parser, file_of, whole


def add_arguments(parser: Parser) -> None:
  """Add the options."""
  add_evaluated(parser)
  kind = file_of(".parquet", ".csv", ".npz")
  text = "the file to write, .parquet, .csv or .npz; an existing one is replaced"
  parser.option("--to FILE", text, kind, missing="try --to predictions.csv")
  text = "the examples per batch of all devices (default: the run's evaluation.batch_size)"
  parser.option("--batch-size N", text, whole(1))


def run(args: Namespace) -> int | None:
  """Predict, and print the outcome in one line."""

  def work(described: Any, config: Any, watch: Any, **options: Any) -> str:
    from jaxscale.run.predict import predict

    to = Path(args.to)
    to.parent.mkdir(parents=True, exist_ok=True)
    return predict(described, config, to, watch, batch_size=args.batch_size, **options)

  return in_session(args, work)
