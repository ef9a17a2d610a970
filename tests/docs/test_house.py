"""Configs, notebook, launch script and README do what they say."""

import base64
import copy
import dataclasses
import io
import json
import re
import runpy

import jax
import jupytext
import nbformat
import pytest
from PIL import Image

import jaxscale
from jaxscale import data
from jaxscale.config.loading import load_config
from jaxscale.experiment import build
from jaxscale.experiment.model import make_model
from support import job_script
from support.cases import all_slow_except
from support.commands import run, run_python, run_train
from support.paths import ROOT

# Those that are traced, and their variants: all files are among them.
CONFIGS = """
  digits.py text.py vit_fashion_mnist.py fashion_mnist.py fashion_mnist.py:lars
  large_batch.py large_batch.py:images-sgd-16384 large_batch.py:text-soap-512
  large_batch.py:images-adamw-256-branches large_batch.py:text-adamw-16-noise
  fashion_mnist_exchange.py:one_bit fashion_mnist_exchange.py:block_momentum
  resnet50_imagenet.py resnet50_imagenet.py:256 resnet50_lars.py resnet50_lars.py:2048
  resnet50_lars.py:8192 resnet50_lars.py:32768 resnet50_lars.py:65536
  resnet50_lars.py:google-32768 resnet50_lamb_32k.py resnet50_nesterov_32k.py
  alexnet_bn_32k.py resnet101_imagenet22k.py llama_1b.py llama_7b.py:h100 sam.py gan.py
  clip.py clip.py:siglip simclr.py moco.py distill.py dqn.py sft_chat.py mixture_text.py
  vit_finetune.py vit_finetune.py:head vit_finetune.py:whole field_unet.py
  exchange_top_k.py exchange_power_sgd.py
"""
# One of most kinds of model, optimizer and exchange; the others are slow.
QUICK = """
  digits.py large_batch.py text.py vit_fashion_mnist.py llama_1b.py
  fashion_mnist_exchange.py:one_bit
"""
SHAPES = {"fashion_mnist": ((28, 28, 1), 10, 60_000), "imagenet2012": (None, 1000, 1_281_167)}


def fake(name, split, **options):
  """Return a dataset of the right sizes without data."""
  del split
  shape, classes, size = SHAPES[name]
  shape = shape or (options["image_size"], options["image_size"], 3)
  info = data.DatasetInfo(name, shape, classes, (127.5,), (127.5,))
  return data.Dataset(info, size, lambda indices, draws: {})


def fake_folder(directory, **options):
  """Return the dataset of ImageNet-22k in IBM's run, without data."""
  info = data.DatasetInfo(directory, (224, 224, 3), 21_841, (127.5,), (127.5,))
  return data.Dataset(info, 7_500_000, lambda indices, draws: {})


def fake_text(directory, split, *, vocab_size, sequence_length, **options):
  """Return a dataset of token files without data."""
  info = data.TextInfo(directory, vocab_size or 256, sequence_length)  # None: bytes
  return data.Dataset(info, 1_000_000, lambda indices, draws: {})


@pytest.mark.parametrize("path", all_slow_except(CONFIGS.split(), *QUICK.split()))
def test_every_config_traces_and_lowers_for_eight_devices(path, monkeypatch, tmp_path):
  monkeypatch.setattr(data, "tfds_images", fake)
  monkeypatch.setattr(data, "image_folder", fake_folder)
  monkeypatch.setattr(data, "text_files", fake_text)
  monkeypatch.setattr(data, "folder_classes", lambda directory: ())
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # of configs that write their data
  monkeypatch.setattr(jaxscale, "import_safetensors", lambda path, *state: (*state, ""))
  config = load_config(f"configs/{path}")
  if isinstance(config.data, data.ImageFolder):
    for split in ("train", "val"):
      (tmp_path / split).mkdir()
    folder = dataclasses.replace(config.data, path=str(tmp_path))
    config = dataclasses.replace(config, data=folder)
  # JAX's own attention in half precision is lowered by rules that strict ones refuse.
  with jax.numpy_dtype_promotion("standard"):
    lowered = build.experiment(config).lower_train_step()
  assert "all_reduce" in lowered.as_text()


def test_every_config_is_tested():
  files = {p.name for p in (ROOT / "configs").glob("*.py")}
  assert files == {c.split(":")[0] for c in CONFIGS.split()}


def test_the_rates_of_the_large_batch_config_are_the_best_ones_measured():
  rows = json.loads((ROOT / "benchmarks/results/large_batch.json").read_text())["rows"]
  best = {(f"{r['task']}-{r['kind']}", r["batch_size"]): r["lr"] for r in rows if "trials" in r}
  rates = runpy.run_path(str(ROOT / "configs/large_batch.py"))["LR"]
  assert {(name, size): lr for name, each in rates.items() for size, lr in each.items()} == best


@pytest.mark.parametrize("size, least, most", [("1b", 1.0e9, 1.2e9), ("7b", 6.7e9, 6.8e9)])
def test_the_language_models_have_the_sizes_of_their_names(size, least, most):
  """TinyLlama's and Llama 2's."""
  config = load_config(f"configs/llama_{size}.py")
  stack = make_model(config, config.data.abstract(config.batch_size)[0].info)
  params = jax.eval_shape(stack.init, jax.random.key(0))
  assert least < sum(x.size for x in jax.tree.leaves(params)) < most


def cells_of(notebook):
  return json.loads((ROOT / "colabs" / f"{notebook}.ipynb").read_text())["cells"]


NOTEBOOKS = sorted(p.stem for p in (ROOT / "colabs").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_on_one_device_has_the_committed_outputs(name):
  """Execute it as on Colab or a workstation with one GPU; the site shows what is committed."""
  done = run_python("docs/notebooks.py", "--check", name, timeout=900)
  assert done.returncode == 0, done.stdout + done.stderr[-3000:]


@pytest.mark.parametrize(
  ("pattern", "new", "is_equal"),
  [
    (r"accuracy 74\.\d%", "accuracy 75.9%", True),
    (r"[\d,]+ examples/s", "11,111 examples/s", True),
    (r"accuracy 74\.\d%", "accuracy 60.0%", False),
    (r"51,987 weights", "51,987 parameters", False),
    (r"51,987 weights", "71,987 weights", False),
    (r"  lr ", "  learning rate ", False),
    (r"with 9 Axes", "with 8 Axes", False),
  ],
)
def test_differences_between_outputs_of_a_notebook(pattern, new, is_equal):
  text = (ROOT / "colabs" / "own_model.ipynb").read_text()
  changed = re.sub(pattern, new, text)
  assert changed != text
  differences = runpy.run_path(str(ROOT / "docs" / "notebooks.py"))["differences"]
  found = [*differences(*(nbformat.reads(x, as_version=4) for x in (text, changed)))]
  assert (not found) is is_equal, found


def test_another_or_a_missing_picture_of_a_notebook_is_seen():
  notebook = nbformat.read(ROOT / "colabs" / "own_model.ipynb", as_version=4)
  differences = runpy.run_path(str(ROOT / "docs" / "notebooks.py"))["differences"]
  changed = copy.deepcopy(notebook)
  cell = next(c for c in changed.cells if "display_data" in str(c.get("outputs")))
  file = io.BytesIO()
  Image.new("P", (774, 200)).save(file, "PNG")
  cell.outputs[0].data["image/png"] = base64.b64encode(file.getvalue()).decode()
  assert "picture of 774 x 200" in "".join(differences(notebook, changed))
  cell.outputs = []
  assert len([*differences(notebook, changed)]) == 1


@pytest.mark.parametrize(
  ("env", "counts"),
  [
    ({}, "--nodes=1 --ntasks=1 --ntasks-per-node=1 --cpus-per-task=1"),
    (
      {"SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "4", "SLURM_CPUS_ON_NODE": "66"},
      "--nodes=2 --ntasks=8 --ntasks-per-node=4 --cpus-per-task=16",
    ),
    (
      {"SLURM_NTASKS_PER_NODE": "2", "SLURM_GPUS_ON_NODE": "4", "SLURM_CPUS_ON_NODE": "1"},
      "--nodes=1 --ntasks=2 --ntasks-per-node=2 --cpus-per-task=1",
    ),
  ],
)
def test_the_launch_script_starts_the_same_command(tmp_path, env, counts):
  """Slurm's and Python's names stand in and write down how they are called."""
  job_script.fake(tmp_path / "bin" / "srun", 'echo "$@"')
  (tmp_path / "bin" / "activate").write_text(f'export PATH="{tmp_path}/bin:$PATH"\n')
  command = ["bash", "launch/train.sbatch", "--config", "configs/x.py", "--config.a=b c"]
  done = run(*command, JAXSCALE_VENV=str(tmp_path), **env)
  assert done.returncode == 0, done.stderr
  wanted = "python -P -m jaxscale.train --config configs/x.py --config.a=b c"
  assert done.stdout.strip() == f"--kill-on-bad-exit=1 {counts} {wanted}"


def run_python_of(page, tmp_path, monkeypatch, capsys):
  """Return the accuracy that the page's first block of Python prints last."""
  code = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)[0]
  assert len(code.strip().splitlines()) <= 25
  monkeypatch.chdir(tmp_path)
  exec(compile(code, page, "exec"), {})
  return float(capsys.readouterr().out.splitlines()[-1].split()[-1])


@pytest.mark.slow
def test_the_readme_example_runs(tmp_path, monkeypatch, capsys):
  assert run_python_of("README.md", tmp_path, monkeypatch, capsys) >= 0.97


def test_the_readme_is_short_and_its_example_has_15_lines_also_on_the_front_page():
  readme, front = ((ROOT / page).read_text() for page in ("README.md", "docs/index.md"))
  assert len(readme.split()) <= 700
  blocks = [re.findall(r"```python\n(.*?)```", text, re.S)[0] for text in (readme, front)]
  assert blocks[0] == blocks[1]
  assert len([line for line in blocks[0].splitlines() if line]) == 15


def test_the_example_of_public_functions_runs(tmp_path, monkeypatch, capsys):
  page = "docs/start/notebook.md"
  assert run_python_of(page, tmp_path, monkeypatch, capsys) >= 0.95


def test_every_notebook_is_on_the_site():
  page = (ROOT / "docs" / "start" / "notebook.md").read_text()
  listed = re.findall(r"^\.\./\.\./colabs/(\w+)$", page, re.M)
  assert sorted(listed) == NOTEBOOKS


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_has_the_outputs_of_its_source(name):
  """Expect what `python docs/notebooks.py` writes, without errors and paths of a machine."""
  source = jupytext.read(ROOT / "colabs" / f"{name}.py")
  cells = cells_of(name)
  assert ["".join(c["source"]) for c in cells] == [c.source for c in source.cells]
  outputs = [o for cell in cells for o in cell.get("outputs", ())]
  assert any("image/png" in o.get("data", {}) or "text/html" in o.get("data", {}) for o in outputs)
  assert not any(o["output_type"] == "error" or o.get("name") == "stderr" for o in outputs)
  shown = [o.get("text") or o["data"].get("text/html", "") for o in outputs]
  assert not re.search(r"/tmp/(?!run)\w+/|venv\w*/bin/", json.dumps(shown))
  assert (ROOT / "colabs" / f"{name}.ipynb").stat().st_size <= 150_000


def test_the_quickstart_has_the_30_lines_of_its_title():
  code = ["".join(c["source"]) for c in cells_of("quickstart") if c["cell_type"] == "code"]
  lines = "\n".join(code[1:-1]).splitlines()  # without what installs, and the picture
  assert len([x for x in lines if x and not x.startswith("#")]) <= 30


def test_links_and_targets_of_the_readme_exist():
  text = (ROOT / "README.md").read_text()
  for link in re.findall(r"\]\((?!http)([^)#]+)", text):
    assert (ROOT / link).exists(), link
  targets = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.M))
  named = re.findall(r"`make ([a-z_-]+)", text) + re.findall(r"^make (\w+)", text, re.M)
  assert {"train", "test", "docs"} <= {*named} <= targets


@pytest.mark.slow
def test_make_trains_job_reaches_its_target(tmp_path):
  done = run_train(tmp_path / "digits")
  assert done.returncode == 0, done.stderr
  summary = json.loads((tmp_path / "digits" / "summary.json").read_text())
  assert summary["accuracy"] >= 0.97 and summary["seconds"] < 120


def test_no_page_imports_from_the_current_folder():
  """`python -m` would import a numpy.py in it, which others may have written."""
  files = [*ROOT.glob("*.md"), *ROOT.glob("configs/*.py"), *ROOT.glob("launch/*")]
  files += [*ROOT.glob("docs/**/*.md"), *ROOT.glob("docs/*.py"), *ROOT.glob("colabs/*.ipynb")]
  files += [*ROOT.glob("packaging/**/*"), *ROOT.glob("jaxscale/jobs/bash/*")]
  for path in files:
    if path.is_file() and path.name != "CHANGELOG.md":
      text = path.read_text()
      if path.suffix == ".ipynb":  # what is written there; outputs are of former commands
        text = "\n".join(cell.source for cell in nbformat.reads(text, 4).cells)
      bare = re.findall(r".*python[\d.]* -m jaxscale[. ]\w.*", text)
      assert not bare, (path, bare)
