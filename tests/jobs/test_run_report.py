"""The report of one run: best and last values, problems, 80 columns, short runs."""

import json

import pytest

from jaxscale.files import append_json_line
from jaxscale.jobs.folder import write_spec
from jaxscale.jobs.measured import NotBegunError
from jaxscale.jobs.run_report import describe
from jaxscale.metrics import plot_metrics
from support.job_script import RUN

NAN = float("nan")


def workdir(path, *lines, **summary):
  path.mkdir()
  (path / "config.json").write_text("{}")
  text = "".join(json.dumps({"time": 1.0} | line) + "\n" for line in lines)
  (path / "metrics.jsonl").write_text(text)
  if summary:
    (path / "summary.json").write_text(json.dumps(summary))
  return path


LINES = [
  {"step": 10, "train/loss": 2.0, "perf/examples_per_s": 100.0},
  {"step": 10, "eval/loss": 1.5, "eval/accuracy": 0.5, "eval/recall": 0.25},
  {"step": 20, "train/loss": 1.0, "perf/examples_per_s": 300.0},
  {"step": 20, "eval/loss": 1.25, "eval/accuracy": 0.875, "eval/recall": 0.5},
  {"step": 30, "train/loss": NAN, "perf/examples_per_s": 200.0},
  {"step": 30, "eval/loss": 1.75, "eval/accuracy": 0.75, "eval/recall": 0.125},
]
DONE = dict(outcome="done", step=30, total_steps=30, devices="2 x cpu")


def test_a_run_has_its_last_and_best_evaluation(tmp_path):
  report = describe(workdir(tmp_path / "r", *LINES, **DONE, skipped_steps=1, target_accuracy=0.9))
  lines = [line.split() for line in report.splitlines()]
  assert report.startswith("r: done, 30 of 30 steps on 2 x cpu\n")
  assert lines[2] == ["last", "(step", "30)", "best", "(step", "20)", "curve"]
  assert ["training", "loss", "1", "1", "█▁"] in lines  # NaN is no point of a curve
  assert ["validation", "accuracy", "75.00%", "87.50%", "▁█▆"] in lines
  assert ["validation", "recall", "0.125", "0.5", "▃█▁"] in lines
  assert "speed: 250 examples/s (median)" in report
  assert "problems: skipped steps: 1; the target was not reached" in report
  assert max(map(len, report.splitlines())) <= 80


def test_a_run_that_lasts_has_what_is_known(tmp_path):
  report = describe(workdir(tmp_path / "r", LINES[0]))
  assert report.startswith("r: at step 10, no summary.json yet\n")
  assert "problems: none on record" in report and "speed" not in report
  with pytest.raises(NotBegunError, match="has not logged a step yet"):
    describe(workdir(tmp_path / "none"))


def test_a_run_that_resumes_is_not_reported_as_interrupted(tmp_path):
  summary = DONE | dict(outcome="interrupted", step=15)
  report = describe(workdir(tmp_path / "r", *LINES, **summary))
  assert report.startswith("r: at step 30 of 30, resumed at 15\n")


def test_a_preempted_job_that_restarts_is_not_a_problem(tmp_path):
  job = RUN._replace(folder=str(tmp_path / "r"), nodes=2)
  (tmp_path / "r" / "events").mkdir(parents=True)
  write_spec(job, ("job.sbatch", ""))
  path = workdir(tmp_path / "r" / "train", *LINES)
  start = dict(commit=None, changed=[], host="n1", command="train")
  append_json_line(path / "starts.jsonl", start)
  ends = [(85, "requeue"), (86, "requeue"), (85, "stop"), (143, "requeue"), (85, "stop")]
  for number, (code, then) in enumerate(ends):
    event = dict(job=str(number), restarts=0, nodes=2, hosts="n[1-2]")
    append_json_line(job.events_file(0), event | dict(event="start", code=0, next=""))
    append_json_line(job.events_file(0), event | dict(event="end", code=code, next=then))
  report = " ".join(describe(tmp_path / "r").split())
  assert "stops: 3 on request, requeued or resumed" in report
  failed = "job 1 ended with exit code 86 (requeue); job 4 ended with exit code 85 (stop)"
  assert f"problems: {failed} start: n[1-2]; train" in report  # without a commit


def test_a_run_of_one_logged_step_draws_points(tmp_path):
  """A line through one point is invisible."""
  one = plot_metrics(workdir(tmp_path / "one", LINES[0])).read_bytes()
  assert (
    one != plot_metrics(workdir(tmp_path / "two", {"step": 10, "train/loss": NAN})).read_bytes()
  )


@pytest.mark.parametrize("content", ["", "{", "[]", '{"step": {}}', "\0" * 99, "[" * 9999])
def test_damaged_records_are_left_out(tmp_path, content):
  path = workdir(tmp_path / "r", *LINES)
  for name in ("config.json", "summary.json", "activity.jsonl", "starts.jsonl", "growth.jsonl"):
    (path / name).write_text(content)
  assert describe(path).startswith("r: at step 30, no summary.json yet\n")
  (path / "metrics.jsonl").write_text(content)
  with pytest.raises(NotBegunError):
    describe(path)
