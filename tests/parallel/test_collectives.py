"""Every collective equals `psum`; steps and bytes are read from the program."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P, lax
from jax.sharding import AxisType

from jaxscale import collectives, hlo
from jaxscale.collectives import Dim, Plan, plan
from jaxscale.collectives.planner import axis_dims
from support.cases import all_slow_except
from support.errors import config_error

SIZES = (0, 1, 2, 3, 5, 7, 8, 9, 13, 16, 17, 31, 63, 64, 65, 97, 127, 257, 1000, 1021)
DTYPES = ("int32", "float32", "bfloat16", "float16")
MESHES = ((2,), (4,), (8,), (2, 4), (2, 2, 2))
NAMES = ("a", "b", "c")
# Compiled for one run each: time to compile is all that counts.
QUICKLY = {"xla_backend_optimization_level": 0}


@functools.cache
def mesh_of(shape):
  devices = jax.devices()[: math.prod(shape)]
  types = (AxisType.Auto,) * len(shape)
  return jax.make_mesh(shape, NAMES[: len(shape)], types, devices=devices)


def by_plan(algorithm, x, axes, dims=None, **options):
  """Sum over axes of the enclosing `shard_map`."""
  sizes = {a: lax.axis_size(a) for a in axes}
  if algorithm == "torus" and dims is None:  # a dimension per axis
    dims = list(reversed(sizes.items()))
  return collectives.sum_tree(x, plan(sizes, 0, algorithm, dims=dims), **options)


def split(x, axes, **options):
  """Sum over a torus that splits the axes into dimensions of two, the far ones first."""
  dims = [(a, 2) for a in axes for _ in range(lax.axis_size(a).bit_length() - 1)]
  return by_plan("torus", x, axes, dims, **options)


FORMS = {a: functools.partial(by_plan, a) for a in collectives.ALGORITHMS} | {"split": split}


def inputs(num_devices, size, dtype, seed=0):
  rng = np.random.default_rng(seed + size)
  if dtype == "int32":  # sums wrap around
    low, high = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    return rng.integers(low, high, (num_devices, size)).astype(np.int32)
  return np.asarray(rng.normal(size=(num_devices, size)), jnp.dtype(dtype))


def reduce_rows(function, mesh, rows, check_vma=True):
  """`function(own, axes)` on every device, each with its row of every array."""
  axes = mesh.axis_names

  def local(rows):
    return [function(x[0], axes) for x in rows]

  mapped = jax.shard_map(local, mesh=mesh, in_specs=P(axes), out_specs=P(), check_vma=check_vma)
  return jax.jit(mapped, compiler_options=QUICKLY)(rows)


def assert_is_the_sum(found, rows, psum, rounding=1.0):
  """Equal on all devices, and to `psum` as far as the dtype goes.

  Args:
    rounding: how many times half a unit in the last place of sum |x|.
  """
  shards = [np.asarray(s.data) for s in found.addressable_shards]
  assert all(s.tobytes() == shards[0].tobytes() for s in shards)
  assert found.dtype == rows.dtype and found.shape == rows.shape[1:]
  if rows.dtype == np.int32:
    assert shards[0].tobytes() == np.asarray(psum).tobytes()
    return
  exact = rows.astype(np.float64).sum(0)
  scale = np.abs(rows.astype(np.float64)).sum(0)
  half = 1e-6 if rows.dtype == np.float32 else jnp.finfo(rows.dtype).eps / 2 * rounding
  assert (np.abs(shards[0].astype(np.float64) - exact) <= half * scale).all()
  if rows.dtype == np.float32:
    assert (np.abs(shards[0] - np.asarray(psum)) <= 1e-6 * scale + 1e-30).all()


def check_cases(mesh, cases, forms=tuple(FORMS)):
  rows = [inputs(mesh.size, size, dtype) for size, dtype in cases]
  sums = reduce_rows(lambda x, axes: lax.psum(x, axes), mesh, rows)
  for form in forms:
    found = reduce_rows(FORMS[form], mesh, rows)
    for case, x, got, psum in zip(cases, rows, found, sums, strict=True):
      try:  # each addition on the way rounds
        assert_is_the_sum(got, x, psum, rounding=mesh.size)
      except AssertionError as e:
        raise AssertionError(f"{form} of {case}") from e


def different_forms(shape):
  """Those that are not the same permutes under another name on such a mesh."""
  same = {(2,): {"torus", "split", "halving_doubling"}, (2, 2, 2): {"halving_doubling"}}
  same_in_one_axis = {"torus", "split"} if len(shape) == 1 else set()
  return [f for f in FORMS if f not in same.get(shape, same_in_one_axis)]


def cases_of(shape):
  """Every size, dtypes in turn.

  A form splits a size over a mesh whatever the dtype, and each dtype rounds on any
  mesh: over all meshes every pair of mesh, size and dtype occurs with every form.
  """
  first = MESHES.index(shape)
  return [(n, DTYPES[(i + i // 4 + first) % 4]) for i, n in enumerate(SIZES)]


SOME = [(4,), (2, 4)]  # of which quickly a quarter of the sizes
EVERY = [pytest.param(shape, 1, marks=pytest.mark.slow) for shape in MESHES]


@pytest.mark.parametrize("shape, every", [*((shape, 4) for shape in SOME), *EVERY], ids=str)
def test_every_form_is_psum(shape, every):
  cases = cases_of(shape)[MESHES.index(shape) % every :: every]
  check_cases(mesh_of(shape), cases, different_forms(shape) if every > 1 else tuple(FORMS))


@pytest.mark.parametrize("shape", all_slow_except([(3,), (2, 3)], (3,)), ids=str)
def test_numbers_of_devices_that_are_no_power_of_two(shape):
  forms = ("ring", "torus", "hierarchical")
  cases = [(5, "int32"), (13, "float32"), (1, "bfloat16")]
  check_cases(mesh_of(shape), cases, forms)


PERMUTED = {
  "ring": lambda sizes: [math.prod(sizes)],
  "torus": lambda sizes: list(sizes),
  "halving_doubling": lambda sizes: [2] * (math.prod(sizes).bit_length() - 1),
}


def sent_by(compiled, mesh):
  """(kind, bytes of the result) of every collective of a compiled program."""
  table = hlo.collectives(compiled, mesh)
  assert not any(row.is_async or row.times > 1 for row in table)
  return [(row.kind, row.payload_bytes) for row in table]


@pytest.mark.parametrize("algorithm", PERMUTED)
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_steps_and_bytes_of_the_compiled_program(shape, algorithm):
  mesh, dtype = mesh_of(shape), DTYPES[MESHES.index(shape) % 4]
  size, width = 24 * mesh.size, jnp.dtype(dtype).itemsize
  dims = [(a, n) for a, n in reversed(list(mesh.shape.items()))]
  by = plan(mesh.shape, 0, algorithm, dims=dims if algorithm == "torus" else None)
  x = jax.ShapeDtypeStruct((mesh.size, size), dtype)
  sent = sent_by(collectives.reducer(mesh, by).lower(x).compile(), mesh)
  assert {kind for kind, _ in sent} == {"collective-permute"}
  assert len(sent) == 2 * sum(n - 1 for n in PERMUTED[algorithm](shape))
  # 2M (1 - 1/N), exactly.
  assert sum(n for _, n in sent) * mesh.size == 2 * size * width * (mesh.size - 1)


@pytest.mark.parametrize("dims", [(2, 2, 2), (2, 4), (4, 2)], ids=str)
def test_an_axis_is_split_by_permutes_within_it(dims):
  mesh = mesh_of((8,))
  by = plan(mesh.shape, 0, "torus", dims=[("a", n) for n in dims])
  x = inputs(8, 203, "int32")
  reduce = collectives.reducer(mesh, by)
  assert np.asarray(reduce(x)).tobytes() == x.sum(0, dtype=np.int32).tobytes()
  sent = sent_by(reduce.lower(x).compile(), mesh)
  assert len(sent) == 2 * sum(n - 1 for n in dims)
  # 203 values are padded to 208; blocks of the first dimension are the largest.
  assert sum(n for _, n in sent) == 2 * 7 * 26 * 4
  assert sent[0] == ("collective-permute", 208 // dims[0] * 4)


PAYLOADS = [((2, 4), "float16"), ((2, 2, 2), None), ((8,), "bfloat16")]


@pytest.mark.parametrize("algorithm", collectives.ALGORITHMS)
@pytest.mark.parametrize("shape, payload", PAYLOADS)
def test_every_axis_carries_its_own_bytes(shape, payload, algorithm):
  """2 M/P (1 - 1/n), P the devices of the faster axes: the slow ones get the least.

  The totals above are the same whichever axis goes first, and hold of one `psum`.
  """
  mesh, size = mesh_of(shape), 24 * 8
  by = plan(mesh.shape, 0, algorithm)
  if algorithm == "torus":
    by = by._replace(dims=axis_dims(mesh.shape))
  reduce = collectives.reducer(mesh, by, payload, payload and "float32")
  rows = jax.ShapeDtypeStruct((8, size), "float32")
  table = hlo.collectives(reduce.lower(rows).compile(), mesh)
  together = {
    "ring": [mesh.axis_names],
    "psum": [mesh.axis_names],
    "hierarchical": [mesh.axis_names[1:], mesh.axis_names[:1]],
  }
  left, wanted = size * (2 if payload else 4), {}
  for axes in together.get(algorithm, [(a,) for a in reversed(mesh.axis_names)]):
    if n := math.prod(mesh.shape[a] for a in axes) if axes else 0:
      wanted[axes], left = 2 * left * (n - 1) / n, left // n
  sent = dict.fromkeys(wanted, 0.0)
  for row in table:  # a step of a ring over all axes may move along one of them
    sent[row.axes if algorithm != "ring" else mesh.axis_names] += row.wire_bytes
    assert row.dtypes == ("u16" if payload else "f32",), row
  assert sent == wanted


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", all_slow_except(["bfloat16", "float16"], "bfloat16"))
def test_a_low_precision_payload_summed_in_float32(form, dtype):
  """Addends are rounded once, and sums once a dimension: not once a device."""
  mesh = mesh_of((8,) if form == "ring" else (2, 4))
  # A large value and small ones that vanish next to it, unless summed in float32.
  rows = np.full((8, 67), 2.0**-9 * 1.25, np.float32)
  rows[3] = 1.0
  options = {"payload": jnp.dtype(dtype), "accumulate": jnp.float32}
  (found,) = reduce_rows(lambda x, axes: FORMS[form](x, axes, **options), mesh, [rows])
  exact, half = rows.astype(np.float64).sum(0), jnp.finfo(dtype).eps / 2
  dims = {"torus": 2, "hierarchical": 2, "split": 3, "halving_doubling": 3}.get(form, 1)
  shards = [np.asarray(s.data) for s in found.addressable_shards]
  assert all(s.tobytes() == shards[0].tobytes() for s in shards)
  assert (np.abs(shards[0] - exact) <= dims * half * exact + 1e-7).all()
  kept = shards[0].astype(jnp.dtype(dtype)).astype(np.float32)
  assert kept.tobytes() == shards[0].tobytes()


def test_integers_are_sent_as_they_are():
  ints = inputs(8, 5, "int32")
  total = collectives.all_reduce(ints, mesh_of((8,)), "ring", payload=jnp.bfloat16)
  assert np.asarray(total).tobytes() == ints.sum(0, dtype=np.int32).tobytes()


@pytest.mark.parametrize("form", FORMS)
def test_the_derivative_is_that_of_psum(form):
  mesh = mesh_of((2, 4))
  x = inputs(8, 11, "float32")

  def gradient(function):
    def local(x, w):
      # w is the same everywhere: its own gradient is summed by shard_map.
      def loss(x, w):
        return (function(x * w, mesh.axis_names) ** 2).sum()

      by_x, by_w = jax.grad(loss, argnums=(0, 1))(x[0], w)
      return by_x[None], by_w

    specs = (P(mesh.axis_names), P())
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs)
    return jax.jit(mapped)(x, jnp.float32(1.5))

  for found, wanted in zip(gradient(FORMS[form]), gradient(lax.psum), strict=True):
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-4)


def test_some_axes_of_a_mesh_under_vmap_and_unchecked():
  mesh = mesh_of((2, 4))
  x = inputs(8, 3 * 5, "int32").reshape(8, 3, 5)

  def local(x):
    one_by_one = jax.vmap(lambda row: FORMS["torus"](row, ("b",)))(x[0])
    assert jax.typeof(one_by_one).mat.varying == {"a"}
    return one_by_one[None]

  mapped = jax.shard_map(local, mesh=mesh, in_specs=P(("a", "b")), out_specs=P("a"))
  wanted = x.reshape(2, 4, 3, 5).sum(1, dtype=np.int32)
  assert np.asarray(jax.jit(mapped)(x)).tobytes() == wanted.tobytes()
  for form in FORMS.values():
    (found,) = reduce_rows(form, mesh, [x], check_vma=False)
    assert np.asarray(found).tobytes() == x.sum(0, dtype=np.int32).tobytes()


@pytest.mark.parametrize("algorithm", [*collectives.ALGORITHMS, "auto"])
def test_all_reduce_of_a_tree(algorithm):
  mesh = mesh_of((2, 4))
  tree = {
    "w": inputs(8, 12, "float32").reshape(8, 4, 3),
    "steps": inputs(8, 1, "int32")[:, 0],
    "b": [inputs(8, 5, "float32"), inputs(8, 0, "float32"), inputs(8, 3, "bfloat16")],
  }
  total = collectives.all_reduce(tree, mesh, algorithm)
  assert jax.tree.structure(total) == jax.tree.structure(tree)
  for found, rows in zip(*map(jax.tree.leaves, (total, tree)), strict=True):
    assert found.sharding.is_fully_replicated
    psum = rows.sum(0) if rows.dtype != np.int32 else rows.sum(0, dtype=np.int32)
    assert_is_the_sum(found, rows, psum, rounding=8)
  if algorithm in PERMUTED:  # as many steps as one array of each dtype
    by = plan(mesh.shape, 0, algorithm)
    sent = sent_by(collectives.reducer(mesh, by).lower(tree).compile(), mesh)
    assert len(sent) == 3 * 2 * sum(d.size - 1 for d in by.dims)


def test_payload_bytes():
  tree = {"w": np.zeros((8, 3), np.float32), "n": np.zeros((8,), np.int32)}
  assert collectives.payload_bytes(tree) == 8 * 3 * 4 + 8 * 4
  assert collectives.payload_bytes(tree, jnp.bfloat16, rows=True) == 3 * 2 + 4


X = np.ones((8, 4), np.float32)


MESH = mesh_of((8,))


def inside(function):
  return jax.shard_map(lambda x: function(x[0]), mesh=MESH, in_specs=P("a"), out_specs=P())(X)


OTHER = Plan("ring", ("a",), (Dim(("a",), 4),), None)
MISTAKES = [
  ("did you mean 'ring'?", X, dict(algorithm="rings")),
  ("takes no dims", X, dict(algorithm="ring", dims=[("a", 8)])),
  ("no axis 'd'; give one of a", X, dict(algorithm="torus", dims=[("d", 8)])),
  ("to the 8 devices", X, dict(algorithm="torus", dims=[("a", 4)])),
  ("links['b']: the mesh has no such axis", X, dict(links={"b": (0.0, 0.0)})),
  ("payload=int8 is not a float dtype", X, dict(payload=np.int8)),
  ("tree['w'].shape=(4, 4) needs one row per device; give a leading dim of 8", {"w": X[:4]}, {}),
  ("dtype=bool cannot be summed", X.astype(bool), {}),
  ("is for a mesh other than", lambda x: collectives.sum_tree(x, OTHER), None),
]


@pytest.mark.parametrize("says, tree, options", MISTAKES, ids=[says for says, *_ in MISTAKES])
def test_mistakes_are_one_line(says, tree, options):
  with config_error(says):
    inside(tree) if options is None else collectives.all_reduce(tree, MESH, **options)
