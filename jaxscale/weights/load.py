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
from jaxscale.optim.tree_paths import path_name
from jaxscale.weights.fit import fit
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
  it is a copy of the embedding. Position embeddings and stems of other images are made
  to fit (`weights.fit`). The module `names` lists the settings that go with
  each naming: how images are normalised, epsilons, rotary pairs.

  Args:
    path: a .safetensors file, or a folder as Hugging Face's, of one or several.
    params: arrays, or `jax.ShapeDtypeStruct`s with shardings, as the model has them.
    model_state: likewise, e.g. {"batch_stats": ...}.
    naming: one of `NAMINGS`, or "auto": by the names in the file.
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
    >>> from jaxscale.models import functions, make_resnet
    >>> model = functions(make_resnet(50, num_classes=1000), (224, 224, 3))
    >>> like = jax.eval_shape(model.init, jax.random.key(0))
    >>> path = "resnet50.a1_in1k.safetensors"
    >>> params, state, _ = import_safetensors(path, *like)             # doctest: +SKIP
    >>> logits, _ = model.apply(params, state, images, False, None)    # doctest: +SKIP
  """
  stored = _without_wrappers(read_index(path))
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
  sources, changes = _sources(path, stored, leaves, names, num_classes, kept)
  done = [x if n in kept else _load(x, sources[n]) for n, x in leaves.items()]
  loaded = dict(jax.tree.unflatten(structure, done))
  params = loaded.pop("params")
  used = {array for found in sources.values() for _, array in found}
  count = sum(math.prod(array.shape) for array in used)
  dtypes = " and ".join(sorted({str(array.dtype) for array in used}))
  summary = f"parameters from {path}: {count:,} numbers in {len(used)} arrays, {dtypes}, "
  summary += f"{name}'s names" + "".join(f"; {x}" for x in changes)
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
) -> tuple[dict[str, _Sources], list[str]]:
  """Where each leaf is, by path, if the file has all of them and nothing else.

  Returns:
    The sources, and what is changed on the way, in words.
  """
  changes = ["the classifier starts anew"] if kept else []
  found: dict[str, _Sources] = {name: [] for name in leaves}
  unexpected = set(stored) - set(names.counters) - {link.theirs for link in names.links}
  unexpected = sorted(n for n in unexpected if not n.endswith(names.derived))
  missing, misshaped, mistyped = {}, {}, {}
  for link in names.links:
    if link.ours in kept:
      continue
    name = link.theirs
    if name not in stored and link.or_else in stored:
      name = link.or_else or name
    there, leaf = stored.get(name), leaves[link.ours]
    if there is None:
      missing[name] = link.ours
      continue
    wanted = [link.shape_in_file(leaf.shape)]
    if num_classes is not None and (dim := names.classes.get(link.ours)) is not None:
      cut = (*leaf.shape[:dim], num_classes, *leaf.shape[dim + 1 :])
      wanted.insert(0, link.shape_in_file(cut))
    change = None
    if there.shape not in wanted:
      change = fit(link.ours, link.how, there.shape, wanted[0])
      sizes = f"{list(there.shape)} there and {list(wanted[0])} here"
      misshaped |= {} if change else {f"{name} is {sizes}": link.ours}
    if change is not None:
      link = link._replace(fit=change[0])
      changes.append(change[1])
    # Numbers mean the same after a cast, but those of 8 bits, which have scales.
    both = {there.dtype, np.dtype(leaf.dtype)}
    if there.shape in wanted and len(both) > 1 and not both <= _FLOATS:
      mistyped[f"{name} is {there.dtype} there and {leaf.dtype} here"] = link.ours
    found[link.ours].append((link, there))
  kinds = "missing", "unexpected", "of another shape", "of another dtype"
  problems = zip(kinds, (missing, unexpected, misshaped, mistyped), strict=True)
  counts = [f"{len(a)} {what}, first {next(iter(a))}" for what, a in problems if a]
  if counts:
    others = {*missing.values(), *misshaped.values()} - {*names.head}
    is_head = not (others or unexpected or mistyped)
    why = f"not the parameters of this model by {names.name}'s names: {'; '.join(counts)}"
    raise ConfigError(f"{path}: {why}; {_advice(names.name, stored, is_head)}")
  return found, changes


def _without_wrappers(stored: dict[str, Stored]) -> dict[str, Stored]:
  """Remove what `torch.compile` and DistributedDataParallel put before names."""
  stored = {name.replace("_orig_mod.", ""): x for name, x in stored.items()}
  is_wrapped = all(name.startswith("module.") for name in stored)
  return {n.removeprefix("module.") if is_wrapped else n: x for n, x in stored.items()}


def _advice(naming: str, stored: Mapping[str, Stored], is_head: bool) -> str:
  """What to do about a file that does not fit."""
  if is_head:
    return "init_head=True starts the classifier anew"
  if naming == "jaxscale":
    return "give the model settings that it was made with"
  if "fc_norm.weight" in stored:
    return "of ViTs that classify a mean, only those of fc_norm=False are among ours"
  return "set the model's sizes (and pad_vocab_to) to the file's, if its network is among ours"


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


def _read(ranges: tuple[tuple[int, int], ...], dtype: np.dtype, sources: _Sources) -> np.ndarray:
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
    array = ARRANGEMENTS[link.how].ours(array)
    array = array if link.fit is None else link.fit(array)
    wanted = array[tuple(slice(*r) for r in inner)]
    target[tuple(slice(n) for n in wanted.shape)] = wanted
  return out
