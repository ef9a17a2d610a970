"""Loading of a Config from a file and overrides: `FILE[:arg]` and `a.b=value`.

The command line, notebooks and sweeps all call `load_config`. Values are parsed by the
type of their field. All overrides are applied at once before every class checks itself
again, so their order does not matter.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import re
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from jaxscale.config import validation
from jaxscale.config.choice import Choice, chosen, own_choices
from jaxscale.config.config import Config
from jaxscale.config.config_file import load_file, position, running
from jaxscale.config.packaged import locate, similar
from jaxscale.config.record import Described, describe_run, print_note
from jaxscale.errors import ConfigError, invalid


def load_config(
  path: str, overrides: Mapping[str, str] | None = None, *, trust: bool = False
) -> Config:
  """Run `get_config` of a Python file, or read a run's settings, and apply overrides.

  Args:
    path: `FILE` or `FILE:arg`; `get_config` receives the argument. Or the workdir of a run or
      its config.json: the settings of that run, with its overrides and the classes in its
      `code/`.
    overrides: values as text by dotted field, e.g. {"optimizer.lr": "0.3"}.
    trust: whether to execute code of a run although other users could have written it.

  Raises:
    ConfigError: the file or an override is invalid, or the run needs code that others could
      have written; one line says where and what to write.

  Example:
    >>> config = load_config("configs/digits.py", {"epochs": "3"})
    >>> config.epochs
    3.0
  """
  if run := recorded_run(path):
    return override(describe_run(run, trust=trust).settings(log=True), overrides or {})
  config = call(path, "get_config", "define get_config() -> Config in it")
  if not isinstance(config, Config):
    returned = f"get_config() returned {type(config).__name__}, return a Config"
    raise ConfigError(f"{path.partition(':')[0]}: {returned}")
  return override(config, overrides or {}, own_classes(path))


# Settings that may differ in an evaluation; others would need another training.
_EVALUATED = "data dtype evaluation faults gpu_settings input_threads layout mesh metrics".split()


def evaluated_config(
  run: str, overrides: Mapping[str, str], *, trust: bool = False
) -> tuple[Described, Config]:
  """Return a run, and its settings with overrides, to evaluate it.

  Args:
    run: the workdir of the run.
    overrides: values as text by dotted field.
    trust: whether to execute code of the run although other users could have written it.

  Raises:
    ConfigError: the directory is no run, an override would change what was trained, or the run
      needs code that others could have written.
  """
  for path in overrides:
    if path.partition(".")[0] not in _EVALUATED:
      fix = f"change one of {', '.join(_EVALUATED)}, or train again with --config {run}"
      raise invalid(f"--config.{path}", ..., "does not apply to a trained model", fix)
  described = describe_run(run, trust=trust)
  return described, override(described.settings(partial=True), overrides)


def recorded_run(path: str) -> Path | None:
  """Return the workdir of a run that --config names, or None for a Python file."""
  file = Path(path)
  folder = file.parent if file.name == "config.json" else file
  return folder if folder.is_dir() and (folder / "config.json").is_file() else None


def own_classes(path: str) -> dict[str, type]:
  """Return the settings classes that a config file defines or imports, by name."""
  if recorded_run(path):
    return {}  # `override` knows those that the settings use.
  return own_choices(vars(load_file(Path(locate(path).partition(":")[0]))))


def call(path: str, function: str, advice: str) -> Any:
  """Call a function of a Python file and return its result.

  Args:
    path: `FILE` or `FILE:arg`; the function receives the argument.
    function: the name of the function.
    advice: the text of the error if the file does not define the function.

  Raises:
    ConfigError: no such file or function, or an error in it, with file and line.
  """
  name, _, arg = locate(path).partition(":")
  file = Path(name)
  if not file.is_file():
    raise ConfigError(f"--config={path}: no such file{similar(file)}")
  try:
    module = load_file(file)
    factory = getattr(module, function, None)
    if factory is None:
      raise ConfigError(f"{file}: {advice}")
    if arg and not inspect.signature(factory).parameters:
      raise ConfigError(f"{file}:{arg}: {function}() takes no argument; remove :{arg}")
    with running(file):
      value = factory(arg) if arg else factory()
      # A generator runs only here, so that its errors are reported with file and line.
      return list(value) if inspect.isgenerator(value) else value
  except SyntaxError as e:
    raise ConfigError(f"{e.filename}:{e.lineno}: {e.msg}") from None
  except Exception as e:
    text = str(e) if isinstance(e, ConfigError) else f"{type(e).__name__}: {e}"
    if text.startswith(str(file)):
      raise
    raise ConfigError(f"{position(file, e)}: {text}{_meant(e)}") from None


def _meant(error: Exception) -> str:
  """Return the hint for a misspelt name in a config file."""
  if isinstance(error, AttributeError):
    names = dir(error.obj)
  elif isinstance(error, NameError):
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    names = frame.f_globals | frame.f_locals
  elif isinstance(error, ModuleNotFoundError):
    name = (error.name or "").partition(".")[0]
    is_near = bool(name) and (Path(name).is_dir() or Path(f"{name}.py").is_file())
    return "; to import it from the current directory, set PYTHONPATH=." * is_near
  else:
    return ""
  name = error.name or ""
  alike = [n for n in names if n[:1].isupper() == name[:1].isupper()]  # SGD and sgd are different.
  close = validation.closest(name, alike)
  return f", did you mean {close!r}?" if close else ""


def override(node: Any, overrides: Mapping[str, str], own: Mapping[str, type] | None = None) -> Any:
  """Return a copy of a settings object with some fields replaced.

  Args:
    node: a Config or another settings object.
    overrides: values as text by dotted field.
    own: the user's classes that can be chosen by name, in addition to those in the
      modules of the classes that `node` uses.
  """
  tree: dict[Any, Any] = {}  # Nested by name; the text of a path is under the key None.
  for path, text in overrides.items():
    branch = tree
    for name in path.split("."):
      branch = branch.setdefault(name, {})
    branch[None] = text
  known: dict[str, type] = {}
  for choice in chosen(node):
    known |= own_choices(vars(sys.modules[type(choice).__module__]))
  known |= own or {}
  return dataclasses.replace(node, **_changes(type(node), node, tree, "", known))


def choices(annotation: Any, own: Mapping[str, type]) -> dict[str, type]:
  """Return the settings classes that a field can have, by name, including `own`."""
  classes = validation.settings_classes(annotation)
  bases = tuple(a for a in validation.alternatives(annotation) if isinstance(a, type))
  return classes | {name: c for name, c in own.items() if classes and issubclass(c, bases)}


def _changes(
  cls: Any, node: Any, tree: dict[Any, Any], prefix: str, own: Mapping[str, type]
) -> dict[str, Any]:
  """Return the changed fields of a branch, for an object of `cls` that replaces `node`."""
  fields, changes = validation.hints(cls), {}
  for name, branch in tree.items():
    path = f"{prefix}{name}"
    if name not in fields:
      raise ConfigError(f"--config.{path}: {validation.no_such_field(cls, name)}")
    if classes := choices(fields[name], own):
      current = getattr(node, name, None)
      changes[name] = _branch(classes, current, branch, path, own)
    elif validation.is_named(fields[name]) and None not in branch:
      changes[name] = _named(fields[name], getattr(node, name, {}), branch, path, own)
    elif classes := choices(validation.item_type(fields[name]), own):
      held = {type(x).__name__: x for x in getattr(node, name, ())}
      changes[name] = _several(classes, held, branch, path, own)
    elif set(branch) != {None}:
      raise ConfigError(f"--config.{path}: has no fields; write --config.{path}=VALUE")
    else:
      changes[name] = _parse(fields[name], branch[None], path)
  return changes


def _branch(
  classes: dict[str, Any], current: Any, tree: dict, path: str, own: Mapping[str, type]
) -> Any:
  """Return a settings object with changed fields, or one of another class.

  All fields are collected before the class checks them, so that required fields can be
  given in any order.
  """
  chosen = tree.pop(None, None)
  if chosen is None or classes.get(chosen) is type(current):
    changes = _changes(type(current), current, tree, f"{path}.", own)
    return dataclasses.replace(current, **changes)
  if chosen not in classes:
    hint = validation.nearest(chosen, classes)
    if len(classes) == 1:
      field = next(iter(validation.hints(*classes.values())))
      hint = f"has fields, write e.g. --config.{path}.{field}=VALUE"
    raise ConfigError(f"--config.{path}={chosen}: {hint}")
  cls = classes[chosen]
  changes = _changes(cls, current, tree, f"{path}.", own)
  values = _shared(cls, current, changes, path) | changes
  for field in dataclasses.fields(cls):
    is_set = field.name in values or field.default is not dataclasses.MISSING
    if validation.hints(cls)[field.name] is Any and not is_set:
      problem = f"needs {field.name}, which cannot be given on a command line"
      fix = f"write it in the config file: {chosen}({field.name}=...)"
      raise invalid(f"--config.{path}", chosen, problem, fix)
  return cls(**values)


def _named(
  annotation: Any, held: dict[str, Any], tree: dict, path: str, own: Mapping[str, type]
) -> dict[str, Any]:
  """Return a dict of settings or values, with some of them changed."""
  kind, changed = validation.item_type(annotation), dict(held)
  classes = choices(kind, own)
  for name, branch in tree.items():
    if name not in held and not validation.is_plain(kind):
      raise ConfigError(f"--config.{path}.{name}: {validation.nearest(name, held)}")
    if classes:
      changed[name] = _branch(classes, held[name], branch, f"{path}.{name}", own)
    elif set(branch) != {None}:
      raise ConfigError(f"--config.{path}.{name}: write --config.{path}.{name}=VALUE")
    else:
      changed[name] = _parse(kind, branch[None], f"{path}.{name}")
  return changed


def _several(
  classes: dict[str, Any], held: dict, tree: dict, path: str, own: Mapping[str, type]
) -> tuple[Any, ...]:
  """Return a tuple of settings, of other classes ("A,B") or with changed fields (`A.x`).

  A class that the tuple already has keeps its other fields.
  """
  names, text = list(held), tree.pop(None, None)
  if text is not None:
    names = re.findall(r"[^\s,()]+", text)
  for name in [*names, *tree]:
    if name not in {**classes, **held}:
      raise ConfigError(f"--config.{path}={name}: {validation.nearest(name, classes)}")
    if name not in names:
      raise ConfigError(f"--config.{path}.{name}: not chosen; add --config.{path}={name}")
  items = []
  for name in names:
    cls = type(held[name]) if name in held else classes[name]
    changes = _changes(cls, held.get(name), tree.get(name, {}), f"{path}.{name}.", own)
    before = held.get(name)
    items.append(dataclasses.replace(before, **changes) if before else cls(**changes))
  return tuple(items)


def _shared(cls: Any, old: Any, changes: Mapping[str, Any], path: str) -> dict:
  """Return the explicitly set fields that another class takes over, and print them.

  Args:
    cls: the new class; it takes over fields that it also has and whose values it allows.
    old: the settings that it replaces.
    changes: the fields that are overridden.
    path: the dotted name of the settings.
  """
  if not isinstance(old, Choice):
    return {}
  hints, bounds, shared, notes = validation.hints(cls), validation.bounds(cls), {}, []
  docs, old_docs = validation.field_docs(cls), validation.field_docs(type(old))
  is_alike = isinstance(old, cls) or issubclass(cls, type(old))
  other = () if is_alike else (*old.not_shared, *cls.not_shared)
  for name in old.set_explicitly:
    with contextlib.suppress(TypeError, KeyError):
      value = validation.coerce(hints[name], getattr(old, name))
      is_allowed = name not in bounds or validation.within(value, bounds[name])
      if name in changes or not is_allowed:
        continue
      is_same = docs.get(name) == old_docs.get(name)
      meaning = "" if is_same else f" ({docs.get(name, '').partition(';')[0].rstrip('.')})"
      if name not in other:
        shared[name] = value
      text = f"{'not ' * (name in other)}{name}={validation.shown(value)}{meaning}"
      notes.append(text)
  if notes:
    print_note(f"{path}={cls.__name__} keeps from {type(old).__name__}: {', '.join(notes)}")
  return shared


def _parse(annotation: Any, text: str, path: str) -> Any:
  """Return the value of a text for a field of this type."""
  choices = validation.alternatives(annotation)
  named = [a for c in choices if get_origin(c) is Literal for a in get_args(c)]
  is_plain = validation.is_plain(annotation)
  if text in named or (str in choices and text != "None" and not is_plain):
    return text
  if tuple[str, ...] in choices and re.fullmatch(r"[\w:./-]+(,[\w:./-]+)*", text):
    return tuple(text.split(","))  # Words without quotes, e.g. data:4,replica:2.
  try:
    value = ast.literal_eval(text)
    is_tuple = not is_plain and any(get_origin(c) is tuple for c in choices)
    if isinstance(value, (int, float)) and is_tuple:
      value = (value,)
    return validation.coerce(annotation, value)
  except (TypeError, ValueError, SyntaxError, RecursionError, MemoryError):
    if is_plain:
      return text
    expected = validation.type_name(annotation)
    expected += ", e.g. a,b" * (tuple[str, ...] in choices)
    raise ConfigError(f"--config.{path}={text}: expected {expected}") from None
