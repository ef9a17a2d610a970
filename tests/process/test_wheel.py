"""A wheel of the tree, installed where the tree is not."""

import os
import sys
import sysconfig
import venv
import zipfile

import pytest

from support import commands


def run(*command, **options):
  done = commands.run(*command, **options)
  assert done.returncode == 0, done.stderr
  return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
  """Return the wheel, and the `jaxscale` of an environment with it and its dependencies."""
  folder = tmp_path_factory.mktemp("wheel")
  build = "-m", "hatchling", "build", "-t", "wheel", "-d", folder
  run(sys.executable, *build)
  (wheel,) = folder.glob("*.whl")
  venv.create(folder / "venv")
  pip = "-m", "pip", "install", "--no-deps", "--ignore-installed", "-q", "--prefix"
  run(sys.executable, *pip, folder / "venv", wheel, cwd=folder, PYTHONWARNINGS="")
  ours = sysconfig.get_path("purelib")
  packages = folder / "venv" / os.path.relpath(ours, sys.prefix)
  # Of the directory that this adds no .pth is read: not that of the editable install.
  (packages / "dependencies.pth").write_text(ours + "\n")
  script = folder / "venv" / "bin" / "jaxscale"
  script.write_text(f"#!{folder}/venv/bin/python\n" + script.read_text().split("\n", 1)[1])
  return wheel, script


@pytest.mark.slow
def test_a_wheel_trains_a_packaged_config_in_an_empty_folder(installed, tmp_path):
  wheel, script = installed
  names = zipfile.ZipFile(wheel).namelist()
  assert {"jaxscale/py.typed", "jaxscale/configs/digits.py"} <= set(names)
  where = f"{script.parent}/python", "-c", "import jaxscale; print(jaxscale.__file__)"
  assert str(script.parent.parent) in run(*where, cwd=tmp_path)
  assert run(script, "--version", cwd=tmp_path) == "jaxscale 0.3.0\n"
  options = ["--config.epochs=2", "--config.schedule.warmup_epochs=0"]
  out = run(script, "train", "--config", "digits", *options, cwd=tmp_path)
  assert "done: validation accuracy" in out
  assert (tmp_path / "runs" / "digits" / "metrics.jsonl").exists()
  assert [p.name for p in tmp_path.iterdir()] == ["runs"]
