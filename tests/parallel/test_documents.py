"""Documents packed into rows: none sees another, in every form of attention and layout."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from jaxscale import config as cfg
from jaxscale import data
from jaxscale.experiment import build
from jaxscale.mesh import batch_axes, batch_sharding, make_mesh
from jaxscale.models import make_transformer
from jaxscale.models.attention import attention, document_positions, fused_attention
from jaxscale.models.decoder import SHARDING
from jaxscale.models.remat import REMAT
from jaxscale.models.stack import stack_logits
from jaxscale.parallel import Rule, gpipe_grads, make_layout, one_f_one_b_grads, stack_loss
from jaxscale.parallel.layout_exchange import exchange_axes
from jaxscale.parallel.ring import ring_attention
from jaxscale.parallel.run_stack import stack_totals
from jaxscale.parallel.sequence import all_to_all_attention
from jaxscale.training.state import init_state
from jaxscale.training.step import make_eval_step, make_train_step
from jaxscale.training.types import StepOptions
from support.attention64 import attention64
from support.cases import all_slow_except
from support.compiling import fast_compile_options
from support.configs import tiny_language
from support.parity_table import LAYOUTS, MICRO_BATCHES, Case
from support.stacks import run_stack
from support.tiny_pipeline import mesh_of
from support.trees import largest_distance, relative_distance

ROWS, TOKENS, VOCAB = 32, 16, 32
SIZES: Any = dict(vocab_size=VOCAB, num_layers=4, width=16, num_heads=4, hidden=32, pad_vocab_to=1)
# The tokens of the documents in each row; some begin in the middle of a device's tokens.
LENGTHS = [(5, 11), (16,), (8, 8), (1, 15), (3, 4, 9), (7, 2, 7), (15, 1), (2, 2, 12)]


@functools.cache
def documents(rows=ROWS):
  """Numbers of the documents, int32 [rows, tokens]."""
  each = [np.repeat(np.arange(len(n)), n) for n in LENGTHS]
  return np.stack([each[i % len(each)] for i in range(rows)]).astype(np.int32)


def batch(seed=0):
  """Return a packed batch; no token predicts one of another document."""
  rng = np.random.default_rng(seed)
  tokens = rng.integers(0, VOCAB, (ROWS, TOKENS + 1)).astype(np.int32)
  inside = documents()[:, 1:] == documents()[:, :-1]
  inside = np.pad(inside, ((0, 0), (0, 1)))
  targets = np.where(inside, tokens[:, 1:], -1)
  return {"tokens": tokens[:, :-1].copy(), "targets": targets, "documents": documents()}


def changed(batch, number):
  """Return a batch with other tokens in the documents with a number."""
  other = np.where(batch["documents"] == number, (batch["tokens"] + 7) % VOCAB, batch["tokens"])
  return batch | {"tokens": other}


def unpacked(batch):
  """Return the documents of a batch, each in a row of its own with padding at its end."""
  tokens, targets = [], []
  for row, numbers in enumerate(batch["documents"]):
    for number in np.unique(numbers):
      its = numbers == number
      pad = 0, TOKENS - its.sum()
      tokens.append(np.pad(batch["tokens"][row][its], pad))
      targets.append(np.pad(batch["targets"][row][its], pad, constant_values=-1))
  return {"tokens": np.stack(tokens), "targets": np.stack(targets)}


STACK = make_transformer(**SIZES)


@functools.cache
def params():
  with jax.ensure_compile_time_eval():  # may first be needed while a step is traced
    return jax.tree.map(lambda x: np.asarray(5 * x), STACK.init(jax.random.key(0)))


def loss_and_grads(stack, batch, **options):
  def loss(params):
    totals = run_stack(stack, params, batch, **options)
    return totals["loss"] / totals["examples"].astype(jnp.float32)

  return jax.jit(jax.value_and_grad(loss))(params())


def test_positions_begin_at_zero_in_each_document():
  found = np.asarray(document_positions(jnp.asarray(documents())))
  for row, lengths in enumerate(LENGTHS):
    assert found[row].tolist() == [i for n in lengths for i in range(n)]


def test_packed_rows_have_the_loss_of_their_documents():
  loss, grads = loss_and_grads(STACK, batch())
  alone, own = loss_and_grads(STACK, unpacked(batch()))
  assert float(loss) == pytest.approx(float(alone), rel=1e-6)
  assert relative_distance(grads, own) < 2e-6
  logits = np.asarray(jax.jit(functools.partial(stack_logits, STACK))(params(), batch()))
  each = np.asarray(jax.jit(functools.partial(stack_logits, STACK))(params(), unpacked(batch())))
  row = 0
  for i, numbers in enumerate(documents()):
    for number in np.unique(numbers):
      its = numbers == number
      np.testing.assert_allclose(logits[i][its], each[row][: its.sum()], rtol=0, atol=2e-5)
      row += 1
  # Without the numbers, the documents would be one.
  joined = {k: v for k, v in batch().items() if k != "documents"}
  assert abs(float(loss_and_grads(STACK, joined)[0] / loss) - 1) > 1e-3


@pytest.mark.parametrize("remat", all_slow_except([n for n in REMAT if n != "none"], "full"))
def test_remat_knows_the_documents(remat):
  if remat == "offload":
    pytest.skip("needs memory of the host beside that of the device")
  expected = loss_and_grads(STACK, batch())
  assert relative_distance(loss_and_grads(STACK, batch(), remat=remat), expected) < 1e-6


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_documents_are_apart_in_half_precision(dtype):
  stack = make_transformer(**SIZES, dtype=jnp.dtype(dtype))
  logits = jax.jit(functools.partial(stack_logits, stack))
  one, other = (np.asarray(logits(params(), b)) for b in (batch(), changed(batch(), 1)))
  moved = (one != other).any(-1)
  assert moved[documents() == 1].mean() > 0.9 and not moved[documents() != 1].any()
  exact = loss_and_grads(STACK, batch())[0]
  assert float(loss_and_grads(stack, batch())[0]) == pytest.approx(float(exact), rel=0.02)


def test_a_mask_of_rows_counts_beside_documents():
  half, b = np.arange(ROWS) < ROWS // 2, batch()
  totals = run_stack(STACK, params(), b | {"mask": half})
  first = run_stack(STACK, params(), {k: v[: ROWS // 2] for k, v in b.items()})
  assert int(totals["examples"]) == int(first["examples"]) == (b["targets"][half] >= 0).sum()
  assert float(totals["loss"]) == pytest.approx(float(first["loss"]), rel=1e-6)


# Attention alone.

HEADS, GROUPS, WIDTH = 8, 4, 4
MODEL = 4  # devices that split the tokens
SPLIT = {
  "ring": (ring_attention, {}),
  "ring, small blocks": (ring_attention, {"block": 3}),
  "ring, blocks of 1": (ring_attention, {"block": 1}),
  "all_to_all": (all_to_all_attention, {}),
}


def fused(*args, **options):
  """Compute what JAX gives cuDNN, by JAX's form for CPUs."""
  with jax.numpy_dtype_promotion("standard"):
    return fused_attention(*args, **options, implementation="xla")


WHOLE = {"xla": attention, "fused": fused}


def inputs(tokens=TOKENS):
  rng = np.random.default_rng(1)
  shapes = [(8, tokens, heads, WIDTH) for heads in (HEADS, GROUPS, GROUPS, HEADS)]
  return [np.float32(rng.normal(size=shape)) for shape in shapes]


def order_of(way):
  if not way.startswith("ring"):
    return np.arange(TOKENS)
  pieces = np.arange(TOKENS).reshape(2 * MODEL, -1)
  return np.stack([pieces[:MODEL], pieces[::-1][:MODEL]], axis=1).reshape(-1)


@functools.cache
def attends(way, causal):
  """Return a jitted (q, k, v, dout, documents) -> (out, dq, dk, dv)."""

  def local(attend, q, k, v, dout, documents):
    f = functools.partial(attend, causal=causal, documents=documents)
    out, pull = jax.vjp(f, q, k, v)
    return out, *pull(dout)

  if way in WHOLE:
    return jax.jit(functools.partial(local, WHOLE[way]))
  attend, options = SPLIT[way]
  f = functools.partial(local, functools.partial(attend, axis="model", **options))
  spec = P("data", "model")
  return jax.jit(jax.shard_map(f, mesh=mesh_of(data=2, model=MODEL), in_specs=spec, out_specs=spec))


def apply(way, causal, *arrays):
  order = order_of(way)
  with jax.numpy_dtype_promotion("standard" if way == "fused" else "strict"):
    results = attends(way, causal)(*(x[:, order] for x in arrays))
  return tuple(np.asarray(x)[:, np.argsort(order)] for x in results)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("way", [*WHOLE, *SPLIT])
def test_attention_is_exact_within_documents(way, causal):
  expected = attention64(*inputs(), causal=causal, documents=documents(8))
  assert largest_distance(apply(way, causal, *inputs(), documents(8)), expected) < 1e-6


@pytest.mark.parametrize("causal", [True, False])
def test_a_token_that_fused_attention_adds_belongs_to_no_document(causal):
  arrays, numbers = inputs(15), documents(8)[:, :15]
  expected = attention64(*arrays, causal=causal, documents=numbers)
  with jax.numpy_dtype_promotion("standard"):
    found = attends("fused", causal)(*arrays, numbers)
  assert largest_distance(found, expected) < 1e-6


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("way", [*WHOLE, *SPLIT])
def test_nothing_of_another_document_reaches_attention(way, causal):
  """Outputs and gradients of all documents but one keep every bit."""
  numbers, arrays = documents(8), inputs()
  its = numbers == 1
  others = [np.where(its[..., None, None], -2 * x - 1, x) for x in arrays]
  before, after = (apply(way, causal, *some, numbers) for some in (arrays, others))
  for x, y in zip(before, after, strict=True):
    np.testing.assert_array_equal(x[~its], y[~its])
    assert (x[its] != y[its]).any(-1).mean() > 0.5


# Layouts.

CASES = {"one device": Case({})} | MICRO_BATCHES | LAYOUTS
QUICK = "data x fsdp x model", "data x ring", "data x all-to-all", "stage x ring, 1f1b"
QUICK = (*QUICK, "fsdp x stage x model", "data x stage, 1f1b", "data x model, tokens too")


def rules():
  return [Rule(*rule) for rule in SHARDING]


def placed(case, stack):
  devices = int(np.prod([*case.mesh.values()]))
  mesh = make_mesh(devices=jax.devices()[:devices], **case.mesh)
  return mesh, make_layout(
    mesh, jax.eval_shape(stack.init, jax.random.key(0)), rules(), **dict(case.options)
  )


@functools.cache
def step_of(name):
  """Return batch -> (metrics, updated parameters) of one step of SGD."""
  case = CASES[name]
  mesh, layout = placed(case, STACK)
  loss: Any = stack_loss(STACK, layout)
  if "stage" in mesh.axis_names:
    loss = {"gpipe": gpipe_grads, "1f1b": one_f_one_b_grads}[case.schedule](STACK, layout)
  tx, exchange = optax.sgd(1.0), case.exchange(exchange_axes(layout))
  state = init_state(lambda key: (params(), {}), tx, mesh, exchange, layout=layout, seed=0)
  where, start = jax.tree.map(lambda x: x.sharding, state), jax.device_get(state)
  options = StepOptions(num_microbatches=case.micros, seed=0)
  step: Any = make_train_step(loss, tx, mesh, exchange, layout=layout, options=options)
  given = jax.device_put(batch(), batch_sharding(mesh))
  step = step.lower(state, given).compile(compiler_options=fast_compile_options())

  def run(batch):
    rows = jax.device_put(batch, batch_sharding(mesh))
    state, metrics = step(jax.device_put(start, where), rows)
    return jax.device_get((metrics["loss"], state.params))

  return run


@pytest.mark.parametrize("name", all_slow_except(list(CASES)[1:], *QUICK))
def test_a_layout_trains_packed_rows_as_one_device(name):
  expected, found = step_of("one device")(batch()), step_of(name)(batch())
  assert relative_distance(found, expected) < 3e-6
  assert float(found[0]) == pytest.approx(float(expected[0]), rel=1e-6)


@pytest.mark.parametrize("name", all_slow_except(CASES, "one device", *QUICK))
def test_no_gradient_comes_from_another_document(name):
  """The loss of document 1 and its gradients keep every bit if document 0 changes."""
  b = batch()
  b = b | {"targets": np.where(b["documents"] == 1, b["targets"], -1)}
  before, after, other = (step_of(name)(x) for x in (b, changed(b, 0), changed(b, 1)))
  jax.tree.map(np.testing.assert_array_equal, before, after)
  assert before[0] != other[0]


@functools.cache
def states_of(name):
  """Return batch -> the outputs of the last layer and the documents of the same rows."""

  def finish(p, h, batch, ops):
    return {"h": h, "documents": batch["documents"]}

  case = CASES[name]
  mesh, layout = placed(case, STACK)
  totals = stack_totals(STACK._replace(finish=finish), layout)
  rows = (*batch_axes(mesh), *(("stage",) if "stage" in mesh.axis_names else ()))
  is_split = layout.splits != "layers" and "model" in mesh.axis_names
  by_token = P(rows, "model" if is_split else None)
  whole = P(rows, "model" if "model" in layout.token_axes else None)

  def local(params, batch):
    return totals(params, {}, batch)

  specs = layout.param_specs, P(batch_axes(mesh))
  out = {"h": by_token, "documents": whole}
  f = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out))
  return lambda batch: jax.device_get(f(params(), batch))


@pytest.mark.parametrize("name", all_slow_except(LAYOUTS, *QUICK))
def test_no_logit_moves_with_another_document(name):
  """Logits are functions of the outputs of a token's last layer."""
  before, after = states_of(name)(batch()), states_of(name)(changed(batch(), 1))
  np.testing.assert_array_equal(before["documents"], after["documents"])
  moved = (before["h"] != after["h"]).any(-1)
  its = before["documents"] == 1
  assert its.sum() == (documents() == 1).sum()
  assert moved[its].mean() > 0.9 and not moved[~its].any()


class Words(nn.Module):
  @nn.compact
  def __call__(self, tokens):
    return nn.Dense(VOCAB)(nn.Embed(VOCAB, 8)(tokens))


class PackedWords(nn.Module):
  @nn.compact
  def __call__(self, tokens, documents):
    return Words()(tokens)


class Own(cfg.Model):
  known: bool = False

  def build(self, context):
    return PackedWords() if self.known else Words()


@pytest.mark.parametrize("known", [False, True])
def test_a_model_that_gets_no_documents_is_noted(known):
  info = data.TextInfo("packed", VOCAB, TOKENS, arrays={"documents": ((TOKENS,), "int32")})
  rows = data.Dataset(info, ROWS, lambda at, draws: {k: x[at] for k, x in batch().items()})
  config = tiny_language(model=Own(known=known), batch_size=8, epochs=1, mesh=cfg.Mesh(data=1))
  made = build.experiment(config, devices=jax.devices()[:1], datasets=(rows, rows))
  assert len([line for line in made.notes if "packed rows without their documents" in line]) == (
    not known
  )


def test_evaluations_know_the_documents():
  case = CASES["data x ring"]
  mesh, layout = placed(case, STACK)
  evaluate = make_eval_step(stack_totals(STACK, layout), mesh, layout)
  b = batch() | {"mask": np.arange(ROWS) < ROWS - 3}
  found = evaluate(params(), {}, jax.device_put(b, batch_sharding(mesh)))
  expected = run_stack(STACK, params(), b)
  for key in ("accuracy", "examples"):
    assert int(found[key]) == int(expected[key])
  assert float(found["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-6)
