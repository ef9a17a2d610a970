"""Published results that the plan is compared with, and our models closest to them.

`benchmarks/backtest.py` compiles and compares. Rows marked "choose" are those that
constants in chips.toml may be chosen on; the others are predicted with what has come of
that, and no row has constants of its own. What a row gives in addition is the machine
that its source describes.

`round`: 1: all of these rows were in view when the constants of GPUs and Xeon Phi were
chosen. 2: divided before any of them was predicted.
`tag`: "read" in the source that is named; "recalled": numbers of the source that are
from memory, and could not be checked here. Machines whose links are recalled say so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxscale import config as cfg
from jaxscale.config.loading import load_config
from jaxscale.planning.machine import Machine

IMAGENET = cfg.Synthetic(num_examples=1_281_167, image_size=224, num_classes=1000)


SGD = cfg.SGD(lr=0.1, momentum=0.9, weight_decay=1e-4)


class Row(NamedTuple):
  """A published result.

  Attributes:
    name: the name of the system.
    model: a key of `MODELS`.
    chip: a name in chips.toml.
    devices: the number of devices, as JAX counts them.
    rows: the examples per device.
    rate: examples/s of all devices, or tokens/s of language models; None: not given.
    efficiency: against `base` devices; None: not given.
    base: the number of devices that the efficiency is relative to.
    overlap: "backward" where gradients are sent during the backward pass.
    use: "choose" or "held-out".
    tag: "read" or "recalled".
    source: the source of the numbers.
    machine: facts about the machine.
    per_example: the units of `rate` per example, e.g. tokens.
    round: 1 or 2, see the module's docstring.
    base_rows: the examples per device of `base` if they differ (strong scaling).
    differs: differences of our program from theirs besides the code, or "".
  """

  name: str
  model: str
  chip: str
  devices: int
  rows: int
  rate: float | None
  efficiency: float | None
  base: int
  overlap: Any
  use: str
  tag: str
  source: str
  machine: Machine | None = None
  per_example: int = 1
  round: int = 1
  base_rows: int | None = None
  differs: str = ""


ALL_REDUCE = cfg.AllReduce()
# Between processes of processors gradients travel in buckets (`exchange.buckets`).
IN_BUCKETS = cfg.AllReduce(bucket_bytes=25 * 2**20)


def images(model: Any, dtype: Any, data: Any = IMAGENET, exchange: Any = ALL_REDUCE):
  """Return a function from rows and devices to the config of an image model."""

  def make(rows: int, devices: int) -> cfg.Config:
    return cfg.Config(
      model=model,
      data=data,
      optimizer=SGD,
      batch_size=rows * devices,
      epochs=1,
      dtype=dtype,
      exchange=exchange,
    )

  return make


def llama(rows: int, devices: int) -> cfg.Config:
  """Return the config of Llama 3.1 8B with fully sharded parameters."""
  return cfg.Config(
    model=cfg.Transformer(num_layers=32, width=4096, num_heads=32, num_kv_heads=8, hidden=14_336),
    data=cfg.TextFiles(path="c4", vocab_size=128_256, sequence_length=8192),
    optimizer=cfg.AdamW(lr=3e-4),
    batch_size=rows * devices,
    epochs=1,
    dtype="bfloat16",
    mesh=cfg.Mesh(data=1, fsdp=-1),
    layout=cfg.Layout(shard="fsdp", remat="dots"),
  )


def language_model(
  model: cfg.Transformer,
  vocab: int,
  length: int,
  mesh: Mapping[str, int],
  micro: int | None = None,
  /,
  **layout: Any,
):
  """Return a function from rows per data-parallel block and devices to a config.

  Args:
    model: the sizes of the model.
    vocab: the vocabulary size.
    length: the tokens per row.
    mesh: the axes of the mesh.
    micro: the rows of a micro-batch; None computes all at once.
    layout: the settings of the layout.
  """

  def make(rows: int, devices: int) -> cfg.Config:
    blocks = devices // (mesh.get("stage", 1) * mesh.get("model", 1))
    return cfg.Config(
      model=model,
      data=cfg.TextFiles(path="text", vocab_size=vocab, sequence_length=length),
      optimizer=cfg.AdamW(lr=3e-4),
      batch_size=rows * blocks,
      epochs=1,
      accumulate_steps=rows // micro if micro else 1,
      dtype="bfloat16",
      mesh=cfg.Mesh(**mesh),
      layout=cfg.Layout(**layout),
    )

  return make


def flops_per_token(model: cfg.Transformer, vocab: int, length: int) -> float:
  """Return a token's FLOPs as MaxText counted them until its pull request 1988 (July 2025).

  It counts 6 FLOPs per parameter that multiplies, and attention without a mask
  (AI-Hypercomputer/maxtext, docs/reference/performance_metrics.md). Megatron-LM counts
  the same for a model without a gate (arXiv:2104.04473, equation 3).
  """
  heads, each = model.num_heads, model.head_width or model.width // model.num_heads
  projections = 2 * (heads + (model.num_kv_heads or heads)) * each
  layer = model.width * (projections + 3 * (model.hidden or 0))
  weights = model.num_layers * layer + vocab * model.width
  return 6 * weights + 12 * model.num_layers * length * heads * each


LLAMA2_7B = cfg.Transformer(num_layers=32, width=4096, num_heads=32, hidden=11_008)
LLAMA3_8B = cfg.Transformer(num_layers=32, width=4096, num_heads=32, num_kv_heads=8, hidden=14_336)
# MaxText's global_parameter_scale (src/maxtext/configs), and its model of TPU v4, whose
# MLP had no gate: as many parameters and FLOPs with one.
MAXTEXT_16B = cfg.Transformer(
  num_layers=32, width=4096, num_heads=64, head_width=128, hidden=28_672
)
MAXTEXT_32B = cfg.Transformer(
  num_layers=32, width=8192, num_heads=64, head_width=128, hidden=28_672
)
MAXTEXT_22B = cfg.Transformer(
  num_layers=48, width=6144, num_heads=24, head_width=256, hidden=16_384
)
GPT3 = cfg.Transformer(num_layers=96, width=12_288, num_heads=96, hidden=32_768)
SLICES = {"replica": -1, "data": 1}

IMAGENET_22K = cfg.Synthetic(num_examples=7_500_000, image_size=224, num_classes=21_841)
RECIPE = Path(__file__).parents[1] / "configs" / "alexnet_bn_32k.py"
ALEXNET_BN = dataclasses.replace(load_config(str(RECIPE)).model, bn_span="device")
ALEXNET = cfg.Synthetic(num_examples=1_281_167, image_size=227, num_classes=1000)
# Key: (config of rows and devices, chips to compile for, rows of the programs).
MODELS: dict[str, tuple[Any, str, tuple[int, ...]]] = {
  "resnet50 float32": (images(cfg.ResNet(depth=50), "float32"), "h100-16", (32, 128)),
  "resnet50 bfloat16": (images(cfg.ResNet(depth=50), "bfloat16"), "h100-16", (64, 192)),
  "resnet101 float32": (images(cfg.ResNet(depth=101), "float32"), "h100-16", (64,)),
  "resnet101 22k": (images(cfg.ResNet(depth=101), "float32", IMAGENET_22K), "h100-16", (20,)),
  "llama 8B on 8": (llama, "h100-8", (2,)),
  "llama 8B on 128": (llama, "h100-128", (2,)),
  "resnet50 v3": (images(cfg.ResNet(depth=50), "bfloat16"), "v3-16", (8, 16)),
  "resnet50 v4": (images(cfg.ResNet(depth=50), "bfloat16"), "v4-16", (8,)),
  "resnet50 knl": (images(cfg.ResNet(depth=50), "float32", exchange=IN_BUCKETS), "knl-8", (16, 64)),
  "alexnet knl": (images(ALEXNET_BN, "float32", ALEXNET, IN_BUCKETS), "knl-8", (64,)),
  "llama2 7B on A3": (
    language_model(
      LLAMA2_7B,
      32_000,
      4096,
      SLICES | {"fsdp": 8},
      shard="fsdp",
      remat="dots",
      slow_axes="in_backward",
    ),
    "h100-16",
    (2, 4),
  ),
  "llama3 8B fsdp": (
    language_model(
      LLAMA3_8B, 128_256, 4096, {"data": 1, "fsdp": -1}, 4, shard="fsdp", remat="full"
    ),
    "h200-4",
    (8,),
  ),
  "llama3 8B tensor 4": (
    language_model(
      LLAMA3_8B,
      128_256,
      4096,
      {"data": 1, "fsdp": -1, "model": 4},
      4,
      shard="fsdp",
      remat="full",
      sum_in="dtype",
    ),
    "8xh200-4",
    (8,),
  ),
  "gpt3 pipeline": (
    language_model(
      GPT3,
      131_072,
      4096,
      {"data": -1, "stage": 6, "model": 8},
      1,
      model="layers_and_tokens",
      schedule="1f1b",
    ),
    "h100-96",
    (12, 576),
  ),
  "16B v5e": (
    language_model(
      MAXTEXT_16B,
      32_000,
      2048,
      SLICES | {"fsdp": 256},
      2,
      shard="fsdp",
      remat="full",
      slow_axes="in_backward",
    ),
    "2xv5e-256",
    (6,),
  ),
  "32B v5e": (
    language_model(
      MAXTEXT_32B,
      32_000,
      2048,
      SLICES | {"fsdp": 256},
      1,
      shard="fsdp",
      remat="full",
      slow_axes="in_backward",
    ),
    "2xv5e-256",
    (4,),
  ),
  "22B v4": (
    language_model(
      MAXTEXT_22B,
      32_000,
      2048,
      SLICES | {"fsdp": 64},
      3,
      shard="fsdp",
      remat="full",
      slow_axes="in_backward",
    ),
    "2xv4-64",
    (12,),
  ),
  "32B v5p": (
    language_model(
      MAXTEXT_32B,
      32_000,
      2048,
      SLICES | {"fsdp": 16, "model": 4},
      12,
      shard="fsdp",
      remat="dots",
      slow_axes="in_backward",
      sum_in="dtype",
    ),
    "2xv5p-64",
    (24,),
  ),
  "8B v6e": (
    language_model(
      LLAMA3_8B, 128_256, 2048, {"data": 1, "fsdp": -1}, 6, shard="fsdp", remat="full"
    ),
    "v6e-16",
    (12,),
  ),
}

NVIDIA = "NVIDIA/DeepLearningExamples, MxNet/Classification/RN50v1.5/README.md"
TITAN = "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
MLPERF = "mlcommons/training_results_{}, log of the run"
# Grand Teton: HBM2e, 2.4 TB/s, 400 Gb/s a GPU; 500 W of the 700 that the peak is at.
TETON = Machine(bandwidth=2.4e12)
ABCI = Machine(per_node=4, network_link=6.25e9)  # recalled: 2 x 100 Gb/s for 4 GPUs
MINSKY = Machine(per_node=4, network_link=3.125e9)  # recalled: 100 Gb/s for 4 GPUs
BIG_BASIN = Machine(per_node=8, network_link=0.78e9)  # recalled: 50 Gb/s for 8 GPUs
UBER = Machine(per_node=4, network_link=0.78e9, node_link=12e9)  # 25 Gb/s; PCIe recalled
MN1 = Machine(per_node=8, network_link=1.75e9, node_link=12e9)  # 2 x 56 Gb/s; PCIe recalled
DGX2 = Machine(per_node=16)
# Recalled: GPUDirect's 800 Gb/s for 8 GPUs.
A3 = Machine(per_node=8, network_link=12.5e9)
# A P40 is a P100 with other rates (recalled: its data sheet, 8 a node on PCIe and
# 100 Gb/s).
P40 = Machine(
  per_node=8, network_link=1.56e9, node_link=12e9, peak_float32=11.76e12, bandwidth=346e9, units=30
)
XLA = "attention by XLA, not by a flash kernel"
MICRO = f"micro-batches, so that its scores fit; {XLA}"
EPOCH = 1_281_167


def nvidia(name, model, chip, devices, rows, rate, efficiency, use, machine=None):
  return Row(
    name, model, chip, devices, rows, rate, efficiency, 1, "backward", use, "read", NVIDIA, machine
  )


def maxtext(name, key, chip, model, vocab, length, size, rows, slices, path, machine, differs=""):
  """Return the rows of a table: TFLOP/s per chip on 1, 2 and more slices or nodes."""
  alone, _ = slices[1]
  per_token = flops_per_token(model, vocab, length)
  for number, (tflops, use) in slices.items():
    rate = tflops * 1e12 * size * number / per_token
    efficiency = tflops / alone if number > 1 else None
    yield Row(
      f"{name}, {number} x {size}",
      key,
      chip,
      size * number,
      rows,
      rate,
      efficiency,
      size,
      "schedule",
      use,
      "read",
      f"AI-Hypercomputer/maxtext, {path}",
      machine,
      length,
      2,
      None,
      differs,
    )


def kempner(name, key, devices, rate, efficiency, base, use):
  source = "KempnerInstitute/KempnerForge, benchmarks/mfu_scaling/mfu_scaling.md"
  return Row(
    f"KempnerForge 8B, {name}",
    key,
    "h200",
    devices,
    8,
    rate,
    efficiency,
    base,
    "schedule",
    use,
    "read",
    source,
    Machine(per_node=4),
    4096,
    2,
  )


def megatron(devices, rows, mfu, use):
  """Return a row of strong scaling at 1,152 rows; its README rounds the shares of the peak."""
  rate = mfu * 989.4e12 * devices / flops_per_token(GPT3, 131_072, 4096)
  efficiency = mfu / 0.47 if devices > 96 else None
  return Row(
    f"Megatron-LM 177B, {devices:,}",
    "gpt3 pipeline",
    "h100",
    devices,
    rows,
    rate,
    efficiency,
    96,
    "schedule",
    use,
    "read",
    "NVIDIA/Megatron-LM, README.md",
    None,
    4096,
    2,
    576,
    "one stage a device, and its forward pass twice",
  )


def trillium(devices, base, efficiency, use):
  source = "AI-Hypercomputer/tpu-recipes, training/trillium/Llama3.1-8B-MaxText"
  return Row(
    f"MaxText 8B, v6e-{devices}",
    "8B v6e",
    "v6e",
    devices,
    12,
    None,
    efficiency,
    base,
    "schedule",
    use,
    "read",
    source,
    None,
    2048,
    2,
    None,
    f"rows of 2,048 for 8,192 tokens, nothing offloaded; {MICRO}",
  )


TF = "tensorflow.org/performance/benchmarks (2017), synthetic, batch 64 a GPU"
F32, BF16 = "resnet50 float32", "resnet50 bfloat16"
ROWS = [
  # One node: rates, and the efficiency inside it.
  Row("TensorFlow, P100", F32, "p100", 1, 64, 219, None, 1, "backward", "choose", "read", TF),
  Row(
    "TensorFlow, DGX-1 P100", F32, "p100", 8, 64, 1734, 0.99, 1, "backward", "held-out", "read", TF
  ),
  nvidia("MXNet, V100 float32", F32, "v100", 1, 96, 384, None, "choose"),
  nvidia("MXNet, DGX-1 V100 float32", F32, "v100", 8, 96, 3005, 0.978, "held-out"),
  nvidia("MXNet, V100 float16", BF16, "v100", 1, 192, 1376, None, "choose"),
  nvidia("MXNet, DGX-1 V100 float16", BF16, "v100", 8, 192, 10723, 0.974, "held-out"),
  nvidia("MXNet, DGX-2 V100 float16", BF16, "v100", 16, 256, 21484, 0.90, "held-out", DGX2),
  nvidia("MXNet, DGX-2 V100 float32", F32, "v100", 16, 128, 6338, 0.95, "held-out", DGX2),
  nvidia("MXNet, A100 float16", BF16, "a100", 1, 256, 2180, None, "choose"),
  nvidia("MXNet, DGX A100 float16", BF16, "a100", 8, 256, 16925, 0.97, "held-out"),
  nvidia("MXNet, A100 TF32", F32, "a100", 1, 256, 1022, None, "held-out"),
  nvidia("MXNet, DGX A100 TF32", F32, "a100", 8, 256, 8001, 0.978, "choose"),
  # Many nodes.
  Row(
    "Goyal et al.",
    F32,
    "p100",
    256,
    32,
    90 * EPOCH / 3600,
    0.90,
    8,
    "backward",
    "choose",
    "read",
    "arXiv:1706.02677, abstract: 90 epochs in an hour, 90 %",
    BIG_BASIN,
  ),
  Row(
    "IBM DDL, Caffe",
    F32,
    "p100",
    256,
    32,
    None,
    0.95,
    4,
    "schedule",
    "held-out",
    "read",
    "IBM's announcement, 2017 (batch recalled)",
    MINSKY,
  ),
  Row(
    "IBM DDL, Torch",
    F32,
    "p100",
    256,
    32,
    90 * EPOCH / 3000,
    None,
    4,
    "schedule",
    "held-out",
    "read",
    "arXiv:1708.02188, abstract: 90 epochs, 50 minutes",
    MINSKY,
  ),
  Row(
    "IBM DDL, 22k classes",
    "resnet101 22k",
    "p100",
    256,
    20,
    None,
    0.857,
    4,
    "schedule",
    "choose",
    "read",
    "IBM Systems blog: 16 days to 7 hours (batch recalled)",
    MINSKY,
    round=2,
  ),
  Row(
    "Horovod, 16 GPUs",
    "resnet101 float32",
    "p100",
    16,
    64,
    1656.82,
    None,
    1,
    "backward",
    "choose",
    "read",
    "horovod/horovod, docs/benchmarks.rst",
    UBER,
  ),
  Row(
    "Horovod, 512 GPUs",
    "resnet101 float32",
    "p100",
    512,
    64,
    None,
    0.90,
    1,
    "backward",
    "held-out",
    "read",
    "horovod/horovod, docs/benchmarks.rst",
    UBER,
  ),
  Row(
    "ChainerMN",
    F32,
    "p100",
    128,
    32,
    None,
    0.90,
    1,
    "backward",
    "held-out",
    "read",
    "arXiv:1710.11351, abstract (batch and links recalled)",
    MN1,
  ),
  Row(
    "Akiba et al.",
    F32,
    "p100",
    1024,
    32,
    90 * EPOCH / 900,
    None,
    1,
    "backward",
    "choose",
    "read",
    "arXiv:1711.04325, abstract: 90 epochs in 15 minutes",
    MN1,
  ),
  Row(
    "Mikami et al.",
    BF16,
    "v100",
    2176,
    16,
    90 * EPOCH / 224,
    None,
    1,
    "backward",
    "held-out",
    "read",
    "arXiv:1811.05233, abstract: 90 epochs in 224 s (batches of 34K and more)",
    ABCI,
  ),
  Row(
    "Yamazaki et al.",
    BF16,
    "v100",
    2048,
    40,
    1.73e6,
    None,
    1,
    "backward",
    "held-out",
    "read",
    "arXiv:1903.12650, abstract",
    ABCI,
  ),
  Row(
    "You et al., 512 KNL",
    "resnet50 knl",
    "knl",
    512,
    64,
    90 * EPOCH / 3600,
    None,
    1,
    "schedule",
    "choose",
    "read",
    "arXiv:1709.05011, press: 90 epochs in 60 minutes",
  ),
  Row(
    "You et al., 2,048 KNL",
    "resnet50 knl",
    "knl",
    2048,
    16,
    90 * EPOCH / 1200,
    None,
    1,
    "schedule",
    "held-out",
    "read",
    "arXiv:1709.05011, abstract: 90 epochs in 20 minutes",
  ),
  Row(
    "You et al., AlexNet",
    "alexnet knl",
    "knl",
    512,
    64,
    100 * EPOCH / 1440,
    None,
    1,
    "schedule",
    "held-out",
    "read",
    "arXiv:1709.05011, press: 100 epochs in 24 minutes",
  ),
  # TPUs: what a device is of v3 is a core.
  Row(
    "Ying et al., v3",
    "resnet50 v3",
    "v3",
    2048,
    16,
    1.05e6,
    None,
    1,
    "schedule",
    "choose",
    "read",
    "arXiv:1811.06992, abstract: above 1.05 million images/s",
    round=2,
  ),
  Row(
    "MLPerf v0.7 JAX, v3",
    "resnet50 v3",
    "v3",
    8192,
    8,
    4.5e6,
    None,
    1,
    "schedule",
    "held-out",
    "read",
    MLPERF.format("v0.7"),
    Machine(per_node=8192),
    round=2,
  ),
  Row(
    "MLPerf v2.0, v4",
    "resnet50 v4",
    "v4",
    4096,
    8,
    60 * EPOCH / 11.77,
    None,
    1,
    "schedule",
    "held-out",
    "read",
    MLPERF.format("v2.0"),
    round=2,
  ),
  # Language models: tokens a second.
  Row(
    "torchtitan 8B, 8 H100",
    "llama 8B on 8",
    "h100",
    8,
    2,
    8 * 6667,
    None,
    1,
    "schedule",
    "choose",
    "read",
    TITAN,
    TETON,
    8192,
  ),
  Row(
    "torchtitan 8B, 128 H100",
    "llama 8B on 128",
    "h100",
    128,
    2,
    128 * 6514,
    0.977,
    8,
    "schedule",
    "held-out",
    "read",
    TITAN,
    TETON,
    8192,
  ),
  # The second round.
  Row(
    "Jia et al.",
    F32,
    "p100",
    2048,
    32,
    90 * EPOCH / 396,
    None,
    1,
    "backward",
    "held-out",
    "read",
    "arXiv:1807.11205, abstract: 90 epochs in 6.6 minutes",
    P40,
    round=2,
    differs="float32; theirs sends float16",
  ),
  Row(
    "MLPerf v0.6, v3",
    "resnet50 v3",
    "v3",
    2048,
    16,
    64 * EPOCH / 67.1,
    None,
    1,
    "schedule",
    "held-out",
    "recalled",
    "arXiv:1909.09756: 64 epochs in 67.1 s, evaluation in it",
    round=2,
  ),
  *maxtext(
    "MaxText 7B, A3",
    "llama2 7B on A3",
    "h100",
    LLAMA2_7B,
    32_000,
    4096,
    8,
    4,
    {
      1: (492, "choose"),
      2: (422, "choose"),
      4: (407, "held-out"),
      8: (409, "choose"),
      16: (375, "held-out"),
    },
    "src/maxtext/configs/gpu/a3/llama_2_7b/README.md",
    A3,
  ),
  Row(
    "JAX-Toolbox, MaxText 7B",
    "llama2 7B on A3",
    "h100",
    8,
    2,
    22.19 * 4096,
    None,
    8,
    "schedule",
    "held-out",
    "read",
    "NVIDIA/JAX-Toolbox, docs/frameworks/maxtext/README.md",
    per_example=4096,
    round=2,
  ),
  kempner("1 GPU", "llama3 8B fsdp", 1, 10_471, None, 1, "choose"),
  kempner("2 GPUs", "llama3 8B fsdp", 2, 18_728, 18_728 / 2 / 10_471, 1, "held-out"),
  kempner("4 GPUs", "llama3 8B fsdp", 4, 38_983, 38_983 / 4 / 10_471, 1, "held-out"),
  kempner("tensor 4", "llama3 8B tensor 4", 4, 25_135, None, 4, "held-out"),
  kempner("tensor 4, 8 GPUs", "llama3 8B tensor 4", 8, 44_299, 44_299 / 2 / 25_135, 4, "choose"),
  kempner(
    "tensor 4, 16 GPUs", "llama3 8B tensor 4", 16, 82_988, 82_988 / 4 / 25_135, 4, "held-out"
  ),
  kempner(
    "tensor 4, 32 GPUs", "llama3 8B tensor 4", 32, 155_917, 155_917 / 8 / 25_135, 4, "held-out"
  ),
  megatron(96, 576, 0.47, "choose"),
  megatron(2304, 24, 0.44, "choose"),
  megatron(4608, 12, 0.42, "held-out"),
  *maxtext(
    "MaxText 16B, v5e",
    "16B v5e",
    "v5e",
    MAXTEXT_16B,
    32_000,
    2048,
    256,
    6,
    {1: (120, "choose"), 2: (117, "choose"), 8: (115, "choose"), 32: (108, "choose")},
    "src/maxtext/configs/tpu/v5e/README.md",
    None,
    MICRO,
  ),
  *maxtext(
    "MaxText 32B, v5e",
    "32B v5e",
    "v5e",
    MAXTEXT_32B,
    32_000,
    2048,
    256,
    4,
    {1: (132, "held-out"), 2: (128, "held-out"), 8: (125, "held-out"), 32: (119, "held-out")},
    "src/maxtext/configs/tpu/v5e/README.md",
    None,
    MICRO,
  ),
  *maxtext(
    "MaxText 22B, v4",
    "22B v4",
    "v4",
    MAXTEXT_22B,
    32_000,
    2048,
    64,
    12,
    {1: (156, "held-out"), 2: (152, "held-out"), 8: (146, "held-out")},
    "src/maxtext/configs/tpu/v4/README.md",
    Machine(per_node=64),
    f"12 rows for 13; {MICRO}",
  ),
  *maxtext(
    "MaxText 32B, v5p",
    "32B v5p",
    "v5p",
    MAXTEXT_32B,
    32_000,
    2048,
    64,
    24,
    {1: (328, "held-out"), 2: (319, "held-out")},
    "src/maxtext/configs/tpu/v5p/README.md",
    Machine(per_node=64),
    MICRO,
  ),
  trillium(16, 8, 7243.378 / 7138.890, "choose"),
  trillium(32, 8, 7031.689 / 7138.890, "held-out"),
  trillium(256, 128, 7207.336 / 7119.648, "held-out"),
]
