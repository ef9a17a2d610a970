"""Circles of imports, and the size of the root: what no contract of imports checks."""

import graphlib

import grimp

from support.paths import ROOT


def test_no_module_imports_its_own_importer():
  """Over any number of modules, within a package, a function or for types alone."""
  graph = grimp.build_graph("jaxscale", cache_dir=None)
  imports = {m: graph.find_modules_directly_imported_by(m) - {m} for m in graph.modules}
  graphlib.TopologicalSorter(imports).prepare()  # CycleError shows a circle


def test_the_root_has_few_modules():
  assert len(list((ROOT / "jaxscale").glob("*.py"))) <= 8
