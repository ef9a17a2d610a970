"""Configs, notebook, launch script and README do what they say."""

import json
import re
import subprocess
import sys

import jax
import pytest

from jaxscale import data
from jaxscale.config.loading import load_config
from jaxscale.experiment import build
from support.cases import all_slow_except
from support.commands import child_env
from support.paths import ROOT

CONFIGS = [
  "configs/digits.py",
  "configs/fashion_mnist.py",
  "configs/fashion_mnist.py:lars",
  "configs/fashion_mnist_large_batch.py",
  "configs/fashion_mnist_large_batch.py:lamb-16384",
  "configs/resnet50_imagenet.py",
  "configs/resnet50_imagenet.py:256",
  "configs/resnet50_lars.py",
  "configs/resnet50_lars.py:2048",
  "configs/resnet50_lars.py:8192",
  "configs/resnet50_lars.py:32768",
  "configs/resnet50_lars.py:65536",
  "configs/resnet50_lars.py:google-32768",
  "configs/resnet50_lamb_32k.py",
  "configs/resnet50_nesterov_32k.py",
  "configs/alexnet_bn_32k.py",
  "configs/resnet101_imagenet22k.py",
  "configs/llama_1b.py",
  "configs/llama_7b.py:h100",
  "configs/fashion_mnist_exchange.py:one_bit",
  "configs/fashion_mnist_exchange.py:block_momentum",
  "configs/text.py",
  "configs/vit_fashion_mnist.py",
]
SHAPES = {"fashion_mnist": ((28, 28, 1), 10, 60_000), "imagenet2012": (None, 1000, 1_281_167)}


def fake(name, split, **options):
  """A dataset of the right sizes, without the data."""
  del split
  shape, classes, size = SHAPES[name]
  shape = shape or (options["image_size"], options["image_size"], 3)
  info = data.DatasetInfo(name, shape, classes, (127.5,), (127.5,))
  return data.Dataset(info, size, lambda indices, draws: {})


def fake_folder(directory, **options):
  """ImageNet-22k of IBM's run, likewise."""
  info = data.DatasetInfo(directory, (224, 224, 3), 21_841, (127.5,), (127.5,))
  return data.Dataset(info, 7_500_000, lambda indices, draws: {})


def fake_text(directory, split, *, vocab_size, sequence_length, **options):
  """Files of tokens, likewise."""
  info = data.TextInfo(directory, vocab_size, sequence_length)
  return data.Dataset(info, 1_000_000, lambda indices, draws: {})


# One of most kinds of model, optimizer and exchange; the others are slow.
QUICK = [
  "configs/digits.py",
  "configs/fashion_mnist_large_batch.py",
  "configs/text.py",
  "configs/vit_fashion_mnist.py",
  "configs/llama_1b.py",
  "configs/fashion_mnist_exchange.py:one_bit",
]


@pytest.mark.parametrize("path", all_slow_except(CONFIGS, *QUICK))
def test_every_config_traces_and_lowers_for_eight_devices(path, monkeypatch):
  monkeypatch.setattr(data, "tfds_images", fake)
  monkeypatch.setattr(data, "image_folder", fake_folder)
  monkeypatch.setattr(data, "text_files", fake_text)
  monkeypatch.setattr(data, "folder_classes", lambda directory: ())
  config = load_config(path)
  # JAX's own attention in half precision is lowered by rules that strict ones refuse.
  with jax.numpy_dtype_promotion("standard"):
    lowered = build.experiment(config).lower_train_step()
  assert "all_reduce" in lowered.as_text()


def test_every_config_is_tested():
  files = {f"configs/{p.name}" for p in (ROOT / "configs").glob("*.py")}
  assert files == {c.split(":")[0] for c in CONFIGS}


@pytest.mark.parametrize("path", sorted(p.name for p in (ROOT / "configs").glob("*.py")))
def test_a_config_says_command_hardware_and_result(path):
  header = (ROOT / "configs" / path).read_text().split('"""')[1]
  for word in ("Command", "Hardware", "Result"):
    assert re.search(rf"^{word}\b", header, flags=re.M), f"{path}: no {word}"


def test_the_recipe_of_goyal_et_al_is_theirs(monkeypatch):
  monkeypatch.setattr(data, "tfds_images", fake)
  experiment = build.experiment(load_config("configs/resnet50_imagenet.py"))
  derived = experiment.derived
  # Intel Caffe's files of the same recipe: 3.2, 780 warm-up steps, 14,075 in all.
  assert derived.peak_lr == pytest.approx(3.2)
  assert derived.warmup_steps == pytest.approx(780, abs=3)
  assert derived.total_steps == pytest.approx(14_075, abs=3)


NOTEBOOKS = sorted(p.stem for p in (ROOT / "colabs").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_on_one_device(name, tmp_path):
  """Run it as on Colab or a workstation with one GPU."""
  env = {"JAX_NUM_CPU_DEVICES": "1", "MPLBACKEND": "agg"}
  command = [sys.executable, ROOT / "colabs" / f"{name}.py"]
  done = subprocess.run(command, env=child_env(**env), cwd=tmp_path, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr[-3000:]


def test_the_launch_script_starts_the_same_command(tmp_path):
  """Slurm's and Python's names stand in and write down how they are called."""
  script = ROOT / "launch" / "train.sbatch"
  assert subprocess.run(["bash", "-n", script]).returncode == 0
  (tmp_path / "bin").mkdir()
  (tmp_path / "bin" / "activate").write_text(f'export PATH="{tmp_path}/bin:$PATH"\n')
  srun = tmp_path / "bin" / "srun"
  srun.write_text('#!/bin/sh\necho "$@"\n')
  srun.chmod(0o755)
  done = subprocess.run(
    ["bash", script, "--config", "configs/x.py", "--config.a=b c"],
    env=child_env(JAXSCALE_VENV=str(tmp_path)),
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  wanted = "python -P -m jaxscale.train --config configs/x.py --config.a=b c"
  assert done.stdout.strip() == f"--kill-on-bad-exit=1 {wanted}"


def run_python_of(page, tmp_path, monkeypatch, capsys):
  """The accuracy that the page's first block of Python prints last."""
  code = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)[0]
  assert len(code.strip().splitlines()) <= 25
  monkeypatch.chdir(tmp_path)
  exec(compile(code, page, "exec"), {})
  return float(capsys.readouterr().out.splitlines()[-1].split()[-1])


@pytest.mark.slow
def test_the_readme_example_runs(tmp_path, monkeypatch, capsys):
  assert run_python_of("README.md", tmp_path, monkeypatch, capsys) >= 0.93


def test_the_example_of_public_functions_runs(tmp_path, monkeypatch, capsys):
  page = "docs/start/notebook.md"
  assert run_python_of(page, tmp_path, monkeypatch, capsys) >= 0.95


def test_every_notebook_is_on_the_site_and_kept_without_outputs():
  page = (ROOT / "docs" / "start" / "notebook.md").read_text()
  listed = re.findall(r"^\.\./\.\./colabs/(\w+)$", page, re.M)
  assert sorted(listed) == NOTEBOOKS
  for name in NOTEBOOKS:
    cells = json.loads((ROOT / "colabs" / f"{name}.ipynb").read_text())["cells"]
    assert not any(cell.get("outputs") for cell in cells)


def test_links_and_targets_of_the_readme_exist():
  text = (ROOT / "README.md").read_text()
  for link in re.findall(r"\]\((?!http)([^)#]+)", text):
    assert (ROOT / link).exists(), link
  targets = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.M))
  named = re.findall(r"`make ([a-z_-]+)", text) + re.findall(r"^make (\w+)", text, re.M)
  assert {"train", "test", "docs"} <= {*named} <= targets


@pytest.mark.slow
def test_make_trains_job_reaches_its_target(tmp_path):
  from support.commands import run_train

  done = run_train(tmp_path / "digits")
  assert done.returncode == 0, done.stderr
  summary = json.loads((tmp_path / "digits" / "summary.json").read_text())
  assert summary["accuracy"] >= 0.97 and summary["seconds"] < 120
