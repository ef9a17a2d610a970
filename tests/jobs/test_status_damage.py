"""`status`: a folder of a run that is damaged is a row, and hides no other run."""

import json

import pytest

from jaxscale import cli
from jaxscale.errors import printable
from jaxscale.jobs import folder as folders
from jaxscale.jobs import spec, status
from support.bad_files import DEEP, EVERY, HUGE, put
from support.errors import config_error
from support.job_script import RUN

WHOLE = spec.to_json(RUN._replace(executor="local"))
VALUES = [
  *(("nodes", value) for value in ("4", -1, 10**17)),
  *(("trials", value) for value in (5, [5], [{"seed": 1}])),
  *(("site", value) for value in ("gpu", {"mem": 5}, {"no such": 1})),
  *(("site", value) for value in ({"tasks_per_node": 10**15}, {"container": {"x y": 1}})),
  *(("overrides", []), ("at_most", -1), ("name", None), ("spares", "2")),
]
SPECS = EVERY | {"a directory": None}
for name, value in VALUES:
  SPECS[f"{name} that is {value!r:.9}"] = json.dumps(WHOLE | {name: value}).encode()


def row_of(runs, name):
  found = status.statuses(folders.all_folders(str(runs)))
  (row,) = (r for r in found if r.run == name)
  return row, str(found)


@pytest.fixture
def runs(tmp_path):
  for name in ("good", "bad"):
    (tmp_path / name / "train").mkdir(parents=True)
    (tmp_path / name / "events").mkdir()
    (tmp_path / name / "run.json").write_text(json.dumps(WHOLE | {"name": name}))
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


# In the run's folder: file and content.
EVENTS, METRICS, SETTINGS = "events/0.jsonl", "train/metrics.jsonl", "train/config.json"
BESIDE = {
  "events that are lists": (EVENTS, b"[]\n5\n" + DEEP),
  "a code as text": (EVENTS, event(code="0")),
  "restarts as text": (EVENTS, event(restarts="1")),
  "nodes as a list": (EVENTS, event(nodes=[4])),
  "an end without a next": (EVENTS, event().replace(b"next", b"then")),
  "digits": (EVENTS, event().replace(b'"code": 0', b'"code": ' + HUGE)),
  "no UTF-8": (EVENTS, b"\xff\n" + event()),
  "a job as a number": ("submissions.jsonl", b'{"job": 7}\n{"tasks": 5, "job": "7"}\n'),
  "a supervisor without a host": ("supervisor.jsonl", b'{"pid": 1}\n{"host": 5}'),
  "steps as text": (METRICS, b'{"step": "9", "time": 1}\n{"time": "x"}'),
  "a loss as text": (METRICS, b'{"step": 1, "train/loss": "low", "time": 1}'),
  "400 digits": (METRICS, b'{"step": 1, "train/loss": ' + b"9" * 400 + b', "time": 1}'),
  "a config of other types": (SETTINGS, b'{"derived": []}'),
  "steps of a config as text": (SETTINGS, b'{"derived": {"total_steps": "9"}}'),
  "a deep config": (SETTINGS, DEEP),
}


@pytest.mark.parametrize("name", BESIDE)
def test_what_lies_beside_a_spec_is_left_out_where_it_is_damaged(runs, name):
  file, content = BESIDE[name]
  (runs / "bad" / "submissions.jsonl").write_text('{"job": "7", "tasks": null}\n')
  (runs / "bad" / file).write_bytes(content)
  row, table = row_of(runs, "bad")
  assert row.state == ("COMPLETED" if name == "no UTF-8" else "LOST")
  assert len(table.splitlines()) == 3


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


STUDIES = b'{"runs": [5]}', b'{"runs": ["../x"]}', b'{"runs": ["a\\u0000"]}'


@pytest.mark.parametrize("content", [*EVERY.values(), *STUDIES])
def test_a_damaged_study_is_one_line(runs, content):
  put(runs / "study" / "scaling.json", content)
  with config_error(match=r"scaling\.json: .*; give the names"):
    folders.find_study("study", str(runs))
