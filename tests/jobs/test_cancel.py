"""`cancel` ends the processes and jobs of the run, and no other that its folder records."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from jaxscale.jobs import folder as folders
from jaxscale.jobs import local_executor, slurm_executor, spec
from jaxscale.jobs.job_handle import Job
from support.errors import config_error
from support.job_script import RUN, fake
from support.processes import killed_at_end, popen, wait_until


@pytest.fixture
def runs(tmp_path):
  for name in ("good", "bad"):
    (tmp_path / name / "train").mkdir(parents=True)
    text = json.dumps(spec.to_json(RUN._replace(executor="local", name=name)))
    (tmp_path / name / "run.json").write_text(text)
  return tmp_path


def record(folder, file, *pids, **changes):
  """Record processes in the folder of a run."""
  host = local_executor.socket.gethostname()
  lines = [{"pid": p, "born": local_executor._born(p), "host": host} | changes for p in pids]
  (folder / file).write_text("".join(json.dumps(line) + "\n" for line in lines))


def sleeping(*words):
  """Start a process that has these words in its command line, and sleeps."""
  process = popen(sys.executable, "-c", "import time; time.sleep(600)", *words)
  # The kernel sets the words only after the end of what `Popen` waits for.
  wait_until(Path(f"/proc/{process.pid}/cmdline").read_bytes, process)
  return process


def test_only_a_process_that_is_known_is_killed(runs):
  """`kill -1` would end all that the user runs."""
  folder = runs / "bad"
  with killed_at_end(sleeping(f"{folder}/process.sh")) as process:
    record(folder, "supervisor.jsonl", -1, 0, 1, process.pid)
    local_executor.cancel(folders.read_spec(folder), "7")
    assert process.wait(60) == -signal.SIGTERM
  with killed_at_end(sleeping(folder)) as process:  # without a supervisor
    (folder / "supervisor.jsonl").unlink()
    record(folder, "processes.jsonl", process.pid, born=5)
    local_executor.cancel(folders.read_spec(folder), "7")
    record(folder, "processes.jsonl", process.pid, host="elsewhere")
    local_executor.cancel(folders.read_spec(folder), "7")
    assert process.poll() is None
    record(folder, "processes.jsonl", process.pid)
    local_executor.cancel(folders.read_spec(folder), "7")
    assert process.wait(60) == -signal.SIGKILL


@pytest.mark.parametrize("file", ["supervisor.jsonl", "processes.jsonl"])
def test_a_process_of_something_else_is_reported_and_lives(runs, file):
  folder = runs / "bad"
  with killed_at_end(sleeping(f"{folder}-2/process.sh", "bad", ".")) as process:
    record(folder, file, process.pid)
    assert not local_executor.is_alive(folder)
    with config_error(f"bad records process {process.pid}, whose command line does not name it"):
      local_executor.cancel(folders.read_spec(folder), "7")
    assert process.poll() is None


def test_a_run_is_known_by_each_of_its_paths(runs, tmp_path):
  """Home directories are often links."""
  (tmp_path / "link").symlink_to(runs)
  for named, asked in ((runs, tmp_path / "link"), (tmp_path / "link", runs)):
    with killed_at_end(sleeping(named / "bad")) as process:
      record(runs / "bad", "supervisor.jsonl", process.pid)
      assert local_executor.is_alive(asked / "bad")
      local_executor.cancel(folders.read_spec(asked / "bad"), "7")
      assert process.wait(60) == -signal.SIGTERM


@pytest.mark.parametrize("error", [AttributeError, OSError(38, "Function not implemented")])
def test_systems_without_descriptors_of_processes(runs, monkeypatch, error):
  def lacks(pid):
    raise error

  monkeypatch.setattr(os, "pidfd_open", lacks)
  with killed_at_end(sleeping(runs / "bad")) as process:
    record(runs / "bad", "supervisor.jsonl", process.pid)
    local_executor.cancel(folders.read_spec(runs / "bad"), "7")
    assert process.wait(60) == -signal.SIGTERM


SCRIPTS = {
  "of this run": ("{runs}/bad/job.sbatch", 0),
  "of its array": ("{runs}/bad/job.sbatch\n{runs}/bad/job.sbatch", 0),
  "of another run": ("{runs}/good/job.sbatch", 2),
  "of no run": ("/home/me/train.sh", 2),
  "of another name": ("{runs}/bad/other.sh", 2),
  "without a script": ("(null)", 2),
}


@pytest.mark.parametrize("case", SCRIPTS)
def test_only_a_job_of_the_run_is_cancelled(runs, tmp_path, monkeypatch, case):
  scripts, code = SCRIPTS[case]
  scripts = scripts.format(runs=runs)
  fake(tmp_path / "bin" / "squeue", f"[[ $* == *--jobs=7* ]] && echo '{scripts}'")
  fake(tmp_path / "bin" / "scancel", f'echo "$@" >"{tmp_path}/cancelled"')
  monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
  spec = folders.read_spec(runs / "bad")
  if code:
    with config_error(f"records job 7, whose script is {scripts}; end it by `scancel 7` if"):
      slurm_executor.cancel(spec, "7")
  else:
    slurm_executor.cancel(spec, "7")
  assert (tmp_path / "cancelled").exists() == (not code)


DECISIVE = ".", "run.json", "code", "submissions.jsonl", "supervisor.jsonl", "processes.jsonl"


@pytest.mark.parametrize("name", DECISIVE)
def test_a_run_that_others_decide_on_is_not_cancelled(runs, name, monkeypatch):
  folder = runs / "bad"
  path = folder / name
  if not path.exists():
    path.touch()
  if os.geteuid() == 0:
    os.chown(path, 12345, -1)
  else:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
  with config_error(match=r"bad\S* belongs to another user \(uid \d+\); have its owner cancel it"):
    Job(folder).cancel()
  assert not (folder / "cancelled").exists()


def test_the_mark_of_a_cancelled_run_is_not_put_through_a_link(runs):
  (runs / "bad" / "cancelled").symlink_to(runs / "made")
  with config_error(match="cancelled: .*symbolic links; remove it, and cancel again"):
    Job(runs / "bad").cancel()
  assert not (runs / "made").exists()


def test_a_script_replaces_a_link(runs):
  (runs / "precious").write_text("precious")
  (runs / "bad" / "process.sh").symlink_to(runs / "precious")
  folders.write_spec(folders.read_spec(runs / "bad"), ("process.sh", "echo"))
  assert (runs / "precious").read_text() == "precious"
  assert (runs / "bad" / "process.sh").read_text() == "echo"
