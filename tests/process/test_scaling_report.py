"""The report of a scaling study: out of real files, and out of made-up numbers."""

import csv
import json
import statistics

import pytest

from jaxscale import jobs
from jaxscale.cli import main
from jaxscale.errors import ConfigError
from jaxscale.files import append_json_line
from jaxscale.jobs import folder as folders
from jaxscale.jobs import measured, scaling_report
from jaxscale.jobs.measured import MeasuredRun
from jaxscale.metrics import plot_scaling, read_json_lines
from jaxscale.run import goodput
from jaxscale.run.goodput import Activity

CONFIG = {
  **{"model": {"class": "CNN", "dense": 128}, "optimizer": {"class": "SGD", "lr": 0.1}},
  **{"data": {"class": "Digits"}, "exchange": {"class": "AllReduce", "algorithm": "psum"}},
  **{"phases": {"class": "Phases"}, "log": {"step_report": True}, "seed": 0, "epochs": 5.0},
}


def run(devices, rate, **changes):
  """Return a run at `rate` examples per second, within a tenth."""
  rates = tuple(rate * x for x in (0.9, 1.0, 1.1)) if rate else ()
  step = dict(exposed_share=0.25, compute_s=0.003, exposed_s=0.001, spread=0.5)
  size = dict(nodes=devices, processes=devices, devices=devices, hosts=f"n[1-{devices}]")
  about = dict(config=CONFIG, num_train=1437, versions={"jax": "1"}, kind="cpu", batch=128)
  measures = dict(rates=rates, step_report=step, summary={"loss": 0.25, "accuracy": 0.75})
  return MeasuredRun(name=f"r-{devices}", **size, **about, **measures)._replace(**changes)


def workdir(path, lines, *, outcome="done", devices=2, **derived):
  """Write the files of a run that a report reads; return the workdir."""
  path.mkdir(parents=True)
  phase = {"batch_size": 128, "image_size": None}
  derived = dict(num_train=1437, total_steps=40, num_devices=devices, phases=[phase]) | derived
  described = {"config": CONFIG, "derived": derived, "versions": {}, "python": "3"}
  described |= {"processes": devices, "device_kind": "cpu"}
  (path / "config.json").write_text(json.dumps(described))
  (path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
  (path / "summary.json").write_text(json.dumps({"outcome": outcome, "loss": 0.5, "accuracy": 0.9}))
  return path


def logged(step, rate, time=None):
  return {"step": step, "perf/examples_per_s": rate, "time": time or float(step)}


STEP_REPORT = {"step": 0, "time": 0.5, "perf/compute_s": 0.03, "perf/exposed_s": 0.01}
STEP_REPORT |= {"perf/exposed_share": 0.25, "perf/spread": 0.1}


def test_the_warm_up_and_a_short_end_are_no_throughput(tmp_path):
  rates = [1.0, 50.0, 60.0, 70.0, 9999.0]  # the first is warm-up, the last short
  lines = [STEP_REPORT, *map(logged, [10, 20, 30, 40, 43], rates)]
  path = workdir(tmp_path / "w", lines)
  done = Activity(5.0, 9.0, 44, [0], {"starting": 1.0, "step": 3.0}, done=True)
  (path / goodput.FILE).write_text(json.dumps(done._asdict()))
  found = measured.read(path)
  assert found.rates == (50.0, 60.0, 70.0)
  assert (found.rate, found.quartiles) == (60.0, (55.0, 65.0))
  report = {"exposed_share": 0.25, "compute_s": 0.03, "exposed_s": 0.01, "spread": 0.1}
  assert found.step_report.items() >= report.items()
  assert (found.summary, found.kind) == ({"loss": 0.5, "accuracy": 0.9}, "cpu")
  assert found.missing == ()
  shown = str(scaling_report.compare([found])).splitlines()
  assert shown[2].split()[-3:] == ["75%", "0.5000", "90.00%"]
  assert "w: goodput 75% of 0:04: training 0:03, start-up 0:01" in shown


def test_one_process_has_no_spread(tmp_path):
  study = scaling_report.compare([measured.read(workdir(tmp_path / "w", [STEP_REPORT], devices=1))])
  assert next(csv.DictReader(scaling_report.as_csv(study).splitlines()))["spread"] == ""


def test_of_a_run_that_was_started_again_the_last_start_counts(tmp_path):
  """It may have other devices: config.json, which it has written, says which."""
  first = [STEP_REPORT, *(logged(s, 10.0) for s in (10, 20, 30))]
  again = {**STEP_REPORT, "step": 30, "perf/exposed_share": 0.75, "time": 100.0}
  last = [logged(s, 99.0 + s, 100.0 + s) for s in (40, 50, 60, 70)]
  path = workdir(tmp_path / "w", [*first, again, *last])
  starts = [json.dumps({"time": time}) + "\n" for time in (0.0, 99.5)]
  (path / "starts.jsonl").write_text("".join(starts))
  found = measured.read(path)
  assert found.rates == (149.0, 159.0, 169.0)
  assert found.step_report["exposed_share"] == 0.75


def test_events_have_the_nodes_of_the_last_start(tmp_path):
  from support.job_script import RUN

  path = tmp_path / "study-4n"
  job = RUN._replace(folder=str(path), nodes=4)
  workdir(path / "train", [logged(s, 20.0) for s in (40, 50, 60, 70)])
  (path / "events").mkdir()
  folders.write_spec(job, ("job.sbatch", ""))
  for time, nodes in ((1000, 4), (2000, 3)):
    event = {"event": "start", "time": time, "nodes": nodes, "hosts": "n[1-3]"}
    event |= {"job": "7", "restarts": 0, "code": 0, "next": ""}
    append_json_line(job.events_file(0), event)
  found = measured.read(path)
  assert (found.nodes, found.hosts, found.rates) == (3, "n[1-3]", (20.0,) * 3)


def test_what_is_missing_has_a_reason(tmp_path):
  lines = [logged(10, 5.0), logged(20, 6.0)]
  found = measured.read(workdir(tmp_path / "w", lines, outcome="interrupted"))
  assert found.rate == 6.0 and found.quartiles is None and found.summary == {}
  text = str(scaling_report.compare([found]))
  (row,) = [line for line in text.splitlines() if line.startswith("w ")]
  assert row.split() == ["w", "2", "2", "128", "6", "1"]
  for why in (
    "– w: quartiles: only 1 windows; log.every_steps=2 logs more often",
    "– w: exposed and spread: no step report, not measured yet",
    "– w: loss and accuracy: not done, at step 20 of 40",
    "– w: goodput: no activity.jsonl in the workdir",
  ):
    assert why in text.splitlines()


def test_a_batch_that_changes_has_no_throughput(tmp_path):
  phases = [{"batch_size": n, "image_size": None} for n in (128, 256)]
  path = workdir(tmp_path / "w", [], phases=phases)
  with pytest.raises(ConfigError, match=r"^w: the batch or image size changes"):
    measured.read(path)


def test_strong_scaling():
  """Amdahl's law itself, with a tenth of the smallest size's time serial."""
  serial, sizes = 0.1, (2, 4, 8)
  rates = [100 / (serial + (1 - serial) * 2 / n) for n in sizes]
  found = scaling_report.compare(list(map(run, sizes, rates))[::-1])
  assert found.kind == "strong" and found.base == 2
  assert [r["devices"] for r in found.rows] == [2, 4, 8]
  assert found.serial == pytest.approx(0.1)
  assert [r["speed_up"] for r in found.rows] == pytest.approx([r / 100 for r in rates])
  assert found.rows[1]["efficiency"] == pytest.approx(1 / 1.1)
  assert any("10.0% of the smallest" in n and "10.0 times" in n for n in found.notes)


def test_weak_scaling():
  """Half of each further device is lost, which Gustafson's law calls s = 0.5."""
  runs = [run(n, 100 * (n - 0.5 * (n - 1)), batch=64 * n) for n in (1, 2, 4)]
  found = scaling_report.compare(runs)
  assert found.kind == "weak" and found.serial == pytest.approx(0.5)
  assert found.rows[2]["efficiency"] == pytest.approx(2.5 / 4)


def test_the_fit_is_least_squares():
  points = [(1, 1.0), (2, 1.7), (4, 2.9), (8, 3.6)]
  for kind in ("strong", "weak"):
    share = scaling_report.serial_share(kind, points)
    assert share is not None

    def error(s, kind=kind):
      if kind == "strong":  # of the time an example takes
        return sum((1 / v - 1 / scaling_report.law(kind, s, n)) ** 2 for n, v in points)
      return sum((v - scaling_report.law(kind, s, n)) ** 2 for n, v in points)

    assert error(share) < min(error(share - 1e-3), error(share + 1e-3))


NO_LAW = [((100, 250), "scaling is ideal or better"), ((100, 90), "does not apply")]


@pytest.mark.parametrize("rates, says", NO_LAW)
def test_a_law_that_does_not_hold_is_not_drawn(rates, says):
  found = scaling_report.compare(list(map(run, (1, 2), rates)))
  assert found.serial is None and any(says in note for note in found.notes)
  assert scaling_report.as_plot(found)["law"] == []


REFUSED = [
  ({"batch": 100}, r"batches of 128 on 1 \(r-1\), 100 on 2 \(r-2\) devices: neither"),
  ({"config": CONFIG | {"model": {"class": "MLP"}}}, r"r-1 and r-2 differ in model\."),
  ({"config": CONFIG | {"optimizer": {"class": "SGD", "lr": 1}}}, r"in optimizer\.lr"),
  ({"config": CONFIG | {"exchange": {"class": "Int8"}}}, r"in exchange\.class"),
  ({"num_train": 99}, r"in training examples \(1437 and 99\)"),
  ({"kind": "H100"}, r"in devices \('cpu' and 'H100'\)"),
]


@pytest.mark.parametrize("changes, says", REFUSED)
def test_what_is_no_study_is_refused(changes, says):
  with pytest.raises(ConfigError, match=says) as e:
    scaling_report.compare([run(1, 100), run(2, 150, **changes)])
  assert "\n" not in str(e.value)


def test_what_may_differ_is_reported():
  ring = CONFIG | {"exchange": {"class": "AllReduce", "algorithm": "ring"}, "seed": 1}
  other = run(2, 150, config=ring, versions={"jax": "2"})
  text = "\n".join(scaling_report.compare([run(1, 100), other]).notes)
  assert "exchange.algorithm is not the same in all: psum (r-1), ring (r-2)" in text
  assert "seed is not" in text
  assert "versions.jax is not the same in all: 1 (r-1), 2 (r-2)" in text
  assert "losses differ" not in text  # of other seeds that says nothing


def test_one_machine_is_reported():
  runs = [run(n, 100, nodes=1, hosts="laptop") for n in (1, 2)]
  assert any("on one machine (laptop)" in n for n in scaling_report.compare(runs).notes)
  assert not any("machine" in n for n in scaling_report.compare([run(1, 9), run(2, 9)]).notes)


def test_repeats_count_by_their_median():
  runs = [run(1, r, name=f"r-{r}") for r in (90, 100, 140)] + [run(2, 150)]
  assert scaling_report.compare(runs).rows[-1]["speed_up"] == pytest.approx(1.5)


def test_csv_and_picture_of_what_is_known_and_what_is_not(tmp_path):
  gap = run(4, None, step_report={}, summary={})
  found = scaling_report.compare([run(1, 100), run(2, 150), gap])
  rows = list(csv.DictReader(scaling_report.as_csv(found).splitlines()))
  assert float(rows[1]["speed_up"]) == 1.5 and float(rows[1]["efficiency"]) == 0.75
  assert float(rows[1]["examples_per_s_q3"]) == pytest.approx(157.5)
  named = [rows[1][n] for n in ("exposed_share", "compute_s", "exposed_s", "spread")]
  assert named == ["0.25", "0.003", "0.001", "0.5"]
  assert rows[2]["examples_per_s"] == rows[2]["loss"] == rows[2]["speed_up"] == ""
  for i, runs in enumerate(([run(1, 100), run(2, 150), gap], [gap], [gap] * 2)):
    path = plot_scaling(scaling_report.as_plot(scaling_report.compare(runs)), tmp_path / f"{i}.png")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_command_reads_workdirs(tmp_path, capsys):
  lines = [STEP_REPORT, *(logged(s, 10.0 * s) for s in (10, 20, 30, 40))]
  names = [str(workdir(tmp_path / n, lines, devices=d)) for n, d in (("a", 1), ("b", 2))]
  assert main(["report", *names, "--to", f"{tmp_path}/t"]) == 0
  out = capsys.readouterr().out
  assert out.startswith("scaling: strong scaling, global batch 128; speed-up and eff")
  assert {p.name for p in (tmp_path / "t").iterdir()} == {"scaling.csv", "scaling.png"}
  for argv, says in (
    ([names[0], "--rusn=x"], "did you mean '--runs'?"),
    (["nothing-here", f"--runs={tmp_path}"], "nothing-here: no such run, give one of a, b"),
    ([], "RUN"),
  ):
    assert main(["report", *argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


@pytest.mark.slow
def test_a_real_study_from_a_notebook(tmp_path, monkeypatch):
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  runs = str(tmp_path / "runs")
  overrides = {"epochs": 6, "log.every_steps": 4, "log.tensorboard": False, "log.plot": False}
  options = dict(executor="local", runs=runs, overrides=overrides)
  study = jobs.scaling("configs/digits.py", [1, 2], batch="grows", name="digits", **options)
  try:
    assert [r.state for r in study.wait(200)] == ["COMPLETED"] * 2, study.status()
    assert jobs.study("digits", runs) == study
    found = study.report()
  finally:
    study.cancel()
  assert found.kind == "weak"
  sizes = [(row["devices"], row["global_batch"]) for row in found.rows]
  assert sizes == [(1, 128), (2, 256)]
  for job in study.jobs:
    measure = measured.read(job.folder)
    rates = [x["perf/examples_per_s"] for x in job.metrics() if "train/loss" in x]
    assert set(measure.rates) < set(rates) and len(measure.rates) >= 5
    assert measure.rate == statistics.median(measure.rates)
    assert rates[0] not in measure.rates
    assert {"exposed_share", "spread"} <= measure.step_report.keys()
    assert "accuracy" in measure.summary
  # One after another: else they would have measured each other.
  ends = [read_json_lines(job.folder / "events" / "0.jsonl") for job in study.jobs]
  assert ends[0][-1]["event"] == "end" and ends[0][-1]["time"] <= ends[1][0]["time"]
  assert (study.folder / "scaling.csv").exists()
  assert (study.folder / "scaling.png").stat().st_size > 10_000
  page = found._repr_html_()
  assert "<svg" in page and "digits-2n" in page
