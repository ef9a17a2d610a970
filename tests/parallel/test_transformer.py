"""The language model against Hugging Face's, float64 numpy, and published sizes."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from jaxscale import config as cfg
from jaxscale import data
from jaxscale.experiment import build
from jaxscale.models import RopeScaling, attention, make_transformer
from jaxscale.models.decoder import SHARDING
from jaxscale.models.stack import stack_logits
from support import golden_models
from support.attention64 import attention64
from support.cases import all_slow_except
from support.configs import tiny_language
from support.errors import config_error
from support.split_layers import on_two_devices
from support.stacks import run_stack
from support.steps import on_mesh

SIZES = dict(vocab_size=40, num_layers=2, width=24, num_heads=6, num_kv_heads=2, hidden=20)
STACK = make_transformer(**SIZES, pad_vocab_to=16)
LOGITS = jax.jit(functools.partial(stack_logits, STACK))


@functools.cache
def params():
  """Parameters of a spread that makes every part count."""
  leaves, tree = jax.tree.flatten(STACK.init(jax.random.key(0)))
  rng = np.random.default_rng(0)
  return tree.unflatten(leaf + rng.normal(0, 0.2, leaf.shape).astype(np.float32) for leaf in leaves)


def batch(rows=3, tokens=10, seed=0):
  rng = np.random.default_rng(seed)
  targets = rng.integers(-1, 40, (rows, tokens)).astype(np.int32)
  return {"tokens": np.abs(rng.permuted(targets)), "targets": targets}


# Llama 2 7B (arXiv:2307.09288, table 1), Llama 3 8B (arXiv:2407.21783, table 3), both as
# released, and TinyLlama (arXiv:2401.02385, table 1).
PUBLISHED = """
parameters      vocab_size num_layers width num_heads num_kv_heads hidden
6_738_415_616   32_000     32         4096  32        32           11_008
8_030_261_248   128_256    32         4096  32        8            14_336
1_100_048_384   32_000     22         2048  32        4            5632
"""


def test_parameters_are_as_many_as_published():
  (_, *names), *rows = (line.split() for line in PUBLISHED.strip().splitlines())
  for published, *numbers in rows:
    sizes = dict(zip(names, map(int, numbers), strict=True))
    leaves = jax.tree.leaves(jax.eval_shape(make_transformer(**sizes).init, jax.random.key(0)))
    assert sum(leaf.size for leaf in leaves) == int(published)
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype("float32")}


LLAMA31 = dict(rope_theta=100.0, num_heads=2, num_kv_heads=1)
HUGGING_FACE = {
  "hf_llama": {},
  "hf_qwen3": dict(rope_theta=1e6, norm_eps=1e-6, qk_norm=True, head_width=8),
  "hf_qwen2": dict(rope_theta=1e6, norm_eps=1e-6, qkv_bias=True),
  "hf_llama31": LLAMA31 | dict(rope_scaling=RopeScaling(8.0, 1.0, 4.0, 64)),
}


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_is_what_hugging_face_computes(name):
  weights, probes, there = golden_models.load(name)
  stack = make_transformer(**SIZES | HUGGING_FACE[name], pad_vocab_to=1)
  params = golden_models.from_llama(weights)
  shapes = jax.eval_shape(stack.init, jax.random.key(0))
  assert jax.tree.map(np.shape, params) == jax.tree.map(lambda x: x.shape, shapes)
  tokens = there["tokens"].astype(np.int32)
  batch = {"tokens": tokens, "targets": np.roll(tokens, -1, 1)}
  logits = jax.jit(functools.partial(stack_logits, stack))(params, batch)
  np.testing.assert_allclose(logits, there["logits"], rtol=1e-5, atol=1e-5)

  def loss(params):
    totals = run_stack(stack, params, batch)
    return totals["loss"] / totals["examples"].astype(jnp.float32)

  found = golden_models.to_llama(jax.jit(jax.grad(loss))(params))
  assert found.keys() == probes.keys()
  for key, recorded in probes.items():
    probe = golden_models.probe(found[key])
    np.testing.assert_allclose(probe, recorded, rtol=2e-5, atol=2e-5, err_msg=key)


def np_softmax(x):
  e = np.exp(x - x.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)


def test_padding_of_the_vocabulary_changes_no_logit():
  """Hugging Face's models, above, have none."""
  p = params()
  table, kernel = p["embed"]["table"][:40], p["head"]["kernel"][:, :40]
  whole = p | {"embed": {"table": table}, "head": p["head"] | {"kernel": kernel}}
  plain = make_transformer(**SIZES, pad_vocab_to=1)
  logits = LOGITS(p, batch())
  assert logits.dtype == jnp.float32 and logits.shape == (3, 10, 40)
  np.testing.assert_allclose(logits, stack_logits(plain, whole, batch()), 1e-5, 2e-5)


@pytest.mark.parametrize("mask", [None, np.array([True, False, True])])
def test_totals_count_what_is_to_be_predicted(mask):
  b = batch()
  counts = b["targets"] >= 0
  assert not counts.all()
  if mask is not None:
    b, counts = b | {"mask": mask}, counts & mask[:, None]
  logits = np.float64(LOGITS(params(), b))
  chosen = np.maximum(b["targets"], 0)
  likely = np.log(np.take_along_axis(np_softmax(logits), chosen[..., None], -1))[..., 0]
  totals = jax.jit(functools.partial(run_stack, STACK))(params(), b)
  np.testing.assert_allclose(totals["loss"], -likely[counts].sum(), rtol=1e-5)
  assert int(totals["examples"]) == counts.sum()
  hits = (logits.argmax(-1) == b["targets"]) & counts
  assert int(totals["accuracy"]) == hits.sum()
  assert totals["accuracy"].dtype == totals["examples"].dtype == jnp.int32


def np_smoothed(params, b, smoothing):
  """Cross entropy against (1 - e) onehot + e / tokens (arXiv:1512.00567, §7)."""
  counts = b["targets"] >= 0
  target = np.eye(40)[b["targets"][counts]] * (1 - smoothing) + smoothing / 40
  return -(target * np.log(np_softmax(np.float64(LOGITS(params, b))[counts]))).sum(-1)


@functools.cache
def smoothed(model):
  """(metrics of a step, parameters after it, totals of evaluation)."""
  layers = dict(num_layers=2, width=24, num_heads=6, num_kv_heads=2, hidden=20)
  config = tiny_language(
    model=cfg.Transformer(**layers, pad_vocab_to=16),
    data=cfg.Text(sequence_length=10),
    optimizer=cfg.SGD(lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0),
    schedule=cfg.Steps(),
    batch_size=4,
    loss=cfg.CrossEntropy(label_smoothing=0.1),
    mesh=cfg.Mesh(model=model),
  )
  info = data.TextInfo("words", 40, 10)
  datasets = tuple(x._replace(info=info) for x in config.data.abstract(4))
  built = build.experiment(config, devices=jax.devices()[:model], datasets=datasets)
  state = built.init_state()
  where = jax.tree.map(lambda x: x.sharding, state.params)
  own = jax.tree.map(np.array, params())  # a step gives its state away
  state = state._replace(params=jax.device_put(own, where))
  rows = on_mesh(built.mesh, batch(rows=4))
  totals = jax.device_get(built.eval_step(state.params, {}, rows))
  state, metrics = built.train_step(state, rows)
  return jax.device_get((metrics, state.params, totals))


@pytest.mark.parametrize("model", all_slow_except([1, 2], 2))
def test_a_config_smooths_labels_in_training_alone(model):
  """Also where the vocabulary, with its padding, is split over two devices."""
  b = batch(rows=4)
  metrics, after, totals = smoothed(model)
  rough, exact = (np_smoothed(params(), b, e) for e in (0.1, 0.0))
  np.testing.assert_allclose(metrics["loss"], rough.mean(), rtol=1e-6)
  np.testing.assert_allclose(totals["loss"], exact.sum(), rtol=1e-6)
  assert abs(rough.mean() / exact.mean() - 1) > 1e-3
  if model > 1:
    moves = (jax.tree.map(np.subtract, p, params()) for p in (after, smoothed(1)[1]))
    assert_close(*moves)


def test_padding_of_the_vocabulary_changes_nothing():
  """The equations above have no padding; the rest of its rows is zero, and stays so."""
  padded, whole = STACK.init(jax.random.key(1)), make_transformer(**SIZES, pad_vocab_to=1)
  plain = whole.init(jax.random.key(1))
  np.testing.assert_array_equal(padded["embed"]["table"][:40], plain["embed"]["table"])
  assert padded["embed"]["table"].shape == (48, 24)
  assert padded["head"]["kernel"].shape == (24, 48)
  grads = jax.jit(jax.grad(lambda p: run_stack(STACK, p, batch())["loss"]))(padded)
  for tree in (padded, grads):
    assert np.any(tree["embed"]["table"][:40]) and not np.any(tree["embed"]["table"][40:])
    assert np.any(tree["head"]["kernel"][:, :40]) and not np.any(tree["head"]["kernel"][:, 40:])


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"init_std": 0.1}], ids=str)
def test_initial_parameters_are_of_the_published_scale(options):
  sizes = SIZES | {"num_layers": 8, "width": 192, "hidden": 300}
  p = make_transformer(**sizes, **options).init(jax.random.key(0))
  std = options.get("init_std", 0.02)
  into = std / np.sqrt(16)  # two branches per layer
  for name, expected in {"q": std, "gate": std, "o": into, "down": into}.items():
    kernels = p["layers"][name]["kernel"]
    np.testing.assert_allclose(kernels.std(), expected, rtol=0.02)
    assert len({float(kernel[0, 0]) for kernel in kernels}) == 8  # all of their own
  np.testing.assert_allclose(p["head"]["kernel"][:, :40].std(), std, rtol=0.05)
  assert np.all(p["layers"]["attn_norm"]["scale"] == 1)


def count_sums(jaxpr):
  """Count the sums over devices of arrays with a width in a program, once per loop."""
  found = 0
  for eqn in jaxpr.eqns:
    if eqn.primitive.name.startswith("psum"):
      found += sum(v.aval.ndim == 3 for v in eqn.outvars)
    for inner in jaxprs_in_params(eqn.params):
      found += count_sums(inner)
  return found


@functools.cache
def kept(remat):
  """Loss and gradients on one device."""
  loss = jax.value_and_grad(lambda p: run_stack(STACK, p, batch(), remat=remat)["loss"])
  return jax.jit(loss)(params())


# Two forwards, two backwards, and what is computed again.
SUMS = {"none": 4, "dots": 4, "branches": 4, "full": 5}


@pytest.mark.parametrize("remat", SUMS)
def test_part_of_a_layer_is_computed_with_part_of_its_parameters(remat):
  b = batch()
  loss, grads = kept("none")
  function = on_two_devices(STACK, SHARDING, params(), remat=remat)
  assert count_sums(jax.make_jaxpr(function)(params(), b).jaxpr) == SUMS[remat]
  split_loss, split_grads = jax.jit(function)(params(), b)
  np.testing.assert_allclose(split_loss, loss, rtol=1e-6)
  assert_close(split_grads, grads)


@pytest.mark.parametrize("remat", ["dots", "branches", "full"])
def test_what_is_kept_changes_no_gradient(remat):
  assert_close(kept(remat), kept("none"))


def assert_close(found, expected):
  """Within 4e-6 of the largest number of each array: 2.3e-6 was seen unoptimised."""
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=4e-6 * np.abs(b).max())


@pytest.mark.slow
def test_half_precision_is_near():
  stack = make_transformer(**SIZES, pad_vocab_to=16, dtype="bfloat16")
  b = batch()
  logits = jax.jit(functools.partial(stack_logits, stack))(params(), b)
  assert logits.dtype == jnp.float32
  expected = LOGITS(params(), b)
  error = np.abs(logits - expected).max() / np.abs(expected).max()
  assert 1e-4 < error < 4e-2  # bfloat16 has 8 bits
  loss = run_stack(stack, params(), b)["loss"]
  assert loss.dtype == jnp.float32


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_is_what_the_equation_says(heads, groups, causal):
  rng = np.random.default_rng(heads)
  q = rng.normal(size=(2, 5, heads, 8)).astype(np.float32)
  k, v = rng.normal(size=(2, 2, 5, groups, 8)).astype(np.float32)
  out, back = jax.vjp(functools.partial(attention.attention, causal=causal), q, k, v)
  expected, *gradients = attention64(q, k, v, out, causal=causal)
  np.testing.assert_allclose(out, expected, 1e-5, 1e-6)
  for a, b in zip(back(out), gradients, strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
  if causal:  # the last two, with room for more behind them
    room = [np.pad(x, ((0, 0), (0, 3), (0, 0), (0, 0))) for x in (k, v)]
    room[0][:, 5:] = 100.0
    late = attention.cached_attention(q[:, 3:], *room, start=jnp.int32(3))
    np.testing.assert_allclose(late, out[:, 3:], 1e-5, 1e-6)


CUDNN = """
0   bfloat16 64   xla
8.0 bfloat16 64   cudnn
8.0 float16  128  cudnn
8.0 bfloat16 256  xla
9.0 bfloat16 256  cudnn
9.0 bfloat16 264  xla
9.0 bfloat16 36   xla
9.0 float32  64   xla
7.5 float16  64   xla
"""


TPU = """
bfloat16 256  splash
bfloat16 8192 splash
bfloat16 200  xla
bfloat16 8200 flash
float32  2048 xla
float32  2176 flash
"""


def test_the_implementation_is_chosen_by_tokens_and_platform():
  here, tpu = jax.local_devices()[0], types.SimpleNamespace(platform="tpu")
  for row in TPU.strip().splitlines():
    dtype, tokens, expected = row.split()
    assert attention.fastest(dtype, 64, tpu, tokens=int(tokens)) == expected, row
    by = "xla" if int(tokens) <= 2048 else "flash"
    assert attention.fastest(dtype, 64, here, tokens=int(tokens)) == by, row


def test_cudnn_is_taken_where_it_can_be(monkeypatch):
  for row in CUDNN.strip().splitlines():
    capability, dtype, width, expected = row.split()
    version = tuple(map(int, capability.split(".")))
    monkeypatch.setattr(attention, "cuda_capability", lambda device, version=version: version)
    assert attention.fastest(dtype, int(width)) == expected, row


def test_sizes_that_do_not_go_together_are_refused():
  for sizes, message in (
    ({"width": 25}, "num_heads=6 does not divide width=25; give"),
    ({"num_kv_heads": 4}, "num_kv_heads=4 does not divide num_heads=6; give"),
    ({"width": 18}, "num_heads=6 gives heads of odd width 3, .*; choose an even width"),
  ):
    with config_error(match=f"Transformer.{message}"):
      make_transformer(**SIZES | sizes)


@pytest.mark.parametrize("causal", [True, False])
def test_a_token_that_fused_attention_needs_is_not_seen(causal):
  """An odd number of tokens, by the form of JAX that runs here."""
  keys = jax.random.split(jax.random.key(0), 4)
  shapes = [(2, 7, heads, 8) for heads in (4, 2, 2, 4)]
  q, k, v, g = (jax.random.normal(*x) for x in zip(keys, shapes, strict=True))

  def gradients(attend, **options):
    out, back = jax.vjp(functools.partial(attend, causal=causal, **options), q, k, v)
    return out, *back(g)

  with jax.numpy_dtype_promotion("standard"):
    found = gradients(attention.fused_attention, implementation="xla")
  for x, y in zip(found, gradients(attention.attention), strict=True):
    np.testing.assert_allclose(x, y, atol=1e-5)
