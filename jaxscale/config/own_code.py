"""Identity of the user's code: hashes of the definitions that a config's classes use.

A hash covers the syntax trees, without comments, docstrings and positions, of all
definitions that a class or function reaches by name, through every module that is not
installed. A config file therefore counts by the classes that it defines, not by the
settings in `get_config`.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import inspect
import linecache
import os
import re
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxscale.config.config_file import FILE_MODULE

BYTECODE = "bytecode-"  # prefix of hashes of code whose source is not available
_INSTALLED = "site-packages", "dist-packages"
_STDLIB = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))
_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda
_PLAIN = bool, int, float, complex, str, bytes, type(None)
_IMPORTS = ast.Import, ast.ImportFrom
# Statements with inner statements, which can change names that they do not bind.
_BLOCKS = ast.For, ast.While, ast.If, ast.With, ast.Try, ast.TryStar, ast.Match


class OwnCode(NamedTuple):
  """The user's code that a config uses.

  Attributes:
    hashes: the hash of each definition, by `module:name`.
    files: the file of each module that is read from one, and of those that these import.
  """

  hashes: dict[str, str]
  files: dict[str, Path]


def module_name(name: str) -> str:
  """Return the name of a module; for a config file, the name of the file."""
  return re.sub(rf"^{FILE_MODULE}\w{{12}}_", "", name)


def is_own(module: str | None) -> bool:
  """Return whether a module is the user's: neither part of jaxscale nor installed."""
  file = getattr(sys.modules.get(str(module)), "__file__", None)
  return (file is None and module == "__main__") or (file is not None and _is_own_file(file))


def _is_own_file(file: str) -> bool:
  is_installed = any(part in _INSTALLED for part in Path(file).parts)
  return not (is_installed or file.startswith((*_STDLIB, _PACKAGE)))


def own_code(roots: Iterable[Any]) -> OwnCode:
  """Return the user's definitions that classes and functions reach by name."""
  search = _Search()
  for root in roots:
    search.visit(root.__module__, root.__qualname__, root)
    search.follow()
  hashes = dict(sorted(search.hashes.items()))
  search.find_imported()
  return OwnCode(hashes, search.files)


def source_hash(function: Any) -> str:
  """Hash the syntax tree of one function or class; without source, the bytecode."""
  function = inspect.unwrap(function)
  return _digest(map(_dump, _nodes_of(function))) or _bytecode_hash(function)


def _digest(texts: Iterable[str]) -> str:
  text = "\n".join(texts)
  return hashlib.sha256(text.encode()).hexdigest()[:16] if text else ""


def _bytecode_hash(value: Any) -> str:
  """Hash the bytecode of code without source, such as a program read from stdin.

  The result begins with `BYTECODE`. A class of a notebook without functions of its own has no
  source either; its plain values count.
  """
  texts = [f"{code.co_code.hex()} {code.co_names} {_constants(code)}" for code in _codes(value)]
  members = vars(value).items() if isinstance(value, type) else ()
  plain = [f"{n}={v!r}" for n, v in members if n[:2] != "__" and _is_plain(v)]
  defaults = [d for f in _functions(value) for d in (f.__defaults__, f.__kwdefaults__)]
  plain += [repr(d) for d in defaults if d and _is_plain(d)]
  return BYTECODE * bool(texts) + (_digest([*texts, *plain]) or "none")


def _codes(value: Any) -> list[types.CodeType]:
  """Return the code of a function, or of a class's functions, with that of inner functions."""
  codes = [f.__code__ for f in _functions(value)]
  for code in codes:  # It grows while it is read.
    codes += [c for c in code.co_consts if isinstance(c, types.CodeType)]
  return codes


def _functions(value: Any) -> list[Any]:
  """Return a function, or the functions that the user wrote in a class, without decorators."""
  members = vars(value).values() if isinstance(value, type) else [value]
  functions = [inspect.unwrap(getattr(m, "fget", m)) for m in members]
  return [f for f in functions if _is_written(f)]


def _is_written(value: Any) -> bool:
  """Return whether a value is a function of the user, which `dataclass` or Flax has not added."""
  code, module = getattr(value, "__code__", None), getattr(value, "__module__", None)
  return code is not None and is_own(module) and not code.co_qualname.startswith("__create_fn__")


def _constants(code: types.CodeType) -> list[str]:
  constants = [c for c in code.co_consts if not isinstance(c, types.CodeType)]
  # The order of a set of texts differs between processes.
  return [str(sorted(map(repr, c))) if isinstance(c, frozenset) else repr(c) for c in constants]


def _dump(node: Any) -> str:
  """Write out a syntax tree so that the text is equal in every version of Python.

  Docstrings and the order of methods do not count. Fields that only later versions have are
  empty and left out.
  """
  if isinstance(node, list):
    return f"[{', '.join(map(_dump, node))}]"
  if not isinstance(node, ast.AST):
    return repr(node)
  fields: dict[str, Any] = dict(ast.iter_fields(node))
  if isinstance(body := fields.get("body"), list):
    fields["body"] = [n for n in body if not _is_text(n)] or [ast.Pass()]
  if isinstance(node, ast.ClassDef):
    fields["body"].sort(key=lambda n: n.name if isinstance(n, _FUNCTIONS[:2]) else "")
  if isinstance(node, ast.JoinedStr):  # Python 3.12 adds "" to some formats.
    fields["values"] = [v for v in node.values if getattr(v, "value", None) != ""]
  shown = [f"{n}={_dump(v)}" for n, v in fields.items() if v is not None and v != []]
  return f"{type(node).__name__}({', '.join(shown)})"


def _is_text(node: ast.AST) -> bool:
  return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _parse(text: str | bytes) -> ast.Module | None:
  try:
    return ast.parse(text)
  except (SyntaxError, ValueError):
    return None


@functools.lru_cache(maxsize=256)
def _parse_file(file: str, size: int, changed_ns: int) -> ast.Module | None:
  del size, changed_ns  # Part of the cache key, so that a changed file is read again.
  return _parse(Path(file).read_bytes())  # As bytes: `ast.parse` detects the encoding.


def _tree_of(file: str) -> ast.Module | None:
  """Return the syntax tree of a file or of a notebook cell."""
  try:
    stat = Path(file).stat()
    return _parse_file(file, stat.st_size, stat.st_mtime_ns)
  except (OSError, ValueError):
    return _parse("".join(linecache.getlines(file)))


def _nodes_of(value: Any) -> list[ast.AST]:
  """Return the definitions of a class or function in its file or cell."""
  codes = [f.__code__ for f in _functions(value) if f.__module__ == value.__module__]
  for code in codes:
    if (tree := _tree_of(code.co_filename)) is None:
      continue
    if isinstance(value, type):
      classes = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
      line = code.co_firstlineno  # Two functions can define classes of equal names.
      classes = [n for n in classes if n.lineno <= line <= (n.end_lineno or 0)]
      classes = [n for n in classes if n.name == value.__name__][-1:]
    else:
      classes = [n for n in ast.walk(tree) if isinstance(n, _FUNCTIONS)]
      classes = [n for n in classes if _is_at(n, code)]
    if classes:
      return list(classes)
  return []


def _is_at(node: Any, code: types.CodeType) -> bool:
  """Return whether a function node belongs to a code object; one line can have several."""
  decorators = getattr(node, "decorator_list", ())
  if min(n.lineno for n in (node, *decorators)) != code.co_firstlineno:
    return False
  start, end = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
  positions = [(p[0], p[2]) for p in code.co_positions() if None not in p and p[3]]
  is_lambda = isinstance(node, ast.Lambda)
  return not is_lambda or all(start <= position < end for position in positions)


def _bound(node: ast.AST) -> set[str]:
  """Return the names that a statement of a module binds, those inside `if` included."""
  if isinstance(node, (ast.ClassDef, *_FUNCTIONS[:2])):
    return {node.name}
  if isinstance(node, _IMPORTS):
    return {a.asname or a.name.partition(".")[0] for a in node.names}
  if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
    return {node.id}
  return set().union(*map(_bound, ast.iter_child_nodes(node)))


def _imports(nodes: Iterable[ast.AST]) -> Iterator[tuple[Any, ast.alias]]:
  """Yield the import statements inside statements, with each module or name they import."""
  for part in (part for node in nodes for part in ast.walk(node)):
    for alias in part.names if isinstance(part, _IMPORTS) else ():
      yield part, alias


def _used(node: ast.AST) -> tuple[set[str], set[str]]:
  """Return the names and the attributes that occur in a statement."""
  nodes = list(ast.walk(node))
  names = {n.id for n in nodes if isinstance(n, ast.Name)}
  return names, {n.attr for n in nodes if isinstance(n, ast.Attribute)}


def _changed(node: ast.AST, ours: set[str]) -> set[str]:
  """Return the names that a statement can change.

  A call changes neither its function nor what it passes to jaxscale: a script may repeat
  `fit(Config(model=Net(), epochs=4), "runs/x")` with more epochs.

  Args:
    node: the statement, or a part of it.
    ours: the names that the module imports from jaxscale.
  """
  if isinstance(node, ast.Name):
    return {node.id}
  parts = [*ast.iter_child_nodes(node)]
  if isinstance(node, ast.Call):
    is_ours = _used(node.func)[0] & ours
    parts = [] if is_ours else [*ast.iter_child_nodes(node.func), *node.args, *node.keywords]
  return set().union(*(_changed(part, ours) for part in parts))


@functools.lru_cache(maxsize=256)
def _statements(tree: ast.Module | None) -> tuple[dict[str, list[Any]], list[Any]]:
  """Return the statements of a module, without `if __name__ == "__main__":`.

  Returns:
    Two results: the statements that bind a name, by name; and the statements that can
    change what others bind, each with the names that it can change.
  """
  binding: dict[str, list[Any]] = {}
  changing: list[Any] = []
  nodes = [] if tree is None else tree.body
  imports = [n for n in nodes if isinstance(n, _IMPORTS)]
  imports = [n for n in imports if re.match(r"(from|import) jaxscale\b", ast.unparse(n))]
  ours: set[str] = set().union(*map(_bound, imports))
  for node in nodes:
    if not (isinstance(node, ast.If) and "__name__" in _used(node.test)[0]):
      for name in (bound := _bound(node)):
        binding.setdefault(name, []).append(node)
      if isinstance(node, _BLOCKS) or not bound:
        changing.append((node, _changed(node, ours)))
  return binding, changing


class _Search:
  """Search that follows definitions by the names that they use."""

  def __init__(self) -> None:
    self.hashes: dict[str, str] = {}
    self.files: dict[str, Path] = {}
    self._seen: set[str] = set()
    self._used: dict[str, set[str]] = {}  # Attributes that are used, by module.
    # Used names that are still to be visited. A loop visits them, because modules can import
    # each other and chains of definitions can exceed Python's recursion limit.
    self._waiting: list[tuple[str, str, set[str]]] = []

  def visit(self, module: str, name: str, value: Any = None) -> None:
    """Add a definition and everything that it uses.

    Args:
      module: the module of the definition.
      name: the qualified name.
      value: the class or function, if it is known.
    """
    key = f"{module_name(module)}:{name}"
    if key in self._seen:
      return
    self._seen.add(key)
    file = self._file_of(module)
    if file is None:
      self._visit_cell(module, name, value, key)
      return
    if file.suffix != ".py":
      self.hashes[key] = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
      return
    binding, changing = _statements(_tree_of(str(file)))
    if "<locals>" in name and value is not None:
      nodes = _nodes_of(value)
      self._visit_closure(value)
    else:
      nodes = [*binding.get(name.partition(".")[0], ())]
      if len(nodes) > 1 or any(isinstance(n, _BLOCKS) for n in nodes):
        # A script can define a class again between two runs: the current one counts twice.
        nodes += _nodes_of(getattr(sys.modules.get(module), name, value))
    # Statements such as `Net.scale = 2` or `setattr(Net, "scale", 2)` change the definition.
    nodes += [n for n, names in changing if n not in nodes and name in names]
    self._add(module, key, nodes, name)
    made = getattr(sys.modules.get(module), name, value)
    if not nodes and isinstance(made, (type, types.FunctionType)) and made.__module__ == module:
      self._add_value(made, key)  # `exec` of a text has defined it.
    for star in [] if nodes else binding.get("*", ()):
      self._visit_import(module, star, ast.alias("*"), {name})

  def _add(self, module: str, key: str, nodes: list[Any], name: str) -> None:
    """Hash the statements that define a name, and visit what they use."""
    texts = []
    for node in nodes:
      if isinstance(node, _IMPORTS):
        aliases = [a for a in node.names if name in (a.asname, a.name.split(".")[0])]
        texts += [f"{getattr(node, 'module', '')} {a.name}" for a in aliases]
        continue
      texts.append(_dump(node))
      names, attributes = _used(node)
      self._used.setdefault(module, set()).update(attributes)
      for statement, alias in _imports([node]):
        self._visit_import(module, statement, alias, attributes)
      for used in names - {name}:
        self._visit_name(module, used, attributes)
    if texts:  # Other names are builtins, parameters or local names.
      self.hashes[key] = _digest(texts)

  def _visit_name(self, module: str, name: str, attributes: set[str]) -> None:
    """Queue a name that a module uses, with the attributes used of it."""
    if (key := f"{module} {name} {sorted(attributes)}") not in self._seen:
      self._seen.add(key)
      self._waiting.append((module, name, attributes))

  def follow(self) -> None:
    """Visit all queued names; an imported name is visited in the module that defines it."""
    while self._waiting:
      self._follow(*self._waiting.pop())

  def find_imported(self) -> None:
    """Find the files that the files so far import when they are loaded; ends the search.

    A copy of a config file needs them even if none of its classes uses them.
    """
    modules = [*self.files]
    for module in modules:  # It grows while it is read.
      for nodes in _statements(_tree_of(str(self.files[module])))[0].values():
        for node, alias in _imports(n for n in nodes if not isinstance(n, _FUNCTIONS)):
          self._visit_import(module, node, alias, set())
      modules += [*self.files][len(modules) :]

  def _follow(self, module: str, name: str, attributes: set[str]) -> None:
    file = self._file_of(module)
    tree = None if file is None or file.suffix != ".py" else _tree_of(str(file))
    for node, alias in _imports(_statements(tree)[0].get(name, ())):
      if name == (alias.asname or alias.name.partition(".")[0]):
        self._visit_import(module, node, alias, attributes)
    value = getattr(sys.modules.get(module), name, None)
    if isinstance(value, types.ModuleType):  # `importlib.import_module` binds modules, too.
      self._visit_module(value.__name__, attributes)
    self.visit(module, name)

  def _visit_import(self, module: str, node: Any, alias: ast.alias, attributes: set[str]) -> None:
    """Visit the names that are used from another module of the user."""
    base = getattr(node, "module", None) or ""
    if level := getattr(node, "level", 0):
      package = module_name(module).split(".")
      file = self._file_of(module)
      is_package = file is not None and file.stem == "__init__"
      base = ".".join([*package[: len(package) - level + is_package], base]).strip(".")
    if isinstance(node, ast.Import):
      parts = alias.name.split(".")
      for n in range(1, len(parts) + 1):
        self._visit_module(".".join(parts[:n]), attributes)
    elif alias.name == "*":
      self._visit_module(base, attributes)
    elif self._file_of(submodule := f"{base}.{alias.name}".strip(".")) is not None:
      self._visit_module(submodule, attributes)
    elif self._file_of(base) is not None:
      self._visit_name(base, alias.name, attributes)

  def _visit_module(self, module: str, names: set[str]) -> None:
    file = self._file_of(module)
    if file is None:
      return
    tree = _tree_of(str(file)) if file.suffix == ".py" else None
    if tree is None:
      self.visit(module, "*")
      return
    binding, _ = _statements(tree)
    for name in sorted(names & binding.keys()):
      self._visit_name(module, name, names)
    left, key = names - binding.keys(), f"{module}:* {sorted(names)}"
    if key not in self._seen:
      self._seen.add(key)
      for star in binding.get("*", ()):
        self._visit_import(module, star, ast.alias("*"), left)

  def _file_of(self, module: str) -> Path | None:
    """Return the file of a user's module, imported or not; None for other modules."""
    if module_name(module) in self.files:
      return self.files[module_name(module)]
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None and module not in sys.modules and module:
      path = module.replace(".", "/")
      folders = [f.parent for f in self.files.values()] + [Path(p) for p in sys.path]
      ends = f"{path}.py", f"{path}/__init__.py"
      candidates = (folder / end for folder in folders for end in ends)
      file = next((str(p) for p in candidates if p.is_file()), None)
    if file is None or not Path(file).is_file() or not _is_own_file(file):
      return None
    self.files[module_name(module)] = Path(file)
    return Path(file)

  def _visit_closure(self, value: Any) -> None:
    """Visit the variables that functions of a local class or function close over."""
    inner = vars(value).values() if isinstance(value, type) else [value]
    for function in filter(_is_written, inner):
      free = function.__code__.co_freevars
      for name, cell in zip(free, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # The variable is not bound yet.
          key = f"{module_name(value.__module__)}:{value.__qualname__}.{name}"
          self._visit_value(cell.cell_contents, key)

  def _visit_cell(self, module: str, name: str, value: Any, key: str) -> None:
    """Add a definition of a module without a file: a notebook's, from any cell."""
    space = vars(sys.modules[module]) if module in sys.modules else {}
    value = space.get(name) if value is None else value
    if value is not None or name in space:
      self._visit_value(value, key)

  def _visit_value(self, value: Any, key: str) -> None:
    """Add an object of a module without a file, or of a closure."""
    module, name = getattr(value, "__module__", None), getattr(value, "__name__", None)
    if isinstance(value, types.ModuleType):
      self.hashes[key] = value.__name__
      if is_own(value.__name__):
        self._visit_module(value.__name__, set().union(*self._used.values()))
    elif isinstance(value, type) or inspect.isroutine(value) or name:
      if not is_own(module) or name is None:
        self.hashes[key] = f"{module}:{name}"
        return
      qualified = f"{module_name(str(module))}:{value.__qualname__}"
      if self._file_of(str(module)) is not None:
        self.visit(str(module), value.__qualname__, value)
      elif qualified not in self.hashes:
        self._add_value(value, qualified)
    elif _is_plain(value):
      self.hashes[key] = _digest([repr(value)])

  def _add_value(self, value: Any, key: str) -> None:
    """Hash a class or function that no file defines, and visit what it uses."""
    self.hashes[key] = source_hash(value)
    self._visit_closure(value)
    for base in getattr(value, "__bases__", ()):
      if is_own(base.__module__):
        self._visit_value(base, base.__qualname__)
    found = [_used(node) for node in _nodes_of(inspect.unwrap(value))]
    # Without source, the bytecode has the names of both kinds.
    found = found or [({*code.co_names}, {*code.co_names}) for code in _codes(value)]
    for names, attributes in found:
      self._used.setdefault(value.__module__, set()).update(attributes)
      for used in sorted(names - {value.__name__}):
        self.visit(value.__module__, used)


def _is_plain(value: Any) -> bool:
  if isinstance(value, dict):
    return all(map(_is_plain, [*value, *value.values()]))
  if isinstance(value, (tuple, list)):
    return all(map(_is_plain, value))
  return isinstance(value, _PLAIN)
