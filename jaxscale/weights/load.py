"""Load parameters from a file; each device reads only its own part."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxscale.errors import ConfigError
from jaxscale.mesh import array_from_parts
from jaxscale.optim.tree_paths import path_name
from jaxscale.weights.fit import fit
from jaxscale.weights.names import ARRANGEMENTS, Link, Naming, guess, naming_of
from jaxscale.weights.safetensors import Stored, read_index, read_part

_FLOATS = {np.dtype(d) for d in ("f2", "f4", "f8", ml_dtypes.bfloat16)}


class Imported(NamedTuple):
  """Result of `import_safetensors`.

  Attributes:
    params: the parameters, sharded as requested.
    model_state: the model state, sharded as requested.
    summary: one line that describes what was read.
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
  """Load the parameters of a file into the structure of a model.

  Every name must match: none in the file may be left over, and none may be missing. If a file
  lacks the classifier's matrix, as Hugging Face files with tied embeddings do, the embedding is
  copied. Position embeddings and stems are adapted to the model's images (`weights.fit`). The
  module `names` lists the settings that belong to each naming: image normalisation, epsilons,
  rotary pairs.

  Args:
    path: a .safetensors file, or a Hugging Face folder of one or several.
    params: the model's arrays, or `jax.ShapeDtypeStruct`s with shardings.
    model_state: the model state in the same form, e.g. {"batch_stats": ...}.
    naming: one of `NAMINGS`; "auto" chooses by the names in the file.
    num_classes: the number of classes or words in the file, if the model pads them; the rest
      is filled with zeros.
    init_head: True keeps the classifier of `params` instead of the file's.
    check: a function that is called with the naming and all names in the file before shapes
      are compared; it may raise.

  Returns:
    The arrays, cast to the requested dtypes from float16, bfloat16, float32 or float64.

  Raises:
    ConfigError: the file is damaged, or does not belong to this model. The message has the
      number and the first of the arrays that are missing, unexpected, or of a different
      shape or dtype. Errors of `check` are also raised.

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
    problem = "this model has no classifier of a known name, or it is tied to the embedding"
    raise ConfigError(f"init_head=True: {problem}; use False")
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


# The arrays that a leaf, or each layer of it, is read from.
_Sources = list[tuple[Link, Stored]]


def _sources(
  path: str | os.PathLike,
  stored: Mapping[str, Stored],
  leaves: Mapping[str, Any],
  names: Naming,
  num_classes: int | None,
  kept: tuple[str, ...],
) -> tuple[dict[str, _Sources], list[str]]:
  """Find each leaf in the file, by path; the file must have all of them and nothing else.

  Returns:
    The sources, and descriptions of the changes during loading.
  """
  changes = ["the classifier is newly initialized"] if kept else []
  sources: dict[str, _Sources] = {name: [] for name in leaves}
  unexpected = set(stored) - set(names.counters) - {link.theirs for link in names.links}
  unexpected = sorted(n for n in unexpected if not n.endswith(names.derived))
  missing, misshaped, mistyped = {}, {}, {}
  for link in names.links:
    if link.ours in kept:
      continue
    name = link.theirs
    if name not in stored and link.or_else in stored:
      name = link.or_else or name
    array, leaf = stored.get(name), leaves[link.ours]
    if array is None:
      missing[name] = link.ours
      continue
    shapes = [link.shape_in_file(leaf.shape)]
    if num_classes is not None and (dim := names.classes.get(link.ours)) is not None:
      cut = (*leaf.shape[:dim], num_classes, *leaf.shape[dim + 1 :])
      shapes.insert(0, link.shape_in_file(cut))
    if array.shape not in shapes:
      if change := fit(link.ours, link.how, array.shape, shapes[0]):
        link = link._replace(fit=change[0])
        changes.append(change[1])
      else:
        sizes = f"{list(array.shape)} in the file and {list(shapes[0])} in the model"
        misshaped[f"{name} is {sizes}"] = link.ours
    # Casting keeps the meaning of numbers, except of 8-bit types, which have scales.
    both = {array.dtype, np.dtype(leaf.dtype)}
    if array.shape in shapes and len(both) > 1 and not both <= _FLOATS:
      mistyped[f"{name} is {array.dtype} in the file and {leaf.dtype} in the model"] = link.ours
    sources[link.ours].append((link, array))
  kinds = "missing", "unexpected", "of a different shape", "of a different dtype"
  problems = zip(kinds, (missing, unexpected, misshaped, mistyped), strict=True)
  counts = [f"{len(a)} {what}, first {next(iter(a))}" for what, a in problems if a]
  if counts:
    others = {*missing.values(), *misshaped.values()} - {*names.head}
    is_head = not (others or unexpected or mistyped)
    problem = f"does not have this model's parameters in {names.name}'s names: {'; '.join(counts)}"
    raise ConfigError(f"{path}: {problem}; {_advice(names.name, stored, is_head)}")
  return sources, changes


def _without_wrappers(stored: dict[str, Stored]) -> dict[str, Stored]:
  """Remove the prefixes that `torch.compile` and DistributedDataParallel add to names."""
  stored = {name.replace("_orig_mod.", ""): x for name, x in stored.items()}
  is_wrapped = all(name.startswith("module.") for name in stored)
  return {n.removeprefix("module.") if is_wrapped else n: x for n, x in stored.items()}


def _advice(naming: str, stored: Mapping[str, Stored], is_head: bool) -> str:
  """Return the advice for a file that does not fit."""
  if is_head:
    return "set init_head=True to initialize the classifier anew"
  if naming == "jaxscale":
    return "use the settings of the model that was saved"
  if "fc_norm.weight" in stored:
    return "only timm's ViTs with fc_norm=False can classify by the mean in jaxscale"
  return "set the model's sizes (and pad_vocab_to) to the file's, if jaxscale has this model"


def _load(leaf: Any, sources: _Sources) -> jax.Array:
  """Load one array; the devices get their parts one after another."""
  dtype = np.dtype(leaf.dtype)
  if getattr(leaf, "sharding", None) is None:
    return jnp.asarray(_read(tuple((0, n) for n in leaf.shape), dtype, sources))
  return array_from_parts(leaf, lambda ranges: _read(ranges, dtype, sources))


def _read(ranges: tuple[tuple[int, int], ...], dtype: np.dtype, sources: _Sources) -> np.ndarray:
  """Read a part of a leaf, given by (start, stop) for every dim."""
  out = np.zeros([stop - start for start, stop in ranges], dtype)
  for link, stored in sources:
    target, inner = out, ranges
    if link.layer is not None:
      (start, stop), *inner = ranges
      if not start <= link.layer < stop:
        continue
      target = out[link.layer - start]
    part = read_part(stored, functools.partial(_part, link=link, ranges=inner))
    # The file has no classes beyond its own; the rest stays zero.
    target[tuple(slice(n) for n in part.shape)] = part
  return out


def _part(array: np.ndarray, link: Link, ranges: Sequence[tuple[int, int]]) -> np.ndarray:
  """Return a part of a leaf from the array in the file, as a view if possible."""
  if array.ndim:  # np.split refuses a single number, which has one part
    array = np.split(array, link.part[1])[link.part[0]]
  array = ARRANGEMENTS[link.how].ours(array)
  array = array if link.fit is None else link.fit(array)
  return array[tuple(slice(*r) for r in ranges)]
