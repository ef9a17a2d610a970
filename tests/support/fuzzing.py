"""Damaged inputs of readers, and the errors that a reader may raise.

FUZZ_EXAMPLES says how many inputs a test makes, 50 by default. A test of a reader is

    fuzz = fuzzing.fuzz
    limits, place = pytest.fixture(autouse=True)(…), pytest.fixture(scope="module")(…)

    @fuzz
    @given(damaged(DOCUMENT))
    @example(b"what once did harm")
    def test_reader(place, content):
      (place / "name").write_bytes(content)
      with one_line():
        read(place / "name")
"""

import contextlib
import copy
import gc
import json
import os
import random
import signal
import tempfile
import time
from pathlib import Path

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from jaxscale.errors import ConfigError, user_message
from support.bad_files import EVERY

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "50"))
MOST_S, MOST_MB = 3.0, 256
HANG_S = 60  # of wall-clock time, in which other programs may have the processor
SPECIAL = ["", "²", "\0", "\ud800", "\x1b[2J", "9" * 5000, "MLP", "os:system", "a/b"]
NUMBERS = [0, -1, 2**31, 2**63, 10**400, float("nan"), float("inf"), True, None, 0.5]
LETTERS = 'aZ0²\0\x1b\n"{[:.-_ é\ud800'
_took: list[float] = []  # processor seconds of each call of `one_line`


def fuzz(test, share: int = 1):
  """Run a test with `EXAMPLES` inputs, or one `share`-th of them if it is slow."""
  return settings(
    max_examples=max(EXAMPLES // share, 5),
    derandomize=EXAMPLES <= 50,
    deadline=None,  # it counts the time of other processes, too
    database=None,
    phases=[Phase.explicit, Phase.generate],  # a smaller seed is no simpler input
    suppress_health_check=list(HealthCheck),
  )(test)


def by_chance(make):
  """Return a strategy that calls `make` with a `random.Random`; drawing bytes is 20 times slower.

  A failure shows the value; add it as an `@example`.
  """
  return st.integers(0, 2**64 - 1).map(lambda seed: make(random.Random(seed)))


def leaf(chance):
  """Return a JSON value other than an object or a list."""
  match chance.randrange(4):
    case 0:
      return chance.choice(SPECIAL)
    case 1:
      return chance.choice(NUMBERS)
    case 2:
      return "".join(chance.choices(LETTERS, k=chance.randrange(6)))
  return chance.randrange(-(2**70), 2**70) >> chance.randrange(71)


def value(chance):
  """Return any JSON value."""
  match chance.randrange(8):
    case 0:
      return [leaf(chance) for _ in range(chance.randrange(4))]
    case 1:
      return {str(leaf(chance)): leaf(chance) for _ in range(chance.randrange(3))}
    case 2:
      return {"class": "os:system", "command": "false"}
    case 3:
      return {"object": 5}
  return leaf(chance)


def paths_of(node, path=()):
  """Yield the path of every value inside a JSON value."""
  yield path
  inner = node.items() if isinstance(node, dict) else ()
  for key, value in enumerate(node) if isinstance(node, list) else inner:
    yield from paths_of(value, (*path, key))


def change(document, chance):
  """Return a JSON value with one or two of its values replaced or removed."""
  places = [path for path in paths_of(document) if path]
  changed = copy.deepcopy(document)
  for _ in range(chance.randrange(1, 3)):
    path = chance.choice(places)
    with contextlib.suppress(LookupError, TypeError):  # an outer one was replaced
      node = changed
      for key in path[:-1]:
        node = node[key]
      if chance.randrange(4):
        node[path[-1]] = value(chance)
      else:
        del node[path[-1]]
  return changed


def edit(whole, chance):
  """Return bytes with parts changed, added, removed or repeated."""
  found = bytearray(whole)
  for _ in range(chance.randrange(1, 5)):
    at, some = chance.randrange(len(found) + 1), chance.randbytes(chance.randrange(8))
    match chance.randrange(5):
      case 0:
        found[at : at + len(some)] = some
      case 1:
        del found[at : at + chance.randrange(64)]
      case 2:
        found[at:at] = some
      case 3:
        found = found[:at]
      case 4:
        found += found[at:]
  return bytes(found)


def changed(document):
  """Return a strategy for a JSON value with one or two values replaced or removed."""
  return by_chance(lambda chance: change(document, chance))


def edited(wholes):
  """Return a strategy for one of these byte strings, edited."""
  return by_chance(lambda chance: edit(chance.choice(wholes), chance))


def damaged(document):
  """Return a strategy for a document's JSON, changed as a value or as bytes, or another JSON."""
  text = json.dumps(document).encode()

  def make(chance):
    match chance.randrange(8):
      case 0:
        return edit(text, chance)
      case 1:
        return chance.choice([*EVERY.values()])[:9000]
    return json.dumps(change(document, chance)).encode(errors="surrogatepass")

  return by_chance(make)


class HangError(BaseException):
  """Error that no reader catches."""


def _hang(*_):
  raise HangError(f"no answer within {HANG_S} s")


@contextlib.contextmanager
def one_line(error: type[Exception] = ConfigError):
  """Expect success, or this error with a message of one line."""
  before = signal.signal(signal.SIGALRM, _hang)
  signal.setitimer(signal.ITIMER_REAL, HANG_S)
  clock = time.process_time()
  try:
    yield
  except error as e:
    line = user_message(e).line if isinstance(e, ConfigError) else "for another message"
    assert line.isprintable()
  finally:
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
  _took.append(time.process_time() - clock)
  assert _took[-1] < MOST_S


def limits(request):
  """Limit the memory of a reader; `pytest -rP` shows each test's use as a row of a table."""
  gc.collect(1)  # not the millions of objects that JAX keeps, which takes seconds
  _took.clear()
  Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew: proc(5)
  before, clock = _memory("VmRSS"), time.process_time()
  yield
  grown = _memory("VmHWM") - before
  seconds, slowest = time.process_time() - clock, 1e3 * max(_took, default=0)
  name = request.node.name.removeprefix("test_")
  if _took:
    print(f"| {name} | {len(_took):,} | {seconds:.1f} | {slowest:.0f} | {grown:.0f} |")
  assert grown < MOST_MB, f"{grown:.0f} MB"


def _memory(field):
  """Return the memory of this process in MB."""
  text = Path("/proc/self/status").read_text()
  return int(text.partition(f"{field}:")[2].split()[0]) / 1024


def place():
  """Yield a directory for all examples of a file.

  In memory where there is such a file system: ext4 takes 4 ms to replace a file.
  """
  memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
  with tempfile.TemporaryDirectory(dir=memory) as folder:
    yield Path(folder)
