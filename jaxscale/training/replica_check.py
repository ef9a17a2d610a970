"""Check that all copies of replicated arrays are equal, bit for bit.

Parameters and optimizer state exist once per device. Every device computes the same
update, so only a fault makes the copies differ: a flipped bit in memory, a collective
that returns different sums, a bug in an exchange. Such a run continues and looks healthy,
but trains a different network on each device. For this check every device hashes its own
copy, and the hashes are compared.

With b_i the bits of element i as a uint32 and i its position in the array, the hash of a
leaf is

    h = sum_i mix(b_i + c i)  mod 2^32,    c = 0x9E3779B9, odd,

where `mix` is a bijection. The order of the sum does not matter, so h does not depend on
memory layout or compiler. A single changed element always changes h. Several changes, or
two swapped elements, leave h unchanged with a probability of about 2^-32 per leaf; since
copies that differ stay different, the next check is likely to find them. Equal bits never
raise an alarm. -0.0 and 0.0 differ, and so do NaNs with different payloads.

If a layout splits an array, a device is compared with the devices that hold the same
part. A part that only one device holds cannot be compared.

The hashes take each device about one pass over its memory; the compiled program has no
collective. Processes then exchange 16 hexadecimal digits per device and kind of sharding,
and all hashes only if the digits differ.
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
Splits = Sequence[tuple[str, ...]]  # axes that split each leaf
_GOLDEN = 0x9E3779B9  # 2^32 / golden ratio, which spreads neighbouring positions


class ReplicaDivergenceError(RuntimeError):
  """Replicated arrays differ between devices.

  Attributes:
    step: step of the check that found it.
    good_until: step of the previous check, at which the copies were equal.
    advice: what to do; the end of the error line.
  """

  exit_code = EXIT_CRASH
  advice = "test the host's memory and network or exclude the host, then resume"

  def __init__(self, step: int, what: str, good_until: int):
    super().__init__(f"{what} after step {step}")
    self.step, self.good_until = step, good_until


class Replica(NamedTuple):
  """Hashes of the copies on a single device.

  Attributes:
    process: index of the device's process.
    host: name of the host.
    device: name of the device, as "gpu:3".
    hashes: one hash per leaf.
    parts: number of the part that the device holds of each leaf; () means all of each.
  """

  process: int
  host: str
  device: str
  hashes: tuple[int, ...]
  parts: tuple[int, ...] = ()


def check(tree: Any, fingerprint: Fingerprint, *, step: int, before: int = 0) -> None:
  """Compare the copies of all devices; every process must call it.

  Args:
    tree: a tree of global arrays on the mesh.
    fingerprint: the result of `make_fingerprint`, compiled or not.
    step: number of steps done, for the error.
    before: the step of the previous check, for `good_until`.

  Raises:
    ReplicaDivergenceError: copies differ; the error lists the devices and the leaf. All
      processes raise the same error.

  Example:
    >>> check(shared(state), make_fingerprint(mesh), step=1000)  # doctest: +SKIP
  """
  leaves = jax.tree.leaves_with_path(tree)
  names = [path_name(path) for path, _ in leaves]
  splits = [_split(x.sharding.spec) for _, x in leaves]
  mesh = leaves[0][1].sharding.mesh
  if (divergence := find_divergence(fingerprint(tree), names, mesh, splits)) is not None:
    raise ReplicaDivergenceError(step, divergence, before)


def shared(state: TrainState) -> TrainState:
  """Return a state without `exchange_state`, which differs between devices."""
  return state._replace(exchange_state=())


def make_fingerprint(mesh: Mesh, tree: Any = None) -> Any:
  """Return a jitted function `tree -> uint32 [devices, leaves]` that hashes every copy.

  The first dim is sharded: each row is on the device that it describes, in the order of
  the mesh. For the same mesh, unless arrays are split, the same function is returned.
  Compilation takes seconds if there are many leaves: run `lower(...).compile()` in the
  background.

  Args:
    mesh: the mesh of the arrays.
    tree: a tree of arrays, or of objects with their shardings; None means that all arrays are
      replicated.

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
    # With an offloading layout the optimizer's state is in host memory.
    if jax.typeof(x).memory_space == jax.memory.Space.Host:
      x = jax.device_put(x, jax.memory.Space.Device)
    return _hash_bits(x)

  def own(tree: Any):
    # A cast to varying makes each device read its own copy.
    return jnp.stack([own_hash(x) for x in jax.tree.leaves(vary(tree, axes))])[None]

  return jax.jit(jax.shard_map(own, mesh=mesh, in_specs=(specs,), out_specs=P(axes)))


def _split(spec: P) -> tuple[str, ...]:
  """Return the mesh axes that split an array."""
  parts = [a if isinstance(a, tuple) else (a,) for a in spec if a is not None]
  return tuple(axis for part in parts for axis in part)


def hash_bits(x: jax.Array) -> jax.Array:
  """Return the module's hash h of an array of any dtype, uint32 [].

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


_hash_bits = jax.jit(hash_bits)  # traced once for all leaves of a shape


def _words(x: jax.Array) -> jax.Array:
  """Return the bits of an array as uint32; elements over 32 bits get a further dim."""
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
  prints: jax.Array, names: Sequence[str], mesh: Mesh, splits: Splits
) -> str | None:
  """Return a line that lists the devices whose copies differ; None if all are equal.

  All processes must call it, and all get the same result.

  Args:
    prints: result of the function from `make_fingerprint`, [devices, leaves].
    names: names of the leaves.
    mesh: the mesh, whose order the devices have.
    splits: mesh axes that split each leaf; () for a leaf that is not split.
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
  """Return a line that lists the devices that differ from the majority; None if none does.

  Args:
    replicas: the hashes of all devices.
    names: names of the leaves, in the order of the hashes.

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
    if bad := [hashes for hashes in same.values() if len(set(hashes.values())) > 1]:
      differing[i] = bad
  if not differing:
    return None
  first, more = names[min(differing)], len(differing) - 1
  where = first + (f" and {more} more lea{'ves' if more > 1 else 'f'}" if more else "")
  groups = [hashes for bad in differing.values() for hashes in bad]
  if any(len(hashes) < len(replicas) for hashes in groups):
    where = f"the same part of {where}"
  apart: set[int] = set()
  for hashes in groups:
    value, votes = Counter(hashes.values()).most_common(1)[0]
    if 2 * votes > len(hashes):
      apart |= {j for j, h in hashes.items() if h != value}
  concerned = sorted(set().union(*groups))
  if apart:
    most = f"{len(concerned) - len(apart)} of {len(concerned)} devices"
    some = _locations([replicas[j] for j in sorted(apart)])
    return f"{some} differs from {most} in {where}"
  some = _locations([replicas[j] for j in concerned])
  versions = max(len(set(hashes.values())) for hashes in groups)
  return (
    f"{some} differ in {where}: {len(concerned)} devices hold {versions} versions, and no "
    "majority shows which one is right"
  )


def _locations(replicas: Sequence[Replica]) -> str:
  """Return a text that lists processes with their host and devices."""
  return by_process((r[:3] for r in replicas), lambda devices: f", {few(devices)})")


def _parts(row: int, mesh: Mesh, splits: Splits) -> tuple[int, ...]:
  """Return the part of each leaf that a device has, by its position in the mesh."""
  at = dict(zip(mesh.axis_names, np.unravel_index(row, mesh.devices.shape), strict=True))

  def part(split: tuple[str, ...]):
    sizes = [mesh.shape[axis] for axis in split]
    return int(np.ravel_multi_index([at[a] for a in split], sizes)) if split else 0

  return tuple(map(part, splits))


def _digests(replica: Replica, splits: Splits) -> set[str]:
  """Return a 64-bit digest of a device's hashes for each kind of sharding.

  Each digest is preceded by the kind and the device's part. Digests with the same prefix
  must be equal on all devices.
  """
  hashes = np.asarray(replica.hashes, np.uint32)
  kinds = list(map(" ".join, splits))
  digests = set()
  for kind in set(kinds):
    at = [i for i, own in enumerate(kinds) if own == kind]
    digest = hashlib.blake2b(hashes[at].tobytes(), digest_size=8).hexdigest()
    digests.add(f"{kind} {replica.parts[at[0]]} {digest}")
  return digests
