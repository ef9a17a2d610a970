"""What jaxscale is built with and of: pins, licences, how to report a fault."""

import re
import runpy
import tomllib

import pytest

from support.paths import ROOT

MAKEFILE = (ROOT / "Makefile").read_text()


def test_tools_that_build_are_pinned():
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())
  (backend,) = project["build-system"]["requires"]
  for pins in (ROOT / "requirements").glob("py*.txt"):  # the one that tests build with
    assert f"{backend} \\" in pins.read_text().splitlines(), pins
  for tool in ("uv", "pip-audit"):
    assert re.search(rf"pip install --quiet {tool}==[\d.]+$", MAKEFILE, re.M), tool


def test_every_pin_has_a_hash_and_none_names_an_index():
  for pins in (ROOT / "requirements").glob("py*.txt"):
    for entry in re.split(r"\n(?! )", pins.read_text().strip()):
      head, *hashes = entry.split(" \\\n")
      assert re.fullmatch(r"[\w.-]+==[\w.]+( ; .+)?", head), (pins, head)
      assert hashes and all(re.fullmatch(r" +--hash=sha256:\w{64}", x) for x in hashes)
  assert "--require-hashes -r $(PINS)" in MAKEFILE


def test_every_package_has_a_licence_that_may_be_used_with_ours(capsys):
  script = runpy.run_path(str(ROOT / "requirements" / "licences.py"))
  script["main"]()
  lines = dict(
    re.split(r" {2,}", x, maxsplit=1) for x in capsys.readouterr().out.splitlines()
  )
  assert lines["jaxscale"] == "Apache-2.0" and len(lines) > 30
  assert "unknown" not in " ".join(lines.values())
  # LGPL and MPL may be linked with; GPL and AGPL alone would bind who passes it on.
  bound = {n: x for n, x in lines.items() if re.search(r"(?<!L)GPL(?!.* or )", x)}
  assert not bound, bound


@pytest.mark.parametrize("target", ["licences", "audit", "lock"])
def test_security_md_names_targets_that_are_there(target):
  assert f"`make {target}`" in (ROOT / "SECURITY.md").read_text()
  assert re.search(rf"^{target}:", MAKEFILE, re.M)
