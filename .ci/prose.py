#!/usr/bin/env python3
"""Report prose that breaks a rule of style, one line per finding.

Checked are the first words of docstrings, article and default of help, the width of Markdown,
and the entries of CHANGELOG.md. ruff checks the mood of docstrings (D401).
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from jaxscale.cli.commands import COMMANDS, load
from jaxscale.config.help import entries

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTED = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
LEANS_ON_A_NOUN = r"(As|How|Likewise|Of|That|What|Where|Whether|Who|The same)\b"
PROSE_COLUMNS, TABLE_COLUMNS = 100, 160
SECTIONS = "Added, Changed, Deprecated, Removed, Fixed, Security".split(", ")


def docstrings(text: str) -> Iterator[tuple[int, str]]:
  """Yield a finding for each docstring that begins with a word that leans on a noun elsewhere."""
  for node in ast.walk(ast.parse(text)):
    doc = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
    if doc and (match := re.match(LEANS_ON_A_NOUN, doc)):
      remedy = "begin with a verb in the imperative, or with a noun"
      yield node.body[0].lineno, f"docstring begins with {match[0]!r}; {remedy}"


def markdown(text: str) -> Iterator[tuple[int, str]]:
  """Yield a finding for each wide line outside of code blocks and link targets."""
  is_code = False
  for number, line in enumerate(text.splitlines(), 1):
    is_code ^= line.lstrip().startswith("```")
    is_table = line.lstrip().startswith("|")
    most = TABLE_COLUMNS if is_table else PROSE_COLUMNS
    if len(line) > most and not is_code and not re.match(r"\[[^]]+\]: ", line):
      remedy = "shorten a cell, or move it below" if is_table else "wrap the paragraph"
      yield number, f"{len(line)} columns of at most {most}; {remedy}"


def changelog(text: str) -> Iterator[tuple[int, str]]:
  """Yield a finding for each entry of several lines, section or order that is not as agreed."""
  last = ""
  for number, line in enumerate(text.splitlines(), 1):
    if line.startswith("### ") and line[4:] not in SECTIONS:
      yield number, f"section {line[4:]!r}; use one of {', '.join(SECTIONS)}"
    if line.startswith(" "):
      yield number, "entry of several lines; shorten it to one line, or split it"
    if line.startswith("- **Breaking:**") and last.startswith("- ") and "Breaking" not in last:
      yield number, "breaking change after another entry; move it to the top of its section"
    last = line or last


def settings_help() -> Iterator[str]:
  """Yield a finding for each setting whose help does not begin with an article or whether."""
  for entry in entries(None):
    if entry.path and not re.match("(the|a|an|whether) ", entry.text):
      yield f"--help={entry.topic}: {entry.text[:30]!r}; begin with an article or whether"


def options_help() -> Iterator[str]:
  """Yield a finding for each option with a value whose help lacks an article or a default."""
  for module, parser in map(load, COMMANDS):
    for group in parser._action_groups:
      for action in (a for a in group._group_actions if a.nargs != 0):
        option = (action.option_strings or [action.metavar])[-1]
        start = f"{module.__name__.replace('.', '/')}.py: {option}: help"
        text, is_required = f"{action.help} ({group.title})", action.dest in parser._required
        if not re.match("(the|a|an) ", text):
          yield f"{start} {text[:30]!r}; begin with an article"
        if not (is_required or re.search("default: |required without ", text)):
          yield f"{start} without a default; add (default: VALUE), or (default: none)"


def main() -> int:
  """Print all findings; return the exit code."""
  command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py", "*.md"]
  listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
  found = [*settings_help(), *options_help()]
  for name in filter(lambda name: (ROOT / name).is_file(), sorted(listed.splitlines())):
    text = (ROOT / name).read_text()
    checks = [docstrings if name.endswith(".py") else markdown]
    checks += [changelog] * (name == "CHANGELOG.md")
    found += [f"{name}:{number}: {line}" for check in checks for number, line in check(text)]
  print(*found, sep="\n", end="\n" * bool(found), file=sys.stderr)
  return 1 if found else 0


if __name__ == "__main__":
  sys.exit(main())
