"""What `jaxscale.launch` would submit: scripts as text, sites, sweeps, mistakes.

The golden scripts are compared word by word; JAXSCALE_GOLDEN=write makes them anew,
for a diff that a person reads.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT

from jaxscale import launch
from jaxscale.launch import cli, profile, render, slurm, spec, status, sweep
from jaxscale.launch import folder as folders
from jaxscale.launch.local import starts_again
from jaxscale.launch.profile import Site, load_site, site_from, with_options
from jaxscale.overrides import load_config
from jaxscale.settings import ConfigError

DIGITS = "configs/digits.py"
GOLDEN = Path(__file__).parent / "golden"

RUN = spec.Run(
  name="digits-1", folder="/runs/digits-1", cwd="/home/me/jaxscale",
  config="code/configs/digits.py", overrides={}, trials=(), at_most=0, nodes=1,
  site=Site(), requeue=10, preflight=False, executor="slurm", python="/venv/bin/python",
  made_by="python -m jaxscale.launch submit --config configs/digits.py",
)  # fmt: skip
RUNS = {
  "plain": RUN,
  "gpus": RUN._replace(
    nodes=64,
    overrides={"epochs": "90", "data.path": "/data/with space"},
    preflight=True,
    site=load_site("launch/profiles/gpu8.toml"),
  ),
  "sweep": RUN._replace(
    trials=({"seed": "1", "optimizer.lr": "0.1"}, {"seed": "2", "optimizer.lr": "0.2"}),
    at_most=2,
    requeue=0,
  ),
  "apptainer": RUN._replace(site=load_site("launch/profiles/apptainer.toml")),
  "pyxis": RUN._replace(site=load_site("launch/profiles/pyxis.toml"), nodes=2),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_script_is_the_golden_one(name):
  script = render.render(RUNS[name])
  path = GOLDEN / f"{name}.sbatch"
  if os.environ.get("JAXSCALE_GOLDEN") == "write":
    path.write_text(script)
  assert script == path.read_text()
  assert subprocess.run(["bash", "-n", path]).returncode == 0


def stand_in(path: Path, text: str) -> None:
  path.parent.mkdir(exist_ok=True)
  path.write_text(f"#!/bin/bash\n{text}\n")
  path.chmod(0o755)


def job_files(tmp_path, run, *, srun="exit 0", scontrol="echo JobState=RUNNING"):
  """Write a run's script, and commands of Slurm that write down how they are called."""
  bin_ = tmp_path / "bin"
  stand_in(bin_ / "srun", f'printf "%s\\0" "$@" >>"{tmp_path}/srun"\n{srun}')
  stand_in(bin_ / "scontrol", f'echo "$@" >>"{tmp_path}/scontrol"; {scontrol}')
  stand_in(bin_ / "scancel", f'echo "$@" >>"{tmp_path}/scancel"')
  for name in ("events", "logs"):
    Path(run.folder, name).mkdir(parents=True, exist_ok=True)
  script = Path(run.folder, "job.sbatch")
  script.write_text(render.render(run))
  variables = {
    "PATH": f"{bin_}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "HOME": str(tmp_path),
    "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1",
  }  # fmt: skip
  return ["bash", str(script)], variables


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
    "--kill-on-bad-exit=1", "--comment=two words",
    f"--output={folder}/logs/%A_%a.%t.out", "--open-mode=append",
    "/venv/bin/python", "-m", "jaxscale.train",
    "--config", f"{folder}/code/configs/digits.py", f"--config.data.path={AWKWARD}",
    f"--config.epochs={AWKWARD}2", "--workdir", f"{folder}/trials/1",
  ]  # fmt: skip
  assert (tmp_path / "env").read_text() == AWKWARD
  diary = folders.read_lines(folder / "events" / "1.jsonl")
  assert [(d["event"], d["job"], d["code"], d["next"]) for d in diary] == [
    ("start", "7_1", 0, ""),
    ("end", "7_1", 0, "stop"),
  ]
  assert diary[0]["hosts"] == "n[1-2]"


@pytest.mark.parametrize("progress", [False, True])
@pytest.mark.parametrize("code", [0, 1, 2, 85, 86, 93, 130, 134, 137])
def test_the_script_starts_again_what_the_local_executor_does(tmp_path, code, progress):
  run = RUN._replace(folder=str(tmp_path / "run"))
  step = f'mkdir -p "{run.folder}/train/checkpoints/40"; ' if progress else ""
  command, env = job_files(tmp_path, run, srun=f"{step}exit {code}")
  (Path(run.folder) / "train" / "checkpoints" / "9").mkdir(parents=True)
  done = subprocess.run(command, env=env, capture_output=True, text=True)
  assert done.returncode == code, done.stderr
  asked = (
    (tmp_path / "scontrol").read_text() if (tmp_path / "scontrol").exists() else ""
  )
  assert ("requeue 7" in asked) == starts_again(code, progress)
  assert folders.read_lines(Path(run.folder, "events", "0.jsonl"))[-1]["code"] == code


@pytest.mark.parametrize(
  "restarts, scontrol, cancelled, again",
  [
    ("9", "echo JobState=RUNNING Reason=None", False, True),
    ("10", "echo JobState=RUNNING Reason=None", False, False),  # often enough
    ("0", "echo JobState=COMPLETING Reason=None", False, False),  # scancel
    ("0", "echo JobState=COMPLETING Reason=TimeLimit", False, True),
    ("0", "echo JobState=RUNNING Reason=None", True, False),
    ("0", "exit 1", False, False),
  ],
)
def test_what_was_cancelled_or_often_enough_is_not_started_again(
  tmp_path, restarts, scontrol, cancelled, again
):
  run = RUN._replace(folder=str(tmp_path / "run"))
  command, env = job_files(tmp_path, run, srun="exit 85", scontrol=scontrol)
  if cancelled:
    Path(run.folder, "cancelled").touch()
  env["SLURM_RESTART_COUNT"] = restarts
  assert subprocess.run(command, env=env, capture_output=True).returncode == 85
  asked = tmp_path / "scontrol"
  assert (asked.exists() and "requeue 7" in asked.read_text()) == again


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_the_script_outlives_a_signal_and_hands_the_warning_on(tmp_path, number):
  run = RUN._replace(folder=str(tmp_path / "run"))
  command, env = job_files(
    tmp_path, run, srun=f'touch "{tmp_path}/up"; sleep 2; exit 85'
  )
  job = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
  while not (tmp_path / "up").exists():
    time.sleep(0.02)
  for one in (number, signal.SIGCONT, number):
    job.send_signal(one)
    time.sleep(0.1)
  out, _ = job.communicate(timeout=20)
  assert job.returncode == 85 and "exit code 85: started again" in out
  handed_on = tmp_path / "scancel"
  if number == signal.SIGTERM:  # Slurm tells the tasks itself
    assert not handed_on.exists()
  else:
    assert f"--signal={number.name.removeprefix('SIG')} 7" in handed_on.read_text()


def test_a_preflight_that_fails_ends_the_job(tmp_path):
  run = RUN._replace(folder=str(tmp_path / "run"), preflight=True)
  command, env = job_files(tmp_path, run, srun="exit 2")
  done = subprocess.run(command, env=env, capture_output=True, text=True)
  assert done.returncode == 2 and "preflight" in done.stderr
  assert "jaxscale.doctor" in called(tmp_path)
  assert "jaxscale.train" not in called(tmp_path)


def test_a_setup_line_that_fails_ends_the_job_and_says_where(tmp_path):
  site = Site(setup=("true", "ls /no/such/directory", "true"))
  run = RUN._replace(folder=str(tmp_path / "run"), site=site)
  command, env = job_files(tmp_path, run)
  done = subprocess.run(command, env=env, capture_output=True, text=True)
  assert done.returncode == 2 and "error: line" in done.stderr
  assert not (tmp_path / "srun").exists()


@pytest.mark.parametrize("folder", ['/a"b', "/a\\b", "/a\nb"])
def test_a_path_that_slurm_cannot_take_is_refused(folder):
  with pytest.raises(ConfigError, match="Slurm takes no path"):
    render.render(RUN._replace(folder=folder))


def test_a_run_survives_json():
  for run in RUNS.values():
    assert spec.from_json(json.loads(json.dumps(spec.to_json(run)))) == run


@pytest.mark.parametrize(
  "text, says",
  [
    ('partiton = "gpu"', "did you mean 'partition'?"),
    ("gpus_per_node = -1", "give a value >= 0"),
    ('time = "tomorrow"', "give e.g. 24:00:00"),
    ('signal = "USR1 120"', "give e.g. USR1@120"),
    ("[env]\nA = 1.5", "Site.env.A=1.5"),
    ('[env]\n"A B" = "1"', "no variable's name"),
    ('[container]\nkind = "docker"\nimage = "x"', "'apptainer' | 'singularity'"),
    ('[container]\nkind = "pyxis"', "Container.image is not set"),
    ('modules = "cuda"', "Site.modules='cuda': give tuple of str"),
    ("partition = gpu", "site.toml"),
  ],
)
def test_a_mistake_in_a_site_is_one_line(tmp_path, text, says):
  (tmp_path / "site.toml").write_text(text)
  with pytest.raises(ConfigError) as e:
    load_site(str(tmp_path / "site.toml"))
  assert says in str(e.value) and "\n" not in str(e.value)


def test_sites_have_names(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
  monkeypatch.delenv("JAXSCALE_SITE", raising=False)
  assert load_site(None) == Site()
  profile.sites_folder().mkdir(parents=True)
  (profile.sites_folder() / "here.toml").write_text('partition = "gpu"')
  assert load_site("here").partition == "gpu"
  monkeypatch.setenv("JAXSCALE_SITE", "here")
  assert load_site(None).partition == "gpu"
  with pytest.raises(ConfigError, match=r"--site=her: .*did you mean 'here'"):
    load_site("her")


@pytest.mark.parametrize("path", sorted((ROOT / "launch" / "profiles").glob("*.toml")))
def test_the_profiles_in_the_tree_are_right(path):
  assert load_site(str(path)) != Site()


def test_the_command_line_has_the_last_word():
  site = with_options(site_from({"time": "90", "gpus_per_node": 8}), {"time": "2-0"})
  assert (site.time, site.tasks) == ("2-0", 8)
  assert with_options(site, {"tasks_per_node": "2"}).tasks == 2
  with pytest.raises(ConfigError, match=r"^--gpus-per-node=two: give a whole number"):
    with_options(site, {"gpus_per_node": "two"})
  with pytest.raises(ConfigError, match=r"^--tasks-per-node=0: give a value >= 1"):
    with_options(site, {"tasks_per_node": 0})


def test_a_sweep_is_a_product():
  trials = sweep.product(["optimizer.lr=0.1,0.2", "--config.seed=1,2", "a=(1,2),'x,y'"])
  assert len(trials) == 8
  assert trials[1] == {"optimizer.lr": "0.1", "seed": "1", "a": "'x,y'"}
  assert trials[-1] == {"optimizer.lr": "0.2", "seed": "2", "a": "'x,y'"}
  for wrong in ("seed", "seed=", "=1", "seed=1,,2"):
    with pytest.raises(ConfigError, match=f"--sweep={wrong}"):
      sweep.product([wrong])
  with pytest.raises(ConfigError, match="has a list already"):
    sweep.product(["seed=1", "seed=2"])


SWEEP = """
from jaxscale.overrides import load_config

def get_config():
  return load_config("configs/digits.py")

def get_sweep():
  for rate in (0.1, 2e-05):
    yield {"optimizer.lr": rate, "data.augment": "none"}
"""


def test_a_config_file_yields_its_sweep(tmp_path, monkeypatch):
  path = tmp_path / "mine.py"
  path.write_text(SWEEP)
  assert sweep.from_file(str(path)) == [
    {"optimizer.lr": "0.1", "data.augment": "none"},
    {"optimizer.lr": "2e-05", "data.augment": "none"},
  ]
  with pytest.raises(ConfigError, match="define get_sweep"):
    sweep.from_file(DIGITS)
  path.write_text(path.read_text().replace("yield {", "yield 1/0, {"))
  with pytest.raises(ConfigError, match=r"mine.py:9: ZeroDivisionError"):
    sweep.from_file(str(path))


def test_a_sweep_is_checked_before_it_is_submitted():
  def check(trials):
    sweep.check(lambda o: load_config(DIGITS, o), {}, trials)

  with pytest.raises(ConfigError, match=r"trial 1: .*has no field 'sed'"):
    check([{"seed": "1"}, {"sed": "2"}])
  with pytest.raises(ConfigError, match="trial 2 is trial 0 again"):
    check([{"seed": "1"}, {"seed": "2"}, {"seed": "1"}])


MISTAKES = [
  ([], "give a verb, one of cancel, logs,"),
  (["submitt"], "did you mean 'submit'?"),
  (["submit"], "--config: missing"),
  (["submit", DIGITS], "a config is --config FILE"),
  (["submit", "--config", DIGITS, "--node=4"], "did you mean '--nodes'?"),
  (["submit", "--config", DIGITS, "--nodes=0"], "--nodes=0: give a whole number >= 1"),
  (["submit", "--config", DIGITS, "--nodes"], "--nodes: a value is missing"),
  (["submit", "--config", DIGITS, "--time=long"], "--time='long': give e.g. 24:00:00"),
  (["submit", "--config", DIGITS, "--config.epoch=3"], "did you mean 'epochs'?"),
  (["submit", "--config", "configs/digit.py"], "did you mean 'configs/digits.py'?"),
  (["submit", "--config", DIGITS, "--executor=slrum"], "did you mean 'slurm'?"),
  (["submit", "--config", DIGITS, "--name=a/b"], "--name=a/b: give letters, digits"),
  (["submit", "--config", DIGITS, "--site=x.toml"], "--site=x.toml: No such file"),
  (["submit", "--config", DIGITS, "--sweep=seed=1"], "--sweep=seed=1: not an option"),
  (["sweep", "--config", DIGITS], "define get_sweep() in it, or give --sweep"),
  (["sweep", "--config", DIGITS, "--sweep=epochs=0"], "trial 0: "),
  (["scaling", "--config", DIGITS, "--nodes=1,1"], "give several sizes"),
  (["logs", "nothing"], "nothing: no such run"),
  (["cancel"], "cancel: of which run?"),
  (["status", "--every=0"], "--every=0: give a whole number >= 1"),
]  # fmt: skip


@pytest.mark.parametrize("argv, says", MISTAKES, ids=lambda v: str(v)[:40])
def test_a_mistake_is_one_line_and_makes_nothing(argv, says, tmp_path, capsys):
  runs = ["--runs", str(tmp_path / "runs")] if argv[:1] != ["submitt"] and argv else []
  assert cli.main([*argv, *runs]) == 2
  out, err = capsys.readouterr()
  assert out == "" and err.startswith("error: ") and err.count("\n") == 1
  assert says in err
  assert not (tmp_path / "runs").exists()


def test_a_dry_run_prints_the_script_and_makes_nothing(tmp_path, capsys):
  runs = tmp_path / "runs"
  argv = ["submit", "--config", DIGITS, "--nodes", "4", "--dry-run", "--preflight"]
  argv += ["--executor=slurm", f"--runs={runs}", "--name=x", "--config.epochs=3"]
  assert cli.main(argv) == 0
  out, _ = capsys.readouterr()
  assert not runs.exists()
  script = out[: out.index("# would make")]
  assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
  assert f"# made by {shlex.join(['python', '-m', 'jaxscale.launch', *argv])}" in (
    out.replace("# x, made", "# made")
  )
  assert "#SBATCH --nodes=4" in out and "--config.epochs=3" in out


def test_the_folder_holds_the_code_and_its_config(tmp_path):
  (tmp_path / "configs_beside.py").write_text("RATES = (0.1, 0.2)")
  config = tmp_path / "mine.py"
  config.write_text(SWEEP)
  prepared = launch.handle.prepare(
    load_config(DIGITS), name="x", runs=str(tmp_path / "r"), executor="local"
  )
  folders.make(prepared.run, prepared.config, prepared.text)
  code = Path(prepared.run.folder, "code")
  tracked = subprocess.run(
    ["git", "ls-files", "jaxscale"], cwd=ROOT, capture_output=True, text=True
  ).stdout.split()
  assert {str(p.relative_to(code)) for p in code.rglob("*") if p.is_file()} >= {
    *tracked
  }
  assert load_config(spec.config(prepared.run)) == load_config(DIGITS)
  where = subprocess.run(
    [sys.executable, "-c", "import jaxscale; print(jaxscale.__file__)"],
    env={**os.environ, "PYTHONPATH": str(code), "PYTHONSAFEPATH": "1"},
    cwd=ROOT, capture_output=True, text=True,
  )  # fmt: skip
  assert where.stdout.strip() == str(code / "jaxscale" / "__init__.py"), where.stderr
  packages = json.loads((code.parent / "environment.json").read_text())["packages"]
  assert "jax" in packages
  with pytest.raises(ConfigError, match="is there already"):
    launch.handle.prepare(DIGITS, name="x", runs=str(tmp_path / "r"))
  places = {place for _, place in folders.sources(str(config))}
  assert {"code/config/mine.py", "code/config/configs_beside.py"} <= places


def test_a_run_of_today_never_takes_the_folder_of_another(tmp_path):
  for _ in range(3):
    folders.new_folder(str(tmp_path), None, "configs/x.py:8 k").mkdir()
  names = sorted(p.name for p in tmp_path.iterdir())
  assert len(names) == 3 and all(name.startswith("x-8-k-20") for name in names)


def queued(state, **changes):
  return slurm.Queued(state, 4, "1:00:00", 2, "None")._replace(**changes)


def diary(run, *events):
  for event, job, code, next_ in events:
    line = {"event": event, "job": job, "restarts": 1, "nodes": 4, "code": code}
    folders.append(spec.events_file(run, 0), line | {"next": next_, "time": 0})


START, DONE = ("start", "7", 0, ""), ("end", "7", 0, "stop")


@pytest.mark.parametrize(
  "events, cancelled, state",
  [
    ([], False, "LOST"),
    ([], True, "CANCELLED"),
    ([START], False, "LOST"),
    ([START, DONE], False, "COMPLETED"),
    ([START, ("end", "7", 85, "stop")], False, "PREEMPTED"),
    ([START, ("end", "7", 85, "stop")], True, "CANCELLED"),
    ([START, ("end", "7", 85, "requeue")], False, "LOST"),
    ([START, ("end", "7", 2, "stop")], False, "FAILED"),
    ([("start", "6", 0, ""), ("end", "6", 0, "stop")], False, "LOST"),
  ],
)
def test_the_diary_speaks_when_slurm_has_forgotten(tmp_path, events, cancelled, state):
  run = RUN._replace(folder=str(tmp_path))
  (tmp_path / "events").mkdir()
  diary(run, *events)
  if cancelled:
    (tmp_path / "cancelled").touch()
  row = status.row(run, 0, "7", None, False)
  assert row.state == state and row.ended
  assert status.row(run, 0, "7", queued("RUNNING"), False).state == "RUNNING"


def test_a_status_has_all_that_was_asked_for(tmp_path):
  run = RUN._replace(folder=str(tmp_path), nodes=9)
  train = tmp_path / "train"
  train.mkdir()
  (train / "config.json").write_text('{"derived": {"total_steps": 1200}}')
  lines = [{"step": s, "train/loss": 2 - s / 1e3, "time": s / 10} for s in (100, 200)]
  lines += [{"step": 200, "perf/examples_per_s": 12345.6, "time": 20.0}]
  lines += [{"step": 200, "eval/accuracy": 0.5, "time": 21.0}]
  text = "\n".join(json.dumps(line) for line in lines) + '\n{"step": 300, "tr'
  (train / "metrics.jsonl").write_text(text)
  row = status.row(run, 0, "7", queued("RUNNING"), False)
  assert row.to_go == pytest.approx(100)
  head, line = status.table([row]).splitlines()
  assert line.split() == [
    "digits-1", "7", "RUNNING", "4", "200/1,200", "1.8000", "12,346", "50.00%",
    "1:00:00", "1:40", "2",
  ]  # fmt: skip
  assert head.split() == [
    *("run", "job", "state", "nodes", "step", "loss", "examples/s", "accuracy"),
    *("time", "left", "to", "go", "restarts"),
  ]


def test_a_long_record_is_read_from_its_end(tmp_path):
  path = tmp_path / "metrics.jsonl"
  path.write_text("".join(f'{{"step": {i}, "x": "é"}}\n' for i in range(20_000)))
  found = status.tail(path)
  assert found[-1]["step"] == 19_999 and 1000 < len(found) < 5000


def test_a_line_of_squeue_may_be_long():
  reason = "(ReqNodeNotAvail, UnavailableNodes:n[1-4])"
  cells = ["12_3", "PENDING", "64", "2-00:00:00", "1", reason]
  line = "".join(cell.ljust(128) for cell in cells)
  assert slurm.parse_line(line) == (
    "12_3",
    slurm.Queued("PENDING", 64, "2-00:00:00", 1, reason),
  )


def test_launch_does_not_wait_for_jax():
  code = "import sys, jaxscale.launch.cli; print('jax' in sys.modules)"
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
  assert done.stdout.strip() == "False", done.stderr
