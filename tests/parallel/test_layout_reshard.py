"""State of an exchange under a layout: resumed where it can be, else refused."""

import functools
import itertools
import re
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest

from jaxscale.exchange import Exchange, plain
from jaxscale.exchange.low_precision import int8
from jaxscale.exchange.one_bit import one_bit
from jaxscale.exchange.wrappers import delayed, warm_start
from jaxscale.parallel.layout_exchange import exchange_axes, exchange_split
from jaxscale.training.state import abstract_state
from support import saving
from support.cases import all_slow_except
from support.errors import config_error
from support.leaves import assert_close, assert_like
from support.recipes import power_sgd, top_k
from support.stack_layouts import stack_layout
from support.tiny_stack import RULES
from support.trees import assert_same_bits

PARAMETERS, CUBE = {"shard": "fsdp"}, {"data": 2, "fsdp": 2, "model": 2}
LAYOUTS = {
  "data 8": (8, {}, {}),
  "zero-1": (8, {"data": 2, "fsdp": 4}, {"shard": "zero1"}),
  "fsdp": (8, {"data": 1, "fsdp": 8}, PARAMETERS),
  "data 2 x fsdp 2": (4, {"data": 2, "fsdp": 2}, PARAMETERS),
  "data 4 x fsdp 2": (8, {"data": 4, "fsdp": 2}, PARAMETERS),
  "zero-2 on it": (8, {"data": 4, "fsdp": 2}, {"shard": "zero2"}),
  "replica 2 x data 2 x fsdp 2": (8, {"replica": 2, "data": 2, "fsdp": 2}, PARAMETERS),
  "data 2 x fsdp 2 x model 2": (8, CUBE, PARAMETERS),
  "data 2 x fsdp 2 x ring": (8, CUBE, PARAMETERS | {"splits": "ring"}),
  "fsdp 2 x ring": (4, CUBE | {"data": 1}, PARAMETERS | {"splits": "ring"}),
}
EXCHANGES = {
  "plain": lambda axes, n: plain(axes),
  "int8": lambda axes, n: int8(axes, block=32),
  "warm int8": lambda axes, n: warm_start(int8(axes, block=32), axes, steps=3),
  "one bit": lambda axes, n: one_bit(axes, num_devices=n),
  "top k": lambda axes, n: top_k(axes, share=0.1),
  "power sgd": lambda axes, n: power_sgd(axes, rank=1),
  "delayed": lambda axes, n: delayed(plain(axes)),
}


KEEPING = ["delayed", "top k", "one bit", "power sgd"]


class Made(NamedTuple):
  """An exchange under a layout, and the abstract state with it."""

  mesh: Any
  layout: Any
  exchange: Exchange
  abstract: Any


@functools.cache
def made(layout_name, exchange_name, rules=RULES) -> Made:
  count, sizes, options = LAYOUTS[layout_name]
  mesh, stack, layout = stack_layout(sizes, options, count=count, rules=rules)
  axes = exchange_axes(layout)
  devices = int(np.prod([mesh.shape[a] for a in axes]))
  exchange = EXCHANGES[exchange_name](axes, devices)
  init = lambda key: (stack.init(key), {})  # noqa: E731
  abstract = abstract_state(init, optax.sgd(0.05), mesh, exchange, layout=layout)
  return Made(mesh, layout, exchange, abstract)


def filled(made: Made):
  return saving.filled(made.abstract)


def save(directory, made, state):
  saving.save(directory, state, split=exchange_split(made.layout))


def restore(directory, made):
  options = dict(split=exchange_split(made.layout))
  state = saving.restore(directory, made.abstract, made.exchange.resize, **options)
  assert_like(state, made.abstract)
  return state


@pytest.mark.parametrize("exchange", all_slow_except(EXCHANGES, "one bit", "delayed"))
def test_the_same_layout_resumes_with_every_bit(exchange, tmp_path, reported):
  one = made("data 2 x fsdp 2 x model 2", exchange)
  state = filled(one)
  save(tmp_path, one, state)
  assert_same_bits(restore(tmp_path, one), state)
  assert not reported


ALIKE = [("data 8", "zero-1"), ("zero-1", "data 8"), ("data 4 x fsdp 2", "zero-2 on it")]


@pytest.mark.parametrize("there, here", ALIKE)
def test_what_splits_gradients_alike_is_the_same_layout_here(there, here, tmp_path):
  state = filled(made(there, "top k"))
  save(tmp_path, made(there, "top k"), state)
  assert_same_bits(restore(tmp_path, made(here, "top k")), state)


ONE_AFTER_ANOTHER = "fsdp", "data 8", "data 2 x fsdp 2 x model 2", "data 2 x fsdp 2", "fsdp"


@pytest.mark.parametrize("exchange", all_slow_except(["int8", "warm int8"], "int8"))
@pytest.mark.parametrize("there, here", [*itertools.pairwise(ONE_AFTER_ANOTHER)])
def test_a_count_of_steps_resumes_under_any_layout(exchange, there, here, tmp_path, reported):
  saved = filled(made(there, exchange))
  save(tmp_path, made(there, exchange), saved)
  state = restore(tmp_path, made(here, exchange))
  bare = {"exchange_state": ()}
  assert_same_bits(state._replace(**bare), saved._replace(**bare))
  counts = [np.unique(x).tolist() for x in jax.tree.leaves(state.exchange_state)]
  assert counts and all(count == [4] for count in counts)
  assert len(reported) == 1 and "was converted" in reported[0]


def of_parts(made, tree):
  """[devices, ...] -> {place along the axes that split: [those devices, ...]}."""
  over = exchange_axes(made.layout)
  names, sizes = zip(*made.mesh.shape.items(), strict=True)
  found = {}
  for row, place in enumerate(np.ndindex(*sizes)):
    at = tuple(i for i, name in zip(place, names, strict=True) if name not in over)
    found.setdefault(at, []).append(row)
  part = lambda rows: jax.tree.map(lambda x: np.asarray(x)[rows], tree)  # noqa: E731
  return {at: part(rows) for at, rows in found.items()}


OTHER_DEVICES = [
  ("data 4 x fsdp 2", "data 2 x fsdp 2"),
  ("data 2 x fsdp 2", "replica 2 x data 2 x fsdp 2"),
  ("data 2 x fsdp 2 x ring", "fsdp 2 x ring"),  # what is averaged is not side by side
]


@pytest.mark.parametrize("exchange", all_slow_except(KEEPING, "delayed", "one bit"))
@pytest.mark.parametrize(("there", "here"), OTHER_DEVICES)
def test_other_devices_with_the_same_parts_carry_each_over(
  exchange, there, here, tmp_path, reported
):
  """Part by part: what is pending of its mean is kept (test_exchange_resize), of no other's."""
  old, new = made(there, exchange), made(here, exchange)
  saved = filled(old)
  save(tmp_path, old, saved)
  state = restore(tmp_path, new)
  assert "converted from" in reported[0]
  before = of_parts(old, jax.device_get(saved.exchange_state))
  after = of_parts(new, jax.device_get(state.exchange_state))
  assert before.keys() == after.keys() and len(before) == 2
  counts = [int(np.prod([m.mesh.shape[a] for a in exchange_axes(m.layout)])) for m in (old, new)]
  for at, group in [(at, group) for at, groups in before.items() for group in groups]:
    state, expected = after[at][group], new.exchange.resize(before[at][group], counts[1])
    assert_close(state, expected, rtol=1e-6, atol=1e-6)
    assert {len(x) for x in jax.tree.leaves(before[at][group])} == {counts[0]}


def refused(directory, made):
  line = f"^{re.escape(str(directory / '4'))}.*or use another --workdir to start anew$"
  with config_error(match=line) as error:
    restore(directory, made)
  assert (directory / "4").is_dir()  # nobody's damage
  return str(error.value)


@pytest.mark.parametrize("exchange", all_slow_except(KEEPING, "delayed", "one bit"))
def test_parts_that_no_device_has_are_refused_in_a_line(exchange, tmp_path):
  save(tmp_path, made("fsdp", exchange), filled(made("fsdp", exchange)))
  line = refused(tmp_path, made("data 8", exchange))
  assert "4: saved under another layout, whose parts of gradients no device has now" in line
  assert "resume with the mesh and layout it was saved with" in line
  refused(tmp_path, made("data 2 x fsdp 2 x model 2", exchange))


def test_parts_of_the_same_shape_are_not_taken_for_each_other(tmp_path):
  """Square matrices split by rows there and by columns here."""
  there = made("data 2 x fsdp 2 x model 2", "delayed")
  dims = {RULES[1].pattern: ("stage", "model", "fsdp"), "layers/up_bias": ("stage", "model")}
  turned = tuple(r._replace(dims=dims.get(r.pattern, r.dims)) for r in RULES)
  here = made("data 2 x fsdp 2 x model 2", "delayed", turned)
  shapes = [
    jax.tree.map(lambda x: x.shape, m.abstract.exchange_state["fsdp_model"]["grads"]["layers"]["q"])
    for m in (there, here)
  ]
  assert shapes[0] == shapes[1]
  save(tmp_path, there, filled(there))
  refused(tmp_path, here)


def test_another_model_is_what_is_named(tmp_path):
  """Its exchange state is another too, but that follows."""
  there, here = made("fsdp", "top k"), made("data 8", "top k")
  save(tmp_path, there, filled(there))
  wider = jax.tree.map(lambda x: x, here.abstract.params)
  wider["head"]["scale"] = jax.ShapeDtypeStruct((17,), np.float32)
  other = here._replace(abstract=here.abstract._replace(params=wider))
  with config_error(match=r"params/head/scale is float32\[16\] in the checkpoint"):
    restore(tmp_path, other)


def test_an_exchange_that_keeps_nothing_is_never_in_the_way(tmp_path):
  for name in LAYOUTS:
    assert not jax.tree.leaves(made(name, "plain").abstract.exchange_state)
  save(tmp_path, made("data 4 x fsdp 2", "plain"), filled(made("data 8", "plain")))
  for name in LAYOUTS:
    state = restore(tmp_path, made(name, "plain"))
    assert jax.tree.structure(state) == jax.tree.structure(made(name, "plain").abstract)
