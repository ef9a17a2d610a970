"""Pins and licences of the packages that jaxscale is built from."""

import re
import runpy
import tomllib

from support.paths import ROOT


def entries(path):
  """Return the entries of a file of pins, each with its hashes."""
  return re.split(r"\n(?! )", path.read_text().strip())


def test_every_pin_has_a_hash_and_none_names_an_index():
  for pins in (ROOT / "requirements").glob("*.txt"):
    for entry in entries(pins):
      head, *hashes = entry.split(" \\\n")
      assert re.fullmatch(r"[\w.-]+==[\w.]+( ; .+)?", head), (pins, head)
      assert hashes and all(re.fullmatch(r" +--hash=sha256:\w{64}", x) for x in hashes)


def test_tools_that_build_are_pinned():
  (backend,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
  for pins in (ROOT / "requirements").glob("*.txt"):  # the one that tests build with
    assert f"{backend} \\" in pins.read_text().splitlines(), pins
  # The release is built with the versions that are tested.
  tested = entries(ROOT / "requirements" / "py311.txt")
  for name in ("build", "py311-docs"):  # the release and the site: with what is tested
    pins = entries(ROOT / "requirements" / f"{name}.txt")
    assert name != "build" or {*pins} <= {*tested}
    assert len({*pins} & {*tested}) >= 6
  makefile = (ROOT / "Makefile").read_text()
  for tool in ("uv", "pip-audit"):
    assert re.search(rf"pip install --quiet {tool}==[\d.]+$", makefile, re.M), tool


def test_every_package_has_a_licence_that_may_be_used_with_ours(capsys):
  script = runpy.run_path(str(ROOT / "requirements" / "licences.py"))
  script["main"]()
  lines = dict(re.split(r" {2,}", x, maxsplit=1) for x in capsys.readouterr().out.splitlines())
  assert lines["jaxscale"] == "Apache-2.0" and len(lines) > 30
  assert "unknown" not in " ".join(lines.values())
  # LGPL and MPL may be linked with; GPL and AGPL alone would bind who passes it on.
  bound = {n: x for n, x in lines.items() if re.search(r"(?<!L)GPL(?!.* or )", x)}
  assert not bound, bound
