"""Processes compile the same programs, whatever seed Python's hashes have."""

import itertools
import json
import sys

import pytest

from support.commands import child_env
from support.processes import popen
from support.programs import RUNS

AXES = "replica", "data", "fsdp", "stage", "model"
# With these, Python 3.11 to 3.13 order every two names of axes in a set contrarily.
SEEDS = "1", "3"


def in_processes(*args):
  """Return the output of a command under each seed, run at the same time."""
  envs = [child_env(num_devices=8, PYTHONHASHSEED=seed) for seed in SEEDS]
  running = [popen(sys.executable, *args, env=env) for env in envs]
  outs = [process.communicate(timeout=300)[0] for process in running]
  assert [process.returncode for process in running] == [0, 0]
  return outs


def test_seeds_order_every_two_axes_contrarily():
  pairs = list(itertools.combinations(AXES, 2))
  code = f"print(*[next(iter({{a, b}})) for a, b in {pairs}])"
  a, b = (out.split() for out in in_processes("-c", code))
  assert len(a) == len(b) == len(pairs)
  assert all(x != y for x, y in zip(a, b, strict=True))


@pytest.mark.slow
def test_programs_are_the_same_in_every_process():
  outs = in_processes("tests/support/programs.py", *RUNS)
  a, b = ([*map(json.loads, out.splitlines())] for out in outs)
  for x, y in zip(a, b, strict=True):
    assert x == y
  assert [line["name"] for line in a] == [
    f"{name}, {what}" for name in RUNS for what in ("init", "train", "eval")
  ]
