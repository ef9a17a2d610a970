"""The help of settings: every field with its type, bound, meaning and value."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from typing import Any

from jaxscale.config.config import Config
from jaxscale.config.loading import choices
from jaxscale.config.validation import bounds, field_docs, hints, item_type, type_name


def settings_help(
  node: Any,
  own: Mapping[str, type] = {},
  cls: type = Config,
  prefix: str = "",
  chosen: Mapping[str, str] = {},
) -> str:
  """A page of all settings below a class.

  Args:
    node: whose values and alternatives are shown; None: all alternatives.
    own: settings classes of the user's.
    cls: of `node`.
    prefix: of the dotted names, e.g. "model.".
    chosen: alternatives, by field, that take the place of the node's own, and whose
      fields have no values yet.
  """
  lines, docs = [], field_docs(cls)
  for name, annotation in hints(cls).items():
    classes = choices(annotation, own)
    value = None if node is None else getattr(node, name)
    head = f"  --config.{prefix}{name}"
    if not classes:
      bound = f" {bounds(cls)[name]}" if name in bounds(cls) else ""
      shown = "" if node is None else f" = {value!r}"
      lines.append(f"{head}{shown}  ({type_name(annotation)}{bound})")
      text = "\n".join(textwrap.wrap(docs.get(name, ""), 66))
      lines += textwrap.indent(text, " " * 6).splitlines()
      lines += _members(value, own, annotation, f"{prefix}{name}.")
      continue
    lines += ["", f"{head}: {' | '.join(classes)}"]
    shown = classes.values() if node is None else [type(value)]
    if (other := chosen.get(f"{prefix}{name}")) in classes:
      shown, value = [classes[other]], None
    for c in shown:
      lines.append(f"    {c.__name__}: {_summary(c)}")
      lines.append(settings_help(value, own, c, f"{prefix}{name}."))
  return "\n".join(lines)


def _members(value: Any, own: Mapping[str, type], annotation: Any, prefix: str) -> list[str]:
  """The fields of those in a tuple of settings; without a value of all alternatives."""
  classes = choices(item_type(annotation), own)
  held = {type(member).__name__: member for member in value or ()} if classes else {}
  lines = []
  for name in classes if value is None else held:
    cls = type(held[name]) if name in held else classes[name]
    lines.append(f"    {name}: {_summary(cls)}")
    lines.append(settings_help(held.get(name), own, cls, f"{prefix}{name}."))
  return lines


def _summary(cls: type) -> str:
  """The first line of a class's docstring; dataclasses make one up, of its fields."""
  text = (cls.__doc__ or "").partition("\n")[0]
  return "" if text.startswith(f"{cls.__name__}(") else text


def field_names(node: Any, own: Mapping[str, type] = {}) -> list[str]:
  """The dotted names of all settings that `settings_help` shows."""
  found = re.findall(r"^  --config\.([\w.]+)", settings_help(node, own), re.MULTILINE)
  return list(dict.fromkeys(found))
