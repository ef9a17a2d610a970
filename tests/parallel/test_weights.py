"""Other people's parameters in our models: every name, and the logits they gave.

`state_dicts/make.py` recorded them, with timm and Hugging Face's transformers.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import NamedSharding, P

from jaxscale import models
from jaxscale.mesh import make_mesh
from jaxscale.models.stack import stack_logits
from jaxscale.optim.tree_paths import path_name
from jaxscale.weights import export_safetensors, import_safetensors, load
from jaxscale.weights.names import naming_of
from jaxscale.weights.safetensors import read_header, read_index, view
from support.leaves import assert_like
from support.paths import DATA
from support.recipes import AlexNetModule
from support.trees import assert_same_bits

RECORDED = DATA / "state_dicts"
IMAGE = (224, 224, 3)


def shapes_of(params, model_state=None):
  tree = {"params": params, **(model_state or {})}
  flat = jax.tree_util.tree_leaves_with_path(tree)
  return {path_name(path): leaf.shape for path, leaf in flat}


def whole(name):
  """(naming, shapes of our model of that name)."""
  key = jax.random.key(0)
  if name.startswith("resnet"):
    module = models.make_resnet(int(name.removeprefix("resnet")), num_classes=1000)
    fns = models.functions(module, IMAGE)
    return "timm", shapes_of(*jax.eval_shape(fns.init, key))
  if name == "convnext_tiny":
    fns = models.functions(models.ConvNeXtModule(num_classes=1000), IMAGE)
    return "timm", shapes_of(*jax.eval_shape(fns.init, key))
  if name.startswith("vit"):
    stack = models.make_vit(image_shape=IMAGE, num_classes=1000)
    return "timm", shapes_of(jax.eval_shape(stack.init, key))
  sizes = dict(width=2048, num_heads=32, num_kv_heads=4, hidden=5632)
  stack = models.make_transformer(vocab_size=32_000, num_layers=22, **sizes)
  return "huggingface", shapes_of(jax.eval_shape(stack.init, key))


PUBLISHED = ["resnet18", "resnet50", "vit_small_patch16_224", "tinyllama_1.1b", "convnext_tiny"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_name_is_accounted_for_and_has_its_shape(name):
  naming, shapes = whole(name)
  theirs = json.loads((RECORDED / f"{name}.json").read_text())["arrays"]
  names = naming_of(naming, shapes)
  ours = {x.theirs: list(x.shape_in_file(shapes[x.ours])) for x in names.links}
  ours |= {key: [] for key in names.counters}
  assert ours == {name: shape for name, (_, shape) in theirs.items()}
  assert {link.ours for link in names.links} == set(shapes)
  counted = {n for n, (dtype, _) in theirs.items() if dtype != "float32"}
  assert counted == set(names.counters)


@functools.cache
def tiny(name):
  """(naming, abstract params and state, images or tokens -> logits)."""
  key = jax.random.key(0)
  if name in ("bottleneck", "basic", "convnext"):
    sizes = dict(stage_sizes=(2, 1, 1, 1), width=4, bottleneck=name == "bottleneck")
    if name == "convnext":
      sizes = dict(depths=(1, 2, 1, 1), dims=(4, 8, 12, 16))
    kind = models.ConvNeXtModule if name == "convnext" else models.ResNetModule
    fns = models.functions(kind(num_classes=7, **sizes), (32, 32, 3))

    def apply(params, state, images):
      return fns.apply(params, state, images.transpose(0, 2, 3, 1), False, None)[0]

    return "timm", jax.eval_shape(fns.init, key), jax.jit(apply)
  if name == "vit":
    sizes = dict(patch=4, width=16, num_layers=3, num_heads=2, pad_classes_to=8)
    stack = models.make_vit(image_shape=(12, 12, 3), num_classes=7, **sizes)
  else:
    sizes = dict(num_layers=3, width=16, num_heads=4, num_kv_heads=2, hidden=24)
    stack = models.make_transformer(vocab_size=40, **sizes)

  def run(params, state, x):
    batch = {"tokens": x}
    if name == "vit":
      batch = {"image": x[..., :12, :12].transpose(0, 2, 3, 1)}
    return stack_logits(stack, params, batch)

  abstract = (jax.eval_shape(stack.init, key), {})
  return "timm" if name == "vit" else "huggingface", abstract, jax.jit(run)


PADDED = {"vit": 7, "llama": 40}
TINY = ["bottleneck", "basic", "vit", "llama", "convnext"]


@functools.cache
def imported(name):
  path = RECORDED / f"tiny_{name}.safetensors"
  return import_safetensors(path, *tiny(name)[1], num_classes=PADDED.get(name))


def logits_of(name, params, state):
  recorded = np.load(RECORDED / "tiny.npz")
  x = recorded["tokens"].astype(np.int32) if name == "llama" else recorded["images"]
  return tiny(name)[2](params, state, jnp.asarray(x)), recorded[name]


@pytest.mark.parametrize("name", TINY)
def test_imported_parameters_give_the_logits_of_the_model_they_are_of(name):
  found = imported(name)
  logits, wanted = logits_of(name, found.params, found.model_state)
  assert np.ptp(wanted, axis=0).max() > 0.1  # they depend on the input
  np.testing.assert_allclose(logits, wanted, rtol=1e-4, atol=1e-4 * wanted.std())


@pytest.mark.parametrize("name", TINY)
def test_exported_in_their_names_it_is_their_file_bit_for_bit(name, tmp_path):
  found, (naming, abstract, _) = imported(name), tiny(name)
  path = tmp_path / "back.safetensors"
  options = dict(naming=naming, num_classes=PADDED.get(name))
  export_safetensors(path, found.params, found.model_state, **options)
  mine = read_index(path)
  theirs, metadata = read_header(RECORDED / f"tiny_{name}.safetensors")
  assert mine.keys() == theirs.keys()
  for key, stored in theirs.items():
    assert mine[key].dtype == stored.dtype and mine[key].begin % stored.dtype.itemsize == 0
    if not key.endswith("num_batches_tracked"):
      assert view(mine[key]).tobytes() == view(stored).tobytes(), key
  assert read_header(path)[1] == metadata == {"format": "pt"}
  # And into the names of our own, with all padding, and back.
  export_safetensors(path, found.params, found.model_state)
  again = import_safetensors(path, *abstract)
  assert_same_bits((again.params, again.model_state), (found.params, found.model_state))
  logits, _ = logits_of(name, again.params, again.model_state)
  assert (logits == logits_of(name, found.params, found.model_state)[0]).all()


def test_what_is_padded_is_zero():
  assert imported("vit").params["head"]["kernel"].shape == (16, 8)
  table = np.asarray(imported("llama").params["embed"]["table"])
  head = np.asarray(imported("llama").params["head"]["kernel"])
  assert table.shape == (128, 16) and head.shape == (16, 128)
  assert not table[40:].any() and not head[:, 40:].any()
  assert table[:40].all() and head[:, :40].all()


# Dims of a leaf -> axes, from the first dim and from the last on.
SPECS = {
  "replicated": lambda ndim: [None] * ndim,
  "fsdp": lambda ndim: [None] * (ndim - 2) + ["data"] + [None] * (ndim > 1),
  "stage_and_model": lambda ndim: ["replica", *[None] * (ndim - 2), "data"][:ndim],
}


def laid_out(abstract, layout, mesh):
  """Return the tree with shardings; dimensions that an axis does not divide stay whole."""

  def one(x):
    axes = zip(SPECS[layout](x.ndim), x.shape, strict=True)
    spec = P(*(a if a and size % mesh.shape[a] == 0 else None for a, size in axes))
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

  return jax.tree.map(one, abstract)


def eight_layers():
  sizes = dict(num_layers=8, width=16, num_heads=4, hidden=32)
  stack = models.make_transformer(vocab_size=100, **sizes, pad_vocab_to=8)
  params = jax.jit(stack.init)(jax.random.key(1))
  negative_zero = params["layers"]["q"]["kernel"].at[5, 3].set(-0.0)
  params["layers"]["q"]["kernel"] = negative_zero
  return params


@pytest.mark.parametrize("naming", ["jaxscale", "huggingface"])
def test_any_sharding_to_a_file_and_to_any_other(naming, tmp_path):
  params, files = eight_layers(), []
  for before in SPECS:
    mesh = make_mesh(replica=4, data=2) if before == "stage_and_model" else make_mesh()
    like = laid_out(params, before, mesh)
    sharded = jax.device_put(params, jax.tree.map(lambda x: x.sharding, like))
    files.append(tmp_path / f"{before}.safetensors")
    export_safetensors(files[-1], sharded, naming=naming, num_classes=100)
  assert len({path.read_bytes() for path in files}) == 1
  for after in SPECS:
    like = laid_out(params, after, make_mesh(replica=2, data=4))
    found = import_safetensors(files[0], like, num_classes=100).params
    assert_same_bits(found, params)
    assert_like(found, like)


def test_a_device_reads_its_part_and_devices_share_what_is_the_same(tmp_path, monkeypatch):
  params = eight_layers()
  path = tmp_path / "a.safetensors"
  export_safetensors(path, params, naming="huggingface", num_classes=100)
  taken, read = [], load._read

  def told(*args):
    taken.append(read(*args).nbytes)
    return read(*args)

  monkeypatch.setattr(load, "_read", told)
  sizes = [x.nbytes for x in jax.tree.leaves(params)]
  for layout, largest in (("stage_and_model", max(sizes) // 8), ("replicated", None)):
    taken.clear()
    like = laid_out(params, layout, make_mesh(replica=4, data=2))
    found = import_safetensors(path, like, num_classes=100).params
    assert max(taken) == (largest or max(sizes))
    assert sum(taken) == sum(sizes)
    # What devices were given together is each one's own all the same.
    more = jax.jit(lambda t: jax.tree.map(lambda x: x + 1, t), donate_argnums=0)(found)
    for a, b in zip(jax.tree.leaves(more), jax.tree.leaves(params), strict=True):
      for shard in a.addressable_shards:
        assert (np.asarray(shard.data) == np.asarray(b)[shard.index] + 1).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_halves_become_float32(dtype, tmp_path):
  params = {"Dense_0": {"kernel": jnp.linspace(-2, 2, 6).reshape(3, 2)}}
  half = jax.tree.map(lambda x: x.astype(dtype), params)
  export_safetensors(tmp_path / "half", half)
  assert read_index(tmp_path / "half")["params/Dense_0/kernel"].dtype == dtype
  found = import_safetensors(tmp_path / "half", params).params
  wanted = half["Dense_0"]["kernel"].astype(jnp.float32)
  assert found["Dense_0"]["kernel"].dtype == jnp.float32
  assert (found["Dense_0"]["kernel"] == wanted).all()
  if dtype == "bfloat16":
    export_safetensors(tmp_path / "cast", params, dtype=jnp.bfloat16)
    assert (tmp_path / "cast").read_bytes() == (tmp_path / "half").read_bytes()


MODULES = [models.MLPModule, models.CNNModule, AlexNetModule]
MODULES += [functools.partial(AlexNetModule, batch_norm=True)]
MODULES += [functools.partial(models.make_resnet, 18)]


@pytest.mark.parametrize("make", MODULES)
def test_the_classifier_of_every_model_is_known(make):
  fns = models.functions(make(num_classes=13), IMAGE)
  shapes = shapes_of(*jax.eval_shape(fns.init, jax.random.key(0)))
  names = naming_of("jaxscale", shapes)
  assert len(names.head) == 2 and set(names.classes) == set(names.head)
  assert [shapes[path][dim] for path, dim in names.classes.items()] == [13, 13]
