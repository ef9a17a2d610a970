#!/usr/bin/env python3
"""Print lines of code by package, and fail above the limits of pyproject.toml.

A line of code is neither blank, nor a comment, nor part of a docstring, as the
formatter leaves it. `[tool.jaxscale]` in pyproject.toml has the limits:
`max_code_lines` of the package and `max_function_lines` of a function.
"""

import ast
import collections
import pathlib
import sys
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCUMENTED = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef


def code_lines(source: str, tree: ast.Module) -> set[int]:
  """Return the numbers of the lines with code."""
  docstrings = set()
  for node in ast.walk(tree):
    if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
      docstrings |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
  lines = enumerate(source.splitlines(), 1)
  code = {n for n, x in lines if x.strip() and not x.strip().startswith("#")}
  return code - docstrings


def measure(package: pathlib.Path) -> tuple[collections.Counter, dict[str, int]]:
  """Return lines of code by subpackage, and by function as `path:name`."""
  packages, functions = collections.Counter(), {}
  for path in sorted(package.rglob("*.py")):
    source, name = path.read_text(), path.relative_to(package.parent)
    tree = ast.parse(source)
    lines = code_lines(source, tree)
    packages[name.parts[1] if len(name.parts) > 2 else "(root)"] += len(lines)
    for node in ast.walk(tree):
      if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        length = len(lines & set(range(node.lineno, node.end_lineno + 1)))
        key = f"{name}:{node.name}"
        functions[key] = max(length, functions.get(key, 0))
  return packages, functions


def main() -> int:
  """Print the table and the errors; return the exit code."""
  limits = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["jaxscale"]
  packages, functions = measure(ROOT / "jaxscale")
  for name, count in sorted(packages.items(), key=lambda item: item[1]):
    print(f"{name:12}{count:8,}")
  total, most = packages.total(), limits["max_code_lines"]
  print(f"{'total':12}{total:8,} lines of code of at most {most:,}")
  errors = []
  if total > most:
    errors.append(f"{total:,} lines of code; remove {total - most:,}")
  longest = limits["max_function_lines"]
  for name, length in functions.items():
    if length > longest:
      errors.append(f"{name} has {length} lines of code; split it ({longest} at most)")
  for error in errors:
    print(f"error: {error}", file=sys.stderr)
  return 1 if errors else 0


if __name__ == "__main__":
  sys.exit(main())
