"""Runs and compiled programs of another user, who can rename folders: nothing is executed.

Each test has two users: the victim, who runs our commands, and the attacker, by uid.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import jaxscale as jxs
from jaxscale import config as cfg
from jaxscale import files, owners
from jaxscale.cli import submit
from jaxscale.config.record import FORMAT, to_plain
from jaxscale.metrics import read_json
from support.configs import small_config, tiny_language
from support.errors import config_error
from support.two_users import ATTACKER, VICTIM

PROJECT = 2000  # a group of both users

# Leaves a file where the user who imports it can write, and trains like the built-in class.
EVIL = """
import os
from pathlib import Path
Path(os.environ["EXECUTED"]).write_text(__name__)
import jaxscale.models.settings
class MLP(jaxscale.models.settings.MLP): pass
class ViT(jaxscale.models.settings.ViT): pass
class Transformer(jaxscale.models.settings.Transformer): pass
"""

# Runs several commands in one process, as importing JAX for each takes longest.
COMMANDS = """
import contextlib, io, json, sys
from jaxscale import cli
results = []
for words in json.loads(sys.argv[1]):
  out = io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
    code = cli.main(words)
  results.append([code, out.getvalue()])
print(json.dumps(results))
"""


# Builds the settings of a run, as every command that needs its model does.
SETTINGS = """
import sys
from jaxscale.config.record import describe_run
from jaxscale.errors import ConfigError
try:
  print(describe_run(sys.argv[1], trust=sys.argv[2:] == ["--trust"]).settings(partial=True))
except ConfigError as e:
  print("refused:", e)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """Return workdirs of a run on images and of one on text."""
  folder = tmp_path_factory.mktemp("trained")
  usual = dict(epochs=None, steps=2, log=cfg.Log(plot=False, tensorboard=False))
  model = cfg.ViT(patch=4, width=16, num_layers=1, num_heads=2)
  jxs.fit(small_config(model=model, **usual), folder / "images")
  jxs.fit(tiny_language(**usual), folder / "text")
  return folder


@pytest.fixture
def run(users):
  """Return a run of the victim whose model is a class of its own code, with a config.json only."""
  run = users.make("victim/run", VICTIM)
  record = {"config": to_plain(small_config()), "data": {"name": "digits", "num_classes": 10}}
  (run / "config.json").write_text(json.dumps({"format": FORMAT, "identity": {}} | record))
  own_class(run)
  return users.give(run, VICTIM)


def own_class(run: Path, module: str = "evil") -> None:
  """Make the model of a run a class of the user's own, which `evil` in code/ defines."""
  described = read_json(run / "config.json")
  described["config"]["model"]["class"] = f"{module}:{described['config']['model']['class']}"
  described["identity"]["code"] = {}
  (run / "config.json").write_text(json.dumps(described))
  (run / "code").mkdir(exist_ok=True)
  (run / "code" / "evil.py").write_text(EVIL)


def commands_of(folder: Path, to: Path) -> list[list[str]]:
  """Return every command that reads a run, with outputs into a folder."""
  images, text = str(folder / "images"), str(folder / "text")
  return [
    ["report", images],
    ["status", "--runs", str(folder)],
    ["evaluate", images],
    ["predict", images, "--to", str(to / "predictions.csv")],
    ["generate", text, "--tokens", "3"],
    ["export", images, "--to", str(to / "a.safetensors")],
    ["export", images, "--to", str(to / "b" / "model.safetensors"), "--naming", "timm"],
    ["export", text, "--to", str(to / "c" / "model.safetensors"), "--naming", "huggingface"],
    ["describe", "--config", images],
    ["lr-find", "--config", images, "--steps", "10", "--out", str(to / "rates.png")],
    ["train", "--config", images, "--workdir", str(to / "again")],
    ["submit", "--config", images, "--runs", str(to), "--dry-run"],
  ]


def tree(folder: Path) -> dict[str, tuple]:
  """Return owner, mode and contents of all that is in a folder."""
  found = {}
  for path in sorted(folder.rglob("*")):
    info = path.lstat()
    content = path.read_bytes() if path.is_file() and not path.is_symlink() else None
    found[str(path.relative_to(folder))] = (info.st_uid, info.st_mode, content)
  return found


def run_commands(users, words, **options):
  """Run commands as the victim; return (exit code, output) of each."""
  options |= {"EXECUTED": str(users.victim / "executed"), "JAX_PLATFORMS": "cpu"}
  command = (sys.executable, "-P", "-c", COMMANDS, json.dumps(words))
  done = users.run(VICTIM, *command, timeout=400, **options)
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout.splitlines()[-1])


def settings_of(users, run, *options, **variables) -> str:
  """Return what the victim sees of a run's settings."""
  variables = {"EXECUTED": str(users.victim / "executed")} | variables
  done = users.run(VICTIM, sys.executable, "-P", "-c", SETTINGS, run, *options, **variables)
  assert done.returncode == 0, done.stderr
  return done.stdout


@pytest.mark.slow
def test_a_run_of_another_user_is_read_and_executes_nothing(users, trained):
  """Each command that needs the run's own code is refused by one line; built-in classes work."""
  plain = users.give(Path(shutil.copytree(trained, users.attacker / "plain")), ATTACKER)
  evil = Path(shutil.copytree(trained, users.attacker / "evil"))
  for name in ("images", "text"):
    own_class(evil / name)
  users.give(evil, ATTACKER)
  before, to = tree(users.attacker), users.make("victim/out", VICTIM)

  words = commands_of(plain, to) + commands_of(evil, to)
  done = run_commands(users, words)
  assert tree(users.attacker) == before
  assert not (users.victim / "executed").exists()
  good, bad = done[: len(words) // 2], done[len(words) // 2 :]
  assert [code for code, _ in good] == [0] * len(good), good
  for command, (code, out) in zip(words[len(good) :], bad, strict=True):
    if command[0] in ("report", "status") or command[-1].endswith("a.safetensors"):
      assert code == 0, out
      continue
    (line,) = out.splitlines()
    run = evil / ("text" if command[0] == "generate" or "huggingface" in command else "images")
    who = f"{run}/config.json belongs to another user (uid {ATTACKER})"
    assert code == 2 and f"code that is not executed, since {who}" in line, line
    assert line.startswith(f"error: {run}: ") and "add --trust" in line, line
  words = [["evaluate", str(evil / "images"), "--trust"]]
  ((code, out),) = run_commands(users, words)
  assert code == 0 and "done: " in out, out
  assert (users.victim / "executed").stat().st_uid == VICTIM


def test_a_run_of_another_user_needs_trust(users, run):
  users.give(users.victim, VICTIM)
  assert "evil" not in settings_of(users, run) and (users.victim / "executed").exists()
  (users.victim / "executed").unlink()
  users.give(run, ATTACKER)
  out = settings_of(users, run)
  assert f"since {run}/config.json belongs to another user (uid {ATTACKER}); add --trust" in out
  assert not (users.victim / "executed").exists()
  assert "hidden=(8,)" in settings_of(users, run, "--trust")
  assert (users.victim / "executed").exists()


def folders_of_a_run(users, name):
  """Return the folder for a run of the victim, and whether others could have written the run."""
  if name == "own":
    return users.make("victim/runs", VICTIM), False
  if name == "sticky":
    users.make("scratch", 0, 0o1777)
    return users.make("scratch/victim", VICTIM), False
  mode = {"project": 0o2775, "open": 0o777}[name]
  return users.make("shared", 0, mode, PROJECT), True


@pytest.mark.parametrize("layout", ["own", "sticky", "project", "open"])
def test_an_own_run_in_a_folder_of_others_counts_as_theirs(users, run, layout):
  """There anybody with write access could have put another one in its place."""
  folder, is_refused = folders_of_a_run(users, layout)
  out = settings_of(users, run.rename(folder / "run"))
  assert (f"other users can write to {folder}; add --trust" in out) is is_refused, out
  assert (users.victim / "executed").exists() is not is_refused


@pytest.mark.parametrize("module", ["evil_on_path", "antigravity"])
def test_no_module_of_the_path_is_imported_for_a_run_of_another_user(users, run, module):
  """Without code/, a class is imported by the name of its module, any that Python finds."""
  path = users.make("victim/path", VICTIM)
  variables = {"PYTHONPATH": f"{path}:{os.environ.get('PYTHONPATH', '')}"}
  (path / "evil_on_path.py").write_text(EVIL)
  shutil.rmtree(run / "code")
  for field, kind in (("model", "MLP"), ("adapter", "LoRA")):
    described = read_json(run / "config.json")
    described["config"]["model"] = {"class": "MLP"}
    hidden = {"class": f"{module}:MLP"}
    described["config"][field] = {
      "class": kind,
      "targets" if field == "adapter" else "hidden": hidden,
    }
    (run / "config.json").write_text(json.dumps(described))
    users.give(run, ATTACKER)
    out = settings_of(users, run, **variables)
    assert field == "adapter" or f"{module}:MLP, code that is not executed" in out, out
  assert not (users.victim / "executed").exists()
  users.give(run, VICTIM)
  assert "code that is not" not in settings_of(users, run, **variables)
  assert (users.victim / "executed").exists() is (module == "evil_on_path")


def test_code_that_a_stranger_puts_into_an_open_workdir_is_not_run(users, run):
  """He makes code/ with a mode that looks closed, and replaces config.json."""
  run.chmod(0o777)
  users.give(run / "code", ATTACKER).chmod(0o755)
  os.chown(run / "config.json", ATTACKER, ATTACKER)
  assert "add --trust" in settings_of(users, run)
  os.chown(run / "config.json", VICTIM, VICTIM)
  assert "add --trust" in settings_of(users, run)
  run.chmod(0o755)
  assert f"{run}/code belongs to another user" in settings_of(users, run)
  assert not (users.victim / "executed").exists()


@pytest.mark.parametrize("name", ["code/__pycache__", "code/helper"])
def test_everything_beside_a_copy_counts(users, run, name):
  """Python runs a file of __pycache__ in place of the source, and a copy can import others."""
  users.make(f"victim/run/{name}", ATTACKER)
  assert f"{run}/{name} belongs to another user" in settings_of(users, run)
  assert not (users.victim / "executed").exists()


def test_a_run_of_another_user_chooses_no_place_for_files(users, run):
  """Its text would be tokenized into any folder of the victim."""
  described = read_json(run / "config.json")
  described["config"]["model"]["class"] = "MLP"
  data = {"class": "TextFiles", "path": "texts", "cache_dir": "/any"}
  described["config"]["data"] = data
  (run / "config.json").write_text(json.dumps(described))
  users.give(run, VICTIM)
  assert "cache_dir='/any'" in settings_of(users, run)
  users.give(run, ATTACKER)
  assert "/any'" not in settings_of(users, run)
  assert "cache_dir='/any'" in settings_of(users, run, "--trust")


def test_a_run_of_another_user_chooses_no_server(users, run):
  """MLflow would send it the metrics, the environment and the victim's MLFLOW_TRACKING_TOKEN."""
  described = read_json(run / "config.json")
  described["config"]["model"]["class"] = "MLP"
  described["config"]["log"] = {
    "class": "Log",
    "trackers": [{"class": "MLflow", "uri": "http://attacker"}],
  }
  (run / "config.json").write_text(json.dumps(described))
  code = "import sys; from jaxscale.config.loading import load_config; "
  code += "print(load_config(sys.argv[1], trust=sys.argv[2:] == ['--trust']).log)"

  def log(*options):
    return users.run(VICTIM, sys.executable, "-P", "-c", code, run, *options)

  users.give(run, VICTIM)
  assert "uri='http://attacker'" in log().stdout
  users.give(run, ATTACKER)
  done = log()
  assert "uri=None" in done.stdout
  assert f"MLflow.uri=http://attacker is not used, since {run}/config.json belongs" in done.stderr
  assert "uri='http://attacker'" in log("--trust").stdout


def test_options_of_the_compiler_need_trust(users, run):
  """XLA starts programs of a folder that an option names, and writes files where another says."""
  described = read_json(run / "config.json")
  described["config"]["model"]["class"] = "MLP"
  described["config"]["compiler_options"] = {"xla_gpu_cuda_data_dir": "/any"}
  (run / "config.json").write_text(json.dumps(described))
  code = "import sys; from jaxscale.config.loading import load_config; "
  code += "load_config(sys.argv[1], trust=sys.argv[2:] == ['--trust'])"

  def error(*options):
    return users.run(VICTIM, sys.executable, "-P", "-c", code, run, *options).stderr

  users.give(run, VICTIM)
  assert error() == ""
  users.give(run, ATTACKER)
  assert f"config.json has compiler_options, code that is not executed, since {run}" in error()
  assert error("--trust") == ""


def test_a_plan_of_another_user_needs_trust(users):
  """It has the paths of a config and a site, which are executed."""
  config = users.attacker / "evil.py"
  config.write_text(EVIL + "def get_config(): return jaxscale.load_config('digits')")
  plan = users.attacker / "plan.json"
  asked = {"config": str(config), "overrides": {}, "nodes": 1, "site": str(config)}
  plan.write_text(json.dumps({"submit": asked}))
  users.give(users.attacker, ATTACKER)
  variables = {"EXECUTED": str(users.victim / "executed")}
  words = "submit", "--plan", plan, "--runs", users.victim / "runs", "--dry-run"
  done = users.jaxscale(*words, **variables)
  assert done.returncode == 2 and not (users.victim / "executed").exists()
  assert f"{plan} belongs to another user (uid {ATTACKER}); add --trust" in done.stderr


def test_a_link_to_a_plan_is_resolved_once(tmp_path, monkeypatch):
  """Between reading and check, its owner could lead it from his plan to one of the victim's."""
  for name in ("good", "evil"):
    plan = {"submit": {"config": f"{name}.py", "overrides": {}, "nodes": 1}}
    (tmp_path / name).write_text(json.dumps(plan))
  link, read = tmp_path / "plan.json", files.require_json
  link.symlink_to("evil")

  def read_then_exchange(*args):
    content = read(*args)
    link.unlink()
    link.symlink_to("good")
    return content

  monkeypatch.setattr(files, "require_json", read_then_exchange)
  checked = []
  monkeypatch.setattr(owners, "unsafe_owner", lambda path: checked.append(path.name) or "it is his")
  with config_error("add --trust"):
    submit._take_plan(SimpleNamespace(config=None, plan=str(link), trust=False))
  assert checked == ["evil"]


# Waits between the check of the folder and the loading of a program.
VICTIM_COMPILES = """
import sys
from pathlib import Path
import jax
from jaxscale.config import Compilation
from jaxscale.metrics.log import shown
from jaxscale.run import programs
if sys.argv[2] == "gpu":
  programs._opened = lambda folder: programs.own_folder(folder, by_descriptor=False)
with shown(), programs.kept_programs(Compilation(), Path(sys.argv[1]), 1) as kept, kept.turn():
  print("ready", flush=True)
  sys.stdin.readline()
  print("result", float(jax.jit(lambda x: x * FACTOR)(3.0)), flush=True)
"""
RENAMES = """
import os, sys
os.rename(sys.argv[1], sys.argv[1] + ".old")
os.rename(sys.argv[2], sys.argv[1])
"""


def compiled(users, workdir, factor, *, device="cpu", before=lambda: None):
  """Compile and run a program as the victim, with a function between check and loading."""
  code = VICTIM_COMPILES.replace("FACTOR", str(factor))
  options = dict(stdin=subprocess.PIPE, groups=(PROJECT,), JAX_PLATFORMS="cpu")
  with users.popen(VICTIM, sys.executable, "-P", "-c", code, workdir, device, **options) as process:
    lines = iter(process.stdout.readline, "ready\n")
    said = "".join(line for line in lines if line)
    before()
    out, err = process.communicate("\n", timeout=120)
  assert process.returncode == 0, err
  return float(out.split("result ")[1]), said


def attackers_programs(users, folder):
  """Put another program into a folder under the name of the victim's, with its checksum."""
  from jaxscale.run import programs

  made = [users.make(f"victim/{factor}", VICTIM) for factor in (2, 7)]
  for workdir, factor in zip(made, (2, 7), strict=True):
    assert compiled(users, workdir, factor)[0] == 3 * factor
  good, bad = ({p.name for p in (m / "compiled").glob("*-cache")} for m in made)
  (name,), (other,) = good - bad, bad - good
  shutil.copytree(made[0] / "compiled", folder)
  shutil.copy(made[1] / "compiled" / other, folder / name)
  for path in folder.glob("*-cache"):
    programs._sum_of(path).write_text(programs._digest(path) + "\n")


def test_a_folder_renamed_after_its_check_brings_no_program(users):
  """The attacker's program was run in the victim's process, 4 of 4 times."""
  attackers_programs(users, users.folder / "compiled")
  cache = users.victim / ".cache" / "jaxscale" / "compiled"
  for number, (mode, groups, device) in enumerate(
    [(0o2775, (PROJECT,), "cpu"), (0o777, (), "cpu"), (0o2775, (PROJECT,), "gpu")]
  ):
    parent = users.make(f"shared{number}", 0, mode, PROJECT)
    mine = users.make(f"{parent.name}/mine", VICTIM)
    theirs = users.make(f"{parent.name}/theirs", ATTACKER)
    shutil.copytree(users.folder / "compiled", theirs / "compiled")
    users.give(theirs, ATTACKER)

    def rename(mine=mine, theirs=theirs, groups=groups):
      done = users.run(ATTACKER, sys.executable, "-c", RENAMES, mine, theirs, groups=groups)
      assert done.returncode == 0, done.stderr

    result, said = compiled(users, mine, 2, device=device, before=rename)
    assert result == 6.0
    moved = f"other users can write to {parent}: saving compiled programs in {cache}"
    assert (moved in said) is (device == "gpu"), said
    assert cache.exists() is (device == "gpu")


def test_compiled_programs_of_another_user_are_not_loaded(users):
  run = users.make("shared", 0, 0o2775, PROJECT) / "run"
  users.make("shared/run", ATTACKER, 0o2775, PROJECT)
  users.make("shared/run/compiled", ATTACKER, 0o755)
  result, said = compiled(users, run, 2)
  assert result == 6.0
  assert f"{run}/compiled belongs to another user (uid {ATTACKER}): saving compiled" in said
