"""The reader of compiled programs, on programs whose collectives are known."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxscale import hlo
from jaxscale.exchange import plain
from jaxscale.hlo import parse
from jaxscale.hlo.cost import FLOPS_PER_BYTE, costs
from jaxscale.mesh import make_mesh
from jaxscale.training.state import abstract_state
from jaxscale.training.step import make_train_step
from jaxscale.training.types import StepOptions
from support.paths import DATA

AXES = ("replica", "data")
FIXTURES = DATA / "hlo"
GRID = {"replica": 2, "data": 4}
ROW = 16 * 4  # bytes of a device's float32 [1, 16]
SCANNED_LAYER = 4 * 1024 * 4096  # of the scanned programs in tests/data/hlo


def tree(x):
  whole, part = lax.psum((x, x[:, :3] * 2), AXES)
  return (x + whole).at[:, :3].add(part)


def ring(x):
  """All-reduce over `data` by permutes: reduce-scatter, then all-gather."""
  n, here = 4, lax.axis_index("data")
  to_next = [(i, (i + 1) % n) for i in range(n)]
  parts = x.reshape(n, -1)
  for k in range(n - 1):
    sent = jnp.take(parts, (here - k) % n, axis=0)
    parts = parts.at[(here - k - 1) % n].add(lax.ppermute(sent, "data", to_next))
  for k in range(n - 1):
    sent = jnp.take(parts, (here + 1 - k) % n, axis=0)
    parts = parts.at[(here - k) % n].set(lax.ppermute(sent, "data", to_next))
  return parts.reshape(x.shape)


def hierarchical(x):
  part = lax.psum(lax.psum_scatter(x[0], "data", tiled=True), "replica")
  return lax.all_gather(part, "data", tiled=True)[None]


def nested(x):
  def outer(carry, _):
    def inner(carry, _):
      return lax.psum(carry, "data") * 0.1 + x, None

    carry, _ = lax.scan(inner, carry, None, length=3)
    return lax.psum(carry, "replica") + x, None

  return lax.scan(outer, x, None, length=5)[0]


def downwards(x):
  """i = 9, 7, 5, 3, 1: five times."""

  def step(carry):
    return carry[0] - 2, lax.psum(carry[1], "data") * 0.1 + x

  return lax.while_loop(lambda carry: carry[0] > 0, step, (jnp.int32(9), x))[1]


def until(x):
  return lax.while_loop(lambda x: x[0, 0] < 9, lambda x: lax.psum(x, "data") + x, x)


def sometimes(x):
  every = lax.psum(1, "data") + x[0, 0].astype(jnp.int32)
  return lax.cond(every > 4, lambda x: x + lax.psum(x, "data"), lambda x: x, x)


# name: function of [1, 16] a device, and rows (kind, axes, times, M, sent) wanted.
PROGRAMS = {
  "tree": (tree, [("all-reduce", AXES, 1, ROW + 12, 2 * (ROW + 12) * 7 / 8)]),
  "ring": (ring, [("collective-permute", ("data",), 1, ROW // 4, ROW / 4)] * 6),
  "hierarchical": (
    hierarchical,
    [
      ("reduce-scatter", ("data",), 1, ROW, ROW * 3 / 4),
      ("all-reduce", ("replica",), 1, ROW // 4, ROW / 4),
      ("all-gather", ("data",), 1, ROW, ROW * 3 / 4),
    ],
  ),
  "all-to-all": (
    lambda x: lax.all_to_all(x, "data", 1, 1, tiled=True),
    [("all-to-all", ("data",), 1, ROW, ROW * 3 / 4)],
  ),
  "nested": (
    nested,
    [("all-reduce", ("data",), 15, ROW, ROW * 6 / 4), ("all-reduce", ("replica",), 5, ROW, ROW)],
  ),
  "downwards": (downwards, [("all-reduce", ("data",), 5, ROW, ROW * 6 / 4)]),
  "until": (until, [("all-reduce", ("data",), 1, ROW, ROW * 6 / 4)]),
  "sometimes": (sometimes, [("all-reduce", ("data",), 1, ROW, ROW * 6 / 4)]),
}


@functools.cache
def text(name):
  function, mesh = PROGRAMS[name][0], make_mesh(replica=2)
  mapped = jax.shard_map(function, mesh=mesh, in_specs=P(AXES), out_specs=P(AXES))
  return jax.jit(mapped).lower(jnp.ones((8, 16))).compile().as_text()


def rows(table):
  return [(r.kind, r.axes, r.times, r.payload_bytes, r.wire_bytes) for r in table]


@pytest.mark.parametrize("name", PROGRAMS)
def test_known_programs(name):
  table = hlo.collectives(text(name), make_mesh(replica=2))
  assert rows(table) == PROGRAMS[name][1]
  assert all(r.times_known == (name != "until") for r in table)
  assert all(r.conditional == (name == "sometimes") for r in table)
  assert {r.dtypes for r in table} == {("f32",)}
  assert not any(r.is_async or r.overlap for r in table)


@pytest.mark.parametrize("name", ["nested", "downwards"])
def test_trips_are_found_where_the_compiler_does_not_write_them(name):
  bare = re.sub(r'"known_[a-z_]+":\{[^}]*\},?', "", text(name))
  assert "known_trip_count" in text(name) and '"known_' not in bare
  assert rows(hlo.collectives(bare, GRID)) == PROGRAMS[name][1]


@pytest.mark.parametrize(
  ("compare", "first", "step", "trips"),
  [
    ("%i, %n), direction=LT", 0, 1, 7),
    ("%i, %n), direction=LE", 0, 2, 4),
    ("%n, %i), direction=GT", 3, 3, 2),
    ("%i, %n), direction=NE", 1, 2, 3),
    ("%n, %i), direction=LE", 20, -1, 14),
    ("%i, %n), direction=LT", 9, 1, 0),
    ("%i, %n), direction=EQ", 7, 1, 1),
    ("%i, %n), direction=LT", 0, -1, None),
  ],
)
def test_trips_of_every_comparison(compare, first, step, trips):
  loop = f"""HloModule m, is_scheduled=true, num_partitions=8
%body (p: (s32[], f32[16])) -> (s32[], f32[16]) {{
  %p = (s32[], f32[16]{{0}}) parameter(0)
  %x = f32[16]{{0}} get-tuple-element(%p), index=1
  %r = f32[16]{{0}} all-reduce(%x), replica_groups=[2,4]<=[8], to_apply=%add
  %i = s32[]{{:T(128)}} get-tuple-element(%p), index=0
  %one = s32[]{{:T(128)}} constant({step})
  %next = s32[]{{:T(128)}} add(%i, %one)
  ROOT %t = (s32[], f32[16]{{0}}) tuple(%next, %r)
}}
%cond (p: (s32[], f32[16])) -> pred[] {{
  %p = (s32[], f32[16]{{0}}) parameter(0)
  %i = s32[]{{:T(128)}} get-tuple-element(%p), index=0
  %n = s32[]{{:T(128)}} constant(7)
  ROOT %lt = pred[] compare({compare}
}}
ENTRY %main (x: f32[16]) -> f32[16] {{
  %x = f32[16]{{0}} parameter(0)
  %c = s32[] constant({first})
  %s = s32[] copy(%c)
  %t = (s32[], f32[16]{{0}}) tuple(%s, %x)
  %w = (s32[], f32[16]{{0}}) while(%t), condition=%cond, body=%body
  ROOT %y = f32[16]{{0}} get-tuple-element(%w), index=1
}}"""
  (row,) = hlo.collectives(loop, GRID)
  known = trips is not None
  assert (row.times, row.times_known) == (trips if known else 1, known)
  assert row.groups == ((0, 1, 2, 3), (4, 5, 6, 7)) and row.axes == ("data",)


def test_forms_of_replica_groups():
  for cut, shape, order in [
    ((2, 4), (8,), None),
    ((4, 2), (2, 4), (1, 0)),
    ((2, 4), (2, 2, 2), (1, 0, 2)),
  ]:
    wanted = np.arange(8).reshape(shape).transpose(order).reshape(cut)
    written = f"[{','.join(map(str, cut))}]<=[{','.join(map(str, shape))}]"
    written += f"T({','.join(map(str, order))})" if order else ""
    assert parse.replica_groups(written, 8) == tuple(map(tuple, wanted.tolist()))
  assert parse.replica_groups("{{0,4},{1,5}}", 8) == ((0, 4), (1, 5))
  assert parse.replica_groups("{}", 3) == ((0, 1, 2),)
  named = "mesh['a'=2,'b'=4] {'b'}"  # jax 0.12
  assert parse.replica_groups(named, 8) == ((0, 1, 2, 3), (4, 5, 6, 7))
  assert parse.replica_groups("mesh[a=2,b=2,c=2] {a,c}", 8) == ((0, 1, 4, 5), (2, 3, 6, 7))
  assert parse.replica_groups("mesh['a'=4] {'a':(2)2}", 4) == ((0, 1), (2, 3))
  assert parse.replica_groups("mesh['a'=4] {'a':(1)2}", 4) == ((0, 2), (1, 3))
  turned = "mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'a'}"
  assert parse.replica_groups(turned, 8) == ((0, 1, 2, 3), (4, 5, 6, 7))
  assert parse.replica_groups("mesh<a=2>", 3) is None


def test_three_axes_are_distinguished():
  mesh = make_mesh(replica=2, bn_devices=2)
  for axes in [("bn",), ("data",), ("replica", "bn"), ("data", "bn")]:
    mapped = jax.shard_map(
      lambda x, axes=axes: lax.psum(x, axes) + x,
      mesh=mesh,
      in_specs=P(mesh.axis_names),
      out_specs=P(mesh.axis_names),
    )
    (row,) = hlo.collectives(jax.jit(mapped).lower(jnp.ones((8, 2))).compile(), mesh)
    assert row.axes == axes and row.group_size == 2 ** len(axes)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_our_step_sends_its_gradients_once(accumulate):
  mesh, tx = make_mesh(replica=2), optax.sgd(0.1)

  def loss(params, model_state, batch, keys):
    value = ((batch["x"] @ params["w"]) ** 2).sum()
    rows = (jax.random.key_data(keys)[:, 0] >= 0).sum(dtype=jnp.int32)
    return value, (model_state, {"examples": rows, "loss": value})

  def init(key):
    return {"w": jax.random.normal(key, (32, 48))}, {}

  state = abstract_state(init, tx, mesh, plain(AXES))
  options = StepOptions(num_microbatches=accumulate, unroll=False)
  step = make_train_step(loss, tx, mesh, plain(AXES), options=options)
  batch = {"x": jax.ShapeDtypeStruct((64, 32), jnp.float32)}
  table = hlo.collectives(step.lower(state, batch).compile(), mesh)
  sums = hlo.total(table, "all-reduce")
  scalars = sums.payload_bytes - 32 * 48 * 4
  assert sums == hlo.total(table) and scalars == 8  # examples and the loss
  assert max(table, key=lambda r: r.payload_bytes).times == 1
  assert all(r.axes == AXES for r in table)


def test_flops_of_dots_and_convolutions():
  """Against XLA's own count, where flops and not bytes decide."""
  conv = functools.partial(
    lax.conv_general_dilated,
    window_strides=(1, 1),
    padding="VALID",
    dimension_numbers=("NHWC", "HWIO", "NHWC"),
  )
  for function, shapes in [
    (jnp.matmul, [(2048, 4096), (4096, 1024)]),
    (conv, [(4, 34, 34, 512), (3, 3, 512, 512)]),
  ]:
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    compiled = jax.jit(function).lower(*args).compile()
    (module,) = parse.modules(compiled.as_text())
    wanted = compiled.cost_analysis()["flops"]
    assert costs(module)[1] * FLOPS_PER_BYTE == pytest.approx(wanted, rel=0.05)


ASYNC = """HloModule m, is_scheduled=SCHEDULED, num_partitions=8
%wrapped (p: f32[2,64]) -> f32[8,64] {
  %p = f32[2,64]{1,0} parameter(0)
  ROOT %g = f32[8,64]{1,0} all-gather(%p), replica_groups={{0,1,2,3},{4,5,6,7}}
}
ENTRY %main (a: f32[2,64], b: f32[999,999]) -> f32[8,64] {
  %a = f32[2,64]{1,0} parameter(0)
  %b = f32[999,999]{1,0} parameter(1)
  %tomorrow = f32[3]{0:X(5)} brand-new-op(%b), config={"a":"{(["}
  what is this
  %s = ((f32[2,64]{1,0}), f32[8,64]{1,0}, u32[]) async-start(%a), calls=%wrapped
  %d1 = f32[999,999]{1,0} dot(%b, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %u = ((f32[2,64]{1,0}), f32[8,64]{1,0}, u32[]) async-update(%s)
  %d2 = f32[999,999]{1,0} dot(%d1, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %e = f32[8,64]{1,0} async-done(%u)
  %d3 = f32[999,999]{1,0} dot(%d2, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %d4 = f32[999,999]{1,0} dot(%d3, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %r = f32[8,64]{1,0} negate(%e)
}"""


def test_compute_between_start_and_end():
  (row,) = hlo.collectives(ASYNC.replace("SCHEDULED", "true"), GRID)
  assert (row.kind, row.payload_bytes, row.wire_bytes) == ("all-gather", 2048, 1536)
  # Two of four products; the new operation is the 5 % that is left.
  assert row.is_async and row.overlap == pytest.approx(0.5, abs=0.1)
  (row,) = hlo.collectives(ASYNC.replace("SCHEDULED", "false"))
  assert row.is_async and row.overlap is None and row.axes is None


def fixture(name):
  return hlo.collectives((FIXTURES / f"{name}.txt").read_text(), GRID)


UP, LAYER = 2048 * 8192 * 2, 4  # bytes in bfloat16 of a layer's matrix, and layers
GRADIENT = 2 * 512 * 512 * 4 + 4  # and the loss


@pytest.mark.parametrize("target", ["tpu", "gpu"])
def test_our_step_on_accelerators(target):
  """One all-reduce of the gradients, which neither compiler hides."""
  count, gradients = sorted(fixture(f"{target}_step"), key=lambda r: r.payload_bytes)
  assert count.dtypes == ("s32",) and count.payload_bytes == 4
  assert rows([gradients]) == [("all-reduce", AXES, 1, GRADIENT, GRADIENT * 14 / 8)]
  assert not gradients.is_async and gradients.overlap == 0


def test_kinds_on_accelerators():
  megabytes = 1024 * 1024
  for target, dtype in ("tpu", "bf16"), ("gpu", "f32"):
    gathered = megabytes * (2 if dtype == "bf16" else 4)
    assert rows(fixture(f"{target}_kinds")) == [
      ("collective-permute", ("data",), 1, 4 * megabytes, 4 * megabytes),
      ("reduce-scatter", ("data",), 1, 4 * megabytes, 3 * megabytes),
      ("all-reduce", ("replica",), 1, megabytes, megabytes),
      ("all-gather", ("data",), 1, gathered, gathered * 3 / 4),
      ("all-to-all", ("data",), 1, 4 * megabytes, 3 * megabytes),
    ]
    assert fixture(f"{target}_kinds")[3].dtypes == (dtype,)


def test_layers_on_a_gpu():
  """Loops with starts and ends; the last reduce-scatter is peeled out of its loop."""
  table = fixture("gpu_layers")
  gathers = [r for r in table if r.kind == "all-gather"]
  assert [r.times for r in gathers] == [4, 4, 1, 1, 3, 3]
  assert {r.payload_bytes for r in gathers} == {UP}
  assert all(r.is_async for r in gathers) and any(r.overlap > 0.05 for r in gathers)
  scatters = [r for r in table if r.kind == "reduce-scatter"]
  assert [(r.times, r.payload_bytes, r.is_async) for r in scatters] == [
    (3, 2 * UP, True),
    (1, 2 * UP, False),
  ]
  assert hlo.total(table, axis="replica").payload_bytes == 2 * LAYER * UP // 2


def test_layers_on_a_tpu():
  """Half of the gathers are fused with matmuls; a fused reduce-scatter is not."""
  table = fixture("tpu_layers")
  gathers = [r for r in table if r.kind == "all-gather"]
  assert [(r.times, r.is_async) for r in gathers] == [(4, False), (4, True)] * 2
  assert hlo.total(gathers).payload_bytes == 4 * LAYER * UP
  assert all((r.overlap > 0.02) == r.is_async for r in gathers)
  scatters = [r for r in table if r.kind == "reduce-scatter"]
  padded = [2240 * 8192 * 2, 8320 * 2048 * 2]  # by the compiler
  assert sorted(r.payload_bytes for r in scatters) == sorted(padded)
  assert all(r.times == LAYER and not r.is_async for r in scatters)
  assert [r.is_async for r in table if r.kind == "all-reduce"] == [False, False]


def test_two_slices_of_a_tpu():
  """Within a slice as usual; between them a quarter each, by the host."""
  m = 1024 * 1024 * 4
  scatter, between, gather = fixture("tpu_slices")
  assert rows([scatter, gather]) == [
    ("reduce-scatter", ("data",), 1, m, m * 3 / 4),
    ("all-gather", ("data",), 1, m, m * 3 / 4),
  ]
  assert rows([between]) == [("all-reduce", ("replica",), 1, m // 4, m / 4)]
  assert between.is_async


def test_summary_is_for_people():
  lines = hlo.summary(fixture("gpu_layers")).splitlines()
  assert [x.split()[:4] for x in lines[1:3]] == [
    ["all-gather", "data", "bf16", "16"],
    ["reduce-scatter", "data", "bf16", "3"],
  ]
  assert "738.198 MB per step, 93% of it" in lines[-1]
  unknown = hlo.summary(hlo.collectives(text("until"), GRID))
  assert "counted once" in unknown
  assert "in a branch" in hlo.summary(hlo.collectives(text("sometimes")))


@pytest.mark.parametrize(
  ("name", "payload", "times", "share"),
  [("tpu", SCANNED_LAYER // 4, [1, 3], 0.75), ("gpu", SCANNED_LAYER, [4], 1.0)],
)
def test_sums_in_a_backward_scan_hide_behind_other_layers(name, payload, times, share):
  """Two TPU v5e slices and two hosts of 4 H100: what crosses between them.

  On TPU the last turn of the loop is peeled off, and nothing follows its send.
  """
  text = (FIXTURES / f"{name}_in_backward.txt").read_text()
  table = hlo.collectives(text, {"replica": 2, "data": 4})
  sums = [r for r in table if "replica" in (r.axes or ()) and r.payload_bytes == payload]
  assert sorted(r.times for r in sums) == times and all(r.is_async for r in sums)
  hidden = [r for r in sums if (r.overlap or 0.0) > 0.1]
  assert sum(r.times for r in hidden) == share * sum(times)
  rest = [r for r in table if "replica" in (r.axes or ()) and r not in sums]
  assert all(r.payload_bytes <= 1024 for r in rest)
