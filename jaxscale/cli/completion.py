"""Print the tab completion for a shell.

    eval "$(jaxscale completion bash)"           # in ~/.bashrc
    eval "$(jaxscale completion zsh)"            # in ~/.zshrc, after compinit

Commands, options, settings, known values, packaged configs and files are completed.
"""

from __future__ import annotations

import argparse
from typing import Any

import shtab

from jaxscale.cli.commands import COMMANDS, load
from jaxscale.cli.parser import Namespace, Parser
from jaxscale.config import packaged
from jaxscale.config.help import field_names


def add_arguments(parser: Parser) -> None:
  """Add the options."""
  more = {"nargs": "?", "choices": ("bash", "zsh")}
  parser.words("shell", "SHELL", "the shell: bash or zsh", missing="give bash or zsh", **more)


def run(args: Namespace) -> None:
  """Print the script."""
  root = argparse.ArgumentParser("jaxscale", add_help=False)
  kind: Any = _parser_of  # A function instead of a class.
  commands = root.add_subparsers(parser_class=kind)
  for name, command in COMMANDS.items():
    commands.add_parser(name, help=command.summary)
  print(shtab.complete(root, args.shell))


def _parser_of(prog: str, **more: Any) -> Parser:
  """Return a command's parser as shtab reads it: each setting is an option."""
  parser = load(prog.split()[-1])[1]
  for name in field_names(None) if parser.has_settings else ():
    parser.option(f"--config.{name} VALUE", "")
  for action in parser._actions:
    action.metavar = None  # Because zsh splits at the colon in FILE[:ARG].
    if action.dest == "overrides":
      action.help = argparse.SUPPRESS
    elif action.nargs != 0 and not action.choices:
      action.complete = _configs() if action.dest == "config" else shtab.FILE  # pyright: ignore
  return parser


def _configs() -> dict[str, Any]:
  """Return shtab's completion of packaged configs and files."""
  function, names = "_jaxscale_config_files", " ".join(packaged.names())
  bash = f'compgen -f -W "{names}" -- "$1"'
  zsh = f"_alternative 'configs:config:({names})' 'files:file:_files'"
  preamble = {"bash": f"{function}() {{ {bash}; }}", "zsh": f"{function}() {{ {zsh}; }}"}
  return {"bash": function, "zsh": function, "preamble": preamble}
