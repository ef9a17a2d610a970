"""docs/extending.md: a user's own classes, from the command line and a notebook."""

import json
import math
import re
import sys

import numpy as np
import pytest
from sklearn.metrics import cohen_kappa_score

from jaxscale.config.bases import TrackerContext
from jaxscale.config.loading import load_config
from jaxscale.data import DatasetInfo
from jaxscale.errors import ConfigError
from support import commands
from support.commands import error_line, run_python
from support.extending import blocks, write_mine
from support.processes import run_group
from support.tiny_runs import checksums, kill

CLASSES = """
  model MyNet width, data Waves noise, optimizer Lion decay, schedule Triangle floor,
  loss Focal gamma, exchange Signs scale
"""


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
  """Write the page's file outside of the repository."""
  return write_mine(tmp_path_factory.mktemp("user"))


def command(mine, workdir, *args):
  head = [sys.executable, "-m", "jaxscale.train", "--config", str(mine)]
  return [*head, "--workdir", str(workdir), "--config.log.tensorboard=False", *args]


def run(mine, workdir, *args, num_devices=1):
  return commands.run(*command(mine, workdir, *args), num_devices=num_devices, cwd=mine.parent)


@pytest.fixture(scope="module")
def whole(mine, tmp_path_factory):
  workdir = tmp_path_factory.mktemp("whole")
  done = run(mine, workdir)
  assert done.returncode == 0, done.stderr
  return workdir


def test_each_is_short():
  """25 lines, and 55 for MLPerf's log, which begins with who submits what."""
  for block in blocks():
    lines = [line for line in block.splitlines() if line.strip()]
    assert len(lines) <= (55 if "MLPerf" in block else 25), block


def test_it_trains_and_is_recorded(mine, whole):
  described = json.loads((whole / "config.json").read_text())
  summary = json.loads((whole / "summary.json").read_text())
  assert summary["accuracy"] >= 0.95 and summary["kappa"] >= 0.9
  assert described["config"]["model"] == {"class": "mine:MyNet", "width": 32}
  assert (whole / described["files"]["mine"]["copy"]).read_text() == mine.read_text()
  rates = [json.loads(x) for x in (whole / "metrics.jsonl").read_text().splitlines()]
  assert described["config"]["log"]["trackers"][0]["class"] == "mine:Losses"
  assert described["config"]["callbacks"] == [{"class": "mine:LargestNorm", "most": 1000.0}]
  norms = [x["callback/largest_norm"] for x in rates if "callback/largest_norm" in x]
  assert norms == sorted(norms) and len(norms) == 48 // 8 and norms[0] > 0
  losses = [(x["step"], x["train/loss"]) for x in rates if "train/loss" in x]
  lines = [x.split(",") for x in (whole / "loss.csv").read_text().splitlines()]
  assert [(int(step), float(loss)) for step, loss in lines] == losses and losses
  last = [x["train/learning_rate"] for x in rates if "train/learning_rate" in x][-1]
  assert last == pytest.approx(3e-3 * (1 - 0.9 * 23 / 24), rel=1e-4)


def test_its_fields_are_settings_and_a_typo_is_one_line(mine, whole, tmp_path):
  for name, kind, field in map(str.split, CLASSES.split(",")):
    with pytest.raises(ConfigError, match=f"{kind} has no field '{field}s', did you"):
      load_config(str(mine), {f"{name}.{field}s": "1"})
    value = 8 if name == "model" else 0.5
    changed = load_config(str(mine), {f"{name}.{field}": str(value)})
    assert getattr(getattr(changed, name), field) == value
  changed = load_config(str(mine), {"log.trackers.Losses.file": "x.csv"})
  assert changed.log.trackers[0].file == "x.csv"
  changed = load_config(str(mine), {"metrics.Kappa.power": "2"})
  assert changed.metrics[0].power == 2
  line = error_line(run(mine, whole, "--config.model.width=48"), 2)
  assert "model.width is 32 in the workdir and 48 now" in line
  line = error_line(run(mine, tmp_path / "x", "--config.model.widht=9"), 2)
  assert line.endswith("MyNet has no field 'widht', did you mean 'width'?")
  help_ = run(mine, tmp_path / "x", "--help").stdout
  assert "MyNet: Two dense layers." in help_ and "nits of the hidden layer" in help_


@pytest.mark.parametrize("power, name", ((0, None), (1, "linear"), (2, "quadratic")))
def test_kappa_is_that_of_scikit_learn(mine, power, name):
  (metric,) = load_config(str(mine), {"metrics.Kappa.power": str(power)}).metrics
  built, rng = metric.build(DatasetInfo("rows", (3,), 4)), np.random.default_rng(0)
  outputs = rng.normal(size=(99, 4)).astype("float32")
  label = (outputs + rng.gumbel(size=(99, 4))).argmax(1)
  counts = built.update(outputs, {"label": label}, np.ones(99, "int32"))
  wanted = cohen_kappa_score(label, outputs.argmax(1), weights=name)
  assert built.compute(np.asarray(counts)) == pytest.approx(wanted, rel=1e-14)


def test_prometheus_reads_the_newest_values(mine, tmp_path):
  """The format is Prometheus' text format 0.0.4, which the collector demands."""
  directory = {"log.trackers.Prometheus.directory": str(tmp_path)}
  chosen = {"log.trackers": "Prometheus"} | directory
  (tracker,) = load_config(str(mine), chosen).log.trackers
  made = tracker.build(TrackerContext("a-1", "a", tmp_path, {}, {}, print))
  made.log(50, 1e9, {"train/loss": math.nan, "perf/step_s": 0.25, "eval/é b": 1.0})
  made.log(100, 2e9, {"train/loss": math.inf, "eval/é_b": 2.0})
  (path,) = tmp_path.iterdir()
  assert path.name == "jaxscale_a-1.prom"
  sample = re.compile(r'(?a:([a-zA-Z_:][\w:]*)\{run="a-1"\} (\S+))')
  lines = [sample.fullmatch(x) for x in path.read_text().split("\n")[:-1]]
  found = {x.group(1): float(x.group(2)) for x in lines if x}
  assert None not in lines and len(lines) == len(found)  # each name has one sample
  assert found == {
    "jaxscale_step": 100,
    "jaxscale_time": 2e9,
    "jaxscale_train_loss": math.inf,
    "jaxscale_perf_step_s": 0.25,
    "jaxscale_eval___b": 2.0,
  }
  made.finish("done")
  made.finish("done")  # somebody may have removed it
  assert not list(tmp_path.iterdir())


def test_a_fault_inside_build_is_one_line_with_its_place(mine, tmp_path):
  broken = tmp_path / "broken.py"
  broken.write_text(mine.read_text().replace("Net(self.width,", "Net(self.widht,"))
  wrong = "    return Net(self.widht, context.info.num_classes)"
  number = broken.read_text().splitlines().index(wrong)
  line = error_line(run(broken, tmp_path / "x"), 2)
  assert f"{broken}:{number + 1}: MyNet.build: AttributeError: " in line
  mean = tmp_path / "mean.py"
  text = "return (-((1 - jnp.exp(log_p)) ** self.gamma) * log_p).mean()"
  mean.write_text(re.sub(r"return -\(\(1 - jnp.*", text, mine.read_text()))
  assert "return one value per example" in error_line(run(mean, tmp_path / "x"), 2)


def test_killed_it_resumes_bit_for_bit(mine, whole, tmp_path):
  kill(tmp_path, "--config.log.tensorboard=False", until=24, config=str(mine))
  done = run(mine, tmp_path)
  assert done.returncode == 0, done.stderr
  assert "resuming from the checkpoint of step" in done.stdout
  assert checksums(tmp_path) == checksums(whole)


@pytest.mark.slow
def test_two_processes_train_as_one_of_two_devices(mine, tmp_path):
  one = run(mine, tmp_path / "one", num_devices=2)
  assert one.returncode == 0, one.stderr
  for _, err, code in run_group(command(mine, tmp_path / "two")):
    assert code == 0, err
  losses = []
  for name in ("one", "two"):
    lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
    losses.append([x["eval/loss"] for x in map(json.loads, lines) if "eval/loss" in x])
  np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.slow
def test_from_a_notebook(tmp_path):
  (code,) = blocks("notebook")
  done = run_python("-c", code, num_devices=2, cwd=tmp_path)
  assert done.returncode == 0, done.stderr
  assert float(done.stdout.splitlines()[-1]) < 1.5
  described = json.loads((tmp_path / "runs" / "notebook" / "config.json").read_text())
  assert described["config"]["data"]["x"]["shape"] == [512, 8]
  assert described["config"]["optimizer"]["make"]["object"].endswith(":adafactor")
