"""Command-line parser: argparse with settings as options and one-line errors.

A mistake on the command line raises a ConfigError of one line, as a mistake in a config does.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

from jaxscale.config import packaged
from jaxscale.config.validation import nearest, within
from jaxscale.errors import ConfigError
from jaxscale.files import expand
from jaxscale.metrics.text import listed

EXIT_CODES = "exit code: 0 done, 2 invalid usage or configuration, 1 any other error"

_STYLE: dict[str, Any] = dict(formatter_class=argparse.RawDescriptionHelpFormatter)
_STYLE |= dict(add_help=False, allow_abbrev=False, exit_on_error=False)
Kind = Callable[[str], Any]  # From the text of an option to its value.


class Parser(argparse.ArgumentParser):
  """Parser of the options of one command.

  Attributes:
    example: a command line, printed by `--help`.
    exit_codes: the line of exit codes, printed by `--help`.
    has_settings: whether the command accepts --config.FIELD=VALUE and --help=TOPIC.
  """

  has_settings = False
  exit_codes = EXIT_CODES

  def __init__(self, name: str, description: str, example: str = ""):
    super().__init__(f"jaxscale {name}", description=description, **_STYLE)
    self._required: dict[str, tuple[str, str]] = {}
    self.example = example
    self.flag("-h --help", "print this page")

  def format_help(self) -> str:
    """Return the options, the example and the exit codes."""
    return f"{super().format_help()}\nexample: {self.example}\n\n{self.exit_codes}\n"

  def option(
    self, names: str, help: str, kind: Kind | None = None, *, missing: str = "", **more: Any
  ) -> None:
    """Add an option with a value.

    Args:
      names: the names of the option and of its value, e.g. "-n --lines N".
      help: the help text; the default is appended.
      kind: a function from text to value, such as `value` and `whole` return; the default
        expands a leading `~`, `str` keeps the text.
      missing: the advice in the error for a required option; "": not required.
      more: arguments of `add_argument`, and `group`, a group of options to add it to.
    """
    *flags, metavar = names.split()
    default, group = more.get("default"), more.pop("group", None) or self
    if isinstance(default, (int, float, str)) and default != "":
      help += f" (default: {default})"
    action = group.add_argument(*flags, metavar=metavar, type=kind or path, help=help, **more)
    if missing:
      self._required[action.dest] = (flags[-1], missing)

  def flag(self, names: str, help: str, **more: Any) -> None:
    """Add an option without a value."""
    self.add_argument(*names.split(), action="store_true", help=help, **more)

  def words(self, name: str, metavar: str, help: str, missing: str = "", **more: Any) -> None:
    """Add positional arguments, any number of them."""
    options: dict[str, Any] = {"nargs": "*", "type": path} | more
    self.add_argument(name, metavar=metavar, help=help, **options)
    if missing:
      self._required[name] = (metavar, missing)

  def config(self, note: str | None = None) -> None:
    """Add --config and the settings in it.

    Args:
      note: the end of the help if --config is optional; None: it is required.
    """
    text = "the Python file with get_config([ARG]) -> Config, the name of a packaged config, or "
    text += f"a run to train again{note or ''}"
    missing = "try --config digits" * (note is None)
    self.option("--config FILE[:ARG]", text, packaged.locate, missing=missing)
    text = "a setting's value, e.g. --config.epochs=3 (default: the config's); --help=all lists all"
    self.settings(text)
    self.trust()

  def trust(self) -> None:
    """Add --trust, which allows to execute what another user may have written."""
    self.flag("--trust", "execute code of a run that others could have written")

  def settings(self, text: str) -> None:
    """Add the settings of a config, --config.FIELD=VALUE."""
    self.has_settings = True
    self.option("--config.FIELD VALUE", text, dest="overrides")

  def read(self, argv: Sequence[str]) -> Namespace:
    """Return the values of a command line.

    `overrides` of the result has settings as text by dotted field, `topic` is TOPIC of
    --help=TOPIC. With `help` no option is required.

    Raises:
      ConfigError: an option does not exist, lacks its value, has an invalid value, or is
        missing.
    """
    rest, overrides, topic = self._split(argv)
    try:
      args, unknown = self.parse_known_intermixed_args(rest)
    except argparse.ArgumentError as e:
      raise ConfigError(_one_line(e)) from None
    if unknown:
      flags = {s for a in self._actions for s in a.option_strings if s[:2] == "--"}
      hint = nearest(unknown[0].partition("=")[0], flags - {"--config.FIELD"})
      hint += "; write settings as --config.FIELD=VALUE" * self.has_settings
      if self.has_settings and not unknown[0].startswith("-"):
        raise ConfigError(f"{unknown[0]}: not an option; give a config as --config FILE")
      raise ConfigError(f"{unknown[0]}: not an option, {hint}")
    args.overrides, args.topic = overrides, topic
    for dest, (name, hint) in self._required.items():
      if not args.help and getattr(args, dest) in (None, []):
        raise ConfigError(f"{name}: missing; {hint}")
    return args

  def _split(self, argv: Sequence[str]) -> tuple[list[str], dict[str, str], str]:
    """Return a command line without settings, the settings, and TOPIC of --help=TOPIC."""
    rest, overrides, topic, args = [], {}, "", list(argv)
    while args:
      arg = args.pop(0)
      name, equals, value = arg.partition("=")
      if self.has_settings and name == "--help":
        arg, topic = name, value
      if not (self.has_settings and name.startswith("--config.")):
        rest.append(arg)
        continue
      if not equals:
        if not args or args[0].startswith("--"):
          raise ConfigError(f"{name}: a value is missing, write {name}=VALUE")
        value = args.pop(0)
      overrides[name.removeprefix("--config.")] = value
    return rest, overrides, topic

  def _check_value(self, action: argparse.Action, value: Any) -> None:
    if action.choices is not None and value not in action.choices:
      hint = nearest(str(value), map(str, action.choices))
      raise argparse.ArgumentError(action, f"={value}: {hint}")

  def error(self, message: str) -> Any:
    """Report an error for which argparse has no ArgumentError."""
    raise ConfigError(f"{self.prog}: {message}")


def _one_line(error: argparse.ArgumentError) -> str:
  name = (error.argument_name or "").split("/")[-1]
  if "expected" in error.message and "argument" in error.message:
    return f"{name}: a value is missing, write {name}=VALUE"
  if error.message.startswith("ignored explicit argument"):
    return f"{name}: takes no value"
  if name.startswith("-"):
    return f"{name}{re.sub('^(?!=)', ': ', error.message)}"
  return error.message.removeprefix("=")


def value(kind: Kind, expected: str, allows: Callable[[Any], bool] = bool) -> Kind:
  """Return the `kind` of an option.

  Args:
    kind: a function from text to value, which raises ValueError for an invalid text.
    expected: a description of valid values, for the error.
    allows: a function that returns whether a value is valid.
  """

  def convert(text: str) -> Any:
    with contextlib.suppress(ValueError, OSError):  # OSError: a path that is too long.
      if allows(converted := kind(text)):
        return converted
    raise argparse.ArgumentTypeError(f"={text}: give {expected}")

  return convert


def number(bound: str, kind: Kind = float) -> Kind:
  """Return the `kind` of an option for a number in a bound, e.g. ">= 1" or "in [0, 1)"."""
  return value(kind, f"a {'whole ' * (kind is int)}number {bound}", lambda x: within(x, bound))


def whole(least: int = 0, most: int = 10**9) -> Kind:
  """Return the `kind` of an option for a whole number."""
  at_least, at_most = number(f">= {least}", int), number(f"<= {most}", int)
  return lambda text: at_least(text) and at_most(text)


def distinct(text: str) -> list[int]:
  """Return positive whole numbers, separated by commas, without duplicates, in their order."""
  numbers = [int(part) for part in text.split(",")]
  if min(numbers) < 1 or len({*numbers}) < len(numbers):
    raise ValueError
  return numbers


# `kind` of an option for text in which a leading `~` is the home directory.
path = value(expand, "a path without ~: no such home directory", lambda _: True)


def can_be_file(path: str) -> bool:
  """Return whether a file can be written at a path, once its missing folders are created."""
  folder, name = os.path.split(path)
  while folder and not os.path.lexists(folder):
    folder = os.path.dirname(folder)
  return bool(name) and os.path.isdir(folder or ".") and not os.path.isdir(path)


# `kind` of an option for a file to write, checked before the work starts.
file = value(expand, "a file in a directory", can_be_file)


def file_of(*suffixes: str) -> Kind:
  """Return the `kind` of an option for a file to write with one of these suffixes."""
  expected = f"a file {listed(suffixes, 'or')} in a directory"
  return value(expand, expected, lambda path: can_be_file(path) and path.endswith(suffixes))


# Matplotlib knows more picture formats, but would have to be imported for their list.
picture = file_of(".png", ".pdf", ".svg", ".jpg")


def directory(text: str) -> str:
  """Return a local directory, as the `kind` of an option."""
  if not text or "://" in text:
    advice = "give a directory" + "; mount a bucket as one" * bool(text)
    raise argparse.ArgumentTypeError(f"={text}: {advice}")
  try:
    os.path.abspath(text := path(text)).encode()
  except UnicodeEncodeError:  # A checkpoint could not be written to this path.
    advice = "not UTF-8 in this locale; set LC_ALL=C.UTF-8 or PYTHONUTF8=1"
    raise argparse.ArgumentTypeError(f"={text}: {advice}") from None
  return text
