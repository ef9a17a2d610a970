"""Usual layouts of shared file systems: what works in each, and what others may have written."""

import os
from pathlib import Path

import pytest

from jaxscale import files
from jaxscale.config.record import unsafe_code
from jaxscale.files import own_folder, unsafe_owner
from jaxscale.run import trace_request
from support.two_users import ATTACKER, VICTIM

PROJECT = 2000  # a group of both users

# Folders from the root on as (owner, group, mode), the last one being the run's; and whether
# programs are loaded from it on CPUs and TPUs, and on GPUs, whether its own code is executed
# without --trust, and whether its caches of tokens and requests for traces are used.
ROOT, MINE, THEIRS = (0, 0, 0o755), (VICTIM, VICTIM, 0o755), (ATTACKER, ATTACKER, 0o755)
LAYOUTS = {
  "home": ([ROOT, (VICTIM, VICTIM, 0o700), MINE], "cpu gpu code data"),
  "home, readable by all": ([ROOT, MINE, MINE], "cpu gpu code data"),
  "home, umask 002, own group": (
    [ROOT, (VICTIM, VICTIM, 0o775), (VICTIM, VICTIM, 0o775)],
    "cpu gpu code data",
  ),
  "project 2775": ([(0, PROJECT, 0o2775), (VICTIM, PROJECT, 0o2755)], "cpu data"),
  "project 2775, umask 002": ([(0, PROJECT, 0o2775), (VICTIM, PROJECT, 0o2775)], "cpu data"),
  "project 3775, sticky": ([(0, PROJECT, 0o3775), (VICTIM, PROJECT, 0o2755)], "cpu gpu code data"),
  "project 3775, umask 002": ([(0, PROJECT, 0o3775), (VICTIM, PROJECT, 0o2775)], "cpu data"),
  "project 3775 of a colleague": ([(ATTACKER, PROJECT, 0o3775), MINE], "cpu data"),
  "volume of Kubernetes, 2775": ([(0, 4321, 0o2775), MINE], "cpu data"),
  "scratch 1777": ([(0, 0, 0o1777), MINE, MINE], "cpu gpu code data"),
  "scratch 0777, not sticky": ([(0, 0, 0o777), MINE, MINE], "cpu"),
  "run open to all": ([ROOT, MINE, (VICTIM, VICTIM, 0o777)], "cpu"),
  "run of a colleague": ([ROOT, THEIRS, THEIRS], "data"),
  "run of a colleague in scratch 1777": ([(0, 0, 0o1777), THEIRS], "data"),
}


@pytest.fixture
def as_victim(users, monkeypatch):
  """Decide as the victim would, in this process."""
  monkeypatch.setattr(os, "geteuid", lambda: VICTIM)
  monkeypatch.setattr(files, "_is_private", lambda group: group == VICTIM)
  return users


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_works_in_a_layout(name, as_victim):
  steps, works = LAYOUTS[name]
  run = as_victim.folder
  for number, (uid, gid, mode) in enumerate(steps):
    run = run / f"{number}"
    as_victim.make(str(run.relative_to(as_victim.folder)), uid, mode, gid)
  owner = steps[-1][0]
  for file in ("config.json", "code/own.py", "compiled/x", "profile/request.json", "cache/a.bin"):
    path = run / file
    if path.parent != run:
      path.parent.mkdir(mode=0o700 if file == "compiled/x" else 0o755)
    path.touch(0o644)
    for entry in (path, *[path.parent] * (path.parent != run)):
      os.chown(entry, owner, owner)

  def programs(device):
    with own_folder(run / "compiled", by_descriptor=device == "cpu"):
      return None

  problems = {}
  for device in ("cpu", "gpu"):
    try:
      problems[device] = programs(device)
    except OSError as e:
      problems[device] = e.strerror
  problems["code"] = unsafe_code(run)
  caches = [unsafe_owner(run / p, group=False) for p in ("cache/a.bin", "profile/request.json")]
  assert caches[0] == caches[1] or (caches[0] is None) is (caches[1] is None)
  problems["data"] = caches[0]
  assert [k for k, problem in problems.items() if problem is None] == works.split(), problems
  if table := os.environ.get("LAYOUTS_TABLE"):
    cells = [name, *(problems[k] or "yes" for k in ("cpu", "gpu", "code", "data"))]
    row = " | ".join(cells).replace(str(as_victim.folder), "").replace("/0", "/A")
    with Path(table).open("a") as file:
      file.write(f"| {row} |\n")


@pytest.mark.parametrize("mode, is_read", [(0o755, True), (0o2775, True), (0o777, False)])
def test_only_colleagues_request_a_trace(as_victim, mode, is_read):
  """Anybody could make profile/ in a workdir that is open to all."""
  workdir = as_victim.make("victim/run", VICTIM, mode, PROJECT)
  as_victim.make("victim/run/profile", ATTACKER)
  request = trace_request.make(3, (0,), wait_s=600)
  trace_request.write_json(workdir / "profile" / "request.json", request._asdict())
  as_victim.give(workdir / "profile", ATTACKER)
  assert trace_request.read(workdir) == (request if is_read else None)
