"""Measured constants: their table, and what a plan says of them."""

import tomllib

import jax
import pytest

from jaxscale import cli
from jaxscale.config.config_file import load_file
from jaxscale.jobs.site import load_site, site_from
from jaxscale.planning import plan_report
from jaxscale.planning.machine import Machine, rates_of
from support.errors import config_error
from support.paths import ROOT

calibrate = load_file(ROOT / "benchmarks" / "calibrate.py")

TINY = calibrate.Sizes(turns=2, product=64, images=1, floats=1024, payloads=(4096, 8192))


def test_what_is_measured_is_a_table_that_a_site_loads(tmp_path):
  found = calibrate.calibrate(TINY)
  assert found["chip"] == "cpu" and found["matmul"] == found["memory"] == 1.0
  assert found["peak_float32"] == found["peak_bfloat16"] > 0 < found["bandwidth"]
  assert found["convolution"] > 0 < found["host"] and 0 <= found["jitter"] < 1
  # The simulated devices are of one process: their links are those of a node.
  assert found["node_link"] > 0 <= found["node_alpha"] and found["link_share"] == 1.0
  assert "network_link" not in found
  path = tmp_path / "site.toml"
  path.write_text(calibrate.as_toml(found))
  machine = load_site(str(path)).machine
  assert machine is not None
  for name, value in found.items():
    expected = value if name == "chip" else pytest.approx(value, rel=1e-3)
    assert getattr(machine, name) == expected
  constants = rates_of("cpu", machine).constants
  assert constants["bandwidth"].kind == "site" and "chip" not in constants


class Device:
  """An accelerator that is not here."""

  platform = "gpu"

  def __init__(self, device_kind):
    self.device_kind = device_kind


def test_names_of_devices():
  assert calibrate.chip_of(jax.devices()[0]) == "cpu"
  assert calibrate.chip_of(Device("NVIDIA H100 80GB HBM3")) == "h100"
  assert calibrate.chip_of(Device("Tesla V100-SXM2-16GB")) == "v100"
  assert calibrate.chip_of(Device("Another one")) == ""


def test_shares_are_of_published_peaks(monkeypatch):
  """On a chip whose peak is published the shares are measured, not the peak."""
  work = {"empty": 0, "matmul": 4e12, "convolution": 2e12, "memory": 2e10}
  programs = {name: calibrate._Program(lambda: None, n, "") for name, n in work.items()}
  monkeypatch.setattr(calibrate, "_programs", lambda dtype, sizes: programs)
  monkeypatch.setattr(calibrate, "chip_of", lambda device: "h100")
  even = lambda calls, turns: {name: [1.0, 1.0] for name in calls}  # noqa: E731
  monkeypatch.setattr(calibrate, "in_turns", even)
  took = dict.fromkeys(work, 11e-3) | {"empty": 1e-3}
  monkeypatch.setattr(calibrate, "medians", lambda seconds: took)
  found = calibrate._chip("bfloat16", TINY)
  known = rates_of("h100").constants
  assert "peak_bfloat16" not in found and "bandwidth" not in found
  assert found["matmul"] == pytest.approx(4e14 / known["peak_bfloat16"].value)
  assert found["convolution"] == pytest.approx(2e14 / known["peak_bfloat16"].value)
  assert found["memory"] == pytest.approx(2e12 / known["bandwidth"].value)
  assert found["chip"] == "h100" and found["host"] == 1e-3 and found["jitter"] == 0
  # The compiler of TPUs estimates cycles; what is measured is how far off it is.
  text = """HloModule m, is_scheduled=true
ENTRY %m (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %e = f32[8]{0} exponential(%p), backend_config={"estimated_cycles":"9400000"}
}"""
  programs["matmul"] = programs["matmul"]._replace(text=text)
  monkeypatch.setattr(calibrate, "chip_of", lambda device: "v5e")
  found = calibrate._chip("bfloat16", TINY)
  assert found["cycles"] == pytest.approx(10e-3 * rates_of("v5e").constants["clock"].value / 9.4e6)
  assert "matmul" not in found


def first_line(chip, machine):
  return plan_report.calibrated(rates_of(chip, machine))


def test_a_plan_says_whether_this_chip_was_measured():
  assert first_line("cpu", None).startswith("not calibrated")
  machine = Machine(chip="cpu", matmul=1.0, memory=1.0)
  assert first_line("cpu", machine).startswith("not calibrated")  # its links were not
  machine = Machine(chip="cpu", matmul=1.0, memory=1.0, network_link=1e9)
  assert first_line("cpu", machine).startswith("calibrated by the measurements")
  assert first_line("h100", machine) == "not calibrated: the site's file has measurements of cpu"


BAD = {"loops": ({"v.exp": 1.0}, "Machine.loops"), "chip": (3, "Machine.chip=3")}
BAD["host"] = (-1, "give a value >= 0")


@pytest.mark.parametrize("name", BAD)
def test_a_bad_table_is_one_line(name):
  value, says = BAD[name]
  with config_error(says):
    site_from({"machine": {name: value}})


@pytest.mark.slow
def test_the_script_prints_a_table(capsys, monkeypatch):
  monkeypatch.setattr(calibrate, "CPU", TINY)
  calibrate.main()
  out = capsys.readouterr().out
  assert tomllib.loads(out)["machine"]["chip"] == "cpu" and out.startswith("# ")


def test_a_step_that_does_not_compile_is_one_line(monkeypatch, capsys):
  def refuse(self, *args, **kwargs):
    raise RuntimeError("UNIMPLEMENTED: no such thing here\nand more lines")

  monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
  assert cli.main(["plan", "--config", "digits", "--chips=cpu-1"]) == 1
  out, err = capsys.readouterr()
  assert out == "" and err.count("\n") == 1
  assert "does not fit" not in err and "no such thing here" in err
