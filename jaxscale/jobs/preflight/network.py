"""The check `network`: one all-reduce between all processes, timed as by `bench`.

The processes join like those of a run, and sum over all of their devices by the library
that a run uses (NCCL, gloo). An all-reduce is as fast as its slowest link, so its rate shows
that a link is slow, but not which one.
"""

from __future__ import annotations

from typing import Any

from jaxscale.jobs.preflight.child import ask
from jaxscale.jobs.preflight.finding import Facts, Finding, Results, texts_by_process
from jaxscale.jobs.preflight.group import Group
from jaxscale.metrics.text import byte_size, plural, short_time

LEAST = 0.06e9  # bytes/s below which a network is slow: half of gigabit Ethernet
_BYTES = 1 << 24  # of a device's payload
_ROUNDS = 5


def measure(group: Group, options: Any, facts: Facts) -> dict[str, Any] | None:
  """Time an all-reduce; None with one process or after problems with devices."""
  if len(group.hosts) == 1 or not facts.get("has_devices", True):
    return None
  return ask("network.time_sum", {})


def findings(answers: Results, group: Group, options: Any, facts: Facts) -> list[Finding]:
  """Return findings on the results of `time_sum`, which are by rank."""
  hosts = group.hosts
  remedy = "run `jaxscale bench` on fewer of these nodes, with NCCL_DEBUG=INFO on GPUs, "
  remedy += "to find the slow one"
  if errors := texts_by_process(answers, hosts, "error"):
    return [Finding(False, f"network: {who}{text}", remedy) for who, text in errors]
  devices, seconds = answers[0]["devices"], answers[0]["seconds"]
  # Each device sends this many bytes in a ring or torus; no algorithm sends fewer.
  rate = 2 * (1 - 1 / devices) * _BYTES / max(seconds, 1e-9)
  text = f"network: an all-reduce of {byte_size(_BYTES)} over {plural(devices, 'device')}"
  text += f" in {len(hosts)} processes takes {short_time(seconds)}, {byte_size(rate)}/s"
  if rate >= LEAST or len({*hosts}) == 1:
    return [Finding(True, text)]
  return [Finding(False, f"{text}; at least {byte_size(LEAST)}/s is expected", remedy)]


def time_sum() -> dict[str, Any]:
  """Return the number of all devices and the seconds of a sum over them."""
  from jaxscale import cluster

  with cluster.open_session():
    import jax  # only once all processes have joined
    from jax.sharding import AxisType

    from jaxscale.collectives import measurements

    mesh = jax.make_mesh((jax.device_count(),), ("data",), (AxisType.Auto,))
    ((_, plan),) = measurements.measure_algorithms(mesh, ["psum"], [_BYTES], "float32", _ROUNDS)
  return {"devices": mesh.size, "seconds": plan.seconds}
