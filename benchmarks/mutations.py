"""Read hostile and mutated files with every reader, under a limit of memory.

    python benchmarks/mutations.py 10000

reads about 10,000 mutated inputs, as many by each reader, and beside them special files (pipes,
devices, sockets, links, holes) and files that shrink while they are read. It writes a table of
the outcomes by reader, and the cases that ended in another way than promised: a traceback, a
killed process or a wait.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "tests")]


def main() -> int:
  """Read all cases, and print the table."""
  from support import hostile  # pyright: ignore[reportMissingImports]

  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("count", type=int, help="mutated inputs of all readers together")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--only", nargs="+", help="names of readers")
  args = parser.parse_args()
  names = args.only or list(hostile.readers())
  found = []
  for case in hostile.outcomes(-(-args.count // len(names)), args.seed, names):
    found.append(case)
    if case.outcome not in hostile.GOOD:
      print(f"{case.reader} {case.kind}: {case.outcome}: {case.text}", file=sys.stderr, flush=True)
  print(hostile.table(found))
  return int(any(case.outcome not in hostile.GOOD for case in found))


if __name__ == "__main__":
  sys.exit(main())
