"""Submissions of `jaxscale.jobs`: sites, sweeps, folders, mistakes."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from jaxscale import cli, jobs
from jaxscale import config as cfg
from jaxscale.config.loading import load_config
from jaxscale.errors import ConfigError
from jaxscale.jobs import folder as folders
from jaxscale.jobs import site, slurm_executor, spec, sweeps
from jaxscale.jobs.site import Site, load_site, site_from, with_options
from support.configs import small_config
from support.errors import config_error
from support.job_script import RUN, RUNS
from support.paths import ROOT

DIGITS = "configs/digits.py"


@pytest.mark.parametrize("folder", ['/a"b', "/a\\b", "/a\nb"])
def test_a_path_that_slurm_cannot_take_is_refused(folder):
  with pytest.raises(ConfigError, match="Slurm does not accept a backslash"):
    slurm_executor.render(RUN._replace(folder=folder))


def test_a_run_survives_json():
  for run in RUNS.values():
    assert spec.from_json(json.loads(json.dumps(spec.to_json(run)))) == run


SITES = {
  'partiton = "gpu"': "did you mean 'partition'?",
  "gpus_per_node = -1": "give a value in [0, 1024]",
  'time = "tomorrow"': "give e.g. 24:00:00",
  'signal = "USR1 120"': "give e.g. USR1@120",
  "[env]\nA = 1.5": "Site.env.A=1.5",
  '[env]\n"A B" = "1"': "not a valid name of a variable",
  '[container]\nkind = "docker"\nimage = "x"': "'apptainer' | 'singularity'",
  '[container]\nkind = "pyxis"': "Container.image is not set",
  'modules = "cuda"': "Site.modules='cuda': expected tuple of str",
  "partition = gpu": "site.toml",
}


@pytest.mark.parametrize("text", SITES)
def test_a_mistake_in_a_site_is_one_line(tmp_path, text):
  (tmp_path / "site.toml").write_text(text)
  with config_error(SITES[text]):
    load_site(str(tmp_path / "site.toml"))


def test_sites_have_names(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
  monkeypatch.delenv("JAXSCALE_SITE", raising=False)
  assert load_site(None) == Site()
  site.sites_folder().mkdir(parents=True)
  (site.sites_folder() / "here.toml").write_text('partition = "gpu"')
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
  with pytest.raises(ConfigError, match=r"^--tasks-per-node=0: give a value in "):
    with_options(site, {"tasks_per_node": 0})


def test_a_sweep_is_a_product():
  trials = sweeps.product(["optimizer.lr=0.1,0.2", "--config.seed=1,2", "a=(1,2),'x,y'"])
  assert len(trials) == 8
  assert trials[1] == {"optimizer.lr": "0.1", "seed": "1", "a": "'x,y'"}
  assert trials[-1] == {"optimizer.lr": "0.2", "seed": "2", "a": "'x,y'"}
  for wrong in ("seed", "seed=", "=1", "seed=1,,2"):
    with pytest.raises(ConfigError, match=f"--sweep={wrong}"):
      sweeps.product([wrong])
  with pytest.raises(ConfigError, match="seed has two lists"):
    sweeps.product(["seed=1", "seed=2"])


SWEEP = """
from jaxscale.config.loading import load_config

def get_config():
  return load_config("configs/digits.py")

def get_sweep():
  for rate in (0.1, 2e-05):
    yield {"optimizer.lr": rate, "data.augment": "none"}
"""


def test_a_config_file_yields_its_sweep(tmp_path, monkeypatch):
  path = tmp_path / "mine.py"
  path.write_text(SWEEP)
  assert sweeps.from_file(str(path)) == [
    {"optimizer.lr": "0.1", "data.augment": "none"},
    {"optimizer.lr": "2e-05", "data.augment": "none"},
  ]
  with pytest.raises(ConfigError, match="define get_sweep"):
    sweeps.from_file(DIGITS)
  path.write_text(path.read_text().replace("yield {", "yield 1/0, {"))
  with pytest.raises(ConfigError, match=r"mine.py:9: ZeroDivisionError"):
    sweeps.from_file(str(path))


def test_a_sweep_is_checked_before_it_is_submitted():
  def check(trials):
    sweeps.check(lambda o: load_config(DIGITS, o), {}, trials)

  with pytest.raises(ConfigError, match=r"trial 1: .*has no field 'sed'"):
    check([{"seed": "1"}, {"sed": "2"}])
  with pytest.raises(ConfigError, match="trial 2 repeats trial 0"):
    check([{"seed": "1"}, {"seed": "2"}, {"seed": "1"}])


MISTAKES = """
submitt | did you mean 'submit'?
submit | --config: missing
submit DIGITS | a config is --config FILE
submit --config DIGITS --node=4 | did you mean '--nodes'?
submit --config DIGITS --nodes=0 | --nodes=0: give a whole number >= 1
submit --config DIGITS --nodes | --nodes: a value is missing
submit --config DIGITS --time=long | --time='long': give e.g. 24:00:00
submit --config DIGITS --config.epoch=3 | did you mean 'epochs'?
submit --config configs/digit.py | did you mean 'configs/digits.py'?
submit --config DIGITS --executor=slrum | did you mean 'slurm'?
submit --config DIGITS --executor=local --spares=1 | --spares=1:
submit --config DIGITS --spares=x | --spares=x: give a whole number
submit --config DIGITS --name=a/b | --name=a/b: give letters, digits
submit --config DIGITS --site=x.toml | --site=x.toml: No such file
submit --config DIGITS --sweep=seed=1 | --sweep=seed=1: not an option
sweep --config DIGITS | define get_sweep() in it, or use --sweep
sweep --config DIGITS --sweep=epochs=0 | trial 0:
submit --config DIGITS --nodes=3 | batch size 128: \
not divisible by 3 processes; use 126 or 129, or a different number
sweep --config DIGITS --nodes=2 --sweep=batch_size=64,63 | trial 1: batch size 63: \
not divisible by 2 processes; use 62 or 64
scaling --config DIGITS --nodes=1,3 --batch=fixed | batch size 128: \
not divisible by 3 processes; use 126 or 129
scaling --config DIGITS --nodes=1,2 --config.phases=AdaptiveBatch | digits.py: the \
batch or image size changes during the run
scaling --config DIGITS --nodes=1,1 | give several sizes
logs nothing | nothing: no such run
cancel | RUN: missing; `jaxscale status` lists them
status --every=0 | --every=0: give a whole number >= 1
""".strip()


@pytest.mark.parametrize("line", MISTAKES.splitlines())
def test_a_mistake_is_one_line_and_makes_nothing(line, tmp_path, capsys):
  command, _, says = line.partition(" | ")
  argv = command.replace("DIGITS", DIGITS).split()
  runs = ["--runs", str(tmp_path / "runs")] if argv[0] != "submitt" else []
  assert cli.main([*argv, *runs]) == 2
  out, err = capsys.readouterr()
  assert out == "" and err.startswith("error: ") and err.count("\n") == 1
  assert says in err
  assert not (tmp_path / "runs").exists()


COMMANDS = f"submit --config {DIGITS}", f"scaling --config {DIGITS} --nodes=1,2", "status"


@pytest.mark.parametrize("command", [*COMMANDS, "status a", "logs a", "cancel a", "resume a"])
def test_a_bucket_holds_no_runs(command, capsys):
  assert cli.main([*command.split(), "--runs", "gs://bucket/runs"]) == 2
  line = "error: --runs=gs://bucket/runs: give a directory; mount a bucket as one\n"
  assert capsys.readouterr() == ("", line)


def test_a_dry_run_prints_the_script_and_makes_nothing(tmp_path, capsys):
  runs = tmp_path / "runs"
  argv = ["submit", "--config", DIGITS, "--nodes", "4", "--dry-run", "--preflight"]
  argv += ["--executor=slurm", f"--runs={runs}", "--name=x", "--config.epochs=3"]
  assert cli.main(argv) == 0
  out, _ = capsys.readouterr()
  assert not runs.exists()
  script = out[: out.index("# would create")]
  assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
  assert f"# made by {shlex.join(['jaxscale', *argv])}" in (out.replace("# x, made", "# made"))
  assert "#SBATCH --nodes=4" in out and "--config.epochs=3" in out


def test_the_folder_holds_the_code_and_its_config(tmp_path):
  (tmp_path / "configs_nearby.py").write_text("RATES = (0.1, 0.2)")
  config = tmp_path / "mine.py"
  config.write_text(SWEEP)
  options = dict(name="x", runs=str(tmp_path / "r"))
  prepared = jobs.job_handle.prepare(load_config(DIGITS), executor="local", **options)
  made = prepared.spec, ("process.sh", prepared.script), prepared.config
  folders.make(*made, prepared.source)
  code = Path(prepared.spec.folder, "code")
  shown = dict(cwd=ROOT, capture_output=True, text=True)
  tracked = subprocess.run(["git", "ls-files", "jaxscale"], **shown).stdout.split()
  assert {str(p.relative_to(code)) for p in code.rglob("*") if p.is_file()} >= {*tracked}
  assert load_config(f"{prepared.spec.folder}/{prepared.spec.config}") == load_config(DIGITS)
  program = [sys.executable, "-c", "import jaxscale; print(jaxscale.__file__)"]
  env = {**os.environ, "PYTHONPATH": str(code), "PYTHONSAFEPATH": "1"}
  where = subprocess.run(program, env=env, **shown)
  assert where.stdout.strip() == str(code / "jaxscale" / "__init__.py"), where.stderr
  assert "jax" in json.loads((code.parent / "environment.json").read_text())["packages"]
  with pytest.raises(ConfigError, match="exists; use a different --name"):  # since it was prepared
    folders.make(*made, prepared.source)
  with pytest.raises(ConfigError, match="exists; use a different name"):
    jobs.job_handle.prepare(DIGITS, **options)
  places = {place for _, place in folders.sources(str(config))}
  assert {"code/config/mine.py", "code/config/configs_nearby.py"} <= places


def test_a_run_of_today_never_takes_the_folder_of_another(tmp_path):
  for _ in range(3):
    folders.new_folder(str(tmp_path), None, "configs/x.py:8 k").mkdir()
  names = sorted(p.name for p in tmp_path.iterdir())
  assert len(names) == 3 and all(name.startswith("x-8-k-20") for name in names)


def test_launch_does_not_wait_for_jax():
  code = "import sys, jaxscale.jobs, jaxscale.cli.submit; print('jax' in sys.modules)"
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
  assert done.stdout.strip() == "False", done.stderr


def test_a_python_without_jax_is_not_taken_along(monkeypatch):
  monkeypatch.setattr(jobs.job_handle, "find_spec", lambda name: None)
  with pytest.raises(ConfigError, match="has no jax; submit from"):
    jobs.job_handle.prepare(DIGITS)


def test_a_class_that_a_job_cannot_import_is_named(tmp_path):
  class OfANotebook(cfg.Model):
    def build(self, context):
      return None

  with pytest.raises(ConfigError, match="since OfANotebook is defined in this program only; "):
    jobs.submit(small_config(model=OfANotebook()), runs=tmp_path)


def test_accepted_changes_are_of_the_job_that_resumes():
  run = RUN
  assert not any("accept" in option for option in run.train_options())
  assert "--accept-changes=data,code" in run._replace(accept_changes="data,code").train_options()
