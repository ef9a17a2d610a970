"""Our steps for a GPU: products of bfloat16, channels last, by cuDNN.

The types are read from what JAX hands to the compiler; what that makes of it for an
H100 is read where a compiler for GPUs is installed, which needs no GPU.
"""

import dataclasses
import importlib.util
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from jaxscale import config as cfg
from jaxscale import data
from jaxscale.experiment import build
from jaxscale.models.attention import fused_attention
from support.commands import run_python
from support.configs import small_config
from support.paths import ROOT


def half(**fields):
  return small_config(batch_size=4, epochs=1, dtype="bfloat16", **fields)


def images(model):
  x = np.zeros((8, 64, 64, 3), np.uint8)
  y = (np.arange(8) % 4).astype(np.int32)
  return half(model=model, data=data.Arrays(x=x, y=y, x_eval=x, y_eval=y, num_classes=4))


def text():
  model = cfg.Transformer(num_layers=2, width=128, num_heads=2, hidden=256)
  tokens = cfg.TextFiles(path="none", vocab_size=256, sequence_length=128)
  return half(model=model, data=tokens, optimizer=cfg.AdamW(lr=1e-3))


def sharded(**fields):
  sizes = dict(num_layers=2, width=128, num_heads=2, hidden=512)
  tokens = cfg.TextFiles(path="none", vocab_size=2048, sequence_length=256)
  mesh, layout = cfg.Mesh(data=1, fsdp=-1), cfg.Layout(shard="fsdp", remat="full")
  common = dict(data=tokens, mesh=mesh, layout=layout, optimizer=cfg.AdamW(lr=1e-3))
  model = cfg.Transformer(**sizes, **fields)
  return dataclasses.replace(half(model=model, **common), batch_size=8)


SHARDED = {"apart": sharded, "tied": lambda: sharded(tied=True)}


def in_float8(make, **layout):
  config = make()
  layout = dataclasses.replace(config.layout, **{"remat": "none", "unroll": "all"} | layout)
  return dataclasses.replace(config, dtype="float8", layout=layout)


FLOAT8 = {
  "float8": lambda: in_float8(text),
  "float8 vit": lambda: in_float8(
    lambda: images(cfg.ViT(patch=16, width=128, num_heads=2, num_layers=2))
  ),
  "float8 scan": lambda: in_float8(text, remat="dots_attention", unroll=1),
  "float8 fsdp": lambda: in_float8(sharded, reduce_in="dtype"),
}
CONFIGS = {
  "resnet": lambda: images(cfg.ResNet(depth=18, width=16)),
  "vit": lambda: images(cfg.ViT(patch=16, width=128, num_layers=2, num_heads=2)),
  "transformer": text,
  "packed": text,
}


def lowered(name, devices):
  config, datasets = (CONFIGS | SHARDED | FLOAT8)[name](), None
  if isinstance(config.data, cfg.TextFiles):
    datasets = config.data.abstract(config.batch_size)
    if name == "packed":
      numbers = {"documents": ((config.data.sequence_length,), "int32")}
      packed = [x._replace(info=x.info._replace(arrays=numbers)) for x in datasets or ()]
      datasets = packed[0], packed[1]
  made = build.experiment(config, devices=devices, datasets=datasets)
  return made.lower_train_step()


def operands(program):
  """Element types of the operands of each product and convolution of StableHLO."""
  form = r"stablehlo\.(dot_general|convolution)\b.*: \((tensor<[^)]*)\) ->"
  return [tuple(re.findall(r"[x<]([a-z]+\d+)>", types)) for _, types in re.findall(form, program)]


@pytest.mark.parametrize("name", CONFIGS)
def test_products_are_of_bfloat16(name):
  found = operands(lowered(name, jax.devices()[:1]).as_text())
  assert {*found} == {("bf16", "bf16")} and len(found) > 20


COMPILERS = [*filter(importlib.util.find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin"))]
COMPILE = """
import json, sys
from jaxscale.planning.topologies import find_chips
from unit.test_gpu_programs import CONFIGS, lowered
program = lowered(sys.argv[1], find_chips(sys.argv[2]).devices)
sys.stdout.write(program.as_text() + "@compiled" + program.compile().as_text())
"""


def compiled_for(chips, name):
  """Return the program that JAX hands to the compiler, and the compiled one."""
  path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
  env = dict(PYTHONPATH=path, PYTHONWARNINGS="default", JAX_PLATFORMS="cpu")
  done = run_python("-c", COMPILE, name, chips, timeout=600, **env)
  assert done.returncode == 0, done.stderr[-2000:]
  source, _, compiled = done.stdout.partition("@compiled")
  return source, compiled


def outside_fusions(program):
  """Lines of the computations of a compiled program whose results are in memory."""
  fused = {*re.findall(r" fusion\(.* calls=%([\w.-]+)", program)}
  parts = re.split(r"^(?:ENTRY )?%([\w.-]+) \(.*\{$", program, flags=re.MULTILINE)
  pairs = zip(parts[1::2], parts[2::2], strict=True)
  return [line for name, text in pairs if name not in fused for line in text.splitlines()]


@pytest.mark.slow
@pytest.mark.skipif(not COMPILERS, reason="no compiler for GPUs is installed")
@pytest.mark.parametrize("name", SHARDED)
def test_large_arrays_of_sharded_steps_for_h100s_that_are_not_here(name):
  _, compiled = compiled_for("h100-8", name)
  lines = [line for line in outside_fusions(compiled) if " = " in line]
  shapes = [re.sub(r", (metadata|backend_config)=.*", "", line) for line in lines]
  # Logits of 256 tokens and 2,048 words exist, but only in bfloat16.
  assert any("bf16[256,2048]" in line for line in shapes)
  assert not [line for line in shapes if re.search(r"f32\[(1,)?256,2048\]", line)]
  # Only the kernel of the head is gathered, which may be the table, transposed.
  gathers = [line for line in shapes if re.search(r" all-gather(-start)?\(", line)]
  of_words = re.findall(r"(\w+)\[(?:2048,128|128,2048)\]", " ".join(gathers))
  assert of_words == ["bf16"] and any(" all-to-all" in line for line in shapes)
  # Gradients are reduce-scattered as the products return them.
  assert not [line for line in shapes if re.search(r"%(wrapped_)?transpose\S* = f32", line)]


@pytest.mark.slow
@pytest.mark.skipif(not COMPILERS, reason="no compiler for GPUs is installed")
@pytest.mark.parametrize("name", CONFIGS)
def test_programs_for_an_h100_that_is_not_here(name):
  source, compiled = compiled_for("h100-1", name)
  assert {*operands(source)} == {("bf16", "bf16")}
  call = r"%\S+ = \(?(\w+)\[.* custom-call\(.*?custom_call_target=\"(__cu[^\"]+)"
  calls = re.findall(call, compiled)
  names = [target for _, target in calls]
  assert calls and {kind for kind, _ in calls} <= {"bf16", "f32"}
  if name == "resnet":
    convolutions = [line for line in compiled.splitlines() if '"__cudnn$conv' in line]
    assert len(convolutions) == 3 * 20 - 1  # but for the gradient of the images
    for line in convolutions:
      assert re.search(r"= \(bf16\[", line), line
      labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", line)
      assert labels and all(x[-1] in "fio" and x[0] in "bo" for x in labels.groups())
    assert names.count("__cudnn$convForward") >= 20
  else:
    # In the body of the scan, and with documents by their mask.
    form = "__cudnn$fmhaScaleBiasSoftmax" if name == "packed" else "__cudnn$fmhaSoftmax"
    assert names.count(form) == 2  # layers, which are written out
    assert names.count(f"{form}Backward") == 2


@pytest.mark.slow
@pytest.mark.skipif(not COMPILERS, reason="no compiler for GPUs is installed")
@pytest.mark.parametrize("name", FLOAT8)
def test_products_of_layers_are_in_float8_on_h100s_that_are_not_here(name):
  _, compiled = compiled_for("h100-8" if name == "float8 fsdp" else "h100-1", name)
  per_layer = 6 if name == "float8 vit" else 7
  calls = [line for line in compiled.splitlines() if 'target="__cublas$lt$matmul' in line]
  eight = [line for line in calls if 'target="__cublas$lt$matmul$f8"' in line]
  precise = [line for line in eight if '["HIGHEST","HIGHEST"]' in line]
  # In each layer a product forwards and two backwards, whose sums are full.
  layers = len(precise) / (2 * per_layer)
  assert layers == (layers // 1) and len(eight) - len(precise) >= per_layer
  if name != "float8 scan":  # A loop's body may also stand before or after the loop.
    assert (len(eight), len(precise)) == (3 * 2 * per_layer, 2 * 2 * per_layer)
  assert len(calls) - len(eight) <= 5  # the head, and embedding of patches
  if name == "float8 fsdp":
    lines = [line for line in outside_fusions(compiled) if " = " in line]
    of_kernels = r"(\w+)\[(?:\d+,)?(?:128,128|128,512|512,128)\]"
    gathers = [line for line in lines if re.search(r" all-gather(-start)?\(", line)]
    found = re.findall(of_kernels, " ".join(line.split(" all-gather")[0] for line in gathers))
    assert {*found} == {"f8e4m3fn"}
    sums = [line for line in lines if re.search(r" reduce-scatter(-start)?\(", line)]
    assert sums and not re.search(r"f32", " ".join(x.split(" reduce-scatter")[0] for x in sums))


@pytest.mark.parametrize("causal", [True, False])
def test_the_mask_of_documents_reaches_cudnn(causal, monkeypatch):
  """The program that JAX hands to the compiler for NVIDIA's GPUs."""
  monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91900)

  def program(documents):
    def loss(q, k, v):
      return fused_attention(q, k, v, causal=causal, documents=documents).sum(dtype=jnp.float32)

    q = jax.ShapeDtypeStruct((2, 64, 4, 64), jnp.bfloat16)
    traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(q, q, q)
    return traced.lower(lowering_platforms=("cuda",)).as_text()

  form = "__cudnn$fmhaScaleBiasSoftmax"
  whole, packed = program(None), program(jnp.zeros((2, 64), jnp.int32))
  assert form not in whole and "__cudnn$fmhaSoftmaxBackward" in whole
  for line in packed.splitlines():
    if (call := re.search(r"(\S+) = stablehlo.custom_call @(__cudnn\S+?)\((.*?)\)", line)) is None:
      continue
    mask = {form: 3, f"{form}Backward": 5}[call[2]]
    name = call[3].split(", ")[mask]
    # The bias is chosen by comparing all pairs of numbers, and is the same for all heads.
    assert re.search(rf"{name} = .*-> tensor<2x1x64x64xbf16>", packed), name
    assert ("CAUSAL" in line) == causal and "PADDING" not in line
  assert packed.count(f"@{form}") == 2
  assert re.search(r"compare +EQ, .*tensor<2x64x64xi32>", packed)
