"""Copies that differ are found and named; equal ones raise no alarm."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxscale import hlo
from jaxscale.exchange import plain
from jaxscale.exchange.wrappers import silent
from jaxscale.mesh import make_mesh, replicated
from jaxscale.training import losses, replica_check
from support.bad_values import flipped
from support.digits import cnn, digits_batch
from support.steps import on_mesh, training

VALUES = {
  "f32": np.linspace(-1, 1, 35, dtype=np.float32).reshape(5, 7),
  "bf16": jnp.linspace(-1, 1, 33).astype(jnp.bfloat16),
  "f16": np.linspace(-1, 1, 9, dtype=np.float16),
  "i32": np.arange(6, dtype=np.int32),
  "i8": np.arange(-3, 3, dtype=np.int8),
  "u16": np.arange(6, dtype=np.uint16),
  "mask": np.array([True, False, True]),
  "c64": np.array([1 + 2j, 3 - 4j], np.complex64),
  "scalar": np.float32(3.0),
  "empty": np.zeros((0, 3), np.float32),
}


@pytest.fixture(scope="module")
def mesh():
  return make_mesh(replica=2)


def copies(mesh, values, changed=None, at=5):
  """Replicated arrays, of which one device holds others."""

  def put(value, other):
    on = [jax.device_put(other if d.id == at else value, d) for d in mesh.devices.flat]
    return jax.make_array_from_single_device_arrays(value.shape, replicated(mesh), on)

  return {name: put(v, (changed or {}).get(name, v)) for name, v in values.items()}


def found(mesh, values, changed=None, at=5):
  names = sorted(values)
  prints = replica_check.make_fingerprint(mesh)(copies(mesh, values, changed, at))
  return replica_check.find_divergence(prints, names, mesh, [()] * len(names))


def test_equal_copies_raise_no_alarm(mesh):
  prints = replica_check.make_fingerprint(mesh)(copies(mesh, VALUES))
  assert prints.shape == (8, len(VALUES)) and prints.dtype == np.uint32
  assert (np.asarray(prints) == np.asarray(prints)[0]).all()
  assert replica_check.find_divergence(prints, sorted(VALUES), mesh, [()] * len(VALUES)) is None


@pytest.mark.parametrize("name", ["f32", "bf16", "f16", "i32", "i8", "u16"])
def test_one_flipped_bit_is_found_and_named(mesh, name):
  last = 8 * np.asarray(VALUES[name]).dtype.itemsize - 1
  for bit in (0, last // 2, last):
    line = found(mesh, VALUES, {name: flipped(VALUES[name], bit=bit)})
    host = replica_check.platform.node()
    assert line == (f"process 0 ({host}, cpu:5) differs from 7 of 8 devices in {name}")


def nan(payload, dtype=np.uint32, base=0x7FC00000):
  return np.array([base | payload], dtype)


def swapped(value, i, j):
  """Return the array with two elements swapped."""
  raw = value.copy()
  raw.flat[[i, j]] = raw.flat[[j, i]]
  return raw


def numbers(*shape):
  return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


BFLOAT = np.uint16, 0x7FC0
BITS = {
  "sign of zero": (np.zeros(5, np.float32), -np.zeros(5, np.float32)),
  "NaN's payload": (nan(1).view(np.float32), nan(2).view(np.float32)),
  "bfloat16 NaN's": (nan(1, *BFLOAT).view(jnp.bfloat16), nan(2, *BFLOAT).view(jnp.bfloat16)),
  "denormal": (np.zeros(1, np.float32), np.array([1], np.uint32).view("f4")),
  "bool": (np.array([True, False]), np.array([True, True])),
  "imaginary": (np.array([1 + 2j], "c8"), np.array([1 + 3j], "c8")),
  "swapped": (numbers(4, 6), swapped(numbers(4, 6), 3, 17)),
  "transposed": (numbers(4, 4), numbers(4, 4).T.copy()),
}


@pytest.mark.parametrize("name", BITS)
def test_what_compares_equal_or_sums_alike_is_found_too(mesh, name):
  value, other = ({"w": x} for x in BITS[name])
  assert found(mesh, value) is None
  line = found(mesh, value, other, at=0)
  assert line and "cpu:0) differs from 7 of 8 devices" in line


def test_hash_is_that_of_numpy():
  """The formula of the docstring, in Python's integers."""

  def mix(x):
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
      x = (x ^ (x >> shift)) * factor % 2**32
    return x ^ (x >> 16)

  value = VALUES["f32"]
  bits = value.view(np.uint32).reshape(-1).tolist()
  wanted = sum(mix((b + 0x9E3779B9 * i) % 2**32) for i, b in enumerate(bits))
  assert int(replica_check.hash_bits(jnp.asarray(value))) == wanted % 2**32


def test_random_keys_and_wide_numbers_have_hashes():
  key = jax.random.key(1)
  assert int(replica_check.hash_bits(key)) != int(replica_check.hash_bits(jax.random.key(2)))
  with jax.enable_x64(True):
    x = jnp.array([1.0, 2.0])
    nearby = x.at[0].set(np.nextafter(1.0, 2.0))
    assert int(replica_check.hash_bits(x)) != int(replica_check.hash_bits(nearby))


def rows(*hashes, per_process=1):
  return [
    replica_check.Replica(i // per_process, f"n{i // per_process}", f"gpu:{i}", h)
    for i, h in enumerate(hashes)
  ]


def test_without_a_majority_nobody_is_blamed():
  line = replica_check.describe(rows((1, 2), (1, 3)), ["a", "b"])
  assert line == (
    "process 0 (n0, gpu:0) and process 1 (n1, gpu:1) differ in b: 2 devices "
    "hold 2 versions, and no majority shows which one is right"
  )


def test_a_process_whose_devices_all_differ_is_named_once():
  whole = (1, 2)
  hashes = rows(*[whole] * 4, (5, 6), (5, 6), per_process=2)
  line = replica_check.describe(hashes, ["a", "b"])
  wanted = "process 2 (n2, gpu:4 and gpu:5) differs from 4 of 6 devices in a and 1 more leaf"
  assert line == wanted


def test_a_thousand_devices_are_one_short_line():
  line = replica_check.describe(rows(*((i,) for i in range(1000))), ["a"])
  assert line and len(line) < 300 and "996 more processes" in line
  assert "1000 versions" in line


@pytest.mark.parametrize("broken", [False, True])
def test_after_real_steps_only_a_broken_exchange_is_found(mesh, broken):
  fns, tx = cnn(), optax.sgd(0.1, momentum=0.9)
  exchange = plain(mesh.axis_names)
  exchange = silent(exchange, mesh.axis_names) if broken else exchange
  state, step = training(losses.classification_loss(fns.apply), fns.init, tx, mesh, exchange)
  for i in range(3):
    state, _ = step(state, on_mesh(mesh, digits_batch(32, i)))
  shared = replica_check.shared(state)
  if not broken:
    replica_check.check(shared, replica_check.make_fingerprint(mesh), step=3)
    return
  with pytest.raises(replica_check.ReplicaDivergenceError) as error:
    replica_check.check(shared, replica_check.make_fingerprint(mesh), step=3, before=2)
  assert "8 versions, and no majority" in str(error.value)
  assert "in params/Conv_0/bias" in str(error.value) and "\n" not in str(error.value)
  assert error.value.step == 3 and error.value.good_until == 2


def test_nothing_crosses_the_network(mesh):
  compiled = replica_check.make_fingerprint(mesh).lower(copies(mesh, VALUES)).compile()  # pyright: ignore
  assert hlo.collectives(compiled, mesh) == []
