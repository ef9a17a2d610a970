"""Strong or weak scaling: which it is, speed-up, efficiency, and what a law says.

In strong scaling all runs have the same global batch, in weak scaling the same batch
a device. With R(n) examples a second on n devices, in both

    speed-up   S(n) = R(n) / R(b)             b: the smallest number of devices
    efficiency E(n) = S(n) / (n / b)

and the share s of the smallest run that more devices make no faster is fitted, by
least squares, as one number: S = 1 / (s + (1 - s) b/n) by Amdahl (1967,
doi:10.1145/1465482.1465560) for strong, S = n/b - s (n/b - 1) by Gustafson (1988,
doi:10.1145/42411.42415) for weak scaling. It describes what was measured; why it is
so, the step report says.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jaxscale.errors import ConfigError
from jaxscale.launch.measured import Measured

Kind = Literal["strong", "weak", "one size"]

# What may differ within a study: its subject, and what costs a step nothing.
_FREE = (
  "batch_size", "mesh", "accumulate_steps", "seed", "epochs", "target_accuracy",
  "stop_at_target", "input_threads", "evaluation", "checkpoint", "checks", "log",
  "exchange.algorithm", "exchange.dims", "exchange.links",
)  # fmt: skip
# Of those, what a reader of the table is to know.
_TOLD = ("accumulate_steps", "seed", "epochs", "exchange.algorithm", "exchange.dims")


class Row(NamedTuple):
  """A run of a study; None is what cannot be said.

  Attributes:
    run: what was measured.
    speed_up: against the smallest size.
    low: speed-up of the first quartile of the windows.
    high: of the third.
    efficiency: of the speed-up, against that of the devices.
  """

  run: Measured
  speed_up: float | None
  low: float | None
  high: float | None
  efficiency: float | None


class Scaling(NamedTuple):
  """Runs of one config at several sizes.

  Attributes:
    kind: of scaling.
    rows: by devices.
    base: devices that speed-ups are relative to; None: no run has a throughput.
    serial: the fitted share, or None: fewer than two sizes, or it is none between
      0 and 1, where the law says nothing.
    notes: what a reader must know, a line each.
  """

  kind: Kind
  rows: tuple[Row, ...]
  base: int | None
  serial: float | None
  notes: tuple[str, ...]


def compare(runs: Sequence[Measured]) -> Scaling:
  """A study out of its runs.

  Raises:
    ConfigError: they are not one study: other models, data, optimizers, devices, or
      neither the same batch nor the same batch a device.
  """
  if not runs:
    raise ConfigError("no runs to compare, give the names of some")
  runs = sorted(runs, key=lambda r: (r.devices, r.nodes or 0, r.name))
  told = _check_same(runs)
  kind = kind_of(runs)
  with_rate = [r.devices for r in runs if r.rate]
  base = min(with_rate, default=None)
  unit = statistics.median(r.rate for r in runs if r.rate and r.devices == base) \
    if base else None  # fmt: skip
  rows = tuple(_row(run, base, unit) for run in runs)
  points = [(r.run.devices / base, r.speed_up) for r in rows if r.speed_up and base]
  serial = serial_share(kind, points) if kind != "one size" else None
  notes = (*told, *_notes(kind, rows, serial))
  is_share = serial is not None and 0 <= serial <= 1
  return Scaling(kind, rows, base, serial if is_share else None, notes)


def _row(run: Measured, base: int | None, unit: float | None) -> Row:
  if not (run.rate and base and unit):
    return Row(run, None, None, None, None)
  speed_up = run.rate / unit
  low, high = (q / unit for q in run.quartiles) if run.quartiles else (None, None)
  return Row(run, speed_up, low, high, speed_up * base / run.devices)


def kind_of(runs: Sequence[Measured]) -> Kind:
  """Which scaling the batch sizes make it.

  Raises:
    ConfigError: neither.
  """
  if len({r.devices for r in runs}) == 1 and len({r.batch for r in runs}) == 1:
    return "one size"
  if len({r.batch for r in runs}) == 1:
    return "strong"
  if len({r.batch / r.devices for r in runs}) == 1:
    return "weak"
  pairs = ", ".join(f"{r.batch} on {r.devices} ({r.name})" for r in runs)
  raise ConfigError(
    f"global batches of {pairs} devices: neither the same (strong scaling) nor the "
    "same a device (weak); give the runs of one study"
  )


def serial_share(kind: Kind, points: Sequence[tuple[float, float]]) -> float | None:
  """Amdahl's or Gustafson's s, by least squares; below 0 where scaling is better.

  Args:
    kind: of scaling.
    points: (devices, speed-up), both relative to the smallest size.

  Example:
    >>> serial_share("strong", [(1, 1.0), (4, 1 / (0.1 + 0.9 / 4))])
    0.1
    >>> round(serial_share("weak", [(1, 1.0), (4, 3.7)]), 6)
    0.1
  """
  if kind == "strong":  # 1/S - b/n = s (1 - b/n)
    pairs = [(1 - 1 / n, 1 / s - 1 / n) for n, s in points]
  else:  # n/b - S = s (n/b - 1)
    pairs = [(n - 1, n - s) for n, s in points]
  squares = sum(x * x for x, _ in pairs)
  return sum(x * y for x, y in pairs) / squares if squares else None


def law(kind: Kind, serial: float, n: float) -> float:
  """The speed-up that Amdahl or Gustafson gives on n times the smallest size."""
  if kind == "strong":
    return 1 / (serial + (1 - serial) / n)
  return n - serial * (n - 1)


def flat(node: Any, prefix: str = "") -> dict[str, Any]:
  """A tree of settings by dotted name."""
  if not isinstance(node, Mapping):
    return {prefix: node}
  found = {}
  for name, value in node.items():
    found |= flat(value, f"{prefix}.{name}" if prefix else name)
  return found


def _check_same(runs: Sequence[Measured]) -> list[str]:
  """Refuse what is not one study; what may differ and does, as notes."""
  first, *others = runs
  told = {}
  for other in others:
    a, b = flat(first.config), flat(other.config)
    a["training examples"], b["training examples"] = first.num_train, other.num_train
    a["devices"], b["devices"] = first.kind, other.kind or first.kind
    if not first.kind:
      a["devices"] = b["devices"]
    for name in {**a, **b}:
      if (old := a.get(name)) == (new := b.get(name)):
        continue
      if not {name, name.split(".")[0]} & set(_FREE):
        raise ConfigError(
          f"{first.name} and {other.name} differ in {name} ({old!r} and {new!r}), "
          "which makes them no scaling study; give runs of one config"
        )
      if name in _TOLD:
        told[name] = None
  notes = []
  for name in told:
    values = [f"{flat(r.config).get(name)} ({r.name})" for r in runs]
    notes.append(f"{name} is not the same in all: {', '.join(values)}")
  for name in first.versions:
    values = dict.fromkeys(r.versions.get(name) for r in runs)
    if len(values) > 1:
      notes.append(f"{name} is not the same in all: {', '.join(map(str, values))}")
  return notes


def _notes(kind: Kind, rows: Sequence[Row], serial: float | None) -> list[str]:
  notes, runs = [], [row.run for row in rows]
  sizes = len({row.run.devices for row in rows if row.speed_up})
  if serial is not None:
    notes.append(law_text(kind, serial, sizes))
  hosts = {r.hosts for r in runs}
  is_shared = {r.nodes for r in runs} == {1} and len(hosts) == 1 and len(runs) > 1
  if is_shared and all(r.kind == "cpu" for r in runs) and kind != "one size":
    notes.append(
      f"all sizes ran on one machine ({hosts.pop()}), whose processor cores they "
      "shared: this shows what more processes cost, not what more nodes give"
    )
  losses = [r.loss for r in runs]
  alike = {(r.config["seed"], r.config["epochs"]) for r in runs}
  if kind == "strong" and len(alike) == 1 and None not in losses:
    apart = max(x for x in losses if x is not None) - min(
      x for x in losses if x is not None
    )
    notes.append(f"held-out losses differ by at most {apart:.1g}")
  return notes


def law_text(kind: Kind, serial: float, sizes: int) -> str:
  """What the fitted share means, in a line.

  Args:
    kind: of scaling.
    serial: the share.
    sizes: that it was fitted to, the smallest included.
  """
  name = "Amdahl" if kind == "strong" else "Gustafson"
  if serial <= 0:
    return f"{name}: no serial share, it scales as the ideal or better"
  if serial > 1:
    return f"{name}: says nothing here, more devices are slower than the smallest size"
  line = (
    f"{name}, fitted to {sizes} sizes: {serial:.1%} of the smallest size's time gets "
    "no shorter by more devices; "
  )
  if kind == "strong":
    return f"{line}at most {1 / serial:,.1f} times as fast, on however many"
  return f"{line}each one more adds {1 - serial:.1%} of what it could"
