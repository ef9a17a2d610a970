"""Print the memory that a train step takes on chips that are not here.

The step is compiled for them. Nothing is allocated, and text is not read: vocabulary
and length of sequences are in the config. (Of image datasets the size of images and
the number of classes are not: those must be there.)

With --over the values of a setting are tried, from the smallest to the largest; of
four and more, by bisection: more memory for a larger value is taken for granted.
"""

from __future__ import annotations

import os

from jaxscale.cli.parser import Namespace, Parser, value
from jaxscale.errors import EXIT_CRASH, EXIT_DONE


def add_arguments(parser: Parser) -> None:
  """The options."""
  parser.epilog = "exit code: 0 it fits, 1 it does not, 2 a mistake in the command line"
  parser.config()
  parser.option("--chips KIND-N", "e.g. h100-16", missing="try --chips v5e-16")
  over = value(_over, "FIELD=NUMBER,NUMBER, e.g. model.num_layers=16,24,32")
  parser.option("--over FIELD=N,N", "try these values", over, default=("", [""]))


def _over(text: str) -> tuple[str, list[str]]:
  """A setting and its values, the smallest first."""
  field, _, values = text.partition("=")
  return field, sorted(values.split(","), key=float)


def run(args: Namespace) -> int:
  """Compile, and print what fits."""
  # What compiles needs no device, and one that is here is not to be taken.
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  from jaxscale.config.loading import load_config
  from jaxscale.planning.fits import compile_for, largest, line
  from jaxscale.planning.topologies import find_chips

  chips = find_chips(args.chips)
  field, values = args.over

  def fits(value: str) -> bool:
    changed = args.overrides | ({field: value} if field else {})
    fit = compile_for(load_config(args.config, changed), chips)
    print(f"{field}={value}: " * bool(field) + line(fit, chips), flush=True)
    return fit.is_good

  found = largest(values, fits)
  if field:
    answer = "none of them fits" if found is None else f"the largest is {field}={found}"
    print(f"{answer} on each of {chips.name}")
  return EXIT_CRASH if found is None else EXIT_DONE
