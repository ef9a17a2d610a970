"""From the words of a command line to the command's `run`."""

from __future__ import annotations

import os
import shlex
import sys
from importlib import metadata

from jaxscale import errors
from jaxscale.cli.commands import COMMANDS, USE_JAX, load, overview
from jaxscale.cluster.environment import check_environment
from jaxscale.config.validation import nearest


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
  if name not in COMMANDS:
    raise errors.ConfigError(f"{name}: no such command, {nearest(name, COMMANDS)}")
  module, parser = load(name)
  args = parser.read(rest)
  args.program = program
  args.command_line = shlex.join([*program.split(), *argv])
  if args.help:
    page = getattr(module, "help_page", lambda parser, _: parser.format_help())
    print(page(parser, args), end="")
    if sys.flags.optimize > 1:
      print("\nWhat each is for is left out: PYTHONOPTIMIZE=2 strips docstrings.")
    return errors.EXIT_DONE
  if name in USE_JAX:
    check_environment(os.environ)
  return module.run(args) or errors.EXIT_DONE
