"""Measured rates: their tables, their file, and what a plan says of them."""

import tomllib

import numpy as np
import pytest

from jaxscale import cli
from jaxscale.errors import ConfigError
from jaxscale.launch.site import load_site, site_from
from jaxscale.launch.site_file import with_machine, write_machine
from jaxscale.planning import calibrate, kernels, parse, plan_report
from jaxscale.planning.loops import work
from jaxscale.planning.machine import Machine, rates_of
from jaxscale.planning.measured import Calibrated, Cost, Measured, Table, interpolated

WHERE = Calibrated(
  date="2026-01-02", machine="Some CPU, 1 core a process", command="plan --calibrate",
  chip="cpu", processes=2, spread=0.05,
)  # fmt: skip


def test_logarithms_are_interpolated_dim_by_dim():
  rng = np.random.default_rng(0)
  grid = ((2.0, 16.0, 100.0), (3.0, 50.0), (1.0, 7.0, 9.0, 64.0))
  values = 10 ** rng.uniform(6, 11, [len(g) for g in grid])
  table = Table(kind="matmul", grid=grid, values=tuple(values.ravel().tolist()))
  for _ in range(50):
    dims = [np.exp(rng.uniform(np.log(g[0] / 2), np.log(2 * g[-1]))) for g in grid]
    # One dim after the other, the last first, by NumPy's.
    left = np.log(values)
    for g, d in reversed(list(zip(grid, dims, strict=True))):
      left = np.apply_along_axis(lambda v, g=g, d=d: np.interp(np.log(d), np.log(g), v),
                                 -1, left)  # fmt: skip
    assert interpolated(table, dims) == pytest.approx(float(np.exp(left)), rel=1e-9)
  assert interpolated(table, (16, 50, 7)) == pytest.approx(values[1, 1, 1])


def test_a_table_of_one_size_and_a_collective_beyond_its_table():
  one = Table(kind="memory", grid=((5.0,),), values=(7.0,))
  assert interpolated(one, (99.0,)) == pytest.approx(7.0)
  ring = Table(
    kind="all-reduce", form="network", dtype="", grid=((2,), (1e3, 1e6)),
    values=(1e-3, 1.0),
  )  # fmt: skip
  found = Measured([ring])
  assert found.seconds("all-reduce", "network", 2, 4e6) == pytest.approx(4.0)
  # Four devices do three steps of a quarter, where two do one of a half.
  assert found.seconds("all-reduce", "network", 4, 2e6) == pytest.approx(3.0)
  assert found.seconds("all-reduce", "node", 2, 1e3) is None
  slow = Measured([ring], slower=2.0)
  assert slow.seconds("all-reduce", "network", 2, 1e3) == pytest.approx(2e-3)


def test_costs_are_found_again():
  rng = np.random.default_rng(0)
  true = {"a": 1e-11, "b": 3e-9, "call": 2e-5}
  works = [{n: float(rng.integers(0, 100_000)) for n in true} for _ in range(40)]
  works = [work | {"call": 1.0} for work in works] + [{"call": 1.0}]
  costs, error = calibrate.fit_loops(
    (w, sum(true[n] * x for n, x in w.items())) for w in works
  )
  assert error < 1e-3
  assert {c.name: c.seconds for c in costs} == pytest.approx(true, rel=0.02)


def test_what_one_program_has_does_not_stand_for_all_its_seconds():
  """Hundreds of nanoseconds of a division, otherwise; some of a whole call."""
  works = [({"call": 1.0}, 1e-5), ({"call": 1.0, "y.divide": 1000.0}, 4e-4)]
  costs, _ = calibrate.fit_loops(works)
  assert {c.name: c.seconds for c in costs}["y.divide"] == pytest.approx(1e-8)


TEXT = """HloModule m, is_scheduled=true
%f (p: f32[4,8], q: f32[8]) -> f32[4,8] {
  %p = f32[4,8]{1,0} parameter(0)
  %q = f32[8]{0} parameter(1)
  %e = f32[8]{0} exponential(%q)
  %b = f32[4,8]{1,0} broadcast(%e), dimensions={1}
  ROOT %m = f32[4,8]{1,0} multiply(%p, %b)
}
ENTRY %main (x: f32[4,8], y: f32[8]) -> f32[4,8] {
  %x = f32[4,8]{1,0} parameter(0)
  %y = f32[8]{0} parameter(1)
  ROOT %z = f32[4,8]{1,0} fusion(%x, %y), kind=kLoop, calls=%f
}"""


def test_a_fused_exponential_is_computed_for_every_element():
  (module,) = parse.modules(TEXT)
  home = module.computations["main"]
  found = work(module, home, home["z"])
  assert found["v.exp"] == found["v.simple"] == 32
  assert found["v.load"] == 64 and found["kernel"] == 1
  assert found["bytes.near"] == 4 * (32 + 32 + 8)


# What a device of two gets of both: the halves of columns are put side by side, after
# a mean that was moved behind the slices.
PARTS = """HloModule parts, is_scheduled=true
%fused (p: f32[100], q: f32[2,6,8], r: f32[100]) -> f32[6,16] {
  %p = f32[100]{0} parameter(0)
  %r = f32[100]{0} parameter(2)
  %half = f32[] constant(0.5)
  %halves = f32[100]{0} broadcast(%half), dimensions={}
  %mean = f32[100]{0} multiply(%p, %halves)
  %low = f32[16]{0} slice(%mean), slice={[0:16]}
  %high = f32[16]{0} slice(%mean), slice={[16:32]}
  %rest = f32[16]{0} slice(%r), slice={[0:16]}
  %both = f32[16]{0} add(%low, %high)
  %row = f32[16]{0} add(%both, %rest)
  %q = f32[2,6,8]{2,1,0} parameter(1)
  %t = f32[6,2,8]{2,1,0} transpose(%q), dimensions={1,0,2}
  %copied = f32[6,2,8]{2,1,0} copy(%t)
  %joined = f32[6,16]{1,0} bitcast(%copied)
  %rows = f32[6,16]{1,0} broadcast(%row), dimensions={1}
  ROOT %sum = f32[6,16]{1,0} add(%joined, %rows)
}
ENTRY %main (p: f32[100], q: f32[2,6,8], r: f32[100]) -> f32[6,16] {
  %p = f32[100]{0} parameter(0)
  %q = f32[2,6,8]{2,1,0} parameter(1)
  %r = f32[100]{0} parameter(2)
  ROOT %z = f32[6,16]{1,0} fusion(%p, %q, %r), kind=kLoop, calls=%fused
}"""


def test_what_is_sliced_is_read_in_part_and_what_is_joined_is_not_vectorized():
  (module,) = parse.modules(PARTS)
  home = module.computations["main"]
  found = work(module, home, home["z"])
  assert found["bytes.near"] == 4 * (96 + 96 + 2 * 16 + 16)
  # A row is needed again for each of six: of p its two slices, of r its one.
  assert found["v.load"] == 6 * 16 * 3 + 96
  assert found["merge"] == 96


def test_measured_rates_take_the_place_of_a_roofline():
  table = Table(
    kind="matmul", form="nn", grid=((64.0,), (64.0,), (64.0,)), values=(1e9,)
  )
  costs = [Cost(name="kernel", seconds=1e-6), Cost(name="v.exp", seconds=1e-9)]
  found, rates = Measured([table], costs), rates_of("cpu").at("expected")
  one = kernels.Kernel("matmul", 1e6, 1e5, (64, 64, 64, 1), form="nn", shape=(64,) * 3)
  took = kernels.seconds(one, rates, found, {"kernel": 1.0, "v.load": 1e9})
  assert took == pytest.approx(1e-3 + 1e-6)
  loop = kernels.Kernel("memory", 0.0, 1e5)
  took = kernels.seconds(loop, rates, found, {"kernel": 1.0, "v.exp": 1e3})
  assert took == pytest.approx(2e-6)
  # What was not measured keeps the chip's constants.
  other = one._replace(form="nt")
  assert kernels.seconds(other, rates, found) == kernels.seconds(other, rates)


SITE = """# Our cluster
partition = "gpu"  # the large one

[machine]
watts = 900       # measured at the plug
network_link = 1e9

[env]
NCCL_DEBUG = "WARN"
"""


def test_the_rest_of_a_sites_file_stays(tmp_path):
  path = tmp_path / "site.toml"
  path.write_text(SITE)
  table = Table(kind="memory", grid=((8.0, 64.0),), values=(1e9, 2e9))
  fields = {
    "network_link": 2.5e9, "tables": [table], "calibrated": WHERE,
    "loops": [Cost(name="v.exp", seconds=1.25e-10)],
  }  # fmt: skip
  for _ in range(2):  # again: the same file
    write_machine(path, fields)
    text = path.read_text()
    assert text.count("network_link") == text.count("[[machine.tables]]") == 1
    for line in SITE.splitlines():
      assert line in text.splitlines() or line.startswith("network_link")
    site = load_site(str(path))
    assert site.partition == "gpu" and site.env == ("NCCL_DEBUG=WARN",)
    assert site.machine is not None
    assert (site.machine.watts, site.machine.network_link) == (900, 2.5e9)
    assert site.machine.tables == (table,) and site.machine.calibrated == WHERE
    assert site.machine.loops == (Cost(name="v.exp", seconds=1.25e-10),)
  assert tomllib.loads(with_machine("", {"host": 1e-4})) == {"machine": {"host": 1e-4}}


def test_a_damaged_file_is_left_alone(tmp_path):
  path = tmp_path / "site.toml"
  path.write_text("partition = [")
  with pytest.raises(ConfigError) as e:
    write_machine(path, {"host": 1e-4})
  assert str(path) in str(e.value) and "\n" not in str(e.value)
  assert path.read_text() == "partition = ["


@pytest.mark.parametrize(
  "machine, says",
  [
    ({"tables": [{"kind": "memory", "grid": [[1, 2]], "values": [1]}]}, "a grid of 2"),
    ({"tables": [{"kind": "m", "grid": [[2, 1]], "values": [1, 1]}]}, "do not rise"),
    ({"loops": {"v.exp": -1}}, "give a value >= 0"),
    ({"calibrated": {"date": "2026-01-02"}}, "is not set"),
  ],
)
def test_a_bad_table_is_one_line(machine, says):
  with pytest.raises(ConfigError) as e:
    site_from({"machine": machine})
  assert says in str(e.value) and "\n" not in str(e.value)


@pytest.mark.slow
def test_a_small_calibration_is_written_and_loads_again(tmp_path):
  path = tmp_path / "site.toml"
  fields = calibrate.calibrate("a test", calibrate.TINY)
  write_machine(path, fields)
  machine = load_site(str(path)).machine
  assert machine is not None and machine.calibrated is not None
  assert machine.calibrated.chip == "cpu" and machine.calibrated.processes == 1
  found = rates_of("cpu", machine).measured("expected")
  assert found is not None and found.costs["kernel"] > 0
  assert found.rate("matmul", "nn", "f32", (8, 8, 8))
  assert found.rate("convolution", "plain", "f32", (16, 4, 8, 9))
  links = [t for t in machine.tables if t.form == "node"]  # of the simulated devices
  assert len(links) == 5 and machine.node_link


def first_line(chip, machine):
  return plan_report.calibrated(rates_of(chip, machine))


def test_a_plan_says_what_was_calibrated_and_when():
  assert first_line("cpu", None).startswith("not calibrated")
  alone = Machine(calibrated=WHERE)
  assert first_line("cpu", alone) == (
    "calibrated 2026-01-02 on Some CPU, 1 core a process: chip measured, links not"
  )
  link = Table(
    kind="all-reduce", form="network", dtype="", grid=((2,), (1e3,)), values=(1e-3,)
  )
  both = Machine(calibrated=WHERE, tables=(link,))
  assert first_line("cpu", both).endswith("chip and links of 2 processes measured")
  assert first_line("h100", both) == "not calibrated: the site's file has measured cpu"


def test_what_cannot_be_planned_is_one_line(capsys):
  for argv, says in [
    (["--chips=h1000-8"], "--chips=h1000-8: give KIND-COUNT"),
    (["--calibrate"], "--site: give the FILE.toml"),
  ]:
    assert cli.main(["plan", "--config", "digits", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert says in err


def test_a_step_that_does_not_compile_is_one_line(monkeypatch, capsys):
  import jax

  def refuse(self, *args, **kwargs):
    raise RuntimeError("UNIMPLEMENTED: no such thing here\nand more lines")

  monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
  assert cli.main(["plan", "--config", "digits", "--chips=cpu-1"]) == 1
  out, err = capsys.readouterr()
  assert out == "" and err.count("\n") == 1
  assert "does not fit" not in err and "no such thing here" in err
