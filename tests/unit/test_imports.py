"""Circles of imports, and the size of the root: what no contract of imports checks."""

import grimp

from support.paths import ROOT


def cycles(imports: dict[str, set[str]]) -> list[list[str]]:
  """Strongly connected components of more than one module (Tarjan 1972)."""
  index, low, stack, found = {}, {}, [], []

  def visit(module):
    index[module] = low[module] = len(index)
    stack.append(module)
    for other in imports[module]:
      if other not in index:
        visit(other)
      if other in stack:
        low[module] = min(low[module], low[other])
    if low[module] == index[module]:
      at = stack.index(module)
      component = stack[at:]
      del stack[at:]
      if len(component) > 1:
        found.append(sorted(component))

  for module in imports:
    if module not in index:
      visit(module)
  return found


def test_cycles_are_found():
  imports = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": {"d"}, "e": {"a"}}
  assert cycles(imports) == [["b", "c"]]


def test_no_module_imports_its_own_importer():
  """Over any number of modules, within a package, a function or for types alone."""
  graph = grimp.build_graph("jaxscale", cache_dir=None)
  imports = {m: graph.find_modules_directly_imported_by(m) for m in graph.modules}
  assert cycles(imports) == []


def test_the_root_has_few_modules():
  assert len(list((ROOT / "jaxscale").glob("*.py"))) <= 6
