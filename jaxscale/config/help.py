"""Help of settings: the value, type, bound, default and meaning of every field."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jaxscale.config.config import Config
from jaxscale.config.loading import choices
from jaxscale.config.validation import (
  bounds,
  field_docs,
  hints,
  is_named,
  item_type,
  nearest,
  type_name,
)
from jaxscale.errors import ConfigError

# The settings that one starts with: `jaxscale train --help` shows these.
_FIRST = """model data optimizer optimizer.lr schedule schedule.warmup_epochs loss batch_size
  epochs steps accumulate_steps lr_scaling clip_norm ema_decay dtype init_from seed
  target_accuracy mesh.data mesh.fsdp mesh.stage mesh.model layout.shard
  layout.remat exchange sync evaluation.every_epochs checkpoint.every_epochs log.every_steps"""
_MORE = """
Settings of a file, with values: --config FILE --help; others: --help=SECTION,
  --help=data.TFDS (a class), =optimizer.lr (one), =config (in no section), =all"""


class Entry(NamedTuple):
  """Help of one setting, or the heading above the settings of a class.

  Attributes:
    path: dotted name of the setting, e.g. "optimizer.lr"; "" for a heading.
    topic: name for `--help=TOPIC`, with the class: "optimizer.SGD.lr", "optimizer.SGD".
    head: name, value, type, bound and default; or the heading.
    text: meaning.
  """

  path: str
  topic: str
  head: str
  text: str = ""

  def __str__(self) -> str:
    return self.shown(self.text)

  def shown(self, text: str) -> str:
    """Return the lines to print, with `text` as the meaning."""
    first = "  --config." if self.path else "\n  "
    lines = _wrap(self.head, first, " " * 10) + _wrap(text[:1].upper() + text[1:], " " * 6)
    return "\n".join(lines)


def _wrap(text: str, first: str, then: str | None = None) -> list[str]:
  return textwrap.wrap(text, 80, initial_indent=first, subsequent_indent=then or first)


def entries(
  node: Any, own: Mapping = {}, chosen: Mapping = {}, cls: Any = Config, prefix="", topic=""
) -> Iterator[Entry]:
  """Yield the help of all settings in a class and below.

  Args:
    node: object whose values and classes are shown; None shows all alternatives.
    own: the user's settings classes, by name.
    chosen: the names of classes, by field, that replace those of `node`; their fields
      have no values yet.
    cls: the class of `node`.
    prefix: the start of the dotted names, e.g. "model.".
    topic: the start of the topics, e.g. "model.CNN.".
  """
  docs, fields = field_docs(cls), {f.name: f for f in dataclasses.fields(cls)}
  for name, annotation in hints(cls).items():
    path, at = f"{prefix}{name}", f"{topic}{name}"
    value = None if node is None else getattr(node, name)
    classes, members = choices(annotation, own), choices(item_type(annotation), own)
    if is_named(annotation):  # Any class may be below a name, also this one.
      members = {}
    if len(classes) != 1:
      shown = "" if node is None else f" = {type(value).__name__ if classes else repr(value)}"
      about = f"{' | '.join(classes) or kind_text(cls, name)}; {default_text(fields[name])}"
      yield Entry(path, at, f"{path}{shown}  ({about})", docs.get(name, ""))
    if (other := chosen.get(path)) in classes:
      inner = [(classes[other], None)]
    elif node is None:
      inner = [(c, None) for c in (classes | members).values()]
    else:
      held: Any = value if members else [value] * bool(classes)
      inner = [(type(v), v) for v in held]
    for c, v in inner:
      below = at if len(classes) == 1 else f"{at}.{c.__name__}"
      yield Entry("", below, f"{below}: {_summary(c)}")
      start = f"{path}.{c.__name__}." if members else f"{path}."
      yield from entries(v, own, chosen, c, start, f"{below}.")
    for key, v in value.items() if isinstance(value, dict) else ():
      if dataclasses.is_dataclass(v):
        yield Entry("", f"{at}.{key}", f"{at}.{key}: {_summary(type(v))}")
        yield from entries(v, own, chosen, type(v), f"{path}.{key}.", f"{at}.{key}.")


def settings_help(node: Any = None, own: Mapping = {}, topic="all", chosen: Mapping = {}) -> str:
  """Return the help of the settings that belong to a topic.

  Args:
    node: see `entries`; a class that `node` does not have is shown with its defaults.
    own: see `entries`.
    topic: "all", "config" for those without a section, a section ("optimizer"), a class
      ("optimizer.SGD") or a setting ("optimizer.lr").
    chosen: see `entries`.

  Raises:
    ConfigError: the topic does not exist.
  """
  for known in ([*entries(node, own, chosen)], [*entries(None, own)]):
    if lines := _matching(known, topic):
      return "\n".join(lines)
  hint = nearest(topic, ["all", "config", *sections()])
  raise ConfigError(f"--help={topic}: no such setting or section, {hint}")


def _matching(known: list[Entry], topic: str) -> list[str]:
  """Return the help of a topic; a setting that several classes share is shown once."""
  if topic == "config":
    return [str(e) for e in known if e.path and "." not in e.path]
  named = [str(e) for e in known if topic == "all" or f"{e.topic}.".startswith(f"{topic}.")]
  return named or [*dict.fromkeys(str(e) for e in known if e.path == topic)]


def first_settings() -> str:
  """Return the first clause on each setting to start with, and how to list the others."""
  known = {e.path: e for e in reversed([*entries(None)])}
  chosen = [known[path] for path in _FIRST.split()]
  lines = [e.shown(re.split(r"\.$|[.;] ", e.text)[0]) for e in chosen]
  return "\n".join([*lines, _MORE, *_wrap(", ".join(sections()), "Sections: ", "  ")])


def sections() -> list[str]:
  """Return the fields of Config that have settings of their own."""
  return [name for name, annotation in hints(Config).items() if choices(annotation, {})]


def kind_text(cls: type, name: str) -> str:
  """Return type and bound of a field, e.g. "float > 0 | None"."""
  bound = f" {bounds(cls)[name]}" if name in bounds(cls) else ""
  return re.sub(r"( \| None)?$", rf"{bound}\1", type_name(hints(cls)[name]), count=1)


def default_text(field: dataclasses.Field, quote: str = "") -> str:
  """Return "default: VALUE", with the name of a settings class as VALUE, or "required"."""
  value: Any = field.default
  if field.default_factory is not dataclasses.MISSING:
    value = field.default_factory()
  elif value is dataclasses.MISSING:
    return "required"
  shown = type(value).__name__ if dataclasses.is_dataclass(value) else repr(value)
  return f"default: {quote}{shown}{quote}"


def _summary(cls: type) -> str:
  """Return the first line of a class's docstring; dataclasses generate one of fields."""
  text = (cls.__doc__ or "").partition("\n")[0]
  return "" if text.startswith(f"{cls.__name__}(") else text
