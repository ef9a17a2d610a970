"""Print the tab completion for a shell.

    source <(jaxscale completion bash)           # in ~/.bashrc
    source <(jaxscale completion zsh)            # in ~/.zshrc, after compinit

Completes commands, options, settings of the config, packaged configs and runs.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from pathlib import Path

from jaxscale.cli.commands import COMMANDS, load
from jaxscale.cli.parser import Parser

# The shell gives the words up to the cursor, and gets the possible last ones. Bash
# splits words at = and :, and replaces only what follows the last of those.
_SCRIPTS = {
  "bash": r"""_jaxscale() {
  local line="${COMP_LINE:0:COMP_POINT}" word IFS=$'\n'
  word="${line##* }"
  COMPREPLY=($(jaxscale _complete "$line" 2>/dev/null))
  if [[ $word == *[=:]* && $COMP_WORDBREAKS == *=* ]]; then
    COMPREPLY=("${COMPREPLY[@]#"${word%"${word##*[=:]}"}"}")
  fi
  [[ ${COMPREPLY[0]} == *= ]] && compopt -o nospace
}
complete -o default -F _jaxscale jaxscale""",
  "zsh": r"""_jaxscale() {
  local -a found
  found=("${(@f)$(jaxscale _complete "${(j: :)words[1,CURRENT]}" 2>/dev/null)}")
  if [[ -n $found ]]; then compadd -S '' -Q -- $found; else _files; fi
}
compdef _jaxscale jaxscale""",
}


def add_arguments(parser: Parser) -> None:
  """The options."""
  more = {"nargs": "?", "choices": tuple(_SCRIPTS)}
  parser.words("shell", "SHELL", "bash or zsh", missing="give bash or zsh", **more)


def run(args: argparse.Namespace) -> None:
  """Print the script."""
  print(_SCRIPTS[args.shell])


def complete(line: str) -> list[str]:
  """What the last word of a command line can be; nothing: names of files.

  Example:
    >>> complete("jaxscale exp")
    ['export']
    >>> complete("jaxscale export --naming=ti")
    ['--naming=timm']
  """
  *before, word = line.split(" ")[1:] or [""]
  if not before:
    return [n for n in (*COMMANDS, "--help", "--version") if n.startswith(word)]
  if before[0] not in COMMANDS:
    return []
  _, parser = load(before[0])
  options = {flag: a for a in parser._actions for flag in a.option_strings}
  option, equals, _ = word.partition("=")
  if not equals and before[-1] in options and options[before[-1]].nargs != 0:
    found = _values(options[before[-1]])  # --naming ti
  elif equals and option in options:
    found = [f"{option}={value}" for value in _values(options[option])]
  elif word.startswith("--config.") and parser.has_settings:
    found = [f"--config.{name}=" for name in _settings(before)]
  elif word.startswith("-"):
    found = [f"{flag}{'=' * (a.nargs != 0)}" for flag, a in options.items()]
    found = ["--config." if flag == "--config.FIELD=" else flag for flag in found]
  else:
    found = [v for a in parser._get_positional_actions() for v in _values(a)]
  return [text for text in found if text.startswith(word)]


def _values(action: argparse.Action) -> Sequence[str]:
  """The known values of an option; those of paths are left to the shell."""
  from jaxscale.config import packaged

  if action.choices:
    return [str(choice) for choice in action.choices]
  if action.dest == "config":
    return [*packaged.names(), *map(str, sorted(Path().glob("configs/*.py")))]
  runs = [p for p in sorted(Path("runs").glob("*")) if p.is_dir()]
  if action.dest == "names":
    return [p.name for p in runs]
  return [str(p) for p in runs] if action.dest == "workdir" else []


def _settings(before: Sequence[str]) -> list[str]:
  """The settings of the config on a command line, or all."""
  from jaxscale.config.help import field_names
  from jaxscale.config.loading import load_config
  from jaxscale.errors import ConfigError

  config, words = None, [part for word in before for part in word.split("=", 1)]
  if "--config" in words[:-1]:
    with contextlib.suppress(ConfigError):
      config = load_config(words[words.index("--config") + 1])
  return field_names(config)
