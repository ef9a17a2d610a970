"""What a diagnosis finds, and how it is said: lines that are so, or are not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from jaxscale.errors import EXIT_DONE, EXIT_USER

EXIT_READY, EXIT_NOT_READY = EXIT_DONE, EXIT_USER


class Finding(NamedTuple):
  """One line of a diagnosis.

  Attributes:
    ok: whether it is as it should be.
    text: what is there.
    remedy: what to do about it, if it is not.
  """

  ok: bool
  text: str
  remedy: str = ""


def report(name: str, findings: Iterable[Finding]) -> int:
  """Print a line a finding, then every remedy once, and return the exit code.

  Example:
    >>> report("clocks", [Finding(False, "n2 is 4 s ahead", "start chronyd on n2")])
    not   n2 is 4 s ahead
    next  start chronyd on n2
    2
  """
  findings = list(findings)
  for finding in findings:
    print(("ok    " if finding.ok else "not   ") + finding.text)
  wrong = [f for f in findings if not f.ok]
  for remedy in dict.fromkeys(f.remedy for f in wrong):  # each once, in their order
    print(f"next  {remedy}")
  if not wrong:
    print(f"{name}: ready")
  return EXIT_NOT_READY if wrong else EXIT_READY


def bytes_text(number: float) -> str:
  """A number of bytes for people, in decimal units.

  Example:
    >>> bytes_text(2.5e9), bytes_text(1e6)
    ('2.5 GB', '1.0 MB')
  """
  return f"{number / 1e9:,.1f} GB" if number >= 1e8 else f"{number / 1e6:,.1f} MB"
