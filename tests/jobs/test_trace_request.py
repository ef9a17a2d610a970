"""Asking a run for a trace: who may, what is possible, and who waits for it."""

import json
import os
import threading
import time

import pytest

from jaxscale import cli
from jaxscale.checkpoint import lock
from jaxscale.config import Log
from jaxscale.errors import ConfigError
from jaxscale.jobs import profile
from jaxscale.run import trace_request
from jaxscale.run.trace_request import process_file, session_folder
from support.bad_files import EVERY, put
from support.errors import config_error
from support.tables import fields, table, words


@pytest.fixture
def workdir(tmp_path):
  """Yield the workdir of a run of two processes that is training, as others see it."""
  (tmp_path / "config.json").write_text(json.dumps({"processes": 2}))
  with lock.acquire(tmp_path):
    yield tmp_path


def asked(**changes):
  return trace_request.make(5, (0,), 60.0)._replace(**changes)


def place(workdir):
  return workdir / "profile" / "request.json"


NO_STEPS = table("""
5 | give the first and the last step, as 100:110
 | give the first and the last step
a:b | give the first and the last
-1:5 | give the first and the last
²:5 | give the first and the last
10:5 | the last step must not be before the first
0:9 | steps count from 1
7:1000000 | at most 100 steps, traces are large; give 7:106
""")


@pytest.mark.parametrize("given, says", NO_STEPS)
def test_steps_that_cannot_be_traced_are_one_line(given, says):
  with config_error(match=f"Log.profile='{given}': .*{says}"):
    Log(profile=given)


def test_steps_are_both_included():
  assert Log(profile="100:110").profiled_steps() == (100, 110)
  assert Log(profile="7:106").profiled_steps() == (7, 106)
  assert Log().profiled_steps() is None
  with pytest.raises(ConfigError, match=r"profile_processes=.*>= 0"):
    Log(profile_processes=(0, -1))


def test_a_request_is_read_as_it_was_written(workdir):
  request = asked(processes=(0, 3))
  assert trace_request.read(workdir) is None
  trace_request.write(workdir, request)
  assert trace_request.read(workdir) == request
  with pytest.raises(ConfigError, match="another trace is already requested; wait"):
    trace_request.write(workdir, asked())
  trace_request.withdraw(workdir, asked())  # somebody else's stays
  assert trace_request.read(workdir) == request
  trace_request.withdraw(workdir, request)
  assert not place(workdir).exists()


def test_a_request_that_nobody_waits_for_any_more_is_none(workdir):
  late = asked(until=time.time() - 1)
  trace_request.write(workdir, late)
  assert trace_request.read(workdir) is None
  trace_request.write(workdir, asked())  # in its place
  trace_request.withdraw(workdir, late)
  assert trace_request.read(workdir)


BAD = words("name='../../../tmp/x' name='/tmp/x' steps=0 steps=101 steps='5' until=None")
BAD += ["processes=['0']"]


@pytest.mark.parametrize("name", [*EVERY, *BAD, "a directory", "a pipe", "large", "link"])
def test_what_is_no_request_is_left_alone(workdir, name):
  path, whole = place(workdir), json.dumps(asked()._asdict())
  path.parent.mkdir()
  if name == "a pipe":
    os.mkfifo(path)
  elif name == "large":
    path.write_text(" " * (1 << 17) + whole)
  elif name == "link":
    (workdir / "other.json").write_text(whole)
    path.symlink_to(workdir / "other.json")
  elif name in BAD:
    path.write_text(json.dumps(json.loads(whole) | fields(name)))
  else:
    put(path, EVERY.get(name))
  assert trace_request.read(workdir) is None


def test_a_request_that_anybody_can_write_is_left_alone(workdir):
  trace_request.write(workdir, asked())
  for path in (place(workdir), place(workdir).parent):
    mode = path.stat().st_mode
    path.chmod(mode | 0o002)
    assert trace_request.read(workdir) is None
    path.chmod(mode)
  assert trace_request.read(workdir)


def answer(workdir, suffix, text=""):
  """Answer a request, as a process of the run does."""
  while (request := trace_request.read(workdir)) is None:
    time.sleep(0.01)
  folder = session_folder(workdir, request.name)
  folder.mkdir(parents=True)
  for process in request.processes:
    process_file(folder, process, suffix).write_text(text)


def with_answer(workdir, *given, **options):
  thread = threading.Thread(target=answer, args=(workdir, *given))
  thread.start()
  try:
    return profile.trace(workdir, log=lambda line: None, **options)
  finally:
    thread.join()


def test_it_waits_for_every_process_and_cleans_up(workdir):
  folder = with_answer(workdir, ".xplane.pb", steps=3, processes=(0, 1))
  assert folder.parent == workdir / "profile" / "plugins" / "profile"
  assert len([*folder.iterdir()]) == 2 and not place(workdir).exists()


def test_what_a_process_could_not_do_is_one_line(workdir):
  with config_error(match=r"process 0: .*No space left") as e:
    with_answer(workdir, ".error", "step 7  no trace: No space left\x1b[2J\n")
  assert "\x1b" not in str(e.value)
  assert not place(workdir).exists()


def test_a_run_that_does_not_answer_is_one_line(workdir, monkeypatch):
  monkeypatch.setattr(profile, "_POLL_S", 0.01)
  with pytest.raises(ConfigError, match="no trace from process 1 in 0 s; it may"):
    profile.trace(workdir, processes=(1,), wait_s=0.05)
  monkeypatch.setattr(profile, "_CHECK_EVERY", 1)
  owners = iter([lock.running(workdir)])
  monkeypatch.setattr(lock, "running", lambda workdir: next(owners, None))
  with pytest.raises(ConfigError, match="the run ended without a trace"):
    profile.trace(workdir)
  assert not place(workdir).exists()


def test_whether_a_run_trains_is_known_by_its_lock(tmp_path):
  assert lock.running(tmp_path) is None
  with lock.acquire(tmp_path) as held:
    assert lock.running(tmp_path) == held.owner
    elsewhere = json.dumps(held.owner._asdict() | {"host": "n7"})
    held.path.write_text(elsewhere)
    assert lock.running(tmp_path).host == "n7"  # it is renewed
    os.utime(held.path, (0, 0))
    assert lock.running(tmp_path) is None
  assert lock.running(tmp_path) is None


MISTAKES = table(r"""
no/such/run | no/such/run: no such run
xxx | : no such run
x\0y | : no such run
 | RUN: missing
--summary RUN | --summary: not an option
RUN other | other: profile takes one run
RUN --steps=0 | --steps=0: give a whole number in [1, 100]
RUN --processes=0,x | --processes=0,x: give whole numbers
RUN --processes=-1 | --processes=-1: give whole numbers
RUN --processes=2 | --processes=2: out of range for this run; give 0 … 1
RUN/old | no run is training in this workdir; start one
""")


@pytest.mark.parametrize("argv, says", MISTAKES)
def test_a_mistake_is_one_line(workdir, capsys, argv, says):
  (workdir / "old").mkdir()
  (workdir / "old" / "config.json").write_text("{}")
  argv = argv.replace("RUN", str(workdir)).replace("xxx", "x" * 300).replace(r"\0", "\0")
  assert cli.main(["profile", *argv.split()]) == 2
  out, err = capsys.readouterr()
  assert out == "" and err.startswith("error: ") and err.count("\n") == 1
  assert says in err


def test_a_request_is_not_written_through_a_link_of_another_user(workdir, monkeypatch):
  (workdir / "elsewhere").mkdir()
  (workdir / "profile").symlink_to("elsewhere")
  trace_request.write(workdir, asked())  # one's own, to a larger disk
  trace_request.withdraw(workdir, asked(until=0.0))
  (workdir / "elsewhere" / "request.json").unlink()
  if os.geteuid() == 0:
    os.chown(workdir / "profile", 12345, -1, follow_symlinks=False)
  else:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
  with config_error("profile is a link of another user; have its owner remove it"):
    trace_request.write(workdir, asked())
  assert not any((workdir / "elsewhere").iterdir())
