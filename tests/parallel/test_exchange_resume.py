"""A run that stops and resumes from a checkpoint is the run that did not stop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxscale.checkpoint.manager import Checkpoints
from jaxscale.errors import ConfigError
from jaxscale.exchange import local_updates, plain
from jaxscale.exchange.power_sgd import power_sgd
from jaxscale.mesh import batch_sharding, make_mesh
from jaxscale.training.state import abstract_state, init_state
from jaxscale.training.step import make_train_step
from support.cases import all_slow_except
from support.exchanges import EXCHANGES

WIDTH, OUT = 31, 9
KEEP_STATE = [
  name
  for name, make in EXCHANGES.items()
  if jax.tree.leaves(make().init({"w": jnp.zeros((WIDTH, OUT))}))
]


def init_fn(key):
  return {"b": jnp.zeros(OUT), "w": 0.1 * jax.random.normal(key, (WIDTH, OUT))}, ()


def loss_fn(params, model_state, batch, keys):
  del keys
  error = batch["x"] @ params["w"] + params["b"] - batch["y"]
  loss = jnp.sum(error**2)
  totals = {"loss": loss, "examples": jnp.asarray(len(batch["x"]), jnp.float32)}
  return loss, (model_state, totals)


def batch(step, mesh):
  rng = np.random.default_rng(step)
  x = rng.standard_normal((64, WIDTH)).astype(np.float32)
  y = x @ np.random.default_rng(99).standard_normal((WIDTH, OUT)).astype(np.float32)
  return jax.device_put({"x": x, "y": y}, batch_sharding(mesh))


@pytest.mark.parametrize("name", all_slow_except(KEEP_STATE, "one bit", "delayed"))
def test_the_state_goes_through_a_checkpoint_bit_for_bit(name, tmp_path):
  mesh, tx, exchange = make_mesh(replica=2), optax.sgd(0.005), EXCHANGES[name]()
  step = make_train_step(loss_fn, tx, mesh, exchange)
  state, losses = init_state(init_fn, tx, mesh, exchange), []
  for i in range(8):
    if i == 4:
      with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state)
    state, metrics = step(state, batch(i, mesh))
    losses.append(metrics["loss"].item())
  with Checkpoints(tmp_path) as checkpoints:
    resumed = checkpoints.restore(abstract_state(init_fn, tx, mesh, exchange))
  assert resumed is not None and resumed.step == 4
  for i in range(4, 8):
    resumed, metrics = step(resumed, batch(i, mesh))
    assert metrics["loss"].item() == losses[i]
  jax.tree.map(np.testing.assert_array_equal, resumed, state)
  assert losses[-1] < losses[0]


AXES = ("replica", "data")


@functools.cache
def parts(name, count):
  """A run on so many devices: exchange, mesh, abstract state, train step."""
  mesh, tx = make_mesh(devices=jax.devices()[:count]), optax.sgd(0.005)
  exchange = EXCHANGES[name](count)
  abstract = abstract_state(init_fn, tx, mesh, exchange)
  return exchange, mesh, abstract, make_train_step(loss_fn, tx, mesh, exchange)


def saved_on(name, count, directory):
  """A state of random numbers, saved as of step 4."""
  mesh, exchange = make_mesh(devices=jax.devices()[:count]), EXCHANGES[name](count)
  state = init_state(init_fn, optax.sgd(0.005), mesh, exchange)
  rng = np.random.default_rng(0)

  def fill(x):
    noise = rng.standard_normal(x.shape).astype(np.float32)
    return jax.device_put(noise if x.dtype == np.float32 else x, x.sharding)

  own = jax.tree.map(fill, state.exchange_state)
  state = state._replace(step=state.step + 4, exchange_state=own)
  with Checkpoints(directory) as checkpoints:
    checkpoints.save(state)
  return jax.device_get(state)


def restore(directory, abstract, resize=None):
  with Checkpoints(directory) as checkpoints:
    return checkpoints.restore(abstract, resize)


@pytest.mark.parametrize(
  ("name", "old", "new"),
  [(name, 8, 4) for name in KEEP_STATE] + [("one bit", 8, 6), ("one bit", 3, 8), ("delayed", 3, 8)],
)
def test_a_checkpoint_is_restored_on_another_number_of_devices(name, old, new, tmp_path, capsys):
  saved = saved_on(name, old, tmp_path)
  exchange, _, abstract, _ = parts(name, new)
  state = restore(tmp_path, abstract, exchange.resize)
  out = capsys.readouterr().out
  assert f"carried over from {old} devices to {new}" in out and out.count("\n") == 1
  for x, a in zip(*map(jax.tree.leaves, (state, abstract)), strict=True):
    assert (x.shape, x.dtype, x.sharding) == (a.shape, a.dtype, a.sharding)
  # All that is not the exchange's is the same bits; that is what `resize` makes.
  assert state is not None and exchange.resize is not None
  same = saved._replace(exchange_state=()), state._replace(exchange_state=())
  jax.tree.map(np.testing.assert_array_equal, *same)
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6),
    state.exchange_state,
    exchange.resize(saved.exchange_state, new),
  )


@pytest.mark.parametrize("name", ["delayed", "one bit"])
def test_a_run_resumes_with_four_devices_and_then_with_eight(name, tmp_path):
  """Steps 0 to 3 on 8 devices, to 7 on 4, to 11 on 8; and all on 8."""
  losses = {}
  for kind, counts in {"same": (8, 8, 8), "other": (8, 4, 8)}.items():
    losses[kind] = []
    for i, count in enumerate(counts):
      exchange, mesh, abstract, step = parts(name, count)
      state = restore(tmp_path / kind, abstract, exchange.resize)
      if state is None:
        state = init_state(init_fn, optax.sgd(0.005), mesh, exchange)
      assert state.step == 4 * i
      for _ in range(4):
        state, metrics = step(state, batch(int(state.step), mesh))
        losses[kind].append(metrics["loss"].item())
      with Checkpoints(tmp_path / kind) as checkpoints:
        checkpoints.save(state)
  # Exact: the same run. Quantised: other bits are sent, what is lost comes later.
  tolerance = 1e-6 if name == "delayed" else 0.1
  np.testing.assert_allclose(losses["other"], losses["same"], rtol=tolerance)
  assert losses["other"][-1] < 0.8 * losses["other"][0]


def test_damage_is_found_before_anything_is_carried_over(tmp_path, capsys):
  saved = saved_on("top k", 8, tmp_path)
  files = [p for p in tmp_path.rglob("d/*") if p.is_file()]
  path = max(files, key=lambda p: p.stat().st_size)  # r: eight times the parameters
  content = bytearray(path.read_bytes())
  content[len(content) // 2] ^= 0x10
  path.write_bytes(content)
  exchange, _, abstract, _ = parts("top k", 4)
  with pytest.raises(ConfigError, match="every checkpoint is damaged"):
    restore(tmp_path, abstract, exchange.resize)
  out = capsys.readouterr().out
  assert "checkpoint 4 is damaged" in out and "carried" not in out
  assert jax.tree.leaves(saved.exchange_state)[0].shape[0] == 8


def refused(directory, abstract, resize=None):
  with pytest.raises(ConfigError) as error:
    restore(directory, abstract, resize)
  line = str(error.value)
  assert "\n" not in line and str(directory / "4") in line
  assert (directory / "4").is_dir()  # nobody's damage
  return line


def test_another_exchange_is_refused_in_a_line_that_names_it(tmp_path):
  saved_on("one bit", 8, tmp_path)
  for name, difference in {
    "plain": "it has exchange_state/residual/b, which this exchange does not keep",
    "power sgd": "it has no exchange_state/q/0, which this exchange needs",
    "delayed one bit": "it has no exchange_state/grads/b, which this exchange needs",
  }.items():
    for count in (8, 4):
      exchange, _, abstract, _ = parts(name, count)
      line = refused(tmp_path, abstract, exchange.resize)
      assert difference in line and "resume with the exchange it was saved" in line


def test_other_shapes_are_refused_on_any_number_of_devices(tmp_path):
  saved_on("power sgd", 8, tmp_path)
  mesh, tx, exchange = make_mesh(), optax.sgd(0.005), power_sgd(AXES, rank=3)
  for count, shape in ((8, "[8, 9, 3]"), (4, "[4, 9, 3]")):
    mesh = make_mesh(devices=jax.devices()[:count])
    abstract = abstract_state(init_fn, tx, mesh, exchange)
    line = refused(tmp_path, abstract, exchange.resize)
    wanted = f"exchange_state/q/0 is float32[8, 9, 2] there and float32{shape} here"
    assert wanted in line and "another experiment" in line
  # Another model has another exchange state too: the model is what is named.
  wider = abstract_state(
    lambda key: ({"b": jnp.zeros(OUT), "w": jnp.zeros((WIDTH + 1, OUT))}, ()), tx, mesh, exchange
  )
  assert "params/w is float32[31, 9] there" in refused(tmp_path, wider, exchange.resize)


def test_an_exchange_that_cannot_be_carried_over_says_what_to_do(tmp_path):
  saved_on("top k", 8, tmp_path)
  exchange, _, abstract, _ = parts("top k", 4)
  line = refused(tmp_path, abstract)
  assert line.endswith(
    "4: saved on 8 devices, here are 4: its exchange does not define how its "
    "state is resized (Exchange.resize); resume with 8 devices, or use another "
    "--workdir to start anew"
  )
  assert restore(tmp_path, abstract, exchange.resize) is not None


def test_workers_of_their_own_are_refused_on_another_number_of_devices(tmp_path):
  tx, method = optax.sgd(0.1, momentum=0.9), local_updates.block_momentum(4, 8)
  made = init_fn, tx, make_mesh(), plain(AXES)
  state = init_state(*made, local=method)
  with Checkpoints(tmp_path) as checkpoints:
    checkpoints.save(state._replace(step=state.step + 4))
  again = restore(tmp_path, abstract_state(*made, local=method), plain(AXES).resize)
  assert again is not None
  jax.tree.map(np.testing.assert_array_equal, again.params, state.params)
  # Whatever `resize` the exchange of ways has: means of parameters it must not take.
  mesh = make_mesh(devices=jax.devices()[:4])
  abstract = abstract_state(init_fn, tx, mesh, plain(AXES), local=method)
  for resize in (None, plain(AXES).resize, EXCHANGES["top k"](4).resize):
    line = refused(tmp_path, abstract, resize)
    assert "saved on 8 devices, here are 4: each worker has its own parameters" in line
    assert "resume with 8 devices, or use another --workdir to start anew" in line
