"""Runs in the background of this machine, by their real supervisor."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from jaxscale import cli, jobs
from jaxscale.cluster import local_launch
from jaxscale.errors import ConfigError
from jaxscale.jobs import folder as folders
from jaxscale.jobs import local_executor
from jaxscale.jobs.job_handle import Record
from jaxscale.metrics import read_json_lines
from support.commands import child_env, run_python
from support.processes import killed_at_end, popen

DIGITS = "configs/digits.py"

# In place of Python: says what it was given, logs a step, and does as a file says.
STAND_IN = r"""#!/bin/bash
echo "process ${JAXSCALE_PROCESS_ID:-alone} of ${JAXSCALE_NUM_PROCESSES:-1}: $*"
while [ $# -gt 0 ]; do [ "$1" = --workdir ] && workdir=$2; shift; done
mkdir -p "$workdir/checkpoints"
trap 'mkdir -p "$workdir/checkpoints/77"; echo saved; exit 85' TERM
echo '{"step": 3, "train/loss": 0.5, "time": 1}' >>"$workdir/metrics.jsonl"
source "$(dirname "$0")/does"
"""
# Waits until all four processes mind SIGTERM.
ALL_MIND = """{
  until [ "$(wc -l <"$workdir/metrics.jsonl")" = 4 ]; do sleep 0.1; done; } &&"""


@pytest.fixture
def fake(tmp_path):
  """Options of a submission whose processes do what is written into `does`."""
  python = tmp_path / "python"
  python.write_text(STAND_IN)
  python.chmod(0o755)
  (tmp_path / "does").write_text("sleep 0.3")
  runs = tmp_path / "runs in a directory"
  yield {"executor": "local", "python": str(python), "runs": str(runs)}
  for folder in folders.all_folders(str(runs)):
    local_executor.cancel(folders.read_spec(folder), "")
    for _ in range(200):
      if not local_executor.is_alive(folder):
        break
      time.sleep(0.05)


def until(condition, seconds=300.0):
  deadline = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < deadline
    time.sleep(0.05)


def wait(job, seconds=300.0):
  return job.wait(seconds, every_s=0.1)


def events(job, task=0):
  lines = read_json_lines(job.folder / "events" / f"{task}.jsonl")
  return [(line["event"], line["code"], line["next"]) for line in lines]


def real_run(tmp_path, monkeypatch, name, **options):
  """Submit a run that trains."""
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  overrides = {
    "epochs": 3,
    "log.tensorboard": False,
    "log.plot": False,
    "model": "MLP",
    "model.hidden": (64,),
  }
  overrides["log.every_steps"] = 4
  options |= dict(executor="local", runs=str(tmp_path), nodes=1, name=name)
  return jobs.submit(DIGITS, overrides=overrides, **options)


def test_a_real_run_from_a_notebook(tmp_path, monkeypatch):
  job = real_run(tmp_path, monkeypatch, "digits")
  (row,) = job.wait(300)
  assert (row.state, row.code, row.restarts) == ("COMPLETED", 0, 0), job.logs("batch")
  assert row.step == row.total == round(3 * 1437 / 128)
  assert row.loss is not None and row.rate is not None and row.accuracy is not None
  table = job.metrics()
  assert [line["step"] for line in table] == sorted(line["step"] for line in table)
  assert table[-1]["eval/accuracy"] == row.accuracy and "train/loss" in table[0]
  assert "validation accuracy" in job.logs() and "done: " in job.logs(lines=1)
  assert "COMPLETED" in repr(job.status())
  with pytest.raises(ConfigError, match="digits: is done"):
    job.resume()


# Imported by Python itself before any program: only `python -P` survives these.
PYTHONS = "collections contextlib functools importlib keyword operator reprlib types warnings"


@pytest.fixture
def shadowed(tmp_path):
  """Return a folder whose files are named as Python's modules and our packages."""
  taken = {*sys.builtin_module_names, *PYTHONS.split()}
  names = [n for n in sys.stdlib_module_names - taken if find_spec(n)]
  for name in (*names, "jax", "numpy", "optax", "flax"):
    (tmp_path / f"{name}.py").write_text(f"raise ImportError('shadowed {name}')")
  (tmp_path / "mine.py").write_text("EPOCHS = 1")
  (tmp_path / "digits.py").write_text("""
import jaxscale as jxs
from mine import EPOCHS
def get_config(arg=None):
  return jxs.Config(model=jxs.models.MLP(hidden=(8,)), data=jxs.data.Digits(),
                    optimizer=jxs.optim.SGD(lr=0.1), batch_size=128, epochs=EPOCHS)
""")
  return tmp_path


def in_folder(folder, *words, **env):
  done = run_python(*words, cwd=folder, timeout=600, JAX_PLATFORMS="cpu", **env)
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout


def test_files_called_like_pythons_modules_hide_none(shadowed):
  config = "--config=digits.py"
  assert "done: " in in_folder(shadowed, "-m", "jaxscale.train", config, "--workdir=a")
  assert "ready" in in_folder(shadowed, "-m", "jaxscale", "doctor", config, "--skip=disk")


@pytest.mark.parametrize("verb", ["submit", "sweep"])
def test_jobs_of_a_folder_with_such_files_run(shadowed, verb):
  words = ["--config=digits.py", "--executor=local", "--name=j"]
  words += ["--sweep=seed=1,2"] if verb == "sweep" else []
  in_folder(shadowed, "-m", "jaxscale", verb, *words)
  job = jobs.job("j", str(shadowed / "runs"))
  assert {row.state for row in wait(job)} == {"COMPLETED"}, job.logs()


def test_nothing_is_imported_from_the_current_folder(tmp_path):
  """Anybody may have written it; a config is imported from its own folder."""
  code = "import sys, os; print(sys.path[0] == os.getcwd(), os.getcwd() in sys.path)"
  (tmp_path / "configs").mkdir()
  (tmp_path / "configs" / "c.py").write_text(f"{code}\nsys.stdout.flush(); os._exit(0)")
  for options in ([], ["-P"]):
    out = in_folder(tmp_path, *options, "-m", "jaxscale.train", "--config=configs/c.py")
    assert out.split() == ["False", "False"]
  (tmp_path / "other.py").write_text(f"import jaxscale\n{code}")
  assert in_folder(tmp_path, "-m", "other").split() == ["True", "True"]
  (tmp_path / "configs" / "c.py").write_text("import helper_beside_configs")
  (tmp_path / "helper_beside_configs.py").write_text(f"{code}\nsys.stdout.flush(); os._exit(0)")
  done = run_python("-m", "jaxscale.train", "--config=configs/c.py", cwd=tmp_path)
  assert "to import it from the current directory, set PYTHONPATH=." in done.stderr


@pytest.mark.slow
def test_two_processes_share_a_secret_that_is_in_no_file(tmp_path, monkeypatch):
  job = real_run(tmp_path, monkeypatch, "two", tasks_per_node=2)
  (row,) = job.wait(300)
  assert (row.state, row.code, row.restarts) == ("COMPLETED", 0, 0), job.logs("batch")
  starts = read_json_lines(job.folder / "train" / "starts.jsonl")
  assert starts and "JAX_PLATFORMS" in starts[0]["variables"]
  files = [p for p in tmp_path.rglob("*") if p.is_file() and "code" not in p.parts]
  assert len(files) > 5
  assert not [p for p in files if b"JAXSCALE_SECRET" in p.read_bytes()]


def test_several_processes_know_each_other_and_have_files(fake):
  job = jobs.submit(DIGITS, nodes=2, tasks_per_node=2, **fake)
  wait(job)
  for rank in range(4):
    assert f"process {rank} of 4: -m jaxscale.train --config " in job.logs(rank)
  assert [line[:3] for line in job.logs("all").splitlines()] == ["0: ", "1: ", "2: ", "3: "]
  with pytest.raises(ConfigError, match=r"--rank=4: give 0 … 3, all or batch"):
    job.logs(4)


def test_a_sweep_runs_two_at_a_time(fake, tmp_path):
  for folder in (running := tmp_path / "running", begun := tmp_path / "begun"):
    folder.mkdir()
  (tmp_path / "does").write_text(
    f'touch "{running}/$$" "{begun}/$$"\n'
    f'until [ "$(ls "{begun}" | wc -l)" -ge 2 ]; do sleep 0.1; done\n'
    f'ls "{running}" | wc -l; sleep 0.4; rm "{running}/$$"'
  )
  job = jobs.sweep(DIGITS, [{"seed": i} for i in range(6)], at_most=2, **fake)
  assert {row.state for row in job.status()} & {"RUNNING", "PENDING"}
  rows = wait(job)
  assert [row.state for row in rows] == ["COMPLETED"] * 6
  assert [row.note for row in rows] == [f"seed={i}" for i in range(6)]
  seen = [int(job.logs(task=i).splitlines()[1]) for i in range(6)]
  assert max(seen) == 2
  assert all(f"--config.seed={i}" in job.logs(task=i) for i in range(6))
  assert [line["task"] for line in job.metrics()] == list(range(6))


def test_a_study_runs_one_size_after_another(fake, tmp_path):
  order = tmp_path / "order"
  script = f'sleep 0.3; echo "${{JAXSCALE_NUM_PROCESSES:-1}}" >>"{order}"; sleep 0.3'
  (tmp_path / "does").write_text(script)
  study = jobs.scaling(DIGITS, [2, 4, 1], name="study", **fake)
  rows = study.wait(300, every_s=0.1)
  assert [(row.run, row.state) for row in rows] == [(f"study-{n}n", "COMPLETED") for n in (2, 4, 1)]
  assert order.read_text().split() == ["2"] * 2 + ["4"] * 4 + ["1"]
  runs = fake["runs"]
  assert jobs.study("study", runs) == study
  assert jobs.job("study-4n", runs) == study.jobs[1]
  with pytest.raises(ConfigError, match="sturdy: no such study, did you mean 'study'"):
    jobs.study("sturdy", runs)
  with pytest.raises(ConfigError, match="study-2n: has not started yet"):
    study.report()  # the stand-in writes no config.json


def test_a_study_is_cancelled_as_one(fake, tmp_path, capsys):
  (tmp_path / "does").write_text("while true; do sleep 0.1; done")
  sizes = [2, 4, 1]
  study = jobs.scaling(DIGITS, sizes, batch="grows", name="study", **fake)
  batches = [folders.read_spec(j.folder).overrides["batch_size"] for j in study.jobs]
  assert batches == ["128", "256", "64"]
  until(lambda: study.jobs[0].metrics())
  study.jobs[2].cancel()  # which waits
  until(lambda: study.status()[2].state == "CANCELLED")
  assert study.status()[0].state == "RUNNING"
  runs = f"--runs={fake['runs']}"
  assert cli.main(["status", "study", runs]) == 0
  assert cli.main(["logs", "study", runs]) == 2
  assert cli.main(["cancel", "study", runs]) == 0
  reported = capsys.readouterr()
  rows = [f"study-{n}n{colon}" for colon in ("", ":") for n in sizes]
  assert [line.split()[0] for line in reported.out.splitlines()] == ["run", *rows]
  assert "study: logs prints one run at a time; give one of study-2n, study-4n" in reported.err
  assert [r.state for r in study.wait(300, 0.1)] == ["CANCELLED"] * 3
  assert not (study.jobs[1].folder / "train").exists()  # it never began


def test_a_record_is_a_table(fake, tmp_path):
  python, go = tmp_path / "python", tmp_path / "go"
  shebang, _, rest = python.read_text().partition("\n")
  python.write_text(f"{shebang}\nuntil [ -e '{go}' ]; do sleep 0.05; done\n{rest}")
  job = jobs.submit(DIGITS, **fake)
  assert repr(job.metrics()) == "no metrics yet"
  go.touch()
  wait(job)
  record = job.metrics()
  assert record == [{"step": 3, "train/loss": 0.5, "time": 1}]
  assert repr(record).splitlines() == ["step  train/loss", "   3         0.5"]
  assert "<td" in record._repr_html_() and "COMPLETED" in job.status()._repr_html_()
  with pytest.raises(ConfigError, match="task=1: give 0 … 0"):
    job.metrics(task=1)
  many = Record({"step": i, "x": 1234.5} for i in range(99))
  lines = repr(many).splitlines()
  assert len(lines) == 22 and lines[11].split() == ["…", "…"]
  assert lines[-1].split() == ["98", "1,234"]
  assert "&lt;b&gt;" in Record([{"note": "<b>"}])._repr_html_()


def test_cancelled_it_saves_and_then_resumes(fake, tmp_path):
  (tmp_path / "does").write_text("while true; do sleep 0.1; done")
  job = jobs.submit(DIGITS, **fake)
  until(lambda: job.metrics())
  with pytest.raises(ConfigError, match="is RUNNING"):
    job.resume()
  job.cancel()
  (row,) = wait(job)
  assert row.state == "CANCELLED"
  assert job.logs().endswith("saved") and local_executor.newest_step(job.folder / "train") == 77
  (tmp_path / "does").write_text("exit 0")
  job.resume()
  assert [row.state for row in wait(job)] == ["COMPLETED"]
  assert len(read_json_lines(job.folder / "submissions.jsonl")) == 2


def test_of_a_sweep_only_what_is_not_done_is_resumed(fake, tmp_path):
  (tmp_path / "does").write_text('[[ "$workdir" == */1 ]] && exit 1; exit 0')
  job = jobs.sweep(DIGITS, [{"seed": i} for i in range(3)], **fake)
  assert [r.state for r in wait(job)] == ["COMPLETED", "FAILED", "COMPLETED"]
  (tmp_path / "does").write_text("exit 0")
  job.resume()
  assert [len(events(job, i)) for i in range(3) if wait(job)] == [2, 4, 2]
  assert [row.state for row in job.status()] == ["COMPLETED"] * 3


def test_it_starts_again_as_long_as_that_is_of_use(fake, tmp_path):
  """A crash with progress, one request to stop, and a crash without progress."""
  (tmp_path / "does").write_text(r"""
n=$(ls "$workdir/checkpoints" | wc -l)
[ $n = 2 ] && [ ! -e "$workdir/told" ] && touch "$workdir/told" && exit 85
[ $n -lt 2 ] && mkdir "$workdir/checkpoints/$((n + 1))"
exit 1""")
  job = jobs.submit(DIGITS, **fake)
  (row,) = wait(job)
  ends = [(code, next_) for event, code, next_ in events(job) if event == "end"]
  assert ends == [(1, "requeue"), (1, "requeue"), (85, "requeue"), (1, "stop")]
  assert (row.state, row.code, row.restarts) == ("FAILED", 1, 3)


def test_a_disk_that_refuses_the_record_does_not_end_the_supervisor(fake, tmp_path):
  """Nor does it hide what a process returned: the end is still recorded."""
  (tmp_path / "does").write_text(r"""
processes="$(dirname "$workdir")/processes.jsonl"
rm -f "$processes"; mkdir -p "$processes"  # no line can be appended from here on
n=$(ls "$workdir/checkpoints" | wc -l)
[ $n = 0 ] && mkdir "$workdir/checkpoints/1" && exit 1
exit 93""")
  job = jobs.submit(DIGITS, **fake)
  wait(job)
  ends = [(code, next_) for event, code, next_ in events(job) if event == "end"]
  assert ends == [(1, "requeue"), (93, "stop")]
  assert "processes.jsonl: Is a directory; lost: " in job.logs("batch")


def test_not_more_often_than_asked(fake, tmp_path):
  (tmp_path / "does").write_text("exit 85")
  job = jobs.submit(DIGITS, requeue=1, **fake)
  (row,) = wait(job)
  assert row.state == "PREEMPTED" and row.restarts == 1 and len(events(job)) == 4


def test_one_process_that_fails_ends_the_others(fake, tmp_path):
  (tmp_path / "does").write_text(
    f'[ "$JAXSCALE_PROCESS_ID" = 1 ] && {ALL_MIND} exit 93\nwhile true; do sleep 0.1; done'
  )
  job = jobs.submit(DIGITS, tasks_per_node=4, **fake)
  (row,) = wait(job)
  assert (row.state, row.code) == ("FAILED", 93)
  assert job.logs(0).endswith("saved") and job.logs(2).endswith("saved")


def test_it_ended_as_the_first_that_failed_and_says_why(fake, tmp_path, capsys):
  """Not with the code of those that were ended because of it, and printed nothing."""
  (tmp_path / "does").write_text(
    f'trap - TERM; touch "{tmp_path}/up$JAXSCALE_PROCESS_ID"\n'
    f'[ "$JAXSCALE_PROCESS_ID" = 2 ] && {{ until [ -e "{tmp_path}/up0" -a -e'
    f' "{tmp_path}/up1" -a -e "{tmp_path}/up3" ]; do sleep 0.1; done;'
    ' echo "error: why"; exit 2; }\nexec sleep 600'
  )
  (tmp_path / "python").write_text(STAND_IN.replace('echo "process', ': "process'))
  job = jobs.submit(DIGITS, tasks_per_node=4, name="why", **fake)
  (row,) = wait(job)
  assert (row.state, row.code) == ("FAILED", 2)
  assert job.logs(0) == ""
  assert cli.main(["logs", "why", f"--runs={fake['runs']}"]) == 0
  assert capsys.readouterr().out.splitlines() == ["2: error: why", FAILED_FIRST]


FAILED_FIRST = "error: process 2 failed first (exit code 2): error: why"


def test_what_process_0_does_not_know_is_shown_with_its_lines(fake, tmp_path, capsys):
  (tmp_path / "does").write_text(
    f'[ "$JAXSCALE_PROCESS_ID" = 2 ] && {ALL_MIND} echo "error: why" && exit 2\n'
    "while true; do sleep 0.1; done"
  )
  job = jobs.submit(DIGITS, tasks_per_node=4, name="first", **fake)
  (row,) = wait(job)
  assert (row.state, row.code, row.restarts) == ("FAILED", 2, 0)
  for follow in ([], ["-f"]):
    assert cli.main(["logs", *follow, "first", f"--runs={fake['runs']}"]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == ["saved", FAILED_FIRST]
  (tmp_path / "does").write_text("exit 0")
  job.resume()
  wait(job)
  assert cli.main(["logs", "first", f"--runs={fake['runs']}"]) == 0
  assert "failed first" not in capsys.readouterr().out


def test_what_minds_no_signal_is_killed_after_the_grace(monkeypatch, tmp_path):
  monkeypatch.setattr(local_launch, "GRACE_S", 0.5)
  monkeypatch.chdir(tmp_path)
  deaf = "trap '' TERM; touch deaf; while :; do sleep 0.1; done"
  failed = "until [ -e deaf ]; do sleep 0.1; done; exit 3"
  deaf, failed = (subprocess.Popen(["bash", "-c", text]) for text in (deaf, failed))
  began = time.monotonic()
  assert local_launch.wait([deaf, failed], threading.Event()) == (3, None)
  assert deaf.returncode == -signal.SIGKILL
  assert time.monotonic() - began > 0.5


def test_a_supervisor_that_was_killed_is_noticed(fake, tmp_path):
  (tmp_path / "does").write_text("while true; do sleep 0.1; done")
  job = jobs.submit(DIGITS, **fake)
  started = job.folder / "processes.jsonl"  # written after the process has begun
  until(lambda: job.metrics() and started.exists() and read_json_lines(started))
  (line,) = read_json_lines(job.folder / "supervisor.jsonl")
  (process,) = read_json_lines(started)
  os.kill(line["pid"], signal.SIGKILL)
  until(lambda: job.status()[0].state == "LOST")
  assert local_executor._born(process["pid"]) == process["born"]
  job.cancel()  # what the supervisor has left behind
  until(lambda: local_executor._born(process["pid"]) is None)
  assert job.status()[0].state == "CANCELLED"


def test_a_number_used_again_is_another_process():
  child = subprocess.Popen(["sleep", "0"])
  assert local_executor._born(os.getpid()) not in (None, local_executor._born(1))
  until(lambda: local_executor._born(child.pid) is None)  # a zombie does nothing any more
  child.wait()
  assert local_executor._born(2**22 + 1) is None


def test_it_survives_the_terminal(fake, tmp_path):
  """The supervisor is in a session of its own, and nobody's child."""
  (tmp_path / "does").write_text("while true; do sleep 0.1; done")
  pid = read_json_lines(jobs.submit(DIGITS, **fake).folder / "supervisor.jsonl")[-1]["pid"]
  fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
  assert int(fields[3]) == pid and int(fields[1]) != os.getpid()


def test_the_commands(fake, tmp_path, capsys):
  (tmp_path / "does").write_text("echo one; sleep 1; printf two")
  runs = ["--runs", fake["runs"]]
  submit = ["submit", "--config", DIGITS, "--executor=local", f"--python={fake['python']}"]

  def output(*argv, code=0):
    assert cli.main([*argv, *runs]) == code
    return capsys.readouterr()[code > 0]

  out = output(*submit, "--name=a")
  assert out.startswith("a: submitted as local-") and "--runs '" in out
  assert output("logs", "-f", "a").splitlines()[1:] == ["one", "two"]  # to the end, as it comes
  out = output("status", "--watch", "--every=1")
  assert out.splitlines()[1].split()[:1] == ["a"] and "COMPLETED" in out
  assert output("logs", "a", "--lines=1") == "two\n"
  assert output("cancel", "a") == "a: has already ended\n"
  assert not Path(fake["runs"], "a", "cancelled").exists()
  assert output("resume", "a", code=2).startswith("error: a: is done")
  assert "exists; use a different name" in output(*submit, "--name=a", code=2)


@pytest.mark.parametrize("command", [["logs", "-f", "a"], ["status", "--watch", "--every=1"]])
def test_ctrl_c_ends_a_command_that_watches_without_an_error(fake, tmp_path, command):
  (tmp_path / "does").write_text("echo one; while true; do sleep 0.1; done")
  job = jobs.submit(DIGITS, name="a", **fake)
  until(lambda: "one" in job.logs(0))
  words = [sys.executable, "-m", "jaxscale", *command, "--runs", fake["runs"]]
  with killed_at_end(popen(*words, env=child_env())) as process:
    next(line for line in process.stdout if line[0] in "oa")  # of the log, or of the table
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=200)
  assert (process.returncode, error) == (130, "\ninterrupted\n")
  job.cancel()


def test_a_scaling_study_is_a_run_for_each_size(fake, tmp_path, capsys):
  (tmp_path / "does").write_text("exit 0")
  argv = ["scaling", "--config", DIGITS, "--nodes=1,2", "--batch=grows", "--name=s"]
  argv += ["--executor=local", f"--python={fake['python']}"]
  assert cli.main([*argv, "--runs", fake["runs"]]) == 0
  for name, size in (("s-1n", 128), ("s-2n", 256)):
    folder = Path(fake["runs"], name)
    wait(jobs.Job(folder))
    reported = json.loads((folder / "run.json").read_text())
    assert reported["overrides"]["batch_size"] == str(size)
    assert f"--config.batch_size={size}" in jobs.Job(folder).logs()
