"""A run against its plan: what is compared, and why something is not."""

import json

import pytest

from jaxscale.cli import main
from jaxscale.errors import ConfigError
from jaxscale.jobs import folder as folders
from jaxscale.jobs import job_handle, measured, prediction, scaling_report, status
from jaxscale.jobs.spec import QueueEntry
from jaxscale.planning import stored
from support.job_script import RUN
from support.plans import CONFIG, PLAN, plan_with, workdir


def against_plan(path, plan=PLAN, **run):
  return prediction.comparison(workdir(path / "run", plan, **run))


def rows_of(compared):
  return {row.name.strip(): row[1:3] for row in compared.rows}


def test_a_run_is_compared_in_one_short_table(tmp_path):
  compared = against_plan(tmp_path, step_s=1.5)
  assert str(compared).splitlines() == [
    "run against its plan: h100-16, batch 64 on 16 devices; a step in 800.0 ms to 1.4 s",
    "                     planned  measured  ratio",
    "step                   1.0 s     1.5 s   1.50",
    "  compute           770.0 ms  770.0 ms   1.00",
    "  exposed exchange  200.0 ms  200.0 ms   1.00",
    "memory of a device   40.0 GB   44.0 GB   1.10",
    "whole run               4:48      2:50   0.59",
  ]


def test_what_is_sent_within_the_model_counts_as_compute(tmp_path):
  parts = {"matmul": 0.6, "exposed fsdp": 0.2, "exposed data": 0.1, "host": 0.05}
  parts["exposed replica"] = 0.05
  rows = rows_of(against_plan(tmp_path, plan_with(step={"parts": parts})))
  assert rows["compute"][0] == pytest.approx(0.8)
  assert rows["exposed exchange"] == (pytest.approx(0.15), 0.2)


# A setting of the run, and what is reported of it.
OTHERS = [
  ({"dtype": "float32"}, "dtype is 'bfloat16' in the plan and 'float32' in the run"),
  ({"model": {"class": "MLP", "width": 4096}}, "model.class is 'Transformer' in the"),
  ({"optimizer": {"class": "SGD"}}, "optimizer.class is 'AdamW' in the plan"),
  ({"data": {"class": "Digits"}}, "data.class is 'TextFiles' in the plan"),
  ({"mesh": {"data": 2}}, "mesh.data is -1 in the plan and 2 in the run"),
]


@pytest.mark.parametrize("changes, says", OTHERS)
def test_the_plan_of_another_config_is_compared_with_nothing(tmp_path, changes, says):
  compared = against_plan(tmp_path, changes=changes)
  assert compared.reason.startswith(f"the plan has a different config: {says}")
  assert len(str(compared).splitlines()) == 1 and compared.rows == ()


def test_what_does_not_set_the_step_may_differ(tmp_path):
  changes = {"seed": 7, "epochs": 3.0, "optimizer": {"class": "AdamW", "lr": 1.0}}
  changes |= {"log": {"step_report": True, "every_steps": 5}, "input_threads": 3}
  compared = against_plan(tmp_path, changes=changes)
  assert compared.rows and "whole run" not in rows_of(compared)
  stands = plan_with(config=CONFIG | {"data": {"class": "Synthetic", "size": 9}})
  assert prediction.comparison(workdir(tmp_path / "b", stands)).rows


def test_other_chips_and_devices(tmp_path):
  compared = against_plan(tmp_path, plan_with(chips="v5e-16"))
  assert compared.reason == "the plan is for TPU v5e, the run is on NVIDIA H100 80GB HBM3"
  compared = prediction.comparison(workdir(tmp_path / "4", PLAN, devices=4))
  assert compared.reason == "the plan has no batch 64 on 4 devices"
  compared = prediction.comparison(workdir(tmp_path / "8", PLAN, devices=8))
  assert rows_of(compared)["step"][0] == pytest.approx(1.8)  # of strong scaling


DAMAGED = ["", "{", "[]", "\0" * 99, "[" * 9999, "NaN", '{"chips": 5}']
DAMAGED += [
  json.dumps(plan_with(step={"seconds": {"low": 1, "expected": 0, "high": 1}})),
  json.dumps(plan_with(job={"hours": dict.fromkeys(stored.CORNERS, float("nan"))})),
  json.dumps(PLAN | {"step": {}}),
]


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_plan_is_one_line(tmp_path, content, capsys):
  path = workdir(tmp_path / "run")
  (path / "plan.json").write_text(content)
  with pytest.raises(ConfigError) as e:
    stored.read_plan(path / "plan.json")
  assert "\n" not in str(e.value) and "create it again" in str(e.value)
  compared = prediction.comparison(path)
  assert compared.reason and len(str(compared).splitlines()) == 1
  if content not in ("", "{"):
    return  # the command draws pictures, which takes its time
  to = f"--to={tmp_path}/t"
  assert main(["report", str(path), to]) == 0
  assert "nothing is compared with it" in capsys.readouterr().out


def test_training_with_no_plan_is_a_mistake(tmp_path, capsys):
  (tmp_path / "plan.json").write_text("{}")
  for name, why in (("none.json", "No such file"), ("plan.json", "no chips in it")):
    asked = ["--config=configs/digits.py", f"--plan={tmp_path}/{name}"]
    assert main(["train", *asked, f"--workdir={tmp_path}/run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert why in line and line.endswith("create it again with `jaxscale plan`")
  assert not (tmp_path / "run").exists()


def test_a_folder_in_place_of_a_plan_is_one_line(tmp_path):
  path = workdir(tmp_path / "run")
  (path / "plan.json").mkdir()
  assert "Is a directory" in prediction.comparison(path).reason


def test_status_shows_the_step_against_its_plan(tmp_path):
  run = RUN._replace(folder=str(tmp_path / "slow"), nodes=2)
  workdir(tmp_path / "slow" / "train", PLAN, step_s=1.7, done=False)
  (tmp_path / "slow" / "events").mkdir()
  folders.write_spec(run, ("job.sbatch", ""))
  row = status.status(run, 0, "7", QueueEntry("RUNNING", 2, "1:00:00", 0, "None"))
  assert row.note == "step 1.7 s, planned 1.0 s (1.70 x)"
  assert row.to_go == pytest.approx(68)
  for width in (80, 200):
    lines = status.StatusTable([row]).shown(width).splitlines()
    assert max(map(len, lines)) <= width and "RUNNING" in lines[1]
  assert lines[1].endswith(row.note)


def test_before_the_first_steps_nothing_is_compared(tmp_path):
  path = workdir(tmp_path / "run", PLAN)
  (path / "metrics.jsonl").write_text("")
  assert prediction.comparison(path) is None
  run = RUN._replace(folder=str(tmp_path / "waits"))
  (tmp_path / "waits" / "train").mkdir(parents=True)
  (tmp_path / "waits" / "train" / "plan.json").write_text(json.dumps(PLAN))
  folders.write_spec(run, ("job.sbatch", ""))
  row = status.status(run, 0, "7", QueueEntry("PENDING", 2, "", 0, "Priority"))
  assert row.note == "(Priority)"


def test_without_a_plan_nothing_is_reported(tmp_path):
  assert prediction.comparison(workdir(tmp_path / "run")) is None
  run = measured.read(tmp_path / "run")
  assert run.planned is None
  assert "planned" not in scaling_report.table(scaling_report.compare([run]))[0]


def test_a_study_shows_the_planned_efficiency(tmp_path):
  took = {8: 1.9, 16: 1.1}
  runs = [workdir(tmp_path / f"r{n}", PLAN, devices=n, step_s=s) for n, s in took.items()]
  runs = [measured.read(path) for path in runs]
  study = scaling_report.compare(runs)
  # 64 examples in 1.8 and 1.0 s on 8 and 16 devices.
  planned = [row["planned_efficiency"] for row in study.rows]
  assert planned == [1.0, pytest.approx(0.9)]
  (head, rows) = scaling_report.table(study)
  assert rows[1][head.index("planned")] == "90%"
  other = measured.read(workdir(tmp_path / "o", PLAN, changes={"dtype": "float32"}))
  study = scaling_report.compare([other])
  assert study.rows[0]["planned_efficiency"] is None
  assert any("different config" in note for note in study.notes)


def test_a_job_is_submitted_with_its_plan(tmp_path, monkeypatch):
  (tmp_path / "plan.json").write_text(json.dumps(PLAN))
  monkeypatch.setattr(job_handle, "_submit", lambda *_: None)
  given = {"executor": "local", "runs": str(tmp_path / "runs")}
  job = job_handle.submit("configs/digits.py", plan=tmp_path / "plan.json", **given)
  assert json.loads((job.folder / "train" / "plan.json").read_text()) == PLAN
  with pytest.raises(ConfigError, match="No such file"):
    job_handle.submit("configs/digits.py", plan=tmp_path / "none.json", **given)
