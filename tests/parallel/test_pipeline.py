"""Pipelines: the numbers of one device, the ticks and the memory that are claimed."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P, lax

from jaxscale import hlo
from jaxscale.collectives import vary
from jaxscale.parallel.pipeline import bubble, one_f_one_b, split_microbatches
from support import tiny_pipeline as tiny
from support.cases import all_slow_except
from support.errors import config_error
from support.trees import largest_distance

SCHEDULES = ("gpipe", "1f1b")
MESHES = {
  "2 stages": {"stage": 2},
  "4 stages": {"stage": 4},
  "2x4": {"data": 2, "stage": 4},
  "2x2x2": {"data": 2, "stage": 2, "model": 2},
}


def layer_on(mesh, **settings):
  """Return the layer for one device, whose hidden units may be split."""
  if "model" not in mesh.axis_names:
    return tiny.make_layer(**settings)
  return tiny.make_layer(lambda x: lax.psum(x, "model"), **settings)


@functools.cache
def expected(rows):
  return tiny.on_one_device(tiny.init(), tiny.make_batch(rows), tiny.make_layer())


# S, 2S, and numbers that S does not divide, fewer than it among them.
CASES = [
  (name, micros)
  for name, sizes in MESHES.items()
  for micros in sorted({1, sizes["stage"], 2 * sizes["stage"], 3 * sizes["stage"] + 1})
]
FEW = ("2 stages", 7), ("4 stages", 4), ("2x4", 8), ("2x2x2", 4)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("case", all_slow_except(CASES, *FEW), ids=str)
def test_the_numbers_of_one_device(schedule, case):
  name, micros = case
  mesh = tiny.mesh_of(**MESHES[name])
  rows = 2 * micros * mesh.shape.get("data", 1)
  step, put = tiny.piped(schedule, mesh, micros, tiny.run(layer_on(mesh)))
  grads, totals = step(*put(tiny.init(), tiny.make_batch(rows)))
  by_one, totals_of_one = expected(rows)
  assert largest_distance(grads, by_one) < 1e-6
  assert largest_distance(totals["loss"], totals_of_one["loss"]) < 1e-6
  for name in ("accuracy", "examples"):
    assert totals[name] == totals_of_one[name]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_bubbles_compute_reaches_nothing(schedule, skip):
  # The layers but the first make NaN of zeros and of the embedding alike.
  params, batch = tiny.init(), tiny.make_batch(6)
  params["layers"]["scale"][0], params["layers"]["scale"][1:] = -100, 5

  def layer(h, w):
    return 10 + jnp.sqrt(h - w["scale"]) + jnp.tanh(h @ w["up"]) @ w["down"]

  second = jax.tree.map(lambda w: w[1], params["layers"])
  for h in (jnp.zeros((1, tiny.WIDTH)), tiny.embed(params, batch)):
    assert np.isnan(layer(h, second)).any()
  by_one, _ = tiny.on_one_device(params, batch, layer)
  assert np.isfinite(largest_distance(by_one, by_one))
  mesh = tiny.mesh_of(stage=4)
  step, put = tiny.piped(schedule, mesh, 3, tiny.run(layer), skip=skip)
  grads, _ = step(*put(params, batch))
  assert largest_distance(grads, by_one) < 1e-6


def executed(schedule, micros, num_stages, **settings):
  """Count how often each stage ran its layers in a step; return the program too."""
  times = collections.Counter()
  layer = tiny.make_layer()

  def run_layers(layers, h):
    # That h is read keeps the call in the loop.
    stage = lax.axis_index("stage")
    jax.debug.callback(lambda s, _: times.update([int(s)]), stage, h[0, 0, 0])
    return tiny.run(layer)(layers, h)

  mesh = tiny.mesh_of(stage=num_stages)
  step, put = tiny.piped(schedule, mesh, micros, run_layers, **settings)
  compiled = step.lower(*put(tiny.init(), tiny.make_batch(micros))).compile()
  jax.block_until_ready(compiled(*put(tiny.init(), tiny.make_batch(micros))))
  jax.effects_barrier()
  return [times[s] for s in range(num_stages)], hlo.collectives(compiled, mesh)


@pytest.mark.slow
def test_stages_without_work_do_none():
  s, m = 4, 5
  # GPipe: forwards, and again in the backward pass. 1F1B: likewise, but for the last
  # stage, whose forward is in its backward.
  times, table = executed("gpipe", m, s)
  assert times == [2 * m] * s
  assert hlo.total(table, "collective-permute", "stage").times == 2 * (m + s - 1)
  times, table = executed("1f1b", m, s)
  assert times == [2 * m] * (s - 1) + [m]
  assert hlo.total(table, "collective-permute", "stage").times == 2 * (m + 2 * (s - 1))
  assert executed("gpipe", m, s, skip=False)[0] == [2 * (m + s - 1)] * s
  ticks = m + 2 * (s - 1)
  assert executed("1f1b", m, s, skip=False)[0] == [2 * ticks] * s


def test_the_bubble_of_the_papers():
  # arXiv:1811.06965, section 2.3: small where M >= 4 S; arXiv:2104.04473, section
  # 2.2.1: (p - 1)/m of the ideal time.
  assert bubble(8, 32) == 7 / 39
  lost = bubble(4, 8)
  assert lost / (1 - lost) == pytest.approx(3 / 8)


def temporary(schedule, micros, **settings):
  """Temporary bytes of a device; micro-batches stay as large."""
  mesh = tiny.mesh_of(stage=4)
  params = tiny.init(width=32, hidden=64)
  step, put = tiny.piped(schedule, mesh, micros, tiny.run(tiny.make_layer()), **settings)
  compiled = step.lower(*put(params, tiny.make_batch(2 * micros, 16))).compile()
  return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_memory_grows_with_micro_batches_in_gpipe_alone():
  micro = 2 * 16 * 32 * 4  # bytes of the activations between two layers
  # From 2S-1 on; the totals' and counters' few bytes aside.
  assert abs(temporary("1f1b", 32) - temporary("1f1b", 8)) < micro / 4
  grown = (temporary("gpipe", 32) - temporary("gpipe", 8)) / 24
  assert micro <= grown < 5 * micro


def test_a_ring_in_the_layers_is_computed_in_every_tick():
  """Its numbers are rows of test_parity.py, "stage x ring"."""
  turn = lambda h: lax.ppermute(h, "model", [(0, 1), (1, 0)])  # noqa: E731
  layer = lambda h, w: h + turn(h) * w["scale"]  # noqa: E731
  step, put = tiny.piped("1f1b", tiny.mesh_of(stage=2, model=2), 2, tiny.run(layer), tokens="model")
  with config_error("skip=False", match="run_layers permutes along 'model'"):
    step(*put(tiny.init(), tiny.make_batch(4)))


def test_what_would_hang_is_refused():
  def embed(params, batch):
    return lax.psum(tiny.embed(params, batch), "stage")

  mesh = tiny.mesh_of(stage=2)
  step, put = tiny.piped("1f1b", mesh, 2, tiny.run(tiny.make_layer()), embed=embed)
  with config_error(match=r"embed has a collective \(psum.*along 'stage'"):
    step(*put(tiny.init(), tiny.make_batch(4)))


def test_gradients_stay_apart_where_parameters_vary():
  """Cast to varying over the stages, parameters have each stage's own gradient."""
  mesh = tiny.mesh_of(stage=2)
  params, batch = tiny.init(), tiny.make_batch(4)

  def local(params, batch):
    ends = {k: vary(params[k], ("stage",)) for k in ("embed", "head")}
    parts = tiny.embed, tiny.run(tiny.make_layer()), tiny.finish
    grads, _ = one_f_one_b(*parts, params | ends, split_microbatches(batch, 2))
    return {k: jax.tree.map(lambda g: g[None], grads[k]) for k in ends}

  layers = dict.fromkeys(params["layers"], P("stage"))
  specs = {"embed": P(), "head": P(), "layers": layers}
  mapped = jax.shard_map(local, mesh=mesh, in_specs=(specs, P()), out_specs=P("stage"))
  grads = jax.jit(mapped)(params, batch)
  by_one, _ = expected(4)
  table, kernel = grads["embed"]["table"], grads["head"]["kernel"]
  assert largest_distance(table[0], by_one["embed"]["table"]) < 1e-6
  assert largest_distance(kernel[1], by_one["head"]["kernel"]) < 1e-6
  assert not table[1].any() and not kernel[0].any()
