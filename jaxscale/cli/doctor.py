"""Check what a run needs, and print what to do about the rest.

Without a name it is the preflight: is this allocation ready for a job? Start it as the
job is started (one process per node is enough):

    srun jaxscale doctor --workdir DIR --config FILE

`jaxscale doctor imagenet` checks ImageNet's 1.28 million training and 50,000 held-out
images, by counts and a sample that is decoded.
"""

from __future__ import annotations

from pathlib import Path

from jaxscale.cli.parser import Namespace, Parser, directory, whole
from jaxscale.config.validation import nearest
from jaxscale.errors import ConfigError
from jaxscale.jobs.preflight import CHECKS

_IMAGENET = {"data_dir": None, "folder": None, "sample": 256}


def add_arguments(parser: Parser) -> None:
  """The options."""
  parser.exit_codes = "exit code: 0 ready, 2 not ready: the last lines print what to do"
  parser.words("dataset", "imagenet", "check it", nargs="?", choices=("imagenet",))
  group = parser.add_argument_group("of the preflight")
  parser.option("--workdir DIR", "where the run will write", directory, default=".", group=group)
  parser.config(missing=None, group=group)
  checks = "; ".join(f"{name} ({check.text})" for name, check in CHECKS.items())
  skip = f"checks to leave out: {checks}"
  parser.option("--skip NAME,NAME", skip, action="append", default=[], group=group)
  group = parser.add_argument_group("of `doctor imagenet`")
  place = group.add_mutually_exclusive_group()
  parser.option("--data-dir DIR", "where TFDS has it (or its default)", group=place)
  parser.option("--folder DIR", "with train/CLASS/*.JPEG and val/", group=place)
  parser.option("--sample N", "images to decode", whole(1), default=256, group=group)


def run(args: Namespace) -> int:
  """Check, and print what was found."""
  asked = {name: getattr(args, name) for name in _IMAGENET}
  if args.dataset:
    from jaxscale.jobs.preflight import imagenet  # TFDS and JAX, 2 s: only who asks waits
    from jaxscale.jobs.preflight.finding import report

    return report("imagenet", imagenet.check(**asked))
  for name, default in _IMAGENET.items():
    if asked[name] != default:
      option = name.replace("_", "-")
      raise ConfigError(f"--{option}: only of `jaxscale doctor imagenet`")
  from jaxscale.jobs import preflight

  skip = [name for text in args.skip for name in text.split(",")]
  for name in skip:
    if name not in CHECKS:
      raise ConfigError(f"--skip={name}: {nearest(name, CHECKS)}")
  if args.overrides and args.config is None:
    raise ConfigError(f"--config.{next(iter(args.overrides))}: give --config FILE too")
  place = Path(args.workdir), args.config, args.overrides
  return preflight.check(preflight.Options(*place, tuple(skip)))
