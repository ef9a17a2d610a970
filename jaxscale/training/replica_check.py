"""Check that all copies of replicated arrays are equal, bit for bit.

Parameters and optimizer state exist once per device. Every device computes the same
update of them, so nothing but a fault makes them differ: a flipped bit in memory, a
collective that gives devices different sums, a mistake in an exchange. Such
a run continues, looks healthy, and trains another network on each device. Here every
device hashes its own copy, and the hashes are compared.

With b_i the bits of element i as a uint32 and i its position in the array,

    h = sum_i mix(b_i + c i)  mod 2^32,    c = 0x9E3779B9, odd,

of a leaf, where `mix` is a bijection. The sum has no order, so that neither layout
nor compiler matters. One changed element always changes h. Several changed, or two
swapped, leave it the same once in about 2^32, in each leaf; since copies that differ
stay so, the next check is another chance. Equal bits never raise an alarm. -0.0 and
0.0 differ, and so do NaNs with other payloads.

Where a layout splits an array, a device has a part of it, and is compared with those
that have the same part; what one device alone has cannot be compared.

Reading it all takes a device about as long as one pass over memory; the compiled
program has no collective. Processes then exchange 16 hexadecimal digits per device
and kind of sharding, and every hash only if those differ.
"""

from __future__ import annotations

import functools
import hashlib
import platform
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxscale import cluster
from jaxscale.collectives import vary
from jaxscale.errors import EXIT_CRASH
from jaxscale.metrics.text import few
from jaxscale.optim.tree_paths import path_name
from jaxscale.training.nan_guard import by_process, ordinal
from jaxscale.training.types import TrainState

Fingerprint = Callable[[Any], jax.Array]  # tree -> uint32 [devices, leaves]
Splits = Sequence[tuple[str, ...]] | None  # axes that split each leaf
_GOLDEN = 0x9E3779B9  # 2^32 / golden ratio: neighbours land far from each other


class ReplicaDivergenceError(RuntimeError):
  """Copies that should be equal are not.

  Attributes:
    step: after which it was found.
    good_until: the step of the check before, after which they may have diverged.
    advice: what to do, for the end of the line.
  """

  exit_code = EXIT_CRASH
  advice = "test that memory and network or leave the host out, then resume"

  def __init__(self, step: int, what: str, good_until: int):
    super().__init__(f"{what} after step {step}")
    self.step, self.good_until = step, good_until


class Replica(NamedTuple):
  """One device's copies.

  Attributes:
    process: its index.
    host: its name.
    device: as "gpu:3".
    hashes: one per leaf.
    parts: which part of each leaf it has; (): all of each.
  """

  process: int
  host: str
  device: str
  hashes: tuple[int, ...]
  parts: tuple[int, ...] = ()


def check(tree: Any, fingerprint: Fingerprint, *, step: int, before: int = 0) -> None:
  """Compare the copies of all devices; every process must call it.

  Args:
    tree: of global arrays on the mesh.
    fingerprint: of `make_fingerprint`, compiled or not.
    step: after which this is, for the message.
    before: the step of the check before, for `good_until`.

  Raises:
    ReplicaDivergenceError: copies differ; the line says whose and where. All
      processes raise it alike.

  Example:
    >>> check(shared(state), make_fingerprint(mesh), step=1000)  # doctest: +SKIP
  """
  leaves = jax.tree.leaves_with_path(tree)
  names = [path_name(path) for path, _ in leaves]
  splits = [_split(x.sharding.spec) for _, x in leaves]
  mesh = leaves[0][1].sharding.mesh
  if (found := find_divergence(fingerprint(tree), names, mesh, splits)) is not None:
    raise ReplicaDivergenceError(step, found, before)


def shared(state: TrainState) -> TrainState:
  """Return the replicated part of a state: all but each device's own."""
  return state._replace(exchange_state=())


def make_fingerprint(mesh: Mesh, tree: Any = None) -> Any:
  """Compile-ready `tree -> uint32 [devices, leaves]`: the hash of every copy.

  The first dim is sharded, each row on the device that it describes, in the order
  of the mesh. The function is jitted and the same for the same mesh. Compiling
  takes seconds where there are many leaves: `lower(...).compile()` it in the
  background.

  Args:
    mesh: where the arrays are.
    tree: of arrays, or of what has their shardings; None: each device has all of
      each.

  Example:
    >>> make_fingerprint(mesh)({"w": w, "b": b}).shape       # doctest: +SKIP
    (8, 2)
  """
  specs = jax.tree.map(lambda x: x.sharding.spec, tree)
  if not any(_split(spec) for spec in jax.tree.leaves(specs)):
    return _fingerprint_of(mesh, P())
  return _fingerprint_of.__wrapped__(mesh, specs)  # trees are not keys of a cache


@functools.cache
def _fingerprint_of(mesh: Mesh, specs: Any) -> Any:
  axes = mesh.axis_names

  def own_hash(x: jax.Array):
    # The layout may keep the optimizer's state on the host.
    if jax.typeof(x).memory_space == jax.memory.Space.Host:
      x = jax.device_put(x, jax.memory.Space.Device)
    return _hash_bits(x)

  def own(tree: Any):
    # Varying: from here on each device reads the copy that it has itself.
    return jnp.stack([own_hash(x) for x in jax.tree.leaves(vary(tree, axes))])[None]

  hashed = jax.shard_map(own, mesh=mesh, in_specs=(specs,), out_specs=P(axes))
  return jax.jit(hashed)


def _split(spec: P) -> tuple[str, ...]:
  """The axes that split an array."""
  parts = [a if isinstance(a, tuple) else (a,) for a in spec if a is not None]
  return tuple(axis for part in parts for axis in part)


def hash_bits(x: jax.Array) -> jax.Array:
  """The h above of one array of any dtype, uint32 [].

  Example:
    >>> int(hash_bits(jnp.float32([0.0]))) == int(hash_bits(jnp.float32([-0.0])))
    False
  """
  bits = _words(x)
  position = jnp.uint32(0)
  for dim, size in enumerate(bits.shape):
    position *= jnp.uint32(size % 2**32)
    position += lax.broadcasted_iota(jnp.uint32, bits.shape, dim)
  return jnp.sum(_mix(bits + position * jnp.uint32(_GOLDEN)), dtype=jnp.uint32)


_hash_bits = jax.jit(hash_bits)  # many leaves have one shape: traced once


def _words(x: jax.Array) -> jax.Array:
  """The bits of an array as uint32; wider elements get a dim more."""
  if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    x = jax.random.key_data(x)
  if jnp.issubdtype(x.dtype, jnp.complexfloating):
    x = jnp.stack([x.real, x.imag], axis=-1)
  if jnp.issubdtype(x.dtype, jnp.floating) and (bits := jnp.finfo(x.dtype).bits) < 32:
    x = lax.bitcast_convert_type(x, jnp.dtype(f"uint{bits}"))
  elif x.dtype.itemsize >= 4:
    x = lax.bitcast_convert_type(x, jnp.uint32)
  return x.astype(jnp.uint32)


def _mix(x: jax.Array) -> jax.Array:
  """MurmurHash3's 32-bit finaliser (A. Appleby, public domain)."""
  x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
  x = (x ^ (x >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
  return x ^ (x >> jnp.uint32(16))


def find_divergence(
  prints: jax.Array, names: Sequence[str], mesh: Mesh | None = None, splits: Splits = None
) -> str | None:
  """Return a line with the devices whose copies differ; None if none does.

  All processes must call it, and all get the same answer.

  Args:
    prints: what `make_fingerprint`'s function gave, [devices, leaves].
    names: of the leaves.
    mesh: in whose order the devices are, for `splits`.
    splits: axes that split each leaf; None: none does.
  """
  shards = sorted(prints.addressable_shards, key=lambda s: s.index[0].start or 0)
  own = [
    Replica(
      jax.process_index(),
      platform.node(),
      f"{shard.device.platform}:{ordinal(shard.device)}",
      tuple(np.asarray(shard.data)[0].tolist()),
      _parts(shard.index[0].start or 0, mesh, splits),
    )
    for shard in shards  # in the order of the mesh
  ]
  digests = {digest for replica in own for digest in _digests(replica, splits)}
  every = set().union(*cluster.gather(sorted(digests)))
  if len({digest.rpartition(" ")[0] for digest in every}) == len(every):
    return None
  return describe([Replica(*r) for rs in cluster.gather(own) for r in rs], names)


def describe(replicas: Sequence[Replica], names: Sequence[str]) -> str | None:
  """Return the devices that differ from most others, leaf by leaf; None: none does.

  Args:
    replicas: of all devices.
    names: of the leaves, in the order of the hashes.

  Example:
    >>> whole = [Replica(i, f"node{i}", "gpu:0", (7, 8)) for i in range(3)]
    >>> whole[1] = whole[1]._replace(hashes=(7, 9))
    >>> describe(whole, ["w", "b"])
    'process 1 (node1, gpu:0) differs from 2 of 3 devices in b'
  """
  differing: dict[int, list[dict[int, int]]] = {}  # leaf -> device -> hash, by part
  for i in range(len(names)):
    same: dict[int, dict[int, int]] = {}
    for j, r in enumerate(replicas):
      same.setdefault(r.parts[i] if r.parts else 0, {})[j] = r.hashes[i]
    if bad := [found for found in same.values() if len(set(found.values())) > 1]:
      differing[i] = bad
  if not differing:
    return None
  first, more = names[min(differing)], len(differing) - 1
  where = first + (f" and {more} more lea{'ves' if more > 1 else 'f'}" if more else "")
  groups = [found for bad in differing.values() for found in bad]
  if any(len(found) < len(replicas) for found in groups):
    where = f"the same part of {where}"
  apart: set[int] = set()
  for found in groups:
    value, votes = Counter(found.values()).most_common(1)[0]
    if 2 * votes > len(found):
      apart |= {j for j, h in found.items() if h != value}
  concerned = sorted(set().union(*groups))
  if apart:
    most = f"{len(concerned) - len(apart)} of {len(concerned)} devices"
    some = _places([replicas[j] for j in sorted(apart)])
    return f"{some} differs from {most} in {where}"
  some = _places([replicas[j] for j in concerned])
  versions = max(len(set(found.values())) for found in groups)
  return (
    f"{some} differ in {where}: {len(concerned)} devices, {versions} versions, and no "
    "majority that says which one is right"
  )


def _places(replicas: Sequence[Replica]) -> str:
  """Processes with host and devices, as words."""
  return by_process((r[:3] for r in replicas), lambda own: f", {few(own)})")


def _parts(row: int, mesh: Mesh | None, splits: Splits) -> tuple[int, ...]:
  """Return the part of each leaf that a device has, by its position in the mesh."""
  if mesh is None or not any(splits or ()):
    return ()
  position = np.unravel_index(row, mesh.devices.shape)
  at = dict(zip(mesh.axis_names, position, strict=True))

  def part(split: tuple[str, ...]):
    sizes = [mesh.shape[axis] for axis in split]
    return int(np.ravel_multi_index([at[a] for a in split], sizes)) if split else 0

  return tuple(map(part, splits or ()))


def _digests(replica: Replica, splits: Splits) -> set[str]:
  """The hashes of a device in 64 bits, for each kind of sharding.

  Each begins with that kind and the device's part: all that begin the same must be
  the same.
  """
  hashes = np.asarray(replica.hashes, np.uint32)
  kinds = [" ".join(split) for split in splits or [()] * len(hashes)]
  found = set()
  for kind in set(kinds):
    at = [i for i, own in enumerate(kinds) if own == kind]
    part = replica.parts[at[0]] if replica.parts else 0
    digest = hashlib.blake2b(hashes[at].tobytes(), digest_size=8).hexdigest()
    found.add(f"{kind} {part} {digest}")
  return found
