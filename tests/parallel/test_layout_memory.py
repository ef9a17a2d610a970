"""Memory of a device under a layout, read from compiled programs on 8 devices.

Formulas are of ZeRO, arXiv:1910.02054, sections 3 and 5, for float32 throughout: with
P parameters on N devices 4 P bytes of parameters, 4 P of gradients and 8 P of Adam's
moments, of which a stage splits the last, the last two, or all.
"""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale import config as cfg
from jaxscale import hlo, optim
from jaxscale.exchange import plain
from jaxscale.experiment import build
from jaxscale.experiment import make_layout as layout_parts
from jaxscale.hlo import memory_of
from jaxscale.mesh import batch_sharding, make_mesh
from jaxscale.models import make_transformer
from jaxscale.models.decoder import SHARDING
from jaxscale.models.remat import with_remat
from jaxscale.parallel import make_layout, stack_loss, stack_totals, with_gathered_params
from jaxscale.parallel.layout_exchange import exchange_axes
from jaxscale.parallel.rules import Rule
from jaxscale.training import replica_check
from jaxscale.training.state import abstract_state, make_init
from jaxscale.training.step import make_eval_step, make_train_step
from support.configs import small_config, tiny_language
from support.errors import config_error
from support.stacks import run_stack
from support.steps import on_mesh

pytestmark = pytest.mark.optimized

# Most of the time is the back end's, when memory and collectives are settled.
QUICK = {"xla_backend_optimization_level": 0}
N, WIDTH, HIDDEN, TOKENS, ROWS = 8, 128, 512, 8, 8
OF_LAYER = 4 * WIDTH**2 + 3 * WIDTH * HIDDEN + 2 * WIDTH  # parameters
TX = optim.adamw(1e-3)


def model(num_layers):
  sizes = dict(width=WIDTH, num_heads=8, hidden=HIDDEN)
  return make_transformer(vocab_size=128, num_layers=num_layers, **sizes)


def num_params(num_layers):
  return num_layers * OF_LAYER + 2 * 128 * WIDTH + WIDTH


def layout_of(stack, mesh, **options):
  shapes = jax.eval_shape(stack.init, jax.random.key(0))
  return make_layout(mesh, shapes, [Rule(*rule) for rule in SHARDING], **options)


def batch_on(mesh, **more):
  rows = jax.ShapeDtypeStruct((ROWS, TOKENS), jnp.int32, sharding=batch_sharding(mesh))
  return {"tokens": rows, "targets": rows} | more


def parts(stack, layout):
  init = lambda key: (stack.init(key), {})  # noqa: E731
  return init, TX, layout.mesh, plain(exchange_axes(layout))


@functools.cache
def step(num_layers, shard, remat="full", all_at_once=False):
  """Return a compiled train step and its mesh."""
  mesh = make_mesh(data=1, fsdp=N)
  stack = model(num_layers)
  layout = layout_of(stack, mesh, shard=shard)
  loss = stack_loss(stack, layout, remat=remat)
  if all_at_once:

    def whole_loss(params, model_state, batch, keys):
      totals = run_stack(stack, params, batch, remat=remat)
      return totals["loss"], (model_state, totals)

    loss = with_gathered_params(whole_loss, layout.gathers)
  made: jax.stages.Wrapped = make_train_step(loss, *parts(stack, layout)[1:], layout=layout)
  state = abstract_state(*parts(stack, layout), layout=layout)
  return made.lower(state, batch_on(mesh)).compile(QUICK), mesh


def temporaries(num_layers, **options):
  return memory_of(step(num_layers, "fsdp", **options)[0]).temporaries


def slope(**options):
  """Bytes of temporaries that a layer adds."""
  return (temporaries(16, **options) - temporaries(4, **options)) / 12


@pytest.mark.slow
def test_a_layer_adds_a_shard_to_the_memory_and_not_itself():
  whole, kept = 4 * OF_LAYER, 4 * ROWS // N * TOKENS * WIDTH
  four, eight, sixteen = (temporaries(n) for n in (4, 8, 16))
  # Its shard of the gradient, and of what the optimizer makes of it, and its input.
  for added in ((eight - four) / 4, (sixteen - eight) / 8):
    assert whole / N <= added <= 2 * whole / N + 2 * kept
  # What is measured tells that from a model that is gathered at the start.
  assert slope(all_at_once=True) >= whole


def test_what_entered_is_not_kept_without_remat():
  # All that a layer's backward pass wants else (models.stack): some 30 of its
  # inputs, and attention's weights.
  kept = 30 * 4 * ROWS // N * TOKENS * WIDTH + 8 * TOKENS**2 * 4
  assert slope(remat="none") <= 3 * 4 * OF_LAYER / N + kept


def test_what_layers_keep_is_what_remat_says():
  """Bytes that the backward pass is given, by shapes alone."""
  layers, tokens, width, hidden = 4, 2 * 32, 64, 128
  sizes = dict(num_layers=layers, width=width, num_heads=4, hidden=hidden)
  stack = make_transformer(vocab_size=256, **sizes, dtype="bfloat16")
  params = jax.eval_shape(stack.init, jax.random.key(0))
  ids = jax.ShapeDtypeStruct((2, 32), jnp.int32)

  def kept(remat):
    def loss(params, batch):
      return run_stack(stack, params, batch, remat=remat)["loss"]

    def backward(params, batch):
      return jax.vjp(lambda p: loss(p, batch), params)[1]

    found = jax.eval_shape(backward, params, {"tokens": ids, "targets": ids})
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(found))

  products = 3 * width + 2 * hidden  # q, k, v; gate, up
  assert kept("dots") == kept("branches") + 2 * layers * tokens * products
  # What attention adds; nothing backwards needs what the second branch does.
  assert kept("branches") == kept("full") + 2 * layers * tokens * width
  assert kept("none") > kept("dots")


@pytest.mark.parametrize("remat", ["full", "none"])
def test_gathers_run_in_the_loops(remat):
  compiled, mesh = step(16, "fsdp", remat)
  table = hlo.collectives(compiled, mesh)
  gathers = [r for r in table if r.kind == "all-gather"]
  assert all(r.axes == ("fsdp",) and r.times_known for r in gathers)
  sent = {
    n: sum(r.payload_bytes * r.times for r in gathers if r.times == n)
    for n in {r.times for r in gathers}
  }
  # A layer's 7 matrices forwards and again backwards; and table and head.
  assert sent[16] == 2 * 16 * 4 * (OF_LAYER - 2 * WIDTH)
  assert set(sent) == {1, 16}
  assert sent[1] <= 2 * 4 * 2 * 128 * WIDTH
  scatters = [r for r in table if r.kind == "reduce-scatter" and r.times == 16]
  assert sum(r.payload_bytes for r in scatters) == 4 * (OF_LAYER - 2 * WIDTH)


STAGES = {
  "none": lambda p: 4 * p + 8 * p,
  "zero1": lambda p: 4 * p + 8 * p / N,
  "zero2": lambda p: 4 * p + 8 * p / N,
  "fsdp": lambda p: 4 * p / N + 8 * p / N,
}


@pytest.mark.parametrize("shard", STAGES)
def test_the_state_is_as_large_as_the_formula_says(shard):
  memory = memory_of(step(16, shard)[0])
  p = num_params(16)
  assert memory.arguments == pytest.approx(STAGES[shard](p), rel=0.02)
  assert memory.aliased == pytest.approx(memory.arguments, rel=0.02)  # donated


def test_split_gradients_are_never_whole():
  p = num_params(16)
  whole, split = (memory_of(step(16, shard)[0]).temporaries for shard in ("zero1", "zero2"))
  assert whole >= 4 * p
  assert whole - split >= 0.8 * 4 * p * (1 - 1 / N)


def test_no_device_makes_the_whole_state():
  mesh = make_mesh(data=1, fsdp=N)
  stack = model(16)
  layout = layout_of(stack, mesh, shard="fsdp")
  lowered = make_init(*parts(stack, layout), layout=layout).lower(0, {})
  memory = memory_of(lowered.compile(QUICK))
  held = 12 * num_params(16) / N
  assert memory.outputs == pytest.approx(held, rel=0.02)
  assert memory.total <= 2 * held  # numbers that are made into the parameters


def test_two_all_reduces_a_block_forwards():
  num_layers = 4
  mesh = make_mesh(data=2, model=4)
  stack = model(num_layers)
  layout = layout_of(stack, mesh)
  made: jax.stages.Wrapped = make_eval_step(stack_totals(stack, layout), mesh, layout)
  params = abstract_state(*parts(stack, layout), layout=layout).params
  mask = jax.ShapeDtypeStruct((ROWS,), jnp.bool_, sharding=batch_sharding(mesh))
  compiled = made.lower(params, {}, batch_on(mesh, mask=mask)).compile(QUICK)
  table = [r for r in hlo.collectives(compiled, mesh) if "model" in r.axes]
  assert {r.kind for r in table} == {"all-reduce"} and all(r.times_known for r in table)
  rows = 4 * (ROWS // 2) * TOKENS
  blocks = [r for r in table if r.times == num_layers]
  assert sum(r.times for r in blocks) == 2 * num_layers
  assert {r.payload_bytes for r in blocks} == {rows * WIDTH}
  # The rows of the table; of the loss maxima, sums of exponents and of labels' logits,
  # and the best class. Nothing of the size of the logits.
  rest = sorted(r.payload_bytes for r in table if r.times == 1)
  assert rest == [rows, rows, 2 * rows, rows * WIDTH]


def config(**layout):
  split = dict(mesh=cfg.Mesh(data=1, fsdp=-1), layout=cfg.Layout(shard="fsdp", **layout))
  return tiny_language(batch_size=8, **split)


def trained(remat, optimizer):
  """Losses of three steps, and the last state."""
  settings = config(remat=remat, optimizer=optimizer)
  experiment = build.experiment(settings, datasets=settings.data.abstract(settings.batch_size))
  state, losses = experiment.init_state(), []
  tokens = np.random.default_rng(0).integers(0, 256, (8, 16)).astype(np.int32)
  batch = on_mesh(experiment.mesh, {"tokens": tokens, "targets": tokens})
  for _ in range(3):
    state, metrics = experiment.train_step(state, batch)
    losses.append(float(metrics["loss"]))
  return losses, state


@pytest.mark.slow
def test_what_waits_on_the_host_trains_the_same():
  losses, state = trained("offload", "host")
  plain_losses, plain_state = trained("full", "device")
  assert losses == plain_losses
  jax.tree.map(np.testing.assert_array_equal, state, plain_state)
  kinds = {x.sharding.memory_kind for x in jax.tree.leaves(state.opt_state) if x.ndim >= 2}
  assert kinds == {"pinned_host"}
  assert {x.sharding.memory_kind for x in jax.tree.leaves(state.params)} == {"device"}
  # The check of replicas reads it where it is.
  prints = []
  for x in map(replica_check.shared, (state, plain_state)):
    mesh = x.params["head"]["kernel"].sharding.mesh
    prints.append(replica_check.make_fingerprint(mesh, x)(x))
  np.testing.assert_array_equal(*prints)


@pytest.mark.parametrize("remat", ["full", "offload"])
def test_what_comes_into_a_layer_waits_on_the_host(remat):
  layer = with_remat(lambda w, h: jnp.tanh(h @ w), remat)
  h = jnp.ones((4, 8))
  _, pull = jax.vjp(layer, jnp.ones((8, 8)), h)
  kinds = {x.sharding.memory_kind for x in jax.tree.leaves(pull) if x.shape == h.shape}
  assert kinds == {"pinned_host" if remat == "offload" else "device"}


def test_a_device_that_has_no_memory_of_the_host_is_refused():
  memories = lambda: [SimpleNamespace(kind="device")]  # noqa: E731
  device = SimpleNamespace(platform="tpu", addressable_memories=memories)
  for options in ({"remat": "offload"}, {"optimizer": "host"}):
    with config_error(match="needs memory of the kind 'pinned_host'"):
      layout_parts.check_memory(config(**options), device)
  layout_parts.check_memory(config(remat="full"), device)


@pytest.mark.parametrize("shard, recomputes", [("zero1", False), ("zero2", False), ("fsdp", True)])
def test_only_gathered_parameters_make_a_model_a_remat(shard, recomputes):
  """XLA's CPU compiler does not optimize the convolutions of a remat."""
  layout = {"mesh": cfg.Mesh(fsdp=8), "layout": cfg.Layout(shard=shard)}
  config = small_config(model=cfg.CNN(features=(4,)), optimizer=cfg.SOAP(lr=0.1), **layout)
  lowered = build.experiment(config).lower_train_step()
  assert ("/checkpoint/" in lowered.as_text(debug_info=True)) == recomputes
