"""Parameters from a file: each device's part is read from its place, and no more."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxscale.errors import ConfigError
from jaxscale.tree_paths import path_name
from jaxscale.weights.names import ARRANGEMENTS, Link, Naming, guess, naming_of
from jaxscale.weights.safetensors import Stored, read_index, view

_FLOATS = {np.dtype(d) for d in ("f2", "f4", "f8", ml_dtypes.bfloat16)}


class Imported(NamedTuple):
  """What was read.

  Attributes:
    params: sharded as asked for.
    model_state: likewise.
    summary: what was read, in one line.
  """

  params: Any
  model_state: Any
  summary: str


def import_safetensors(
  path: str | os.PathLike,
  params: Any,
  model_state: Any = None,
  *,
  naming: str = "auto",
  num_classes: int | None = None,
  init_head: bool = False,
  check: Callable[[str, Collection[str]], None] | None = None,
) -> Imported:
  """Parameters of a file, as the model here has them.

  Every name is accounted for: none in the file is left over, and none is missing.
  Where a file lacks the classifier's matrix, as Hugging Face's with tied embeddings,
  it is a copy of the embedding. The module `names` lists the settings that go with
  each naming: how images are normalised, epsilons, rotary pairs.

  Args:
    path: a .safetensors file, or a folder as Hugging Face's, of one or several.
    params: arrays, or `jax.ShapeDtypeStruct`s with shardings, as the model has them.
    model_state: likewise, e.g. {"batch_stats": ...}.
    naming: "jaxscale", "timm", "huggingface", or "auto": by the names in the file.
    num_classes: of the file, where the model pads classes or words beyond them: the
      rest is zeros.
    init_head: leave the classifier as it is in `params`, whatever the file has.
    check: called with the naming and all names in the file, before shapes are
      compared; may refuse it.

  Returns:
    Arrays of the dtypes asked for, from float16, bfloat16, float32 or float64.

  Raises:
    ConfigError: the file is not whole, or is not of this model; one line has the
      number and the first of what is missing, unexpected, or of another shape or
      dtype. Also what `check` raises.

  Example:
    >>> model = functions(make_resnet(50, num_classes=1000), (224, 224, 3))
    >>> like = jax.eval_shape(model.init, jax.random.key(0))
    >>> got = import_safetensors("resnet50.a1_in1k.safetensors", *like)
    ... # doctest: +SKIP
    >>> logits, _ = model.apply(got.params, got.model_state, images, False, None)
    ... # doctest: +SKIP
  """
  stored = read_index(path)
  tree = {"params": params, **(model_state or {})}
  flat, structure = jax.tree_util.tree_flatten_with_path(tree)
  leaves = {path_name(where): leaf for where, leaf in flat}
  shapes = {name: leaf.shape for name, leaf in leaves.items()}
  name = guess(path, stored) if naming == "auto" else naming
  if check is not None:
    check(name, stored)
  names = naming_of(name, shapes)
  if init_head and not names.head:
    raise ConfigError("init_head=True: this model's classifier is not known by name")
  kept = names.head if init_head else ()
  sources = _sources(path, stored, leaves, names, num_classes, kept)
  done = [x if n in kept else _load(x, sources[n]) for n, x in leaves.items()]
  loaded = dict(jax.tree.unflatten(structure, done))
  params = loaded.pop("params")
  used = {array for found in sources.values() for _, array in found}
  count = sum(math.prod(array.shape) for array in used)
  dtypes = " and ".join(sorted({str(array.dtype) for array in used}))
  summary = (
    f"parameters from {path}: {count:,} numbers in {len(used)} arrays, {dtypes}, "
    f"{name}'s names{'; the classifier starts anew' if kept else ''}"
  )
  return Imported(params, loaded, summary)


# Where a leaf, or each layer of it, is read from.
_Sources = list[tuple[Link, Stored]]


def _sources(
  path: str | os.PathLike,
  stored: Mapping[str, Stored],
  leaves: Mapping[str, Any],
  names: Naming,
  num_classes: int | None,
  kept: tuple[str, ...],
) -> dict[str, _Sources]:
  """Where each leaf is, by path, if the file has all of them and nothing else."""
  found: dict[str, _Sources] = {name: [] for name in leaves}
  unexpected = set(stored) - set(names.counters) - {link.theirs for link in names.links}
  unexpected = sorted(n for n in unexpected if not n.endswith(names.derived))
  missing, misshaped, mistyped = [], {}, []
  for link in names.links:
    if link.ours in kept:
      continue
    name = link.theirs
    if name not in stored and link.or_else in stored:
      name = link.or_else or name
    there, leaf = stored.get(name), leaves[link.ours]
    if there is None:
      missing.append(name)
      continue
    wanted = [link.shape_in_file(leaf.shape)]
    if num_classes is not None and (dim := names.classes.get(link.ours)) is not None:
      cut = (*leaf.shape[:dim], num_classes, *leaf.shape[dim + 1 :])
      wanted.insert(0, link.shape_in_file(cut))
    # Numbers mean the same after a cast, but those of 8 bits, which have scales.
    both = {there.dtype, np.dtype(leaf.dtype)}
    if there.shape not in wanted:
      sizes = f"{list(there.shape)} there and {list(wanted[0])} here"
      misshaped[f"{name} is {sizes}"] = link.ours
    elif len(both) > 1 and not both <= _FLOATS:
      mistyped.append(f"{name} is {there.dtype} there and {leaf.dtype} here")
    found[link.ours].append((link, there))
  kinds = "missing", "unexpected", "of another shape", "of another dtype"
  problems = zip(kinds, (missing, unexpected, [*misshaped], mistyped), strict=True)
  counts = [f"{len(set(a))} {what}, first {a[0]}" for what, a in problems if a]
  if counts:
    advice = "give the model settings that it was made with"
    if len(counts) == 1 and misshaped and {*misshaped.values()} <= {*names.head}:
      advice = "init_head=True starts the classifier anew"
    raise ConfigError(
      f"{path}: not the parameters of this model by {names.name}'s names: "
      f"{'; '.join(counts)}; {advice}"
    )
  return found


def _load(leaf: Any, sources: _Sources) -> jax.Array:
  """The array, of which each device gets its part, one after another.

  `jax.make_array_from_callback` would have all parts on the host at once, and keep
  them there until Python next looks for cycles.
  """
  shape, dtype = leaf.shape, np.dtype(leaf.dtype)
  sharding = getattr(leaf, "sharding", None)
  if sharding is None:
    return jnp.asarray(_read(tuple((0, n) for n in shape), dtype, sources))
  owners: dict[Any, list[Any]] = {}
  for device, index in sharding.addressable_devices_indices_map(shape).items():
    ranges = tuple(s.indices(n)[:2] for s, n in zip(index or (), shape, strict=True))
    owners.setdefault(ranges, []).append(device)
  parts = []
  for ranges, devices in owners.items():
    part = _read(ranges, dtype, sources)
    parts += [jax.device_put(part, device) for device in devices]
    jax.block_until_ready(parts)  # before the host reads another
  return jax.make_array_from_single_device_arrays(shape, sharding, parts, dtype=dtype)


def _read(
  ranges: tuple[tuple[int, int], ...], dtype: np.dtype, sources: _Sources
) -> np.ndarray:
  """A part of a leaf, given by (start, stop) of every dim."""
  out = np.zeros([stop - start for start, stop in ranges], dtype)
  for link, stored in sources:
    target, inner = out, ranges
    if link.layer is not None:
      (start, stop), *inner = ranges
      if not start <= link.layer < stop:
        continue
      target = out[link.layer - start]
    array, (i, n) = view(stored), link.part
    array = np.split(array, n)[i] if n > 1 else array  # a view of it, too
    # Beyond the file's classes there are none to read, and zeros stay.
    wanted = ARRANGEMENTS[link.how].ours(array)[tuple(slice(*r) for r in inner)]
    target[tuple(slice(n) for n in wanted.shape)] = wanted
  return out
