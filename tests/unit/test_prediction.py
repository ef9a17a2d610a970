"""A run against its plan: parts, outcomes, and the constants that it determines."""

import json
import tomllib

import pytest

from jaxscale.cli import main
from jaxscale.errors import ConfigError
from jaxscale.launch import folder as folders
from jaxscale.launch import jobs, measured, prediction, scaling_report, site, status
from jaxscale.launch.corrections import paste
from jaxscale.launch.spec import QueueEntry
from jaxscale.planning import stored
from support.job_script import RUN
from support.plans import CONFIG, PLAN, STEP, plan_with, workdir


def against_plan(path, plan=PLAN, **run):
  return prediction.comparison(workdir(path / "run", plan, **run))


def part(found, name):
  (row,) = [p for p in found.parts if p.name.strip() == name]
  return row


def test_a_run_as_planned(tmp_path):
  found = against_plan(tmp_path, step_s=1.01)
  assert found.outcome == "the step is as planned, within the range (+1%)"
  assert not found.is_slower and not found.why
  step, compute = part(found, "step"), part(found, "compute")
  assert (step.planned, step.measured) == (1.0, pytest.approx(1.01))
  assert (step.low, step.high) == (0.8, 1.4)
  assert (compute.planned, compute.measured) == (pytest.approx(0.77), 0.77)
  assert part(found, "exposed data")[1:3] == (0.2, 0.2)
  # What is left of the step: 1.01 - 0.77 - 0.2, for 0.03 planned.
  rest = part(found, "host, and the rest")
  assert rest[1:3] == (0.03, pytest.approx(0.04))
  planned = sum(p.planned for p in found.parts if p.of_step)
  assert planned == pytest.approx(sum(STEP["parts"].values()))
  assert part(found, "memory of a device")[1:3] == (40e9, 44e9)
  assert part(found, "MFU, of the plan's peak")[1:3] == (
    pytest.approx(0.4),
    pytest.approx(0.4),
  )
  whole = part(found, "whole run")
  assert whole.planned == pytest.approx(288) and whole.measured == pytest.approx(170)
  assert part(found, "start-up and compiling")[1:3] == (180, pytest.approx(60))
  assert part(found, "saving")[1:3] == (10.0, pytest.approx(10.0))


@pytest.mark.parametrize(
  "run, where",
  [
    ({"compute": 1.5}, "compute: 1.5 s for 770.0 ms"),
    ({"exposed": 0.9}, "exposed data: 900.0 ms for 200.0 ms"),
    ({"wait": 0.4}, "input: 680.0 ms for 0"),
    ({}, "host, and the rest: 730.0 ms for 30.0 ms"),
  ],
)
def test_a_slower_run_says_in_which_part(tmp_path, run, where):
  found = against_plan(tmp_path, step_s=1.7, **run)
  assert found.is_slower
  assert found.outcome.endswith(f"beyond the range (+70%), most of it in {where}")


def test_a_faster_run_is_one_too(tmp_path):
  found = against_plan(tmp_path, step_s=0.5, compute=0.2)
  assert not found.is_slower and "faster than planned" in found.outcome
  assert "compute: 200.0 ms for 770.0 ms" in found.outcome


def test_what_is_sent_within_the_model_counts_as_compute(tmp_path):
  parts = {"matmul": 0.6, "exposed fsdp": 0.2, "exposed data": 0.1, "exposed replica":
           0.05, "host": 0.05}  # fmt: skip
  found = against_plan(tmp_path, plan_with(step={"parts": parts}))
  assert part(found, "compute").planned == pytest.approx(0.8)
  both = part(found, "exposed exchange")
  assert both[1:3] == (pytest.approx(0.15), 0.2)
  assert part(found, "replica")[1:3] == (0.05, None)


# A setting of the run, and what is reported of it.
OTHERS = [
  ({"dtype": "float32"}, "dtype is 'bfloat16' there and 'float32' in the run"),
  ({"model": {"class": "MLP", "width": 4096}}, "model.class is 'Transformer' there"),
  ({"optimizer": {"class": "SGD"}}, "optimizer.class is 'AdamW' there"),
  ({"data": {"class": "Digits"}}, "data.class is 'TextFiles' there"),
  ({"mesh": {"data": 2}}, "mesh.data is -1 there and 2 in the run"),
]


@pytest.mark.parametrize("changes, says", OTHERS)
def test_the_plan_of_another_config_is_compared_with_nothing(tmp_path, changes, says):
  found = against_plan(tmp_path, changes=changes)
  assert found.why.startswith(f"the plan is of another config: {says}")
  assert len(str(found).splitlines()) == 1 and found.parts == ()


def test_what_does_not_set_the_step_may_differ(tmp_path):
  changes = {"seed": 7, "epochs": 3.0, "optimizer": {"class": "AdamW", "lr": 1.0}}
  changes |= {"log": {"step_report": True, "every_steps": 5}, "input_threads": 3}
  found = against_plan(tmp_path, changes=changes)
  assert not found.why and "hours are not compared" in found.notes[0]
  assert not [p for p in found.parts if p.kind == "long"]
  stands = plan_with(config=CONFIG | {"data": {"class": "Synthetic", "size": 9}})
  assert not prediction.comparison(workdir(tmp_path / "b", stands)).why


def test_other_chips_and_devices(tmp_path):
  found = against_plan(tmp_path, plan_with(chips="v5e-16"))
  assert found.why == "the plan is of TPU v5e, the run is on NVIDIA H100 80GB HBM3"
  found = prediction.comparison(workdir(tmp_path / "4", PLAN, devices=4))
  assert found.why == "the plan has no batch 64 on 4 devices"
  found = prediction.comparison(workdir(tmp_path / "8", PLAN, devices=8))
  assert part(found, "step").planned == pytest.approx(1.8)  # of strong scaling


DAMAGED = ["", "{", "[]", "\0" * 99, "[" * 9999, "NaN", '{"chips": 5}']
DAMAGED += [
  json.dumps(plan_with(step={"seconds": {"low": 1, "expected": 0, "high": 1}}))
]
DAMAGED += [json.dumps(plan_with(mfu=float("nan"))), json.dumps(PLAN | {"step": {}})]


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_plan_is_one_line(tmp_path, content, capsys):
  path = workdir(tmp_path / "run")
  (path / "plan.json").write_text(content)
  with pytest.raises(ConfigError) as e:
    stored.read_plan(path / "plan.json")
  assert "\n" not in str(e.value) and "write it anew" in str(e.value)
  found = prediction.comparison(path)
  assert found.why and len(str(found).splitlines()) == 1
  described = json.loads((path / "config.json").read_text())
  line = stored.expectation(stored.of_workdir(path, described))
  assert line.startswith("plan.json: ") and "\n" not in line
  if content not in ("", "{"):
    return  # the command draws pictures, which takes its time
  files = [f"--csv={tmp_path}/t.csv", f"--png={tmp_path}/t.png"]
  page = f"--html={tmp_path}/p.html"
  assert main(["report", str(path), *files, page]) == 0
  assert "nothing is compared with it" in capsys.readouterr().out
  assert main(["report", str(path), *files, f"--plan={path}/plan.json"]) == 2
  assert len(capsys.readouterr().err.splitlines()) == 1


def test_training_with_no_plan_is_a_mistake(tmp_path, capsys):
  (tmp_path / "plan.json").write_text("{}")
  for name, why in (("none.json", "No such file"), ("plan.json", "no chips in it")):
    asked = ["--config=configs/digits.py", f"--plan={tmp_path}/{name}"]
    assert main(["train", *asked, f"--workdir={tmp_path}/run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert why in line and line.endswith("write it anew with `jaxscale plan`")
  assert not (tmp_path / "run").exists()


def test_a_folder_in_place_of_a_plan_is_one_line(tmp_path):
  path = workdir(tmp_path / "run")
  (path / "plan.json").mkdir()
  assert "Is a directory" in prediction.comparison(path).why


def corrected(found):
  return {c.name: c for c in found.corrections}


def test_a_share_of_the_peak_is_what_explains_the_compute(tmp_path):
  """Products that are planned as 0.63 s took 1.4 - 0.07, at 0.6 of the peak."""
  found = corrected(against_plan(tmp_path, compute=1.4 * 1.1, step_s=1.8))
  # Stragglers are a tenth of the kernels' time, and stay that.
  assert found["matmul"].value == pytest.approx(0.6 * 0.63 / 1.33)
  assert "2.00 times" in found["matmul"].why and found["matmul"].was == 0.6


@pytest.mark.parametrize(
  "plan, run, name, why",
  [
    (
      {"parts": {"matmul": 0.4, "memory": 0.3, "host": 0.03}}, {},
      "matmul and memory", "does not tell them apart",
    ),
    ({}, {"compute": 0.3}, "matmul", "more than the chip's peak allows"),
    (
      {"parts": STEP["parts"] | {"exposed fsdp": 0.3}}, {},
      "matmul", "what is sent within the model",
    ),
    ({"parts": STEP["parts"] | {"exposed data": 0.1}}, {}, "network_link",
     "the plan hides 50% of what is sent"),
    ({"sent": {"data": 0.2, "replica": 0.1}}, {}, "network_link", "several axes send"),
    ({}, {"exposed": 0.02}, "network_link", "within the noise of the step report"),
  ],
)  # fmt: skip
def test_what_a_run_does_not_determine_is_not_offered(tmp_path, plan, run, name, why):
  found = corrected(against_plan(tmp_path, plan_with(step=plan), **run))[name]
  assert found.value is None and why in found.why


def test_a_link_is_what_its_bytes_took_without_latencies(tmp_path):
  found = corrected(against_plan(tmp_path, exposed=0.4, step_s=1.2))["network_link"]
  latency = 0.2 - 3.6e9 / (0.75 * 25e9)
  assert found.value == pytest.approx(3.6e9 / (0.75 * (0.4 - latency)))
  compressed = CONFIG | {"exchange": {"class": "OneBit"}}
  other = workdir(tmp_path / "x", plan_with(config=compressed), changes=compressed)
  assert corrected(prediction.comparison(other))["network_link"].value is None


def test_input_start_and_checkpoints(tmp_path):
  found = corrected(against_plan(tmp_path, wait=0.5, step_s=2.0))
  assert found["input_rate"].value == pytest.approx(64 / 2.0 / 2)  # of two nodes
  assert found["start"].value == pytest.approx(60) and found["start"].was == 180
  assert found["save_rate"].value == pytest.approx(2 * 10**10 / 10)
  assert "input_rate" not in corrected(
    prediction.comparison(workdir(tmp_path / "b", PLAN, wait=0.05))
  )


def test_the_lines_go_into_a_site_s_file(tmp_path):
  found = against_plan(tmp_path, compute=1.54, exposed=0.4, wait=0.5, step_s=2.0)
  lines = paste(found.run, found.corrections)
  assert {*tomllib.loads(lines)["machine"]} == {
    "matmul", "network_link", "input_rate", "start", "save_rate"
  }  # fmt: skip
  (file := tmp_path / "site.toml").write_text(lines)
  machine = site.load_site(str(file)).machine
  for c in found.corrections:
    assert c.value is None or getattr(machine, c.name) == pytest.approx(c.value, 5e-3)
  assert all(line in str(found) for line in lines.splitlines())


def test_status_says_when_a_run_is_slower_than_planned(tmp_path):
  run = RUN._replace(folder=str(tmp_path / "slow"), nodes=2)
  workdir(tmp_path / "slow" / "train", PLAN, step_s=1.7, wait=0.4, done=False)
  (tmp_path / "slow" / "events").mkdir()
  folders.write_spec(run, ("job.sbatch", ""))
  row = status.status(run, 0, "7", QueueEntry("RUNNING", 2, "1:00:00", 0, "None"))
  assert row.is_slow and row.to_go == pytest.approx(68)
  assert row.against_plan.startswith("SLOWER THAN PLANNED, beyond the range (+70%)")
  assert "most of it in input: 680.0 ms for 0" in row.against_plan
  assert "in all expected, 4:48 planned (4:19 to 5:46)" in row.against_plan
  for width in (80, 200):
    lines = status.StatusTable([row]).shown(width).splitlines()
    assert max(map(len, lines)) <= width and not any("\x1b" in x for x in lines)
    assert lines[1].startswith("digits-1") and "RUNNING" in lines[1]
    assert lines[2].startswith("digits-1: SLOWER THAN PLANNED")
  assert "restarts" in status.StatusTable([row]).shown(200)


def test_before_the_first_steps_nothing_is_compared(tmp_path):
  path = workdir(tmp_path / "run", PLAN)
  (path / "metrics.jsonl").write_text("")
  assert prediction.comparison(path) is None
  run = RUN._replace(folder=str(tmp_path / "waits"))
  (tmp_path / "waits" / "train").mkdir(parents=True)
  (tmp_path / "waits" / "train" / "plan.json").write_text(json.dumps(PLAN))
  folders.write_spec(run, ("job.sbatch", ""))
  row = status.status(run, 0, "7", QueueEntry("PENDING", 2, "", 0, "Priority"))
  assert row.against_plan == "" and not row.is_slow


def test_without_a_plan_nothing_is_reported(tmp_path):
  assert prediction.comparison(workdir(tmp_path / "run")) is None
  found = measured.read(tmp_path / "run")
  assert found.planned is None
  assert "planned" not in scaling_report.table(scaling_report.compare([found]))[0]


def test_a_study_has_its_plan_s_curve(tmp_path):
  runs = [
    measured.read(workdir(tmp_path / f"r{n}", PLAN, devices=n, step_s=s))
    for n, s in ((8, 1.9), (16, 1.1))
  ]
  study = scaling_report.compare(runs)
  # 64 examples in 1.8, 1.0 and 0.6 s on 8, 16 and 32 devices.
  assert [(p.devices, round(p.expected, 3)) for p in study.planned.curve] == [
    (8, 1.0), (16, 1.8), (32, 3.0)
  ]  # fmt: skip
  assert study.planned.efficiency(16) == pytest.approx(0.9)
  (head, rows) = scaling_report.table(study)
  assert rows[1][head.index("planned")] == "90%"
  drawn = scaling_report.as_plot("x", study)
  assert {x["label"].split(",")[0] for x in drawn["published"]} == {
    "IBM DDL", "Goyal et al.", "You et al.", "torchtitan", "Megatron-LM"
  }  # fmt: skip
  other = measured.read(workdir(tmp_path / "o", PLAN, changes={"dtype": "float32"}))
  study = scaling_report.compare([other])
  assert study.planned.plan is None and "another config" in study.notes[-1]


def test_kernels_of_a_calibration_s_tables_are_no_share(tmp_path):
  tables = plan_with(machine={"tables": [{"kind": "matmul"}]})
  found = corrected(against_plan(tmp_path, tables, compute=1.5, step_s=1.8))
  assert found["matmul"].value is None and "calibrat" in found["matmul"].why


def test_a_job_is_submitted_with_its_plan(tmp_path, monkeypatch):
  (tmp_path / "plan.json").write_text(json.dumps(PLAN))
  monkeypatch.setattr(jobs, "_submit", lambda *_: None)
  given = {"executor": "local", "runs": str(tmp_path / "runs")}
  job = jobs.submit("configs/digits.py", plan=tmp_path / "plan.json", **given)
  assert json.loads((job.folder / "train" / "plan.json").read_text()) == PLAN
  with pytest.raises(ConfigError, match="No such file"):
    jobs.submit("configs/digits.py", plan=tmp_path / "none.json", **given)
