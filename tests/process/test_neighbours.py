"""Runs that another user made: nothing of the victim's is created, changed, executed or ended."""

import json
import os
import signal
import socket
import stat
import sys
import time

import pytest

from jaxscale.checkpoint import lock
from jaxscale.jobs import folder as folders
from jaxscale.jobs import local_executor
from support.job_script import RUN
from support.two_users import ATTACKER, VICTIM

AHEAD = 3000  # process IDs for which the attacker has prepared links
ESCAPES = "\x1b]0;owned\x07\x1b[2J\x1b]52;c;b3duZWQ=\x07"


def names_in(*paths):
  """Return all files below folders with their times of change."""
  return {p: p.lstat().st_mtime_ns for path in paths for p in [path, *path.rglob("*")]}


@pytest.fixture
def hostile(users):
  """Yield the folder of a run of the attacker, in a directory that all users share.

  Its code creates a file in the victim's home, and its records name a process of the victim.
  """
  runs = users.make("runs", 0, 0o1777)
  folder = runs / "bad"
  for name in ("train/lock", "train/profile", "events", "logs", "code/jaxscale", "code/evil"):
    (folder / name).mkdir(parents=True)
  made = users.victim / "EXECUTED"
  for name in ("jaxscale", "evil"):
    (folder / "code" / name / "__init__.py").write_text(f"open({str(made)!r}, 'w')")
  spec = RUN._replace(executor="local", name="bad", folder=str(folder), python=sys.executable)
  folders.write_spec(spec, ("process.sh", f"touch {made}"))
  (folder / "submissions.jsonl").write_text('{"job": "7", "tasks": null}\n')
  (folder / "logs" / "7.0.out").write_text(f"before {ESCAPES} after\tend\n")
  line = {"step": 3, "train/loss": 0.5, "time": 1.0, f"eval/{ESCAPES}": 1.0}
  (folder / "train" / "metrics.jsonl").write_text(json.dumps(line) + "\n")
  start = {"commit": None, "host": ESCAPES, "command": f"python {ESCAPES}"}
  (folder / "train" / "starts.jsonl").write_text(json.dumps(start) + "\n")
  summary = {"outcome": ESCAPES, "step": 3, "total_steps": 3, "devices": ESCAPES}
  (folder / "train" / "summary.json").write_text(json.dumps(summary))
  (folder / "train" / "config.json").write_text("{}")
  with users.popen(VICTIM, "sleep", "600") as process:
    born = local_executor._born(process.pid)
    line = json.dumps({"pid": process.pid, "born": born, "host": socket.gethostname()})
    (folder / "supervisor.jsonl").write_text(line + "\n")
    (folder / "processes.jsonl").write_text(line + "\n")
    # A live run on another host, whose age profile asks the file server for.
    owner = lock.LockOwner("far-away", 12, "", time.time(), "x")
    (folder / "train" / "lock" / "1").write_text(json.dumps(owner._asdict()))
    users.give(folder, ATTACKER)
    (folder / "train" / "lock").chmod(0o777)
    before = names_in(users.victim)
    yield folder
    assert names_in(users.victim) == before  # nothing was created there, nor executed
    assert process.poll() is None  # nor ended
    process.kill()


def plant_links(users, directory, gid=None):
  """Let the attacker link the files that earlier versions created to the victim's home."""
  code = "import os, sys; folder, to, first, count = sys.argv[1:]\n"
  code += "for pid in range(int(first), int(first) + int(count)):\n"
  code += "  os.symlink(to, f'{folder}/.clock-{os.uname().nodename}-{pid}')"
  words = directory, users.victim / "CREATED", os.getpid(), AHEAD
  done = users.run(ATTACKER, sys.executable, "-c", code, *words, groups=[gid] if gid else ())
  assert done.returncode == 0, done.stderr


COMMANDS = {
  "cancel": "belongs to another user (uid 1002); have its owner cancel it",
  "resume": "belongs to another user (uid 1002); have its owner resume it",
  "profile": "belongs to another user (uid 1002); have its owner trace it",
  "status": "",
  "report": "",
  "logs": "",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_of_another_user_is_read_and_nothing_else(users, hostile, command):
  plant_links(users, hostile / "train" / "lock")
  (hostile / "cancelled").symlink_to(users.victim / "CREATED")
  before = names_in(hostile)
  done = users.jaxscale(command, hostile)
  assert done.returncode == (2 if COMMANDS[command] else 0), done
  assert COMMANDS[command] in done.stderr and "Traceback" not in done.stderr
  assert "\x1b" not in done.stdout + done.stderr
  assert names_in(hostile) == before


def test_trusted_it_is_traced_without_links(users, hostile):
  """With --trust the victim writes there, but neither through links nor where all can write."""
  lock_folder = hostile / "train" / "lock"
  plant_links(users, lock_folder)
  done = users.jaxscale("profile", hostile, "--trust")
  assert "lock belongs to another user (uid 1002) and is a link or open to all" in done.stderr
  lock_folder.chmod(0o755)
  done = users.jaxscale("profile", hostile, "--trust")
  assert done.returncode == 2 and "Permission denied" in done.stderr, done


@pytest.mark.parametrize("mode", [0o2775, 0o2777])
def test_a_lock_that_a_colleague_prepared(users, mode):
  """In a workdir of a group; on the file system of a project all folders are the group's."""
  workdir = users.make("project", VICTIM, 0o2775, gid=5000)
  (workdir / "lock").mkdir()
  users.give(workdir / "lock", ATTACKER)
  os.chown(workdir / "lock", -1, 5000)
  (workdir / "lock").chmod(mode)
  plant_links(users, workdir / "lock", gid=5000)
  code = "import sys; from pathlib import Path; from jaxscale.checkpoint.lock import acquire\n"
  code += "with acquire(Path(sys.argv[1])): print('acquired')"
  done = users.run(VICTIM, sys.executable, "-P", "-c", code, workdir, groups=[5000])
  assert not (users.victim / "CREATED").exists()
  if mode & stat.S_IWOTH:
    assert "is a link or open to all; remove it, or use another --workdir" in done.stderr
  else:
    assert done.stdout == "acquired\n", done.stderr


def test_the_victims_own_run_is_cancelled(users):
  """The check does not keep an owner from it, in a project folder of a group either."""
  runs = users.make("runs", 0, 0o2775, gid=5000)
  folder = runs / "mine"
  (folder / "train").mkdir(parents=True)
  spec = RUN._replace(executor="local", name="mine", folder=str(folder))
  folders.write_spec(spec, ("process.sh", ""))
  users.give(folder, VICTIM)
  words = sys.executable, "-c", "import time; time.sleep(600)", folder
  with users.popen(VICTIM, *words) as process:
    born = local_executor._born(process.pid)
    line = {"pid": process.pid, "born": born, "host": socket.gethostname()}
    (folder / "supervisor.jsonl").write_text(json.dumps(line) + "\n")
    users.give(folder, VICTIM)
    done = users.jaxscale("cancel", folder, groups=[5000])
    assert "mine: asked to save and stop" in done.stdout, done
    assert process.wait(60) == -signal.SIGTERM


@pytest.mark.parametrize("follow", [(), ("--follow",)])
def test_logs_do_not_wait_for_a_pipe(users, hostile, follow):
  path = hostile / "logs" / "7.0.out"
  path.unlink()
  os.mkfifo(path)
  done = users.jaxscale("logs", hostile, *follow)
  assert done.returncode == 2 and "Traceback" not in done.stderr, done


def test_jaxs_coordinator_is_not_put_into_a_folder_of_another_user(users):
  theirs = users.make("attacker/tmp", ATTACKER, 0o777)
  code = "import types; from jaxscale.cluster.rendezvous import client\n"
  code += "print(client._place_coordinator(1234, {0: types.SimpleNamespace(files='')}))"
  done = users.run(VICTIM, sys.executable, "-P", "-c", code, TMPDIR=str(theirs))
  assert done.stdout.startswith("unix:/tmp/jaxscale-"), done
  assert done.stderr.startswith(f"note: TMPDIR={theirs}: ")
  assert "set TMPDIR to a folder of yours" in done.stderr
  assert list(theirs.iterdir()) == []


def test_code_that_anybody_could_have_put_there_is_not_resumed(users):
  """In a scratch directory without the sticky bit, whatever the owner of the files."""
  folder = users.make("open", 0, 0o777) / "mine"
  (folder / "code").mkdir(parents=True)
  spec = RUN._replace(executor="local", name="mine", folder=str(folder))
  folders.write_spec(spec, ("process.sh", ""))
  users.give(folder, VICTIM)
  done = users.jaxscale("resume", folder)
  problem = "mine has code that is executed, and other users can write to"
  assert done.returncode == 2 and problem in done.stderr, done
  assert done.stderr.endswith("have its owner resume it, or add --trust if you trust them\n")
