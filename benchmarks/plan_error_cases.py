"""What benchmarks/plan_error.py plans and measures, and one process of it."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

MARK = "@plan "
PROCS = 2
LOOPBACK = "loopback"


class Case(NamedTuple):
  """A training step.

  Attributes:
    model: of MODELS.
    way: of WAYS.
    link: between the processes.
    seen: whether its error was looked at while the model was made.
  """

  model: str
  way: str
  link: str
  seen: bool

  @property
  def name(self) -> str:
    """Of the case."""
    return f"{self.model} {self.way} {self.link}"


CASES = (
  Case("cnn", "plain", LOOPBACK, True),
  Case("text", "fsdp", LOOPBACK, True),
  Case("cnn", "1-bit", "1gbit", True),
  Case("text", "plain", "1gbit", True),
  Case("text", "tensor", "1gbit", True),
  Case("cnn", "buckets", "100mbit", True),
  Case("text", "PowerSGD", "100mbit", True),
  Case("resnet18", "buckets", LOOPBACK, True),
  Case("mlp", "1-bit", LOOPBACK, True),
  Case("wide text", "tensor", LOOPBACK, True),
  Case("resnet18", "plain", "1gbit", True),
  Case("mlp", "PowerSGD", "1gbit", True),
  Case("wide text", "fsdp", "1gbit", True),
  Case("mlp", "plain", "100mbit", True),
  Case("resnet18", "1-bit", "100mbit", True),
  Case("wide text", "buckets", "100mbit", True),
  Case("cnn", "fsdp", LOOPBACK, False),
  Case("text", "buckets", LOOPBACK, False),
  Case("resnet18", "PowerSGD", LOOPBACK, False),
  Case("wide text", "1-bit", "1gbit", False),
  Case("mlp", "fsdp", "100mbit", False),
  Case("wide text", "PowerSGD", "100mbit", False),
)


def config_of(case: Case) -> Any:
  """The config of a case."""
  from jaxscale import config as cfg

  images = cfg.Synthetic(num_examples=256, image_size=32)
  # Model, data, rows of a batch, optimizer.
  models: dict[str, Any] = {
    "cnn": (cfg.CNN(batch_norm=True), images, 64, cfg.SGD(lr=0.1)),
    "mlp": (cfg.MLP(hidden=(768, 512)), images, 128, cfg.SGD(lr=0.1)),
    "resnet18": (
      cfg.ResNet(depth=18, width=32, stem="small"), images, 16, cfg.SGD(lr=0.1),
    ),
    "text": (
      cfg.Transformer(width=128, hidden=384, num_layers=2),
      cfg.Text(sequence_length=128), 16, cfg.AdamW(lr=1e-3),
    ),
    "wide text": (
      cfg.Transformer(width=256, hidden=512, num_layers=3),
      cfg.Text(sequence_length=96), 8, cfg.AdamW(lr=1e-3),
    ),
  }  # fmt: skip
  ways: dict[str, Any] = {
    "plain": {},
    "buckets": {"exchange": cfg.AllReduce(bucket_bytes=2**20)},
    "1-bit": {"exchange": cfg.OneBit()},
    "PowerSGD": {"exchange": cfg.PowerSGD()},
    "fsdp": {"layout": cfg.Layout(shard="fsdp"), "mesh": cfg.Mesh(data=1, fsdp=PROCS)},
    "tensor": {"mesh": cfg.Mesh(data=1, model=PROCS)},
  }  # fmt: skip
  model, data, batch_size, optimizer = models[case.model]
  common: Any = {"schedule": cfg.Cosine(), "epochs": 100}
  return cfg.Config(
    model=model, data=data, batch_size=batch_size, optimizer=optimizer, **common,
    **ways[case.way],
  )  # fmt: skip


def stepper(case: Case) -> Callable[[int], float]:
  """Takes a number of steps and says how long each took; the batch is in place."""
  import jax

  from jaxscale import data
  from jaxscale.experiment.build import experiment

  made = experiment(config_of(case), devices=jax.devices())
  state, step = made.init_state(lambda line: None), made.compile_train_step()
  rows = made.phase.batch_size
  batch = next(data.train_batches(made.train_data, rows, position=0, seed=0))
  placed: dict[str, Any] = {
    name: jax.make_array_from_callback(
      x.shape, made.abstract_batch()[name].sharding, lambda index, x=x: x[index]
    )
    for name, x in batch.items()
  }

  def some(count: int) -> float:
    nonlocal state
    began = time.perf_counter()
    for _ in range(count):
      state, metrics = step(state, placed)
      jax.block_until_ready(metrics)
    return (time.perf_counter() - began) / count

  some(2)
  return some


def seconds_of(case: Case, turns: int, budget_s: float) -> list[float]:
  """Seconds of a step in each turn."""
  from jaxscale import cluster

  some = stepper(case)
  one = max(cluster.gather(some(2)))
  count = max(int(budget_s / turns / one), 2)
  return [some(count) for _ in range(turns)]


def answer(what: Any) -> None:
  print("\n" + MARK + json.dumps(what), flush=True)


def main() -> None:
  """One process: the cases, all of them in the same order, or else the links."""
  request = json.loads(sys.argv[1])
  os.sched_setaffinity(0, {request["core"]})
  from jaxscale import cluster

  with cluster.open_session():
    from jaxscale.planning.calibrate import measure_links

    if not request["cases"]:
      links = measure_links()
      links["tables"] = [vars(t) for t in links["tables"]]
      answer({"links": links})
    for name in request["cases"]:
      case = next(c for c in CASES if c.name == name)
      own = seconds_of(case, request["turns"], request["budget_s"])
      slowest = [max(each) for each in zip(*cluster.gather(own), strict=True)]
      answer({"case": name, "seconds": statistics.median(slowest), "turns": slowest})


if __name__ == "__main__":
  main()
