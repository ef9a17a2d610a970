"""`status`: a folder of a run that is damaged is a row, and hides no other run."""

import json
import os
import signal

import pytest

from jaxscale import cli
from jaxscale.errors import printable
from jaxscale.jobs import folder as folders
from jaxscale.jobs import local_executor, spec, status
from support.bad_files import DEEP, EVERY, HUGE, put
from support.errors import config_error
from support.job_script import RUN

WHOLE = spec.to_json(RUN._replace(executor="local"))
SPECS = {
  **EVERY,
  **{
    f"{name} that is {value!r:.9}": json.dumps(WHOLE | {name: value}).encode()
    for name, value in (
      ("nodes", "4"),
      ("nodes", -1),
      ("nodes", 10**17),
      ("trials", 5),
      ("trials", [5]),
      ("trials", [{"seed": 1}]),
      ("overrides", []),
      ("site", "gpu"),
      ("at_most", -1),
      ("site", {"mem": 5}),
      ("site", {"no such": 1}),
      ("name", None),
      ("spares", "2"),
      ("site", {"tasks_per_node": 10**15}),
      ("site", {"container": {"x y": 1}}),
    )
  },
  "a directory": None,
}


def row_of(runs, name):
  found = status.statuses(folders.all_folders(str(runs)))
  (row,) = (r for r in found if r.run == name)
  return row, str(found)


@pytest.fixture
def runs(tmp_path):
  for name in ("good", "bad"):
    (tmp_path / name / "train").mkdir(parents=True)
    (tmp_path / name / "events").mkdir()
    text = json.dumps(WHOLE | {"name": name})
    (tmp_path / name / "run.json").write_text(text)
  return tmp_path


@pytest.mark.parametrize("name", SPECS)
def test_a_spec_that_is_damaged_is_a_row(runs, name):
  put(runs / "bad" / "run.json", SPECS[name])
  row, table = row_of(runs, "bad")
  assert row.state == "UNREADABLE" and "run.json" in row.note
  assert len(table.splitlines()) == 3 and row_of(runs, "good")[0].state == "LOST"


def event(**changes):
  line = {"event": "end", "job": "7", "restarts": 0, "nodes": 4, "code": 0}
  return json.dumps(line | {"next": "stop", "hosts": "", "time": 0} | changes).encode()


# In the run's folder: file, content, and the state that is still known.
BESIDE = {
  "events that are lists": ("events/0.jsonl", b"[]\n5\n" + DEEP, "LOST"),
  "a code as text": ("events/0.jsonl", event(code="0"), "LOST"),
  "restarts as text": ("events/0.jsonl", event(restarts="1"), "LOST"),
  "nodes as a list": ("events/0.jsonl", event(nodes=[4]), "LOST"),
  "an end without a next": ("events/0.jsonl", event().replace(b"next", b"then"), "LOST"),
  "digits": ("events/0.jsonl", event().replace(b'"code": 0', b'"code": ' + HUGE), "LOST"),
  "no UTF-8": ("events/0.jsonl", b"\xff\n" + event(), "COMPLETED"),
  "submissions of other types": (
    "submissions.jsonl",
    b'{"job": 7}\n{"tasks": 5, "job": "7"}\n',
    "LOST",
  ),
  "a supervisor without a host": ("supervisor.jsonl", b'{"pid": 1}\n{"host": 5}', "LOST"),
  "steps as text": ("train/metrics.jsonl", b'{"step": "9", "time": 1}\n{"time": "x"}', "LOST"),
  "a loss as text": ("train/metrics.jsonl", b'{"step": 1, "train/loss": "low", "time": 1}', "LOST"),
  "a loss of 400 digits": (
    "train/metrics.jsonl",
    b'{"step": 1, "train/loss": ' + b"9" * 400 + b', "time": 1}',
    "LOST",
  ),
  "a config of other types": ("train/config.json", b'{"derived": []}', "LOST"),
  "steps of a config as text": ("train/config.json", b'{"derived": {"total_steps": "9"}}', "LOST"),
  "a deep config": ("train/config.json", DEEP, "LOST"),
}


@pytest.mark.parametrize("name", BESIDE)
def test_what_lies_beside_a_spec_is_left_out_where_it_is_damaged(runs, name):
  file, content, state = BESIDE[name]
  (runs / "bad" / "submissions.jsonl").write_text('{"job": "7", "tasks": null}\n')
  (runs / "bad" / file).write_bytes(content)
  row, table = row_of(runs, "bad")
  assert row.state == state and len(table.splitlines()) == 3


def test_a_link_that_leads_nowhere_is_a_row(runs):
  (runs / "bad" / "run.json").unlink()
  (runs / "bad" / "run.json").symlink_to("nowhere")
  found = status.statuses(folders.all_folders(str(runs)))
  assert [row.run for row in found] in (["good"], ["bad", "good"])


def test_escapes_do_not_reach_the_terminal(runs, capsys):
  evil = "\x1b]0;owned\x07\x1b[2J\u202e\ud800"
  path = runs / "bad" / "run.json"
  for changes in ({"name": evil}, {"site": {evil: 1}}, {"nodes": evil}):
    path.write_text(json.dumps(WHOLE | changes))
    for argv in (["status"], ["status", "bad"], ["logs", "bad"], ["cancel", "bad"]):
      cli.main([*argv, "--runs", str(runs)])
      out = "".join(capsys.readouterr())
      assert out and all(printable(c) == c for c in out.replace("\n", "")), out


def test_a_job_that_is_an_option_is_not_cancelled(runs):
  for job in ("--me", "7 8", "7\n8", "../7", ""):
    line = json.dumps({"job": job, "tasks": None})
    (runs / "bad" / "submissions.jsonl").write_text(f"{line}\n")
    assert folders.last_job(runs / "bad") == ""


def test_only_a_process_that_is_known_is_killed(runs, monkeypatch):
  """`kill -1` would end all that the user runs."""
  killed = []
  monkeypatch.setattr(os, "kill", lambda *args: killed.append(args))
  host = local_executor.socket.gethostname()
  born = local_executor._born(os.getpid())
  lines = [
    {"pid": pid, "born": when, "host": host}
    for pid, when in ((-1, None), (0, None), (1, local_executor._born(1)), (os.getpid(), born))
  ]
  text = "".join(json.dumps(line) + "\n" for line in lines)
  (runs / "bad" / "supervisor.jsonl").write_text(text)
  local_executor.cancel(folders.read_spec(runs / "bad"), "7")
  assert killed == [(os.getpid(), signal.SIGTERM)]


STUDIES = b'{"runs": [5]}', b'{"runs": ["../x"]}', b'{"runs": ["a\\u0000"]}'


@pytest.mark.parametrize("content", [*EVERY.values(), *STUDIES])
def test_a_damaged_study_is_one_line(runs, content):
  put(runs / "study" / "scaling.json", content)
  with config_error(match=r"scaling\.json: .*; give the names"):
    folders.find_study("study", str(runs))
