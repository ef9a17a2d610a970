"""Options of the compiler: what a config may give, what the compiler accepts, and the presets."""

import dataclasses
import importlib.util
import json
import os

import jax
import pytest

from jaxscale import config as cfg
from jaxscale.config.loading import override
from jaxscale.config.record import from_plain, to_plain
from jaxscale.errors import ConfigError
from jaxscale.experiment import build, compiler_options
from jaxscale.experiment.compiler_options import presets
from jaxscale.run.identity import other_environment
from support.commands import run_python
from support.configs import small_config
from support.paths import ROOT

LEVEL = "xla_backend_optimization_level"


def options(**given):
  return small_config(epochs=1, compiler_options=given)


VALUES = {"True": True, "2": 2, "0.5": 0.5, "FUSION,CUSTOM_CALL": "FUSION,CUSTOM_CALL", "": ""}
VALUES |= {"None": "None", "1,2": "1,2", "'2'": "2", "{": "{"}


@pytest.mark.parametrize("text", VALUES)
def test_values_on_the_command_line(text):
  made = override(options(xla_a=1), {"compiler_options.xla_b": text})
  assert made.compiler_options == {"xla_a": 1, "xla_b": VALUES[text]}
  assert type(made.compiler_options["xla_b"]) is type(VALUES[text])
  made = override(made, {"compiler_options": "{'xla_c': False}"})
  assert made.compiler_options == {"xla_c": False}


@pytest.mark.parametrize("value", [None, [1], {"a": 1}])
def test_other_values_are_refused(value):
  with pytest.raises(ConfigError, match=r"^Config.compiler_options=.*expected dict from names"):
    options(xla_a=value)


def test_a_run_records_them(tmp_path):
  made = override(options(**{LEVEL: 2}), {"compiler_preset": "h100"})
  read = from_plain(cfg.Config, json.loads(json.dumps(to_plain(made))))
  assert read == made
  old = to_plain(small_config(epochs=1))
  for name in ("compiler_options", "compiler_preset"):
    del old[name]  # of a run before there were these
  assert from_plain(cfg.Config, old) == small_config(epochs=1)


REFUSED = [
  ({"xla_nope": 1}, "xla_nope=1 .*No such compile option: 'xla_nope'; correct or remove it"),
  ({LEVEL: "most"}, f"{LEVEL}='?most.* is not a valid int32 value"),
  ({LEVEL: 2, "xla_gpu_graph_level": 0}, "xla_gpu_graph_level=0 .*No such compile option"),
]


@pytest.mark.parametrize("given, message", REFUSED)
def test_what_the_compiler_refuses_is_one_line_before_data_are_read(given, message, monkeypatch):
  monkeypatch.setattr(build, "make_data", None)
  with pytest.raises(ConfigError, match=f"^Config.compiler_options.{message}") as raised:
    build.experiment(options(**given))
  text = str(raised.value)
  assert "\n" not in text and f"is refused by the compiler of jax {jax.__version__}" in text


def test_the_steps_are_compiled_with_them():
  passes = "fusion,cpu-fusion,multi_output_fusion"
  fused = {}
  for given in ({}, {"xla_disable_hlo_passes": passes}):
    made = build.experiment(options(**given))
    steps = made.lower_train_step(), made.lower_eval_step(made.abstract_state())
    fused[len(given)] = [step.compile().as_text().count(" fusion(") for step in steps]
  assert max(fused[1]) < min(fused[0])


def test_a_preset_is_not_used_on_cpus():
  made = build.experiment(small_config(epochs=1, compiler_preset="h100"))
  assert made.compiler_options == {}
  assert made.notes[0] == "Config.compiler_preset='h100': not used on CPUs"


class Gpu:
  """Device of another platform, for which the CPU's compiler stands in."""

  platform = "gpu"


@pytest.fixture
def gpu(monkeypatch):
  real = compiler_options._refused
  cpu = jax.devices()[0]
  monkeypatch.setattr(compiler_options, "_refused", lambda options, _: real(options, cpu))
  return [Gpu()]


@pytest.mark.parametrize("name", sorted({*presets()} - {"none", "renamed"}))
def test_presets_have_names_that_the_compiler_accepts(name, gpu):
  """Options of GPUs are also fields of the CPU's compiler, which is of the same version."""
  made = small_config(epochs=1, compiler_preset=name)
  found, notes = compiler_options.compiler_options(made, gpu)
  assert notes == () and len(found) == len(presets()[name])


def test_own_options_replace_those_of_a_preset(gpu):
  name = "xla_gpu_enable_command_buffer"
  made = small_config(epochs=1, compiler_preset="h100", compiler_options={name: "FUSION"})
  assert compiler_options.compiler_options(made, gpu)[0][name] == "FUSION"


def test_what_a_version_lacks_of_a_preset_is_reported(gpu, monkeypatch):
  sets = presets() | {"h100": {"xla_gone": True, "xla_old": 1, LEVEL: 3}}
  sets["renamed"] = {"xla_old": ["xla_gpu_autotune_level", 4]}
  monkeypatch.setattr(compiler_options, "presets", lambda: sets)
  made = small_config(epochs=1, compiler_preset="h100")
  found, notes = compiler_options.compiler_options(made, gpu)
  assert found == {LEVEL: 3, "xla_gpu_autotune_level": 4}
  (note,) = notes
  assert note.startswith("Config.compiler_preset='h100': xla_gone is left out, which the compiler")
  with pytest.raises(ConfigError, match=r"xla_old=1 .*; use xla_gpu_autotune_level=4$"):
    compiler_options.compiler_options(options(xla_old=1), gpu)


def test_options_that_a_dtype_needs(gpu, monkeypatch):
  assert compiler_options._FOR_DTYPE == {"float8": {"xla_gpu_enable_triton_gemm": False}}
  monkeypatch.setattr(compiler_options, "_FOR_DTYPE", {"bfloat16": {LEVEL: 1}})
  made = small_config(epochs=1, dtype="bfloat16")
  assert compiler_options.compiler_options(made, gpu) == ({LEVEL: 1}, ())
  made = dataclasses.replace(made, compiler_options={LEVEL: 2})
  assert compiler_options.compiler_options(made, gpu) == ({LEVEL: 2}, ())


def test_a_resumed_run_notes_other_options():
  before = {"config": {}}
  now = {"config": vars(options(**{LEVEL: 2}))}
  text = other_environment(before, now)
  assert text == f"compiler_options {{}} in the workdir and {{'{LEVEL}': 2}} now"
  assert other_environment(now, now) == other_environment(before, {"config": vars(options())}) == ""


COMPILERS = [*filter(importlib.util.find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin"))]
COMPILE = """
import sys
from jaxscale.experiment import compiler_options
from jaxscale.planning import fits
from jaxscale.planning.topologies import find_chips
from unit.test_gpu_programs import half, text
import dataclasses
name, chips = sys.argv[1:]
config = dataclasses.replace(text(), batch_size=8, compiler_preset=name)
fit = fits.compile_for(config, find_chips(chips))
assert fit.is_good and fit.experiment.notes == (), fit.experiment.notes
assert len(fit.experiment.compiler_options) == len(compiler_options.presets()[name])
"""


@pytest.mark.slow
@pytest.mark.skipif(not COMPILERS, reason="no compiler for GPUs is installed")
@pytest.mark.parametrize("name, chips", [("h100", "h100-8"), ("b200", "b200-8")])
def test_a_gpu_that_is_not_here_is_compiled_for_with_its_preset(name, chips):
  env = dict(PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "tests")]), JAX_PLATFORMS="cpu")
  done = run_python("-c", COMPILE, name, chips, timeout=600, **env)
  assert done.returncode == 0, done.stderr[-2000:]
