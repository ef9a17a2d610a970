"""MuLoCo against data parallelism: loss, bytes, and a slow worker.

    python benchmarks/muloco.py [--seeds 1] [--workers 4,16] [--no-pairs] [--table]

Trains a small language model on the text that the package carries, 16 epochs at a batch size
of 256 windows of 64 bytes: by Muon with data parallelism, and by MuLoCo (arXiv:2505.23725), which
is Muon inside DiLoCo with the 1-bit or the 2-bit exchange, on K simulated devices of this machine,
each a worker; the 2-bit one also in 3 fragments, which workers take over a step later
(arXiv:2501.18512). Data parallelism is trained on 4 devices, as it computes the same on any
number. The learning rates of data parallelism, and of the 2-bit one at each K, are the best of
three (`RATES`) with the first of `SEEDS`; the others take the latter. The outer optimizer is
`OUTER`: with the momentum of 0.9 that is common for hundreds of steps between synchronizations, a
movement that lasts is multiplied by 0.7 / (1 - 0.9) = 7, which is too much after a few steps.
Bytes are those that a device sends, from the compiled programs.

Then two processes train three epochs by MuLoCo with 2 bits, on a core each: undisturbed; with one
that runs for a fifth of the time from step 20 on (stopped and continued by the benchmark); and the
same with `worker_steps`, so that this one takes a fifth of the steps. Only these measure time. The
rest can run beside other work, such as the same command with other `--workers`, with `--no-pairs`.

A run that is done is a line of benchmarks/results/muloco_runs.jsonl and is not repeated.
`--table` trains nothing, and reports what is there.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from common import free_address, keep_run, report, runs_done

from jaxscale import config as cfg
from jaxscale.errors import EXIT_DONE, one_line_errors

# By the number of workers, whose noise is averaged; 1: data parallelism.
RATES = {1: (0.023, 0.032, 0.045), 4: (0.032, 0.045, 0.064), 16: (0.045, 0.064, 0.09)}
SEEDS = (100, 101, 102)
EVERY = {"muloco": 4, "muloco_2bit": 7, "muloco_streamed": 7}  # steps between synchronizations
EPOCHS, PAIR_EPOCHS = 16, 3
BASE_WORKERS = 4  # on which data parallelism is trained
SLOW_EVERY = 20  # steps between the synchronizations of two processes
OUTER: Any = {"outer_lr": 0.8, "outer_momentum": 0.5}
NAME = "muloco"
CYCLE_S, SHARE = 0.05, 0.2  # of the slow process: the length of a cycle, and of it running
TIMEOUT_S = 3600


def config(kind: str, workers: int, lr: float, seed: int) -> cfg.Config:
  """Return the config of a kind of run: "data_parallel", one of `EVERY`, "even" or "uneven"."""
  sync: Any = cfg.EveryStep()
  epochs = PAIR_EPOCHS if kind in ("even", "uneven") else EPOCHS
  if kind in EVERY:
    streams: Any = {"fragments": 3, "delay_steps": 1} if kind == "muloco_streamed" else {}
    sync = cfg.DiLoCo(sync_every_steps=EVERY[kind], **OUTER, **streams)
  elif kind != "data_parallel":
    steps = (SLOW_EVERY, SLOW_EVERY // 5) if kind == "uneven" else ()
    sync = cfg.DiLoCo(sync_every_steps=SLOW_EVERY, worker_steps=steps, **OUTER)
  exchanges = {"data_parallel": cfg.AllReduce(), "muloco": cfg.OneBit()}
  return cfg.Config(
    model=cfg.Transformer(num_layers=2, width=64, num_heads=4, hidden=192),
    data=cfg.Text(sequence_length=64),
    optimizer=cfg.Muon(lr=lr, b2=0.95, weight_decay=0.1),
    schedule=cfg.Cosine(warmup_epochs=0.3),
    exchange=exchanges.get(kind, cfg.TwoBit()),
    sync=sync,
    batch_size=256,
    epochs=epochs,
    clip_norm=1.0,
    seed=seed,
    mesh=cfg.Mesh(data=workers),
    evaluation=cfg.Evaluation(every_epochs=epochs),
    checkpoint=cfg.Checkpoint(every_epochs=100, keep_last=1, keep_best=0),
    log=cfg.Log(every_steps=SLOW_EVERY, tensorboard=False, plot=False),
  )


def sent_bytes(settings: cfg.Config) -> float:
  """Return the bytes that a device sends per step, on average."""
  from jaxscale import hlo
  from jaxscale.experiment import build

  made = build.experiment(settings)
  table = hlo.collectives(made.lower_train_step().compile(), made.mesh)
  every = getattr(settings.sync, "sync_every_steps", 1)
  parts = [[row for row in table if row.conditional == due] for due in (False, True)]
  always, due = (hlo.total(part).wire_bytes for part in parts)
  if getattr(settings.sync, "fragments", 1) > 1:
    due /= 2  # A further branch, after the last step of the run, sends all fragments again.
  return always + due / every


def child(request: str) -> int:
  """Train in this process, or only compile if there is no seed, and print the result."""
  from jaxscale import cluster

  cluster.initialize()
  from jaxscale.run.fit import fit

  kind, workers, lr, seed, workdir = json.loads(request)
  settings = config(kind, workers, lr, SEEDS[0] if seed is None else seed)
  found: dict[str, Any] = {"date": f"{datetime.date.today()}"}
  if seed is not None:
    _, summary = fit(settings, workdir)
    found["value"] = summary["loss"] / math.log(2)
    # Process 0 records it, whose result is the one that counts.
    found["training_s"] = summary.get("goodput_seconds", {}).get("training")
  if "JAXSCALE_PROCESS_ID" not in os.environ:
    found["sent_bytes"] = sent_bytes(settings)
  print(json.dumps(found), flush=True)
  return EXIT_DONE


@contextlib.contextmanager
def slowed(process: subprocess.Popen | None, started: Path) -> Iterator[None]:
  """Let a process run for `SHARE` of each `CYCLE_S` only, once a file is there.

  At the start, processes wait for each other for at most 30 seconds.
  """
  if process is None:
    yield
    return
  over = threading.Event()

  def cycle():
    while not over.is_set() and not started.exists():
      over.wait(CYCLE_S)
    while not over.is_set() and process.poll() is None:
      process.send_signal(signal.SIGSTOP)
      over.wait(CYCLE_S * (1 - SHARE))
      process.send_signal(signal.SIGCONT)
      over.wait(CYCLE_S * SHARE)

  thread = threading.Thread(target=cycle)
  thread.start()
  try:
    yield
  finally:
    over.set()
    thread.join()


def run(
  args: argparse.Namespace, kind: str, workers: int, lr: float, seed: int | None, slow: bool = False
) -> Any:
  """Return the result of a run, which is trained unless it is done; None: it is not to be."""
  name = kind, workers, lr, seed, slow
  found = next((done for done in runs_done(NAME) if tuple(done["run"]) == name), None)
  if found or args.table:
    return found
  with tempfile.TemporaryDirectory() as folder:
    request = json.dumps([kind, workers, lr, seed, f"{folder}/run"])
    command = [sys.executable, str(Path(__file__)), "--child", request]
    if kind == "data_parallel" or kind in EVERY:
      envs = [{"JAX_NUM_CPU_DEVICES": str(workers)}]
    else:
      group = {"JAXSCALE_COORDINATOR": free_address(), "JAXSCALE_NUM_PROCESSES": str(workers)}
      each = {"JAX_NUM_CPU_DEVICES": "1", **group}
      envs = [each | {"JAXSCALE_PROCESS_ID": str(i)} for i in range(workers)]
    outputs = outputs_of(command, envs, Path(folder, "run/metrics.jsonl"), slow)
  found = {"run": name} | json.loads(outputs[0].splitlines()[-1])
  keep_run(NAME, found)
  return found


def outputs_of(
  command: list[str], envs: list[dict[str, str]], started: Path, slow: bool
) -> list[str]:
  """Run a command with each environment, on a core each if there are several."""
  processes = []
  try:
    for i, env in enumerate(envs):
      core = ["taskset", "-c", str(i % (os.cpu_count() or 1))] if len(envs) > 1 else []
      pipe: Any = {"stdout": subprocess.PIPE, "text": True}
      processes.append(subprocess.Popen([*core, *command], env=os.environ | env, **pipe))
    with slowed(processes[-1] if slow else None, started):
      outputs = [p.communicate(timeout=TIMEOUT_S)[0] for p in processes]
  finally:
    for process in processes:
      process.kill()
  if any(p.returncode for p in processes):
    raise SystemExit(f"{command[-1]}: a process ended with {[p.returncode for p in processes]}")
  return outputs


def best_rate(
  args: argparse.Namespace, kind: str, workers: int
) -> tuple[float | None, dict[str, float]]:
  """Return the rate with the least loss of the tuning seed, and all of them."""
  rates = RATES[1 if kind == "data_parallel" else workers]
  found = {lr: run(args, kind, workers, lr, SEEDS[0]) for lr in rates}
  trials = {lr: x["value"] for lr, x in found.items() if x}
  best = min(trials, key=trials.__getitem__) if len(trials) == len(rates) else None
  return best, {f"{lr:g}": round(v, 4) for lr, v in trials.items()}


def row(label: str, workers: int, lr: float, runs: list[Any], sent: float | None) -> dict[str, Any]:
  """Return the means of a kind's runs."""
  values = [r["value"] for r in runs if r]
  seconds = [r["training_s"] for r in runs if r] if sent is None else []
  return {
    "run": label,
    "workers": workers,
    "lr": lr,
    "bits_per_byte": round(statistics.fmean(values), 4) if values else None,
    "values": [round(v, 4) for v in values],
    "sent_bytes": sent,
    "training_s": round(statistics.fmean(seconds), 1) if seconds else None,
  }


@one_line_errors
def main() -> int:
  parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
  parser.add_argument("--seeds", type=int, default=1, help="at most 3")
  parser.add_argument("--workers", default="4,16", help="of 4 and 16, by commas")
  parser.add_argument("--no-pairs", action="store_true", help="without the pairs of processes")
  parser.add_argument("--table", action="store_true", help="report what is there, train nothing")
  parser.add_argument("--child", help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.child:
    return child(args.child)
  rows, trials, rates = [], {}, []
  lr, trials["data_parallel"] = best_rate(args, "data_parallel", BASE_WORKERS)
  for workers in map(int, args.workers.split(",")):
    best, trials[f"muloco_2bit-{workers}"] = best_rate(args, "muloco_2bit", workers)
    rates.append(best)
    for kind, rate in (("data_parallel", lr), *((kind, best) for kind in EVERY)):
      if rate is not None:  # With --table, before all trials are there.
        trained_on = BASE_WORKERS if kind == "data_parallel" else workers
        runs = [run(args, kind, trained_on, rate, seed) for seed in SEEDS[: args.seeds]]
        compiled = runs[0] if trained_on == workers else run(args, kind, workers, rate, None)
        if compiled:
          rows.append(row(kind, workers, rate, runs, compiled["sent_bytes"]))
  if rates[0] is not None and not args.no_pairs:  # Two workers take the rate of the fewest.
    for kind, slow in (("even", False), ("even", True), ("uneven", True)):
      label = f"2 processes{', one slow' * slow}{', fewer steps' * (kind == 'uneven')}"
      rows.append(row(label, 2, rates[0], [run(args, kind, 2, rates[0], SEEDS[0], slow)], None))
  for r in rows:
    print(f"| {r['run']} | {r['workers']} | {r['bits_per_byte']} | {r['sent_bytes']} | ", end="")
    print(f"{r['training_s']} |")
  report(NAME, keep=args.table, rows=rows, trials=trials, every=EVERY, slow_every=SLOW_EVERY)
  return EXIT_DONE


if __name__ == "__main__":
  sys.exit(main())
