"""A job that trains, of two processes, is asked for a trace as a user asks."""

from pathlib import Path

import pytest

from jaxscale import jobs
from jaxscale.metrics import read_metrics
from support.commands import error_line, jaxscale
from support.processes import wait_until
from support.traces import steps_of, viewer_events


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
    asked, folder, viewers = done.stdout.splitlines()
    assert asked == f"{workdir}: requested a trace of 3 steps; waiting"
    assert f"`xprof --logdir {workdir}/profile`" in viewers
    files = sorted(Path(folder).glob("*.xplane.pb"))
    assert [path.name for path in files] == ["process_0.xplane.pb", "process_1.xplane.pb"]
    for process in (0, 1):  # Each begins at the step in which it has read the request.
      events = viewer_events(Path(folder), process)
      first, *_, last = steps = steps_of(events)
      assert len(steps) == 3 and last - first == 2
      assert any("hlo_op" in event.get("args", {}) for event in events)
    assert not (workdir / "profile" / "request.json").exists()
    last = read_metrics(workdir / "metrics.jsonl")[-1]["step"]
    wait_until(lambda: read_metrics(workdir / "metrics.jsonl")[-1]["step"] > last)
  finally:
    job.cancel()
    job.wait(300)
  assert "process 1: traced steps " in job.logs("all")
  line = error_line(jaxscale("profile", "digits", f"--runs={tmp_path}"), 2)
  assert line.endswith("no run is training in this workdir; start one")
