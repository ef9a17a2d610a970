"""Pages name files, functions and tests that exist."""

import re

import pytest

from support.paths import ROOT

PAGES = ["docs/architecture.md", "docs/adding.md", "CONTRIBUTING.md", "AGENTS.md"]
CODE = ROOT / "jaxscale"


def text(page):
  return (ROOT / page).read_text()


@pytest.mark.parametrize("page", PAGES)
def test_files_exist(page):
  prose = re.sub(r"```.*?```", "", text(page), flags=re.S)
  named = re.findall(r"`([\w./]+(?:/|\.py|\.toml|\.md))`", prose)
  # What a run writes, and patterns, are not files of ours.
  made = {"tensorboard/", "checkpoints/", "compiled/", "lock/", "faults/", "code/"}
  made |= {"profile/"}
  inside = {"detect/", "rendezvous/", "schedulers/", "watch/", "settings.py"}
  missing = [
    name
    for name in {*named} - made - inside
    if not (ROOT / name).exists() and not (CODE / name).exists()
  ]
  assert len(named) >= 10 and missing == []


@pytest.mark.parametrize("page", PAGES)
def test_each_step_names_what_is_in_its_file(page):
  step = r"^\d\. `([\w/]+\.py)`: (.*?)(?=^\d\. |^$)"
  steps = re.findall(step, text(page), re.M | re.S)
  for file, says in steps:
    source = (CODE / file).read_text()
    for name in re.findall(r"`([A-Za-z_]\w*)`", says):
      assert re.search(rf"\b{name}\b", source), f"{file} has no {name}"
  assert steps or page != "docs/architecture.md"


def test_every_package_is_in_the_table():
  table = set(re.findall(r"^\| `(\w+)/` \|", text("docs/architecture.md"), re.M))
  packages = {path.parent.name for path in CODE.glob("*/__init__.py")}
  assert table == packages


def test_every_guarantee_names_tests_that_exist():
  _, *bullets = text("docs/guarantees.md").split("\n- ")
  for bullet in bullets:
    proofs = re.findall(r"`(tests/[\w/]+\.py)`:((?:,?\s+`test_\w+`)+)", bullet)
    assert proofs and len(proofs) == bullet.count("`tests/"), bullet
    for file, names in proofs:
      source = (ROOT / file).read_text()
      for name in re.findall(r"\w+", names):
        assert f"\ndef {name}(" in source, f"{file} has no {name}"
