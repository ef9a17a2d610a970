"""Pipelines: the numbers of one device, the ticks and the memory that are claimed."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxscale import hlo
from jaxscale.collectives import vary
from jaxscale.errors import ConfigError
from jaxscale.models.attention import attention
from jaxscale.parallel.pipeline import bubble, one_f_one_b, split_microbatches, stage_microbatches
from jaxscale.parallel.sequence import split
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
  """The layer as one device has it, its hidden units perhaps split."""
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


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bfloat16_activations(schedule):
  mesh = tiny.mesh_of(stage=2, model=2)
  step, put = tiny.piped(
    schedule,
    mesh,
    4,
    tiny.run(layer_on(mesh, dtype=jnp.bfloat16)),
    embed=lambda p, b: tiny.embed(p, b).astype(jnp.bfloat16),
  )
  grads, totals = step(*put(tiny.init(), tiny.make_batch(8)))
  by_one, totals_of_one = expected(8)
  assert all(g.dtype == np.float32 for g in jax.tree.leaves(grads))
  # bfloat16 has 8 bits: 4 layers against float32.
  assert largest_distance(grads, by_one) < 2e-2
  assert largest_distance(totals["loss"], totals_of_one["loss"]) < 2e-3


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
  assert executed("1f1b", m, s, skip=False)[0] == [2 * (m + 2 * (s - 1))] * s


def step_time(schedule, num_stages, micros, skip, forward=1.0, backward=2.0):
  """A step's time, tick by tick, where a tick is as long as its longest stage."""
  done_forward, done_backward = {}, {}
  time, tick = 0.0, 0
  while len(done_backward) < num_stages * micros:
    costs = []
    for s in range(num_stages):
      cost = 0.0
      m = sum(key[0] == s for key in done_forward)
      ready = s == 0 or done_forward.get((s - 1, m), tick) < tick
      if m < micros and ready:
        done_forward[s, m] = tick
        cost += forward
      b = sum(key[0] == s for key in done_backward)
      if schedule == "gpipe" and len(done_forward) < num_stages * micros:
        ready = False
      elif s == num_stages - 1:
        ready = (s, b) in done_forward
      else:
        ready = done_backward.get((s + 1, b), tick) < tick
      if schedule == "gpipe" and done_forward.get((num_stages - 1, micros - 1)) == tick:
        ready = False  # the backward is a loop of its own
      if b < micros and ready:
        done_backward[s, b] = tick
        cost += backward
      costs.append(cost)
    time += max(costs) if skip else forward + backward
    tick += 1
  return time


@pytest.mark.parametrize("micros", [1, 3, 4, 8, 13])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_the_bubble_is_that_of_the_ticks(num_stages, micros):
  of_use = 3.0 * micros
  for schedule, skip in (("gpipe", True), ("1f1b", True), ("1f1b", False)):
    time = step_time(schedule, num_stages, micros, skip)
    assert bubble(schedule, num_stages, micros, skip=skip) == pytest.approx(1 - of_use / time)


def test_the_bubble_of_the_papers():
  # arXiv:1811.06965, section 2.3: small where M >= 4 S; arXiv:2104.04473, section
  # 2.2.1: (p - 1)/m of the ideal time.
  assert bubble("gpipe", 8, 32) == 7 / 39
  lost = bubble("1f1b", 4, 8)
  assert lost / (1 - lost) == pytest.approx(3 / 8)
  with pytest.raises(ConfigError, match=r"^schedule='zb': give 'gpipe' or '1f1b'$"):
    bubble("zb", 2, 2)  # pyright: ignore[reportArgumentType]


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


@pytest.mark.slow
def test_without_remat_gpipe_keeps_what_the_layers_keep():
  assert temporary("gpipe", 16, remat=False) > 2 * temporary("gpipe", 16)


@pytest.mark.parametrize("schedule", all_slow_except(SCHEDULES, "1f1b"))
def test_a_ring_in_the_layers(schedule):
  """Tokens split over `model`, keys going round in every layer of every stage."""
  mesh = tiny.mesh_of(stage=2, model=2)
  ring = split(axis="model", attend="ring")

  def make(attend):
    def layer(h, w):
      heads = (0.3 * h * w["scale"]).reshape(*h.shape[:2], 2, -1)
      h = h + attend(heads, heads, heads, causal=True).reshape(h.shape)
      return h + jnp.tanh(h @ w["up"]) @ w["down"]

    return layer

  def piped(**settings):
    return tiny.piped(schedule, mesh, 2, tiny.run(make(ring.attend)), tokens="model", **settings)

  params, batch = tiny.init(), tiny.make_batch(4)
  step, put = piped(skip=False)
  grads, totals = step(*put(params, batch))
  by_one, totals_of_one = tiny.on_one_device(params, batch, make(attention))
  assert largest_distance(grads, by_one) < 1e-6
  assert totals["examples"] == totals_of_one["examples"]

  step, put = piped()
  with config_error("skip=False", match="run_layers: permutes along 'model'"):
    step(*put(params, batch))


def test_what_would_hang_is_refused():
  def embed(params, batch):
    return lax.psum(tiny.embed(params, batch), "stage")

  mesh = tiny.mesh_of(stage=2)
  step, put = tiny.piped("1f1b", mesh, 2, tiny.run(tiny.make_layer()), embed=embed)
  with pytest.raises(ConfigError, match=r"embed: has a collective \(psum.*along 'stage'"):
    step(*put(tiny.init(), tiny.make_batch(4)))
  with pytest.raises(ConfigError, match=r"^num_microbatches=3: does not divide the 4 rows"):
    split_microbatches(tiny.make_batch(4), 3)


def test_gradients_stay_apart_where_parameters_vary():
  """Cast to varying over the stages, parameters have each stage's own gradient."""
  mesh = tiny.mesh_of(stage=2)
  params, batch = tiny.init(), tiny.make_batch(4)

  def local(params, batch):
    ends = {k: vary(params[k], ("stage",)) for k in ("embed", "head")}
    grads, _ = one_f_one_b(
      tiny.embed,
      tiny.run(tiny.make_layer()),
      tiny.finish,
      params | ends,
      split_microbatches(batch, 2),
    )
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


def test_own_micros_are_the_outputs():
  mesh = tiny.mesh_of(stage=4)
  micros = np.arange(8)[:, None]
  own = jax.shard_map(stage_microbatches, mesh=mesh, in_specs=P(), out_specs=P("stage"))
  np.testing.assert_array_equal(jax.jit(own)(micros), micros)
