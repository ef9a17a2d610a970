"""Records in config.json of settings, and of the code behind them."""

import collections
import dataclasses
import decimal
import enum
import functools
import importlib
import json
import linecache
import os
import pathlib
import sys
import threading
import types
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest
from flax import nnx

from jaxscale import config as cfg
from jaxscale.config.config_file import load_file
from jaxscale.config.loading import load_config
from jaxscale.config.own_code import is_own, own_code
from jaxscale.config.plain import code_of, to_plain
from jaxscale.config.record import describe_run, from_plain
from jaxscale.run.identity import without_source
from support.configs import recorded, small_config
from support.errors import config_error
from support.tables import columns, words


class Holds(cfg.Data):
  """Data of any value."""

  value: Any = None
  sizes: tuple[int, ...] = (1, 2)
  path: pathlib.Path | None = None
  identity: str | None = None


class Colour(enum.Enum):
  RED, BLUE = 1, 2


Pair = collections.namedtuple("Pair", "a b")


class Prints:
  """An object of the user's own, without a form in JSON."""

  def __init__(self, **attributes):
    vars(self).update(attributes)


def config_of(**fields):
  return small_config(data=Holds(**fields))


def scaled(factor):
  return lambda x: factor * x


# Two values of each kind, which must not be recorded alike.
normal = jax.nn.initializers.normal
DIFFERENT = [
  (np.float32(0.1), np.float32(0.2)),
  (np.arange(3), np.arange(3) + 1),
  (np.zeros(3, "int32"), np.zeros(3, "float32")),
  (jax.numpy.arange(3), jax.numpy.arange(3) + 1),
  (decimal.Decimal("0.1"), decimal.Decimal("0.2")),
  (np.dtype("int8"), np.dtype("int16")),
  (lambda x=1: x, lambda x=2: x),
  (functools.partial(scaled, 1), functools.partial(scaled, 2)),
  (pathlib.Path("a").exists, pathlib.Path("b").exists),
  (Prints(_fingerprint="a"), Prints(_fingerprint="b")),
  (Prints(identity="a"), Prints(identity="b")),
]
DIFFERENT += [(pathlib.Path("a"), pathlib.Path("b")), ({1, 2}, {1, 3}), (b"a", b"b"), (1j, 2j)]
DIFFERENT += [((1, (2, 3)), (1, (2, 4))), (Pair(1, 2), Pair(1, 3)), ({1: 2}, {1: 3})]
DIFFERENT += [({"a": (1,)}, {"a": (2,)}), (Colour.RED, Colour.BLUE), (slice(1), slice(2))]
DIFFERENT += [(Prints, Colour), (jax.nn.relu, jax.nn.gelu), (normal(1), normal(2))]
DIFFERENT += [(scaled(1), scaled(2)), (lambda x: x, lambda x: -x)]


@pytest.mark.parametrize("pair", DIFFERENT, ids=lambda pair: type(pair[0]).__name__)
def test_values_are_recorded_by_what_they_are(pair):
  first, second, again = (to_plain(config_of(value=value)) for value in (*pair, pair[0]))
  assert first != second
  # Compared with what has been a file.
  assert json.loads(json.dumps(first)) == first == again


FORMLESS = [Prints(), threading.Lock(), np.random.default_rng(0), np.array([Prints()]), iter([])]


@pytest.mark.parametrize("value", FORMLESS, ids=lambda value: type(value).__name__)
def test_a_value_without_a_form_is_refused_when_the_config_is_made(value):
  with config_error(match=r"^config.data.value.*; give.* `identity`"):
    config_of(value=value)
  # The settings that hold it may say what it is.
  first, second = (to_plain(config_of(value=value, identity=name)) for name in "ab")
  assert first["data"]["value"] != second["data"]["value"]


def test_a_run_that_logged_what_no_version_logs_any_more_is_read(tmp_path):
  config = load_config("configs/digits.py", {"epochs": "3"})
  described = recorded(config)
  described["config"]["log"] = {"class": "Log", "mllog": True}
  (tmp_path / "config.json").write_text(json.dumps(described))
  assert describe_run(tmp_path).settings() == dataclasses.replace(config, log=cfg.Log())


def test_own_settings_are_made_again():
  made = from_plain(Holds, to_plain(Holds(path=pathlib.Path("x"), sizes=(3,))), None)
  assert (made.path, made.sizes) == (pathlib.Path("x"), (3,))


def write_files(folder, texts):
  for name, text in texts.items():
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


PACKAGE = {
  "mylib/__init__.py": "",
  "mylib/nets/__init__.py": "from .core import *\n",
  "mylib/nets/core.py": """
from ..consts import SCALE
__all__ = ["build"]
def act(x):
  return SCALE * x
def build(x):
  return act(x)
""",
  "mylib/consts.py": "SCALE = 2.0\nUNUSED = 1\n",
  "configs/c.py": """
from jaxscale import config, data, optim
import mylib.nets as nets
def get_config():
  width, epochs = 3, 1
  class Local(config.Model):
    def build(self, context):
      return nets.build(width)
  sgd = optim.SGD(lr=0.1)
  digits = data.Digits()
  return config.Config(model=Local(), data=digits, optimizer=sgd, batch_size=8, epochs=epochs)
""",
}


CHANGES = columns(str, str, str, words)("""
mylib/consts.py | 2.0 | 3.0 | mylib.consts:SCALE
mylib/nets/core.py | SCALE * x | SCALE + x | mylib.nets.core:act
configs/c.py | = 3, 1 | = 4, 1 | c:get_config.<locals>.Local.width
configs/c.py | build(width) | build(-width) | c:get_config.<locals>.Local
configs/c.py | = 3, 1 | = 3, 2 |
configs/c.py | lr=0.1 | lr=0.2 |
mylib/consts.py | UNUSED = 1 | UNUSED = 2  # or so |
""")


@pytest.mark.parametrize("file, old, new, differs", CHANGES)
def test_a_package_counts_by_what_is_used_of_it(tmp_path, monkeypatch, file, old, new, differs):
  """Star imports, relative ones, a class inside of `get_config`."""
  monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

  def hashes():
    for name in [n for n in sys.modules if n.partition(".")[0] == "mylib"]:
      monkeypatch.delitem(sys.modules, name)
    return code_of(load_config(str(tmp_path / "configs" / "c.py"))).hashes

  write_files(tmp_path, PACKAGE)
  first = hashes()
  (tmp_path / file).write_text(PACKAGE[file].replace(old, new))
  os.utime(tmp_path / file, (1e9, 1e9))  # else Python takes the bytecode of before
  second = hashes()
  assert {k for k in {**first, **second} if first.get(k) != second.get(k)} == {*differs}


def test_modules_that_import_each_other_and_long_chains_are_walked(tmp_path, monkeypatch):
  """The walk recursed: 2,000 lines of a RecursionError."""
  monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
  chain = "".join(f"def f{i}(): return f{i + 1}()\n" for i in range(2000))
  files = {
    "ring/__init__.py": "from ring.ops import scale\n",
    "ring/ops.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
    "  from ring import scale\ndef scale(x): return scale(x - 1) + f0()\n"
    f"{chain}def f2000(): return 1\n",
    "c.py": "from jaxscale.config import Tracker\nfrom ring import scale\n"
    "class Mine(Tracker):\n  def build(self, context): return scale(3)\n",
  }
  write_files(tmp_path, files)
  mine = load_file(tmp_path / "c.py").Mine
  hashes = own_code([mine]).hashes
  assert {"ring.ops:scale", "ring.ops:f0", "ring.ops:f2000"} <= hashes.keys()


OWN = """
from jaxscale import config, data, optim
import importlib
helper = importlib.import_module("by_name_helper")
SCALE, TABLE = 1.0, {}
for k in range(3):
  TABLE[k] = k * 2
class Marker:
  "A docstring alone."
def first():
  class Net:
    def build(self): return 1
  return Net
def second():
  class Net:
    def build(self): return 2
  return Net
def make(of):
  class Own(config.Model):
    def build(self, context): return of, Marker
    def scaled(self): return SCALE * TABLE[1] + helper.half(3)
    def shown(self, n=3): return f"{SCALE:{n}}"
  return Own
Own = make(first())
def get_config():
  sgd = optim.SGD(lr=0.1)
  return config.Config(model=Own(), data=data.Digits(), optimizer=sgd, batch_size=8, epochs=1)
"""


def test_only_what_a_program_does_counts(tmp_path, monkeypatch):
  monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
  half = "def half(x):\n  return x / 2\n"

  def hashes(text=OWN, helper=half, folder="a"):
    monkeypatch.delitem(sys.modules, "by_name_helper", raising=False)
    importlib.invalidate_caches()
    (tmp_path / "by_name_helper.py").write_text(helper)
    os.utime(tmp_path / "by_name_helper.py", (1e9 + len(helper), 1e9))
    path = tmp_path / folder / "own.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return code_of(load_config(str(path))).hashes

  before = hashes()
  methods = "    def scaled(self): return SCALE * TABLE[1] + helper.half(3)\n"
  moved = OWN.replace(methods, "").replace("  return Own\n", methods + "  return Own\n")
  harmless = {
    "docstring": OWN.replace("A docstring alone.", "Another."),
    "pass": OWN.replace('"A docstring alone."', "pass"),
    "methods": moved,
    "byte order mark": "\ufeff" + OWN,
    "a class of the same name": OWN.replace("return 2", "return 3"),
  }
  assert [name for name, text in harmless.items() if hashes(text) != before] == []
  assert hashes(folder="b") == before
  changed = {
    "loop": (OWN.replace("k * 2", "k * 3"), half),
    "closure": (OWN.replace("return 1", "return 3"), half),
    "behind a byte order mark": ("\ufeff" + OWN.replace("= 1.0", "= 2.0"), half),
    "import by name": (OWN, half.replace("x / 2", "x // 2")),
  }
  assert [name for name, texts in changed.items() if hashes(*texts) == before] == []


def test_hashes_are_those_of_every_version_of_python(tmp_path):
  """The hash was written by 3.11: 3.12 and 3.13 have other syntax trees."""
  text = OWN.replace('importlib.import_module("by_name_helper")', "None")
  (tmp_path / "own.py").write_text(text)
  found = code_of(load_config(str(tmp_path / "own.py"))).hashes
  assert found["own:make.<locals>.Own"] == "0f32267f860f8faa"


def test_a_folder_beside_the_package_is_the_users(monkeypatch):
  monkeypatch.setitem(sys.modules, "nets", module := types.ModuleType("nets"))
  module.__file__ = f"{pathlib.Path(cfg.__file__).parents[1]}_nets/nets.py"
  assert is_own("nets")
  module.__file__ = cfg.__file__
  assert not is_own("nets")


CELL = '''
class Cell(config.Model):
  """A model of a notebook."""
  def build(self, context):
    return half(FACTOR * context)
'''


def run_cell(text, number, space, has_source=True):
  """Run a cell as IPython does, with its source known by the name of a file, or as `exec` does."""
  name = f"/tmp/ipykernel_1/{number}.py" if has_source else "<string>"
  if has_source:
    linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
  exec(compile(text, name, "exec"), space)


def test_a_class_of_a_notebook_counts_by_its_source(monkeypatch):
  notebook = types.ModuleType("__main__")
  monkeypatch.setitem(sys.modules, "__main__", notebook)
  space = vars(notebook)

  def codes(number, *cells):
    for i, cell in enumerate(cells):
      run_cell(cell, 10 * number + i, space)
    model = dataclasses.replace(config_of(), model=space["Cell"]())
    return code_of(model).hashes

  setup = "from jaxscale import config\nFACTOR = 2\ndef half(x):\n  return x / 2\n"
  first = codes(1, setup, CELL)
  assert {"__main__:Cell", "__main__:half", "__main__:FACTOR"} <= first.keys()
  assert codes(2, setup, CELL.replace("A model", "The model")) == first
  for number, key, old, new in columns(int, str, str, str)("""
    3 | Cell | FACTOR * | FACTOR +
    4 | half | x / 2 | x / 3
    5 | FACTOR | FACTOR = 2 | FACTOR = 3
"""):
    second = codes(number, setup.replace(old, new), CELL.replace(old, new))
    assert {k for k in first if first[k] != second.get(k)} == {f"__main__:{key}"}


BASES = """
import typing
from dataclasses import dataclass
from jaxscale import config
@dataclass(order=True)
class Fields:
  size: int = 1
class Pair(typing.NamedTuple):
  size: int = 1
class Base:
  def scaled(self, x):
    return self.scale * x
class Inner(Base):
  scale = 2
class Cell(config.Model):
  def build(self, context, n=7):
    return [Inner() for _ in range(3)], Fields(), Pair(), context in {"a", "b"}
  @property
  def depth(self):
    return 5
"""


@pytest.mark.parametrize("has_source", [True, False])
def test_classes_that_a_notebooks_class_uses_count_without_source_too(has_source, monkeypatch):
  notebook = types.ModuleType("__main__")
  monkeypatch.setitem(sys.modules, "__main__", notebook)

  def codes(number, text):
    run_cell(text, f"{has_source}{number}", vars(notebook), has_source)
    return code_of(dataclasses.replace(config_of(), model=notebook.Cell())).hashes

  first = codes(1, BASES)
  assert codes(2, BASES) == first
  assert ("__main__:Cell" in first) and first["__main__:Cell"].startswith("byte") != has_source
  for number, old, new in ((3, "scale = 2", "scale = 3"), (4, "scale * x", "scale + x")):
    assert codes(number, BASES.replace(old, new)) != first
  edits = {"range(3)": "range(4)", "[Inner() for": "[Base() for", "n=7": "n=8", "5": "6"}
  for number, (old, new) in enumerate(edits.items(), 5):
    second = codes(number, BASES.replace(old, new))
    assert second["__main__:Cell"] != first["__main__:Cell"]
  lines = without_source({"code": first})
  assert len(lines) == (not has_source) and all("Cell" in line for line in lines)


def test_a_class_that_exec_defines_in_a_file_counts(tmp_path):
  hashes = []
  for folder, text in enumerate((BASES, BASES, BASES.replace("scale * x", "scale + x"))):
    write_files(tmp_path / str(folder), {"own.py": f"exec({text!r})\nHALF = 0.5\n"})
    cell = load_file(tmp_path / str(folder) / "own.py").Cell
    hashes.append(own_code([cell]).hashes)
  assert hashes[0] == hashes[1] and hashes[0]["own:Cell"] == hashes[2]["own:Cell"]
  assert hashes[0]["own:Base"] != hashes[2]["own:Base"]


class Halved(nnx.Module):
  """A module of NNX with every kind of state."""

  def __init__(self, rngs, width=4):
    self.dense = nnx.Linear(3, width, rngs=rngs)
    self.drop = nnx.Dropout(0.5, rngs=rngs)
    self.norm = nnx.BatchNorm(width, rngs=rngs)

  def __call__(self, x):
    return self.norm(self.drop(self.dense(x)))


def test_a_module_in_place_of_model_settings_is_recorded_by_its_contents():
  make = [lambda: Halved(nnx.Rngs(0)), lambda: Halved(nnx.Rngs(1)), lambda: Halved(nnx.Rngs(0), 5)]
  first, second, third = (to_plain(small_config(model=f())) for f in make)
  assert to_plain(small_config(model=make[0]())) == first
  assert first["model"]["class"] == "Module" and second != first != third
  assert to_plain(small_config(model=Halved))["model"]["module"]["object"].endswith(":Halved")
  layer = to_plain(small_config(model=nn.Dense(4)))["model"]["module"]
  assert (layer["class"], layer["features"]) == ("Dense", 4)
