"""Training on a GPU against PyTorch, and what surrounds the step: one command.

    pip install -e '.[cuda12,others]'    # or cuda13; without `others`: ours alone
    python benchmarks/accelerator.py [--minutes 9] [--only SECTIONS] [--tiny]

A section a model: ResNet-50 in bfloat16 at 224 px, ViT-B/16, a transformer of 1.1
billion parameters, and as many layers of Llama 3 8B's size as fit. Our step and
PyTorch's (torch.compile, channels_last, scaled_dot_product_attention, fused optimizer,
autocast to bfloat16) are processes that live through the section and step in turns on
one GPU, with 45 % of its memory each: neither waits for the other's compilation, and
the clocks of the GPU are the same for both. Then timm's model, or transformers' Llama,
with its library's optimizer takes PyTorch's place. Both sides have a batch of random
numbers on the device; ours are bytes that the step normalises, PyTorch's are float32.

    speed          the other's seconds of a step / ours, median of the turns
    mfu            model FLOPs (forward and backward, without recomputation, causal
                   attention whole) against the published bfloat16 peak; none on CPUs
    compile_s      from nothing to the end of the first step, but for a step
    peak_memory_gb what the allocator gave out at most; on CPUs the process has

Then: our loop around the ResNet's step, the exchanges of gradients on all GPUs here,
the input that has to feed the ResNet, what a save costs, and the tests marked gpu.
Sections are in order of importance, each with a limit; the last ones are left out
where --minutes are over. What was left out, and what failed and why, is in the result.

--tiny has the same code at sizes that a CPU does in a minute, for the tests; it keeps
no result. There torch.compile has the backend aot_eager: C++ would take minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
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

from accelerator_sides import GB, SIZES, TINY, fitting, smaller
from common import report
from turns import Side, SideError

ROOT = Path(__file__).parent.parent
SHARE = 0.45  # of the GPU's memory, for each of two sides
EXCHANGES = ["psum of the tree", "default: buckets of 25 MiB", "1-bit", "PowerSGD-4"]
ORDER = ("resnet50", "layers_8b", "transformer_1b", "vit_b16")
LIBRARIES = {name: "timm" if "side" in SIZES[name] else "transformers" for name in ORDER}
OTHERS = ("torch", "library")
PACKAGES = ("jax", "jaxlib", "torch", "torchvision", "timm", "transformers")


class Run(NamedTuple):
  """Settings and results shared by all sections.

  Attributes:
    tiny: whether the sizes are tiny, to test the code and not the GPU.
    turns: the number of turns of each pair.
    memory: the bytes of a GPU; None without one.
    end: the end of the time, by time.monotonic().
    found: the rows of completed sections, by name.
  """

  tiny: bool
  turns: int
  memory: float | None
  end: float
  found: dict[str, Any]

  @property
  def compile_s(self) -> float:
    """Return the seconds that a side may take until its first steps are done."""
    return 300 if self.tiny else 150

  @property
  def least_s(self) -> float:
    """Return the seconds that must be left to begin another measurement."""
    return 1 if self.tiny else 25

  def left(self, limit_s: float) -> float:
    """Return the time limit for a measurement that may take `limit_s` seconds."""
    return max(min(limit_s, self.end - time.monotonic()), 1.0)


@contextlib.contextmanager
def side(run: Run, share: float = SHARE, **job: Any) -> Iterator[Side]:
  """Start a process of a side, and end it on exit."""
  env = os.environ | {"TORCH_MEMORY_FRACTION": str(share)}
  if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in env:
    env["XLA_CLIENT_MEM_FRACTION"] = str(share)
  if run.tiny:
    env["OMP_NUM_THREADS"] = "1"  # the sides share the cores
  command = [sys.executable, str(ROOT / "benchmarks/accelerator_sides.py")]
  process = Side([*command, json.dumps(job)], env=env)
  try:
    yield process
  finally:
    process.close()


def model(run: Run, name: str) -> list[dict[str, Any]]:
  """Return the rows of a model (ours, PyTorch's, the library's), of a smaller size if needed."""
  size = TINY[name] if run.tiny else fitting(name, SHARE * (run.memory or 80 * GB))
  try:
    return pairs(run, name, size)
  except SideError as e:
    if not is_full(e):
      raise
    return pairs(run, name, smaller(size))


def is_full(error: SideError) -> bool:
  """Return whether a process failed because the GPU's memory was too small."""
  return bool(re.search("RESOURCE_EXHAUSTED|out of memory", str(error), re.I))


def pairs(run: Run, name: str, size: dict[str, Any]) -> list[dict[str, Any]]:
  """Return the rows of a size; our step and the other one run in turns."""
  job = {"name": name, "size": size}
  packages = {"torch": "torch", "library": LIBRARIES[name]}
  with contextlib.ExitStack() as stack:
    our = stack.enter_context(side(run, side="ours", **job))
    early = {}  # on a CPU nothing disturbs what others compile
    for other in OTHERS if run.tiny else ():
      if not left_out(run, packages[other]):
        early[other] = stack.enter_context(side(run, side=other, **job))
    our.wait_ready(run.left(run.compile_s))
    alone = in_turns(run, {"ours": our})
    rows = [row(name, "ours", size, our, our, alone["ours"])]
    if name == "resnet50":
      run.found["loop"] = [loop(run, our)]
    for other in OTHERS:
      package = packages[other]
      found: dict[str, Any] = {}
      if reason := left_out(run, package):
        found["left_out"] = reason
      else:
        try:
          with contextlib.ExitStack() as own:
            their = early.get(other) or own.enter_context(side(run, side=other, **job))
            found = against(run, name, size, our, their, package)
        except SideError as e:
          if other == "torch" and is_full(e):
            raise
          found["error"] = str(e)
      rows.append({"model": name, "side": package} | found)
  return rows


def left_out(run: Run, package: str) -> str | None:
  """Return the reason that a side has no row, or None."""
  if not util.find_spec(package):
    return "not installed"
  too_late = run.end - time.monotonic() < run.least_s
  return "no time was left" if too_late else None


def against(
  run: Run, name: str, size: dict[str, Any], our: Side, their: Side, package: str
) -> dict[str, Any]:
  """Return the row of another side, timed in turns with our step."""
  their.wait_ready(run.left(run.compile_s))
  took = in_turns(run, {"ours": our, package: their})
  ratios = [b / a for a, b in zip(took["ours"], took[package], strict=True)]
  made = row(name, package, size, our, their, took[package])
  speeds = {"speed": statistics.median(ratios), "least": min(ratios)}
  return made | {key: round(value, 3) for key, value in speeds.items()}


def in_turns(run: Run, sides: dict[str, Side]) -> dict[str, list[float]]:
  """Return the wall seconds of each side's step in each turn; the first turn warms up."""
  step_s = sides["ours"].ready["step_s"]
  count = 1 if run.tiny else max(3, min(50, round(0.8 / step_s)))
  took: dict[str, list[float]] = {name: [] for name in sides}
  for turn in range(run.turns + 1):
    for name, each in sides.items():
      _, seconds = each.ask("steps", count, timeout_s=run.left(60))
      if turn:
        took[name].append(seconds)
  return took


def row(
  name: str, who: str, size: dict[str, Any], our: Side, process: Side, seconds: list[float]
) -> dict[str, Any]:
  """Return a row of the table, with FLOPs and peak as our side reports them."""
  step_s = statistics.median(seconds)
  unit, each = ("tokens", size["tokens"]) if "tokens" in size else ("images", 1)
  peak, flops = our.ready["peak_flops"], size["rows"] * our.ready["example_flops"]
  return {
    "model": name,
    "side": who,
    "size": size,
    "step_ms": round(1e3 * step_s, 3),
    f"{unit}_per_s": round(size["rows"] * each / step_s, 2),
    "mfu": round(flops / step_s / peak, 4) if peak else None,
    "peak_memory_gb": round(process.ask("memory", timeout_s=60), 3),
    "compile_s": process.ready["compile_s"],
    "turns_ms": [round(1e3 * s, 3) for s in seconds],
  }


def loop(run: Run, our: Side) -> dict[str, Any]:
  """Compare our loop around a step with the step alone, in turns in one process."""
  count = 2 if run.tiny else max(20, min(200, round(1 / our.ready["step_s"])))
  ratios = []
  for turn in range(run.turns + 1):
    bare, looped = (our.ask(what, count, timeout_s=run.left(60))[1] for what in ("steps", "loop"))
    if turn:
      ratios.append(looped / bare)
  return {"ratio": round(statistics.median(ratios), 4), "steps": count}


def once(run: Run, limit_s: float, **job: Any) -> Any:
  """Return the first answer of a process with a single job."""
  with side(run, share=0.9, **job) as process:
    return process.wait_ready(run.left(limit_s))


def exchange(run: Run) -> list[dict[str, Any]]:
  """Measure the gradient exchanges on all GPUs of this machine."""
  names = EXCHANGES if run.tiny else []
  return once(run, 90, side="exchange", names=names, tiny=run.tiny)


def feed(run: Run) -> list[dict[str, Any]]:
  """Measure our input, also as a share of the rate that the ResNet's step needs."""
  sizes = {"images": 16, "size": 32, "rows": 8, "batches": 2}
  if not run.tiny:
    sizes = {"images": 512, "size": 224, "rows": 256, "batches": 20}
  with tempfile.TemporaryDirectory() as folder:
    found = once(run, 60, side="feed", directory=folder, **sizes)
  steps = [r for r in run.found.get("resnet50", ()) if r["side"] == "ours"]
  if steps:
    found["share_of_need"] = round(found["images_per_s"] / steps[0]["images_per_s"], 3)
  return [found]


def save(run: Run) -> list[dict[str, Any]]:
  """Measure by how much a save delays the steps after it."""
  sizes, steps = ((1,), 3) if run.tiny else ((100, 1000), 50)
  rows = []
  for mb in sizes:
    with tempfile.TemporaryDirectory() as folder:
      rows.append(once(run, 60, side="save", mb=mb, steps=steps, directory=folder))
  return rows


def tests(run: Run) -> list[dict[str, Any]]:
  """Run the tests marked gpu; count how many passed, failed and were skipped."""
  env = dict(os.environ)
  if run.memory is None:
    env["JAXSCALE_GPU_TESTS"] = "cpu"
  with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "tests.xml"
    command = [sys.executable, "-m", "pytest", "--confcutdir=tests/gpu", "tests/gpu"]
    try:
      done = subprocess.run(
        [*command, f"--junitxml={file}"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=run.left(300 if run.tiny else 120),
      )
    except subprocess.TimeoutExpired as e:
      raise SideError(f"not done after {e.timeout:.0f} s") from None
    if not file.exists():
      lines = (done.stderr or done.stdout).strip().splitlines()
      raise SideError(lines[-1] if lines else f"pytest ended with {done.returncode}")
    (suite,) = ElementTree.parse(file).getroot().iter("testsuite")
  counts = {name: int(suite.get(name, 0)) for name in ("failures", "errors", "skipped")}
  total = int(suite.get("tests", 0))
  counts["passed"] = total - sum(counts.values())
  failed = [case.get("name") for case in suite.iter("testcase") if len(case)]
  return [counts | {"not_passed": failed, "on": "cpu" if run.memory is None else "gpu"}]


# In order of importance; the first has the rows of "loop", too.
SECTIONS: dict[str, Callable[[Run], list[dict[str, Any]]]] = {
  **{name: (lambda run, name=name: model(run, name)) for name in ORDER},
  "exchange": exchange,
  "feed": feed,
  "save": save,
  "tests": tests,
}


def gpu_memory() -> float | None:
  """Return the bytes of a GPU from nvidia-smi; None without a GPU or with JAX on the CPU."""
  if os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
    return None
  from jaxscale.jobs.preflight.software import nvidia

  _, gpus = nvidia()
  return min(gpu["total"] for gpu in gpus) if gpus else None


def main() -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
  parser.add_argument("--minutes", type=float, default=9.0, help="at most, of all")
  parser.add_argument("--only", default=",".join(SECTIONS), help="sections, by commas")
  parser.add_argument("--turns", type=int, default=5, help="of each pair")
  parser.add_argument("--tiny", action="store_true", help="to test this on a CPU")
  asked = parser.parse_args()
  wanted = asked.only.split(",")
  if unknown := [name for name in wanted if name not in SECTIONS]:
    parser.error(f"--only: no {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
  memory = gpu_memory()
  if memory is None and not asked.tiny:
    parser.error("there is no GPU here; --tiny tests the code on a CPU")
  if asked.tiny and memory is None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
  began = time.monotonic()
  run = Run(asked.tiny, asked.turns, memory, began + 60 * asked.minutes, {})
  took, missing = {}, {name: "not asked for" for name in SECTIONS if name not in wanted}
  for name in wanted:
    if run.end - time.monotonic() < run.least_s:
      missing[name] = f"{asked.minutes:g} minutes were over"
      continue
    before = time.monotonic()
    try:
      run.found[name] = SECTIONS[name](run)
    except (SideError, ValueError) as e:
      run.found[name] = [{"error": str(e)}]
    took[name] = round(time.monotonic() - before, 1)
    for line in run.found[name]:
      print(name, line, file=sys.stderr, flush=True)
  finish(run, took, missing, time.monotonic() - began)


def finish(run: Run, took: dict[str, float], missing: dict[str, str], seconds: float) -> None:
  """Print the result, and store it if it was measured on a GPU."""
  from jaxscale.jobs.preflight.software import nvidia

  driver, _ = nvidia()
  rows = [r for rows in run.found.values() for r in rows]
  versions = {n: metadata.version(n) for n in PACKAGES if util.find_spec(n)}
  report(
    "accelerator",
    keep=not run.tiny,
    gpu=gpu_name(),
    driver=driver,
    tiny=run.tiny,
    seconds=round(seconds),
    section_seconds=took,
    sections=run.found,
    left_out=missing,
    errors=sum("error" in r for r in rows),
    versions=versions,
  )


def gpu_name() -> str | None:
  """Return the names of the GPUs from their driver, or None."""
  from jaxscale.cluster.detect.fabric import nvidia_models

  return ", ".join(nvidia_models()) or None


if __name__ == "__main__":
  main()
