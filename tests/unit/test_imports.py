"""The structure of the package, as far as import-linter's contracts do not say it."""

import ast
import io
import tokenize

import grimp
import pytest

from support.paths import ROOT

FILES = sorted((ROOT / "jaxscale").rglob("*.py"))


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


def code_lines(source: str) -> set[int]:
  """Numbers of lines with code: neither blank, nor a comment, nor a docstring."""
  nothing = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT}
  nothing |= {tokenize.DEDENT, tokenize.ENDMARKER}
  found = set()
  for token in tokenize.generate_tokens(io.StringIO(source).readline):
    if token.type not in nothing:
      found |= set(range(token.start[0], token.end[0] + 1))
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
      assert node.end_lineno
      found -= set(range(node.lineno, node.end_lineno + 1))
  return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_functions_fit_a_screen(path):
  source = path.read_text()
  lines = code_lines(source)
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
      assert node.end_lineno
      own = lines & set(range(node.lineno, node.end_lineno + 1))
      assert len(own) <= 80, f"{node.name} has {len(own)} lines of code"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_is_left_to_do(path):
  assert not {"TODO", "FIXME"} & set(path.read_text().split())
