"""Writes what was measured into a site's file; all else in it stays as it is."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxscale.errors import ConfigError
from jaxscale.files import replace_text
from jaxscale.launch.site import site_from
from jaxscale.planning.measured import Calibrated, Cost, Table

_HEADER = re.compile(r"\s*\[\[?\s*([\w.\-\"' ]+?)\s*\]\]?\s*(#.*)?$")


def write_machine(path: str | Path, fields: Mapping[str, Any]) -> None:
  """Puts constants into the table [machine] of a site's file.

  What is measured anew takes the place of what was there; other constants, comments and
  tables are left. The file is replaced as a whole or not at all.

  Args:
    path: of the file, which need not be there.
    fields: of `machine.Machine`, as `calibrate` measures them.

  Raises:
    ConfigError: the file is none of a site, or is written in a way that is not
      understood here.
  """
  path = Path(path)
  text = path.read_text("utf-8") if path.exists() else ""
  _check(path, text)
  written = with_machine(text, fields)
  _check(path, written)
  try:
    replace_text(path, written)
  except OSError as e:
    raise ConfigError(f"--site={path}: {e.strerror}, give another file") from None


def _check(path: Path, text: str) -> None:
  try:
    site_from(tomllib.loads(text))
  except ValueError as e:
    raise ConfigError(f"{path}: {e}") from None


def with_machine(text: str, fields: Mapping[str, Any]) -> str:
  r"""The text of a site's file with other constants.

  Example:
    >>> print(with_machine("[machine]\nwatts = 9\nhost = 1\n", {"host": 2}))
    [machine]
    host = 2
    watts = 9
    <BLANKLINE>
  """
  numbers = {n: v for n, v in fields.items() if isinstance(v, (int, float))}
  replaced = [n for n in ("tables", "loops", "calibrated") if n in fields]
  kept: list[str] = []
  section, place = "", None
  for line in text.splitlines():
    if header := _HEADER.match(line):
      section = header.group(1)
      if section == "machine":
        place = len(kept) + 1
    name = section.removeprefix("machine.")
    if section != name and name in replaced:
      continue
    key = re.match(r"\s*([\w.\-]+)\s*=", line)
    if section == "machine" and key and key.group(1) in numbers:
      continue
    kept.append(line)
  if place is None:
    kept += ["", "[machine]"] if kept else ["[machine]"]
    place = len(kept)
  kept[place:place] = [f"{n} = {_number(v)}" for n, v in numbers.items()]
  return "\n".join([*_trimmed(kept), *_measured(fields)]) + "\n"


def _trimmed(lines: list[str]) -> list[str]:
  while lines and not lines[-1].strip():
    lines = lines[:-1]
  return lines


def _number(value: float) -> str:
  return f"{value:.5g}" if isinstance(value, float) else str(value)


def _text(value: str) -> str:
  plain = value.replace("\\", "\\\\").replace('"', '\\"')
  return f'"{plain}"'


def _measured(fields: Mapping[str, Any]) -> list[str]:
  lines: list[str] = []
  found: Calibrated | None = fields.get("calibrated")
  if found is not None:
    lines += ["", "[machine.calibrated]"]
    for name, value in vars(found).items():
      lines.append(f"{name} = {_text(value) if isinstance(value, str) else value}")
  costs: list[Cost] = fields.get("loops") or []
  if costs:
    lines += [
      "",
      "# Seconds of one, fitted to loops that were measured.",
      "[machine.loops]",
    ]
    lines += [f'"{c.name}" = {c.seconds:.4g}' for c in costs]
  tables: list[Table] = fields.get("tables") or []
  for table in tables:
    lines += ["", "[[machine.tables]]", f"kind = {_text(table.kind)}"]
    lines += [f"form = {_text(table.form)}", f"dtype = {_text(table.dtype)}"]
    grid = ", ".join(f"[{', '.join(map(_number, s))}]" for s in table.grid)
    values = ", ".join(map(_number, table.values))
    lines += [f"grid = [{grid}]", f"values = [{values}]"]
  return lines
