"""A plan as `jaxscale plan` stores it, and the files of a run to compare with it."""

import copy
import json

CONFIG = json.loads("""{
  "class": "Config", "seed": 0, "epochs": 1.0, "batch_size": 64, "dtype": "bfloat16",
  "model": {"class": "Transformer", "width": 4096}, "optimizer": {"class": "AdamW", "lr": 3e-4},
  "data": {"class": "TextFiles"}, "exchange": {"class": "AllReduce", "algorithm": "psum"},
  "loss": {"class": "X"}, "phases": {"class": "Phases"}, "log": {"step_report": true},
  "mesh": {"data": -1}, "evaluation": {"every_epochs": 1.0, "batch_size": 8},
  "checkpoint": {"every_epochs": 1.0}
}""")
SECONDS = {"low": 1.4, "expected": 1.0, "high": 0.8}
PARTS = {"matmul": 0.63, "memory": 0.07, "exposed data": 0.2, "stragglers": 0.07, "host": 0.03}
STEP = dict(devices=16, batch_size=64, seconds=SECONDS, memory=40e9, parts=PARTS)


def on(devices, batch_size, seconds):
  """Return the step's prediction for another number of devices."""
  times = {c: seconds * s for c, s in SECONDS.items()}
  more = {"devices": devices, "batch_size": batch_size}
  return STEP | more | {"seconds": times}


PLAN = {
  "chips": "h100-16",
  "config": CONFIG,
  "step": STEP,
  "run": {"steps": 100},
  "strong": [on(8, 64, 1.8), STEP, on(32, 64, 0.6)],
  "weak": [on(8, 32, 0.95), STEP],
  "job": {"hours": {"low": 0.096, "expected": 0.08, "high": 0.072}},
}


def plan_with(**changes):
  """Return a plan with changed values; `step` is merged with the plan's."""
  made = copy.deepcopy(PLAN)
  made["step"] |= changes.pop("step", {})
  made["strong"][1] = made["weak"][1] = made["step"]
  return made | changes


def workdir(path, plan=None, *, step_s=1.0, devices=16, changes=(), done=True):
  """Write the files of a run and its plan; return the workdir."""
  path.mkdir(parents=True)
  derived = dict(num_train=6400, total_steps=100, num_devices=devices)
  derived["phases"] = [{"batch_size": 64, "image_size": None}]
  described = dict(config=CONFIG | dict(changes), derived=derived, versions={}, python="3")
  described |= dict(processes=2, device_kind="NVIDIA H100 80GB HBM3")
  parts = {"perf/compute_s": 0.77, "perf/exposed_s": 0.2, "perf/exposed_share": 0.2}
  lines = [{"step": 0, "time": 1e9, "perf/spread": 0.1} | parts]
  perf = {"perf/examples_per_s": 64 / step_s, "train/loss": 2.0}
  steps = range(10, 101 if done else 61, 10)
  lines += [{"step": s, "time": 1e9 + s * step_s} | perf for s in steps]
  activity = dict(start=1e9 - 60, time=1e9 + 50, step=50, resumed=[0], queued=None, done=False)
  activity["seconds"] = {"starting": 40.0, "compiling": 20.0, "step": 50.0}
  ended = activity | dict(time=1e9 + 110, step=101, done=done)
  ended["seconds"] = activity["seconds"] | {"step": 100.0, "saving": 10.0}
  summary = {"outcome": "done", "loss": 1.0, "program_memory_gb": 44.0}
  texts = {
    "config.json": json.dumps(described),
    "metrics.jsonl": "".join(json.dumps(line) + "\n" for line in lines),
    "activity.jsonl": "".join(json.dumps(x) + "\n" for x in (activity, ended)),
  }
  texts |= {"summary.json": json.dumps(summary)} if done else {}
  texts |= {"plan.json": json.dumps(plan)} if plan is not None else {}
  for name, text in texts.items():
    (path / name).write_text(text)
  return path
