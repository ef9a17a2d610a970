"""From process start to the first step: the first time and again, against the least.

    python benchmarks/startup.py [digits] [resnet50] [text]

The second start finds the programs of the first one in its workdir, and no checkpoint.
The least is what no start can do without: a process with `import jax`, tracing and
lowering the step, loading it and making the state. Both in turns; `ratio` is that
of the medians when the loop begins, of wall time and of the process's own time, which a
busy machine changes less. `first_step_done` is when the first loss has been read, over
the least with one step; `compile_s` is what JAX spent in compiling or loading all
programs until then, by threads that run side by side.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import report

TURNS = 7
# Config, devices, and what makes the run short.
RUNS = {
  "digits": ("configs/digits.py", 1, ["--config.epochs=3"]),
  "resnet50": ("benchmarks/startup_resnet.py", 8, []),
  "text": ("configs/text.py", 1, ["--config.epochs=0.01", "--config.schedule.warmup_epochs=0.001"]),
}
LEAST = """
import json, sys, time
def clocks():
  return time.perf_counter(), time.process_time()
marks = [(time.perf_counter() - time.time() + float(sys.argv.pop(1)), 0.0)]
import jax
marks.append(clocks())
from jaxscale.experiment import build
from jaxscale.config.loading import load_config
overrides = dict(x.removeprefix("--config.").split("=", 1) for x in sys.argv[2:])
e = build.experiment(load_config(sys.argv[1], overrides))
marks.append(clocks())
step = e.lower_train_step()
marks.append(clocks())
step = step.compile()
state = e.init_state()
marks.append(clocks())
from jaxscale import data
batch = next(data.train_batches(e.train_data, e.phase.batch_size))
batch = jax.device_put(batch, e.abstract_batch()[min(batch)].sharding)
jax.block_until_ready(step(state, batch))
marks.append(clocks())
spent = [[b - a for a, b in zip(*pair)] for pair in zip(marks, marks[1:])]
print(json.dumps([spent[0], *spent[2:]]))
"""
RUN = """
import json, os, sys, time
from jax import monitoring
from jaxscale.cli.start import entry
from jaxscale.run import train_phases
from jaxscale.run.reporter import Reporter
compiling, began, train = [], [], train_phases.loop.train
def clocks():
  return [time.time(), time.process_time()]
def first_call(*args, **options):
  began.extend(clocks())
  return train(*args, **options)
def note(name, seconds, **_):
  if name == "/jax/core/compile/backend_compile_duration":
    compiling.append(seconds)
def first(*_):
  with open(path, "w") as file:
    json.dump([*clocks(), sum(compiling), *began], file)
  os._exit(0)
monitoring.register_event_duration_secs_listener(note)
Reporter.trained, path, train_phases.loop.train = first, sys.argv.pop(1), first_call
entry()
"""


def environment(devices: int, **more: str) -> dict[str, str]:
  # Python keeps its bytecode, as it does for users, whatever this shell has set.
  unset = "JAX_COMPILATION_CACHE_DIR", "PYTHONDONTWRITEBYTECODE"
  env = {k: v for k, v in os.environ.items() if k not in unset}
  return env | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)} | more


def least(name: str, workdir: Path) -> list[list[float]]:
  """Return wall and processor seconds of import, lowering, loading, the state and a step."""
  config, devices, short = RUNS[name]
  env = environment(
    devices,
    JAX_COMPILATION_CACHE_DIR=f"{workdir.resolve()}/compiled",
    JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES="",  # as the run has it, for the same keys
  )
  command = [sys.executable, "-c", LEAST, str(time.time()), config, *short]
  done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
  return json.loads(done.stdout)


def first_step(name: str, workdir: Path) -> list[float]:
  """Return wall and processor seconds until the first step is done, and those of compiling.

  Two more values are wall and processor seconds until the loop starts.
  """
  config, devices, short = RUNS[name]
  kept, aside = workdir / "compiled", workdir.with_suffix(".kept")
  if workdir.exists():  # of the start before, only what it compiled is left
    kept.rename(aside)
    shutil.rmtree(workdir)
    workdir.mkdir()
    aside.rename(kept)
  notes = workdir.with_suffix(".json")
  command = [
    *(sys.executable, "-c", RUN, str(notes), "train", "--config", config),
    *("--workdir", str(workdir), "--config.log.every_steps=1", *short),
  ]
  began = time.time()
  subprocess.run(command, env=environment(devices), capture_output=True, check=True)
  ended, processor, compiling, ready, ready_processor = json.loads(notes.read_text())
  return [ended - began, processor, compiling, ready - began, ready_processor]


def measure(name: str) -> dict:
  with tempfile.TemporaryDirectory() as folder:
    workdir = Path(folder, "run")
    cold = first_step(name, workdir)
    least(name, workdir), first_step(name, workdir)  # fill the page cache
    turns = [(least(name, workdir), first_step(name, workdir)) for _ in range(TURNS)]

  def median(values):
    return round(statistics.median(values), 2)

  warm = [median(x) for x in zip(*(again for _, again in turns), strict=True)]
  names = "import_jax", "lower", "load_and_init", "step"
  clocks = "wall_s", "processor_s", "compile_s", "ready_wall_s", "ready_processor_s"

  def floor(clock: int, parts: int) -> float:
    return median(sum(part[clock] for part in found[:parts]) for found, _ in turns)

  return {
    "ratio": round(warm[3] / floor(0, 3), 3),
    "processor_ratio": round(warm[4] / floor(1, 3), 3),
    "first_step_done": round(warm[0] / floor(0, 4), 3),
    "processor_first_step_done": round(warm[1] / floor(1, 4), 3),
    "first_time": dict(zip(clocks, (round(x, 2) for x in cold), strict=True)),
    "again": dict(zip(clocks, warm, strict=True)),
    "least": {
      name: {clock: median(found[i][j] for found, _ in turns) for j, clock in enumerate(clocks[:2])}
      for i, name in enumerate(names)
    },
    "turns": [
      [[[round(x, 2) for x in part] for part in found], [round(x, 2) for x in again]]
      for found, again in turns
    ],
  }


def main() -> None:
  report("startup", runs={name: measure(name) for name in sys.argv[1:] or RUNS})


if __name__ == "__main__":
  main()
