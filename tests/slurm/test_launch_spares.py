"""A node is lost, and the job continues on another of its nodes."""

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from jaxscale.files import append_json_line
from jaxscale.jobs import slurm_executor
from jaxscale.metrics import read_json_lines
from support import commands
from support.commands import child_env, train_command
from support.job_script import RUN, fake
from support.processes import wait_until
from support.slurm.cli import FOREVER, ends, events, number, until, until_ended
from support.tiny_runs import ARGS, assert_same_run, newest_step

# A cluster as Slurm's commands tell it: the job's nodes and the bad ones are files.
COMMANDS = {
  "srun": r"""
case "$*" in
  *jaxscale.train*) ;;
  *guard*) exec /bin/sleep 600 ;;
  *) for node in $(cat "$cluster/silent" 2>/dev/null); do
      [[ "$*" == *--nodelist=$node\ * ]] && exit 1
    done
    exit 0 ;;
esac
for word; do [[ $word == --nodelist=* ]] && echo "${word#*=}" >>"$cluster/steps"; done
n=$(wc -l <"$cluster/steps")
source "$cluster/does"
""",
  "squeue": 'cat "$cluster/nodes"',
  "sinfo": """
for node in $(tr , " " <"$cluster/nodes"); do
  grep "^$node " "$cluster/bad" || echo "$node mixed"
done""",
  "scontrol": """
echo "$*" >>"$cluster/asked"
case "$*" in
  "show hostnames "*) tr , "\\n" <<<"$3" ;;
  "show job "*) echo JobState=RUNNING ;;
esac""",
  "scancel": "",
  "sleep": "exec /bin/sleep 0.05",  # the script looks every second
}


def run_script(tmp_path, does, **changes):
  """Run the script of 2 nodes and a spare; its output, code, steps and diary."""
  run = RUN._replace(nodes=2, spares=1, folder=str(tmp_path / "run"), **changes)
  cluster = tmp_path / "cluster"
  for name, text in COMMANDS.items():
    fake(cluster / name, f'cluster="{cluster}"\n{text}')
  (cluster / "nodes").write_text("n1,n2,n3")
  (cluster / "bad").write_text("")
  (cluster / "does").write_text(does)
  for name in ("events", "logs"):
    Path(run.folder, name).mkdir(parents=True, exist_ok=True)
  script = Path(run.folder, "job.sbatch")
  script.write_text(slurm_executor.render(run))
  env = dict(PATH=f"{cluster}:{os.environ['PATH']}", HOME=str(tmp_path), SLURM_JOB_ID="7")
  env |= dict(SLURM_JOB_NUM_NODES="3", SLURM_JOB_NODELIST="n1,n2,n3", SLURMD_NODENAME="n1")
  done = commands.run("bash", script, **env)
  steps = (cluster / "steps").read_text().split()
  asked = (cluster / "asked").read_text()
  assert done.stderr == "", done.stderr
  lines = read_json_lines(Path(run.folder, "events", "0.jsonl"))
  return done, steps, lines, "requeue 7" in asked


GONE = "echo n1,n3 >$cluster/nodes"


SILENT = "echo n2 >$cluster/silent"  # Slurm does not know yet
BAD = [f"echo n2 {state} >$cluster/bad" for state in ("down*", "draining")]


@pytest.mark.parametrize("how", [GONE, SILENT, *BAD])
def test_a_lost_node_is_left_out_of_the_next_step(tmp_path, how):
  does = f"[ $n = 2 ] && exit 0; {how}; exit 137"
  done, steps, lines, again = run_script(tmp_path, does)
  assert done.returncode == 0 and not again
  assert steps == ["n2,n3", "n1,n3"]  # the script's own node trains last
  assert [line["event"] for line in lines] == ["start", "move", "end"]
  assert [line["restarts"] for line in lines] == [0, 1, 1]
  assert (lines[1]["lost"], lines[1]["hosts"], lines[1]["code"]) == ("n2", "n1,n3", 137)
  assert "exit code 137: lost node n2; resuming" in done.stdout


def test_two_lost_are_too_many_and_the_job_is_requeued_even_without_progress(tmp_path):
  done, steps, lines, again = run_script(tmp_path, "echo n1 >$cluster/nodes; exit 1")
  assert (done.returncode, len(steps), again) == (1, 1, True)
  assert (lines[-1]["event"], lines[-1]["next"]) == ("end", "requeue")


@pytest.mark.parametrize("code", [0, 2, 85, 93, 130])
def test_what_ended_by_itself_does_not_resume_elsewhere(tmp_path, code):
  does = f"{GONE}; exit {code}"
  done, steps, _, again = run_script(tmp_path, does)
  assert (done.returncode, len(steps), again) == (code, 1, code == 85)


ALL = "echo n1 n2 n3 >$cluster/silent;"  # nodes cannot be asked: none is given up


@pytest.mark.parametrize("does", ["", ALL], ids=["there", "silent"])
def test_a_crash_without_a_lost_node_is_judged_as_without_spares(tmp_path, does):
  done, steps, lines, again = run_script(tmp_path, f"{does} exit 1")
  assert (done.returncode, len(steps), again) == (1, 1, False)
  assert lines[-1]["next"] == "stop"


def test_after_cancel_it_resumes_nowhere(tmp_path):
  does = f'touch "{tmp_path}/run/cancelled"; {GONE}; exit 143'
  _, steps, _, again = run_script(tmp_path, does)
  assert (len(steps), again) == (1, False)


def test_moves_count_as_restarts_also_those_before_a_requeue(tmp_path):
  events = tmp_path / "run" / "events"
  events.mkdir(parents=True)
  for job in "73":
    old = {"event": "move", "job": job, "restarts": 1, "code": 1}
    append_json_line(events / "0.jsonl", old)
  does = f"[ $n = 1 ] && {GONE} && exit 1; exit 86"
  done, steps, lines, again = run_script(tmp_path, does, requeue=2)
  assert (done.returncode, steps) == (86, ["n2,n3", "n1,n3"])
  assert [line["restarts"] for line in lines[2:]] == [1, 2, 2]
  assert not again and "not restarted: this was start 3 of 3" in done.stdout


@pytest.mark.slow
def test_training_continues_on_the_spare_and_loses_no_bit(cli, slurm, tmp_path):
  args = [*ARGS, "--config.epochs=12", "--config.checkpoint.every_epochs=1"]
  args += ["--config.faults.hang_timeout_s=300"]
  workdir = cli.runs / "s" / "train"
  python = sleeps_at_first(tmp_path, workdir)
  cli("submit", "--real", f"--python={python}", "--nodes=2", "--spares=1", "--name=s", *args)
  wait_until(lambda: newest_step(workdir) > 20, seconds=300)
  before = newest_step(workdir)
  assert slurm.job(number(cli, "s"))["BatchHost"] == "n1"  # which is the spare
  slurm.kill_node("n2")  # of rank 0
  wait_until(lambda: [e["event"] for e in events(cli, "s")] == ["start", "move"], seconds=300)
  move = events(cli, "s")[1]
  wait_until(lambda: newest_step(workdir) > before, seconds=300)  # after it was noticed
  words = until(cli, "s", "COMPLETED")
  assert words[-1] == "1"  # restarts
  assert (move["lost"], move["hosts"], move["nodes"]) == ("n2", "n1,n3", 2)
  assert slurm.job(number(cli, "s"))["Restarts"] == "0"
  assert "lost node n2; resuming from step" in cli("logs", "s", "--rank=batch")
  reported = re.search(r"resuming from the checkpoint of step (\d+)", cli("logs", "s"))
  assert reported and int(reported[1]) >= before  # or of one more, saved before it was killed
  again = tmp_path / "whole"
  command = "srun", "-N2", "-n2", "-wn1,n3", *train_command(again, *args)
  slurm.run(*command, timeout=300, **child_env(1))
  assert_same_run(workdir, again)


def sleeps_at_first(tmp_path, workdir):
  """Return a Python whose process 0 waits in step 60, until it is killed, unless it resumes."""
  path, python = tmp_path / "first" / "python", shlex.quote(sys.executable)
  saved = shlex.quote(str(workdir / "checkpoints"))
  faulty = f'{python} tests/support/faulty_train.py sleep 0 60 {tmp_path}/note "${{@:3}}"'
  fake(path, f'[ "$2" = jaxscale.train ] && [ ! -e {saved} ] && exec {faulty}\nexec {python} "$@"')
  return path


@pytest.mark.slow
def test_the_job_is_requeued_when_the_node_of_its_script_is_lost(cli, slurm):
  """Slurm 22.05 would keep it, without a script, until its time limit."""
  cli.does(FOREVER)
  cli("submit", "--nodes=2", "--spares=1", "--name=h")
  until(cli, "h", "RUNNING")
  log = cli.runs / "h" / "logs" / f"{number(cli, 'h')}.1.out"
  wait_until(lambda: log.exists() and "rank 1 of 2 on n3" in log.read_text())
  slurm.kill_node("n1")
  wait_until(lambda: ends(cli, "h") == [(137, "requeue")], seconds=300)
  cli.does("exit 0")
  until_ended(cli, "h")
  assert until(cli, "h", "COMPLETED")[-1] == "1"
  assert slurm.job(number(cli, "h"))["NodeList"] == "n[2-4]"
  reported = cli("logs", "h", "--rank=batch")
  assert "lost node n1, which ran the batch script: the job is requeued" in reported
