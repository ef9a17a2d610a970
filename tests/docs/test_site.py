"""The site has every setting, command, exit code and variable of the program.

Its pages are compared with what the program prints. `make docs` builds it, and fails
where a link inside is broken or a page is in no table of contents.
"""

import re
import runpy

import pytest

from jaxscale import cli, errors
from jaxscale.config.help import entries
from support.paths import ROOT

REFERENCE = ROOT / "docs" / "reference"


@pytest.fixture(scope="module")
def generate():
  return runpy.run_path(str(ROOT / "docs" / "generate.py"))


def page(generate, name):
  """Return a page of the reference as Sphinx gets it."""
  return generate["fill"]((REFERENCE / f"{name}.md").read_text())


def test_every_setting_of_every_class_is_there(generate):
  """Expect each as often as `train --help=all` has it: `lr` once per optimizer."""
  names = [e.path for e in entries(None) if e.path]
  on_page = re.findall(r"^`+\{option\} --config\.(.+)$", page(generate, "settings"), re.M)
  branches = {name for name in names if any(n.startswith(f"{name}.") for n in names)}
  wanted = sorted(n for n in names if n not in branches)
  assert sorted(n for n in on_page if n not in branches) == wanted
  assert len(wanted) > 200


def test_the_alternatives_and_what_they_are_for_are_there(generate):
  text = page(generate, "settings")
  for entry in entries(None):
    if not entry.path and "log." not in entry.topic:
      parts = entry.topic.split(".")  # a field and the class in it, in turns
      field, name = ".".join(parts[::2]), parts[-1]
      heading = f"### {field}={name}\n" if len(parts) > 1 else f"## {field}\n"
      assert heading in text, heading
  assert "BatchNorm statistics" in text and "][arXiv" not in text


def test_links_lead_to_files():
  """Expect no link to a folder: a code host shows one, the site cannot."""
  pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "CHANGELOG.md"]
  links = [(p, x) for p in pages for x in re.findall(r"\]\((?!\w+:|#)([^)\s#]+)", p.read_text())]
  assert len(links) > 100
  assert not [(p.name, x) for p, x in links if not (p.parent / x).is_file()]


def test_every_option_of_every_command_is_there(generate):
  sections = dict(
    re.findall(r"^### jaxscale (\S+)\n(.*?)(?=^##|\Z)", page(generate, "commands"), re.M | re.S)
  )
  assert sections.keys() == cli.COMMANDS.keys()
  for name, section in sections.items():
    _, parser = cli.load(name)
    printed = re.findall(r"^ +(?:-\w[ \w.:|]*, )?(--[\w.-]+)", parser.format_help(), re.M)
    there = re.findall(r"^`+\{option\} (?:-\w[^,]*, )?(--[\w.-]+)", section, re.M)
    assert {*printed} - {"--help"} == {*there}, name


def test_every_package_with_public_names_has_a_page():
  packages = {path.parent.name for path in (ROOT / "jaxscale").rglob("__init__.pyi")}
  pages = {path.stem for path in (REFERENCE / "api").glob("*.md")}
  assert packages - {"cli"} | {"config", "jobs", "cluster", "index"} == pages


def test_public_names_are_there_with_their_arguments(generate):
  text = page(generate, "api/jaxscale") + page(generate, "api/optim")
  for name in ("jaxscale.fit(config", "jaxscale.evaluate(", "jaxscale.optim.lars("):
    assert name in text
  assert "<function" not in text and "ForwardRef" not in text


def test_every_exit_code_is_there():
  codes = {v for n, v in vars(errors).items() if re.fullmatch("EXIT_(?!OF_)[A-Z_]+", n)}
  table = re.findall(r"^\| (\d+) \|", (REFERENCE / "exit_codes.md").read_text(), re.M)
  assert codes <= {int(code) for code in table} and len(codes) == 7


def test_every_variable_of_ours_is_there():
  sources = [path.read_text() for path in (ROOT / "jaxscale").rglob("*.py")]
  names = {n for text in sources for n in re.findall(r"\bJAXSCALE_[A-Z_]*[A-Z]\b", text)}
  named = {*re.findall(r"JAXSCALE_[A-Z_]+", (REFERENCE / "environment.md").read_text())}
  assert names == named and len(names) >= 6


def test_every_config_is_a_recipe(generate):
  text = generate["recipes"]()
  for path in (ROOT / "configs").glob("*.py"):
    assert f"## configs/{path.name}\n" in text


def test_settings_that_how_to_pages_name_exist():
  names = {e.path for e in entries(None)}
  branches = "|".join({name.partition(".")[0] for name in names if "." in name})
  for path in sorted((ROOT / "docs" / "howto").glob("*.md")):
    named = re.findall(rf"[` .]((?:{branches})\.[a-z_]+)(?:=|`)", path.read_text())
    assert {*named} - {"metrics.jsonl"} <= names, path.name  # a file of a run


def test_the_pictures_are_those_that_the_script_draws():
  pictures = ROOT / "docs" / "pictures"
  drawn = runpy.run_path(str(pictures / "draw.py"))["PICTURES"]
  assert sorted(drawn) == sorted(path.stem for path in pictures.glob("*.svg"))
  for name, draw in drawn.items():
    assert draw().svg() == (pictures / f"{name}.svg").read_text(), name
