"""Copies and numbers under layouts: a device that differs, and one that has NaN."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale import hlo, optim
from jaxscale.exchange import plain
from jaxscale.parallel import stack_loss
from jaxscale.parallel.layout_exchange import exchange_axes
from jaxscale.parallel.placement import shard_like_params
from jaxscale.parallel.specs import backward_sum_axes
from jaxscale.training import nan_guard, replica_check
from jaxscale.training.replica_check import Replica, ReplicaDivergenceError, make_fingerprint
from support.bad_values import flipped, spoilt
from support.cases import all_slow_except
from support.stack_layouts import stack_layout
from support.steps import training
from support.tiny_stack import batch

PARAMETERS = {"shard": "fsdp"}
LAYOUTS = {
  "data 4 x fsdp 2": ({"data": 4, "fsdp": 2}, PARAMETERS),
  "data 2 x fsdp 2 x model 2": ({"data": 2, "fsdp": 2, "model": 2}, PARAMETERS),
  "data 4 x model 2": ({"data": 4, "model": 2}, {}),
  "fsdp 8": ({"data": 1, "fsdp": 8}, PARAMETERS),
  "zero-2": ({"data": 2, "fsdp": 4}, {"shard": "zero2"}),
}


def made_layout(name):
  return stack_layout(*LAYOUTS[name])


@functools.cache
def placed(name):
  """Parameters in a layout, and the function that hashes them."""
  mesh, stack, layout = made_layout(name)
  init = jax.jit(lambda key: shard_like_params(stack.init(key), layout))
  params = init(jax.random.key(0))
  return mesh, params, make_fingerprint(mesh, params)


def with_flipped(x, *devices):
  """Return the array with one bit flipped in the parts on these devices."""
  on = {s.device: s.data for s in x.addressable_shards}
  on |= {d: flipped(np.asarray(data)) for d, data in on.items() if d.id in devices}
  on = [jax.device_put(data, d) for d, data in on.items()]
  return jax.make_array_from_single_device_arrays(x.shape, x.sharding, on)


def found(name, leaf, *devices):
  """Return the message of a check after bits of `leaf` were flipped."""
  _, params, fingerprint = placed(name)
  part, key = leaf.split("/")
  bad = with_flipped(params[part][key], *devices)
  params = params | {part: params[part] | {key: bad}}
  try:
    replica_check.check(params, fingerprint, step=7)
  except ReplicaDivergenceError as e:
    assert "\n" not in str(e) and str(e).endswith(" after step 7")
    return str(e).removesuffix(" after step 7")
  return None


@pytest.mark.parametrize("name", all_slow_except(LAYOUTS, "data 2 x fsdp 2 x model 2"))
def test_parts_of_one_whole_raise_no_alarm(name):
  mesh, params, fingerprint = placed(name)
  replica_check.check(params, fingerprint, step=7)
  prints = np.asarray(fingerprint(params))
  assert prints.shape == (8, len(jax.tree.leaves(params)))
  # They are other parts, not copies of one.
  assert len({tuple(row) for row in prints}) == (1 if name == "zero-2" else 8 // mesh.shape["data"])


CUBE, SAME = "data 2 x fsdp 2 x model 2", "in the same part of"
# Layout, leaf, the devices whose bits differ, and what the line says after the host.
DIFFER = [
  # Devices 1, 3, 5 and 7 have the second half of each parameter; some are whole on all.
  ("data 4 x fsdp 2", "layers/q", [5], f"cpu:5) differs from 3 of 4 devices {SAME}"),
  ("data 4 x fsdp 2", "head/scale", [5], "cpu:5) differs from 7 of 8 devices in"),
  ("data 4 x fsdp 2", "layers/q", [4, 5], f"cpu:4 and cpu:5) differs from 6 of 8 devices {SAME}"),
  # Devices 2 and 6 have the part of fsdp 1 and model 0: neither is blamed.
  (CUBE, "layers/q", [6], f"cpu:2 and cpu:6) differ {SAME}"),
  # What model does not split is compared along it.
  (CUBE, "layers/scale", [6], "cpu:6) differs from 7 of 8 devices in"),
  ("data 4 x model 2", "layers/down_bias", [0], "cpu:0) differs from 7 of 8 devices in"),
  ("data 4 x model 2", "layers/up_bias", [0], f"cpu:0) differs from 3 of 4 devices {SAME}"),
  # What one device alone has is not compared.
  ("fsdp 8", "layers/q", [6], None),
  ("fsdp 8", "layers/scale", [6], "cpu:6) differs from 7 of 8 devices in"),
  # Under ZeRO-2 the parameters are whole, and the moments are not.
  ("zero-2", "layers/q", [6], "cpu:6) differs from 7 of 8 devices in"),
]


@pytest.mark.parametrize("name, leaf, devices, says", DIFFER)
def test_the_device_whose_part_differs_is_named(name, leaf, devices, says):
  host, last = f"process 0 ({replica_check.platform.node()}, ", ""
  if says and "differ " in says:
    last = ": 2 devices hold 2 versions, and no majority shows which one is right"
  assert found(name, leaf, *devices) == (says and f"{host}{says} {leaf}{last}")


def test_nothing_crosses_the_network():
  mesh, params, fingerprint = placed("data 2 x fsdp 2 x model 2")
  assert hlo.collectives(fingerprint.lower(params).compile(), mesh) == []


def test_parts_of_several_processes_in_words():
  """Two nodes of two devices, each with halves: a half of one differs."""
  devices = [(i // 2, i % 2) for i in range(6)]
  rows = [Replica(n, f"n{n}", f"gpu:{i}", (10 + i, 5), (i, 0)) for n, i in devices]
  assert replica_check.describe(rows, ["w", "b"]) is None
  rows[3] = rows[3]._replace(hashes=(7, 5))
  line = replica_check.describe(rows, ["w", "b"])
  assert line == "process 1 (n1, gpu:1) differs from 2 of 3 devices in the same part of w"
  rows[4] = rows[4]._replace(hashes=(10, 4))
  assert replica_check.describe(rows, ["w", "b"]) == (
    "process 1 (n1, gpu:1) and process 2 (n2, gpu:0) differs from 4 of 6 devices in "
    "the same part of w and 1 more leaf"
  )


def spoilt_finish(finish, what):
  """Wrap `finish`: a row whose first target is -2 gives NaN in a gradient, or in the loss."""

  def bad(params, h, rows, ops):
    flag = jnp.where((rows["targets"] == -2).any(), jnp.nan, 1.0)[None]
    if what in params:
      params = params | {what: spoilt(params[what], flag)}
    h = spoilt(h, flag) if what == "h" else h * flag if what == "loss" else h
    return finish(params, h, rows, ops)

  return bad


@functools.cache
def spoilt_step(name, what):
  mesh, stack, layout = made_layout(name)
  stack = stack._replace(finish=spoilt_finish(stack.finish, what))
  parts = optim.adamw(1e-2), mesh, plain(exchange_axes(layout))
  init = lambda key: (stack.init(key), {})  # noqa: E731
  loss = stack_loss(stack, layout)
  return mesh, layout, *training(loss, init, *parts, layout=layout, skip_bad_steps=True)


# On each device 2 rows of 16; device 3's are 6 and 7, and it shares with device 2. Of two
# along model devices 2 and 3 have rows 4 to 7, each a half of the kernel; of eight in a
# cube devices 0 to 3 have rows 0 to 7, of them 2 and 3 the rows 4 to 7.
SPOILT = {
  ("data 4 x fsdp 2", "scale"): "device 3: gradient of head/scale",
  ("data 4 x fsdp 2", "kernel"): "devices 2 and 3: gradient of head/kernel, summed over fsdp,",
  ("data 4 x fsdp 2", "loss"): "device 3: gradient of embed/table, summed over fsdp,",
  ("zero-2", "kernel"): "devices 0, 1, 2 and 3: gradient of head/kernel, summed over fsdp,",
  ("data 4 x model 2", "kernel"): "devices 2 and 3: gradient of head/kernel",
  ("data 4 x model 2", "loss"): "devices 2 and 3: gradient of embed/table",
  (CUBE, "scale"): "devices 2 and 3: gradient of head/scale",
  (CUBE, "h"): "devices 0, 1, 2 and 3: gradient of embed/table, summed over fsdp,",
  (CUBE, "loss"): "devices 2 and 3: gradient of embed/table, summed over fsdp,",
}
QUICK = [("data 2 x fsdp 2 x model 2", "loss")]


@pytest.mark.parametrize("case", all_slow_except(SPOILT, *QUICK), ids="-".join)
def test_a_bad_gradient_of_one_device_is_skipped_and_named(case):
  mesh, layout, state, step = spoilt_step(*case)
  rows = batch(0, mesh)
  targets = np.array(rows["targets"])
  targets[6, 0] = -2
  bad = rows | {"targets": jax.device_put(targets, rows["targets"].sharding)}
  before = jax.device_get(state)
  state, metrics = step(state, bad)
  after = jax.device_get(state)
  jax.tree.map(np.testing.assert_array_equal, before.params, after.params)
  counted = jax.tree.map(lambda x: x + 1 if x.dtype == np.int32 else x, before)
  jax.tree.map(np.testing.assert_array_equal, counted, after)
  assert np.isnan(metrics["loss"])
  seen = metrics.pop(nan_guard.CODES)
  diagnosis = nan_guard.describe(seen, state.params, {}, state, backward_sum_axes(layout))
  assert not diagnosis.in_state
  assert diagnosis.text == f"process 0 ({replica_check.platform.node()}), {SPOILT[case]} is NaN"
  # And what follows is good.
  state, metrics = step(state, rows)
  assert np.isfinite(metrics["loss"])
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(jax.device_get(state)))
