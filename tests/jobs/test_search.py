"""The search for a layout: what it leaves out, its order, and what is submitted."""

import dataclasses
import functools
import json
import math
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxscale import cli
from jaxscale import config as cfg
from jaxscale.config.loading import override
from jaxscale.experiment import build
from jaxscale.planning import fits, search, submission, topologies
from jaxscale.planning import plan as plans
from jaxscale.planning.estimate import Candidate, Estimate, estimate, shapes_of
from jaxscale.planning.fits import RefusedError
from jaxscale.planning.machine import known_chips, rates_of
from support import tiny_plans
from support.cases import all_slow_except
from support.configs import small_config
from support.tiny_plans import SOURCE, environment  # noqa: F401

pytestmark = pytest.mark.usefixtures("environment")
here = functools.partial(tiny_plans.here, count=4)


def config(**changes):
  made: dict = {}
  exec(SOURCE, made)
  layout = cfg.Layout(shard="fsdp", remat="none")
  return dataclasses.replace(made["get_config"](), layout=layout, **changes)


def simulated(name):
  """Those of a name, or four where it has none of ours."""
  kind, _, count = name.partition("-")
  return here(count=int(count) if kind == "knl" else 4)


GIVEN = [
  {"mesh.data": "4", "mesh.fsdp": "1", "layout.shard": "none"},
  {"mesh.data": "2", "mesh.fsdp": "2", "layout.shard": "zero1"},
  {"layout.remat": "dots", "accumulate_steps": "2"},
  {"mesh.fsdp": "2", "mesh.model": "2", "layout.remat": "full"},
  {"mesh.fsdp": "1", "mesh.stage": "2", "mesh.data": "2", "layout.shard": "none"},
]
GIVEN[-1] |= {"accumulate_steps": "4", "layout.schedule": "1f1b"}


@pytest.mark.parametrize("which", all_slow_except(range(len(GIVEN)), 2, 3))
def test_no_program_takes_less_than_the_least(which):
  """Expect a bound below the compiler's bytes: layouts that exceed it would not fit."""
  made, chips = override(config(), GIVEN[which]), here()
  one = search.as_given(made, 4)
  data = made.data.abstract(made.batch_size)
  shapes = build.experiment(made, devices=chips.devices, datasets=data)
  guess = estimate(shapes_of(shapes), one, made.batch_size, rates_of("knl"))
  fit = fits.compile_for(made, chips)
  assert fit.memory is not None
  # All of what is an argument but the batch is state; vectors and scalars are whole.
  batch = sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for x in jax.tree.leaves(shapes.abstract_batch())
  )
  assert guess.least <= fit.memory.total
  share = 0.8 if which == 4 else 0.9  # each stage holds all of embedding and head
  assert guess.least >= share * (fit.memory.arguments - batch)
  assert guess.least <= guess.memory and 0 < guess.seconds < 1


def with_optimizer(optimizer, dtype="float32"):
  made = config(optimizer=optimizer, dtype=dtype)
  data = made.data.abstract(made.batch_size)
  return build.experiment(made, devices=here().devices, datasets=data)


def test_matrices_that_are_dealt_out_are_in_the_estimate():
  """Five iterations of 4 s s l + 2 s s s FLOPs for each [s, l], a quarter on each device."""
  found = []
  for optimizer in (cfg.AdamW(lr=1e-3), cfg.Muon(lr=1e-3)):
    made = with_optimizer(optimizer)
    shapes, one = shapes_of(made), search.as_given(made.config, 4)
    found.append((shapes, estimate(shapes, one, made.config.batch_size, rates_of("knl"))))
  (adamw, before), (muon, after) = found
  params = made.abstract_state().params
  kernels = [x.shape for x in jax.tree.leaves(params["layers"]) if x.ndim == 3]
  sides = [(n, *sorted(sides)) for n, *sides in kernels]
  assert (adamw.matrices, adamw.matrix_flops) == (0, 0)
  assert muon.matrices == sum(math.prod(shape) for shape in kernels)
  assert muon.matrix_flops == sum(5 * n * (4 * s * s * m + 2 * s**3) for n, s, m in sides)
  assert after.seconds > before.seconds


@pytest.mark.parametrize("chip", known_chips())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_chip_has_the_rates_of_an_estimate(dtype, chip):
  shapes, one = shapes_of(with_optimizer(cfg.Muon(lr=1e-3), dtype)), search.as_given(config(), 4)
  assert 0 < estimate(shapes, one, 16, rates_of(chip)).seconds < 1


def test_the_estimate_has_the_dtype_of_newton_schulz():
  """An H100 has 495 TFLOP/s in TF32 and 989 in bfloat16, and each device a quarter of the work."""
  took, at = [], rates_of("h100").at("expected")
  for dtype in ("float32", "bfloat16"):
    shapes = shapes_of(with_optimizer(cfg.Muon(lr=1e-3, ns_dtype=dtype)))
    sizes, one = shapes._replace(matrix_flops=4e15), search.as_given(config(), 4)
    took.append(estimate(sizes, one, 16, rates_of("h100")).seconds)
  expected = 1e15 * (1 / 495e12 - 1 / 989e12) / at["matmul"]
  assert took[0] - took[1] == pytest.approx(expected, rel=0.02)


def every(made, devices=4):
  return list(search.candidates(made, devices))


def test_what_is_listed_divides_and_computes_the_same():
  made = config(batch_size=8)
  listed = every(made)
  assert len(listed) == len(set(listed)) > 100
  assert search.as_given(made, 4)._replace(num_microbatches=1) in listed
  for one in listed:
    assert math.prod(vars(one.mesh).values()) == 4
    assert made.batch_size % (one.mesh.data * one.mesh.fsdp * one.num_microbatches) == 0
    assert one.layout.sum_in == made.layout.sum_in
  assert {x.layout.model for x in listed} == {"layers", "layers_and_tokens", "ring", "all_to_all"}
  assert {x.layout.shard for x in listed} == {"none", "zero1", "zero2", "fsdp"}
  assert {x.layout.schedule for x in listed if x.mesh.stage > 1} == {"gpipe", "1f1b"}


def test_images_have_no_layers_to_split():
  images = cfg.Synthetic(num_examples=64, image_size=8)
  made = small_config(model=cfg.CNN(), data=images, epochs=1)
  listed = every(made)
  assert {x.mesh.model * x.mesh.stage for x in listed} == {1}
  assert {x.layout.shard for x in listed} == {"none", "zero1", "zero2", "fsdp"}
  assert {x.num_microbatches for x in listed} == {1, 2, 4}
  normed = dataclasses.replace(made, model=cfg.CNN(batch_norm=True))
  assert {x.num_microbatches for x in every(normed)} == {1}


def one_of(remat, num_microbatches, **mesh):
  layout = cfg.Layout(shard="none", remat=remat)
  return Candidate(cfg.Mesh(**({"data": 4} | mesh)), layout, num_microbatches)


def test_a_candidate_that_keeps_more_of_as_many_rows():
  keeps = search.keeps_as_much
  assert keeps(one_of("none", 1), one_of("dots", 2))
  assert keeps(one_of("dots", 2), one_of("dots", 2))
  assert not keeps(one_of("full", 1), one_of("dots", 2))
  assert not keeps(one_of("none", 4), one_of("dots", 2))


def test_candidates_come_by_estimate_and_by_what_fitted():
  small = {"data": 2, "fsdp": 2}
  order = {
    one_of("dots", 1): (False, 1.0),
    one_of("full", 1): (False, 1.05),
    one_of("full", 2): (False, 1.2),
    one_of("none", 1): (True, 0.5),
    one_of("full", 1, **small): (False, 1.1),
    one_of("dots", 1, **small): (True, 0.7),
  }

  def taken(does_fit):
    guesses = {one: Estimate(0.0, 1.0 + is_large, s) for one, (is_large, s) in order.items()}
    waiting, _ = search._waiting(order, None, guesses.get, 1.5)
    rows, found = [], []
    for one in search._in_order(waiting, rows):
      found.append((one.mesh.fsdp, one.layout.remat, one.num_microbatches))
      rows.append(SimpleNamespace(step=does_fit(one)))
    return found

  # A second variant of a layout that fitted comes after another layout as good.
  first, second = (1, "dots", 1), (1, "full", 1)
  later = [(1, "full", 2), (1, "none", 1), (2, "dots", 1)]
  assert taken(lambda one: True) == [first, (2, "full", 1), second, *later]
  # One that did not fit does not count, and what needs as much is not tried.
  found = taken(lambda one: one.layout.remat == "full")
  assert found == [first, second, (2, "full", 1), (1, "full", 2), (2, "dots", 1)]


def test_more_microbatches_are_left_out_where_half_of_the_memory_is_free():
  listed = [one_of("dots", n) for n in (1, 2, 4, 8)]
  guesses = iter([100.0, 60.0, 40.0])
  waiting, _ = search._waiting(listed, None, lambda _: Estimate(0.0, next(guesses), 1.0), 100)
  assert sorted(one.num_microbatches for *_, one in waiting) == [1, 2, 4]


CHANGES = [{"accumulate_steps": "2"}, {"mesh.fsdp": "2", "mesh.data": "2"}]


@pytest.mark.parametrize("changes", [*CHANGES, {"layout.remat": "dots"}])
def test_changes_make_the_same_config(changes):
  base = config()
  made = override(base, changes)
  assert submission.changes(base, made) == changes
  assert override(base, changes) == made


def planned(seconds):
  """In place of compilation: seconds of a candidate; None: it does not fit."""

  def plan(config, one, chips, rates):
    took = seconds(one)
    step = SimpleNamespace(seconds={"expected": took}, memory=2.0**30)
    return search.Row(one, step if took else None, "" if took else "does not fit: 9")

  return plan


def test_the_best_is_planned_and_the_given_layout_comes_first(monkeypatch):
  made, told = config(), []
  given = search.as_given(made, 4)
  best = Candidate(cfg.Mesh(data=2, fsdp=2), dataclasses.replace(made.layout, remat="dots"), 1)
  seconds = {given: 2.0, best: 1.0}
  monkeypatch.setattr(search, "_planned", planned(lambda one: seconds.get(one, 3.0)))
  monkeypatch.setattr(search, "_PATIENCE", 10**6)
  found = search.search(made, here(), log=told.append)
  assert told[0].startswith("fsdp 4, remat none") and len(told) == len(found.rows) > 50
  assert found.rows[0].candidate == best and found.ended == "all were compiled"
  assert found.config.mesh == cfg.Mesh(data=2, fsdp=-1)
  assert found.config.layout.remat == "dots" and found.config.accumulate_steps == 1
  lines = search.text(found).splitlines()
  assert lines[0].startswith(f"searched {found.considered:,} layouts in ")
  assert lines[2].split()[:5] == ["data", "2", "x", "fsdp", "2"]
  assert found.rows[0].step.seconds["expected"] == 1.0 and found.too_large == 0


def test_a_search_ends(monkeypatch):
  made, chips = config(), here()
  given = search.as_given(made, 4)
  monkeypatch.setattr(search, "_planned", planned(lambda one: 1.0 + (one != given)))
  found = search.search(made, chips)
  assert len(found.rows) == 1 + search._PATIENCE
  assert found.ended == f"{search._PATIENCE} in a row were no better"
  assert found.rows[0].candidate == given
  found = search.search(made, chips, minutes=0)
  assert len(found.rows) == 1 and found.ended == "the time limit of --minutes=0 was reached"
  # What fits is looked for as long as nothing does.
  monkeypatch.setattr(search, "_planned", planned(lambda one: None))
  with pytest.raises(RefusedError, match=r"none of \d+ layouts fits; does not fit: 9"):
    search.search(made, chips)


def test_what_cannot_fit_is_not_compiled(monkeypatch):
  tried = []
  monkeypatch.setattr(search, "_planned", planned(lambda one: tried.append(one) or 1.0))
  monkeypatch.setattr(search, "_PATIENCE", 10**6)
  found = search.search(config(), here(limit=300_000))
  assert 0 < found.too_large < found.considered and len(found.rows) == len(tried)
  shapes = build.experiment(config(), devices=here().devices, datasets=config().data.abstract(16))
  for one in tried[1:]:
    assert estimate(shapes_of(shapes), one, 16, rates_of("knl")).least <= 300_000


@pytest.mark.slow
def test_what_is_compiled_is_planned_or_says_why_not():
  made, rates = config(), rates_of("knl")
  given = search.as_given(made, 4)
  row = search._planned(made, given, here(), rates)
  assert row.step is not None and row.note == ""
  row = search._planned(made, given, here(limit=1000), rates)
  assert row.step is None and row.note.startswith("does not fit: ")
  odd = Candidate(cfg.Mesh(data=1, model=4), made.layout, 1)
  row = search._planned(made, odd, here(), rates)
  assert row.step is None and row.note.startswith("refused: ")


def test_a_search_is_submitted(tmp_path, monkeypatch, capsys):
  (tmp_path / "tiny.py").write_text(SOURCE)
  (tmp_path / "site.toml").write_text("gpus_per_node = 2\n[machine]\nper_node = 2\n")
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(topologies, "find_chips", simulated)
  argv = ["plan", "--config", "tiny.py", "--chips", "v5e-16", "--search"]
  argv += ["--json=plan.json", "--site=site.toml", "--minutes=0.01", "--config.clip_norm=1.0"]
  assert cli.main(argv) == 0
  out = capsys.readouterr().out
  assert "searched " in out and "jaxscale submit --plan plan.json" in out
  plan = json.loads((tmp_path / "plan.json").read_text())
  submit = plan["submit"]
  assert submit["nodes"] == 2 and submit["overrides"]["clip_norm"] == "1.0"
  dry = ["submit", "--plan", "plan.json", "--dry-run", "--executor=slurm"]
  assert cli.main(dry) == 0
  script = capsys.readouterr().out
  assert "#SBATCH --nodes=2" in script and "--config.clip_norm=1.0" in script
  assert cli.main([*dry, "--nodes=1", "--config.clip_norm=2.0"]) == 0
  script = capsys.readouterr().out
  assert "#SBATCH --nodes=1" in script and "--config.clip_norm=2.0" in script


PLAN = ["plan", "--config=tiny.py", "--chips=v5e-16"]
MISTAKES = [
  (["submit", "--dry-run"], "--config: missing"),
  (["submit", "--plan=none.json"], "none.json: No such file"),
  (["submit", "--plan=a.json", "--config=digits"], "cannot be used with --plan"),
  ([*PLAN, "--search", "--minutes=0"], "--minutes=0"),
]


@pytest.mark.parametrize("argv, says", MISTAKES)
def test_mistakes(argv, says, tmp_path, monkeypatch, capsys):
  (tmp_path / "tiny.py").write_text(SOURCE)
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(topologies, "find_chips", lambda name: here())
  assert cli.main(argv) == 2
  err = capsys.readouterr().err
  assert says in err and err.count("\n") == 1


def test_the_time_limit_of_a_plan():
  base, step = config(), SimpleNamespace(nodes=3, devices=24)
  chips = SimpleNamespace(chip=SimpleNamespace(platform="cuda"))
  plan: Any = SimpleNamespace(config=base, step=step, chips=chips)
  plan.job, plan.rates = SimpleNamespace(limit=2.51), SimpleNamespace(per_node=8)
  found = submission.submission(plan, base, "a.py", {}, "alps", gpus_per_node=4)
  assert found == {"config": "a.py", "overrides": {}, "nodes": 3, "site": "alps", "time": "2:31:00"}
  line = "jaxscale submit --config a.py --nodes 3 --site alps --time 2:31:00"
  assert submission.command(found) == line
  # Where no profile says how many GPUs a node has, the plan does.
  found = submission.submission(plan, base, "a.py", {}, None)
  assert found["gpus_per_node"] == 8
  assert "--nodes 3 --time 2:31:00 --gpus-per-node 8" in submission.command(found)
  chips.chip, chips.name = SimpleNamespace(platform="tpu"), "v5e-16"
  assert submission.submission(plan, base, "a.py", {}, None)["tpus"] == "v5e-16"


HYBRID = Candidate(cfg.Mesh(data=8, fsdp=8), cfg.Layout(shard="fsdp"), 1)


def test_on_several_nodes_the_first_advice_keeps_fsdp_within_a_node():
  backward = HYBRID._replace(layout=cfg.Layout(shard="fsdp", slow_axes="in_backward"))
  wide = Candidate(cfg.Mesh(data=1, fsdp=64), cfg.Layout(shard="fsdp"), 1)
  zero = HYBRID._replace(layout=cfg.Layout(shard="zero1"))
  waiting = [(False, 1.0, wide), (False, 3.0, HYBRID), (False, 2.0, backward), (False, 0.5, zero)]
  assert search._take_hybrid(waiting, 8) == [backward]
  assert [one for _, _, one in waiting] == [wide, HYBRID, zero]
  # It does not fit, or there is one node.
  assert search._take_hybrid([(True, 1.0, HYBRID), (False, 1.0, wide)], 8) == []
  inside = HYBRID._replace(mesh=cfg.Mesh(data=1, fsdp=8))
  assert search._take_hybrid([(False, 1.0, inside)], 8) == []


def test_sums_between_nodes_hide_in_the_backward_pass():
  made, rates = config(batch_size=64), rates_of("h100")
  shapes = build.experiment(
    made, devices=here().devices, datasets=made.data.abstract(made.batch_size)
  )
  sizes = shapes_of(shapes)._replace(parameters=10**9, flops=1e15)
  layouts = [cfg.Layout(shard="fsdp", slow_axes=axes) for axes in ("after", "in_backward")]
  for mesh in (HYBRID.mesh, cfg.Mesh(replica=8, data=1, fsdp=8)):
    ones = [Candidate(mesh, layout, 1) for layout in layouts]
    after, backward = (estimate(sizes, one, 64, rates).seconds for one in ones)
    assert after - backward > 0.015  # 0.5 GB of a device twice at 37.5 GB/s, less contention


def plan_of(sizes, arguments, temporaries=0):
  memory = SimpleNamespace(arguments=arguments, temporaries=temporaries)
  fit: Any = SimpleNamespace(mesh=SimpleNamespace(shape=sizes), memory=memory, limit=100)
  plan: Any = SimpleNamespace(rates=rates_of("h100"), fit=fit)
  return plans.hybrid_advice(plan)


def test_a_plan_advises_to_keep_fsdp_within_a_node():
  text = plan_of({"replica": 1, "data": 1, "fsdp": 64}, 9)
  assert text.startswith("fsdp 64 crosses nodes") and "mesh.fsdp=8," in text
  assert "mesh.fsdp=4," in plan_of({"fsdp": 16, "model": 2}, 9)
  assert plan_of({"replica": 8, "data": 1, "fsdp": 8}, 9) == ""
  assert plan_of({"data": 64}, 9) == plan_of({"fsdp": 64, "model": 8}, 1) == ""
  assert plan_of({"fsdp": 64}, 10) == plan_of({"fsdp": 64}, 9, 5) == ""  # too large for a node
