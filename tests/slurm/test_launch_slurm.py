"""`jaxscale submit` and the like on a real Slurm of four nodes."""

import itertools
import re
import shlex
import sys
import time

import pytest

from support.commands import child_env, own_lines, train_command
from support.job_script import fake
from support.paths import ROOT
from support.processes import killed_at_end, wait_until
from support.slurm.cli import FOREVER, ends, make_cli, number, states, until, until_ended


def is_up(cli, name, starts=1, rank=0):
  """Return True once a rank of the stand-in has begun so often, and minds signals."""
  log = cli.runs / name / "logs" / f"{number(cli, name)}.{rank}.out"
  return log.exists() and log.read_text().count(f"rank {rank} of") == starts


def test_a_job_on_four_nodes_from_submission_to_its_end(cli):
  go = waits_to_go(cli)
  out = cli("submit", "--nodes=4", "--tasks-per-node=2", "--name=a", "--time=5")
  assert re.match(r"a: submitted as \d+\n", out)
  words = until(cli, "a", "RUNNING")
  assert words[3] == "4" and re.fullmatch(r"5:00|[0-4]:\d\d", words[8])
  command = sys.executable, "-m", "jaxscale", "logs", "-f", "a", f"--runs={cli.runs}"
  with killed_at_end(cli.slurm.start(*command)) as follows:
    line = follows.stdout.readline()
    assert line.startswith("rank 0 of 8 on n1: -m jaxscale.train --config ")
    assert follows.poll() is None
    go.touch()
    follows.communicate(timeout=300)  # until it ends
  assert follows.returncode == 0
  words = until(cli, "a", "COMPLETED")
  assert words[4:6] == ["3/?", "0.5000"]
  ranks = cli("logs", "a", "--rank=all").splitlines()
  assert [re.match(r"(\d): rank \1 of 8 on n\d", r) is not None for r in ranks] == ([True] * 8)
  assert ends(cli, "a") == [(0, "stop")]
  assert "a: is done" in cli("resume", "a", code=2)


def waits_to_go(cli, before="", after=""):
  """Make the stand-in wait for a file, and return that."""
  go = cli.python.parent / "go"
  cli.does(f'{before}\nuntil [ -e "{go}" ]; do sleep 0.1; done\n{after}')
  return go


def test_an_array_of_six_two_at_a_time(cli):
  record = cli.python.parent / "running"
  begin, end = (f'echo {change} >>"{record}"' for change in (1, -1))
  go = waits_to_go(cli, begin, f"sleep 0.3; {end}")
  out = cli("sweep", "--sweep=seed=1,2,3", "--sweep=epochs=3,4", "--at-most=2", "--name=s")
  assert ", 6 trials" in out
  wait_until(lambda: record.exists() and len(record.read_text().split()) >= 2, seconds=300)
  begun = [state for state, _ in states(cli, "s").values()]
  assert (begun.count("RUNNING"), begun.count("PENDING")) == (2, 4)
  go.touch()
  deadline, now = time.monotonic() + 300, states(cli, "s")
  while {state for state, _ in now.values()} != {"COMPLETED"}:
    assert time.monotonic() < deadline, now
    now = states(cli, "s")
  assert max(itertools.accumulate(map(int, record.read_text().split()))) == 2
  assert list(now) == [f"s/{i}" for i in range(6)]
  assert now["s/5"][1][-2:] == ["seed=3", "epochs=4"]
  reported = cli("logs", "s", "--task=5")
  assert "--config.seed=3 --config.epochs=4 --workdir" in reported and "/trials/5" in reported


def test_cancelled_it_saves_and_stays_cancelled(cli):
  cli.does(FOREVER)
  cli("submit", "--nodes=2", "--name=c")
  until(cli, "c", "RUNNING")
  wait_until(lambda: is_up(cli, "c", rank=1))
  assert "is RUNNING; run `jaxscale cancel c` first" in cli("resume", "c", code=2)
  cli("cancel", "c")
  until(cli, "c", "CANCELLED")
  assert "stopped by TERM" in cli("logs", "c", "--rank=1")
  assert ends(cli, "c") == [(85, "stop")]
  cli.does("exit 0")
  cli("resume", "c", "--nodes=3")  # on another number of nodes
  assert until(cli, "c", "COMPLETED")[3] == "3"
  assert "rank 2 of 3" in cli("logs", "c", "--rank=2")


@pytest.mark.slow
def test_what_scancel_ended_is_not_started_again(cli, slurm):
  cli.does(FOREVER)
  cli("submit", "--name=c")
  wait_until(lambda: is_up(cli, "c"))
  slurm.run("scancel", number(cli, "c"))
  until(cli, "c", "CANCELLED")
  assert ends(cli, "c") == [(85, "stop")]


def test_what_fails_before_the_others_know_is_shown_and_not_started_again(cli):
  """An import error, a file that one node lacks: srun ends process 0 by SIGTERM."""
  cli.does(f"""
[ $SLURM_PROCID = 0 ] && touch "$workdir/up"
[ $SLURM_PROCID = 1 ] && {{
  until [ -e "$workdir/up" ]; do sleep 0.1; done
  echo "error: libfoo.so is missing"; exit 2; }}
{FOREVER}""")
  cli("submit", "--nodes=2", "--name=b")
  assert until(cli, "b", "FAILED")[3] == "2"  # exit code
  assert ends(cli, "b") == [(2, "stop")]
  lines = cli("logs", "b").splitlines()
  first = "error: process 1 failed first (Exited with exit code 2): "
  assert lines[-2:] == ["stopped by TERM", f"{first}error: libfoo.so is missing"]


def test_a_signal_before_there_are_handlers_starts_it_again(cli, slurm):
  up = '"$workdir/up.$SLURM_RESTART_COUNT.$SLURM_PROCID"'
  cli.does(f'trap - TERM USR1; touch {up}; [ -n "$SLURM_RESTART_COUNT" ] && exit 0\n{FOREVER}')
  names = {"USR1": 138, "TERM": 143}
  for name in names:
    cli("submit", "--nodes=2", f"--name={name}")
  for name in names:
    folder = cli.runs / name / "train"
    wait_until(lambda f=folder: len([*f.glob("up.*")]) == 2, seconds=300)
    slurm.run("scancel", f"--signal={name}", number(cli, name))
  for name, code in names.items():
    until_ended(cli, name)
    (first, decision), last = ends(cli, name)
    # Of the task that is second srun's own SIGTERM may be first.
    assert first in (code, 143) and (decision, last) == ("requeue", (0, "stop"))


def test_what_an_operator_requeues_is_requeued_on_record(cli, slurm):
  cli.does(f'[ -n "$SLURM_RESTART_COUNT" ] && exit 0\n{FOREVER}')
  cli("submit", "--name=o")
  wait_until(lambda: is_up(cli, "o"), seconds=300)
  slurm.run("scontrol", "requeue", number(cli, "o"))
  until_ended(cli, "o")
  assert ends(cli, "o") == [(85, "requeue"), (0, "stop")]


@pytest.fixture(scope="module")
def requeued(_cluster, tmp_path_factory):
  """Jobs that were started again: a requeue takes 6 s, all of them together too."""
  names = "warned", "sweep", "crash"
  warned, sweep, crash = (make_cli(_cluster, tmp_path_factory.mktemp(name)) for name in names)
  warned.does(FOREVER)
  sweep.does("""
told="$workdir/told"
[[ $workdir == */1 ]] && [ ! -e "$told" ] && touch "$told" && exit 85
sleep 1; exit 0""")
  crash.does('mkdir -p "$workdir/checkpoints/9"; exit 1')
  # A signal to all tasks, and to the script alone, as `--signal` may say.
  signals = {"all": [], "B": ["--batch"]}
  for name in signals:
    warned("submit", "--nodes=2", "--requeue=1", f"--name={name}")
  sweep("sweep", "--sweep=seed=1,2,3", "--name=s")
  crash("submit", "--name=f")
  for start in (1, 2):
    for name, options in signals.items():
      for rank in (0, 1):
        wait_until(lambda a=(name, start, rank): is_up(warned, *a), seconds=300)
      job = number(warned, name)
      _cluster.run("scancel", *options, "--signal=USR1", job)
  for name in signals:
    until_ended(warned, name)
  until_ended(sweep, "s", 3)
  until_ended(crash, "f")
  yield warned, sweep, crash
  _cluster.clear()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["all", "B"])
def test_warned_it_saves_and_starts_again_so_often(requeued, name):
  cli, _, _ = requeued
  words = until(cli, name, "FAILED")
  assert (words[3], words[-1]) == ("85", "1")  # exit code, restarts
  assert ends(cli, name) == [(85, "requeue"), (85, "stop")]
  logs = cli("logs", name, "--rank=all")
  assert logs.count("stopped by ") == 4  # two tasks, two starts
  # srun ends the task that is second by SIGTERM, which may come before its SIGUSR1.
  assert logs.count("stopped by USR1") >= 2
  reported = cli("logs", name, "--rank=batch")
  assert "not restarted: this was start 2 of 2" in reported


@pytest.mark.slow
def test_one_task_of_an_array_starts_again_and_no_other(requeued):
  _, cli, _ = requeued
  assert [ends(cli, "s", i) for i in range(3)] == [
    [(0, "stop")],
    [(85, "requeue"), (0, "stop")],
    [(0, "stop")],
  ]
  assert {s for s, _ in states(cli, "s").values()} == {"COMPLETED"}


@pytest.mark.slow
def test_a_crash_starts_again_only_with_progress(requeued):
  _, _, cli = requeued
  words = until(cli, "f", "FAILED")
  assert (words[3], words[-1]) == ("1", "1")  # exit code, restarts
  assert ends(cli, "f") == [(1, "requeue"), (1, "stop")]


def test_what_slurm_refuses_is_one_line_and_leaves_nothing(cli):
  error = cli("submit", "--partition=nowhere", "--name=b", code=2)
  assert error.startswith("error: sbatch: ") and "partition" in error
  assert error.count("\n") == 1 and not (cli.runs / "b").exists()


def test_slurm_takes_every_plain_script(slurm):
  """`sbatch --test-only` reads the options; the nodes here have no GPUs and few cores."""
  for script in sorted((ROOT / "launch").glob("*.sbatch")):
    text = re.sub(r"#SBATCH --gpus.*\n", "", script.read_text())
    text = re.sub(r"(ntasks-per-node|cpus-per-task)=8", r"\1=1", text)
    copy = slurm.folder / script.name
    copy.write_text(text)
    done = slurm.run("sbatch", "--test-only", str(copy), check=False)
    assert done.returncode == 0, (script.name, done.stderr)


@pytest.mark.parametrize(("options", "tasks"), [((), 1), (("--nodes=2", "--ntasks-per-node=2"), 4)])
def test_the_plain_script_starts_its_processes_with_all_cores(slurm, tmp_path, options, tasks):
  venv = fake_venv(tmp_path, 'echo "$SLURM_CPUS_PER_TASK cores:" "$@"')
  job = slurm.submit(plain_script("train"), *options, JAXSCALE_VENV=str(venv))
  slurm.wait_for(job, "COMPLETED")
  cores = 2 if tasks == 1 else 1
  assert slurm.output(job).splitlines() == [f"{cores} cores: -P -m jaxscale.train"] * tasks


def test_a_script_that_calls_jax_distributed_itself_trains_on_two_nodes(slurm, tmp_path):
  venv = fake_venv(tmp_path, f'exec {shlex.quote(sys.executable)} "$@"')
  job = slurm.submit(plain_script("plain"), "-N2", JAXSCALE_VENV=str(venv), **child_env(1))
  slurm.wait_for(job, "COMPLETED")
  reported = own_lines(slurm.output(job))
  assert reported[0] == "processes: 2, devices: 2", reported
  assert float(reported[-1].removeprefix("validation accuracy ")) > 0.95, reported


def fake_venv(tmp_path, python):
  """Return an environment whose Python is a line of bash."""
  venv = tmp_path / "a venv"
  fake(venv / "bin" / "python", python)
  (venv / "bin" / "activate").write_text(f"export PATH={shlex.quote(str(venv))}/bin:$PATH")
  return venv


def plain_script(name):
  text = (ROOT / "launch" / f"{name}.sbatch").read_text()
  return text.replace("#!/usr/bin/env bash", "#!/bin/bash")


def test_a_batch_script_without_srun_is_reported(slurm, tmp_path):
  command = shlex.join(train_command(tmp_path / "run"))
  job = slurm.submit(f"{command} 2>&1", "-N2", "--ntasks-per-node=1", **child_env(1))
  assert slurm.wait_for(job, "FAILED")["ExitCode"] == "2:0"
  (line,) = slurm.output(job).splitlines()
  assert line.startswith("error: SLURM_NTASKS=2: this is the batch script, not a step")
  assert "start it with srun" in line
