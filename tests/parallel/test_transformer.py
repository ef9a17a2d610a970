"""The language model against float64 numpy, Hugging Face's, and published sizes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P

from jaxscale import config as cfg
from jaxscale import data
from jaxscale.errors import ConfigError
from jaxscale.exchange import plain
from jaxscale.experiment import make_layout as layout_parts
from jaxscale.experiment.model import init_fn, make_model
from jaxscale.mesh import batch_sharding, make_mesh
from jaxscale.models import RopeScaling, attention, make_transformer
from jaxscale.models.stack import Ops, hidden_states, run_stack, stack_logits
from jaxscale.parallel.layout_exchange import exchange_axes
from jaxscale.training.state import init_state
from jaxscale.training.step import make_eval_step, make_train_step
from support import golden_models
from support.cases import all_slow_except

SIZES = {
  "vocab_size": 40,
  "num_layers": 2,
  "width": 24,
  "num_heads": 6,
  "num_kv_heads": 2,
  "hidden": 20,
}
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


@pytest.mark.parametrize(
  ("published", "sizes"),
  [
    # arXiv:2307.09288, table 1, and the released config: 6,738,415,616.
    (
      6_738_415_616,
      {"vocab_size": 32_000, "num_layers": 32, "width": 4096, "num_heads": 32, "hidden": 11_008},
    ),
    # arXiv:2407.21783, table 3, and the released config.
    (
      8_030_261_248,
      {
        "vocab_size": 128_256,
        "num_layers": 32,
        "width": 4096,
        "num_heads": 32,
        "num_kv_heads": 8,
        "hidden": 14_336,
      },
    ),
    # TinyLlama, arXiv:2401.02385, table 1.
    (
      1_100_048_384,
      {
        "vocab_size": 32_000,
        "num_layers": 22,
        "width": 2048,
        "num_heads": 32,
        "num_kv_heads": 4,
        "hidden": 5632,
      },
    ),
  ],
)
def test_parameters_are_as_many_as_published(published, sizes):
  shapes = jax.eval_shape(make_transformer(**sizes).init, jax.random.key(0))
  assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == published
  assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {jnp.dtype("float32")}


@pytest.mark.parametrize(
  ("name", "settings"),
  [
    ("hf_llama", {}),
    ("hf_qwen3", {"rope_theta": 1e6, "norm_eps": 1e-6, "qk_norm": True, "head_width": 8}),
    ("hf_qwen2", {"rope_theta": 1e6, "norm_eps": 1e-6, "qkv_bias": True}),
    (
      "hf_llama31",
      {
        "rope_theta": 100.0,
        "num_heads": 2,
        "num_kv_heads": 1,
        "rope_scaling": RopeScaling(8.0, 1.0, 4.0, 64),
      },
    ),
  ],
)
def test_is_what_hugging_face_computes(name, settings):
  weights, probes, there = golden_models.load(name)
  stack = make_transformer(**SIZES | settings, pad_vocab_to=1)
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
    np.testing.assert_allclose(
      golden_models.probe(found[key]), recorded, rtol=2e-5, atol=2e-5, err_msg=key
    )


def np_rms(x, scale, eps=1e-5):
  return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def np_rotate(x, theta=10_000.0):
  """Pairs as complex numbers, turned one position and one frequency at a time."""
  tokens, width = x.shape[1], x.shape[-1]
  pairs = x[..., : width // 2] + 1j * x[..., width // 2 :]
  for p, i in np.ndindex(tokens, width // 2):
    pairs[:, p, :, i] *= np.exp(1j * p * theta ** (-2 * i / width))
  return np.concatenate([pairs.real, pairs.imag], -1)


def np_softmax(x):
  e = np.exp(x - x.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)


def np_attention(q, k, v, causal=True, start=0):
  """One query at a time; q: [b, t, heads, d], k and v: [b, s, groups, d]."""
  out = np.zeros(q.shape)
  each = q.shape[2] // k.shape[2]
  for b, t, n in np.ndindex(q.shape[:3]):
    seen = start + t + 1 if causal else k.shape[1]
    keys, values = k[b, :seen, n // each], v[b, :seen, n // each]
    out[b, t, n] = np_softmax(keys @ q[b, t, n] / np.sqrt(q.shape[-1])) @ values
  return out


def np_logits(params, tokens):
  """The equations of the module, in float64."""
  p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  h = p["embed"]["table"][tokens]
  for i in range(2):
    w = jax.tree.map(lambda x, i=i: x[i], p["layers"])
    x = np_rms(h, w["attn_norm"]["scale"])
    q, k, v = ((x @ w[n]["kernel"]).reshape(*x.shape[:2], -1, 4) for n in "qkv")
    y = np_attention(np_rotate(q), np_rotate(k), v)
    h = h + y.reshape(*x.shape[:2], -1) @ w["o"]["kernel"]
    x = np_rms(h, w["mlp_norm"]["scale"])
    gate, up = x @ w["gate"]["kernel"], x @ w["up"]["kernel"]
    h = h + (gate / (1 + np.exp(-gate)) * up) @ w["down"]["kernel"]
  return (np_rms(h, p["head"]["norm"]["scale"]) @ p["head"]["kernel"])[..., :40]


def test_is_what_the_equations_say():
  b = batch()
  logits = LOGITS(params(), b)
  assert logits.dtype == jnp.float32 and logits.shape == (3, 10, 40)
  np.testing.assert_allclose(logits, np_logits(params(), b["tokens"]), 1e-5, 2e-5)


@pytest.mark.parametrize("mask", [None, np.array([True, False, True])])
def test_totals_count_what_is_to_be_predicted(mask):
  b = batch()
  counts = b["targets"] >= 0
  assert not counts.all()
  if mask is not None:
    b, counts = b | {"mask": mask}, counts & mask[:, None]
  logits = np_logits(params(), b["tokens"])
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
  return -(target * np.log(np_softmax(np_logits(params, b["tokens"])[counts]))).sum(-1)


@functools.cache
def smoothed(model):
  """(metrics of a step, parameters after it, totals of evaluation)."""
  config = cfg.Config(
    model=cfg.Transformer(
      num_layers=2, width=24, num_heads=6, num_kv_heads=2, hidden=20, pad_vocab_to=16
    ),
    data=cfg.Text(sequence_length=10),
    optimizer=cfg.SGD(lr=0.1),
    batch_size=4,
    epochs=1.0,
    loss=cfg.CrossEntropy(label_smoothing=0.1),
    mesh=cfg.Mesh(model=model),
  )
  mesh = make_mesh(devices=jax.devices()[:model], model=model)
  info = data.TextInfo("words", 40, 10)
  train, evaluate = (make_model(config, info, train=t) for t in (True, False))
  layout = layout_parts.make_layout(config, mesh, train)
  assert layout is not None
  tx, exchange = optax.sgd(1.0), plain(exchange_axes(layout))
  init = init_fn(train)
  state = init_state(init, tx, mesh, exchange, layout=layout)
  where = jax.tree.map(lambda x: x.sharding, state.params)
  own = jax.tree.map(np.array, params())  # a step gives its state away
  state = state._replace(params=jax.device_put(own, where))
  given = jax.device_put(batch(rows=4), batch_sharding(mesh))
  objective = config.loss.build(info)
  totals = layout_parts.make_totals(evaluate, layout, objective)
  totals = make_eval_step(totals, mesh, layout)
  found = jax.device_get(totals(state.params, {}, given))
  loss = layout_parts.make_loss(config, train, layout, objective)
  step = make_train_step(loss, tx, mesh, exchange, layout=layout)
  state, metrics = step(state, given)
  return jax.device_get((metrics, state.params, found))


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
  padded, plain = (STACK.init(jax.random.key(1)), make_transformer(**SIZES, pad_vocab_to=1))
  same = plain.init(jax.random.key(1))
  assert padded["embed"]["table"].shape == (48, 24)
  assert padded["head"]["kernel"].shape == (24, 48)
  np.testing.assert_array_equal(padded["embed"]["table"][:40], same["embed"]["table"])
  assert not np.any(padded["embed"]["table"][40:])
  assert not np.any(padded["head"]["kernel"][:, 40:])

  def loss(stack, params):
    return run_stack(stack, params, batch())["loss"]

  there, grads = jax.jit(jax.value_and_grad(functools.partial(loss, STACK)))(padded)
  here = jax.jit(functools.partial(loss, plain))(same)
  np.testing.assert_allclose(there, here, rtol=1e-6)
  assert not np.any(grads["embed"]["table"][40:])
  assert not np.any(grads["head"]["kernel"][:, 40:])


def test_sees_what_is_before_and_nothing_behind():
  b = batch()
  before = LOGITS(params(), b)
  tokens = b["tokens"].copy()
  tokens[:, 6] = (tokens[:, 6] + 1) % 40
  after = LOGITS(params(), b | {"tokens": tokens})
  np.testing.assert_array_equal(before[:, :6], after[:, :6])
  assert np.all(np.abs(before - after)[:, 6:].max(-1) > 1e-4)


@pytest.mark.slow
def test_initial_parameters_are_of_the_published_scale():
  sizes = SIZES | {"num_layers": 8, "width": 192, "hidden": 300}
  p = make_transformer(**sizes).init(jax.random.key(0))
  into = 0.02 / np.sqrt(16)  # two branches per layer
  for name, std in {"q": 0.02, "gate": 0.02, "o": into, "down": into}.items():
    kernels = p["layers"][name]["kernel"]
    np.testing.assert_allclose(kernels.std(), std, rtol=0.02)
    assert len({float(kernel[0, 0]) for kernel in kernels}) == 8  # all of their own
  np.testing.assert_allclose(p["head"]["kernel"][:, :40].std(), 0.02, rtol=0.05)
  assert np.all(p["layers"]["attn_norm"]["scale"] == 1)


SPLIT = {name: P(None, None, "model") for name in ("q", "k", "v", "gate", "up")}
SPLIT |= {name: P(None, "model", None) for name in ("o", "down")}


def on_two_devices(remat):
  """The loss with heads and hidden units on two devices, as a function of params."""
  mesh = jax.make_mesh((2,), ("model",), (jax.sharding.AxisType.Auto,))
  ops = Ops(
    enter=lambda x: lax.pcast(x, "model", to="varying"), reduce=lambda y: lax.psum(y, "model")
  )

  def loss(params, b):
    h = hidden_states(STACK, params, b, ops, remat=remat)
    return STACK.finish(params["head"], h, b, Ops())["loss"]

  specs = jax.tree.map(lambda _: P(), params())
  for name, spec in SPLIT.items():
    specs["layers"][name]["kernel"] = spec
  grad = jax.value_and_grad(loss)
  return jax.shard_map(
    grad, mesh=mesh, in_specs=(specs, P()), out_specs=(P(), specs), check_vma=True
  )


def count_sums(jaxpr):
  """Sums over devices of arrays with a width, in a program; each in a loop once."""
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
@pytest.mark.parametrize(
  ("remat", "sums"), [("none", 4), ("dots", 4), ("branches", 4), ("full", 5)]
)
def test_part_of_a_layer_is_computed_with_part_of_its_parameters(remat, sums):
  b = batch()
  loss, grads = kept("none")
  function = on_two_devices(remat)
  assert count_sums(jax.make_jaxpr(function)(params(), b).jaxpr) == sums
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


def written_attention(q, k, v, *, causal):
  """Write attention out, for JAX to differentiate."""
  k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
  scores = jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(q.shape[-1])
  sees = np.tri(*scores.shape[-2:], dtype=bool) | (not causal)
  weights = jax.nn.softmax(jnp.where(sees, scores, -jnp.inf))
  return jnp.einsum("bhts,bshd->bthd", weights, v)


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_is_what_the_equation_says(heads, groups, causal):
  rng = np.random.default_rng(heads)
  q = rng.normal(size=(2, 5, heads, 8)).astype(np.float32)
  k, v = rng.normal(size=(2, 2, 5, groups, 8)).astype(np.float32)
  out = attention.attention(q, k, v, causal=causal)
  np.testing.assert_allclose(out, np_attention(q, k, v, causal), 1e-5, 1e-6)
  found, expected = (
    jax.vjp(functools.partial(by, causal=causal), q, k, v)[1](out)
    for by in (attention.attention, written_attention)
  )
  for a, b in zip(found, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
  if causal:  # the last two, with room for more behind them
    room = [np.pad(x, ((0, 0), (0, 3), (0, 0), (0, 0))) for x in (k, v)]
    room[0][:, 5:] = 100.0
    late = attention.cached_attention(q[:, 3:], *room, start=jnp.int32(3))
    np.testing.assert_allclose(late, out[:, 3:], 1e-5, 1e-6)


@pytest.mark.parametrize(
  ("capability", "dtype", "width", "expected"),
  [
    ((0,), "bfloat16", 64, "xla"),
    ((8, 0), "bfloat16", 64, "cudnn"),
    ((8, 0), "float16", 128, "cudnn"),
    ((8, 0), "bfloat16", 256, "xla"),
    ((9, 0), "bfloat16", 256, "cudnn"),
    ((9, 0), "bfloat16", 264, "xla"),
    ((9, 0), "bfloat16", 36, "xla"),
    ((9, 0), "float32", 64, "xla"),
    ((7, 5), "float16", 64, "xla"),
  ],
)
def test_cudnn_is_taken_where_it_can_be(monkeypatch, capability, dtype, width, expected):
  monkeypatch.setattr(attention, "_cuda_capability", lambda device: capability)
  assert attention.fastest(dtype, width) == expected


@pytest.mark.parametrize(
  "sizes, message",
  [
    ({"width": 25}, "num_heads=6 does not divide width=25; give"),
    ({"num_kv_heads": 4}, "num_kv_heads=4 does not divide num_heads=6; give"),
    ({"width": 18}, "head_width=3 is odd, .*; make it even"),
  ],
  ids=str,
)
def test_sizes_that_do_not_go_together_are_refused(sizes, message):
  with pytest.raises(ConfigError, match=f"transformer.{message}"):
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
