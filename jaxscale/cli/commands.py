"""The table of all commands."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import NamedTuple

from jaxscale.cli.parser import Parser


class Command(NamedTuple):
  """A line of `jaxscale --help`; its module is `jaxscale.cli.NAME`."""

  group: str
  summary: str


COMMANDS = {
  "train": Command("models", "train a config, or resume its run"),
  "generate": Command("models", "print text that a trained language model continues"),
  "export": Command("models", "write a run's parameters as a safetensors file"),
  "describe": Command("before a run", "print memory and collectives of a step"),
  "plan": Command("before a run", "predict memory, time and cost on chips not here"),
  "plot-schedule": Command("before a run", "draw the learning rates of configs"),
  "doctor": Command("before a run", "check nodes, network and disks, or a dataset"),
  "bench": Command("before a run", "time every all-reduce on the devices"),
  "prepare": Command("before a run", "prepare a TFDS dataset or the JPEG decoder"),
  "submit": Command("jobs", "submit a run to Slurm or to this machine"),
  "sweep": Command("jobs", "submit one run for each combination of settings"),
  "scaling": Command("jobs", "submit one config at several numbers of nodes"),
  "status": Command("jobs", "show the state of submitted runs"),
  "logs": Command("jobs", "print what a run has printed"),
  "profile": Command("jobs", "trace steps of a run, and name what takes the time"),
  "cancel": Command("jobs", "stop runs; they save first"),
  "resume": Command("jobs", "submit stopped runs again"),
  "report": Command("studies", "compare runs at several sizes: table and picture"),
  "batch-study": Command("studies", "submit runs at several batch sizes to a target"),
  "completion": Command("shell", "print the tab completion for bash or zsh"),
}
# Those that ask JAX for devices as soon as they run.
USE_JAX = ("train", "generate", "describe", "bench")


def load(name: str) -> tuple[ModuleType, Parser]:
  """The module of a command, and its parser."""
  module = importlib.import_module(f"jaxscale.cli.{name.replace('-', '_')}")
  parser = Parser(name, (module.__doc__ or COMMANDS[name].summary).strip())
  module.add_arguments(parser)
  return module, parser


def overview() -> str:
  """The page of `jaxscale --help`."""
  lines = ["usage: jaxscale COMMAND [option ...]", ""]
  lines += ["Trains neural networks at very large batch, from a laptop to a cluster."]
  for group in dict.fromkeys(c.group for c in COMMANDS.values()):
    lines += ["", f"{group}:"]
    lines += [f"  {n:18}{c.summary}" for n, c in COMMANDS.items() if c.group == group]
  return "\n".join([*lines, "", "`jaxscale COMMAND --help` has the options of each."])
