"""States of runs, from Slurm's answers and the files in their folders."""

import json

import pytest

from jaxscale import cli
from jaxscale.errors import ConfigError
from jaxscale.files import append_json_line
from jaxscale.jobs import slurm_executor, spec, status
from jaxscale.jobs.spec import QueueEntry
from jaxscale.metrics import read_json_lines
from support.job_script import RUN


def queued(state, **changes):
  return QueueEntry(state, 4, "1:00:00", 2, "None")._replace(**changes)


def write_events(run, *events):
  for event, job, code, next_ in events:
    line = {"event": event, "job": job, "restarts": 1, "nodes": 4, "code": code}
    append_json_line(run.events_file(0), line | {"next": next_, "time": 0})


START, DONE = ("start", "7", 0, ""), ("end", "7", 0, "stop")


MOVE, SAVED = ("move", "7", 1, ""), ("end", "7", 85, "stop")
STATES = [
  ([], False, "LOST"),
  ([], True, "CANCELLED"),
  ([START], False, "LOST"),
  ([START, DONE], False, "COMPLETED"),
  ([START, SAVED], False, "PREEMPTED"),
  ([START, SAVED], True, "CANCELLED"),
  ([START, ("end", "7", 85, "requeue")], False, "LOST"),
  ([START, MOVE], False, "LOST"),
  ([START, MOVE, DONE], False, "COMPLETED"),
  ([START, ("end", "7", 2, "stop")], False, "FAILED"),
  ([("start", "6", 0, ""), ("end", "6", 0, "stop")], False, "LOST"),
]


@pytest.mark.parametrize("events, cancelled, state", STATES)
def test_events_have_the_state_when_slurm_has_forgotten(tmp_path, events, cancelled, state):
  run = RUN._replace(folder=str(tmp_path))
  (tmp_path / "events").mkdir()
  write_events(run, *events)
  if cancelled:
    (tmp_path / "cancelled").touch()
  row = status.status(run, 0, "7", None)
  assert row.state == state and row.ended
  assert status.status(run, 0, "7", queued("RUNNING")).state == "RUNNING"


def test_a_status_has_all_that_was_asked_for(tmp_path):
  run = RUN._replace(folder=str(tmp_path), nodes=9)
  train = tmp_path / "train"
  train.mkdir()
  (train / "config.json").write_text('{"derived": {"total_steps": 1200}}')
  lines = [{"step": s, "train/loss": 2 - s / 1e3, "time": s / 10} for s in (100, 200)]
  lines += [{"step": 200, "perf/examples_per_s": 12345.6, "time": 20.0}]
  lines += [{"step": 200, "eval/accuracy": 0.5, "time": 21.0}]
  text = "\n".join(json.dumps(line) for line in lines) + '\n{"step": 300, "tr'
  (train / "metrics.jsonl").write_text(text)
  row = status.status(run, 0, "7", queued("RUNNING"))
  assert row.to_go == pytest.approx(100)
  head, line = str(status.StatusTable([row])).splitlines()
  cells = "digits-1 7 RUNNING 4 200/1,200 1.8000 12,346 50.00% 1:00:00 1:40 - 2"
  assert " ".join(line.split()) == cells
  titles = "run job state nodes step loss examples/s accuracy time left to go goodput restarts"
  assert " ".join(head.split()) == titles


def test_a_long_record_is_read_from_its_end(tmp_path):
  path = tmp_path / "metrics.jsonl"
  path.write_text("".join(f'{{"step": {i}, "x": "é"}}\n' for i in range(20_000)))
  found = read_json_lines(path, 1 << 16)
  assert found[-1]["step"] == 19_999 and 1000 < len(found) < 5000


ADVICE = {"sbatch": "or use --executor local", "squeue": "run this on a Slurm cluster"}


@pytest.mark.parametrize("command", ADVICE)
def test_where_no_cluster_answers_the_advice_is_of_the_command(command, tmp_path, monkeypatch):
  """Slurm's commands are installed on many machines that are of no cluster."""
  path = tmp_path / command
  path.write_text("#!/bin/sh\necho x: error: Unable to contact slurm controller >&2;exit 1")
  path.chmod(0o755)
  monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
  with pytest.raises(ConfigError) as error:
    slurm_executor._slurm(command)
  line = str(error.value)
  assert line.startswith(f"{command}: cannot reach Slurm (Unable to") and ADVICE[command] in line


def test_a_line_of_squeue_may_be_long():
  reason = "(ReqNodeNotAvail, UnavailableNodes:n[1-4])"
  for limit, left in (("2-00:00:00", "1-23:59:00"), ("UNLIMITED", "")):
    cells = ["12_3", "PENDING", "64", left or "364-23:59:59", "1", reason, limit]
    line = "".join(cell.ljust(128) for cell in cells)
    assert slurm_executor.parse_line(line) == ("12_3", QueueEntry("PENDING", 64, left, 1, reason))


def test_a_run_without_a_job_is_named(tmp_path, capsys):
  """A run of `make train` has nothing to cancel, and is no run of `submit`."""
  runs = f"--runs={tmp_path}"
  for name in ("digits", "other"):
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text("{}")
  assert cli.main(["status", runs]) == 0
  note = "not submitted, started by `jaxscale train`: digits, other; "
  out = capsys.readouterr().out
  assert out == f"{note}see `jaxscale report {tmp_path}/digits`\n"
  for verb in ("status", "cancel", "logs", "resume"):
    assert cli.main([verb, "digits", runs]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: digits was not submitted, so it has no job; ")
    assert f"jaxscale report {tmp_path}/digits" in error and error.count("\n") == 1
  folder = tmp_path / "good"
  folder.mkdir()
  (folder / "run.json").write_text(json.dumps(spec.to_json(RUN._replace(executor="local"))))
  assert cli.main(["status", runs]) == 0
  out = capsys.readouterr().out.splitlines()
  assert len(out) == 3 and out[-1].startswith(note)


def test_a_damaged_folder_hides_no_other_run(tmp_path):
  good = json.dumps(spec.to_json(RUN._replace(executor="local")))
  for name, text in (("good", good), ("bad", "[]")):
    (tmp_path / name).mkdir()
    (tmp_path / name / "run.json").write_text(text.replace("digits-1", "\\u001b[2J"))
  found = status.statuses([tmp_path / "good", tmp_path / "bad"])
  assert [row.state for row in found] == ["UNREADABLE", "LOST"]
  assert all(row.ended for row in found) and "run.json: it is not a JSON object" in found[0].note
  assert "\\x1b[2J" in str(found) and "\x1b" not in str(found)
