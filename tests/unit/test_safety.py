"""The code never executes what others wrote."""

import ast

import pytest

from support.paths import ROOT

# What makes a program of data. `A config is one, of its user (docs/security.md).
MODULES = {"pickle", "cloudpickle", "dill", "shelve", "marshal", "yaml", "joblib"}
CALLS = {"eval", "exec", "os.system", "os.popen", "subprocess.getoutput"}
# Its own text, of a Config that is in memory: whether it can be written to a file.
ALLOWED = {("jaxscale/jobs/job_handle.py", "exec")}


def places(tree):
  """(line, what) of each import, call and keyword that is not to be."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Import | ast.ImportFrom):
      names = [alias.name for alias in node.names]
      names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
      yield from ((node.lineno, n) for n in names if n.split(".")[0] in MODULES)
    if isinstance(node, ast.Call):
      name = ast.unparse(node.func)
      if name in CALLS:
        yield node.lineno, name
      for keyword in node.keywords:
        value = ast.unparse(keyword.value)
        if (keyword.arg, value) in (("shell", "True"), ("allow_pickle", "True")):
          yield node.lineno, f"{keyword.arg}={value}"


def test_nothing_that_was_read_is_executed():
  paths = {str(p.relative_to(ROOT)): p for p in (ROOT / "jaxscale").rglob("*.py")}
  trees = {name: ast.parse(path.read_text()) for name, path in paths.items()}
  found = {(name, what) for name, tree in trees.items() for _, what in places(tree)}
  assert found <= ALLOWED, found - ALLOWED


BAD = ["import pickle", "from yaml import load", "eval('1')", "load(f, allow_pickle=True)"]
BAD += ["subprocess.run(x, shell=True)", "import numpy.x as y, joblib"]


@pytest.mark.parametrize("line", BAD)
def test_the_search_finds_what_it_looks_for(line):
  assert list(places(ast.parse(line)))
