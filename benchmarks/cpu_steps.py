"""A training step on CPU: ours, and PyTorch's of timm and transformers, in turns.

    .venv-others/bin/python benchmarks/cpu_steps.py [--turns 5] [--only text,vit]
        [--before CHECKOUT] [--other PYTHON] [--one-core] [--real-time]

`make others` makes that environment. Each model trains with random numbers, here and by
PyTorch eager with the same sizes and the same kind of optimizer, on one core and then
on all. The sides are processes that live through the run and step one after the
other; the first steps of each, which compile, are left out. `before` is another
checkout of this repository, as `git worktree add CHECKOUT COMMIT` makes it. `other` is
this one with the JAX of another environment, whose interpreter is given.
Milliseconds are of a step, the median of the turns: processor time, and wall time,
which on a busy machine says less; and there the threads of PyTorch wait for each other
in loops, so that only `--one-core` is of use, or `--real-time`, which as root keeps other
programs from the cores while the sides step. `speed` is theirs / ours of processor time: 1
and above is as fast as PyTorch.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from turns import Side, seconds_of, serve

# The language model is that of configs/text.py.
TEXT = {"layers": 4, "width": 128, "heads": 8, "hidden": 384, "vocabulary": 256}
VIT = {"layers": 4, "width": 192, "heads": 3, "patch": 4, "side": 32, "rows": 32}
RESNET = {"side": 64, "rows": 16}
TOKENS, TEXT_ROWS, CLASSES = 128, 16, 10
TIMEOUT_S = 600.0  # of an answer; the first one compiles
SIZES = {"text": TEXT, "vit": VIT, "resnet18": RESNET}


def ours(name: str) -> Any:
  """Return a function that runs one of our steps and waits for it."""
  import jax
  import numpy as np

  from jaxscale import config as cfg
  from jaxscale import data
  from jaxscale.experiment.build import experiment

  with contextlib.suppress(ImportError):  # in a checkout from before there were any
    from jaxscale.cluster import cpu_settings

    cpu_settings.keep_memory()  # as every run does
  rng = np.random.default_rng(0)
  common = {"schedule": cfg.Cosine(), "epochs": 100}
  if name == "text":
    sizes: Any = {"num_layers": TEXT["layers"], "num_heads": TEXT["heads"]}
    model = cfg.Transformer(width=TEXT["width"], hidden=TEXT["hidden"], **sizes)
    config = cfg.Config(
      model=model,
      data=cfg.Text(sequence_length=TOKENS),
      batch_size=TEXT_ROWS,
      optimizer=cfg.AdamW(lr=3e-3, b2=0.95, weight_decay=0.1),
      clip_norm=1.0,
      **common,
    )
  else:
    side, rows = (SIZES[name][key] for key in ("side", "rows"))
    x = rng.integers(0, 256, (2 * rows, side, side, 3), np.uint8)
    y = rng.integers(0, CLASSES, 2 * rows).astype(np.int32)
    shown = data.Arrays(x=x, y=y, x_eval=x, y_eval=y, num_classes=CLASSES)
    optimizer, model = cfg.SGD(lr=0.1), cfg.ResNet(depth=18)
    if name == "vit":
      sizes: Any = {"num_layers": VIT["layers"], "num_heads": VIT["heads"]}
      model = cfg.ViT(patch=VIT["patch"], width=VIT["width"], **sizes)
      optimizer = cfg.AdamW(lr=1e-3)
    config = cfg.Config(model=model, data=shown, batch_size=rows, optimizer=optimizer, **common)
  made = experiment(config, devices=jax.devices()[:1])
  state, train_step = made.init_state(), made.compile_train_step()
  rows = made.phase.batch_size
  batch = next(data.train_batches(made.train_data, rows, position=0, seed=0))
  batch = jax.device_put(batch, made.abstract_batch()[min(batch)].sharding)

  def step() -> None:
    nonlocal state
    state, metrics = train_step(state, batch)
    jax.block_until_ready((state, metrics))

  return step


def theirs(name: str) -> Any:
  """Return a function that runs one step of PyTorch."""
  import torch  # pyright: ignore[reportMissingImports]

  torch.set_num_threads(len(os.sched_getaffinity(0)))
  torch.manual_seed(0)
  if name == "text":
    import transformers  # pyright: ignore[reportMissingImports]

    sizes = {"num_attention_heads": TEXT["heads"], "num_hidden_layers": TEXT["layers"]}
    config = transformers.LlamaConfig(
      vocab_size=TEXT["vocabulary"],
      hidden_size=TEXT["width"],
      intermediate_size=TEXT["hidden"],
      use_cache=False,
      **sizes,
    )
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.randint(0, TEXT["vocabulary"], (TEXT_ROWS, TOKENS))
  else:
    import timm  # pyright: ignore[reportMissingImports]

    sizes = SIZES[name]
    images = torch.randn(sizes["rows"], 3, sizes["side"], sizes["side"])
    labels = torch.randint(0, CLASSES, (sizes["rows"],))
    model = timm.create_model("resnet18", num_classes=CLASSES)
    if name == "vit":
      model = timm.models.vision_transformer.VisionTransformer(
        img_size=VIT["side"],
        patch_size=VIT["patch"],
        num_classes=CLASSES,
        embed_dim=VIT["width"],
        depth=VIT["layers"],
        num_heads=VIT["heads"],
      )
  if name == "resnet18":
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
  else:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
  model.train()

  def step() -> None:
    optimizer.zero_grad()
    if name == "text":
      loss = model(input_ids=tokens, labels=tokens).loss
    else:
      loss = torch.nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    if name == "text":
      torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    loss.item()

  return step


def answer(side: str, name: str) -> None:
  """Run steps on request, as a process of one side."""
  step = (theirs if side == "theirs" else ours)(name)
  step()  # compiles
  step()
  serve({"steps": lambda count: seconds_of(step, lambda: None, count)})


def started(side: str, python: str, path: str, name: str, cores: set[int]) -> Side:
  """Start a process of one side: an interpreter, a checkout and the cores to use."""
  command = [python, __file__, "--side", side, "--only", name]
  env = os.environ | {"JAX_PLATFORMS": "cpu", "NPROC": str(len(cores))}
  env["PYTHONPATH"] = path
  return Side(command, env=env, preexec_fn=lambda: os.sched_setaffinity(0, cores))


def compare(
  name: str,
  cores: set[int],
  turns: int,
  count: int,
  of: dict[str, tuple[str, str]],
  is_real_time: bool,
) -> dict[str, Any]:
  """Return the medians of all sides, given by their interpreters and checkouts."""
  sides = {side: started(side, *where, name, cores) for side, where in of.items()}
  took = {side: [] for side in sides}
  for process in sides.values():
    process.wait_ready(TIMEOUT_S)
  for process in sides.values() if is_real_time else ():
    for thread in Path(f"/proc/{process.pid}/task").iterdir():
      os.sched_setscheduler(int(thread.name), os.SCHED_FIFO, os.sched_param(1))
  for turn in range(turns + 1):
    for side, process in sides.items():
      seconds = process.ask("steps", count, timeout_s=TIMEOUT_S)
      if turn:  # the first one has what only the first steps do
        took[side].append(seconds)
  for process in sides.values():
    process.close()
  row: dict[str, Any] = {"model": name, "threads": len(cores)}
  for i, kind in enumerate(("cpu_ms", "wall_ms")):
    found = {s: statistics.median(x[i] for x in took[s]) for s in sides}
    row |= {f"{side}_{kind}": round(1e3 * s, 1) for side, s in found.items()}
    key = "speed" if kind == "cpu_ms" else "speed_wall"
    row[key] = round(found["theirs"] / found["ours"], 2)
  return row


def main() -> None:
  parser = argparse.ArgumentParser()
  sides = ("ours", "theirs", "before", "other")
  parser.add_argument("--side", choices=sides, help=argparse.SUPPRESS)
  parser.add_argument("--before", help="another checkout of this repository")
  parser.add_argument("--other", metavar="PYTHON", help="of another environment")
  parser.add_argument("--only", default=",".join(SIZES), help="models, by commas")
  parser.add_argument("--one-core", action="store_true")
  parser.add_argument("--real-time", action="store_true")
  parser.add_argument("--turns", type=int, default=5)
  parser.add_argument("--steps", type=int, default=3, help="of one turn")
  args = parser.parse_args()
  if args.side:
    answer(args.side, args.only)
    return
  everywhere = sorted(os.sched_getaffinity(0))
  here = str(Path(__file__).resolve().parent.parent)
  of = {side: (sys.executable, here) for side in ("ours", "theirs")}
  if args.before:
    of["before"] = sys.executable, str(Path(args.before).resolve())
  if args.other:
    of["other"] = args.other, here
  rows = []
  one = {everywhere[0]}
  for cores in [one] if args.one_core else [one, set(everywhere)]:
    for name in args.only.split(","):
      rows.append(compare(name, cores, args.turns, args.steps, of, args.real_time))
      print(rows[-1], file=sys.stderr, flush=True)
  from common import report

  versions: Any = {n: metadata.version(n) for n in ("torch", "timm", "transformers")}
  if args.other:
    ask = "from importlib.metadata import version; print(version('jax'), end='')"
    versions["other_jax"] = subprocess.check_output([args.other, "-c", ask], text=True)
  report("cpu_steps", rows=rows, turns=args.turns, steps=args.steps, **versions)


if __name__ == "__main__":
  main()
