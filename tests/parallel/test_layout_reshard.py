"""State of an exchange under a layout: resumed where it can be, else refused."""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest

from jaxscale.checkpoint.manager import Checkpoints
from jaxscale.errors import ConfigError
from jaxscale.exchange import Exchange, plain
from jaxscale.exchange.low_precision import int8
from jaxscale.exchange.one_bit import one_bit
from jaxscale.exchange.power_sgd import power_sgd
from jaxscale.exchange.top_k import top_k
from jaxscale.exchange.wrappers import delayed, warm_start
from jaxscale.mesh import make_mesh
from jaxscale.parallel import Rule, make_layout, stack_loss
from jaxscale.parallel.layout_exchange import exchange_axes, exchange_split
from jaxscale.training.state import abstract_state, init_state
from jaxscale.training.step import make_train_step
from support.cases import all_slow_except
from support.exchanges import joined
from support.tiny_stack import RULES, batch, tiny_stack
from support.trees import assert_same_bits, worst_leaf

PARAMETERS = {"shard": "fsdp"}
LAYOUTS = {
  "data 8": (8, {}, {}),
  "zero-1": (8, {"data": 2, "fsdp": 4}, {"shard": "zero1"}),
  "fsdp": (8, {"data": 1, "fsdp": 8}, PARAMETERS),
  "data 2 x fsdp 2": (4, {"data": 2, "fsdp": 2}, PARAMETERS),
  "data 4 x fsdp 2": (8, {"data": 4, "fsdp": 2}, PARAMETERS),
  "zero-2 on it": (8, {"data": 4, "fsdp": 2}, {"shard": "zero2"}),
  "replica 2 x data 2 x fsdp 2": (8, {"replica": 2, "data": 2, "fsdp": 2}, PARAMETERS),
  "data 2 x fsdp 2 x model 2": (8, {"data": 2, "fsdp": 2, "model": 2}, PARAMETERS),
  "data 2 x fsdp 2 x ring": (
    8,
    {"data": 2, "fsdp": 2, "model": 2},
    PARAMETERS | {"splits": "ring"},
  ),
  "fsdp 2 x ring": (4, {"data": 1, "fsdp": 2, "model": 2}, PARAMETERS | {"splits": "ring"}),
}
EXCHANGES = {
  "plain": lambda axes, n: plain(axes),
  "int8": lambda axes, n: int8(axes, block=32),
  "warm int8": lambda axes, n: warm_start(int8(axes, block=32), axes, steps=3),
  "one bit": lambda axes, n: one_bit(axes, num_devices=n),
  "top k": lambda axes, n: top_k(axes, num_devices=n, share=0.1),
  "power sgd": lambda axes, n: power_sgd(axes, rank=1),
  "delayed": lambda axes, n: delayed(plain(axes)),
}


KEEPING = ["delayed", "top k", "one bit", "power sgd"]


class Made(NamedTuple):
  """An exchange under a layout: parts of a state, abstract state, and a step."""

  mesh: Any
  layout: Any
  exchange: Exchange
  parts: Any
  abstract: Any
  step: Any


@functools.cache
def made(layout_name, exchange_name, rules=RULES) -> Made:
  count, sizes, options = LAYOUTS[layout_name]
  mesh, stack = make_mesh(devices=jax.devices()[:count], **sizes), tiny_stack()
  shapes = jax.eval_shape(stack.init, jax.random.key(0))
  layout = make_layout(mesh, shapes, rules, **options)
  axes = exchange_axes(layout)
  devices = int(np.prod([mesh.shape[a] for a in axes]))
  tx, exchange = optax.sgd(0.05), EXCHANGES[exchange_name](axes, devices)
  parts = lambda key: (stack.init(key), {}), tx, mesh, exchange
  step = make_train_step(stack_loss(stack, layout), tx, mesh, exchange, layout=layout)
  abstract = abstract_state(*parts, layout=layout)
  return Made(mesh, layout, exchange, parts, abstract, step)


def filled(made: Made):
  """A state of step 4 of random numbers, the exchange's others on each device."""
  rng = np.random.default_rng(0)

  def fill(x):
    if x.dtype == np.float32:
      value = rng.standard_normal(x.shape, np.float32)
    else:
      value = np.full(x.shape, 4, x.dtype)
    return jax.device_put(value, x.sharding)

  return jax.tree.map(fill, made.abstract)


def save(directory, made, state):
  with Checkpoints(directory, split=exchange_split(made.layout)) as checkpoints:
    checkpoints.save(state)


def restore(directory, made, say=print):
  split = exchange_split(made.layout)
  with Checkpoints(directory, split=split, say=say) as checkpoints:
    state = checkpoints.restore(made.abstract, made.exchange.resize)
  assert state is not None
  for x, a in zip(*map(jax.tree.leaves, (state, made.abstract)), strict=True):
    assert (x.shape, x.dtype, x.sharding) == (a.shape, a.dtype, a.sharding)
  return state


@pytest.mark.parametrize("exchange", all_slow_except(EXCHANGES, "one bit", "delayed"))
def test_the_same_layout_resumes_with_every_bit(exchange, tmp_path):
  one = made("data 2 x fsdp 2 x model 2", exchange)
  state, message = filled(one), []
  save(tmp_path, one, state)
  assert_same_bits(restore(tmp_path, one, message.append), state)
  assert not message


@pytest.mark.parametrize(
  ("there", "here"),
  [("data 8", "zero-1"), ("zero-1", "data 8"), ("data 4 x fsdp 2", "zero-2 on it")],
)
def test_what_splits_gradients_alike_is_the_same_layout_here(there, here, tmp_path):
  state = filled(made(there, "top k"))
  save(tmp_path, made(there, "top k"), state)
  assert_same_bits(restore(tmp_path, made(here, "top k")), state)


@pytest.mark.parametrize("exchange", all_slow_except(["int8", "warm int8"], "int8"))
@pytest.mark.parametrize(
  ("there", "here"),
  [
    ("fsdp", "data 8"),
    ("data 8", "data 2 x fsdp 2 x model 2"),
    ("data 2 x fsdp 2 x model 2", "data 2 x fsdp 2"),
    ("data 2 x fsdp 2", "fsdp"),
  ],
)
def test_a_count_of_steps_resumes_under_any_layout(exchange, there, here, tmp_path):
  saved, message = filled(made(there, exchange)), []
  save(tmp_path, made(there, exchange), saved)
  state = restore(tmp_path, made(here, exchange), message.append)
  bare = {"exchange_state": ()}
  assert_same_bits(state._replace(**bare), saved._replace(**bare))
  counts = [np.unique(x).tolist() for x in jax.tree.leaves(state.exchange_state)]
  assert counts and all(count == [4] for count in counts)
  assert len(message) == 1 and "carried over" in message[0]


def of_parts(made, tree):
  """[devices, ...] -> {place along the axes that split: [those devices, ...]}."""
  over = exchange_axes(made.layout)
  names, sizes = zip(*made.mesh.shape.items(), strict=True)
  found = {}
  for row, place in enumerate(np.ndindex(*sizes)):
    at = tuple(i for i, name in zip(place, names, strict=True) if name not in over)
    found.setdefault(at, []).append(row)
  return {
    at: jax.tree.map(lambda x, rows=rows: np.asarray(x)[rows], tree) for at, rows in found.items()
  }


OTHER_DEVICES = [
  ("data 4 x fsdp 2", "data 2 x fsdp 2"),
  ("data 2 x fsdp 2", "replica 2 x data 2 x fsdp 2"),
  ("data 2 x fsdp 2 x ring", "fsdp 2 x ring"),  # what is averaged is not side by side
]


@pytest.mark.parametrize("exchange", all_slow_except(KEEPING, "delayed", "one bit"))
@pytest.mark.parametrize(("there", "here"), OTHER_DEVICES)
def test_other_devices_with_the_same_parts_carry_each_over(exchange, there, here, tmp_path):
  """Part by part: what is pending of its mean is kept, and no other part's."""
  old, new = made(there, exchange), made(here, exchange)
  saved, message = filled(old), []
  save(tmp_path, old, saved)
  state = restore(tmp_path, new, message.append)
  assert "carried over from" in message[0]
  before = of_parts(old, jax.device_get(saved.exchange_state))
  after = of_parts(new, jax.device_get(state.exchange_state))
  assert before.keys() == after.keys() and len(before) == 2
  for at in before:
    for group in before[at]:
      pairs = (x[at][group].get("residual", x[at][group].get("grads")) for x in (before, after))
      for x, y in zip(*map(jax.tree.leaves, pairs), strict=True):
        if exchange != "one bit":  # whose owners keep a part of it
          wanted = np.broadcast_to(x.mean(0, dtype=np.float64), y.shape)
          np.testing.assert_allclose(y, wanted, rtol=1e-6, atol=1e-6)
      if exchange == "one bit":
        assert_pending_kept(before[at][group], after[at][group])


def assert_pending_kept(before, after):
  """1/N (sum of residuals + what owners keep of their stripes), of each tensor."""

  def pending(own, name):
    residual, stripe = own["residual"][name], own["stripe"][name]
    total = residual.sum(0, dtype=np.float64)
    columns = total.shape[-1] if total.ndim > 1 else 1
    return (total + joined(stripe, columns).reshape(total.shape)) / len(residual)

  for part in before["residual"]:
    a, b = ({k: own[k][part] for k in own} for own in (before, after))
    for name in a["residual"]:
      if a["residual"][name] is not None:
        np.testing.assert_allclose(pending(b, name), pending(a, name), atol=1e-6)


@pytest.mark.slow
def test_a_delayed_run_on_half_the_devices_is_the_run(tmp_path):
  old, new = made("data 4 x fsdp 2", "delayed"), made("data 2 x fsdp 2", "delayed")
  state, ends = init_state(*old.parts, layout=old.layout, seed=2), []
  for i in range(3):
    state, _ = old.step(state, batch(i, old.mesh))
  save(tmp_path, old, state)
  starts = (old, state), (new, restore(tmp_path, new))
  for one, state in starts:
    losses = []
    for i in range(3, 6):
      state, metrics = one.step(state, batch(i, one.mesh))
      losses.append(metrics["loss"].item())
    ends.append((losses, jax.device_get(state.params)))
  np.testing.assert_allclose(ends[1][0], ends[0][0], rtol=1e-6)
  assert worst_leaf(ends[1][1], ends[0][1]) <= 1e-6


def refused(directory, made):
  with pytest.raises(ConfigError) as error:
    restore(directory, made)
  line = str(error.value)
  assert "\n" not in line and line.startswith(str(directory / "4"))
  assert line.endswith("or use another --workdir to start anew")
  assert (directory / "4").is_dir()  # nobody's damage
  return line


@pytest.mark.parametrize("exchange", all_slow_except(KEEPING, "delayed", "one bit"))
def test_parts_that_no_device_has_are_refused_in_a_line(exchange, tmp_path):
  save(tmp_path, made("fsdp", exchange), filled(made("fsdp", exchange)))
  line = refused(tmp_path, made("data 8", exchange))
  assert "4: saved on Mesh replica=1, data=1, fsdp=8, here are devices that" in line
  assert "resume with the mesh and layout it was saved with" in line
  line = refused(tmp_path, made("data 2 x fsdp 2 x model 2", exchange))
  assert "here is Mesh replica=1, data=2, fsdp=2, model=2: its exchange keeps" in line
  assert "that of embed/table is split by -, fsdp there, by model, fsdp here" in line


def test_parts_of_the_same_shape_are_not_taken_for_each_other(tmp_path):
  """Square matrices split by rows there and by columns here."""
  there = made("data 2 x fsdp 2 x model 2", "delayed")
  turned = tuple(
    r._replace(dims=("stage", "model", "fsdp"))
    if "q|k" in r.pattern
    else r._replace(dims=("stage", "model"))
    if "up_bias" in r.pattern
    else r
    for r in RULES
  )
  assert isinstance(turned[1], Rule)
  here = made("data 2 x fsdp 2 x model 2", "delayed", turned)
  shapes = [
    jax.tree.map(lambda x: x.shape, m.abstract.exchange_state["fsdp_model"]["grads"]["layers"]["q"])
    for m in (there, here)
  ]
  assert shapes[0] == shapes[1]
  save(tmp_path, there, filled(there))
  line = refused(tmp_path, here)
  assert "that of layers/k is split by -, fsdp, model there, by -, model, fsdp here" in line


def test_another_model_is_what_is_named(tmp_path):
  """Its exchange state is another too, but that follows."""
  there, here = made("fsdp", "top k"), made("data 8", "top k")
  save(tmp_path, there, filled(there))
  wider = jax.tree.map(lambda x: x, here.abstract.params)
  wider["head"]["scale"] = jax.ShapeDtypeStruct((17,), np.float32)
  other = here._replace(abstract=here.abstract._replace(params=wider))
  with pytest.raises(ConfigError, match=r"params/head/scale is float32\[16\] there"):
    restore(tmp_path, other)


def test_an_exchange_that_keeps_nothing_is_never_in_the_way(tmp_path):
  for name in LAYOUTS:
    assert not jax.tree.leaves(made(name, "plain").abstract.exchange_state)
  save(tmp_path, made("data 4 x fsdp 2", "plain"), filled(made("data 8", "plain")))
  for name in LAYOUTS:
    state = restore(tmp_path, made(name, "plain"))
    assert jax.tree.structure(state) == jax.tree.structure(made(name, "plain").abstract)
