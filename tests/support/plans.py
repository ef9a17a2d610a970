"""A plan as `jaxscale plan` stores it, and a run that follows it or does not."""

import copy
import json

CONFIG = {
  "class": "Config", "model": {"class": "Transformer", "width": 4096},
  "optimizer": {"class": "AdamW", "lr": 3e-4}, "data": {"class": "TextFiles"},
  "exchange": {"class": "AllReduce", "algorithm": "psum"}, "loss": {"class": "X"},
  "phases": {"class": "Phases"}, "log": {"step_report": True}, "seed": 0,
  "epochs": 1.0, "batch_size": 64, "dtype": "bfloat16", "mesh": {"data": -1},
  "evaluation": {"every_epochs": 1.0, "batch_size": 8},
  "checkpoint": {"every_epochs": 1.0},
}  # fmt: skip
SECONDS = {"low": 1.4, "expected": 1.0, "high": 0.8}
STEP = {
  "devices": 16, "nodes": 2, "batch_size": 64, "rows": 4, "seconds": SECONDS,
  "parts": {"matmul": 0.63, "memory": 0.07, "exposed data": 0.2, "stragglers": 0.07,
            "host": 0.03},
  "sent": {"data": 0.2}, "alone": 0.73, "memory": 40e9, "fits": True,
}  # fmt: skip
_CORNERS = {"low": 1.2, "expected": 1.0, "high": 0.9}


def on(devices, batch_size, seconds):
  """The step on other devices."""
  times = {c: seconds * s for c, s in SECONDS.items()}
  more = {"devices": devices, "nodes": max(devices // 8, 1), "batch_size": batch_size}
  return STEP | more | {"rows": batch_size // devices, "seconds": times}


# 0.2 s of what is sent: 3.6 GB at 0.75 x 25 GB/s, and 8 ms of latencies.
PLAN = {
  "chips": "h100-16", "calibrated": False, "compiled_for": ["h100 x 16"],
  "memory": None, "sent": [{"collective": "all-reduce", "axes": "data", "times": 1,
                            "bytes": 3.6e9}],
  "step": STEP, "mfu": 0.4, "strong": [on(8, 64, 1.8), STEP, on(32, 64, 0.6)],
  "weak": [on(8, 32, 0.95), STEP], "skipped": [], "knee": None,
  "run": {"steps": 100, "evaluations": 1, "eval_examples": 9, "saves": 2,
          "state_bytes": 10**10},
  "job": {"train": {c: 100 * s for c, s in SECONDS.items()},
          "evaluate": {c: 5 * s for c, s in _CORNERS.items()}, "save": 10.0,
          "start": {"low": 600.0, "expected": 180.0, "high": 60.0}, "restarts": 0.0,
          "lost": 0.0, "interval": None,
          "hours": {c: 0.08 * s for c, s in _CORNERS.items()}, "limit": 0.2,
          "chip_hours": 1.0, "kwh": None, "price": None},
  "machine": {}, "config": CONFIG,
  "constants": {name: {"value": value, "low": value, "high": value, "kind": "assumed",
                       "source": ""}
                for name, value in (("matmul", 0.6), ("memory", 0.85),
                                    ("network_link", 25e9), ("link_share", 0.75),
                                    ("node_link", 450e9), ("start", 180),
                                    ("per_node", 8), ("peak_bfloat16", 1e15))},
}  # fmt: skip


def plan_with(**changes):
  """A plan with other values: of `step`, those that are given."""
  made = copy.deepcopy(PLAN)
  made["step"] |= changes.pop("step", {})
  made["strong"][1] = made["weak"][1] = made["step"]
  return made | changes


def workdir(path, plan=None, *, step_s=1.0, devices=16, wait=0.0, compute=None,
            exposed=0.2, changes=(), done=True):  # fmt: skip
  """What a run leaves, and its plan."""
  path.mkdir(parents=True)
  derived = {
    "num_train": 6400, "total_steps": 100, "num_devices": devices,
    "phases": [{"batch_size": 64, "image_size": None}],
  }  # fmt: skip
  described = {
    "config": CONFIG | dict(changes), "derived": derived, "versions": {},
    "python": "3", "processes": 2, "device_kind": "NVIDIA H100 80GB HBM3",
  }  # fmt: skip
  lines = [{"step": 0, "perf/compute_s": 0.77 if compute is None else compute,
            "perf/exposed_s": exposed, "perf/exposed_share": 0.2,
            "perf/exposed_noise_s": 0.01, "perf/spread": 0.1, "time": 1e9}]  # fmt: skip
  perf = {"perf/examples_per_s": 64 / step_s, "perf/input_wait": wait}
  perf |= {"perf/step_s": step_s, "perf/tflops_per_device": 400.0, "train/loss": 2.0}
  steps = range(10, 101 if done else 61, 10)
  lines += [{"step": s, "time": 1e9 + s * step_s} | perf for s in steps]
  activity = {"start": 1e9 - 60, "time": 1e9 + 50, "step": 50, "resumed": [0],
              "seconds": {"starting": 40.0, "compiling": 20.0, "step": 50.0},
              "queued": None, "done": False}  # fmt: skip
  ended = activity | {"time": 1e9 + 110, "step": 101, "done": done}
  ended["seconds"] = activity["seconds"] | {"step": 100.0, "saving": 10.0}
  summary = {"outcome": "done", "devices": "16 x NVIDIA H100", "loss": 1.0,
             "program_memory_gb": 44.0, "peak_memory_gb": 50.0}  # fmt: skip
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
