"""Mistakes of users that were answered wrongly: each is one line, and its remedy."""

import json
import os
import re
import shlex
import shutil
import unittest.mock
from pathlib import Path

import flax.linen as nn
import numpy as np
import pytest
from PIL import Image

from jaxscale import cli, data, metrics
from jaxscale import config as cfg
from jaxscale.config.loading import load_config
from jaxscale.errors import ConfigError
from jaxscale.experiment import build
from jaxscale.jobs.preflight import devices
from jaxscale.run.fit import fit
from support.commands import jaxscale
from support.configs import small_config
from support.errors import config_error
from support.paths import ROOT
from support.tables import table


def answer(capsys, *argv):
  """(exit code, stdout, the line on stderr) of a command."""
  code = cli.main([*map(str, argv)])
  out, err = capsys.readouterr()
  assert err.count("\n") <= 1
  return code, out, err.removesuffix("\n")


REFUSED = table(r"""
doctor --workdir= | --workdir=: give a directory$
generate --step=last x | --step=last: give a step, or best$
status --runs= | --runs=: give a directory$
submit --config=digits --runs= | --runs=: give a directory$
export . --to=x.npz | --to=x.npz: give a .safetensors file or a folder$
export . --to=folder | .: no such run, give one of digits, digs$
lr-find --config=digits --out=x.foo | --out=x.foo: give a file .png, .pdf, .svg or .jpg in
logs '' | \(an empty name\): no such run,
cancel '' | \(an empty name\): no such run,
resume '' | \(an empty name\): no such run,
report '' | \(an empty name\): no such run,
scaling --config=digits --nodes=1,2 --name=digits | .*runs/digits exists; use a different name$
sweep --at-most=0 --config=digits --sweep=seed=1,2 | --at-most=0: give a whole number >= 1
submit --nodes=99999999 --config=digits | --nodes=99999999: give a whole number in \[1, 65536\]
submit --tasks-per-node=99999 --config=digits | --tasks-per-node=99999: give a value in \[
status --every=99999999999 | --every=99999999999: give a whole number <=
train --config.input_threads=100000 | Config.input_threads=100000: give a v
train --config.faults.hang_timeout_s=1e300 | Faults.hang_timeout_s=1e\+300:
train --config.checkpoint.max_wait_s=1e300 | Checkpoint.max_wait_s=1e\+300:
train --config.data=ImageFolder | ImageFolder.path is not set: expected str$
report digts | digts: no such run, did you mean 'digits'\?$
report digits | digits: has not logged a step yet, so there is nothing to report$
report runs/digits | digits: has not logged a step yet, so there is nothing to report$
""")


@pytest.mark.parametrize("argv, says", REFUSED)
def test_a_command_that_cannot_be_is_one_line(argv, says, runs, capsys):
  """100,000 threads were started for 34 s, and `--at-most 0` was run as 1."""
  config = ["--config=digits", "--config.epochs=3"] if argv.startswith("train") else []
  code, out, line = answer(capsys, *shlex.split(argv), *config)
  assert (code, out) == (2, "") and re.match(f"error: {says}", line), line
  assert not Path("scaling.csv").exists()


@pytest.mark.parametrize("name", ["cifar-10", "mnist/other/thing", "a b"])
def test_a_name_that_tfds_cannot_read_is_one_line(name):
  with config_error("no such dataset, ", "did you mean 'cifar10'?" if name == "cifar-10" else ""):
    data.tfds_images(name, "train")


def test_a_dataset_that_is_not_prepared_is_one_line(tmp_path, caplog):
  """TFDS warned before it, of a folder without a dataset."""
  (tmp_path / "fashion_mnist" / "3.0.1").mkdir(parents=True)
  with pytest.raises(ConfigError, match=r"not prepared in .*3\.0\.1; once, in"):
    data.tfds_images("fashion_mnist", "train", data_dir=str(tmp_path))
  assert not caplog.records


def test_the_help_shows_the_fields_that_must_be_given(capsys):
  argv = ["train", "--config=digits", "--config.data=ImageFolder", "--help"]
  code, page, _ = answer(capsys, *argv)
  assert code == 0
  assert "--config.data.path  (str; required)\n      " in page
  assert "--config.data.image_size  (int >= 1; default: 224)" in page
  assert "--config.optimizer.lr = 0.1" in page  # the file's own stay


FILES = {"lr-find": ["--config=digits", "--out"], "predict": ["x", "--to"]}


@pytest.mark.parametrize("name", ["", ".", "pyproject.toml/x.png", "x.png/"])
@pytest.mark.parametrize("command", FILES)
def test_a_file_that_cannot_be_is_refused_before_the_work(command, name, capsys):
  """`--out .` wrote a file called .png."""
  *argv, option = FILES[command]
  code, out, line = answer(capsys, command, *argv, f"{option}={name}")
  assert (code, out) == (2, "") and line.startswith(f"error: {option}={name}: give a ")
  assert line.endswith("in a directory")


@pytest.fixture
def runs(tmp_path, monkeypatch):
  """Write a workdir `digits` of `train` and a study `digs` in runs/."""
  monkeypatch.chdir(tmp_path)
  Path("runs/digits").mkdir(parents=True)
  Path("runs/digits/config.json").write_text(json.dumps(RECORD))
  Path("runs/digs").mkdir()
  Path("runs/digs/scaling.json").write_text('{"runs": ["digits"]}')


DERIVED = dict(num_train=9, num_devices=8, total_steps=9)
DERIVED |= dict(phases=[dict(batch_size=8, image_size=None)])
RECORD = dict(derived=DERIVED, processes=1, versions={}, python="3.11")
RECORD |= dict(config={"phases": {"class": "Phases"}, "log": {"step_report": False}})


@pytest.fixture
def trained(runs):
  """Write the checkpoints of the workdir, and a user's files in the current folder."""
  line = {"train/loss": 1.0, "perf/examples_per_s": 9.0}
  lines = [json.dumps(line | {"step": s, "time": float(s)}) + "\n" for s in range(1, 9)]
  Path("runs/digits/metrics.jsonl").write_text("".join(lines))
  shutil.copytree("runs/digits", "runs/two")
  for name in ("scaling.csv", "scaling.png", "plan.json", "plan.png"):
    Path(name).write_text("mine")


def files_of(folder="."):
  found = Path(folder).rglob("*")
  return {str(p): p.read_bytes() for p in found if p.is_file() and "runs/" not in str(p)}


def test_a_report_writes_only_where_it_is_asked_to(trained, capsys):
  """It replaced the user's own scaling.csv in the current folder."""
  before = files_of()
  for argv, words in ((["digits"], "digits: at step 8"), (["digits", "runs/two"], "one size")):
    code, out, line = answer(capsys, "report", *argv)
    assert code == 0 and words in out and files_of() == before, line
  code, out, _ = answer(capsys, "report", "digits", "--to", "new/folder")
  assert code == 0 and out.splitlines()[-2:] == ["new/folder/scaling.csv", "new/folder/scaling.png"]
  assert {*files_of()} - {*before} == {"new/folder/scaling.csv", "new/folder/scaling.png"}


BENCH = "bench --mesh=1 --sizes=1KB --rounds=1"


@pytest.mark.parametrize("argv", ["describe --config=digits", BENCH])
@pytest.mark.slow
def test_no_command_writes_into_the_current_folder(argv, trained):
  before = files_of()
  done = jaxscale(*argv.split(), cwd=None, PYTHONPATH=str(ROOT))
  assert done.returncode == 0, done.stderr
  assert "Traceback" not in done.stderr and files_of() == before


@pytest.mark.parametrize("argv", ["describe --config=digits", "status", "report x"])
def test_a_current_folder_that_was_deleted_is_one_line(argv, tmp_path, monkeypatch, capsys):
  (tmp_path / "gone").mkdir()
  monkeypatch.chdir(tmp_path / "gone")
  (tmp_path / "gone").rmdir()
  code, _, line = answer(capsys, *argv.split())
  assert code == 2 and "the current folder was deleted; cd to one that exists" in line


def test_missing_folders_of_a_file_are_made(trained, capsys):
  code, out, _ = answer(capsys, "report", "digits", "runs/two", "--to", "a/b")
  assert code == 0 and Path(out.splitlines()[-1]).stat().st_size > 999


def test_a_study_among_runs_is_its_runs(runs, capsys):
  """It is not answered by its own name: "did you mean 'digs'?"."""
  Path("runs/digits/run.json").write_text("{}")
  code, _, line = answer(capsys, "report", "digs", "runs/digits")
  assert code == 2 and "did you mean" not in line and "digits" in line


@pytest.fixture
def images(tmp_path):
  """Classes a to c to train on, of which c is empty and b is missing in val."""
  for name, count in (("train/a", 16), ("train/b", 16), ("train/c", 0), ("val/a", 16)):
    (tmp_path / name).mkdir(parents=True)
    for i in range(count):
      Image.new("RGB", (8, 8), (i, i, i)).save(tmp_path / name / f"{i}.png")
  return tmp_path


def test_classes_without_images_are_notes_before_the_first_step(images):
  folder = cfg.ImageFolder(path=str(images), image_size=8)
  notes = build.experiment(small_config(data=folder, batch_size=8)).notes
  assert notes[0] == f"{images}/train: no image of class c; left out"
  assert notes[1] == f"{images}/val: no image of class b; never evaluated"


def test_a_relative_path_of_images_is_not_blamed(images, monkeypatch):
  """Every mistake below it was "no such directory": im/im was looked for."""
  monkeypatch.chdir(images.parent)
  os.makedirs(f"{images.name}/empty")
  folder = {"path": images.name, "image_size": 8}
  with pytest.raises(ConfigError, match="empty") as e:
    cfg.ImageFolder(**folder, eval_split="empty").build()
  assert "no such directory" not in str(e.value)
  with pytest.raises(ConfigError, match=r"eval_split=test: no such directory in "):
    cfg.ImageFolder(**folder, eval_split="test").build()


def test_the_doctor_reads_an_image(images):
  """It called a folder of them ready in which none can be read."""
  for path in images.glob("*/*/*.png"):
    path.write_bytes(b"no image")
  overrides = {"data": "ImageFolder", "data.path": str(images), "data.image_size": "8"}
  overrides |= {"model": "MLP", "batch_size": "8"}
  found = devices.look("configs/digits.py", overrides)
  assert "cannot be read, the first is a/0.png (8 bytes that" in found["data_error"]
  assert "0x" not in found["data_error"]


def test_an_array_in_place_of_data_is_one_short_line(tmp_path, capsys):
  path = tmp_path / "mine.py"
  path.write_text(
    "import numpy as np\nfrom support.configs import small_config\n\n"
    "def get_config(): return small_config(data=np.zeros((1000, 8)))"
  )
  code, _, line = answer(capsys, "train", "--config", path)
  assert code == 2 and "mine.py:4: Config.data=array(" in line and len(line) < 400


def test_arrays_without_names_are_one_short_line():
  with config_error("fields are given by name, as in Arrays(x=array(") as e:
    cfg.Arrays(np.zeros((1000, 8)))
  assert len(str(e.value)) < 300


def test_a_class_without_fields_takes_no_value():
  class Bare(cfg.Model):
    """One without fields."""

  with pytest.raises(ConfigError, match=r"Bare\(5\): it has no fields"):
    Bare(5)


class Linear(nn.Module):
  """A module of one's own."""

  @nn.compact
  def __call__(self, x):
    return nn.Dense(10, name="own")(x.reshape(len(x), -1))


class Own(cfg.MLP):
  """An MLP with a build of its own."""

  def build(self, context):
    return Linear()


def test_a_build_of_ones_own_is_what_is_trained():
  state = build.experiment(small_config(model=Own())).abstract_state()
  assert list(state.params) == ["own"]


BUILDS = table("""
Model | self | model | def build(self, context: ModelContext)
Model | self, a, b | model | def build(self, context: ModelContext)
Data | self, context | data | def build(self)
Loss | self | loss | def build(self, info)
Optimizer | self, schedule | optimizer | def build(self, schedule, context: OptimizerContext)
Schedule | self | schedule | def build(self, peak, context: ScheduleContext)
""")


@pytest.mark.parametrize("base, arguments, field, remedy", BUILDS)
def test_a_build_with_other_arguments_names_file_and_line(base, arguments, field, remedy, tmp_path):
  """It was "takes 1 positional argument but 2 were given", of no file and no line."""
  lr = "lr=0.1" if base == "Optimizer" else ""
  (tmp_path / "mine.py").write_text(
    "import dataclasses\nfrom jaxscale import config\n"
    "from jaxscale.config.loading import load_config\n"
    f"class Mine(config.{base}):\n"
    f"  def build({arguments}):\n    return 1\ndef get_config():\n"
    f"  base = load_config('digits')\n"
    f"  return dataclasses.replace(base, {field}=Mine({lr}))\n"
  )
  config = load_config(str(tmp_path / "mine.py"))
  with config_error(match=rf"^{tmp_path}/mine.py:5: Mine.build: .*; write {re.escape(remedy)}$"):
    build.experiment(config)


def test_fit_takes_a_config_or_its_file(tmp_path):
  for config, says in (
    ("no.py", "--config=no.py: no such file"),
    ({"epochs": 3}, "config={'epochs': 3} has the type dict"),
    (None, "config=None has the type NoneType; use a Config, or the path of a config file"),
  ):
    with config_error(match=f"^{says}"):
      fit(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_fit_takes_a_file_and_a_tilde(tmp_path, monkeypatch):
  monkeypatch.setenv("HOME", str(tmp_path))
  source = (
    Path("configs/digits.py").read_text().replace("Digits, Evaluation", "Digits, Evaluation, Log")
  )
  (tmp_path / "mine.py").write_text(source.replace("epochs=40", "epochs=3, log=Log(plot=False)"))
  monkeypatch.chdir(tmp_path)
  result = fit("~/mine.py", "~/run")
  assert result.summary["outcome"] == "done"
  assert {p.name for p in tmp_path.iterdir()} >= {"run"} and not Path("~").exists()


def test_the_axis_of_the_loss_has_one_kind_of_label(tmp_path, monkeypatch):
  """It mixed "1" and "6e-01"."""
  from matplotlib.figure import Figure

  lines = [{"step": s, "train/loss": 2 / s, "time": s} for s in range(1, 9)]
  (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
  save = unittest.mock.Mock(side_effect=Figure.savefig)
  monkeypatch.setattr(Figure, "savefig", lambda *args, **options: save(*args, **options))
  metrics.plot_metrics(tmp_path)
  axis = save.call_args.args[0].axes[0].yaxis
  labels = [t.get_text() for t in axis.get_ticklabels(which="both") if t.get_text()]
  assert {"0.3", "1", "2"} <= {*labels} and not any("e" in label for label in labels)


def test_images_of_a_split_alone_are_as_before(images):
  dataset = data.image_folder(images / "val", image_size=8)
  assert dataset.notes == () and dataset.info.num_classes == 1
  np.testing.assert_array_equal(dataset.load(np.array([3]), None)["image"][0], 11)
