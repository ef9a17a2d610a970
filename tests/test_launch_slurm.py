"""`python -m jaxscale.launch` on a real Slurm of four nodes."""

import json
import re
import shlex
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT

from jaxscale.launch import folder as folders

# In place of Python on the nodes: says where it is, and does as a file says. What it
# is told by a signal it writes down, and leaves as a run that has saved does.
STAND_IN = r"""#!/bin/bash
echo "rank $SLURM_PROCID of $SLURM_NTASKS on $SLURMD_NODENAME: $*"
while [ $# -gt 0 ]; do [ "$1" = --workdir ] && workdir=$2; shift; done
mkdir -p "$workdir/checkpoints"
for s in TERM USR1; do trap "echo told by $s; exit 85" $s; done
[ "$SLURM_PROCID" = 0 ] &&
  echo '{"step": 3, "train/loss": 0.5, "time": 1}' >>"$workdir/metrics.jsonl"
source "$(dirname "$0")/does"
"""
FOREVER = "while true; do sleep 0.1; done"


@pytest.fixture
def cli(slurm, tmp_path):
  """The command line on the login node, with runs in a directory of a hard name."""
  python = tmp_path / "python"
  python.write_text(STAND_IN)
  python.chmod(0o755)
  runs = tmp_path / "all runs, 100%"

  def run(verb, *argv, code=0):
    stands_in = verb in ("submit", "sweep") and "--real" not in argv
    argv = [a for a in argv if a != "--real"]
    if verb in ("submit", "sweep"):
      argv += ["--config=configs/digits.py"]
    if stands_in:
      argv += [f"--python={python}"]
    command = [sys.executable, "-m", "jaxscale.launch", verb, *argv, f"--runs={runs}"]
    # As from a notebook in a job: what Slurm says of that one must not be minded.
    done = slurm.run(
      *command, check=False, SLURM_NTASKS_PER_NODE="7", SLURM_MEM_PER_NODE="1"
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr

  def does(text):
    (tmp_path / "does").write_text(text)

  run.does, run.runs = does, runs
  return run


def states(cli, *names):
  """The table as {run: (state, the line's other words)}."""
  lines = [line.split() for line in cli("status", *names).splitlines()[1:]]
  return {words[0]: (words[2], words) for words in lines}


def until(cli, name, state, seconds=60):
  deadline = time.monotonic() + seconds
  while (now := states(cli, name))[name][0] != state:
    assert time.monotonic() < deadline, now
    time.sleep(0.1)
  return now[name][1]


def number(cli, name):
  return folders.read_lines(cli.runs / name / "submissions.jsonl")[-1]["job"]


def ends(cli, name, task=0):
  lines = folders.read_lines(cli.runs / name / "events" / f"{task}.jsonl")
  return [(e["code"], e["next"]) for e in lines if e["event"] == "end"]


def until_ended(cli, name, tasks=1, seconds=60):
  """Until the diary of each task has an end after which nothing follows."""
  deadline = time.monotonic() + seconds
  while not all((e := ends(cli, name, i)) and e[-1][1] == "stop" for i in range(tasks)):
    assert time.monotonic() < deadline, states(cli, name)
    time.sleep(0.1)


def test_a_job_on_four_nodes_from_submission_to_its_end(cli):
  cli.does("sleep 2")
  out = cli("submit", "--nodes=4", "--tasks-per-node=2", "--name=a", "--time=5")
  assert re.match(r"a: submitted as \d+\n", out)
  words = until(cli, "a", "RUNNING")
  assert words[3] == "4" and re.fullmatch(r"4:\d\d", words[8])
  followed = cli("logs", "-f", "a")  # until it ends
  assert followed.startswith("rank 0 of 8 on n1: -m jaxscale.train --config ")
  words = until(cli, "a", "COMPLETED")
  assert words[4:6] == ["3/?", "0.5000"]
  ranks = cli("logs", "a", "--rank=all").splitlines()
  assert [re.match(r"(\d): rank \1 of 8 on n\d", r) is not None for r in ranks] == (
    [True] * 8
  )
  assert ends(cli, "a") == [(0, "stop")]
  assert "a: is done" in cli("resume", "a", code=2)


def test_digits_trains_on_a_node(cli, slurm):
  quick = ["--config.epochs=3", "--config.log.tensorboard=False"]
  cli("submit", "--real", "--name=d", *quick)
  words = until(cli, "d", "COMPLETED", 180)
  assert words[4] == "34/34" and words[7].endswith("%")
  assert cli("logs", "d", "--lines=1").startswith("done: held-out accuracy")


def test_an_array_of_six_two_at_a_time(cli):
  cli.does("sleep 1")
  out = cli(
    "sweep", "--sweep=seed=1,2,3", "--sweep=epochs=3,4", "--at-most=2", "--name=s"
  )
  assert ", 6 trials" in out
  most, now = 0, states(cli, "s")
  deadline = time.monotonic() + 90
  while {state for state, _ in now.values()} != {"COMPLETED"}:
    most = max(most, sum(state == "RUNNING" for state, _ in now.values()))
    assert time.monotonic() < deadline, now
    time.sleep(0.2)
    now = states(cli, "s")
  assert most == 2 and list(now) == [f"s/{i}" for i in range(6)]
  assert now["s/5"][1][-2:] == ["seed=3", "epochs=4"]
  said = cli("logs", "s", "--task=5")
  assert "--config.seed=3 --config.epochs=4 --workdir" in said and "/trials/5" in said


def test_cancelled_it_saves_and_stays_cancelled(cli):
  cli.does(FOREVER)
  cli("submit", "--nodes=2", "--name=c")
  until(cli, "c", "RUNNING")
  assert "is RUNNING; `cancel c` first" in cli("resume", "c", code=2)
  cli("cancel", "c")
  until(cli, "c", "CANCELLED")
  assert "told by TERM" in cli("logs", "c", "--rank=1")
  assert ends(cli, "c") == [(85, "stop")]
  cli.does("exit 0")
  cli("resume", "c", "--nodes=3")  # on another number of nodes
  assert until(cli, "c", "COMPLETED")[3] == "3"
  assert "rank 2 of 3" in cli("logs", "c", "--rank=2")


def test_what_scancel_ended_is_not_started_again(cli, slurm):
  cli.does(FOREVER)
  cli("submit", "--name=c")
  until(cli, "c", "RUNNING")
  slurm.run("scancel", number(cli, "c"))
  until(cli, "c", "CANCELLED")
  assert ends(cli, "c") == [(85, "stop")]


@pytest.mark.parametrize("batch", [[], ["--batch"]], ids=["to all", "B:"])
def test_warned_it_saves_and_starts_again_so_often(cli, slurm, batch):
  """By a signal to all tasks, or to the script alone, as `--signal` may say."""
  cli.does(FOREVER)
  cli("submit", "--nodes=2", "--requeue=1", "--name=w")
  job = number(cli, "w")
  until(cli, "w", "RUNNING")
  slurm.run("scancel", *batch, "--signal=USR1", job)
  until(cli, "w", "PENDING")
  assert until(cli, "w", "RUNNING")[-1] == "1"  # restarts
  slurm.run("scancel", *batch, "--signal=USR1", job)
  until(cli, "w", "FAILED")
  assert ends(cli, "w") == [(85, "requeue"), (85, "stop")]
  assert cli("logs", "w").count("told by USR1") == 2
  assert "not started again: that was start 2 of 2" in cli("logs", "w", "--rank=batch")


def test_one_task_of_an_array_starts_again_and_no_other(cli):
  cli.does("""
told="$workdir/told"
[[ $workdir == */1 ]] && [ ! -e "$told" ] && touch "$told" && exit 85
sleep 1; exit 0""")
  cli("sweep", "--sweep=seed=1,2,3", "--name=s")
  until_ended(cli, "s", 3)
  assert [ends(cli, "s", i) for i in range(3)] == [
    [(0, "stop")], [(85, "requeue"), (0, "stop")], [(0, "stop")],
  ]  # fmt: skip
  assert {s for s, _ in states(cli, "s").values()} == {"COMPLETED"}


def test_a_crash_starts_again_only_with_progress(cli):
  cli.does('mkdir -p "$workdir/checkpoints/9"; exit 1')
  cli("submit", "--name=f")
  until_ended(cli, "f")
  words = until(cli, "f", "FAILED")
  assert (words[3], words[-1]) == ("1", "1")  # exit code, restarts
  assert ends(cli, "f") == [(1, "requeue"), (1, "stop")]


def test_what_slurm_refuses_is_one_line_and_leaves_nothing(cli):
  error = cli("submit", "--partition=nowhere", "--name=b", code=2)
  assert error.startswith("error: sbatch: ") and "partition" in error
  assert error.count("\n") == 1 and not (cli.runs / "b").exists()


def test_slurm_takes_every_plain_script(slurm):
  """`sbatch --test-only` reads the options; without GPUs here, those are left out."""
  for script in sorted((ROOT / "launch").glob("*.sbatch")):
    text = re.sub(r"#SBATCH --gpus.*\n", "", script.read_text())
    text = re.sub(r"(ntasks-per-node|cpus-per-task)=8", r"\1=1", text)
    copy = slurm.folder / script.name
    copy.write_text(text)
    done = slurm.run("sbatch", "--test-only", str(copy), check=False)
    assert done.returncode == 0, (script.name, done.stderr)


@pytest.mark.parametrize("name", ["single_node", "train", "cpu", "array"])
def test_plain_scripts_run_what_they_say(slurm, tmp_path, name):
  venv = tmp_path / "a venv"
  (venv / "bin").mkdir(parents=True)
  (venv / "bin" / "activate").write_text(
    f"export PATH={shlex.quote(str(venv))}/bin:$PATH"
  )
  python = venv / "bin" / "python"
  python.write_text('#!/bin/bash\necho "$SLURM_CPUS_PER_TASK cores:" "$@"\n')
  python.chmod(0o755)
  text = (ROOT / "launch" / f"{name}.sbatch").read_text()
  text = re.sub(r"#SBATCH --gpus.*\n", "", text)
  text = re.sub(r"ntasks-per-node=8", "ntasks-per-node=1", text)
  text = re.sub(r"cpus-per-task=8", "cpus-per-task=2", text)
  text = re.sub(r"array=0-5%2", "array=3", text)
  job = slurm.submit(text.replace("#!/usr/bin/env bash", "#!/bin/bash"),
                     JAXSCALE_VENV=str(venv))  # fmt: skip
  job = f"{job}_3" if name == "array" else job
  slurm.wait_for(job, "COMPLETED")
  out = slurm.output(job)
  cores = "1" if name == "array" else "2"
  assert out.startswith(f"{cores} cores: -m jaxscale.train"), out
  if name == "array":
    assert "--config.seed=3" in out


def test_what_was_submitted_is_on_record(cli):
  cli.does("exit 0")
  cli("submit", "--name=r", "--config.epochs=5")
  folder = Path(cli.runs, "r")
  assert json.loads((folder / "run.json").read_text())["overrides"] == {"epochs": "5"}
  assert (folder / "job.sbatch").exists() and number(cli, "r").isdecimal()
  until(cli, "r", "COMPLETED")
