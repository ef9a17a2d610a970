"""The scripts of runs: word by word, and run by bash with fake commands for Slurm's.

JAXSCALE_GOLDEN=write makes the golden ones anew, for a diff that a person reads.
"""

import itertools
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from jaxscale.errors import ConfigError
from jaxscale.jobs import slurm_executor
from jaxscale.jobs.site import Container, Site
from jaxscale.jobs.spec import SIGNAL_CODES, is_restarted
from jaxscale.metrics import read_json_lines
from support.cases import all_slow_except
from support.job_script import RUN, RUNS, fake
from support.paths import DATA, ROOT
from support.processes import wait_until

GOLDEN = DATA / "golden"


@pytest.mark.parametrize("name", RUNS)
def test_the_script_is_the_golden_one(name):
  script = slurm_executor.render(RUNS[name])
  path = GOLDEN / f"{name}.sbatch"
  if os.environ.get("JAXSCALE_GOLDEN") == "write":
    path.write_text(script)
  assert script == path.read_text()
  assert subprocess.run(["bash", "-n", path]).returncode == 0


def job_files(tmp_path, run, *, srun="exit 0", scontrol="echo JobState=RUNNING"):
  """Write a run's script, and commands of Slurm that write down how they are called."""
  bin_ = tmp_path / "bin"
  fake(bin_ / "srun", f'printf "%s\\0" "$@" >>"{tmp_path}/srun"\n{srun}')
  fake(bin_ / "scontrol", f'echo "$@" >>"{tmp_path}/scontrol"; {scontrol}')
  fake(bin_ / "scancel", f'echo "$@" >>"{tmp_path}/scancel"')
  # The script looks every second, from when it minds signals.
  fake(bin_ / "sleep", f'touch "{tmp_path}/looks"; exec /bin/sleep 0.05')
  for name in ("events", "logs"):
    Path(run.folder, name).mkdir(parents=True, exist_ok=True)
  script = Path(run.folder, "job.sbatch")
  script.write_text(slurm_executor.render(run))
  variables = {"PATH": f"{bin_}:{os.environ['PATH']}", "HOME": str(tmp_path), "SLURM_JOB_ID": "7"}
  variables |= {"SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n[1-2]"}
  variables |= {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"}
  return ["bash", str(script)], variables


def run_job(tmp_path, run=RUN, *, variables=(), **does):
  """Run the script of a run to its end, in a folder of its own."""
  command, env = job_files(tmp_path, run._replace(folder=str(tmp_path / "run")), **does)
  return subprocess.run(command, env=env | dict(variables), capture_output=True, text=True)


def is_requeued(tmp_path):
  asked = tmp_path / "scontrol"
  return asked.exists() and "requeue 7" in asked.read_text()


def last_event(tmp_path):
  return read_json_lines(tmp_path / "run" / "events" / "0.jsonl")[-1]


def called(tmp_path, name="srun"):
  return (tmp_path / name).read_text().split("\0")[:-1]


AWKWARD = 'it\'s $HOME `x` "q" \\ * ü'


def test_nothing_in_the_script_is_split_or_expanded(tmp_path):
  folder = tmp_path / "runs $HOME it's" / "a b"
  run = RUN._replace(
    folder=str(folder),
    overrides={"data.path": AWKWARD},
    trials=({"seed": "1"}, {"epochs": AWKWARD + "2"}),
    site=Site(env=(f"WORDS={AWKWARD}",), srun=("--comment=two words",)),
  )
  command, env = job_files(tmp_path, run, srun=f'printf %s "$WORDS" >"{tmp_path}/env"')
  done = subprocess.run(command, env=env, capture_output=True, text=True)
  assert (done.returncode, done.stderr) == (0, "")
  assert called(tmp_path) == [
    *("--kill-on-bad-exit=1", "--comment=two words"),
    *(f"--output={folder}/logs/%A_%a.%t.out", "--open-mode=append"),
    *("/venv/bin/python", "-m", "jaxscale.train"),
    *("--config", f"{folder}/code/configs/digits.py", f"--config.data.path={AWKWARD}"),
    *(f"--config.epochs={AWKWARD}2", "--workdir", f"{folder}/trials/1"),
  ]
  assert (tmp_path / "env").read_text() == AWKWARD
  diary = read_json_lines(folder / "events" / "1.jsonl")
  assert [(d["event"], d["job"], d["code"], d["next"]) for d in diary] == [
    ("start", "7_1", 0, ""),
    ("end", "7_1", 0, "stop"),
  ]
  assert diary[0]["hosts"] == "n[1-2]"


# Each runs `touch PROOF` where a shell, Slurm or printf takes it for more than text.
PAYLOADS = [
  *("$(touch PROOF)", "`touch PROOF`", "; touch PROOF", "&& touch PROOF", "| touch PROOF"),
  *("|| touch PROOF", "& touch PROOF &", "'; touch PROOF; '", '"; touch PROOF; "'),
  *("'$(touch PROOF)'", '"$(touch PROOF)"', "\\'; touch PROOF #", "$IFS$(touch PROOF)"),
  *("${x:-$(touch PROOF)}", "a[$(touch PROOF)]=1", "<(touch PROOF)", "> PROOF", "%s%n%x"),
  *("\ntouch PROOF\n", "EOF\ntouch PROOF\n", "--wrap=touch PROOF", "~/x {a,b} * ? [a-z]"),
]
# Where a user's or a site's text goes into the script.
PLACES = {
  "override": lambda text: {"overrides": {"data.path": text}},
  "trial": lambda text: {"trials": ({"seed": "1"}, {"data.path": text})},
  "config": lambda text: {"config": f"code/{text}.py"},
  "python": lambda text: {"python": text},
  "variable": lambda text: {"site": Site(env=(f"WORDS={text}",))},
  "module": lambda text: {"site": Site(modules=(text,))},
  "srun": lambda text: {"site": Site(srun=(text,))},
  "made by": lambda text: {"made_by": text},
  "name": lambda text: {"name": text},
  "working directory": lambda text: {"cwd": f"/tmp/{text}"},
  "sbatch": lambda text: {"site": Site(sbatch=(text,))},
  "a field": lambda text: {"overrides": {text: "1"}},
}
for option in ("partition", "account", "qos", "constraint", "reservation", "exclude", "mem"):
  PLACES[option] = lambda text, option=option: {"site": Site(**{option: text})}


def in_container(text, kind, what):
  options = {"image": "i"} | {what: text if what == "image" else (text,)}
  return {"site": Site(container=Container(kind=kind, **options))}


KINDS, PARTS = ("apptainer", "singularity", "pyxis"), ("image", "mounts", "options")
for pair in itertools.product(KINDS, PARTS):
  PLACES["{1} of {0}".format(*pair)] = lambda text, pair=pair: in_container(text, *pair)
QUICK_PLACES = ("override", "trial", "config", "python", "variable", "module", "srun", "name")


@pytest.mark.parametrize("place", all_slow_except(PLACES, *QUICK_PLACES))
def test_no_text_of_a_run_is_executed(tmp_path, place):
  """Text that bash would run leaves a file; a refusal before is as good."""
  rendered = 0
  for number, payload in enumerate(PAYLOADS):
    proof, here = tmp_path / f"proof{number}", tmp_path / str(number)
    here.mkdir()
    text = payload.replace("PROOF", str(proof))
    try:
      command, env = job_files(here, RUN._replace(folder=str(here / "run"), **PLACES[place](text)))
    except ConfigError:
      continue
    rendered += 1
    fake(here / "bin" / "module", "exit 0")
    subprocess.run(command, env=env, cwd=here, capture_output=True, timeout=300)
    assert not proof.exists(), payload
  assert rendered


@pytest.mark.parametrize("progress", [False, True])
@pytest.mark.parametrize("code", [0, 1, 2, 85, 86, 93, 130, 134, 137])
def test_the_script_starts_again_what_the_local_executor_does(tmp_path, code, progress):
  saved = tmp_path / "run" / "train" / "checkpoints"
  step = f'mkdir -p "{saved}/40"; ' if progress else ""
  if progress and code % 2:  # a copy on the nodes, recorded as `write_json` does
    step = f'printf \'{{\\n  "run": "5",\\n  "step": 40\\n}}\' >\'{saved}/local.json\'; '
  (saved / "9").mkdir(parents=True)
  done = run_job(tmp_path, srun=f"{step}exit {code}")
  assert done.returncode == code, done.stderr
  wanted = code in (85, 86) or (code in (1, 134, 137) and progress)
  assert is_requeued(tmp_path) == is_restarted(code, progress) == wanted
  assert last_event(tmp_path)["code"] == code


STATES = [
  ("9", "echo JobState=RUNNING Reason=None", False, True),
  ("10", "echo JobState=RUNNING Reason=None", False, False),  # often enough
  ("0", "echo JobState=COMPLETING Reason=None", False, False),  # scancel
  ("0", "echo JobState=COMPLETING Reason=TimeLimit", False, True),
  ("0", "echo JobState=RUNNING Reason=None", True, False),
  ("0", "exit 1", False, False),
]


@pytest.mark.parametrize("restarts, scontrol, cancelled, again", STATES)
def test_what_was_cancelled_or_often_enough_is_not_started_again(
  tmp_path, restarts, scontrol, cancelled, again
):
  (tmp_path / "run").mkdir()
  if cancelled:
    (tmp_path / "run" / "cancelled").touch()
  variables = {"SLURM_RESTART_COUNT": restarts}
  assert run_job(tmp_path, variables=variables, srun="exit 85", scontrol=scontrol).returncode == 85
  assert is_requeued(tmp_path) == again


def end_of(tmp_path, srun, code, scontrol="echo JobState=RUNNING"):
  """Return the recorded end of the script if srun prints lines and returns a code."""
  run = RUN._replace(folder=str(tmp_path / "run"), nodes=2)
  lines = "\n".join(["srun: job 7 has been allocated resources", *srun])
  shown = f"cat >&2 <<'X'\n{lines}\nX\nexit {code}"
  command, env = job_files(tmp_path, run, srun=shown, scontrol=scontrol)
  for rank in (0, 1):
    Path(run.folder, "logs", f"7.{rank}.out").write_text(f"error: line of {rank}\n")
  with open(Path(run.folder, "logs", "7.batch.out"), "a") as log:
    log.write("srun: error: n3: task 5: Exited with exit code 3\n")  # of another start
    log.flush()
    done = subprocess.run(command, env=env, stdout=log, stderr=log)
  last = last_event(tmp_path)
  assert done.returncode == last["code"]
  return last["code"], last["next"], Path(log.name).read_text()


TERMINATED = "srun: error: n1: task 0: Terminated"
SAVED = "srun: error: n1: task 0: Exited with exit code 85"


ENDS = {
  **{f"Exited with exit code {code}": code for code in (1, 2, 127)},
  **{"Segmentation fault (core dumped)": 139, "Killed": 137, "Out Of Memory": 137},
  **{"Aborted": 134, "Bus error": 1},
}


@pytest.mark.parametrize("how, code", ENDS.items())
@pytest.mark.parametrize("other, highest", [(SAVED, 85), (TERMINATED, 143)])
def test_a_process_that_fails_before_the_others_know_is_the_one_that_counts(
  tmp_path, how, code, other, highest
):
  """Expect the code of the first failure: srun returns that of the processes that it ended."""
  lines = f"srun: error: n2: task 1: {how}", "srun: Terminating StepId=7.0", other
  ended = end_of(tmp_path, lines, max(code, highest))
  assert ended[:2] == (code, "stop")
  assert f"error: process 1 failed first ({how}): error: line of 1\n" in ended[2]


@pytest.mark.parametrize("code", [85, *SIGNAL_CODES])
def test_a_signal_to_all_before_they_have_handlers_restarts_them(tmp_path, code):
  how = {129: "Hangup", 138: "User defined signal 1", 140: "User defined signal 2"}
  line = f"srun: error: n[1-2]: tasks 0-1: {how.get(code, 'Terminated')}"
  assert end_of(tmp_path, [SAVED, line], code)[:2] == (code, "requeue")
  assert is_requeued(tmp_path)


def test_what_somebody_requeues_is_on_record_as_requeued(tmp_path):
  shown = "echo JobState=COMPLETING Reason=None Restarts=1"
  assert end_of(tmp_path, [SAVED], 85, shown)[:2] == (85, "requeue")
  assert not is_requeued(tmp_path)


def test_a_controller_that_does_not_answer_is_asked_again(tmp_path):
  asked = f'[ "$(grep -c show "{tmp_path}/scontrol")" -gt 2 ]'
  does = f"{asked} && echo JobState=RUNNING Reason=None"
  assert end_of(tmp_path, [SAVED], 85, does)[:2] == (85, "requeue")
  never = tmp_path / "never"
  never.mkdir()
  code, after, log = end_of(never, [SAVED], 85, "exit 1")
  assert (code, after) == (85, "stop")
  assert "error: not restarted: Slurm's controller does not answer" in log


@pytest.mark.parametrize("code", [0, 1, 2, 85, 86, 93, 130])
def test_every_exit_code_is_on_record_where_the_disk_is_full(tmp_path, code):
  run = RUN._replace(folder=str(tmp_path / "run"), requeue=0)
  full = f'dd if=/dev/zero of="{run.folder}/fill" bs=4k 2>/dev/null; exit {code}'
  command, env = job_files(tmp_path, run, srun=full)
  script = Path(command[1]).read_text()
  private = ["unshare", "--user", "--map-root-user", "--mount", "bash", "-c"]
  if subprocess.run([*private, "mount -t tmpfs none /mnt"]).returncode:
    pytest.skip("no mount namespaces")
  within = (
    f'mount -t tmpfs -o size=64k none "{run.folder}" && cd "{run.folder}" &&'
    ' mkdir events logs && printf %s "$0" >job.sbatch && bash job.sbatch; code=$?;'
    " cat events/0.jsonl; exit $code"
  )
  done = subprocess.run([*private, within, script], env=env, capture_output=True)
  ends = [json.loads(line) for line in done.stdout.splitlines() if b'"end"' in line]
  assert [end["code"] for end in ends] == [done.returncode] == [code], done


def start_job(tmp_path, run, code):
  """Start a script whose srun waits for the file `go`; return once it minds signals."""
  does = (
    f'touch "{tmp_path}/up"; until [ -e "{tmp_path}/go" ]; do /bin/sleep 0.05; done; exit {code}'
  )
  command, env = job_files(tmp_path, run, srun=does)
  job = subprocess.Popen(
    command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
  )
  wait_until(lambda: all((tmp_path / name).exists() for name in ("up", "looks")), job, 300)
  return job


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_the_script_outlives_a_signal_and_hands_the_warning_on(tmp_path, number):
  run = RUN._replace(folder=str(tmp_path / "run"))
  job = start_job(tmp_path, run, 85)
  for one in (number, signal.SIGCONT, number):
    job.send_signal(one)
    time.sleep(0.1)
  (tmp_path / "go").touch()
  out, _ = job.communicate(timeout=300)
  assert job.returncode == 85 and "exit code 85: restarted" in out
  handed_on = tmp_path / "scancel"
  if number == signal.SIGTERM:  # Slurm tells the tasks itself
    assert not handed_on.exists()
  else:
    assert f"--signal={number.name.removeprefix('SIG')} 7" in handed_on.read_text()


DOCTORS = [
  (1, 1, "stop"),  # srun could not start it, or the doctor crashed: not the nodes
  (2, 2, "stop"),
  (138, 85, "requeue"),  # --signal without B: goes to the doctor alone
  (143, 85, "requeue"),
]


@pytest.mark.parametrize("spares", [0, 1])
@pytest.mark.parametrize("code, ends, next_", DOCTORS)
def test_only_the_doctor_calls_an_allocation_unfit(tmp_path, code, ends, next_, spares):
  done = run_job(tmp_path, RUN._replace(preflight=True, spares=spares), srun=f"exit {code}")
  assert done.returncode == ends and "unbound" not in done.stderr
  assert ("error: the preflight found problems on this allocation" in done.stderr) == (code == 2)
  # The last one counts; with 1 the others' end would hide the doctor's 2.
  assert [w for w in called(tmp_path) if "bad-exit" in w][-1].endswith("=0")
  assert "doctor" in called(tmp_path) and "jaxscale.train" not in called(tmp_path)
  last = last_event(tmp_path)
  assert (last["event"], last["code"], last["next"]) == ("end", ends, next_)
  assert is_requeued(tmp_path) == (next_ == "requeue")


@pytest.mark.parametrize("code", [0, 2, 138, 143])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_asked_to_stop_in_the_preflight_it_resumes_later(tmp_path, number, code):
  """Whatever the doctor says, that is interrupted too, or has just ended."""
  run = RUN._replace(folder=str(tmp_path / "run"), preflight=True)
  job = start_job(tmp_path, run, code)
  job.send_signal(number)
  (tmp_path / "go").touch()
  out, _ = job.communicate(timeout=300)
  assert job.returncode == 85 and "stopped by a signal in the preflight" in out
  assert "jaxscale.train" not in called(tmp_path)
  assert is_requeued(tmp_path)
  last = last_event(tmp_path)
  assert (last["code"], last["next"]) == (85, "requeue")
  assert (tmp_path / "scancel").exists() == (number != signal.SIGTERM)  # handed on


def test_a_preflight_that_passes_is_followed_by_the_training(tmp_path):
  assert run_job(tmp_path, RUN._replace(preflight=True)).returncode == 0
  words = called(tmp_path)
  assert words.index("doctor") < words.index("jaxscale.train")


def test_a_setup_line_that_fails_ends_the_job_and_says_where(tmp_path):
  done = run_job(tmp_path, RUN._replace(site=Site(setup=("true", "ls /no/such/directory", "true"))))
  assert done.returncode == 2 and "error: line" in done.stderr
  assert not (tmp_path / "srun").exists()


@pytest.mark.parametrize("path", sorted((ROOT / "launch").glob("*.s*")), ids=str)
def test_shell_reads_every_plain_script(path):
  assert subprocess.run(["bash", "-n", path]).returncode == 0


def test_the_pods_hosts_get_the_words_as_they_were_typed(tmp_path):
  fake(tmp_path / "bin" / "gcloud", 'printf %s "${!#}" | sed "s/--command=//"')
  env = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "TPU": "pod", "ZONE": "z"}
  command = ["bash", "launch/tpu_pod.sh", "--config", "a b.py", f"--config.x={AWKWARD}"]
  done = subprocess.run(command, env=env, capture_output=True, text=True)
  head = "cd ~/jaxscale && exec .venv/bin/python -P -m jaxscale.train"
  assert done.stdout.startswith(head), done.stderr
  words = f"printf '%s\\0' {done.stdout.removeprefix(head)}"
  words = subprocess.run(["bash", "-c", words], capture_output=True, text=True)
  assert words.stdout.split("\0")[:-1] == ["--config", "a b.py", f"--config.x={AWKWARD}"]
