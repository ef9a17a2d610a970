"""What a diagnosis finds, one line each, and how it is printed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxscale.cluster.rendezvous.handshake import ranks_with_hosts
from jaxscale.errors import EXIT_DONE, EXIT_USER

EXIT_NOT_READY = EXIT_USER
Found = Sequence[dict[str, Any]]  # what each process found, by rank


class Finding(NamedTuple):
  """One line of a diagnosis.

  Attributes:
    ok: whether it is as it should be.
    text: what was found.
    remedy: what to do about it, if it is not ok.
  """

  ok: bool
  text: str
  remedy: str = ""


def report(name: str, findings: Sequence[Finding]) -> int:
  """Print one line per finding, then each remedy once; returns the exit code.

  Example:
    >>> report("clocks", [Finding(False, "n2 is 4 s ahead", "start chronyd on n2")])
    not   n2 is 4 s ahead
    next  start chronyd on n2
    2
  """
  for finding in findings:
    print(("ok    " if finding.ok else "not   ") + finding.text)
  wrong = [f for f in findings if not f.ok]
  for remedy in dict.fromkeys(f.remedy for f in wrong):
    print(f"next  {remedy}")
  if not wrong:
    print(f"{name}: ready")
  return EXIT_NOT_READY if wrong else EXIT_DONE


def texts_by_process(found: Found, hosts: Sequence[str], key: str) -> list[tuple[str, str]]:
  """Return each different text under `key`, and the processes that have it.

  Example:
    >>> texts_by_process([{}, {"error": "no GPU"}], ["n1", "n2"], "error")
    [('process 1 (n2): ', 'no GPU')]
  """
  ranks: dict[str, list[int]] = {}
  for rank, each in enumerate(found):
    if key in each:
      ranks.setdefault(each[key], []).append(rank)
  is_alone = len(found) == 1
  return [("" if is_alone else f"{ranks_with_hosts(ranks[text], hosts)}: ", text) for text in ranks]


def outliers(values: Mapping[int, Any]) -> tuple[Any, dict[Any, list[int]]]:
  """The most frequent value, and the keys of each other value.

  Example:
    >>> outliers({0: "0.10", 1: "0.9", 2: "0.10"})
    ('0.10', {'0.9': [1]})
  """
  keys: dict[Any, list[int]] = {}
  for key, value in values.items():
    keys.setdefault(value, []).append(key)
  usual = max(keys, key=lambda value: len(keys[value]))
  return usual, {value: keys[value] for value in sorted(keys) if value != usual}
