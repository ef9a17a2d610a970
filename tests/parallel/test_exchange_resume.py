"""State of an exchange resumes on any number of devices, or is refused in one line."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxscale.exchange import local_updates, plain
from jaxscale.mesh import make_mesh
from jaxscale.training.state import abstract_state, init_state
from support.bad_values import flipped
from support.errors import config_error
from support.exchanges import EXCHANGES
from support.leaves import assert_close, assert_like
from support.recipes import power_sgd
from support.saving import filled, restore, save

WIDTH, OUT = 31, 9
KEEP_STATE = [
  name
  for name, make in EXCHANGES.items()
  if jax.tree.leaves(make().init({"w": jnp.zeros((WIDTH, OUT))}))
]


def init_fn(key):
  return {"b": jnp.zeros(OUT), "w": 0.1 * jax.random.normal(key, (WIDTH, OUT))}, ()


AXES = ("replica", "data")


@functools.cache
def parts(name, count):
  """Return the exchange and the abstract state of a run on a number of devices."""
  mesh, exchange = make_mesh(devices=jax.devices()[:count]), EXCHANGES[name](count)
  return exchange, abstract_state(init_fn, optax.sgd(0.005), mesh, exchange)


def saved_on(name, count, directory):
  state = filled(parts(name, count)[1])
  save(directory, state)
  return jax.device_get(state)


CHANGES = [(name, 8, 4) for name in KEEP_STATE]
CHANGES += [("one bit", 8, 6), ("one bit", 3, 8), ("delayed", 3, 8)]


@pytest.mark.parametrize("name, old, new", CHANGES)
def test_a_checkpoint_is_restored_on_another_number_of_devices(name, old, new, tmp_path, reported):
  saved = saved_on(name, old, tmp_path)
  exchange, abstract = parts(name, new)
  state = restore(tmp_path, abstract, exchange.resize)
  (line,) = reported
  assert f"converted from {old} devices to {new}" in line
  assert_like(state, abstract)
  # All that is not the exchange's is the same bits; that is what `resize` makes.
  assert state is not None and exchange.resize is not None
  same = saved._replace(exchange_state=()), state._replace(exchange_state=())
  jax.tree.map(np.testing.assert_array_equal, *same)
  resized = exchange.resize(saved.exchange_state, new)
  assert_close(state.exchange_state, resized, rtol=1e-6, atol=1e-6)


def test_damage_is_found_before_anything_is_carried_over(tmp_path, reported):
  saved = saved_on("top k", 8, tmp_path)
  files = [p for p in tmp_path.rglob("d/*") if p.is_file()]
  path = max(files, key=lambda p: p.stat().st_size)  # r: eight times the parameters
  path.write_bytes(flipped(np.frombuffer(path.read_bytes(), np.uint8), path.stat().st_size // 2))
  exchange, abstract = parts("top k", 4)
  with config_error(match="all checkpoints are damaged"):
    restore(tmp_path, abstract, exchange.resize)
  out = "\n".join(reported)
  assert "checkpoint 4 is damaged" in out and "carried" not in out
  assert jax.tree.leaves(saved.exchange_state)[0].shape[0] == 8


def refused(directory, abstract, resize=None):
  with config_error(str(directory / "4")) as error:
    restore(directory, abstract, resize)
  assert (directory / "4").is_dir()  # nobody's damage
  return str(error.value)


def test_another_exchange_is_refused_in_a_line_that_names_it(tmp_path):
  saved_on("one bit", 8, tmp_path)
  for name, difference in {
    "plain": "it has exchange_state/residual/b, which is not in this run's exchange",
    "power sgd": "it lacks exchange_state/q/0 of this run's exchange",
    "delayed one bit": "it lacks exchange_state/grads/b of this run's exchange",
  }.items():
    for count in (8, 4):
      exchange, abstract = parts(name, count)
      line = refused(tmp_path, abstract, exchange.resize)
      assert difference in line and "resume with the exchange it was saved" in line


def test_other_shapes_are_refused_on_any_number_of_devices(tmp_path):
  saved_on("power sgd", 8, tmp_path)
  mesh, tx, exchange = make_mesh(), optax.sgd(0.005), power_sgd(AXES, rank=3)
  for count, shape in ((8, "[8, 9, 3]"), (4, "[4, 9, 3]")):
    mesh = make_mesh(devices=jax.devices()[:count])
    abstract = abstract_state(init_fn, tx, mesh, exchange)
    line = refused(tmp_path, abstract, exchange.resize)
    wanted = f"exchange_state/q/0 is float32[8, 9, 2] in the checkpoint and float32{shape} now"
    assert wanted in line and "a different experiment" in line


def test_an_exchange_that_cannot_be_carried_over_says_what_to_do(tmp_path):
  saved_on("top k", 8, tmp_path)
  exchange, abstract = parts("top k", 4)
  line = refused(tmp_path, abstract)
  assert line.endswith(
    "4: saved on 8 devices, but this run has 4: the exchange does not define how its "
    "state is resized (Exchange.resize); resume with 8 devices, or use another "
    "--workdir to start anew"
  )
  assert restore(tmp_path, abstract, exchange.resize) is not None


def test_workers_of_their_own_are_refused_on_another_number_of_devices(tmp_path):
  tx, method = optax.sgd(0.1, momentum=0.9), local_updates.block_momentum(4, 8)
  made = init_fn, tx, make_mesh(), plain(AXES)
  state = init_state(*made, local=method)
  save(tmp_path, state._replace(step=state.step + 4))
  again = restore(tmp_path, abstract_state(*made, local=method), plain(AXES).resize)
  assert again is not None
  jax.tree.map(np.testing.assert_array_equal, again.params, state.params)
  # Whatever `resize` the exchange of ways has: means of parameters it must not take.
  mesh = make_mesh(devices=jax.devices()[:4])
  abstract = abstract_state(init_fn, tx, mesh, plain(AXES), local=method)
  for resize in (None, plain(AXES).resize, EXCHANGES["top k"](4).resize):
    line = refused(tmp_path, abstract, resize)
    assert "saved on 8 devices, but this run has 4: each worker has its own parameters" in line
    assert "resume with 8 devices, or use another --workdir to start anew" in line
