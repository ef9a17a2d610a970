"""`jaxscale COMMAND`: one module per command, one table, one parser for all.

A new command is a module here with `add_arguments(parser)` and `run(args)`, which
returns the exit code (None: 0), and a line in `COMMANDS`. The module imports what it
needs inside `run`: `--help`, a typo or a missing file is answered before JAX loads.
"""

from __future__ import annotations

import importlib
import shlex
from importlib import metadata
from typing import NamedTuple, NoReturn

from jaxscale.config.validation import nearest
from jaxscale.errors import (
  EXIT_DONE,
  EXIT_INTERRUPTED,
  EXIT_USER,
  ConfigError,
  leave,
  one_line_errors,
)

__all__ = ["COMMANDS", "main"]


class Command(NamedTuple):
  """A line of `jaxscale --help`; its module is `jaxscale.cli.NAME`."""

  group: str
  summary: str


COMMANDS = {
  "train": Command("models", "train a config, or resume its run"),
  "generate": Command("models", "print text that a trained language model continues"),
  "export": Command("models", "write a run's parameters as a safetensors file"),
  "describe": Command("before a run", "print memory and collectives of a step"),
  "plan": Command("before a run", "find the largest model that fits on chips not here"),
  "plot-schedule": Command("before a run", "draw the learning rates of configs"),
  "doctor": Command("before a run", "check nodes, network and disks, or a dataset"),
  "bench": Command("before a run", "time every all-reduce on the devices"),
  "prepare": Command("before a run", "prepare a TFDS dataset or the JPEG decoder"),
  "submit": Command("jobs", "submit a run to Slurm or to this machine"),
  "sweep": Command("jobs", "submit one run for each combination of settings"),
  "scaling": Command("jobs", "submit one config at several numbers of nodes"),
  "status": Command("jobs", "show the state of submitted runs"),
  "logs": Command("jobs", "print what a run has printed"),
  "cancel": Command("jobs", "stop runs; they save first"),
  "resume": Command("jobs", "submit stopped runs again"),
  "report": Command("studies", "compare runs at several sizes: table and picture"),
  "batch-study": Command("studies", "train at several batch sizes to a target"),
  "time-to-accuracy": Command("studies", "time several seeds to a target (MLPerf)"),
  "completion": Command("shell", "print the tab completion for bash or zsh"),
}  # fmt: skip


@one_line_errors
def main(argv: list[str], program: str = "jaxscale") -> int:
  """Run a command; returns the exit code.

  Args:
    argv: its name and its options.
    program: how the user started it, for command lines that are printed.
  """
  name, *rest = argv or [""]
  if name in ("--version", "-V"):
    print(f"jaxscale {metadata.version('jaxscale')}")
    return EXIT_DONE
  if name in ("", "--help", "-h", "help"):
    print(overview())
    return EXIT_DONE if name else EXIT_USER
  if name == "_complete":  # called by the script of `jaxscale completion`
    from jaxscale.cli.completion import complete

    print("\n".join(complete(*rest)))
    return EXIT_DONE
  if name not in COMMANDS:
    raise ConfigError(f"{name}: no such command, {nearest(name, COMMANDS)}")
  module, parser = load(name)
  args = parser.read(rest)
  args.program = program
  args.command_line = shlex.join([*program.split(), *argv])
  if args.help:
    print(module.help_page(args) if hasattr(module, "help_page") else
          parser.format_help(), end="")  # fmt: skip
    return EXIT_DONE
  try:
    return module.run(args) or EXIT_DONE
  except KeyboardInterrupt:
    return EXIT_INTERRUPTED


def load(name: str):
  """The module of a command, and its parser."""
  from jaxscale.cli.parser import Parser

  module = importlib.import_module(f"jaxscale.cli.{name.replace('-', '_')}")
  about = module.__doc__ or COMMANDS[name].summary
  parser = Parser(name, about.strip())
  module.add_arguments(parser)
  return module, parser


def overview() -> str:
  """The page of `jaxscale --help`."""
  lines = ["usage: jaxscale COMMAND [option ...]", ""]
  lines += ["Trains neural networks at very large batch, from a laptop to a cluster."]
  for group in dict.fromkeys(c.group for c in COMMANDS.values()):
    lines += ["", f"{group}:"]
    lines += [f"  {n:18}{c.summary}" for n, c in COMMANDS.items() if c.group == group]
  return "\n".join([*lines, "", "`jaxscale COMMAND --help` has the options of each."])


def entry() -> NoReturn:
  """The console script."""
  leave(main)
