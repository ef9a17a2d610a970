"""A job that trains, of two processes, is asked for a trace as a user asks."""

import pytest

from jaxscale import jobs
from jaxscale.metrics import read_metrics
from jaxscale.planning import trace
from support.commands import error_line, jaxscale
from support.processes import wait_until


@pytest.mark.slow
def test_a_running_job_is_profiled_on_request(tmp_path, monkeypatch):
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  overrides = {"epochs": 100_000, "log.every_steps": 4, "log.tensorboard": False, "log.plot": False}
  overrides |= {"model": "MLP", "model.hidden": (64,)}
  overrides |= {"evaluation.every_epochs": 1e4, "checkpoint.every_epochs": 1e4}
  options = dict(executor="local", runs=str(tmp_path), nodes=2, name="digits")
  job = jobs.submit("configs/digits.py", overrides=overrides, **options)
  workdir = job.folder / "train"
  try:
    wait_until(lambda: read_metrics(workdir / "metrics.jsonl"), seconds=240)
    options = f"--runs={tmp_path}", "--steps=3", "--processes=0,1"
    done = jaxscale("profile", "digits", *options)
    assert done.returncode == 0, done.stderr
    asked, folder, head, *lines = done.stdout.splitlines()
    assert asked == f"{workdir}: requested a trace of 3 steps; waiting"
    files = trace.find(workdir)
    assert [str(p) for p in files] == [f"{folder}/process_{i}.xplane.pb" for i in (0, 1)]
    # Each process begins at the step in which it has read the request.
    steps = {trace.summarize([path]).steps for path in files}
    assert all(len(s) == 3 and s[2] - s[0] == 2 for s in steps)
    summary = trace.summarize(files)
    assert head.startswith(f"steps {summary.steps[0]}") and head.endswith(" each")
    devices = [name.split(" CPU:")[0] for name in summary.idle]
    assert devices == ["process_0", "process_1"]
    assert summary.ops[0].name in lines[-10] and lines[-11].startswith("operation")
    assert not (workdir / "profile" / "request.json").exists()
    last = read_metrics(workdir / "metrics.jsonl")[-1]["step"]
    wait_until(lambda: read_metrics(workdir / "metrics.jsonl")[-1]["step"] > last)
  finally:
    job.cancel()
    job.wait(300)
  assert "process 1: traced steps " in job.logs("all")
  line = error_line(jaxscale("profile", "digits", f"--runs={tmp_path}"), 2)
  assert line.endswith(
    "no run is training in this workdir; start one, or print an earlier trace by --summary"
  )
