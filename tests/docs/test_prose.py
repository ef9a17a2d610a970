"""`.ci/prose.py` reports each kind of finding, with a line number and a remedy."""

import runpy
from types import SimpleNamespace

import pytest

from jaxscale.cli.parser import Parser
from support.paths import ROOT


@pytest.fixture
def prose():
  return runpy.run_path(str(ROOT / ".ci" / "prose.py"))


@pytest.mark.parametrize(
  ("check", "text", "lines"),
  [
    ("docstrings", '"""Whether it fits."""\ndef f():\n  """The same of g."""', [1, 3]),
    ("docstrings", '"""Assert a sum."""\nclass C:\n  """Whatever."""\nx = "Of y"', []),
    ("markdown", f"{'x' * 101}\n|{'x' * 159}\n|{'x' * 160}", [1, 3]),
    ("markdown", f"```\n{'x' * 101}\n```\n[a]: {'x' * 101}\n[a] {'x' * 101}", [5]),
    (
      "changelog",
      "### Changed\n\n- **Breaking:** a\n- b\n  c\n- **Breaking:** d\n\n### New",
      [5, 8],
    ),
    ("changelog", "### Fixed\n\n- a\n- **Breaking:** b\n\n### Added\n\n- **Breaking:** c", [4]),
  ],
)
def test_a_text_has_findings_on_these_lines(prose, check, text, lines):
  found = [*prose[check](text)]
  assert [number for number, _ in found] == lines
  assert all("; " in line and "\n" not in line for _, line in found)


def test_help_without_article_or_default_is_found(prose, monkeypatch):
  parser = Parser("x", "")
  parser.option("--good N", "the number", default=1)
  parser.option("--required N", "the number", missing="give it")
  parser.option("--bad N", "number of it")
  module = SimpleNamespace(__name__="jaxscale.cli.x")
  monkeypatch.setitem(prose["options_help"].__globals__, "load", lambda name: (module, parser))
  monkeypatch.setitem(prose["options_help"].__globals__, "COMMANDS", ["x"])
  article, default = prose["options_help"]()
  assert "cli/x.py: --bad: help 'number of it" in article and "article" in article
  assert "cli/x.py: --bad: help without a default" in default
