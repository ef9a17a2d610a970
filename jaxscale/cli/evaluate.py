"""Compute every metric of a run's model, on its validation data or on other data.

Evaluations are exact on any number of devices and processes. Start it as `train`, e.g. by
srun.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxscale.cli.parser import Namespace, Parser, directory, file, whole
from jaxscale.cli.train import EXIT_CODES


def add_arguments(parser: Parser) -> None:
  """Add the options."""
  add_run(parser)
  text = "the file to write as well, with the metrics as JSON (default: none)"
  parser.option("--to FILE.json", text, file)


def add_run(parser: Parser) -> None:
  """Add the run, its checkpoint and the data."""
  parser.exit_codes = EXIT_CODES
  parser.words("run", "RUN", "the workdir of the run", "try runs/digits", type=directory)
  text = "a folder of images, an image, or arrays in .npy or .npz (default: the run's validation "
  parser.option("--data PATH", f"{text}data)")
  parser.option("--step N", "the step of the checkpoint (default: the newest)", whole())
  text = "a setting's value, e.g. --config.data.path=other (default: the run's); of data, dtype, "
  parser.settings(f"{text}evaluation, faults, gpu_settings, input_threads, layout, mesh, metrics")


def run(args: Namespace) -> int | None:
  """Evaluate, and print the metrics in one line."""

  def work(described: Any, config: Any, watch: Any, **options: Any) -> str:
    from jaxscale import cluster
    from jaxscale.files import write_json
    from jaxscale.run.predict import evaluate

    line, result = evaluate(described, config, watch, **options)
    if args.to and cluster.is_leader():
      Path(args.to).parent.mkdir(parents=True, exist_ok=True)
      write_json(Path(args.to), result)
    return line

  return in_session(args, work)


def in_session(args: Namespace, work: Any) -> int | None:
  """Call a function in a session of all processes, and print the line that it returns."""
  from jaxscale import cluster
  from jaxscale.cluster.watch.stop_consensus import StopRequested
  from jaxscale.config.loading import evaluated_config
  from jaxscale.errors import ConfigError
  from jaxscale.run.session import open_session, report_stop

  if len(args.run) > 1:
    raise ConfigError(f"{args.run[1]}: give one RUN")
  described, config = evaluated_config(args.run[0], args.overrides)
  options = {"step": args.step, "path": Path(args.data) if args.data else None}
  with open_session(config, described.workdir) as watch:
    try:
      line = work(described, config, watch, **options)
    except StopRequested:
      remedy = f"to start again: {args.command_line}"
      return report_stop(config, watch.stop.agreed, "nothing is written", remedy)
    if cluster.is_leader():
      print(line, flush=True)
