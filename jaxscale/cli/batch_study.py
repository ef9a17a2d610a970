"""Train to target_accuracy at each batch size, for at most `epochs`.

Shows steps, examples and time to the target and the generalisation gap, as a table, as
DIR/study.json and as DIR/study.png. What is done already is not done again.
"""

from __future__ import annotations

from pathlib import Path

from jaxscale.cli.parser import Namespace, Parser, directory, distinct, value, whole
from jaxscale.cli.train import default_workdir


def add_arguments(parser: Parser) -> None:
  """The options."""
  wanted = "whole numbers with commas between, none twice, e.g. 256,1024"
  sizes = value(lambda text: sorted(distinct(text)), wanted)
  text, hint = "global; the learning rate follows by lr_scaling", "256,1024"
  parser.option("--batch-sizes N,N", text, sizes, missing=f"try --batch-sizes {hint}")
  add_study_arguments(parser, seeds=1, least=1)
  text = "the most examples a device holds at once: chooses accumulate_steps for each "
  text += "size. Where BatchNorm's statistics are a device's, they are a micro-batch's."
  parser.option("--device-batch N", text, whole(1))


def add_study_arguments(parser: Parser, seeds: int, least: int) -> None:
  """The options of every study of several trainings in one process."""
  parser.epilog = "exit code: 0 done, 2 a mistake, 85 or 130 interrupted and saved"
  parser.config()
  parser.option("--workdir DIR", "of all runs (default: runs/CONFIG-STUDY)", directory)
  seed_help = f"runs of each kind, at least {least}, with seeds from Config.seed on"
  parser.option("--seeds N", seed_help, whole(least), default=seeds)


def run(args: Namespace) -> int:
  """Run the study."""
  from jaxscale.studies import batch_study

  names = ("batch_sizes", "seeds", "device_batch")
  options = {name: getattr(args, name) for name in names}
  return run_study(args, "batch-study", batch_study.study, **options)


def run_study(args: Namespace, name: str, study, **options) -> int:
  """Run a study in its directory, and print what it found.

  Args:
    args: the command line.
    name: of the command.
    study: of (title, config, workdir, **options); returns the page to print, on
      process 0.
    options: of the study.
  """
  from jaxscale.config.loading import load_config
  from jaxscale.studies import trials

  config = load_config(args.config, args.overrides)
  workdir = Path(args.workdir or f"{default_workdir(args.config)}-{name}")
  again = f"interrupted; to resume: {args.command_line}"
  return trials.run_study(
    lambda: study(args.config, config, workdir, **options), config, workdir, again
  )
