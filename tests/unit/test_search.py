"""The search for a layout: what it refuses, how it ranks, and what is submitted."""

import dataclasses
import json
import math
import os
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxscale import cli
from jaxscale import config as cfg
from jaxscale.config.loading import override
from jaxscale.errors import ConfigError
from jaxscale.experiment import build
from jaxscale.planning import candidates, fits, search_report, topologies
from jaxscale.planning.candidates import Candidate, as_given
from jaxscale.planning.estimate import estimate, facts_of
from jaxscale.planning.goal import Goal, goal_of
from jaxscale.planning.machine import rates_of
from jaxscale.planning.search import Considered, _keeps_as_much, _Search, search
from support.cases import all_slow_except

SOURCE = """from jaxscale import config as cfg

def get_config():
  return cfg.Config(
    model=cfg.Transformer(num_layers=2, width=32, num_heads=2, hidden=64),
    data=cfg.TextFiles(path="not/here", vocab_size=500, sequence_length=16),
    optimizer=cfg.AdamW(lr=1e-3), batch_size=16, epochs=1,
    mesh=cfg.Mesh(data=1, fsdp=-1), layout=cfg.Layout(shard="fsdp"),
  )
"""


@pytest.fixture(autouse=True)
def environment():
  """As it was: the command sets variables of its process."""
  before = dict(os.environ)
  yield
  os.environ.clear()
  os.environ.update(before)


def config(**changes):
  made: dict = {}
  exec(SOURCE, made)
  return dataclasses.replace(made["get_config"](), **changes)


def here(limit=1 << 40, count=4):
  """The simulated devices as chips of so much memory."""
  chip = topologies.Chip("cpu", 2 * limit, limit, {})
  return topologies.Chips(f"here-{count}", chip, jax.devices()[:count], "knl", count)


def simulated(name):
  """Those of a name, or four where it has none of ours."""
  kind, _, count = name.partition("-")
  return here(count=int(count) if kind == "knl" else 4)


def test_a_target_is_nearer_by_a_smaller_batch_where_the_noise_is_small():
  # Twice the batch takes 1.8 times as long: more examples a second.
  steps = {1024: 1.0, 2048: 1.8}

  def best(goal):
    def hours(size):
      return goal.measure(goal.steps(size, 1024, 1000), steps[size], 64)

    return min(steps, key=hours)

  assert best(Goal("time")) == 2048
  # At B >> B_noise twice the batch saves hardly a step; at B << B_noise half of them.
  assert best(Goal("target", noise_scale=200.0)) == 1024
  assert best(Goal("target", noise_scale=1e6)) == 2048
  studied = Goal("target", noise_scale=200.0, least_steps=100.0)
  assert studied.steps(200, 1, 1) == 200.0 and best(studied) == 1024
  chips = Goal("chip-hours").measure(3600, 1.0, 64)
  assert chips == 64 * Goal("time").measure(3600, 1.0, 64)


def test_a_goal_from_a_study(tmp_path):
  path = tmp_path / "study.json"
  path.write_text(json.dumps({"sizes": [], "fit": {"s_min": 90.0, "b_crit": 500.0}}))
  assert goal_of("target", study=path) == Goal("target", 500.0, 90.0)
  path.write_text(json.dumps({"sizes": [], "fit": None}))
  with pytest.raises(ConfigError, match="found no critical batch size"):
    goal_of("target", study=path)
  with pytest.raises(ConfigError, match="give --study FILE or --noise-scale N"):
    goal_of("target")
  with pytest.raises(ConfigError, match="give --rank target"):
    search(config(), here(), batch_sizes=[16, 32])


GIVEN = [
  {"mesh.data": "4", "mesh.fsdp": "1", "layout.shard": "none"},
  {"mesh.data": "2", "mesh.fsdp": "2", "layout.shard": "zero1"},
  {"layout.remat": "dots", "accumulate_steps": "2"},
  {"mesh.fsdp": "2", "mesh.model": "2", "layout.remat": "full"},
  {"mesh.fsdp": "1", "mesh.stage": "2", "mesh.data": "2", "layout.shard": "none",
   "accumulate_steps": "4", "layout.schedule": "1f1b"},
]  # fmt: skip


@pytest.mark.parametrize("which", all_slow_except(range(len(GIVEN)), 2, 3))
def test_no_program_takes_less_than_the_least(which):
  """What is refused for its memory would not fit: the bound is below the compiler's."""
  made, chips = override(config(), GIVEN[which]), here()
  one = as_given(made, 4)
  shapes = build.experiment(
    made, devices=chips.devices, datasets=made.data.abstract(made.batch_size)
  )
  facts = facts_of(shapes)
  guess = estimate(facts, one, rates_of("knl"))
  fit = fits.compile_for(made, chips)
  assert fit.memory is not None
  assert facts.state <= fit.memory.arguments
  # All of what is an argument but the batch is state.
  batch = sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for x in jax.tree.leaves(shapes.abstract_batch())
  )
  assert facts.state == pytest.approx(fit.memory.arguments - batch, rel=0.02)
  assert facts.state < guess.least <= fit.memory.total
  assert guess.least <= guess.memory and 0 < guess.seconds < 1


def considered(made, chips):
  """Every layout, and nothing compiled."""
  run = _Search(made, rates_of("knl"), Goal(), 1.0, lambda line: None)
  run.add_chips(chips, ())
  run.consider([made.batch_size], [made.exchange])
  return run.layouts.values()


def test_what_is_refused_is_refused_by_the_run():
  made, chips = config(batch_size=2), here()
  refused = [x for x in considered(made, chips) if x.state == "refused"]
  assert len(refused) >= 10 and all(x.reason for x in refused)
  divides = 0
  for layout in refused[:60]:
    one = layout.family.config(made) if "divide over its" in layout.reason else None
    with pytest.raises(ConfigError) as e:
      one = one or layout.family.config(made)
      data = made.data.abstract(made.batch_size)
      build.experiment(one, devices=chips.devices, datasets=data)
    divides += "divide over its" in layout.reason or str(e.value) == layout.reason
  assert divides == len(refused[:60])


@pytest.mark.slow
def test_memory_that_there_is_not():
  made = config()
  every = considered(made, here())
  few = {x.family: x for x in considered(made, here(limit=60_000))}
  lost = [x for x in every if x.state == "estimated" and not few[x.family].waiting]
  assert lost
  for layout in lost:
    assert few[layout.family].reason.startswith("cannot fit: at least ")
    assert min(guess.least for _, guess, _ in layout.waiting) > 60_000


def test_a_candidate_that_keeps_more_of_as_many_rows():
  def one(remat, micros):
    layout = cfg.Layout(shard="none", remat=remat)
    return Candidate(4, 16, cfg.Mesh(data=4), layout, cfg.AllReduce(), micros)

  assert _keeps_as_much(one("none", 1), one("dots", 2))
  assert _keeps_as_much(one("dots", 2), one("dots", 2))
  assert not _keeps_as_much(one("full", 1), one("dots", 2))
  assert not _keeps_as_much(one("none", 4), one("dots", 2))


@pytest.mark.parametrize(
  "changes, says",
  [
    ({"accumulate_steps": "2"}, {"accumulate_steps": "2"}),
    ({"mesh.fsdp": "2", "mesh.data": "2"}, {"mesh.data": "2", "mesh.fsdp": "2"}),
    ({"exchange": "HalfPrecision", "mesh.fsdp": "1", "mesh.data": "4",
      "layout.shard": "none"}, None),
  ],
)  # fmt: skip
def test_overrides_make_the_same_config(changes, says):
  base = config()
  made = override(base, changes)
  found = candidates.overrides(base, made)
  assert override(base, found) == made
  assert found == (says or changes)


def test_images_have_no_layers_to_split():
  made = cfg.Config(
    model=cfg.CNN(), data=cfg.Synthetic(num_examples=64, image_size=8),
    optimizer=cfg.SGD(lr=0.1), batch_size=16, epochs=1,
  )  # fmt: skip
  found = list(candidates.families(made, 4, 16, [made.exchange]))
  assert {x.mesh.model * x.mesh.stage for x in found} == {1}
  assert {x.layout.shard for x in found} == {"none", "zero1", "zero2", "fsdp"}
  assert all(isinstance(x, Considered) for x in considered(made, here()))
  normed = dataclasses.replace(made, model=cfg.CNN(batch_norm=True))
  assert {x.micros for x in candidates.variants(normed, found[0])} == {1}


@pytest.mark.slow
def test_the_best_is_no_worse_than_what_was_given_or_asked_for():
  told: list[str] = []
  also = [GIVEN[0], GIVEN[3]]
  found = search(config(), here(), minutes=0.02, also=also, say=told.append)
  compiled = [c for x in found.layouts for c in x.compiled]
  assert len(told) == len(compiled) >= 3
  assert "(as given)" in told[0] and sum("(asked for)" in line for line in told) == 2
  assert found.best.hours == min(c.hours for c in compiled)
  assert found.best.hours > 0 and found.layouts[0].best == found.best
  assert found.ended == "its 0.02 minutes were over"
  assert all(x.reason for x in found.layouts)
  page = search_report.text(found)
  assert "compiled, the best first" in page and "refused before compilation" in page
  assert " times their estimate" in page
  assert len(search_report.as_json(found)["layouts"]) == len(found.layouts) >= 30


def test_a_search_is_submitted(tmp_path, monkeypatch, capsys):
  path = tmp_path / "tiny.py"
  path.write_text(SOURCE)
  (tmp_path / "site.toml").write_text("gpus_per_node = 2\n[machine]\nper_node = 2\n")
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(topologies, "find_chips", simulated)
  argv = ["plan", "--config", "tiny.py", "--chips", "v5e-16", "--search"]
  argv += [
    "--json=plan.json",
    "--site=site.toml",
    "--minutes=0.01",
    "--config.clip_norm=1.0",
  ]
  assert cli.main(argv) == 0
  out = capsys.readouterr().out
  assert "searched " in out and "jaxscale submit --plan plan.json" in out
  plan = json.loads((tmp_path / "plan.json").read_text())
  submit = plan["submit"]
  assert submit["nodes"] == 2 and submit["overrides"]["clip_norm"] == "1.0"
  assert {x["state"] for x in plan["search"]["layouts"]} >= {"refused", "compiled"}
  dry = ["submit", "--plan", "plan.json", "--dry-run", "--executor=slurm"]
  assert cli.main(dry) == 0
  script = capsys.readouterr().out
  assert "#SBATCH --nodes=2" in script and "--config.clip_norm=1.0" in script
  assert cli.main([*dry, "--nodes=1", "--config.clip_norm=2.0"]) == 0
  script = capsys.readouterr().out
  assert "#SBATCH --nodes=1" in script and "--config.clip_norm=2.0" in script


@pytest.mark.parametrize(
  "argv, says",
  [
    (["submit", "--dry-run"], "--config: missing"),
    (["submit", "--plan=none.json"], "none.json: No such file"),
    (["submit", "--plan=a.json", "--config=digits"], "--plan has its own"),
    (["plan", "--config=tiny.py", "--chips=v5e-16", "--search", "--exchanges=Hlf"],
     "--exchanges=Hlf: "),
    (["plan", "--config=tiny.py", "--chips=v5e-16", "--search", "--rank=target"],
     "--rank=target: "),
  ],
)  # fmt: skip
def test_mistakes(argv, says, tmp_path, monkeypatch, capsys):
  (tmp_path / "tiny.py").write_text(SOURCE)
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(topologies, "find_chips", lambda name: here())
  assert cli.main(argv) == 2
  err = capsys.readouterr().err
  assert says in err and err.count("\n") == 1


def test_the_time_limit_of_a_plan():
  base = config()
  job = SimpleNamespace(limit=2.51)
  chips = SimpleNamespace(chip=SimpleNamespace(platform="cuda"))
  plan: Any = SimpleNamespace(
    config=base, step=SimpleNamespace(nodes=3, devices=24), job=job, chips=chips,
    rates=SimpleNamespace(per_node=8),
  )  # fmt: skip
  found = search_report.submission(plan, base, "a.py", {}, "alps", gpus_per_node=4)
  assert found == {
    "config": "a.py", "overrides": {}, "nodes": 3, "site": "alps", "time": "2:31:00",
  }  # fmt: skip
  line = "jaxscale submit --config a.py --nodes 3 --site alps --time 2:31:00"
  assert search_report.command(found) == line
  # Where no profile says how many GPUs a node has, the plan does.
  found = search_report.submission(plan, base, "a.py", {}, None)
  assert found["gpus_per_node"] == 8
  assert "--nodes 3 --time 2:31:00 --gpus-per-node 8" in search_report.command(found)
  chips.chip, chips.name = SimpleNamespace(platform="tpu"), "v5e-16"
  assert search_report.submission(plan, base, "a.py", {}, None)["tpus"] == "v5e-16"
