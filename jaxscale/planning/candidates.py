"""What a search tries: the layouts, micro-batches and exchanges that a config offers.

A layout is a mesh, what is split along it and what is sent; each comes with every
`remat` and number of micro-batches. Only settings that train the same are tried, but
for those that round what is summed (`Layout.sum_in`, `exchange`), which a candidate
names. What costs no time in a plan (`remat="offload"`, `optimizer="host"`) is left
out.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jaxscale import config as cfg

_AXES = ("replica", "data", "fsdp", "stage", "model")
_SHARDS = ("zero1", "zero2", "fsdp")
REMATS = ("none", "dots", "branches", "full")  # from the most kept to the least
_MODELS = ("layers", "layers_and_tokens", "ring", "all_to_all")


class Candidate(NamedTuple):
  """Settings that are tried together, on so many devices.

  Attributes:
    devices: in all.
    batch_size: examples of a step.
    mesh: of the devices, no axis -1.
    layout: what is split along it.
    exchange: of gradients.
    micros: micro-batches of a step.
  """

  devices: int
  batch_size: int
  mesh: cfg.Mesh
  layout: cfg.Layout
  exchange: cfg.Exchange
  micros: int

  @property
  def family(self) -> Candidate:
    """The layout that it is of, whatever is kept and in however many parts."""
    return self._replace(
      layout=dataclasses.replace(self.layout, remat="full"), micros=1
    )

  @property
  def name(self) -> str:
    """The layout in words.

    Example:
      >>> mesh, layout = cfg.Mesh(data=2, fsdp=4), cfg.Layout(shard="zero1")
      >>> Candidate(8, 64, mesh, layout, cfg.AllReduce(), 1).name
      'data 2 x fsdp 4, zero1'
    """
    sizes = [f"{a} {n}" for a in _AXES if (n := getattr(self.mesh, a)) > 1]
    words = [" x ".join(sizes) or "one device"]
    layout = self.layout
    words += [layout.shard] * (layout.shard not in ("none", "fsdp"))
    words += [layout.model.replace("_", " ")] * (layout.model != "layers")
    words += ["sums rounded"] * (layout.sum_in == "dtype")
    words += [layout.schedule] * (self.mesh.stage > 1)
    words += ["in the backward pass"] * (layout.slow_axes == "in_backward")
    exchange = type(self.exchange).__name__
    return ", ".join(words + [exchange] * (exchange != "AllReduce"))

  @property
  def variant(self) -> str:
    """What of it is not its layout, in words."""
    return f"remat {self.layout.remat}, {self.micros} micro-batches"

  def config(self, base: cfg.Config) -> cfg.Config:
    """The run with these settings; an axis that was -1 stays so, for other devices.

    Raises:
      ConfigError: they contradict the rest of it.
    """
    rest = [a for a in _AXES if getattr(base.mesh, a) == -1]
    mesh = {a: -1 for a in rest if a == "data" or getattr(self.mesh, a) > 1}
    return dataclasses.replace(
      base, batch_size=self.batch_size, layout=self.layout,
      mesh=dataclasses.replace(self.mesh, **mesh),
      exchange=self.exchange, accumulate_steps=self.micros,
    )  # fmt: skip


def as_given(config: cfg.Config, devices: int) -> Candidate:
  """The settings of a config itself.

  Raises:
    ConfigError: its mesh does not fit so many devices.
  """
  from jaxscale.mesh import mesh_shape

  mesh = cfg.Mesh(**mesh_shape(devices, **dataclasses.asdict(config.mesh))._asdict())
  layout = config.layout
  if mesh.fsdp == 1:  # by Mesh.fsdp=-1 on one device
    layout = dataclasses.replace(layout, shard="none")
  return Candidate(
    devices, config.batch_size, mesh, layout, config.exchange, config.accumulate_steps
  )


def families(
  config: cfg.Config,
  devices: int,
  batch_size: int,
  exchanges: Sequence[cfg.Exchange],
) -> Iterator[Candidate]:
  """Every layout on so many devices, whether it divides or not.

  Args:
    config: whose model says what can be split.
    devices: in all.
    batch_size: examples of a step.
    exchanges: to try, where one has anything to send.
  """
  splits = [n for n in range(1, devices + 1) if devices % n == 0]
  of_stacks = splits if config.model.is_stack else [1]
  for model, stage, fsdp in itertools.product(of_stacks, of_stacks, splits):
    data, rest = divmod(devices, model * stage * fsdp)
    if rest or data < 1:
      continue
    mesh = cfg.Mesh(data=data, fsdp=fsdp, stage=stage, model=model)
    for layout in _layouts(config, mesh):
      for exchange in exchanges if _sends(mesh, layout) else [cfg.AllReduce()]:
        yield Candidate(devices, batch_size, mesh, layout, exchange, 1)


def _sends(mesh: cfg.Mesh, layout: cfg.Layout) -> bool:
  """Whether an exchange has gradients to sum."""
  if layout.slow_axes == "in_backward":
    return False
  whole = layout.shard in ("none", "zero1")
  return mesh.data * (mesh.fsdp if whole else 1) > 1


def _layouts(config: cfg.Config, mesh: cfg.Mesh) -> Iterator[cfg.Layout]:
  """What can be split along the axes of a mesh."""
  remat: Any = "full" if config.model.is_stack else "none"
  made = dataclasses.replace(config.layout, optimizer="device", remat=remat)
  is_text = config.model.is_stack and config.model.takes_text
  rounds = ["float32", "dtype"] if config.dtype != "float32" else ["float32"]
  for shard in _SHARDS if mesh.fsdp > 1 else ("none",):
    slow = ["after"]
    slow += ["in_backward"] * (shard in ("zero2", "fsdp") and mesh.data > 1)
    for kind in (_MODELS if is_text else _MODELS[:1]) if mesh.model > 1 else ["layers"]:
      sums = rounds if mesh.model > 1 and kind.startswith("layers") else rounds[:1]
      orders = ("gpipe", "1f1b") if mesh.stage > 1 else ("gpipe",)
      for axes, sum_in, order in itertools.product(slow, sums, orders):
        settings: dict[str, Any] = {"shard": shard, "slow_axes": axes, "model": kind}
        settings |= {"sum_in": sum_in, "schedule": order}
        yield dataclasses.replace(made, **settings)


def variants(config: cfg.Config, family: Candidate) -> list[Candidate]:
  """A layout with every remat and number of micro-batches that divides its rows."""
  mesh = family.mesh
  rows, rest = divmod(family.batch_size, mesh.replica * mesh.data * mesh.fsdp)
  if rest:
    return []
  # Statistics of BatchNorm may be those of a micro-batch: it stays as it is.
  keeps = getattr(config.model, "batch_norm", False)
  parts = [config.accumulate_steps] if keeps else [1, *_powers(rows)]
  remats = REMATS if config.model.is_stack else (config.layout.remat,)
  return [
    family._replace(layout=dataclasses.replace(family.layout, remat=remat), micros=n)
    for n in parts
    if rows % n == 0
    for remat in remats
  ]


def _powers(rows: int) -> list[int]:
  """Powers of two, and `rows`, up to one row in a micro-batch."""
  powers = [2**i for i in range(1, rows.bit_length()) if 2**i < rows]
  return [*powers, rows] if rows > 1 else []


def overrides(base: cfg.Config, made: cfg.Config) -> dict[str, str]:
  """The settings in which a candidate's config differs, as the command line has them.

  Example:
    >>> from jaxscale.config.loading import load_config
    >>> base = load_config("configs/text.py")
    >>> made = dataclasses.replace(base, accumulate_steps=2)
    >>> overrides(base, made)
    {'accumulate_steps': '2'}
  """
  found: dict[str, str] = {}
  for name in ("batch_size", "accumulate_steps"):
    if getattr(base, name) != getattr(made, name):
      found[name] = str(getattr(made, name))
  if type(base.exchange) is not type(made.exchange):
    found["exchange"] = type(made.exchange).__name__
  for part in ("mesh", "layout"):
    old, new = getattr(base, part), getattr(made, part)
    for name, value in vars(new).items():
      if getattr(old, name) != value:
        found[f"{part}.{name}"] = str(value)
  return found
