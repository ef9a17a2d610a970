"""Expansion of Slurm's node lists, such as `rack[1-2]n[01-04],login`, to host names.

`scontrol show hostnames` of the installed Slurm comes first (`slurm.hostnames`). This parser
is used without scontrol (in containers) or if it fails: Slurm 22.05 prints nothing, with exit
code 0, for `node[1-2]-ib`.
"""

from __future__ import annotations

import itertools
import math
import re

from jaxscale.errors import ConfigError

MOST_HOSTS = 64 * 1024  # in one range: MAX_RANGE of Slurm's hostlist.c
_ITEM = re.compile(r"(?:\[[^\[\]]*\]|[^\s,])+")  # a comma in brackets ends no item
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?", re.ASCII)


def expand(text: str) -> list[str]:
  """Return the host names of a node list, in the order of the list.

  With several brackets the last one changes fastest. The numbers of a range have the width
  of its first number: `n[08-10]` is n08, n09, n10.

  Args:
    text: a list as in SLURM_STEP_NODELIST, with commas or spaces between names.

  Raises:
    ConfigError: the list is empty, or a bracket or a range is malformed.

  Example:
    >>> expand("rack[1-2]n[3,5],x[0-1]-ib")
    ['rack1n3', 'rack1n5', 'rack2n3', 'rack2n5', 'x0-ib', 'x1-ib']
  """
  names: list[str] = []
  for item in _ITEM.findall(text):
    # Texts outside and inside brackets alternate.
    pieces = enumerate(_BRACKETS.split(item))
    parts = [_numbers(piece, text) if i % 2 else [piece] for i, piece in pieces]
    if any("[" in name or "]" in name for (name,) in parts[::2]):
      raise _malformed(text, f"brackets do not match at {item[:20]!r}")
    if len(names) + math.prod(map(len, parts)) > MOST_HOSTS:
      raise _malformed(text, f"more than {MOST_HOSTS} hosts")
    names += map("".join, itertools.product(*parts))
  if not names:
    raise _malformed(text, "it is empty")
  return names


def _numbers(inside: str, text: str) -> list[str]:
  """Return the numbers of one bracket with the width in which they are written."""
  numbers: list[str] = []
  for piece in inside.split(","):
    match = _RANGE.fullmatch(piece.strip())
    if not match:
      raise _malformed(text, f"[{inside:.40}] is not a list of numbers and ranges")
    first, last = match.group(1), match.group(2) or match.group(1)
    if not 0 <= int(last) - int(first) < MOST_HOSTS:
      raise _malformed(text, f"{first}-{last} is not a valid range")
    numbers += [str(i).zfill(len(first)) for i in range(int(first), int(last) + 1)]
    if len(numbers) > MOST_HOSTS:
      raise _malformed(text, f"more than {MOST_HOSTS} hosts")
  return numbers


def quoted(text: str) -> str:
  """Return a text as errors quote it; "…" marks that it was cut after 60 characters."""
  return f"{text[:60]!r}{'…' * (len(text) > 60)}"


def _malformed(text: str, problem: str) -> ConfigError:
  fix = "give names as in 'n1,rack[1-2]n[01-04]'"
  return ConfigError(f"node list {quoted(text)}: {problem}; {fix}")
