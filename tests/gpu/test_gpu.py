"""Training on GPUs: the CPU's mathematics, and what only GPUs have."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale import collectives, data
from jaxscale import config as cfg
from jaxscale.config import Compilation
from jaxscale.experiment import build
from jaxscale.mesh import make_mesh
from jaxscale.metrics.chips import peak_flops
from jaxscale.models.attention import attention, fastest
from jaxscale.run import efficiency, programs
from jaxscale.run.fit import fit
from support.compilations import watched
from support.configs import tiny_digits, tiny_language
from support.trees import largest_distance, relative_distance


def images(**fields):
  rng = np.random.default_rng(0)
  x = rng.integers(0, 256, (32, 32, 32, 3), np.uint8)
  y = (np.arange(32) % 4).astype(np.int32)
  shown = data.Arrays(x=x, y=y, x_eval=x, y_eval=y, num_classes=4)
  sgd = cfg.SGD(lr=0.01)
  return cfg.Config(data=shown, optimizer=sgd, batch_size=8, epochs=1, **fields)


MODELS = {
  "cnn": lambda: images(model=cfg.CNN(batch_norm=True, features=(16, 32))),
  "vit": lambda: images(model=cfg.ViT(patch=8, width=32, num_layers=2, num_heads=2)),
  "transformer": lambda: tiny_language(optimizer=cfg.SGD(lr=0.01)),
}


def trained(config, device, steps=3):
  """Parameters before and after some steps on a device."""
  made = build.experiment(config, devices=[device])
  state = made.init_state()
  before = jax.device_get(state.params)
  batches = data.train_batches(made.train_data, config.batch_size, position=0, seed=0)
  for _ in range(steps):
    state, _ = made.train_step(state, jax.device_put(next(batches), device))
  return before, jax.device_get(state.params)


@pytest.mark.parametrize("name", MODELS)
def test_steps_are_those_of_the_cpu(name):
  """In float32, with products of float32: rounding alone differs."""
  with jax.default_matmul_precision("highest"):
    here, there = (trained(MODELS[name](), device) for device in (jax.devices("cpu")[0], last()))
  assert relative_distance(there[0], here[0]) < 1e-6
  moved = [jax.tree.map(np.subtract, after, before) for before, after in (here, there)]
  assert relative_distance(moved[1], moved[0]) < 2e-3


def last():
  return jax.devices()[-1]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("tokens", "groups"), [(256, 8), (197, 2)])
def test_fused_attention_is_attention(causal, tokens, groups, dry_run):
  width, keys = 64, jax.random.split(jax.random.key(0), 4)
  chosen = fastest(jnp.bfloat16, width)
  if dry_run:
    assert chosen == "xla"
  elif chosen != "cudnn":
    pytest.skip(f"{jax.devices()[0].device_kind} has no fused attention")
  shapes = [(2, tokens, heads, width) for heads in (8, groups, groups, 8)]
  q, k, v, g = (
    jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)
  )

  def gradients(q, k, v, implementation):
    attend = functools.partial(attention, causal=causal, implementation=implementation)
    out, back = jax.vjp(attend, q, k, v)
    return out, *back(g)

  # JAX's own attention in half precision is lowered by rules that strict ones refuse.
  with jax.numpy_dtype_promotion("standard"):
    plain, fused = (
      jax.jit(functools.partial(gradients, implementation=by)).lower(q, k, v).compile()
      for by in ("xla", chosen)
    )
  assert ("cudnn" in fused.as_text()) != dry_run
  for x, y in zip(fused(q, k, v), plain(q, k, v), strict=True):
    x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
    # Two roundings to bfloat16, of 2^-9 each, of every number, and those in between.
    assert largest_distance(x, y) < 0.02


@pytest.mark.parametrize("tokens", [128, 197])
@pytest.mark.parametrize("causal", [True, False])
def test_fused_attention_sees_no_other_document(causal, tokens, dry_run):
  """Outputs and gradients of document 0 keep every bit if document 1 changes."""
  width, keys = 64, jax.random.split(jax.random.key(0), 4)
  chosen = fastest(jnp.bfloat16, width)
  if not dry_run and chosen != "cudnn":
    pytest.skip(f"{jax.devices()[0].device_kind} has no fused attention")
  heads = (8, 4, 4, 8)
  arrays = [
    jax.random.normal(key, (2, tokens, n, width), jnp.bfloat16)
    for key, n in zip(keys, heads, strict=True)
  ]
  first = jnp.array([[tokens // 3], [100]])
  documents = (jnp.arange(tokens) >= first).astype(jnp.int32)
  other = [jnp.where(documents[..., None, None] == 1, 1 - 2 * x, x) for x in arrays]

  def gradients(q, k, v, g, implementation):
    options = {"causal": causal, "documents": documents, "implementation": implementation}
    out, back = jax.vjp(functools.partial(attention, **options), q, k, v)
    return out, *back(g)

  with jax.numpy_dtype_promotion("standard"):
    plain, fused = (
      jax.jit(functools.partial(gradients, implementation=by)).lower(*arrays).compile()
      for by in ("xla", chosen)
    )
  assert ("fmhaScaleBiasSoftmaxBackward" in fused.as_text()) != dry_run
  apart, its = [fused(*arrays), fused(*other), plain(*arrays)], np.asarray(documents) == 0
  for x, y, z in zip(*apart, strict=True):
    x, y, z = (np.asarray(a, np.float32) for a in (x, y, z))
    np.testing.assert_array_equal(x[its], y[its])
    assert (x[~its] != y[~its]).mean() > 0.9
    assert largest_distance(x, z) < 0.02


def test_what_is_compiled_once_is_loaded(tmp_path, monkeypatch):
  # Other tests keep only what took 10 ms to compile, which this may not.
  monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", raising=False)
  found, square = [], jax.ShapeDtypeStruct((8, 8), jnp.float32)
  before = jax.config.jax_compilation_cache_dir
  jax.config.update("jax_compilation_cache_dir", None)
  try:
    for _ in range(2):
      kept = programs.kept_programs(Compilation(), tmp_path, 60)
      with kept as turns, watched(lambda what, _: found.append(what)), turns.turn():
        made = jax.jit(lambda x: jnp.sin(x) @ x * 1.5).lower(square).compile()
  finally:
    jax.config.update("jax_compilation_cache_dir", before)
  assert found == ["compiled", "loaded"]
  assert float(made(jnp.ones((8, 8)))[0, 0]) == pytest.approx(12 * np.sin(1), rel=1e-3)


@pytest.mark.parametrize("algorithm", collectives.ALGORITHMS)
def test_every_all_reduce_is_a_sum(algorithm):
  mesh = make_mesh()
  x = np.random.default_rng(0).standard_normal((mesh.size, 1001), np.float32)
  found = collectives.all_reduce(jnp.asarray(x), mesh, algorithm)
  assert relative_distance(found, x.sum(0, dtype=np.float64)) < 1e-6
  assert len(found.devices()) == mesh.size


def test_the_chip_is_in_the_table(dry_run):
  kind = jax.devices()[0].device_kind
  assert (peak_flops(kind) is None) == dry_run, f"metrics/chips.py lacks {kind!r}"
  assert dry_run or efficiency.find_peak() > 1e9


def test_memory_is_measured():
  block = jax.block_until_ready(jnp.ones(1 << 24))
  found = efficiency._memory()
  assert found["peak_memory_gb"] >= found["memory_gb"] >= block.nbytes / 1e9


def test_a_run_trains_and_resumes(tmp_path, dry_run):
  config = tiny_digits(mesh__data="-1", dtype="bfloat16", epochs="2")
  first = fit(config, tmp_path).summary
  assert first["outcome"] == "done" and first["accuracy"] > 0.2  # chance: 0.1
  assert (dry_run or 0 < first["mfu"] < 1) and first["peak_memory_gb"] > 0
  again = fit(tiny_digits(mesh__data="-1", dtype="bfloat16", epochs="3"), tmp_path)
  assert again.summary["step"] == 3 * first["step"] // 2


START = """
from jaxscale import cluster
with cluster.open_session():
  import jax
  import jax.numpy as jnp
  jnp.ones(8).block_until_ready()
  stats = jax.local_devices()[0].memory_stats() or {}
  print(stats.get("bytes_limit", 0), jax.config.jax_optimization_level)
"""


def test_gpu_settings_are_taken(dry_run):
  from jaxscale.jobs.preflight.software import amd, nvidia

  env = {k: v for k, v in os.environ.items() if "PREALLOCATE" not in k}
  done = subprocess.run(
    [sys.executable, "-c", START], env=env, capture_output=True, text=True, timeout=300
  )
  assert done.returncode == 0, done.stderr
  *lines, values = done.stdout.splitlines()
  limit, level = values.split()
  if dry_run:
    assert lines == [] and level == "UNKNOWN"
    return
  assert lines[0].startswith("GPU settings: XLA_CLIENT_MEM_FRACTION=0.9")
  assert level == "UNKNOWN"  # raised only between nodes
  gpu, *_ = nvidia()[1] or amd()
  assert 0.85 * gpu["total"] < int(limit) < 0.95 * gpu["total"]
