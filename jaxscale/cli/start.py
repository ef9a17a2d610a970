"""Entry point of the console script."""

from typing import NoReturn

from jaxscale.errors import leave


def entry() -> NoReturn:
  """Run the command in this process's arguments, and end the process."""
  leave(_main)


def _main(argv: list[str]) -> int:
  from jaxscale import cli  # Imported here, where `leave` already reports Ctrl-C in one line.

  return cli.main(argv)
