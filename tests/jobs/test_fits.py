"""Which chips there are by name, and what fits on them: on devices of our own."""

import importlib.util
import json
import re
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxscale import cli, data
from jaxscale import config as cfg
from jaxscale.cluster import gpu_settings
from jaxscale.config.loading import load_config
from jaxscale.errors import ConfigError
from jaxscale.hlo import out_of_memory
from jaxscale.mesh import make_mesh
from jaxscale.planning import fits, plan_report, stored, topologies
from jaxscale.planning.plan import make_plan
from support.configs import small_config
from support.tiny_plans import SOURCE, environment, here  # noqa: F401

pytestmark = pytest.mark.usefixtures("environment")
PARAMETERS_OF_LAYER = 4 * 32 * 32 + 3 * 32 * 64 + 2 * 32


def test_a_step_of_processes_gathers_no_parameter_twice():
  """One process with a device each compiles another program than two devices here."""
  layout = dict(mesh=cfg.Mesh(data=1, fsdp=-1), layout=cfg.Layout(shard="fsdp"))
  model, images = cfg.MLP(hidden=(32, 32)), cfg.Synthetic(num_examples=64)
  config = small_config(model=model, data=images, batch_size=8, epochs=1, **layout)
  text = fits.compile_for(config, here(1 << 40, 2)).compiled.as_text()
  gathered = re.findall(r" all-gather\((\S+)\)", text)
  assert len(gathered) == len(set(gathered)) > 1


NAMES = {"v5e-16": (1, "v5e", 16), "2xv5e-8": (2, "v5e", 8), "h100-16": (1, "h100", 16)}
NAMES |= {"2xh100-4": (2, "h100", 4), "knl-68": (1, "knl", 68)}


@pytest.mark.parametrize("name", NAMES)
def test_names_of_chips(name):
  assert topologies._parse(name) == NAMES[name]


UNKNOWN = {"v5e": "use KIND-COUNT", "k80-8": "a kind of v5e", "v5e-7": "slices of 1, 4, 8"}
UNKNOWN |= {"h100-12": "hosts have 8 GPUs", "0xv5e-8": "at least one chip"}


@pytest.mark.parametrize("name", UNKNOWN)
def test_chips_that_there_are_not(name):
  with pytest.raises(ConfigError, match=f"^--chips={name}: .*{UNKNOWN[name]}"):
    topologies.find_chips(name)


@pytest.mark.parametrize("name, package", [("v5e-16", "libtpu"), ("h200-8", "cudnn")])
def test_a_compiler_that_is_not_installed(name, package, monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
  with pytest.raises(ConfigError, match=f"not installed; run pip install .*{package}"):
    topologies.find_chips(name)


def test_descriptions_of_gpus():
  text = topologies.target_config("h200")
  assert "device_memory_size: 151397597184" in text and "{" in text
  text = topologies.target_config("b200")
  assert "core_count: 148" in text and "major: 10" in text and 'name: "NVIDIA B200"' in text
  for kind, chip in topologies.CHIPS.items():
    if chip.platform == "cuda":
      words = {*re.findall(r"\b[A-Z]{4,}\b", topologies.target_config(kind))}
      assert words <= {"NVIDIA", "CUDA"}


def gpus(name):
  return topologies.Chips(name, topologies.CHIPS["h100"], [], "h100")


LIMITS = [("", {}, 0.9), ("XLA_PYTHON_CLIENT_MEM_FRACTION=.5", {}, 0.5)]
LIMITS += [("", {"gpu_settings": False}, 0.75), ("XLA_CLIENT_MEM_FRACTION=1", {}, 1.0)]


@pytest.mark.parametrize("variable, changes, share", LIMITS)
def test_a_plan_counts_the_memory_that_a_run_takes(variable, changes, share, monkeypatch):
  for name in gpu_settings.FRACTION:
    monkeypatch.delenv(name, raising=False)
  if variable:
    monkeypatch.setenv(*variable.split("="))
  config = small_config(epochs=1, **changes)
  assert fits.limit_of(config, gpus("h100-8")) == int(topologies.CHIPS["h100"].memory * share)
  assert fits.limit_of(config, here(1000)) == 1000


def test_a_plan_compiles_at_the_level_of_a_run(monkeypatch):
  monkeypatch.delenv(gpu_settings.LEVEL, raising=False)
  seen = {}
  for name, on in [("h100-8", True), ("h100-16", True), ("2xh100-4", True), ("h100-16", False)]:
    with fits._level_of(small_config(epochs=1, gpu_settings=on), gpus(name)):
      seen[name, on] = jax.config.jax_optimization_level
  assert [*seen.values()] == ["UNKNOWN", "O1", "O1", "UNKNOWN"]
  assert jax.config.jax_optimization_level == "UNKNOWN"


def test_what_a_compiler_refuses():
  message = out_of_memory(RuntimeError("RESOURCE_EXHAUSTED: E1000: out of HBM (17.3G)\nmore"))
  assert message == "E1000: out of HBM (17.3G)"
  assert out_of_memory(RuntimeError("INTERNAL: RESOURCE_EXHAUSTED: x")) is None


def test_text_is_not_read():
  text = cfg.TextFiles(path="not/here", sequence_length=7)
  config = small_config(model=cfg.Transformer(), data=text, batch_size=8, epochs=1)
  train, held_out = config.data.abstract(config.batch_size)
  assert train.info == held_out.info == data.TextInfo("TextFiles", 256, 7)
  assert train.num_examples >= config.batch_size
  with pytest.raises(AssertionError):
    train.load(np.arange(2), None)


def lines(capsys, tmp_path, monkeypatch, *args, limit=1 << 40):
  """Exit code and output of the command for our devices."""
  (tmp_path / "tiny.py").write_text(SOURCE)
  monkeypatch.chdir(tmp_path)
  sizes = {"knl-4": 4}
  monkeypatch.setattr(topologies, "find_chips", lambda name: here(limit, sizes.get(name, 8)))
  code = cli.main(["plan", "--config=tiny.py", "--chips=v5e-16", "--config.batch_size=8", *args])
  out = capsys.readouterr()
  return code, (out.out + out.err).splitlines()


def test_a_plan_and_what_is_kept_of_it(capsys, tmp_path, monkeypatch):
  site = tmp_path / "site.toml"
  site.write_text("[machine]\nper_node = 2\ninput_rate = 10\n")
  args = [f"--site={site}", "--nodes=2,4,8", "--json=a/plan.json", "--png=b/plan.png"]
  code, page = lines(capsys, tmp_path, monkeypatch, *args[:1], "--nodes=2")
  assert code == 0 and not [*tmp_path.glob("plan.*")]  # nobody asked for them
  code, page = lines(capsys, tmp_path, monkeypatch, *args)
  assert code == 0 and page[0].startswith("plan not calibrated")
  assert any("memory of a device: fits: " in line for line in page)
  assert any("waiting for examples takes 9" in line for line in page)
  assert page[-2:] == ["a/plan.json: `jaxscale submit --plan a/plan.json` submits it", "b/plan.png"]
  assert (tmp_path / "b" / "plan.png").read_bytes().startswith(b"\x89PNG")
  plan = json.loads((tmp_path / "a" / "plan.json").read_text())
  step = plan["step"]
  assert sum(step["parts"].values()) == pytest.approx(step["seconds"]["expected"])
  assert step["seconds"]["high"] <= step["seconds"]["low"] * (1 + 1e-9)
  # Nodes of 2; the batch of 8 rows goes over 4 and 8 devices, and not over 16.
  assert [s["devices"] for s in plan["strong"]] == [4, 8] and plan["skipped"] == [16]
  assert [s["devices"] for s in plan["weak"]] == [4, 8, 16]
  assert [s["rows"] for s in plan["strong"]] == [2, 1]
  assert plan["constants"]["per_node"]["kind"] == "site"
  # Two programs were compiled, and each is planned as it is.
  assert len(plan["compiled_for"]) == 2 and plan["job"] is None
  # A run of it reads it again: the same numbers, on all sizes.
  kept = stored.read_plan(tmp_path / "a" / "plan.json")
  found = stored.match(kept, plan["config"], devices=8, batch_size=8)
  assert found.step._asdict() == {n: step[n] for n in found.step._fields}
  found = stored.match(kept, plan["config"], devices=4, batch_size=8)
  assert found.step.seconds == plan["strong"][0]["seconds"]


GROWING = {
  "BySchedule": "the growing batch takes 540 steps (405 at 16, 68 at 32, 67 at 64), 33% fewer than",
  "ByBranch": "the growing batch takes 293 steps (90 at 16, 45 at 32, 158 at 64), 64% fewer than",
}


@pytest.mark.parametrize("rule", GROWING)
def test_the_savings_of_a_growing_batch(rule, monkeypatch):
  """9 epochs of 1,437 examples; a cosine has halved at 1/2, and is a quarter at 2/3 of them."""
  monkeypatch.setattr(topologies, "find_chips", lambda name: here(count=int(name.split("-")[1])))
  phases = cfg.Growing(max_batch_size=64, when=getattr(cfg, rule)())
  plan = make_plan(small_config(phases=phases), here(), nodes=(4, 8))
  page = plan_report.text(plan)
  assert GROWING[rule] in page
  assert ("if ByBranch lets it grow whenever it decides" in page) == (rule == "ByBranch")
  assert plan.growth[0].constant_steps == 809  # what the run itself would take
  assert [s.devices for s in plan.growth] == [8, 4]  # the requested devices come first
  assert all(s.seconds["expected"] < s.constant_seconds for s in plan.growth)
  # The time that a job requests must be enough if the rule never lets the batch grow.
  whole = 809 * plan.step.seconds["expected"]
  train = plan.growth[0].seconds["expected"] if rule == "BySchedule" else whole
  assert plan.job.train["expected"] == pytest.approx(train)


def test_a_step_that_the_compiler_refuses(capsys, tmp_path, monkeypatch):
  refused = fits.Fit(None, "E1000: out of HBM", 10**9, 1.0, None, None)
  monkeypatch.setattr(fits, "compile_for", lambda *args: refused)
  code, (line,) = lines(capsys, tmp_path, monkeypatch)
  assert code == 1
  assert line.startswith("error: --chips=here-8: the step does not fit in 0.93 GiB: E1")


def test_what_does_not_fit(capsys, tmp_path, monkeypatch):
  code, page = lines(capsys, tmp_path, monkeypatch, limit=1000)
  assert code == 1 and "the step does not fit: times assume chips with enough memory" in page
  assert any(line.startswith("memory of a device: does not fit: ") for line in page)


@pytest.mark.slow
def test_memory_of_a_layer(tmp_path):
  """Parameters and two moments, a layer's share of them on each of 8 devices."""
  file, chips, sizes = tmp_path / "tiny.py", here(1 << 40, 8), {}
  file.write_text(SOURCE)
  for n in (2, 6):
    config = load_config(str(file), {"model.num_layers": str(n), "batch_size": "8"})
    sizes[n] = fits.compile_for(config, chips).memory
  added = (sizes[6].arguments - sizes[2].arguments) / 4
  vectors = 2 * 32  # whole on each device
  assert added == pytest.approx(12 * ((PARAMETERS_OF_LAYER - vectors) / 8 + vectors), rel=0.02)


MISTAKES = [
  ([], "--config: missing"),
  (["--config", "configs/llama_1b.py"], "--chips: missing; try --chips v5e-16"),
  (["--chip", "v5e-16"], "--chip: not an option, did you mean '--chips'?"),
  (["--config"], "--config: a value is missing"),
  (["--config=c", "--chips=v5e-17"], "--chips=v5e-17: v5e has slices of"),
]


@pytest.mark.parametrize("args, message", MISTAKES)
def test_a_mistake_is_one_line(args, message, capsys):
  assert cli.main(["plan", *args]) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith(f"error: {message}")


class Device(SimpleNamespace):
  """Device with the attributes that a mesh reads."""

  def __init__(self, number, slice_index):
    about = dict(platform="cpu", device_kind="cpu", process_index=0)
    super().__init__(id=number, slice_index=slice_index, **about)

  def __hash__(self):
    return self.id


@pytest.mark.parametrize(
  "sizes", [{"replica": 2, "fsdp": 8}, {"fsdp": 16}, {"replica": 2, "data": 2, "model": 4}]
)
def test_slices_are_joined_along_the_slowest_axes(sizes):
  # As they come from two slices of 8, mixed up.
  mixed = np.random.default_rng(0).permutation(16).tolist()
  devices = [Device(i, i // 8) for i in mixed]
  mesh = make_mesh(**({"data": 1} | sizes), devices=devices)
  found = [d.slice_index for d in mesh.devices.reshape(16)]
  assert found == [0] * 8 + [1] * 8


def test_slices_that_no_axis_joins_are_refused():
  devices = [Device(i, i // 4) for i in range(12)]
  with pytest.raises(ConfigError, match=r"3 slices.*give Mesh.replica=3"):
    make_mesh(replica=2, data=6, devices=devices)


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="the compiler is not installed")
def test_a_program_for_tpus_that_are_absent(tmp_path):
  (tmp_path / "tiny.py").write_text(SOURCE)
  command = [sys.executable, "-m", "jaxscale", "plan", "--config=tiny.py", "--chips=v5e-8"]
  done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=tmp_path)
  assert done.returncode == 0, done.stderr
  assert "memory of a device: fits: " in done.stdout and "of 15.75 GiB" in done.stdout
