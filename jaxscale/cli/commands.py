"""Table of all commands."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import NamedTuple

from jaxscale.cli.parser import Parser


class Command(NamedTuple):
  """One line of `jaxscale --help`; the module of a command is `jaxscale.cli.NAME`."""

  group: str
  summary: str
  example: str


_LINES = """
models: train: train a config, or resume its run: --config digits --config.optimizer.lr=0.2
models: evaluate: compute the metrics of a run's model, on any data: runs/digits
models: predict: write a run's predictions to a file: runs/digits --data photos --to out.csv
models: generate: generate text with a run's language model: runs/text --prompt "Once"
models: export: write a run's parameters to a file: runs/digits --to digits.safetensors
before a run: describe: print parameters, memory and collectives of a step: --config digits
before a run: plan: predict memory, time and cost on any chips: --config llama_1b --chips h100-16
before a run: lr-find: suggest a learning rate by a short ramp: --config digits --out rates.png
before a run: doctor: check nodes and disks: --workdir runs --config digits
before a run: bench: measure all-reduce algorithms on the devices: --mesh 2x4 --sizes 64KB,16MB
before a run: prepare: prepare a TFDS dataset or build the JPEG decoder: mnist --data-dir data
jobs: submit: submit a run to Slurm, or start it locally: --config digits --nodes 4 --name first
jobs: sweep: submit a run for each combination of settings: --config digits --sweep seed=0,1,2
jobs: scaling: submit a config at several node counts: --config digits --nodes 1,2,4 --name sizes
jobs: status: show the state of submitted runs: --watch
jobs: logs: print the output of a run: -f first
jobs: profile: trace steps of a running run for XProf and Perfetto: first --steps 10
jobs: cancel: save and stop runs: first
jobs: resume: submit stopped runs again: first --nodes 2
studies: report: report the results of runs, and compare sizes: sizes --to sizes
studies: transfer: settings of a large config from a small one's sweep: rates --config digits
studies: batch-study: train to a target at several batch sizes: --config digits --batch-sizes 64,256
"""
COMMANDS = {
  name: Command(group, summary, f"jaxscale {name} {example}")
  for group, name, summary, example in (x.split(": ") for x in _LINES.strip().splitlines())
}
# Commands that ask JAX for devices as soon as they run.
USE_JAX = ("train", "evaluate", "predict", "generate", "describe", "lr-find", "bench")


def load(name: str) -> tuple[ModuleType, Parser]:
  """Return the module of a command and its parser."""
  module = importlib.import_module(f"jaxscale.cli.{name.replace('-', '_')}")
  command = COMMANDS[name]
  parser = Parser(name, (module.__doc__ or command.summary).strip(), command.example)
  module.add_arguments(parser)
  return module, parser


def overview() -> str:
  """Return the page of `jaxscale --help`."""
  lines = ["usage: jaxscale COMMAND [option ...]", ""]
  lines += ["Train neural networks at very large batch, from a laptop to a cluster."]
  for group in dict.fromkeys(c.group for c in COMMANDS.values()):
    lines += ["", f"{group}:"]
    lines += [f"  {n:18}{c.summary}" for n, c in COMMANDS.items() if c.group == group]
  return "\n".join([*lines, "", "`jaxscale COMMAND --help` lists the options of a command."])
