"""docs/architecture.md and CONTRIBUTING.md name files and packages that exist."""

import re

import pytest

from support.paths import ROOT

PAGES = ["docs/architecture.md", "CONTRIBUTING.md"]
CODE = ROOT / "jaxscale"


def text(page):
  return (ROOT / page).read_text()


@pytest.mark.parametrize("page", PAGES)
def test_files_exist(page):
  prose = re.sub(r"```.*?```", "", text(page), flags=re.S)
  named = re.findall(r"`([\w./]+(?:/|\.py|\.toml|\.md))`", prose)
  # What a run writes, and patterns, are not files of ours.
  made = {"tensorboard/", "checkpoints/", "compiled/", "lock/", "faults/", "code/"}
  made |= {"profile/", "hlo/", "settings.py"}
  inside = {"detect/", "rendezvous/", "watch/", "layout.py", "phases.py"}
  missing = [
    name
    for name in {*named} - made - inside
    if not (ROOT / name).exists() and not (CODE / name).exists()
  ]
  assert len(named) > 10 and missing == []


def test_every_package_is_in_the_table():
  table = set(re.findall(r"^\| `(\w+)/` \|", text("docs/architecture.md"), re.M))
  packages = {path.parent.name for path in CODE.glob("*/__init__.py")}
  assert table == packages
