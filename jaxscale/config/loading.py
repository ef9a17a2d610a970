"""Config files and the command line: `FILE[:arg]` and `a.b=value` to a Config.

`load_config` is what the command line, notebooks and sweeps all call. Values
are parsed by the annotation of their field, all overrides are put in at once
and every class checks itself again, so their order does not matter.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
import re
import sys
import textwrap
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from jaxscale.config import Config
from jaxscale.config.validation import (
  alternatives,
  bounds,
  closest,
  coerce,
  hints,
  nearest,
  settings_classes,
  type_name,
  within,
)
from jaxscale.errors import ConfigError


def load_config(path: str, overrides: Mapping[str, str] | None = None) -> Config:
  """Run `get_config` of a Python file and put the overrides in.

  Args:
    path: `FILE` or `FILE:arg`; the argument is handed to `get_config`.
    overrides: values as text by dotted field, e.g. {"optimizer.lr": "0.3"}.

  Raises:
    ConfigError: one line that says what is wrong, where, and what to write.

  Example:
    >>> config = load_config("configs/digits.py", {"epochs": "3"})
    >>> config.epochs
    3.0
  """
  config = call(path, "get_config", "define get_config() -> Config in it")
  if not isinstance(config, Config):
    file = path.partition(":")[0]
    raise ConfigError(
      f"{file}: get_config() returned {type(config).__name__}, return a Config"
    )
  return override(config, overrides or {})


def _similar(file: Path) -> str:
  """The hint for a file that is not there: one beside it of a similar name."""
  beside = {p.stem: p for p in file.parent.glob("*.py")}
  close = closest(file.stem, beside)
  return f"did you mean {str(beside[close])!r}?" if close else "check the path"


def call(path: str, function: str, advice: str) -> Any:
  """What a function of a Python file returns; its faults name file and line.

  Args:
    path: `FILE` or `FILE:arg`; the argument is handed to the function.
    function: its name.
    advice: what to do if the file has none.

  Raises:
    ConfigError: no such file or function, or an error in it.
  """
  name, _, arg = path.partition(":")
  file = Path(name)
  if not file.is_file():
    raise ConfigError(f"--config={path}: no such file, {_similar(file)}")
  try:
    spec = importlib.util.spec_from_file_location("jaxscale_config", file)
    if spec is None or spec.loader is None:
      raise ConfigError(f"{file}: not a Python file, give one that ends in .py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = getattr(module, function, None)
    if found is None:
      raise ConfigError(f"{file}: {advice}")
    takes_arg = bool(inspect.signature(found).parameters)
    if arg and not takes_arg:
      raise ConfigError(f"{file}:{arg}: its {function}() takes no argument")
    value = found(arg) if arg else found()
    # A generator runs only now, and its faults are the file's as well.
    return list(value) if inspect.isgenerator(value) else value
  except SyntaxError as e:
    raise ConfigError(f"{e.filename}:{e.lineno}: {e.msg}") from None
  except Exception as e:
    frames = traceback.extract_tb(e.__traceback__)
    lines = [f.lineno for f in frames if Path(f.filename) == file.absolute()]
    lines = lines or [f.lineno for f in frames if f.filename == str(file)]
    where = f"{file}:{lines[-1]}" if lines else str(file)
    text = str(e) if isinstance(e, ConfigError) else f"{type(e).__name__}: {e}"
    if text.startswith(str(file)):
      raise
    raise ConfigError(f"{where}: {text}") from None


def override(node: Any, overrides: Mapping[str, str]) -> Any:
  """A copy of a settings object with some fields, named by path, replaced."""
  tree: dict[str, Any] = {}
  for path, text in overrides.items():
    *parents, leaf = path.split(".")
    branch = tree
    for name in parents:
      if isinstance(branch.get(name), str):  # --config.optimizer=LARS came first
        branch[name] = {"": branch[name]}
      branch = branch.setdefault(name, {})
    if isinstance(branch.get(leaf), dict):
      branch[leaf][""] = text
    else:
      branch[leaf] = text
  return dataclasses.replace(node, **_changes(type(node), node, tree, prefix=""))


def _changes(cls: Any, node: Any, tree: dict[str, Any], prefix: str) -> dict[str, Any]:
  """The new values of a branch, for an object of `cls` in the place of `node`."""
  fields = hints(cls)
  changes = {}
  for name, value in tree.items():
    path = f"{prefix}{name}"
    if name not in fields:
      raise ConfigError(
        f"--config.{path}: {cls.__name__} has no field {name!r}, "
        + nearest(name, fields)
      )
    current, classes = getattr(node, name, None), settings_classes(fields[name])
    branch = value if isinstance(value, dict) else {"": value}
    if classes:
      changes[name] = _branch(classes, current, branch, path)
    elif isinstance(value, dict):
      raise ConfigError(f"--config.{path}: a single value, it has no fields")
    else:
      changes[name] = _parse(fields[name], value, path)
  return changes


def _branch(
  classes: dict[str, Any], current: Any, branch: dict[str, Any], path: str
) -> Any:
  """A settings object with other fields, or one of another class.

  All of it is put together before the class checks it: what it must have may be
  given in any order.
  """
  fields = dict(branch)
  chosen = fields.pop("", None)
  if chosen is None:
    return dataclasses.replace(
      current, **_changes(type(current), current, fields, f"{path}.")
    )
  if chosen not in classes and len(classes) == 1:
    field = next(iter(hints(next(iter(classes.values())))))
    raise ConfigError(
      f"--config.{path}={chosen}: has fields, write e.g. --config.{path}.{field}=VALUE"
    )
  if chosen not in classes:
    raise ConfigError(f"--config.{path}={chosen}: {nearest(chosen, classes)}")
  cls = classes[chosen]
  return cls(**_shared(cls, current) | _changes(cls, current, fields, f"{path}."))


def _shared(cls: Any, current: Any) -> dict[str, Any]:
  """What an object has that another class has as well, and allows."""
  shared = {}
  for name, annotation in hints(cls).items():
    try:
      value = coerce(annotation, getattr(current, name))
    except (AttributeError, TypeError):
      continue
    if name not in bounds(cls) or within(value, bounds(cls)[name]):
      shared[name] = value
  return shared


def _parse(annotation: Any, text: str, path: str) -> Any:
  """The value that `text` stands for in a field of this type."""
  choices = alternatives(annotation)
  named = [a for c in choices if get_origin(c) is Literal for a in get_args(c)]
  if text in named or (str in choices and text != "None"):
    return text
  if tuple[str, ...] in choices and re.fullmatch(r"[\w:./-]+(,[\w:./-]+)*", text):
    return tuple(text.split(","))  # plain words, as data:4,replica:2
  try:
    value = ast.literal_eval(text)
    if isinstance(value, (int, float)) and any(get_origin(c) is tuple for c in choices):
      value = (value,)
    return coerce(annotation, value)
  except (TypeError, ValueError, SyntaxError, RecursionError, MemoryError):
    words = ", as \"('a', 'b')\"" if tuple[str, ...] in choices else ""
    raise ConfigError(
      f"--config.{path}={text}: give {type_name(annotation)}{words}"
    ) from None


def split_args(
  argv: Sequence[str],
  known: Collection[str],
  *,
  flags: Collection[str] = (),
  has_settings: bool = False,
) -> Iterator[tuple[str, str]]:
  """The options of a command line, one after another, with their values.

  Args:
    argv: the command line.
    known: options with a value, `--name VALUE` or `--name=VALUE`.
    flags: those without, whose value is "".
    has_settings: whether --config.FIELD=VALUE are options too.

  Raises:
    ConfigError: an option that does not exist, or lacks its value.

  Example:
    >>> list(split_args(["--to", "a", "--step=3"], ("--to", "--step")))
    [('--to', 'a'), ('--step', '3')]
  """
  args = list(argv)
  while args:
    arg = args.pop(0)
    if arg in flags:
      yield arg, ""
      continue
    name, given, value = arg.partition("=")
    if name not in known and not (has_settings and name.startswith("--config.")):
      shown = {"--help", *known, *(flag for flag in flags if flag.startswith("--"))}
      setting = "; a setting is --config.FIELD=VALUE" if has_settings else ""
      raise ConfigError(f"{arg}: not an option, {nearest(name, shown)}{setting}")
    if not given:
      if not args or args[0].startswith("--"):
        raise ConfigError(f"{name}: a value is missing, write {name}=VALUE")
      value = args.pop(0)
    yield name, value


def parse_args(argv: list[str]) -> tuple[dict[str, str], dict[str, str], bool]:
  """Split a command line into options, overrides and whether help is asked.

  Example:
    >>> parse_args(["--config", "a.py", "--config.epochs=3"])
    ({'config': 'a.py'}, {'epochs': '3'}, False)
  """
  options, overrides, wants_help = {}, {}, False
  known, flags = ("--config", "--workdir"), ("--describe", "--help", "-h")
  for name, value in split_args(argv, known, flags=flags, has_settings=True):
    if name in ("--help", "-h"):
      wants_help = True
      continue
    if name == "--workdir" and "://" in value:
      raise ConfigError(f"--workdir={value}: give a directory; mount a bucket as one")
    if name.startswith("--config."):
      overrides[name.removeprefix("--config.")] = value
    else:
      options[name.removeprefix("--")] = value
  return options, overrides, wants_help


def help_text(config: Config | None) -> str:
  """Every field with its type, meaning and value (or all alternatives)."""
  lines = [
    "usage: python -m jaxscale.train --config FILE[:arg] [--workdir DIR]",
    "                                [--config.FIELD=VALUE ...] [--describe]",
    "",
    "Trains one experiment and resumes by itself when DIR holds a part of it.",
    "",
    "  --config FILE[:arg]     Python file with get_config([arg]) -> Config",
    "  --workdir DIR           checkpoints, metrics and plots go there",
    "                          (default: runs/ and the name of the config)",
    "  --config.FIELD=VALUE    replace a setting; --config.optimizer=LARS",
    "                          chooses an alternative and keeps shared fields",
    "  --describe              print parameters, memory and collectives of a step on",
    "                          the devices there are, and train nothing",
    "",
    "exit code: 0 done, 2 a mistake in what was asked for, 85 asked to stop and",
    "saved, 86 hung, 93 not to be started again, 130 Ctrl-C, 1 anything else",
    "",
    "settings:" if config else "settings (--config FILE --help shows the file's):",
  ]
  lines += _help_fields(Config, config, "")
  return "\n".join(lines)


def _help_fields(cls: type, node: Any, prefix: str) -> list[str]:
  lines, docs = [], _field_docs(cls)
  for name, annotation in hints(cls).items():
    classes = settings_classes(annotation)
    value = getattr(node, name) if node is not None else None
    head = f"  --config.{prefix}{name}"
    if not classes:
      bound = f" {bounds(cls)[name]}" if name in bounds(cls) else ""
      shown = f" = {value!r}" if node is not None else ""
      lines += [f"{head}{shown}  ({type_name(annotation)}{bound})"]
      lines += textwrap.wrap(
        docs[name], 72, initial_indent=" " * 6, subsequent_indent=" " * 6
      )
      continue
    chosen = [type(value)] if node is not None else classes.values()
    lines += ["", f"{head}: {' | '.join(classes)}"]
    for c in chosen:
      summary = (c.__doc__ or "").splitlines()[0]
      lines += [f"    {c.__name__}: {summary}"]
      lines += _help_fields(c, value, f"{prefix}{name}.")
  return lines


def _field_docs(cls: type) -> dict[str, str]:
  """The text of each entry under `Attributes:`, base classes' included."""
  docs: dict[str, str] = {}
  for c in reversed(cls.__mro__):
    _, _, section = (c.__doc__ or "").partition("Attributes:")
    name = ""
    for line in inspect.cleandoc(section).splitlines() if section else []:
      if not line.startswith(" ") and ":" in line:
        name, _, text = line.partition(":")
        docs[name] = text.strip()
      elif name:
        docs[name] += " " + line.strip()
  return docs


def command(argv: list[str] | None = None) -> str:
  """The command line that was typed, to be shown to whoever goes on with it."""
  argv = sys.argv[1:] if argv is None else argv
  return " ".join(["python -m jaxscale.train", *argv])
