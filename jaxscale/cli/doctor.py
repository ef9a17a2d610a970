"""Check nodes, network and disks before a run, or check ImageNet; print what to fix.

Without an argument the command checks whether this allocation is ready for a job. Start it
like the job, with at least one process per node:

    srun jaxscale doctor --workdir DIR --config FILE

`jaxscale doctor imagenet` checks the 1.28 million training and 50,000 validation images
of ImageNet: it counts them and decodes a sample.
"""

from __future__ import annotations

from pathlib import Path

from jaxscale.cli.parser import Namespace, Parser, directory, whole
from jaxscale.config.validation import nearest
from jaxscale.errors import ConfigError
from jaxscale.jobs.preflight import CHECKS

_IMAGENET = {"data_dir": None, "folder": None, "sample": 256}


def add_arguments(parser: Parser) -> None:
  """Add the options."""
  parser.exit_codes = "exit code: 0 ready, 2 not ready; the last lines say what to do"
  text = "the dataset to check (default: check the allocation)"
  parser.words("dataset", "imagenet", text, nargs="?", choices=("imagenet",))
  group = parser.add_argument_group("check of an allocation")
  parser.option("--workdir DIR", "the workdir of the run", directory, default=".", group=group)
  parser.config(" (default: none)", group=group)
  checks = [f"{name} ({check.text})" for name, check in CHECKS.items()]
  skip = f"the checks to skip (default: none): {'; '.join(checks)}"
  parser.option("--skip NAME,NAME", skip, action="append", default=[], group=group)
  group = parser.add_argument_group("jaxscale doctor imagenet")
  data = group.add_mutually_exclusive_group()
  parser.option("--data-dir DIR", "the data directory of TFDS (default: TFDS's own)", group=data)
  parser.option("--folder DIR", "the directory of train/CLASS and val (default: none)", group=data)
  parser.option("--sample N", "the number of images to decode", whole(1), default=256, group=group)


def run(args: Namespace) -> int:
  """Run the checks and print the findings."""
  asked = {name: getattr(args, name) for name in _IMAGENET}
  if args.dataset:
    from jaxscale.jobs.preflight import imagenet  # Imports TFDS and JAX, which takes 2 s.
    from jaxscale.jobs.preflight.finding import report

    return report("imagenet", imagenet.check(**asked))
  for name, default in _IMAGENET.items():
    if asked[name] != default:
      option = name.replace("_", "-")
      raise ConfigError(f"--{option}: works only with `jaxscale doctor imagenet`; remove it")
  from jaxscale.jobs import preflight

  skip = [name for text in args.skip for name in text.split(",")]
  for name in skip:
    if name not in CHECKS:
      raise ConfigError(f"--skip={name}: {nearest(name, CHECKS)}")
  if args.overrides and args.config is None:
    raise ConfigError(f"--config.{next(iter(args.overrides))}: needs --config FILE; add it")
  chosen = Path(args.workdir), args.config, args.overrides
  return preflight.check(preflight.Options(*chosen, tuple(skip)))
