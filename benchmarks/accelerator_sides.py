"""A process of benchmarks/accelerator.py: the sizes, and one side's training step.

A job, JSON in the command line, names the side, the model, its size and options. The step
is compiled and done twice; then it is done as often as the parent asks (`turns`).
"""

from __future__ import annotations

import json
import os
import re
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from turns import seconds_of, serve

GB = 10**9


class Work(NamedTuple):
  """Training of a model, ready to run.

  Attributes:
    step: a function that starts one step.
    wait: a function that waits for all started steps.
    peak_memory: a function that returns the peak bytes in use.
    facts: facts about the training, for the table.
    others: functions for further requests of the parent, by name.
  """

  step: Callable[[], Any]
  wait: Callable[[], Any]
  peak_memory: Callable[[], float]
  facts: dict[str, Any]
  others: dict[str, Callable[..., Any]]


# Published sizes: ResNet-50 (arXiv:1512.03385), ViT-B/16 (arXiv:2010.11929), TinyLlama
# 1.1B (arXiv:2401.02385), layers of Llama 3 8B (arXiv:2407.21783) under a vocabulary of
# 32,000, of which a GPU has as many tokens as in a run on 8. `rows` and `layers` are of a GPU
# with room for them: see `fitting`.
SIZES: dict[str, dict[str, Any]] = {
  "resnet50": {"depth": 50, "side": 224, "classes": 1000, "rows": 256},
  "vit_b16": {
    "width": 768,
    "layers": 12,
    "heads": 12,
    "patch": 16,
    "side": 224,
    "classes": 1000,
    "rows": 128,
  },
  "transformer_1b": {
    "width": 2048,
    "layers": 22,
    "heads": 32,
    "kv_heads": 4,
    "hidden": 5632,
    "vocabulary": 32_000,
    "tokens": 2048,
    "rows": 16,
  },
  "layers_8b": {
    "width": 4096,
    "layers": 32,
    "heads": 32,
    "kv_heads": 8,
    "hidden": 14_336,
    "vocabulary": 32_000,
    "tokens": 2048,
    "rows": 4,
  },
}
_TEXT = {"layers": 2, "heads": 4, "kv_heads": 2, "vocabulary": 256, "tokens": 32, "rows": 2}
TINY: dict[str, dict[str, Any]] = {
  "resnet50": {"depth": 18, "side": 32, "classes": 10, "rows": 4},
  "vit_b16": {
    "width": 64,
    "layers": 2,
    "heads": 2,
    "patch": 8,
    "side": 32,
    "classes": 10,
    "rows": 4,
  },
  "transformer_1b": _TEXT | {"width": 64, "hidden": 128},
  "layers_8b": _TEXT | {"width": 128, "hidden": 256},
}


def needed(size: dict[str, Any]) -> float:
  """Return a high estimate of the bytes that training a language model of a size needs.

  A parameter has 18: float32 itself, its gradient and Adam's moments, and a copy in
  bfloat16. For each token, a layer keeps about 20 vectors of its width, 4 of its hidden
  units in bfloat16 and a few in float32; of logits there are 3 in float32.
  """
  width, hidden, tokens = size["width"], size["hidden"], size["rows"] * size["tokens"]
  kv = width * size["kv_heads"] // size["heads"]
  layer = 2 * width * (width + kv) + 3 * width * hidden
  ends = 2 * size["vocabulary"] * width
  kept = tokens * (2 * (20 * width + 4 * hidden) + 12 * width)
  logits = 12 * tokens * size["vocabulary"]
  return 18 * ends + logits + size["layers"] * (18 * layer + kept)


def fitting(name: str, memory: float) -> dict[str, Any]:
  """Return the largest size of a model that fits, in layers or in rows.

  Args:
    name: a name in `SIZES`; image models have one size.
    memory: the bytes for one side.
  """
  size, key = dict(SIZES[name]), {"transformer_1b": "rows", "layers_8b": "layers"}
  if name in key:
    while needed(size) > memory and size[key[name]] > 1:
      size[key[name]] -= 1
  return size


def smaller(size: dict[str, Any]) -> dict[str, Any]:
  """Return half of a size, for a second attempt after the memory was too small."""
  key = "rows" if size["rows"] > 1 else "layers"
  if size.get(key, 1) < 2:
    raise ValueError("there is no smaller size")
  return size | {key: size[key] // 2}


def is_full(text: str) -> bool:
  """Return whether an error says that the GPU's memory was too small."""
  return bool(re.search("RESOURCE_EXHAUSTED|out of memory", text, re.I))


def ours(name: str, size: dict[str, Any], options: dict[str, str]) -> Work:
  """Return our step and our loop around it; options are settings by dotted field."""
  import jax
  import numpy as np

  from jaxscale import metrics
  from jaxscale.config.loading import override
  from jaxscale.experiment.build import experiment
  from jaxscale.run.efficiency import find_peak
  from jaxscale.training import loop

  config = override(our_config(name, size), options)
  device = jax.devices()[0]
  datasets = config.data.abstract(size["rows"]) if "vocabulary" in size else None
  made = experiment(config, devices=[device], datasets=datasets)
  rng, batch = np.random.default_rng(0), {}
  for key, each in made.abstract_batch().items():
    limit = 256 if each.dtype == np.uint8 else size.get("vocabulary", size.get("classes"))
    x = rng.integers(0, limit, each.shape).astype(each.dtype)
    batch[key] = jax.device_put(x, each.sharding)
  state, began = made.init_state(), time.perf_counter()
  train_step = made.compile_train_step()
  xla_s = round(time.perf_counter() - began, 1)

  def step() -> None:
    nonlocal state
    state, _ = train_step(state, batch)

  def in_loop(count: int) -> Any:
    def looped() -> None:
      nonlocal state
      feed = iter(lambda: batch, None)
      state, _ = loop.train(state, train_step, feed, callbacks, start=0, total_steps=count)

    progress = metrics.Progress(count, total_examples=count * size["rows"], quiet=True)
    callbacks = loop.LoopControl(
      is_logged=lambda step: step % 10 == 0,
      log=lambda step, values: progress.train(step, step * size["rows"], values),
    )
    cpu_s, wall_s = seconds_of(looped, lambda: jax.block_until_ready(state), 1)
    return cpu_s / count, wall_s / count

  def peak_memory() -> float:
    stats = device.memory_stats() or {}
    return stats.get("peak_bytes_in_use", _resident())

  facts = {
    "device": device.device_kind,
    "xla_s": xla_s,
    "example_flops": made.example_flops,
    "peak_flops": find_peak(),
  }
  others = {"loop": in_loop}
  return Work(step, lambda: jax.block_until_ready(state), peak_memory, facts, others)


def our_config(name: str, size: dict[str, Any]) -> Any:
  """Return the config of our step."""
  import numpy as np

  from jaxscale import config as cfg
  from jaxscale import data

  options: Any = {"epochs": 1000, "batch_size": size["rows"], "dtype": "bfloat16"}
  if "vocabulary" in size:
    text = cfg.TextFiles(
      path="random", vocab_size=size["vocabulary"], sequence_length=size["tokens"]
    )
    model = cfg.Transformer(
      num_layers=size["layers"],
      width=size["width"],
      num_heads=size["heads"],
      num_kv_heads=size["kv_heads"],
      hidden=size["hidden"],
    )
    adam = cfg.AdamW(lr=1e-4, b2=0.95, weight_decay=0.1)
    return cfg.Config(model=model, data=text, optimizer=adam, **options)
  x = np.zeros((2 * size["rows"], size["side"], size["side"], 3), np.uint8)
  y = np.arange(len(x), dtype=np.int32) % size["classes"]
  shown = data.Arrays(x=x, y=y, x_eval=x, y_eval=y, num_classes=size["classes"])
  if name == "resnet50":
    model = cfg.ResNet(depth=size["depth"])
    return cfg.Config(model=model, data=shown, optimizer=cfg.SGD(lr=0.1), **options)
  model = cfg.ViT(
    patch=size["patch"], width=size["width"], num_layers=size["layers"], num_heads=size["heads"]
  )
  adam = cfg.AdamW(lr=1e-4, weight_decay=0.1)
  return cfg.Config(model=model, data=shown, optimizer=adam, **options)


def _resident() -> float:
  return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def theirs(name: str, size: dict[str, Any], options: dict[str, str], side: str) -> Work:
  """Return PyTorch's step with its own models ("torch"), or with timm's and transformers'."""
  import torch  # pyright: ignore[reportMissingImports]
  from accelerator_torch import models  # PyTorch: only where it is asked for

  is_gpu = torch.cuda.is_available()
  device = "cuda" if is_gpu else "cpu"
  torch.manual_seed(0)
  torch.set_float32_matmul_precision("high")
  torch.backends.cudnn.benchmark = True  # XLA chooses between cuDNN's algorithms, too.
  if is_gpu and (share := os.environ.get("TORCH_MEMORY_FRACTION")):
    torch.cuda.set_per_process_memory_fraction(float(share))
  model, batch, loss_of, optimizer = models(name, size, side, device)

  def loss() -> Any:
    with torch.autocast(device, dtype=torch.bfloat16):
      return loss_of(model, *batch)

  # At tiny sizes on a CPU the code generator would take minutes of C++.
  compiled = torch.compile(loss, backend="inductor" if is_gpu else "aot_eager", **options)

  def step() -> None:
    optimizer.zero_grad(set_to_none=True)
    compiled().backward()
    optimizer.step()

  def peak_memory() -> float:
    return torch.cuda.max_memory_allocated() if is_gpu else _resident()

  wait = torch.cuda.synchronize if is_gpu else lambda: None
  kind = torch.cuda.get_device_name() if is_gpu else "cpu"
  return Work(step, wait, peak_memory, {"device": kind}, {})


def device() -> Any:
  """Return JAX's devices, the driver of NVIDIA's, and the bytes that a process may use."""
  from jaxscale.jobs.preflight.software import nvidia

  driver, _ = nvidia()
  import jax  # nvidia-smi comes first, as this process then uses the GPU.

  first = jax.devices()[0]
  found = {"platform": first.platform, "kind": first.device_kind, "count": len(jax.devices())}
  found |= {"driver": driver, "client": first.client.platform_version}
  return found | {"bytes": (first.memory_stats() or {}).get("bytes_limit")}


def exchange(names: list[str], tiny: bool) -> Any:
  """Return the rows of the gradient exchanges on all GPUs of this machine."""
  if tiny:
    os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")
  import exchange_worker
  import jax

  from jaxscale import models
  from jaxscale.mesh import make_mesh

  mesh, shapes = make_mesh(), exchange_worker.gradient_shapes()
  if tiny:
    mlp = models.functions(models.MLPModule(num_classes=10, hidden=(32,)), (8, 8, 1))
    shapes, _ = jax.eval_shape(mlp.init, jax.random.key(0))
  every = exchange_worker.exchanges(mesh, shapes)
  some = {name: every[name] for name in names or every}
  calls, facts = exchange_worker.compile_all(mesh, some, shapes)
  exchange_worker.turns(mesh, calls, 2)  # to be warm
  times = exchange_worker.turns(mesh, calls, 3 if tiny else 20)
  return [
    {"exchange": name, "devices": mesh.size, "ms": round(1e3 * min(t), 3), **facts[name]}
    for name, t in times.items()
  ]


def save(mb: int, steps: int, directory: str) -> Any:
  """Measure saves with the stretches of benchmarks/checkpoint_stall.py on this device."""
  from checkpoint_stall import trainer

  width, layers = {1: (256, 3), 100: (1024, 12), 1000: (2048, 30)}[mb]
  train, size = trainer(width, layers, 64, Path(directory), to_local=False)
  for with_save in (False, True):  # compiles, imports
    train(3, with_save)
  turns = [(train(steps, True), train(steps, False)) for _ in range(3)]
  stalls = sorted(saved["wall"] - plain["wall"] for saved, plain in turns)
  step_s = sorted(plain["wall"] for _, plain in turns)[1] / steps
  return {
    "state_mb": round(size / 1e6, 1),
    "step_ms": round(1e3 * step_s, 3),
    "call_ms": round(1e3 * sorted(saved["call"] for saved, _ in turns)[1], 2),
    "stall_ms": round(1e3 * stalls[1], 2),
    "stall_steps": round(stalls[1] / step_s, 2),
  }


def feed(directory: str, images: int, size: int, rows: int, batches: int) -> Any:
  """Return the images per second that our input decodes, crops and batches on all cores."""
  import io
  import itertools

  import numpy as np
  from PIL import Image

  from jaxscale import data

  rng, root, total = np.random.default_rng(0), Path(directory), 0
  for i in range(images):  # as large as ImageNet's usual ones, and as hard to decode
    coarse = rng.integers(0, 256, (47, 63, 3), np.uint8)
    pixels = np.asarray(Image.fromarray(coarse).resize((500, 375), 3), np.int16)
    pixels = (pixels + rng.integers(-24, 25, pixels.shape)).clip(0, 255)
    out = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(out, "JPEG", quality=90)
    path = root / f"n{i % 4:08}" / f"{i}.JPEG"
    path.parent.mkdir(exist_ok=True)
    total += path.write_bytes(out.getvalue())
  dataset = data.image_folder(directory, image_size=size, augment="crop")
  found = data.train_batches(dataset, rows, position=0, seed=0)
  next(found)
  began = time.perf_counter()
  for batch in itertools.islice(found, batches):
    assert batch["image"].shape == (rows, size, size, 3)
  rate = rows * batches / (time.perf_counter() - began)
  cores = len(os.sched_getaffinity(0))
  kb = round(total / images / 1e3)
  return {"images_per_s": round(rate, 1), "cores": cores, "image_kb": kb}


def main() -> None:
  job = json.loads(sys.argv[1])
  once = {"exchange": exchange, "save": save, "feed": feed, "device": device}
  side = job.pop("side")
  if side in once:
    serve({}, once[side](**job))
    return
  began = time.perf_counter()
  work = ours(**job) if side == "ours" else theirs(**job, side=side)
  work.step()
  work.wait()
  ready_s = time.perf_counter() - began
  _, step_s = seconds_of(work.step, work.wait, 1)
  compile_s = round(ready_s - step_s, 1)
  serve(
    {
      "steps": lambda count: seconds_of(work.step, work.wait, count),
      "memory": lambda: work.peak_memory() / GB,
      **work.others,
    },
    {"compile_s": compile_s, "step_s": step_s, **work.facts},
  )


if __name__ == "__main__":
  main()
