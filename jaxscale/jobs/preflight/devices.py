"""The check `devices`: devices, XLA flags, the data and the config.

The checks need JAX, so `look` and `fits` run in child processes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxscale.cluster.environment import gpu_problem
from jaxscale.cluster.group import Group
from jaxscale.cluster.rendezvous.handshake import ranks_with_hosts
from jaxscale.config.loading import load_config
from jaxscale.errors import ConfigError
from jaxscale.jobs.preflight.child import ask
from jaxscale.jobs.preflight.finding import Facts, Finding, Results, outliers
from jaxscale.metrics.text import byte_size, grouped, plural


def measure(group: Group, options: Any, facts: Facts) -> dict[str, Any]:
  """Test the devices and the data of this process, in a child process."""
  return ask("devices.look", _config(options))


def _config(options: Any) -> dict[str, Any]:
  chosen = {"config": options.config, "overrides": dict(options.overrides)}
  return chosen | {"trust": options.trust}


def findings(results: Results, group: Group, options: Any, facts: Facts) -> list[Finding]:
  """Return findings on devices, data and the config."""
  result = [*_devices(results, group.hosts), *_data(results, group.hosts)]
  if options.config is None or not all(f.ok for f in result):
    return result
  # Build the experiment of the config on as many devices, simulated on the CPU.
  total = sum(each["count"] for each in results)
  env = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(total), "XLA_FLAGS": ""}
  built = ask("devices.fits", _config(options) | {"workdir": str(options.workdir)}, env)
  facts |= built
  text = f"config {options.config}"
  if error := built.get("error"):
    text += f" on {plural(total, 'device')}: {error}"
    return [*result, Finding(False, text, "change the config, or request other nodes")]
  size = byte_size(built["bytes"])
  text += f" fits {plural(total, 'device')}, its checkpoints have {size}"
  return [*result, Finding(True, text)]


def _devices(results: Results, hosts: Sequence[str]) -> list[Finding]:
  """Return findings on the number, kind and results of devices."""
  wrong = _errors(results, hosts, "error")
  alive = [rank for rank, each in enumerate(results) if "error" not in each]
  if not alive:
    return wrong
  shapes = {r: (results[r]["count"], results[r]["kind"]) for r in alive}
  usual, others = outliers(shapes, hosts)
  for (count, kind), where in others.items():
    text = f"devices: {count} x {kind} in {where}, "
    remedy = "request the same number and kind of devices for every process, e.g. with "
    remedy += "--gpus-per-node and --constraint, or exclude these nodes"
    wrong.append(Finding(False, f"{text}{usual[0]} x {usual[1]} in the others", remedy))
  for rank in alive:
    host, each = hosts[rank], results[rank]
    if failed := each["wrong"]:
      text = f"devices: {host} computes wrong results: {failed[0]}"
      wrong.append(Finding(False, text, f"exclude {host} and report it"))
    if problem := each["gpu_problem"]:
      text, _, remedy = problem.partition("; ")
      wrong.append(Finding(False, f"devices: {host}: {text}", remedy))
  if not wrong:
    where = f" in each of {len(results)} processes" if len(results) > 1 else ""
    wrong = [Finding(True, f"devices: {usual[0]} x {usual[1]}{where}, tested")]
    if flags := os.environ.get("XLA_FLAGS"):
      wrong.append(Finding(True, f"XLA_FLAGS: this jaxlib accepts {flags}"))
  return wrong


def _data(results: Results, hosts: Sequence[str]) -> list[Finding]:
  """Return findings on the data of the config, which must be equal on all hosts."""
  wrong = _errors(results, hosts, "data_error")
  data = {r: tuple(each["data"]) for r, each in enumerate(results) if "data" in each}
  if not data:
    return wrong
  (name, train, validation), others = outliers(data, hosts)
  for (other, *counts), where in others.items():
    text = "data: {} has {:,} + {:,} examples in ".format(other, *counts)
    text += f"{where}, {train:,} + {validation:,} in the others"
    wrong.append(Finding(False, text, "use the same version of the data on every node"))
  return wrong or [Finding(True, f"data: {name}, {train:,} + {validation:,} examples")]


def _errors(results: Results, hosts: Sequence[str], key: str) -> list[Finding]:
  """Return a finding for each distinct text under `key`, with its processes."""
  wrong = []
  ranks = grouped((each[key], rank) for rank, each in enumerate(results) if key in each)
  for text, where in ranks.items():
    who = f"{ranks_with_hosts(where, hosts)}: " if len(results) > 1 else ""
    prefix, remedy = "", "run python -P -c 'import jax; print(jax.devices())' there"
    if key == "data_error":
      prefix, remedy = "data: ", "make it available on every node: jaxscale prepare "
      remedy += "NAME, or a path that all nodes share"
    elif text.startswith("JAX_"):
      text, _, remedy = text.partition("; ")
    elif text.startswith("XLA_FLAGS"):
      remedy = "remove it from XLA_FLAGS, or use a version of jaxlib that has it"
    wrong.append(Finding(False, f"{prefix}{who}{text}", remedy))
  return wrong


def look(config: str | None, overrides: dict[str, str], trust: bool = False) -> dict[str, Any]:
  """Test the devices of this process and open the data of a config.

  Args:
    config: the config as `FILE[:arg]`, or None.
    overrides: overrides of the config, as text by dotted field.
    trust: whether to execute code of a run that others could have written.
  """
  import jax
  import jax.numpy as jnp

  devices = jax.local_devices()
  wrong = []
  for device in devices:
    x = jax.device_put(jnp.arange(256.0).reshape(16, 16), device)
    # Small whole numbers are exact in float32, TF32 and bfloat16 products. Every row has
    # 0, 1, 2, 3 four times: 16 x 16 products of 4 x (0 + 1 + 4 + 9).
    y = jax.jit(lambda x: ((x % 4) @ (x % 4).T).sum())(x)
    if float(y) != 256 * 56:
      wrong.append(f"{device}: {float(y)}")
  kind, platform = devices[0].device_kind, devices[0].platform
  problem = gpu_problem(os.environ, has_failed=True) if platform == "cpu" else ""
  results = {"kind": kind, "count": len(devices), "wrong": wrong, "gpu_problem": problem}
  if config is None:
    return results
  from jaxscale.data import check_readable
  from jaxscale.experiment import build

  try:
    train, validation = build.make_data(load_config(config, overrides, trust=trust))
    for dataset in (train, validation):
      check_readable(dataset)
  except (ConfigError, OSError) as e:
    return results | {"data_error": str(e)}
  numbers = [train.info.name, train.num_examples, validation.num_examples]
  return results | {"data": numbers}


def fits(
  config: str, overrides: dict[str, str], workdir: str, trust: bool = False
) -> dict[str, Any]:
  """Check that a config can run on the simulated devices of this process.

  Args:
    config: the config as `FILE[:arg]`.
    overrides: overrides of the config, as text by dotted field.
    trust: whether to execute code of a run that others could have written.
    workdir: the workdir, from which the run may resume.

  Returns:
    {"bytes": size of a checkpoint, "kept": largest number of checkpoints on disk}, or
    {"error": the reason why it cannot run}.
  """
  from jaxscale.collectives import payload_bytes
  from jaxscale.run.workdir import experiment_in

  try:
    experiment = experiment_in(Path(workdir), load_config(config, overrides, trust=trust))
  except (ConfigError, OSError) as e:
    return {"error": str(e)}
  keep, size = experiment.config.checkpoint, payload_bytes(experiment.abstract_state())
  # The next checkpoint is written before the oldest one is deleted.
  return {"bytes": size, "kept": keep.keep_last + keep.keep_best + 1}
