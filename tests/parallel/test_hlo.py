"""The reader of compiled programs, on programs whose collectives are known."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import NamedSharding, P, lax

from jaxscale import hlo, optim
from jaxscale.hlo import parse
from jaxscale.hlo.cost import FLOPS_PER_BYTE, costs
from jaxscale.mesh import make_mesh
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
  """Loop over i = 9, 7, 5, 3, 1: five times."""

  def step(carry):
    return carry[0] - 2, lax.psum(carry[1], "data") * 0.1 + x

  return lax.while_loop(lambda carry: carry[0] > 0, step, (jnp.int32(9), x))[1]


def until(x):
  return lax.while_loop(lambda x: x[0, 0] < 9, lambda x: lax.psum(x, "data") + x, x)


def sometimes(x):
  every = lax.psum(1, "data") + x[0, 0].astype(jnp.int32)
  return lax.cond(every > 4, lambda x: x + lax.psum(x, "data"), lambda x: x, x)


# name: function of [1, 16] a device, and rows (kind, axes, times, M, sent) wanted.
def exchanged(x):
  return lax.all_to_all(x, "data", 1, 1, tiled=True)


ONCE, SUMS = (("data",), 1, ROW, ROW * 3 / 4), "all-reduce"
REDUCED = (SUMS, ("data",), 1, ROW, ROW * 6 / 4)
QUARTERS = (SUMS, ("replica",), 1, ROW // 4, ROW / 4)
NESTED = (SUMS, ("data",), 15, ROW, ROW * 6 / 4), (SUMS, ("replica",), 5, ROW, ROW)
PROGRAMS = {
  "tree": (tree, (SUMS, AXES, 1, ROW + 12, 2 * (ROW + 12) * 7 / 8)),
  "ring": (ring, *[("collective-permute", ("data",), 1, ROW // 4, ROW / 4)] * 6),
  "hierarchical": (hierarchical, ("reduce-scatter", *ONCE), QUARTERS, ("all-gather", *ONCE)),
  "all-to-all": (exchanged, ("all-to-all", *ONCE)),
  "nested": (nested, *NESTED),
  "downwards": (downwards, (SUMS, ("data",), 5, ROW, ROW * 6 / 4)),
  "until": (until, REDUCED),
  "sometimes": (sometimes, REDUCED),
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
  assert rows(table) == [*PROGRAMS[name][1:]]
  assert all(r.times_known == (name != "until") for r in table)
  assert all(r.conditional == (name == "sometimes") for r in table)
  assert {r.dtypes for r in table} == {("f32",)}
  assert not any(r.is_async or r.overlap for r in table)


@pytest.mark.parametrize("name", ["nested", "downwards"])
def test_trips_are_found_where_the_compiler_does_not_write_them(name):
  bare = re.sub(r'"known_[a-z_]+":\{[^}]*\},?', "", text(name))
  assert "known_trip_count" in text(name) and '"known_' not in bare
  assert rows(hlo.collectives(bare, GRID)) == [*PROGRAMS[name][1:]]


# Operands and direction of the comparison with 7, i at first, its step -> turns.
TRIPS = """
i n LT 0  1  7
i n LE 0  2  4
n i GT 3  3  2
i n NE 1  2  3
n i LE 20 -1 14
i n LT 9  1  0
i n EQ 7  1  1
i n LT 0  -1 None
""".strip().splitlines()


@pytest.mark.parametrize("row", TRIPS)
def test_trips_of_every_comparison(row):
  a, b, direction, first, step, trips = row.split()
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
  ROOT %lt = pred[] compare(%{a}, %{b}), direction={direction}
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
  known = trips != "None"
  assert (row.times, row.times_known) == (int(trips) if known else 1, known)
  assert row.groups == ((0, 1, 2, 3), (4, 5, 6, 7)) and row.axes == ("data",)


def test_forms_of_replica_groups():
  turned = ((4, 2), (2, 4), (1, 0)), ((2, 4), (2, 2, 2), (1, 0, 2))
  for cut, shape, order in [((2, 4), (8,), None), *turned]:
    wanted = np.arange(8).reshape(shape).transpose(order).reshape(cut)
    written = f"[{','.join(map(str, cut))}]<=[{','.join(map(str, shape))}]"
    written += f"T({','.join(map(str, order))})" if order else ""
    assert parse.replica_groups(written, 8) == tuple(map(tuple, wanted.tolist()))
  for written, size, wanted in (
    ("{{0,4},{1,5}}", 8, ((0, 4), (1, 5))),
    ("{}", 3, ((0, 1, 2),)),
    ("mesh['a'=2,'b'=4] {'b'}", 8, ((0, 1, 2, 3), (4, 5, 6, 7))),  # jax 0.12
    ("mesh[a=2,b=2,c=2] {a,c}", 8, ((0, 1, 4, 5), (2, 3, 6, 7))),
    ("mesh['a'=4] {'a':(2)2}", 4, ((0, 1), (2, 3))),
    ("mesh['a'=4] {'a':(1)2}", 4, ((0, 2), (1, 3))),
    ("mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'a'}", 8, ((0, 1, 2, 3), (4, 5, 6, 7))),
    ("mesh<a=2>", 3, None),
  ):
    assert parse.replica_groups(written, size) == wanted, written


def test_three_axes_are_distinguished():
  mesh = make_mesh(replica=2, bn_devices=2)
  for axes in [("bn",), ("data",), ("replica", "bn"), ("data", "bn")]:
    spec = P(mesh.axis_names)
    add = lambda x, axes=axes: lax.psum(x, axes) + x  # noqa: E731
    mapped = jax.shard_map(add, mesh=mesh, in_specs=spec, out_specs=spec)
    (row,) = hlo.collectives(jax.jit(mapped).lower(jnp.ones((8, 2))).compile(), mesh)
    assert row.axes == axes and row.group_size == 2 ** len(axes)


def test_flops_of_dots_and_convolutions():
  """Against XLA's own count, where flops and not bytes decide."""

  def conv(x, kernel):
    dims = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=dims)

  products = (jnp.matmul, (2048, 4096), (4096, 1024)), (conv, (4, 34, 34, 512), (3, 3, 512, 512))
  for function, *shapes in products:
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


def of_kind(table, kind):
  return [row for row in table if row.kind == kind]


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
  gathers, scatters = of_kind(table, "all-gather"), of_kind(table, "reduce-scatter")
  assert [r.times for r in gathers] == [4, 4, 1, 1, 3, 3]
  assert {r.payload_bytes for r in gathers} == {UP}
  assert all(r.is_async for r in gathers) and any(r.overlap > 0.05 for r in gathers)
  assert [(r.times, r.is_async) for r in scatters] == [(3, True), (1, False)]
  assert {r.payload_bytes for r in scatters} == {2 * UP}
  assert hlo.total(table, axis="replica").payload_bytes == 2 * LAYER * UP // 2


def test_layers_on_a_tpu():
  """Half of the gathers are fused with matmuls; a fused reduce-scatter is not."""
  table = fixture("tpu_layers")
  gathers, scatters = of_kind(table, "all-gather"), of_kind(table, "reduce-scatter")
  assert [(r.times, r.is_async) for r in gathers] == [(4, False), (4, True)] * 2
  assert hlo.total(gathers).payload_bytes == 4 * LAYER * UP
  assert all((r.overlap > 0.02) == r.is_async for r in gathers)
  padded = [2240 * 8192 * 2, 8320 * 2048 * 2]  # by the compiler
  assert sorted(r.payload_bytes for r in scatters) == sorted(padded)
  assert all(r.times == LAYER and not r.is_async for r in scatters)
  assert [r.is_async for r in of_kind(table, "all-reduce")] == [False, False]


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
  assert "counted as 1" in unknown
  assert "in a branch" in hlo.summary(hlo.collectives(text("sometimes")))


IN_BACKWARD = [("tpu", SCANNED_LAYER // 4, [1, 3], 0.75), ("gpu", SCANNED_LAYER, [4], 1.0)]


@pytest.mark.parametrize("name, payload, times, share", IN_BACKWARD)
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


def test_norms_of_layer_wise_optimizers_move_no_array():
  """Expect only sums between devices for leaves split in their first, last or middle dimension."""
  shapes = {"scan": (3, 8, 6), "bias": (16,), "conv": (3, 3, 4, 16), "dense": (24, 10)}
  middle, first, last = P(None, "data"), P("data"), P(None, None, None, "data")
  where = {"scan": middle, "bias": first, "conv": last, "dense": first}
  mesh = make_mesh()
  where = {name: NamedSharding(mesh, spec) for name, spec in where.items()}
  params = {name: jax.device_put(jnp.ones(shapes[name]), where[name]) for name in shapes}
  for tx in (optim.lars(0.1), optim.lamb(0.1)):
    compiled = jax.jit(tx.update).lower(params, tx.init(params), params).compile()
    assert {row.kind for row in hlo.collectives(compiled, mesh)} == {"all-reduce"}
