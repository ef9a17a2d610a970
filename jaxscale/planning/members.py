"""Who takes part in a collective, along which mesh axes, and what that sends."""

from __future__ import annotations

import re

import numpy as np

from jaxscale.planning.cost import COLLECTIVES
from jaxscale.planning.parse import Groups, Instruction, attribute, replica_groups


def members(
  found: Instruction, num_devices: int, sizes: dict[str, int] | None
) -> tuple[Groups, int, tuple[str, ...] | None]:
  """(groups, devices in the largest of them, mesh axes) of a collective.

  Args:
    found: the collective.
    num_devices: of the program.
    sizes: of the mesh axes, in their order; None: unknown.
  """
  pairs = re.search(r'source_target_pairs="?(\{[\d,{}\s]*\})', found.text)
  if pairs:
    groups = replica_groups(pairs.group(1), 0)
  else:
    groups = replica_groups(attribute(found, "replica_groups"), num_devices)
  if groups is None:
    return (), num_devices, _slice_axes(found, num_devices, sizes)
  axes = None if sizes is None else _axes(groups, sizes)
  return groups, max(len(group) for group in groups), axes


def _axes(groups: Groups, sizes: dict[str, int]) -> tuple[str, ...] | None:
  """Mesh axes along which the members of some group have different places.

  Ids count the mesh in its order, as XLA's partition ids do under `jit`; those of
  a program for one slice count that slice, which is the first of the mesh.
  """
  shape = tuple(sizes.values())
  if max(max(group) for group in groups) >= np.prod(shape, dtype=int):
    return None
  places = [np.stack(np.unravel_index(group, shape)) for group in groups]
  differs = [any(np.ptp(place[k]) > 0 for place in places) for k in range(len(shape))]
  return tuple(axis for axis, is_in in zip(sizes, differs, strict=True) if is_in)


def _slice_axes(
  found: Instruction, num_devices: int, sizes: dict[str, int] | None
) -> tuple[str, ...] | None:
  """Leading mesh axes that a program, written for one slice, leaves out."""
  if sizes is None or "megascale" not in found.text:
    return None
  left, axes = int(np.prod(list(sizes.values()), dtype=int)), []
  if (megascale(found) or ("", 0))[1] == left:  # between all, those of a slice too
    return tuple(axis for axis, size in sizes.items() if size > 1)
  for axis, size in sizes.items():
    if left == num_devices:
      break
    left, axes = left // size, [*axes, axis]
  return tuple(axes) if left == num_devices else None


def is_network(send: Instruction) -> bool:
  """Whether a `send` goes to another device, not to a callback of this host."""
  return "is_host_transfer=true" not in send.text or "megascale" in send.text


def megascale(found: Instruction) -> tuple[str, int] | None:
  """(kind, members) of a transfer between slices of TPUs; None for what is none.

  Members are slices, `"{1,2}x{0:3}"`, each device with its like in the others; or,
  of an all-to-all over more than them, single devices, `{{100000,...,200003}}`.
  """
  kind = re.search(r'_xla_megascale_transfer_type="(\w+)"', found.text)
  if kind is None:
    return None
  name = kind.group(1).lower().replace("_", "-")
  slices = re.search(r'_xla_megascale_target="?\{+([\d,]*)\}', found.text)
  count = len(slices.group(1).split(",")) if slices else 2
  return (name, count) if name in COLLECTIVES else ("send", 2)


def wire_bytes(kind: str, payload: int, size: int, groups: Groups) -> float:
  """Bytes that one device sends; the table is in `hlo`.

  Args:
    kind: of the collective.
    payload: M, in bytes.
    size: n, devices in a group.
    groups: pairs of a permute: one that moves nothing sends nothing.
  """
  if kind in ("collective-permute", "send"):
    moved = any(pair[0] != pair[-1] for pair in groups) or not groups
    return float(payload if moved else 0)
  if kind == "collective-broadcast":
    return float(payload if size > 1 else 0)
  return (2 if kind == "all-reduce" else 1) * payload * (size - 1) / size
