"""Run the command that a command line asks for, or print its help."""

from __future__ import annotations

import os
import shlex
import sys

from jaxscale import __version__, errors
from jaxscale.cli.commands import COMMANDS, USE_JAX, load, overview
from jaxscale.cli.parser import Namespace, Parser
from jaxscale.cluster.environment import check_environment
from jaxscale.config.validation import nearest


@errors.one_line_errors
def main(argv: list[str], program: str = "jaxscale") -> int:
  """Run a command and return the exit code.

  Args:
    argv: name of the command, then its options.
    program: words that started it, for command lines that are printed.
  """
  name, *rest = argv or [""]
  if name in ("--version", "-V"):
    print(f"jaxscale {__version__}")
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
    print(help_page(name, parser, args), end="")
    if sys.flags.optimize > 1:
      print("\nDescriptions are missing: PYTHONOPTIMIZE=2 strips docstrings.")
    return errors.EXIT_DONE
  if name in USE_JAX:
    check_environment(os.environ)
  return module.run(args) or errors.EXIT_DONE


def help_page(name: str, parser: Parser, args: Namespace) -> str:
  """Return the options of a command, the settings of --help=TOPIC, or of `train` both."""
  if not args.topic and name != "train":
    return parser.format_help()
  from jaxscale.config.help import first_settings, settings_help
  from jaxscale.config.loading import load_config, own_classes
  from jaxscale.config.validation import UnsetError

  config, own, chosen = None, {}, {}
  if isinstance(getattr(args, "config", None), str):
    try:
      config = load_config(args.config, args.overrides, trust=args.trust)
    except UnsetError:  # The page shows the fields that are still to be set.
      config, chosen = load_config(args.config, trust=args.trust), args.overrides
    own = own_classes(args.config)
  if args.topic:
    return f"{settings_help(config, own, args.topic, chosen)}\n"
  text = f"settings to start with:\n{first_settings()}"
  if config:
    text = f"settings of {args.config}:\n{settings_help(config, own, chosen=chosen)}"
  return f"{parser.format_help()}\n{text}\n"
