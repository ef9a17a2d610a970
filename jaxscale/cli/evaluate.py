"""Compute every metric of a run's model, on its validation data or on other data.

Evaluations are exact on any number of devices and processes. Start it as `train`, e.g. by
srun.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxscale.cli.parser import Namespace, Parser, directory, file, value
from jaxscale.cli.submit import add_runs
from jaxscale.cli.train import EXIT_CODES
from jaxscale.errors import ConfigError, printable


def add_arguments(parser: Parser) -> None:
  """Add the options."""
  add_evaluated(parser)
  text = "the file to write as well, with the metrics as JSON (default: none)"
  parser.option("--to FILE.json", text, file)


def add_run(parser: Parser) -> None:
  """Add the run and its checkpoint."""
  text = "the name or directory of a run"
  parser.words("run", "RUN", text, "try runs/digits", type=directory)
  text = "the step of the checkpoint, or best, by checkpoint.best_metric (default: the newest)"
  step = value(lambda text: text if text == "best" else int(text), "a step, or best")
  parser.option("--step N", text, step)
  add_runs(parser)
  parser.trust()


def workdir_of(args: Namespace) -> Path:
  """Return the workdir of the options of `add_run`."""
  from jaxscale.jobs import folder, measured

  if len(args.run) > 1:
    raise ConfigError(f"{args.run[1]}: give one RUN")
  return measured.locate(folder.find(args.run[0], args.runs, workdirs=True)).workdir


def add_evaluated(parser: Parser) -> None:
  """Add the run, its checkpoint and the data."""
  parser.exit_codes = EXIT_CODES
  add_run(parser)
  text = "a folder of images, an image, arrays in .npy or .npz, or a path of the run's own format: "
  text += "zarr, Parquet, Arrow, HDF5, NumPy (default: the run's validation data)"
  parser.option("--data PATH", text)
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
  from jaxscale.owners import unsafe_owner
  from jaxscale.run.session import open_session, report_stop

  described, config = evaluated_config(str(workdir_of(args)), args.overrides, trust=args.trust)
  options = {"step": args.step, "path": Path(args.data) if args.data else None}
  workdir = described.workdir.resolve()
  with open_session(config, None if unsafe_owner(workdir, is_folder=True) else workdir) as watch:
    try:
      line = work(described, config, watch, **options)
    except StopRequested:
      remedy = f"to start again: {args.command_line}"
      return report_stop(config, watch.stop.agreed, "nothing is written", remedy)
    if cluster.is_leader():
      print(printable(line, keep="\n\t"), flush=True)  # with names of classes from the run
