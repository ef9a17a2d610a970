"""Every reader against pipes, devices, sockets, links, holes, shrinking files and mutations."""

import pytest

from support import hostile

SLOW_S = 3.0  # of processor time; a mutated input takes at most 0.2 s on an idle machine


def check(found):
  bad = [x for x in found if x.outcome not in hostile.GOOD or x.cpu_s > SLOW_S]
  assert not bad, "\n".join(
    f"{x.reader} {x.kind}: {x.outcome} {x.cpu_s:.1f} s {x.text}" for x in bad
  )
  print(hostile.table(found))


def test_no_reader_hangs_grows_or_prints_a_traceback():
  """Each case is read under a limit of memory, by a child that is killed if it waits."""
  found = list(hostile.outcomes(2))
  assert len(found) == len(hostile.cases(2))
  check(found)


@pytest.mark.slow
def test_no_reader_fails_on_thousands_of_mutations():
  check(list(hostile.outcomes(-(-10_000 // len(hostile.readers())), seed=1)))
