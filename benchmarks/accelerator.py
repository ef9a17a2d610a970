"""Training on GPUs against PyTorch, and what surrounds the step, in three parts.

    export PYTHONPATH=$PWD     # or install jaxscale
    python benchmarks/accelerator.py --part 1 --out results     # at most 8 minutes each
    python benchmarks/accelerator.py --part 2 --out results
    python benchmarks/accelerator.py --part 3 --out results

It needs JAX, and no network; without torch, torchvision, timm or transformers their rows are
left out. Part 1 trains a small model, runs the tests marked gpu, measures the input, and our
step in variants: other memory settings and sizes than the defaults. Parts 2 and 3 have a
section a model: ResNet-50 in bfloat16 at 224 px, as many layers of Llama 3 8B's size as fit, a
transformer of 1.1 billion parameters and ViT-B/16. Our step with our defaults, PyTorch's
(torch.compile, cudnn.benchmark, channels_last, scaled_dot_product_attention, fused optimizer,
autocast to bfloat16) and ours again run one after the other, each in a process of its own with
92 % of the GPU's memory; the two of ours show how steady the GPU is. timm's model, or
transformers' Llama, and PyTorch with mode="max-autotune-no-cudagraphs" follow if there is time.
All sides have a batch of random numbers on the device; ours are bytes that the step
normalizes, PyTorch's are float32.

    speed          seconds of the other's step / ours (the mean of our two medians)
    mfu            model FLOPs (forward and backward, without recomputation, causal
                   attention whole) against the published bfloat16 peak; none on CPUs
    compile_s      from nothing to the end of the first step, except for a step
    xla_s          the part of it in XLA, with its autotuning; our second process loads
    peak_memory_gb what the allocator gave out at most; on CPUs the process has

Part 3 also measures the exchanges of gradients on all GPUs of the machine, and the cost of a
save. The result is written to --out after each section, with what was left out, and what
failed and why; the exit code is 1 if something failed. --tiny has the same code at sizes for
CPUs; it keeps a result only with --out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata, util
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from accelerator_sides import GB, SIZES, TINY, fitting, is_full, smaller
from common import report
from turns import Side, SideError

ROOT = Path(__file__).parent.parent
SHARE = "0.92"  # of a GPU's memory, for the one process that has it
READY_S, LEAST_S = 240, 25  # seconds to be ready; seconds that a measurement needs at least
EXCHANGES = ["psum of the tree", "default: buckets of 25 MiB", "1-bit", "PowerSGD-4"]
LIBRARIES = {name: "timm" if "side" in SIZES[name] else "transformers" for name in SIZES}
PACKAGES = ("jax", "jaxlib", "flax", "optax", "torch", "torchvision", "timm", "transformers")
TUNED = {"mode": "max-autotune-no-cudagraphs"}
# Our step alone. A name with a dot, or one of `SETTINGS`, is a setting; the others are sizes.
SETTINGS = "dtype", "compiler_preset"
VARIANTS = """
layers_8b rows=4 layers=8 layout.remat=dots_attention
layers_8b rows=4 layers=8 layout.remat=dots_attention dtype=float8
vit_b16 layout.unroll=1
layers_8b rows=1 layers=4 tokens=8192 vocabulary=128256 layout.remat=dots_attention
transformer_1b rows=8 layout.remat=dots_attention
layers_8b rows=4 layers=8 layout.remat=full
layers_8b rows=4 layers=8 layout.remat=dots_attention compiler_preset=h100
layers_8b rows=4 layers=8 layout.remat=dots_attention layout.unroll=all
resnet50 rows=512
"""

Row = dict[str, Any]


class Run(NamedTuple):
  """Settings and results shared by the sections of a part.

  Attributes:
    tiny: whether the sizes are tiny, to test the code and not the GPU.
    turns: the number of times that each step is timed.
    device: the platform, kind and number of devices, and the bytes a process may use.
    end: the end of the time, by time.monotonic().
    folder: a folder for caches of compiled programs, empty at first.
    found: the rows of completed sections, by name.
  """

  tiny: bool
  turns: int
  device: dict[str, Any]
  end: float
  folder: str
  found: dict[str, list[Row]]

  def left(self, limit_s: float = READY_S) -> float:
    """Return the time limit for something that may take `limit_s` seconds."""
    return max(min(limit_s, self.end - time.monotonic()), 1.0)

  def is_over(self) -> bool:
    """Return whether no time is left for another measurement."""
    return self.end - time.monotonic() < (1 if self.tiny else LEAST_S)


@contextlib.contextmanager
def process(folder: str, quick: bool, **job: Any) -> Iterator[Side]:
  """Start a process of accelerator_sides.py with a job; `quick` gives it one thread."""
  env = dict(os.environ)
  env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
  if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in env:
    env["XLA_CLIENT_MEM_FRACTION"] = SHARE
  env["TORCH_MEMORY_FRACTION"] = SHARE
  env["JAX_COMPILATION_CACHE_DIR"] = env["TORCHINDUCTOR_CACHE_DIR"] = folder
  if quick:
    env["OMP_NUM_THREADS"] = "1"
  command = [sys.executable, str(ROOT / "benchmarks/accelerator_sides.py"), json.dumps(job)]
  side = Side(command, env=env)
  try:
    yield side
  finally:
    side.close()


def step_of(run: Run, name: str, side: str, size: Row, options: dict[str, str]) -> Row:
  """Return a row: one side's step at a size, or why there is none."""
  row: Row = {
    "model": name,
    "side": side,
    "size": size,
    **({"options": options} if options else {}),
  }
  if reason := left_out(run, side):
    return row | {"left_out": reason}
  try:
    with process(run.folder, run.tiny, name=name, side=side, size=size, options=options) as it:
      ready = it.wait_ready(run.left())
      guess_s = ready.pop("step_s")
      count = 1 if run.tiny else max(3, min(50, round(0.8 / guess_s)))
      turns = [it.ask("steps", count, timeout_s=run.left(60))[1] for _ in range(run.turns + 1)][1:]
      memory = it.ask("memory", timeout_s=60)
      if (name, side) == ("resnet50", "ours"):
        looped = [it.ask("loop", count, timeout_s=run.left(60))[1] for _ in range(run.turns)]
        row["loop_ratio"] = round(statistics.median(looped) / statistics.median(turns), 4)
  except SideError as e:
    return row | {"error": str(e)}
  step_s, unit = statistics.median(turns), "tokens" if "tokens" in size else "images"
  ours = ready if side == "ours" else next(r for r in run.found[name] if r["side"] == "ours")
  peak, flops = ours.get("peak_flops"), ours.get("example_flops")
  return row | {
    **ready,
    "step_ms": round(1e3 * step_s, 3),
    f"{unit}_per_s": round(size["rows"] * size.get("tokens", 1) / step_s, 2),
    "mfu": round(size["rows"] * flops / step_s / peak, 4) if peak and flops else None,
    "peak_memory_gb": round(memory, 3),
    "turns_ms": [round(1e3 * s, 3) for s in turns],
  }


def left_out(run: Run, side: str) -> str | None:
  """Return the reason that a side has no row, or None."""
  if side != "ours" and (missing := [x for x in ("torch", side) if not util.find_spec(x)]):
    return f"{missing[-1]} is not installed"
  return "no time was left" if run.is_over() else None


def compared(run: Run, name: str, side: str, options: dict[str, str] | None = None) -> Row:
  """Return the row of another side at our size, with its time as a multiple of ours."""
  ours = [r for r in run.found.get(name, ()) if r["side"] == "ours" and "step_ms" in r]
  if not ours:
    return {"model": name, "side": side, "left_out": "there is no step of ours to compare with"}
  row = step_of(run, name, side, ours[0]["size"], options or {})
  if "step_ms" in row:
    row["speed"] = round(row["step_ms"] / statistics.mean(r["step_ms"] for r in ours), 3)
  return row


def model(run: Run, name: str) -> list[Row]:
  """Return rows of ours, PyTorch and ours again, of a smaller size if one needs it."""
  size = TINY[name] if run.tiny else fitting(name, run.device["bytes"] or 70 * GB)
  while True:
    rows = run.found[name] = [step_of(run, name, "ours", size, {})]
    rows.append(compared(run, name, "torch"))
    rows.append(step_of(run, name, "ours", size, {}))
    if not any(is_full(row.get("error", "")) for row in rows) or run.is_over():
      break
    size = smaller(size)
  steps = [row["step_ms"] for row in rows if "step_ms" in row and row["side"] == "ours"]
  if "step_ms" in rows[1]:
    rows[1]["speed"] = round(rows[1]["step_ms"] / statistics.mean(steps), 3)
  return rows


def others(run: Run, names: list[str]) -> list[Row]:
  """Return the rows of libraries' models, and of PyTorch with autotuning."""
  rows = [compared(run, name, LIBRARIES[name]) for name in names]
  return rows + [compared(run, name, "torch", TUNED) for name in names if not run.tiny]


def variants(run: Run) -> list[Row]:
  """Return rows of our step in the variants, in order of importance."""
  rows = []
  for line in VARIANTS.split("\n")[1 : 3 if run.tiny else -1]:
    name, *words = line.split()
    given = {w.partition("=")[0]: w.partition("=")[2] for w in words}
    options = {key: text for key, text in given.items() if "." in key or key in SETTINGS}
    size: Row = TINY[name] if run.tiny else SIZES[name]
    if not run.tiny:
      size = size | {key: int(text) for key, text in given.items() if key not in options}
    rows.append(step_of(run, name, "ours", size, options))
  return rows


def once(run: Run, limit_s: float, **job: Any) -> Any:
  """Return the first answer of a process with a single job."""
  with process(run.folder, run.tiny, **job) as side:
    return side.wait_ready(run.left(limit_s))


def exchange(run: Run) -> list[Row]:
  """Measure the gradient exchanges on all GPUs of this machine."""
  names = EXCHANGES if run.tiny else []
  return once(run, 90, side="exchange", names=names, tiny=run.tiny)


def feed(run: Run) -> list[Row]:
  """Measure our input, which has to feed the ResNet's step."""
  if missing := [name for name in ("cv2", "PIL") if not util.find_spec(name)]:
    return [{"left_out": f"{' and '.join(missing)} not installed"}]
  sizes = {"images": 16, "size": 32, "rows": 8, "batches": 2}
  if not run.tiny:
    sizes = {"images": 512, "size": 224, "rows": 256, "batches": 20}
  with tempfile.TemporaryDirectory() as folder:
    return [once(run, 90, side="feed", directory=folder, **sizes)]


def save(run: Run) -> list[Row]:
  """Measure by how much a save delays the steps after it."""
  sizes, steps = ((1,), 3) if run.tiny else ((100, 1000), 50)
  rows = []
  for mb in sizes:
    with tempfile.TemporaryDirectory() as folder:
      rows.append(once(run, 60, side="save", mb=mb, steps=steps, directory=folder))
  return rows


def command(run: Run, limit_s: float, *words: str) -> tuple[Row, subprocess.CompletedProcess[str]]:
  """Run Python with these words; return the seconds and the result."""
  env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
  if run.device["platform"] == "cpu":
    env["JAXSCALE_GPU_TESTS"] = "cpu"
  began, limit = time.monotonic(), run.left(limit_s)
  options: Any = {"capture_output": True, "text": True, "timeout": limit, "env": env, "cwd": ROOT}
  try:
    done = subprocess.run([sys.executable, "-m", *words], **options)
  except subprocess.TimeoutExpired:
    raise SideError(f"{words[0]}: not done after {limit:.0f} s") from None
  return {"seconds": round(time.monotonic() - began, 1)}, done


def train(run: Run) -> list[Row]:
  """Train configs/digits.py in bfloat16, as a first run does."""
  with tempfile.TemporaryDirectory() as folder:
    words = "--config", "configs/digits.py", "--workdir", folder, "--config.dtype=bfloat16"
    took, done = command(run, 180, "jaxscale.train", *words, *["--config.epochs=8"] * run.tiny)
    if done.returncode:
      raise SideError((done.stderr.strip().splitlines() or ["no message"])[-1][:300])
    summary = json.loads((Path(folder) / "summary.json").read_text())
  return [took | {name: summary.get(name) for name in ("outcome", "accuracy", "step")}]


def tests(run: Run) -> list[Row]:
  """Run the tests marked gpu; count how many passed, failed and were skipped."""
  file = Path(run.folder) / "tests.xml"
  words = "--confcutdir=tests/gpu", "tests/gpu", "-p", "no:cacheprovider", f"--junitxml={file}"
  took, done = command(run, 300 if run.tiny else 240, "pytest", *words)
  if not file.exists():
    lines = (done.stderr or done.stdout).strip().splitlines()
    raise SideError(lines[-1] if lines else f"pytest ended with {done.returncode}")
  (suite,) = ElementTree.parse(file).getroot().iter("testsuite")
  counts = {name: int(suite.get(name, 0)) for name in ("failures", "errors", "skipped")}
  total = int(suite.get("tests", 0))
  failed = [case.get("name") for case in suite.iter("testcase") if len(case)]
  passed = total - sum(counts.values())
  return [took | counts | {"passed": passed, "not_passed": failed, "on": run.device["platform"]}]


Section = Callable[[Run], list[Row]]
MODELS: dict[str, Section] = {n: (lambda run, n=n: model(run, n)) for n in SIZES}
PARTS: dict[int, dict[str, Section]] = {
  1: {"train": train, "tests": tests, "feed": feed, "variants": variants},
  2: {
    **{name: MODELS[name] for name in ("resnet50", "layers_8b")},
    "others_2": lambda run: others(run, ["resnet50", "layers_8b"]),
  },
  3: {
    **{name: MODELS[name] for name in ("transformer_1b", "vit_b16")},
    "exchange": exchange,
    "save": save,
    "others_3": lambda run: others(run, ["transformer_1b", "vit_b16"]),
  },
}


def main() -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
  parser.add_argument("--part", type=int, choices=PARTS, help="without it: all parts")
  parser.add_argument("--out", type=Path, help="folder of the results (benchmarks/results)")
  parser.add_argument("--minutes", type=float, default=8.0, help="at most, of a part")
  parser.add_argument("--only", help="sections, by commas")
  parser.add_argument("--turns", type=int, default=5, help="times that a step is timed")
  parser.add_argument("--tiny", action="store_true", help="to test this on a CPU")
  asked = parser.parse_args()
  known = {name for sections in PARTS.values() for name in sections}
  wanted = set(asked.only.split(",")) if asked.only else known
  if unknown := wanted - known:
    parser.error(f"--only: no {', '.join(unknown)}; there are {', '.join(sorted(known))}")
  errors = 0
  for part in [asked.part] if asked.part else PARTS:
    if names := [name for name in PARTS[part] if name in wanted]:
      errors += measure(parser, asked, part, names)
  raise SystemExit(1 if errors else 0)


def measure(
  parser: argparse.ArgumentParser, asked: argparse.Namespace, part: int, names: list[str]
) -> int:
  """Run sections of a part; print the result, and write it after each; count the errors."""
  began = time.monotonic()
  with tempfile.TemporaryDirectory() as folder:
    with process(folder, asked.tiny, side="device") as side:
      device = side.wait_ready(120)
    if device["platform"] == "cpu" and not asked.tiny:
      parser.error("JAX finds no GPU here; --tiny tests the code on a CPU")
    run = Run(asked.tiny, asked.turns, device, began + 60 * asked.minutes, folder, {})
    took, errors = {}, 0
    missing = dict.fromkeys(names, f"{asked.minutes:g} minutes were over")
    for name in names:
      before = time.monotonic()
      if not run.is_over():
        try:
          run.found[name] = PARTS[part][name](run)
        except (SideError, ValueError) as e:
          run.found[name] = [{"error": str(e)}]
        del missing[name]
        took[name] = round(time.monotonic() - before, 1)
        for line in run.found[name]:
          print(name, line, file=sys.stderr, flush=True)
      errors = sum("error" in row for rows in run.found.values() for row in rows)
      facts = {
        "part": part,
        "device": device,
        "tiny": run.tiny,
        "seconds": round(time.monotonic() - began),
        "section_seconds": took,
        "sections": run.found,
        "left_out": missing,
        "errors": errors,
        "versions": {n: metadata.version(n) for n in PACKAGES if util.find_spec(n)},
      }
      keep, last = bool(asked.out) or not run.tiny, name == names[-1]
      report(f"accelerator_{part}", keep=keep, folder=asked.out, show=last, **facts)
  return errors


if __name__ == "__main__":
  main()
