"""`jaxscale COMMAND`: one module per command, one table, one parser for all.

A new command is a module here with `add_arguments(parser)` and `run(args)`, which
returns the exit code (None: 0), and a line in `commands.COMMANDS`. The module imports
what it needs inside `run`: `--help`, a typo or a missing file is answered before JAX
loads.
"""

from __future__ import annotations

import shlex
from importlib import metadata
from typing import NoReturn

from jaxscale import errors
from jaxscale.cli.commands import COMMANDS, load, overview
from jaxscale.cli.completion import complete
from jaxscale.config.validation import nearest

__all__ = ["COMMANDS", "load", "main"]


@errors.one_line_errors
def main(argv: list[str], program: str = "jaxscale") -> int:
  """Run a command; returns the exit code.

  Args:
    argv: its name and its options.
    program: how the user started it, for command lines that are printed.
  """
  name, *rest = argv or [""]
  if name in ("--version", "-V"):
    print(f"jaxscale {metadata.version('jaxscale')}")
    return errors.EXIT_DONE
  if name in ("", "--help", "-h", "help"):
    print(overview())
    return errors.EXIT_DONE if name else errors.EXIT_USER
  if name == "_complete":  # called by the script of `jaxscale completion`
    print("\n".join(complete(*rest)))
    return errors.EXIT_DONE
  if name not in COMMANDS:
    raise errors.ConfigError(f"{name}: no such command, {nearest(name, COMMANDS)}")
  module, parser = load(name)
  args = parser.read(rest)
  args.program = program
  args.command_line = shlex.join([*program.split(), *argv])
  if args.help:
    page = getattr(module, "help_page", lambda parser, _: parser.format_help())
    print(page(parser, args), end="")
    return errors.EXIT_DONE
  try:
    return module.run(args) or errors.EXIT_DONE
  except KeyboardInterrupt:
    return errors.EXIT_INTERRUPTED


def entry() -> NoReturn:
  """The console script."""
  errors.leave(main)
