"""Generate pages of the site from the program: settings, commands, API, recipes.

Each function returns Markdown for MyST. `conf.py` inserts it where a page has the line
``*`make docs` fills in: NAME [ARGUMENT]*``. Generated text is never committed, so it cannot
differ from the program.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ForwardRef

import jaxscale
from jaxscale.cli import COMMANDS, load
from jaxscale.config import Config
from jaxscale.config.choice import Choice
from jaxscale.config.help import default_text, kind_text
from jaxscale.config.validation import field_docs, hints, is_named, item_type
from jaxscale.config.validation import settings_classes as alternatives

ROOT = Path(__file__).parents[1]
_SECTIONS = "Args|Attributes|Returns|Raises|Yields|Example"
_ARXIV = re.compile(r"\barXiv:(\d{4}\.\d{4,5})")


def fill(text: str) -> str:
  """Return a page with its generated parts inserted."""
  makers = {f.__name__: f for f in (settings, commands, api, recipes, module)}
  marker = re.compile(r"^\*`make docs` fills in: (\w+)(?: ([\w.]+))?\*$", re.MULTILINE)
  return marker.sub(lambda m: makers[m[1]](*filter(None, [m[2]])), text)


# ----------------------------------------------------------------- text of docstrings


def prose(text: str) -> str:
  """Return the text of a docstring as Markdown, with special characters escaped outside code."""

  def plain(part: str) -> str:
    part = re.sub(r"([*<])", r"\\\1", part)
    return _ARXIV.sub(r"[arXiv:\1](https://arxiv.org/abs/\1)", part)

  lines = []
  for line in text.splitlines():
    parts = re.split(r"(`[^`]*`)", line)
    is_code = line.startswith("    ")
    lines.append(line if is_code else "".join(p if p[:1] == "`" else plain(p) for p in parts))
  return "\n".join(lines)


def docstring(text: str, skip: tuple[str, ...] = ()) -> str:
  """Return a docstring as Markdown, without the sections in `skip`."""
  head, *rest = re.split(rf"^({_SECTIONS}):\n", inspect.cleandoc(text), flags=re.M)
  out = [prose(head).strip()]
  for name, body in zip(rest[::2], rest[1::2], strict=True):
    body = textwrap.dedent(body).strip()
    if name in skip:
      continue
    out.append(f"**{name}**")
    if name == "Example":
      out.append(f"```pycon\n{body}\n```")
    elif name in ("Args", "Attributes", "Raises"):
      out += [f"`{entry}`\n: {prose(text)}" for entry, text in entries(body)]
    else:
      out.append(prose(body))
  return "\n\n".join(out)


def entries(body: str) -> Iterator[tuple[str, str]]:
  """Yield (name, text) for each entry of a section, with the text on one line."""
  for block in re.split(r"\n(?=\S)", body):
    name, _, text = block.partition(":")
    yield name, " ".join(text.split())


def directive(kind: str, argument: str, body: str) -> str:
  """Return a directive whose body may contain directives and code."""
  fence = "`" * (max([2, *map(len, re.findall(r"`{3,}", body))]) + 1)
  return f"{fence}{{{kind}}} {argument}\n{body}\n{fence}\n"


# ---------------------------------------------------------------------------- settings


def settings() -> str:
  """Return the reference of all settings, first of `Config`, then of each branch."""
  out = ["## The run\n", *_options(Config, "", "Config")]
  for name, annotation in hints(Config).items():
    if classes := alternatives(annotation):
      out += [f"## {name}\n", *_branch(name, classes, several=len(classes) > 1)]
    for member, c in alternatives(item_type(annotation)).items():  # a tuple of named members
      out += _branch(name, {member: c}, several=True, prefix=f"{name}.{member}")
  return "\n".join(out)


def _branch(path: str, classes: dict[str, Any], several: bool, prefix: str = "") -> list[str]:
  """Return the classes that a field can choose, with their fields."""
  out = []
  for name, cls in classes.items():
    out += [f"### {path}={name}\n"] * several
    out += [docstring(cls.__doc__ or "", skip=("Attributes",)) + "\n"]
    out += _options(cls, f"{prefix or path}.", f"{path}={name}")
    for field, annotation in hints(cls).items():
      if is_named(annotation):  # Any class may be below a name, also this one.
        continue
      if len(inner := alternatives(annotation)) > 1:
        out += _branch(f"{path}.{field}", inner, several=True)
      for n, inner in alternatives(item_type(annotation)).items():
        held = f"{path}.{field}"  # a tuple: its members are chosen by name
        out += _branch(held, {n: inner}, several=True, prefix=f"{held}.{n}")
  return out


def _options(cls: Any, prefix: str, program: str) -> list[str]:
  """Return the fields of a class as option directives."""
  docs, fields = field_docs(cls), {f.name: f for f in dataclasses.fields(cls)}
  out = [directive("program", program, "")] if fields else []
  for name, annotation in hints(cls).items():
    classes = alternatives(annotation) or alternatives(item_type(annotation))
    if len(classes) == 1:  # a branch, which has a section
      continue
    kind = " \\| ".join(f"`{c}`" for c in classes) or f"`{kind_text(cls, name)}`"
    text = docs.get(name, "")
    body = f"{prose(text[:1].upper() + text[1:])}\n\n{kind}, {default_text(fields[name], '`')}"
    path = f"{prefix}{name}"
    out.append(directive("option", f"--config.{path}", body))
  return out


# ---------------------------------------------------------------------------- commands


def commands() -> str:
  """Return all commands with their options, in the groups of `--help`."""
  out = []
  for group in dict.fromkeys(c.group for c in COMMANDS.values()):
    out.append(f"## {group.capitalize()}\n")
    for name in [n for n, c in COMMANDS.items() if c.group == group]:
      code, parser = load(name)
      out += [f"### jaxscale {name}\n", docstring(code.__doc__ or "") + "\n"]
      out.append(directive("program", f"jaxscale {name}", ""))
      out += [_option(a) for a in parser._actions if "--help" not in a.option_strings]
      out.append(f"Example: `{parser.example}`\n")
      out.append(prose(parser.exit_codes).replace("exit", "Exit", 1) + ".\n")
  return "\n".join(out)


def _option(action: argparse.Action) -> str:
  value = "" if action.nargs == 0 else f" {action.metavar}"
  names = ", ".join(f"{flag}{value}" for flag in action.option_strings)
  text = (action.help or "").replace("%%", "%")
  return directive("option", names or str(action.metavar), prose(text))


# --------------------------------------------------------------------------------- API


def api(package: str) -> str:
  """Return the reference of a package, without settings, which have a separate page."""
  text = importlib.import_module(package).__doc__ or ""
  out, again = [docstring(text) + "\n"], []
  for name, value in public(package):
    if package != "jaxscale" and getattr(jaxscale, name, None) is value:
      again.append(f"`{name}`")
    elif callable(value):
      out.append(_described(f"{package}.{name}", value))
  if again:
    out.insert(1, f"Also here, under [jaxscale](jaxscale.md): {', '.join(again)}.\n")
  return "\n".join(out)


def module(name: str) -> str:
  """Return the docstring of a module verbatim."""
  return f"```text\n{inspect.cleandoc(importlib.import_module(name).__doc__ or '')}\n```"


def public(package: str) -> Iterator[tuple[str, Any]]:
  """Yield the exported names and values of a package, without modules and settings classes."""
  exports = importlib.import_module(package)
  for name in sorted(exports.__all__, key=str.lower):
    value = getattr(exports, name)
    is_setting = inspect.isclass(value) and issubclass(value, Choice)
    if not (inspect.ismodule(value) or (is_setting and Choice not in value.__bases__)):
      yield name, value


def _described(path: str, value: Any) -> str:
  """Return a function or a class as a directive of the index."""
  kind = "py:class" if inspect.isclass(value) else "py:function"
  text = docstring(inspect.getdoc(value) or "", ("Attributes",) * (value is Config))
  if inspect.isclass(value):
    text += "\n\n" + "\n".join(_methods(value))
  return directive(kind, f"{path}{_signature(value)}", text)


def _methods(cls: type) -> Iterator[str]:
  """Yield the documented methods that a class defines."""
  for name, member in vars(cls).items():
    function = getattr(member, "__func__", getattr(member, "fget", member))
    if name[0] == "_" or not inspect.isfunction(function) or not function.__doc__:
      continue
    signature = "" if isinstance(member, property) else _signature(getattr(cls, name))
    kind = "py:property" if isinstance(member, property) else "py:method"
    yield directive(kind, f"{name}{signature}", docstring(function.__doc__))


class _Text(str):
  """String whose repr has no quotes."""

  __repr__ = str.__str__


def _signature(value: Any) -> str:
  """Return the signature, with types as written in the source and defaults by name."""
  try:
    signature = inspect.signature(value)
  except (ValueError, TypeError):
    return ""

  def written(p: inspect.Parameter) -> inspect.Parameter:
    if p.default is not p.empty and callable(p.default):
      p = p.replace(default=_Text(p.default.__name__))
    kind = p.annotation
    return p if kind is p.empty else p.replace(annotation=_Text(_type(kind)))

  result = signature.return_annotation
  if result is not signature.empty and result is not None:
    result = _Text(_type(result))
  parameters = [written(p) for p in signature.parameters.values()]
  return str(signature.replace(parameters=parameters, return_annotation=result))


def _type(annotation: Any) -> str:
  if isinstance(annotation, str):
    return annotation
  if isinstance(annotation, ForwardRef):
    return annotation.__forward_arg__
  return inspect.formatannotation(annotation)


# ----------------------------------------------------------------------------- recipes


def recipes() -> str:
  """Return all configs with the header of their file: command, hardware, result, source."""
  return "\n".join(_recipe(path) for path in sorted((ROOT / "configs").glob("*.py")))


def _recipe(path: Path) -> str:
  text = ast.get_docstring(ast.parse(path.read_text())) or ""
  title, _, rest = text.partition("\n")
  facts = r"^(Command|Hardware|Time|Result) +((?:.*\n?)(?:^ {4,}\S.*\n?)*)"
  found = re.findall(facts, rest, re.MULTILINE)
  more = re.sub(facts, "", rest, flags=re.MULTILINE).strip()
  out = [f"## configs/{path.name}\n", prose(title) + "\n"]
  for name, body in found:
    body = textwrap.dedent(" " * 11 + body).strip()
    out.append(f"**{name}**\n: {prose(' '.join(body.split()))}\n")
  out.append(prose(textwrap.dedent(more)) + "\n")
  return "\n".join([*out, f"[The file](../configs/{path.name})\n"])
